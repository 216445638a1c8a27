"""The sizes of the chunks of one model, or of several models whose chunks have equal sizes."""

import re
from dataclasses import dataclass

from lmc.shapes import KVShape, aligned
from lmc.storage.tiers.record import PARTS_LIMIT, RecordMeta
from lmc.storage.worker_parts import Parallelism

ITEMS = (1, 2, 4)  # bytes of one KV element


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The sizes of a chunk in a slot. In a cache server, chunks with the same layout are in one arena."""

    parallelism: Parallelism  # a chunk has one part per layer and tensor-parallel rank
    part_bytes: int  # bytes of one part of a full exact chunk
    item_bytes: int  # bytes per element of the KV, for codecs

    @classmethod
    def of(cls, shape: KVShape, chunk_size: int) -> "ChunkLayout":
        """Return the sizes for a connector that stores exact chunks as token chunks, in the layout of documents."""
        return cls(Parallelism((shape.layers,)), shape.part_bytes(chunk_size), shape.dtype.itemsize)

    @property
    def possible(self) -> bool:
        """Whether these sizes are valid; a client of a cache server may send anything."""
        stages, ranks = self.parallelism.stages, self.parallelism.ranks
        whole = 0 < len(stages) <= PARTS_LIMIT and min(*stages, ranks, self.part_bytes) > 0
        return whole and self.parts <= PARTS_LIMIT and self.item_bytes in ITEMS

    @property
    def parts(self) -> int:
        """Number of parts of a chunk."""
        return self.parallelism.parts

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory for one chunk."""
        return self.parts * aligned(self.part_bytes)

    def fit(self, meta: RecordMeta) -> bool:
        """Return whether a record fits into a slot."""
        return meta.parts == self.parts and meta.part_bytes <= self.part_bytes

    @property
    def name(self) -> str:
        """All sizes as text for a file name."""
        stages = ".".join(map(str, self.parallelism.stages))
        return f"{stages}x{self.parallelism.ranks}-{self.part_bytes}-{self.item_bytes}"

    @classmethod
    def named(cls, name: str) -> "ChunkLayout | None":
        """Return the sizes that `name` encodes, or None if the name is invalid."""
        found = re.fullmatch(r"(\d+(?:\.\d+)*)x(\d+)-(\d+)-(\d+)", name)
        if not found:
            return None
        stages, ranks, part_bytes, item_bytes = found.groups()
        parallelism = Parallelism(tuple(map(int, stages.split("."))), int(ranks))
        layout = cls(parallelism, int(part_bytes), int(item_bytes))
        return layout if layout.possible else None
