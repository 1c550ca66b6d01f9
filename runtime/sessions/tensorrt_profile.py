"""Which of a plan's optimisation profiles a call runs under."""

from collections.abc import Mapping

from pop_engine.configs.errors import EngineError
from pop_engine.configs.plan_record import PlanRecord, ProfileRecord


def choose_profile(plan: PlanRecord, dims: Mapping[str, int]) -> int:
    """Index of the profile that takes these sizes and is tuned nearest to them.

    Raises EngineError where none takes them: the caller keeps to the engine's limits, so the plan is another's.
    """
    fitting = [idx for idx, profile in enumerate(plan.profiles) if _takes(profile, dims)]
    if not fitting:
        given = ", ".join(f"{name} {size}" for name, size in dims.items())
        raise EngineError(f"{plan.file}: no profile takes {given}; build the engine again")
    return min(fitting, key=lambda idx: _distance(plan.profiles[idx], dims))


def largest_dims(plan: PlanRecord) -> dict[str, int]:
    """The largest size of every dimension, over all profiles."""
    names = {name for profile in plan.profiles for name in profile.dims}
    return {name: max(p.dims[name][2] for p in plan.profiles if name in p.dims) for name in names}


def _takes(profile: ProfileRecord, dims: Mapping[str, int]) -> bool:
    return all(least <= dims[name] <= most for name, (least, _, most) in profile.dims.items())


def _distance(profile: ProfileRecord, dims: Mapping[str, int]) -> int:
    return sum(abs(dims[name] - tuned) for name, (_, tuned, _) in profile.dims.items())
