"""The geometry: the sizes of a model's chunks."""

from dataclasses import dataclass

from lmc.keys import chunk_bounds
from lmc.shapes import KVShape, aligned
from lmc.storage.shares import Shares

# Upper bounds for a record's header: its metadata, one checksum per part, and one token in its label.
HEADER_BYTES, CHECKSUM_BYTES, LABEL_BYTES = 1024, 24, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes of a model's chunks."""

    chunk_size: int  # tokens
    shares: Shares  # a chunk has one part per layer and tensor-parallel rank
    part_bytes: int  # bytes of one part of a full exact chunk
    token_bytes: int  # bytes per token in one part of a document's chunk
    item_bytes: int  # bytes per element of the KV, for codecs

    @classmethod
    def of(cls, shape: KVShape, chunk_size: int) -> "Geometry":
        """Return the sizes for a connector that stores exact chunks as token chunks, in the layout of documents."""
        part, token, item = shape.part_bytes(chunk_size), shape.token_bytes, shape.dtype.itemsize
        shares = Shares((shape.layers,))
        return cls(chunk_size=chunk_size, shares=shares, part_bytes=part, token_bytes=token, item_bytes=item)

    @property
    def parts(self) -> int:
        """Number of parts of a chunk."""
        return self.shares.parts

    def document_bytes(self, tokens: int) -> int:
        """Return the maximum number of bytes that a document of `tokens` tokens takes on disk, without a codec."""
        size, header = 0, HEADER_BYTES + CHECKSUM_BYTES * self.parts
        for start, stop in chunk_bounds(tokens, self.chunk_size):
            label = LABEL_BYTES * tokens if stop == tokens else 0  # The last record's label holds all tokens.
            size += aligned(header + label) + self.parts * aligned((stop - start) * self.token_bytes)
        return size
