"""The legend of tensor dimensions, and the byte sizes of a model's KV.

L  layers            K  2: key, value      T  tokens
H  KV heads          D  head dim           B  pages          P  tokens a page
Q  query heads       E  hidden size        R  rotated dims   V  vocabulary
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The command line imports the units of this module, and starts faster without torch.
    import torch

KV = 2  # K: a key and a value
ALIGN = 4096  # bytes; direct I/O requires multiples of this for addresses, offsets and sizes
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def aligned(size: int) -> int:
    """Return `size` in bytes, rounded up to whole blocks of direct I/O."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The shape of one token's KV in one model, per rank."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: "torch.dtype"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return KV * self.kv_heads * self.head_dim * self.dtype.itemsize

    def part_bytes(self, tokens: int) -> int:
        """Return the bytes of a chunk's part: `tokens` tokens in one layer, `[K, T, H, D]`."""
        return tokens * self.token_bytes

    def part(self, raw: "torch.Tensor", tokens: int) -> "torch.Tensor":
        """Return a part's bytes as a tensor without a copy: uint8 `[n]` -> `[K, T, H, D]`."""
        return raw[: self.part_bytes(tokens)].view(self.dtype).view(KV, tokens, self.kv_heads, self.head_dim)
