"""The geometry: the sizes of a model's chunks."""

from dataclasses import dataclass

from lmc.keys import chunk_bounds
from lmc.shapes import KVShape, aligned
from lmc.storage.shares import Shares

# Of a record's header: the metadata, a checksum for each part, and a token in a label, at most.
HEADER_BYTES, CHECKSUM_BYTES, LABEL_BYTES = 1024, 24, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes of a model's chunks."""

    chunk_size: int  # tokens
    shares: Shares  # A chunk has a part for each layer of each tensor-parallel rank.
    part_bytes: int  # in a part of a full exact chunk
    token_bytes: int  # in a part of a document, for each token
    item_bytes: int  # of one number of the KV; codecs need it

    @classmethod
    def of(cls, shape: KVShape, chunk_size: int) -> "Geometry":
        """Return the sizes for a connector that keeps exact chunks as tokens, in the layout of documents."""
        part, token, item = shape.part_bytes(chunk_size), shape.token_bytes, shape.dtype.itemsize
        shares = Shares((shape.layers,))
        return cls(chunk_size=chunk_size, shares=shares, part_bytes=part, token_bytes=token, item_bytes=item)

    @property
    def parts(self) -> int:
        """How many parts a chunk has."""
        return self.shares.parts

    def document_bytes(self, tokens: int) -> int:
        """Return how much a document of so many tokens takes on the disk at most, without a codec."""
        size, header = 0, HEADER_BYTES + CHECKSUM_BYTES * self.parts
        for start, stop in chunk_bounds(tokens, self.chunk_size):
            label = LABEL_BYTES * tokens if stop == tokens else 0  # The last record has all tokens in its label.
            size += aligned(header + label) + self.parts * aligned((stop - start) * self.token_bytes)
        return size
