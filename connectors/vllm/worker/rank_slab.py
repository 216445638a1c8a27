"""A rank's parts of the slab that the scheduler's process owns."""

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from lmc.connectors.vllm.messages import PageCopy
from lmc.connectors.vllm.vllm_api import get_pp_group, get_tp_group
from lmc.copies import Addresses
from lmc.engine import Piece
from lmc.storage.memory.memory_files import wait_until_unlocked
from lmc.storage.memory.slab import Slab, SlabAddress, Slot

log = logging.getLogger(__name__)


class RankSlab:
    """The parts of slots that belong to this rank's layers."""

    def __init__(self, at: SlabAddress, on_end: Callable[[SlabAddress], object] = lambda _: None) -> None:
        """Map the parts. Raises `StorageError` if the slab cannot be opened.

        A separate thread calls `on_end` when the cache server that owns the slab has ended.
        """
        self.at = at
        self._parts = at.parallelism.worker(get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        self._slab = Slab.attach(at, self._parts)
        if at.owner:
            if torch.cuda.is_available() and not at.page_locked:
                text = "the memory of the cache server is not page-locked, so copies to the GPU are slower"
                log.warning("%s: start `lmc serve` with --page-locked if all of its engines have one model", text)
            threading.Thread(target=_wait_for, args=(at, on_end), name="lmc-server", daemon=True).start()

    def part(self, slot: int, layer: int) -> torch.Tensor:
        """Return the part of a slot for one of this rank's layers: uint8 `[n]`."""
        return self._slab.part(Slot(slot), self._parts.first + layer * self._parts.step)

    def addresses(self, slots: Sequence[int], layer: int) -> Addresses | None:
        """Return the addresses of the parts of slots for one of this rank's layers.

        Returns None if they are not page-locked, so that a GPU cannot access them by itself.
        """
        if not self._slab.locked_whole:
            return None
        return self._slab.addresses(slots, self._parts.first + layer * self._parts.step)

    def needed(self, layer: int) -> int:
        """Return how many parts of a chunk must have arrived so that this layer is complete on all ranks."""
        return self._parts.needed(layer)

    def ready(self, copies: Sequence[PageCopy | Piece]) -> int:
        """Return the smallest number of parts in a slot; `LOST`, which is less than any number, if a chunk is lost."""
        return min((self._slab.ready(Slot(copy.slot), copy.tag) for copy in copies), default=self._slab.parts)


def _wait_for(at: SlabAddress, on_end: Callable[[SlabAddress], object]) -> None:
    if wait_until_unlocked(at.owner):
        on_end(at)
