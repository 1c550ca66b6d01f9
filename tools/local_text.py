"""Collect English prose that lies on this machine into a .jsonl, for calibration and evaluation without a network.

    python -m pop_engine.tools.local_text -o documents.jsonl

Documentation of installed Python packages, of Python's own topics, and whatever folders are given with --folder.
Only paragraphs of running text are taken: no code, tables or lists.
"""

import argparse
import importlib.metadata
import json
import pydoc_data.topics
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pop_engine.configs.errors import UsageError, exit_with_message

_SUFFIXES = (".md", ".rst", ".txt")
_DEFAULT_FOLDERS = (Path("/usr/share/doc"), Path("/usr/share/vim"))
_MIN_PARAGRAPH = 150
_MIN_DOCUMENT = 3000
# Of the characters of running English, this share are letters, spaces and common punctuation.
_MIN_PROSE_SHARE = 0.96
_PROSE = re.compile(r"[A-Za-z ,.;'()-]")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return exit_with_message("local_text", lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="local_text", description="Collect English prose into a .jsonl.")
    parser.add_argument("-o", "--out", required=True, type=Path, help="file to write")
    parser.add_argument("--folder", action="append", type=Path, help="folders to look in (default: documentation)")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    documents: dict[str, str] = {}
    for origin, text in _texts(tuple(arguments.folder or _DEFAULT_FOLDERS)):
        prose = extract_prose(text)
        if len(prose) >= _MIN_DOCUMENT:
            # Copies of one text, and translations that begin alike, count once.
            documents.setdefault(prose[:200], json.dumps({"origin": origin, "text": prose}))
    if not documents:
        raise UsageError("no English prose was found; give --folder")
    arguments.out.write_text("".join(line + "\n" for line in documents.values()), encoding="utf-8")
    print(f"{len(documents)} documents in {arguments.out}")
    return 0


def extract_prose(text: str) -> str:
    """The paragraphs of a text that are running English, joined by blank lines."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraph for paragraph in paragraphs if _is_prose(paragraph))


def _is_prose(paragraph: str) -> bool:
    if len(paragraph) < _MIN_PARAGRAPH or not paragraph.rstrip().endswith((".", ":", ")")):
        return False
    return len(_PROSE.findall(paragraph)) >= _MIN_PROSE_SHARE * len(paragraph)


def _texts(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for name, topic in sorted(pydoc_data.topics.topics.items()):
        yield f"pydoc:{name}", topic
    distributions = {str(found.metadata["Name"]): found for found in importlib.metadata.distributions()}
    for name, distribution in sorted(distributions.items()):
        # The description follows the headers.
        yield f"package:{name}", (distribution.read_text("METADATA") or "").partition("\n\n")[2]
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file()):
            yield str(path), path.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(main())
