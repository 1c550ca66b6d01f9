"""The calibration that a build asks for: from a folder, or made on the spot."""

from pop_engine.builder.analysis.calibrate import CalibrationOptions, calibrate
from pop_engine.builder.analysis.calibration import Calibration, describe_model, load_calibration
from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.export.model import model_dims
from pop_engine.builder.progress import BuildProgress
from pop_engine.configs.build_config import BuildConfig
from pop_engine.configs.prune_plan import PrunePlan


def find_calibration(
    config: BuildConfig, checkpoint: Checkpoint, plan: PrunePlan, progress: BuildProgress
) -> Calibration | None:
    """None where the build asks for none.

    Raises UsageError where the folder's calibration is for another model or tail, and what `calibrate` raises.
    """
    if config.calibrate is not None:
        return calibrate(checkpoint, plan, CalibrationOptions(config.calibrate), progress)
    if config.calibration is None:
        return None
    calibration = load_calibration(config.calibration)
    described = describe_model(checkpoint, model_dims(checkpoint.hf_config), plan)
    calibration.require(described, f"--calibration {config.calibration}")
    return calibration
