"""What a build does beside the text: facts about images, and the files of their processor."""

import shutil
from pathlib import Path

from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.export.families.registry import vision_family
from pop_engine.configs.errors import UsageError
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.vision import ImageFacts

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def find_image_facts(checkpoint: Checkpoint, plan: PrunePlan) -> ImageFacts | None:
    """How the model takes images, or None where it takes none.

    Raises UsageError where its processor is not supported, or the tail begins among the layers that DeepStack adds
    image features to: a pruned layer has no output to add them to.
    """
    config = checkpoint.hf_config
    family = vision_family(config)
    if family is None:
        return None
    facts = family.image_facts(config, checkpoint.processor_folder)
    num_deepstack = facts.inputs.num_deepstack
    if plan.num_trunk_layers < num_deepstack:
        raise UsageError(
            f"--tail-layers {plan.num_tail_layers}: image features are added after each of the first {num_deepstack} "
            f"layers (DeepStack), which must not be in the tail; "
            f"give {plan.num_hidden_layers - num_deepstack} or less"
        )
    return facts


def save_processor(checkpoint: Checkpoint, directory: Path) -> tuple[str, ...]:
    """Copy the image processor's files into the engine directory; returns their names."""
    folder = checkpoint.processor_folder
    if folder is None or vision_family(checkpoint.hf_config) is None:
        return ()
    found = tuple(name for name in _PROCESSOR_FILES if (folder / name).is_file())
    for name in found:
        shutil.copyfile(folder / name, directory / name)
    return found
