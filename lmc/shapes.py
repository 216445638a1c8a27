"""The legend of tensor dimensions, and the byte sizes of a model's KV.

L  layers            K  2: key, value      T  tokens
H  KV heads          D  head dim           B  pages          P  tokens a page
Q  query heads       E  hidden size        R  rotated dims   V  vocabulary

Values have the same head dim D as keys, except in models with latent attention (MLA).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The command line imports the units of this module, and starts faster without torch.
    import torch

KV = 2  # K: a key and a value
ALIGN = 4096  # bytes; direct I/O requires multiples of this for addresses, offsets and sizes
EVERY = slice(None)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def aligned(size: int) -> int:
    """Return `size` in bytes, rounded up to whole blocks of direct I/O."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The shape of one token's KV in one model, per rank."""

    layers: int
    kv_heads: int
    head_dim: int  # of keys
    value_dim: int = 0  # of values; by default that of keys
    dtype: "torch.dtype"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    def part_bytes(self, tokens: int) -> int:
        """Return the bytes of a chunk's part: the keys of `tokens` tokens in one layer, and then their values."""
        return tokens * self.token_bytes

    def part(self, raw: "torch.Tensor", tokens: int, rows: slice = EVERY) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return keys and values `[T, H, D]` of a part of `tokens` tokens, uint8 `[n]`, without a copy.

        `rows` selects some of the tokens.
        """
        numbers = raw[: self.part_bytes(tokens)].view(self.dtype)
        halves = numbers.split([tokens * self.kv_heads * dim for dim in self.dims])
        keys, values = (half.view(tokens, self.kv_heads, -1)[rows] for half in halves)
        return keys, values

    @property
    def row_bytes(self) -> tuple[int, int]:
        """The bytes of the key and of the value of a token, in all KV heads."""
        key, value = (self.kv_heads * dim * self.dtype.itemsize for dim in self.dims)
        return key, value

    @property
    def dims(self) -> tuple[int, int]:
        """The head dims of keys and of values."""
        return self.head_dim, self.value_dim

    def empty(self, tokens: int, device: "torch.device") -> "tuple[torch.Tensor, torch.Tensor]":
        """Return uninitialized memory for keys and values `[T, H, D]`."""
        import torch

        keys, values = (torch.empty(tokens, self.kv_heads, dim, dtype=self.dtype, device=device) for dim in self.dims)
        return keys, values
