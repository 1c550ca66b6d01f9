"""The handoff: a pruned prefill, the boundary token through the full model, then decode, over one KV cache."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.io_contract import Boundary
from pop_engine.runtime.kv_cache import SlotRange, Slots
from pop_engine.runtime.prompt_rows import PromptRows
from pop_engine.runtime.sessions.session import ImageRows, Session


def prefill(
    session: Session,
    slots: Slots,
    slot: int,
    prompt: PromptRows,
    boundary: Boundary,
    boundary_window: int,
    max_prefill_len: int,
) -> NDArray[np.float32]:
    """Run a prompt into a slot, chunk by chunk; returns the logits [vocab_size] of its last token.

    Only the last `boundary_window` tokens (1 in the paper) go through the tail in full: in the calls that their
    chunks make anyway (one-pass), or as the first decode step (two-step, the paper's form). Tokens before them, an
    image's too, write their K and V alone. A window may span chunks: each of its rows sees the same keys wherever
    the cut is.
    """
    token_ids = prompt.token_ids
    slots.check_room(slot, len(token_ids))
    num_context = max(len(token_ids) - boundary_window, 0)
    num_pruned = len(token_ids) if boundary == "one-pass" else prompt.cut_before(num_context)
    pruned = prompt.chunks(0, num_pruned, max_prefill_len)
    full = prompt.chunks(num_pruned, len(token_ids), max_prefill_len)
    logits = np.empty((0, 0), np.float32)
    for rows in pruned:
        num_boundary = min(max(rows.stop - num_context, 0), rows.stop - rows.start)
        images = prompt.image_rows(rows)
        logits = session.prefill(slot, token_ids[rows], int(slots.lengths[slot]), num_boundary, images)
        slots.lengths[slot] += rows.stop - rows.start
    for rows in full:
        images = prompt.image_rows(rows)
        logits = session.decode(SlotRange(slot, 1), token_ids[None, rows], slots.lengths[slot : slot + 1], images)[0]
        slots.lengths[slot] += rows.stop - rows.start
    slots.rope_deltas[slot] = prompt.next_position - slots.lengths[slot]
    last: NDArray[np.float32] = logits[-1]
    return last


def decode_step(
    session: Session, slots: Slots, step_slots: Sequence[int], token_ids: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float32]:
    """Run one new token per slot through the full model; returns logits [len(step_slots), vocab_size]."""
    for slot in step_slots:
        slots.check_room(slot, 1)
    token_by_slot = dict(zip(step_slots, map(int, token_ids), strict=True))
    ranges = slots.covering(list(step_slots))
    found = [_decode_range(session, slots, covering, token_by_slot) for covering in ranges]
    for slot in step_slots:
        slots.lengths[slot] += 1
    # Rows in the order of the slots, without a copy where the one call has them so already.
    logits = found[0] if len(found) == 1 else np.concatenate(found)
    order = [slot for covering in ranges for slot in covering.members]
    if order == list(step_slots):
        return logits
    return logits[[order.index(slot) for slot in step_slots]]


def _decode_range(
    session: Session, slots: Slots, covering: SlotRange, token_by_slot: dict[int, int]
) -> NDArray[np.float32]:
    """One call over a range of slots. Bridged slots get token 0, which their own next token overwrites."""
    token_ids = np.array([[token_by_slot.get(slot, 0)] for slot in covering.members], np.int64)
    members = slice(covering.first, covering.first + covering.count)
    lengths, deltas = slots.lengths[members], slots.rope_deltas[members]
    images = ImageRows(positions=(lengths + deltas)[None, :, None]) if deltas.any() else None
    logits = session.decode(covering, token_ids, lengths, images)
    last: NDArray[np.float32] = logits[:, 0]
    return last
