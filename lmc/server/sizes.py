"""The sizes of chunks, by which a client and the server agree on an arena."""

import re

import msgspec

from lmc.shapes import aligned
from lmc.storage.shares import Shares
from lmc.storage.tiers.record import PARTS_LIMIT, RecordMeta

ITEMS = (1, 2, 4)  # bytes of one number of the KV


class Sizes(msgspec.Struct, frozen=True, tag=True):
    """The second frame of a client: the sizes of its chunks (`lmc.engine.geometry`), which decide on its arena."""

    shares: Shares
    part_bytes: int
    item_bytes: int

    @property
    def possible(self) -> bool:
        """Whether chunks of these sizes can be; a client may send anything."""
        stages, ranks = self.shares.stages, self.shares.ranks
        whole = 0 < len(stages) <= PARTS_LIMIT and min(*stages, ranks, self.part_bytes) > 0
        return whole and self.shares.parts <= PARTS_LIMIT and self.item_bytes in ITEMS

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that a chunk takes."""
        return self.shares.parts * aligned(self.part_bytes)

    def fit(self, meta: RecordMeta) -> bool:
        """Return whether a record fits into a slot."""
        return meta.parts == self.shares.parts and meta.part_bytes <= self.part_bytes

    @property
    def name(self) -> str:
        """All sizes, for the name of a file."""
        stages = ".".join(map(str, self.shares.stages))
        return f"{stages}x{self.shares.ranks}-{self.part_bytes}-{self.item_bytes}"

    @classmethod
    def named(cls, name: str) -> "Sizes | None":
        """Return the sizes in a name, or None if there are none."""
        found = re.fullmatch(r"([\d.]+)x(\d+)-(\d+)-(\d+)", name)
        if not found:
            return None
        stages, ranks, part_bytes, item_bytes = found.groups()
        shares = Shares(tuple(map(int, stages.split("."))), int(ranks))
        return cls(shares, int(part_bytes), int(item_bytes))
