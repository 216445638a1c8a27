"""Pending transfers: reserved slots that workers are filling. Chunks become visible when every rank has reported."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmc.keys import RecordKind
from lmc.storage.contract import ChunkStore, Reservation


class Done(Protocol):
    """A function that is called when every rank has ended a job."""

    def __call__(self, *, failed: bool) -> None:
        """Return the engine's blocks; `failed` means that their content is invalid."""


@dataclass(slots=True)
class Transfer:
    """Slots that one job of the workers fills."""

    slots: list[Reservation]
    done: "Done"  # returns the engine's blocks
    ranks: int = 0  # number of ranks that have reported
    failed: bool = False


class PendingTransfers:
    """All slots that workers are filling now."""

    def __init__(self, ranks: int, store: ChunkStore) -> None:
        self._ranks, self._store, self._last = ranks, store, 0
        self.under_way: dict[int, Transfer] = {}
        self.stored: Counter[str] = Counter()  # numbers of stored chunks, tokens and documents

    def begin(self, slots: list[Reservation], done: Done) -> int:
        """Record a job that fills `slots`, and return its number, with which the workers will report."""
        self._last += 1
        self.under_way[self._last] = Transfer(slots, done)
        return self._last

    def report(self, done: dict[int, int], failed: set[int]) -> None:
        """Count the ranks that have ended jobs. After the last rank, chunks become visible, or slots are returned."""
        for job in failed & self.under_way.keys():
            self.under_way[job].failed = True
        ended = []
        for job in list(done):
            ranks = done.pop(job)  # A report that is read again after an error is not counted twice.
            transfer = self.under_way.get(job)
            if transfer is None:
                continue
            transfer.ranks += ranks
            if transfer.ranks >= self._ranks:
                ended.append(self.under_way.pop(job))
        self._end(ended)

    def fail_all(self) -> None:
        """Mark all transfers under way as failed, so that their chunks are discarded."""
        for transfer in self.under_way.values():
            transfer.failed = True

    def drop_all(self) -> None:
        """Return all slots at shutdown, when workers no longer report."""
        self.fail_all()
        self._end(list(self.under_way.values()))
        self.under_way.clear()

    def _end(self, transfers: Sequence[Transfer]) -> None:
        filled = [slot for transfer in transfers for slot in transfer.slots if not transfer.failed]
        try:
            self._store.commit(filled)
            for slot in filled:
                self.stored["chunks"] += 1
                self.stored["tokens"] += slot.meta.tokens
                # Only the last chunk of a document has a label: the document's tokens.
                self.stored["documents"] += slot.meta.kind is RecordKind.DOCUMENT and bool(slot.meta.label)
            for transfer in transfers:
                for slot in transfer.slots if transfer.failed else ():
                    self._store.abort(slot)
        finally:  # The engine's blocks are returned even if the store raises an error.
            for transfer in transfers:
                transfer.done(failed=transfer.failed)
