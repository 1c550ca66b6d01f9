"""Continuous batching: prefill into a free slot as soon as there is one, decode all busy slots together."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pop_engine.runtime.sequence import Generation, Piece, Sequence


class SlotEngine(Protocol):
    """The part of an Engine that a scheduler drives."""

    @property
    def num_free_slots(self) -> int:
        """Slots that can be allocated."""

    def allocate_slot(self) -> int:
        """Take a slot."""

    def free_slot(self, slot: int) -> None:
        """Give a slot back."""

    def prefill(self, slot: int, token_ids: TokenSequence[int]) -> NDArray[np.float32]:
        """Logits after a prompt."""

    def decode_step(self, slots: list[int], token_ids: list[int]) -> NDArray[np.float32]:
        """Logits after one more token in each slot."""


@dataclass(frozen=True)
class Event:
    """A step of one sequence, by the index it was added under; with the result once it is finished."""

    index: int
    piece: Piece
    result: Generation | None


class Scheduler:
    """Runs any number of sequences over the engine's slots. Slots are given back however the run ends."""

    def __init__(self, engine: SlotEngine) -> None:
        self._engine = engine
        self._waiting: deque[tuple[int, Sequence]] = deque()
        self._busy: dict[int, tuple[int, Sequence]] = {}

    def add(self, index: int, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.append((index, sequence))

    def run(self) -> Iterator[Event]:
        """Yield events until every sequence is finished."""
        try:
            while self._waiting or self._busy:
                yield from self.step()
        finally:
            for slot in self._busy:
                self._engine.free_slot(slot)
            self._busy.clear()

    def step(self) -> Iterator[Event]:
        """Prefill one waiting sequence if a slot is free; otherwise decode one token of every busy one."""
        # With none busy there is nothing to wait for: allocate_slot then says that others hold every slot.
        if self._waiting and (self._engine.num_free_slots or not self._busy):
            index, sequence = self._waiting.popleft()
            slot = self._engine.allocate_slot()
            self._busy[slot] = (index, sequence)
            yield self._accept(slot, self._engine.prefill(slot, sequence.prompt_token_ids))
            return
        slots = list(self._busy)
        logits = self._engine.decode_step(slots, [self._busy[slot][1].last_token_id for slot in slots])
        for slot, row in zip(slots, logits, strict=True):
            yield self._accept(slot, row)

    def _accept(self, slot: int, logits: NDArray[np.float32]) -> Event:
        index, sequence = self._busy[slot]
        piece = sequence.accept(logits)
        if sequence.finish_reason is None:
            return Event(index, piece, None)
        del self._busy[slot]
        self._engine.free_slot(slot)
        return Event(index, piece, sequence.result())
