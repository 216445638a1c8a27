"""Reads and writes the engine's KV cache: whole pages of any layout, and single tokens where the layout is known.

vLLM 0.32 has for every layer one logical view `[B, H, N, C]`: blocks, KV heads, slots of a block, key and value side by
side. Its strides say how that lies in memory. Whole pages can be copied whatever is in them. A kernel may use smaller
blocks than the scheduler; then the view has several rows for each of the scheduler's blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lmc.errors import UnsupportedModel
from lmc.shapes import KV

CPU_LAYOUTS = ("vec", "vec16")  # instruction sets with pages of a transposed key block and a value block


class Pages:
    """The pages of all layers, addressed by the scheduler's block numbers."""

    def __init__(self, caches: Mapping[str, torch.Tensor], blocks: int) -> None:
        # Layers may share a cache.
        apart = {(cache.data_ptr(), cache.shape, cache.stride()): cache for cache in caches.values()}.values()
        views = [(_page_major(cache, blocks), _order(cache)) for cache in apart]
        self._views = [view for view, _ in views]
        layouts = [f"{tuple(view.shape[1:])}{view.dtype}{order}" for view, order in views]
        self.layout = ";".join(dict.fromkeys(layouts))  # Pages can be exchanged between caches whose layouts are equal.
        self.layers = len(self._views)
        self.page_bytes = tuple(view[0].numel() * view.dtype.itemsize for view in self._views)

    def save(self, layer: int, blocks: Sequence[int], part: torch.Tensor) -> None:
        """Copy the pages of `blocks` side by side into `part`, uint8 `[n]`."""
        for at, start, count in _runs(blocks):
            self._in_part(layer, part, at, count).copy_(self._views[layer][start : start + count], non_blocking=True)

    def load(self, layer: int, blocks: Sequence[int], part: torch.Tensor, first: int) -> None:
        """Copy the pages of `part`, from its page `first` on, into `blocks`."""
        for at, start, count in _runs(blocks):
            source = self._in_part(layer, part, first + at, count)
            self._views[layer][start : start + count].copy_(source, non_blocking=True)

    def _in_part(self, layer: int, part: torch.Tensor, page: int, count: int) -> torch.Tensor:
        view, size = self._views[layer], self.page_bytes[layer]
        return part[page * size : (page + count) * size].view(view.dtype).view(count, *view.shape[1:])


class TokenAccess:
    """The keys and values of single tokens in one layer's cache, by slot number (block × block size + offset)."""

    def __init__(self, attention: Any, cache: torch.Tensor) -> None:
        """Raise `UnsupportedModel` for a cache in which a token's key and value cannot be found."""
        self._attention, self._cache, backend = attention, cache, attention.attn_backend.get_name()
        self.head_dim: int = attention.head_size
        self.dtype: torch.dtype = cache.dtype
        if cache.dim() != 4 or cache.shape[3] != KV * self.head_dim:
            raise UnsupportedModel("its KV cache does not hold a key and a value for each head and token")
        if not cache.dtype.is_floating_point or cache.dtype.itemsize == 1:
            raise UnsupportedModel(f"its KV cache is quantised ({cache.dtype})")
        if not hasattr(attention.impl, "do_kv_cache_update"):
            raise UnsupportedModel(f"its attention backend {backend} has no writer of its own")
        blocks, self.kv_heads, self._size, _ = cache.shape
        self._cpu = backend == "CPU_ATTN"
        if self._cpu:
            if attention.isa not in CPU_LAYOUTS:
                raise UnsupportedModel(f"keys cannot be read from pages of the CPU kernel {attention.isa!r}")
            self._halves = cache.view(blocks, self.kv_heads, KV, self._size * self.head_dim)
            self._keys = self._halves[:, :, 0].view(blocks, self.kv_heads, self.head_dim, self._size).transpose(2, 3)
            self._rows = cache.view(-1, self.head_dim)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[T, H, D]` of `slots [T]`."""
        block, offset = slots // self._size, slots % self._size
        if self._cpu:
            # In a page, each head has a block of keys, and then a row of `head_dim` numbers for the value of a token.
            heads = block[:, None] * self.kv_heads + torch.arange(self.kv_heads)
            rows = (heads * KV + 1) * self._size + offset[:, None]  # [T, H]
            values = self._rows.index_select(0, rows.flatten()).unflatten(0, rows.shape)
            return self._keys[block, :, offset], values
        both = self._cache[block, :, offset]  # [T, H, C]
        return both[..., : self.head_dim], both[..., self.head_dim :]

    def tokens_of(self, blocks: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values `[H, T, D]` of the first `tokens` tokens in kernel blocks `[B]`."""
        if self._cpu:  # The keys stay transposed, so that whole rows of pages are copied.
            pages = self._halves.index_select(0, blocks).transpose(0, 1)  # [H, B, K, N·D]
            keys = pages[:, :, 0].unflatten(-1, (self.head_dim, self._size)).transpose(1, 2).flatten(2).transpose(1, 2)
            return keys[:, :tokens], pages[:, :, 1].unflatten(-1, (self._size, self.head_dim)).flatten(1, 2)[:, :tokens]
        keys, values = self._cache[blocks].split(self.head_dim, dim=-1)  # [B, H, N, D]
        return tuple(one.transpose(0, 1).flatten(1, 2)[:, :tokens] for one in (keys, values))

    def scatter(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values `[T, H, D]` with the backend's own writer, which knows its layout."""
        self._attention.impl.do_kv_cache_update(
            self._attention, keys.contiguous(), values.contiguous(), self._cache, slots
        )


def _order(cache: torch.Tensor) -> tuple[int, ...]:
    """Return a page's dimensions in the order that they have in memory.

    The strides themselves may depend on the number of blocks.
    """
    strides = cache.stride()
    return tuple(sorted(range(1, cache.dim()), key=lambda d: -strides[d]))


def _page_major(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the cache `[B, ratio, …]` with a page's dimensions in the order that they have in memory.

    `ratio` is the number of the kernel's blocks in a block of the scheduler.
    """
    if cache.shape[0] % blocks:
        raise UnsupportedModel(f"a cache of shape {tuple(cache.shape)} is not made of the engine's {blocks} blocks")
    pages: torch.Tensor = cache.permute(0, *_order(cache)).unflatten(0, (blocks, cache.shape[0] // blocks))
    return pages


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Return runs of consecutive numbers: the index of the first, the first, and how many."""
    at = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield at, blocks[at], i - at
            at = i
