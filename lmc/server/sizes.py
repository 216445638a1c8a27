"""The sizes of chunks, which select a client's arena in the server."""

import re

import msgspec

from lmc.shapes import aligned
from lmc.storage.shares import Shares
from lmc.storage.tiers.record import PARTS_LIMIT, RecordMeta

ITEM_BYTES = (1, 2, 4)  # bytes of one KV element


class Sizes(msgspec.Struct, frozen=True, tag=True):
    """The second frame of a client: the sizes of its chunks (`lmc.engine.geometry`), which select its arena."""

    shares: Shares
    part_bytes: int
    item_bytes: int

    @property
    def possible(self) -> bool:
        """Whether these sizes are valid; a client may send anything."""
        stages, ranks = self.shares.stages, self.shares.ranks
        whole = 0 < len(stages) <= PARTS_LIMIT and min(*stages, ranks, self.part_bytes) > 0
        return whole and self.shares.parts <= PARTS_LIMIT and self.item_bytes in ITEM_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory for one chunk."""
        return self.shares.parts * aligned(self.part_bytes)

    def fit(self, meta: RecordMeta) -> bool:
        """Return whether a record fits into a slot."""
        return meta.parts == self.shares.parts and meta.part_bytes <= self.part_bytes

    @property
    def name(self) -> str:
        """All sizes as text for a file name."""
        stages = ".".join(map(str, self.shares.stages))
        return f"{stages}x{self.shares.ranks}-{self.part_bytes}-{self.item_bytes}"

    @classmethod
    def named(cls, name: str) -> "Sizes | None":
        """Return the sizes that `name` encodes, or None if the name is invalid."""
        match = re.fullmatch(r"([\d.]+)x(\d+)-(\d+)-(\d+)", name)
        if not match:
            return None
        stages, ranks, part_bytes, item_bytes = match.groups()
        shares = Shares(tuple(map(int, stages.split("."))), int(ranks))
        return cls(shares, int(part_bytes), int(item_bytes))
