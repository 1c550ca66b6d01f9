"""`python -m pop_engine.runtime.replay`: run given tokens through an engine and write the logits down.

This is how a builder checks what it built without importing the runtime: as a process, on the engine directory.
The JSON file holds `prompt` and `continuation`, lists of token ids; where it holds `images`, paths, the prompt has one
token for each, and where it holds `features`, a path, the first image's features are written there.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from pop_engine.configs.errors import exit_with_message
from pop_engine.configs.manifest import MANIFEST_NAME
from pop_engine.runtime.engine import Engine


def main() -> int:
    """Prefill `prompt`, then decode the tokens of `continuation` one by one, whatever the logits say."""
    parser = argparse.ArgumentParser(prog="pop_engine.runtime.replay", description=main.__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument(
        "tokens",
        type=Path,
        help='JSON file: {"prompt": [ids], "continuation": [ids]}, and "images" and "features" with images',
    )
    parser.add_argument("logits", type=Path, help="file to write: [1 + len(continuation), vocab_size] as .npy")
    parser.add_argument("--manifest", default=MANIFEST_NAME, help="name of the manifest in the engine directory")
    arguments = parser.parse_args()
    return exit_with_message(
        "replay", lambda: _replay(arguments.engine, arguments.tokens, arguments.logits, arguments.manifest)
    )


def _replay(directory: Path, tokens: Path, logits: Path, manifest_name: str) -> int:
    given = json.loads(tokens.read_text(encoding="utf-8"))
    with Engine.load(directory, manifest_name=manifest_name) as engine:
        slot = engine.allocate_slot()
        images = [Path(path) for path in given.get("images", [])]
        rows = [engine.prefill(slot, engine.encode_images(given["prompt"], images))]
        rows += [engine.decode_step([slot], [token])[0] for token in given["continuation"]]
        if "features" in given:
            np.save(given["features"], engine.image_features(images[0]))
    np.save(logits, np.stack(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
