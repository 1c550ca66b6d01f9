"""The shapes that a plan is built and tuned for."""

from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import Binding
from pop_engine.configs.manifest import Limits
from pop_engine.configs.plan_record import ProfileRecord

# Tokens of the image that a vision plan is tuned for: about a million pixels.
_TUNED_IMAGE_TOKENS = 1024
# New tokens a decode call may bring beside the usual one: what speculative decoding asks for.
MAX_FEW_TOKENS = 8

Range = tuple[int, int, int]


def profiles(job: PlanJob) -> tuple[ProfileRecord, ...]:
    """A prefill plan has one profile: one slot, any chunk, tuned for a whole one. A decode plan has two.

    A single plan has one profile too, because each would bring its own copy of packed weights; it takes all slots,
    for it decodes as well. Both decode profiles take 1 to max_batch_size slots and are tuned for one; they differ in
    the new tokens: one, or a few. A vision plan takes one image, of up to as many tokens as a sequence. Raises
    EngineError where the contract has a dimension that no range is known for.
    """
    limits = job.limits
    if job.phase == "vision":
        num_tokens = (1, min(_TUNED_IMAGE_TOKENS, limits.max_seq_len), limits.max_seq_len)
        least, tuned, largest = (job.patches_per_token * count for count in num_tokens)
        return (ProfileRecord("image", _declared(job, {io.NUM_PATCHES: (least, tuned, largest)})),)
    batch = (1, 1, limits.max_batch_size)
    if job.phase == "prefill":
        slots = batch if job.options.engine_layout == "single" else (1, 1, 1)
        return (ProfileRecord("chunk", _declared(job, {io.BATCH: slots, **_row_dims(limits)})),)
    few = min(MAX_FEW_TOKENS, limits.max_seq_len)
    found = [ProfileRecord("one-token", _declared(job, {io.BATCH: batch, io.SEQ: (1, 1, 1)}))]
    if few > 1:
        found.append(ProfileRecord("few-tokens", _declared(job, {io.BATCH: batch, io.SEQ: (2, max(2, few // 2), few)})))
    return tuple(found)


def binding_range(binding: Binding, profile: ProfileRecord) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A binding's least, tuned and largest shape."""
    ranges = [profile.dims[dim] if isinstance(dim, str) else (dim, dim, dim) for dim in binding.shape]
    least, tuned, largest = (tuple(size[which] for size in ranges) for which in range(3))
    return least, tuned, largest


def _row_dims(limits: Limits) -> dict[str, Range]:
    chunk = limits.max_prefill_len
    # A chunk that another follows has all its rows as context rows, and one more is written behind them: see
    # io_contract.prefill_contract. So it is never as long as the cache.
    context = min(chunk, limits.max_seq_len - 1)
    return {io.SEQ: (1, chunk, chunk), io.NUM_CONTEXT: (0, max(chunk - 1, 0), context)}


def _declared(job: PlanJob, dims: dict[str, Range]) -> dict[str, Range]:
    """The ranges of the dimensions that the contract has."""
    names = {dim for binding in job.contract.inputs for dim in binding.shape if isinstance(dim, str)}
    unknown = sorted(names - dims.keys())
    if unknown:
        raise EngineError(f"{job.out.name}: TensorRT needs a range for dimension {unknown[0]}, and none is known")
    return {name: size for name, size in dims.items() if name in names}
