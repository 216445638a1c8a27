"""Keys and values in pages, and canvases over them, for the tests of the kernels."""

import torch

from lmc.blend.canvas import Canvas, Paged, dense
from lmc.blend.rope import KeyRotation

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}  # The interpreter computes products of bfloat16 wrongly.
# Memory orders are handled before numbers are read, so one is enough for the other type of numbers.
LAYOUTS = [(torch.float32, "NHD"), (torch.float32, "HND"), (torch.float32, "apart"), (torch.float16, "NHD")]
FREQUENCIES = 0.7 ** torch.arange(64)


def pages_of(heads: int, dim: int, size: int, tokens: int, dtype: torch.dtype, layout: str = "NHD") -> Paged:
    """Random pages; the blocks of the prompt are in no order.

    vLLM's backends have keys and values side by side, with tokens before heads (NHD) or behind them (HND). A canvas may
    have them `apart`, and each in an order of its own.
    """
    used = -(-tokens // size)
    blocks = used + 3
    if layout == "NHD":
        cache = torch.randn(blocks, size, heads, 2 * dim).to(dtype).transpose(1, 2)
    else:
        cache = torch.randn(blocks, heads, size, 2 * dim).to(dtype)
    keys, values = cache.split(dim, dim=-1)
    if layout == "apart":
        keys, values = keys.contiguous(), values.transpose(1, 2).contiguous().transpose(1, 2)
    table = torch.randperm(blocks)[:used].flip(0).to(torch.int32)
    return Paged(keys, values, table)


def latent_pages(dim: int, latent: int, size: int, tokens: int, dtype: torch.dtype, heads: int = 1) -> Paged:
    """Random pages as vLLM has them for MLA: a token has a latent vector and, after it, its rotated key.

    MLA has one head. With several, these are pages of heads whose values have another dim than their keys.
    """
    both = pages_of(heads, dim + latent, size, tokens, dtype).keys
    return Paged(both[..., latent:], both[..., :latent], torch.arange(-(-tokens // size), dtype=torch.int32).flip(0))


def slots_of(pages: Paged, positions: torch.Tensor) -> torch.Tensor:
    """Where the tokens at these positions lie."""
    size = pages.keys.shape[2]
    return pages.table[positions // size].long() * size + positions % size


def as_dense(pages: Paged, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies `[H, N, D]` of the first tokens."""
    keys, values = (one[:, :tokens].clone() for one in dense(pages))
    return keys, values


def copied(pages: Paged) -> Paged:
    """The same bytes and strides elsewhere."""
    return Paged(*(torch.empty_like(one).copy_(one) for one in pages[:2]), pages.table)


class OneLayer(Canvas):
    """A layer of pages, and nothing that computes."""

    depth = 1
    device = torch.device("cpu")

    def __init__(self, pages: Paged, *, rotated: int, interleaved: bool = False) -> None:
        self._pages, self._half, self._interleaved = pages, rotated // 2, interleaved

    def slots(self, positions):
        return [slots_of(self._pages, positions)]

    def read(self, layer, slots):
        size = self._pages.keys.shape[2]
        return tuple(one[slots // size, :, slots % size] for one in self._pages[:2])

    def write(self, layer, slots, keys, values):
        size = self._pages.keys.shape[2]
        for whole, some in zip(self._pages[:2], (keys, values), strict=True):
            whole[slots // size, :, slots % size] = some

    def paged(self, layer):
        return self._pages

    def between(self, old, new):
        angles = (new - old)[:, None] * FREQUENCIES[: self._half]
        return KeyRotation(angles.cos(), angles.sin(), self._interleaved)
