"""Reads and writes the engine's KV cache: whole pages of any layout, and single tokens where the layout is known.

For every layer, vLLM has one logical view `[B, H, N, C]`: blocks, KV heads, slots of a block, key and value side by
side. Its strides define the layout in memory. Whole pages can be copied whatever their contents. A kernel may use
smaller blocks than the scheduler; then the view has several rows for each block of the scheduler.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lmc.blend.canvas import KV as Rows
from lmc.blend.canvas import Paged
from lmc.blend.kernels.choice import TORCH
from lmc.blend.kernels.operations import Kernels
from lmc.connectors.vllm import vllm_api
from lmc.copies import Addresses, Copies, can_submit, merged, sent, stretches_of, submit_of
from lmc.errors import UnsupportedModel
from lmc.shapes import KV, MIB, KVShape

log = logging.getLogger(__name__)

TIMED_COPIES, TIMED_PAGES = 5, 256
STAGED_BYTES = 64 * MIB  # GPU memory for the pages that are copied together through it
PART_PAGES = 16  # number of pages in a part, for chunks of 256 tokens and pages of 16 tokens
WIDEST = torch.complex128  # torch's type of 16 bytes, used only for copies
# Types of the numbers in quantised KV caches with a scale for each layer, by vLLM's names.
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CPU_LAYOUTS = ("vec", "vec16")  # instruction sets whose pages have a transposed key block and a value block


class Move(NamedTuple):
    """Pages that are copied to or from a part. In the part, they lie side by side from page `first` on."""

    blocks: Sequence[int]
    part: torch.Tensor | int  # uint8 [n], or the address of memory that a GPU can access by itself
    first: int = 0


class Pages:
    """The pages of all layers, addressed by the scheduler's block numbers."""

    def __init__(
        self, caches: Mapping[str, torch.Tensor], blocks: int, groups: Mapping[str, int] | None = None
    ) -> None:
        """Prepare the caches of layers, by their names and in the order in which the layers run.

        `groups` are their KV cache groups, by default one for all.
        """
        of_layer = groups or dict.fromkeys(caches, 0)
        # Layers of one group may share a cache, which is used only once here; `groups` may lack all but one of them.
        # Layers of several groups are in the same memory, in blocks of their own.
        named: dict[Any, tuple[str, torch.Tensor]] = {}
        for name, one in caches.items():
            if name in of_layer:
                named.setdefault((of_layer[name], one.data_ptr(), one.shape, one.stride()), (name, one))
        apart = list(named.values())
        self.names = [name for name, _ in apart]  # by layer
        self.group_of = [of_layer[name] for name in self.names]
        views = [(_page_major(cache, blocks), _order(cache)) for _, cache in apart]
        self.views = [view for view, _ in views]  # by layer, the engine's memory as pages
        layouts = [f"{tuple(view.shape[1:])}{view.dtype}{order}" for view, order in views]
        self.layout = ";".join(dict.fromkeys(layouts))  # Pages can be exchanged between caches whose layouts are equal.
        self.layers = len(self.views)
        self.page_bytes = tuple(view[0].numel() * view.dtype.itemsize for view in self.views)
        self._stretches = [stretches_of(view[0]) for view in self.views]
        self._submit = submit_of(self.views[0].device)
        self._stages = False  # If true, parts are copied whole, and pages are moved on the GPU.
        # Without a call for many copies, each part is one copy: the host waits for a copy of memory that is not
        # page-locked, and a part has dozens of pages.
        self.gathers = self.views[0].is_cuda

    def choose_copy_mode(self, seconds_of: Callable[[Callable[[], None]], float]) -> None:
        """Measure and choose the faster way to copy pages, if the device has a call for many copies.

        Either every page is copied separately, or each part is copied whole and a kernel on the GPU moves its pages.
        The second way is faster if pages are small. Only copies out of pages are timed, so that pages do not change.
        """
        if self._submit is None:
            return
        count, seconds = min(TIMED_PAGES, len(self.views[0])), {False: float("inf"), True: float("inf")}
        modes, blocks = ("one by one", "through GPU memory"), range(count)[::-1]
        for stages in (False, True):
            self._stages = stages
            try:
                memory = torch.empty(count * self.page_bytes[0], dtype=torch.uint8).pin_memory()
                parts, starts = memory.split(PART_PAGES * self.page_bytes[0]), range(0, count, PART_PAGES)
                moves = [Move(blocks[at : at + PART_PAGES], part) for at, part in zip(starts, parts, strict=True)]
                seconds[stages] = min(seconds_of(partial(self.save_all, 0, moves)) for _ in range(TIMED_COPIES))
            except RuntimeError as error:
                log.warning("lmc could not copy many pages in one call, %s: %s", modes[stages], error)
        self._stages = seconds[True] < seconds[False]
        if seconds[self._stages] == float("inf"):
            self._submit = None
            return
        text = "lmc chose to copy pages of %d KiB %s (%d pages: %.0f us; otherwise: %.0f us)"
        ours, other = (1e6 * seconds[stages] for stages in (self._stages, not self._stages))
        log.info(text, self.page_bytes[0] >> 10, modes[self._stages], count, ours, other)

    @property
    def takes_addresses(self) -> bool:
        """Whether parts may be given by their addresses: all copies of a layer go to the GPU in one call."""
        return self._submit is not None

    def save_all(self, layer: int, moves: Sequence[Move]) -> None:
        """Copy pages into parts; on a GPU, all pages are copied in one call if possible."""
        if self._in_one_call(layer, moves, to_pages=False):
            return
        for blocks, part, first in moves:
            assert isinstance(part, torch.Tensor)
            self.save(layer, blocks, part[first * self.page_bytes[layer] :])

    def load_all(self, layer: int, moves: Sequence[Move]) -> None:
        """Copy parts into pages; on a GPU, all pages are copied in one call if possible."""
        if self._in_one_call(layer, moves, to_pages=True):
            return
        for blocks, part, first in moves:
            assert isinstance(part, torch.Tensor)
            self.load(layer, blocks, part, first)

    def duplicate(self, layer: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the pages of the blocks `sources [B]` to the blocks `targets [B]`. Both are on the device."""
        view = widened(self.views[layer])
        view.index_copy_(0, targets, view.index_select(0, sources))

    def _in_one_call(self, layer: int, moves: Sequence[Move], *, to_pages: bool) -> bool:
        """Issue all copies together. Returns false if the device has no call for it, or cannot access the memory."""
        if not moves:
            return True
        if self._submit is None or not all(isinstance(part, int) or can_submit(part) for _, part, _ in moves):
            return False
        if self._stages:
            with suppress(torch.OutOfMemoryError):  # The fallback, separate copies of pages, needs no memory.
                for some in _divided(moves, STAGED_BYTES // self.page_bytes[layer]):
                    self._in_stages(layer, some, to_pages=to_pages)
                return True
        self._issue(self.copies(layer, moves), to_gpu=to_pages)
        return True

    def _issue(self, copies: Copies, *, to_gpu: bool) -> None:
        """Issue copies from the GPU's memory to parts; with `to_gpu`, in the opposite direction."""
        assert self._submit is not None
        self._submit(merged(copies.reversed() if to_gpu else copies))

    def _in_stages(self, layer: int, moves: Sequence[Move], *, to_pages: bool) -> None:
        view, size = widened(self.views[layer]), self.page_bytes[layer]
        blocks = _sent(_blocks_of(moves), view.device)
        side_by_side = view.new_empty((len(blocks), *view.shape[1:])) if to_pages else view.index_select(0, blocks)
        sizes = np.array([len(move.blocks) for move in moves], np.int64) * size
        staged = side_by_side.data_ptr() + np.cumsum(sizes) - sizes
        parts = np.array([_address(move.part) + move.first * size for move in moves], np.int64)
        self._issue(Copies(staged, parts, sizes), to_gpu=to_pages)
        if to_pages:
            view.index_copy_(0, blocks, side_by_side)

    def copies(self, layer: int, moves: Sequence[Move]) -> Copies:
        """Return the addresses in pages and in parts, and the length in bytes, of each stretch of the pages."""
        view, size = self.views[layer], self.page_bytes[layer]
        offsets, stretch = self._stretches[layer]
        blocks = _blocks_of(moves)
        begins = [
            _address(move.part) + np.arange(move.first, move.first + len(move.blocks), dtype=np.int64) * size
            for move in moves
        ]
        pages = view.data_ptr() + blocks * (view.stride(0) * view.element_size())
        inside = np.arange(len(offsets), dtype=np.int64) * stretch
        addresses = (pages[:, None] + offsets).ravel(), (np.concatenate(begins)[:, None] + inside).ravel()
        return Copies(*addresses, np.full(len(addresses[0]), stretch, np.int64))

    def save(self, layer: int, blocks: Sequence[int], part: torch.Tensor) -> None:
        """Copy the pages of `blocks` side by side into `part`, uint8 `[n]`."""
        if self.gathers:
            with suppress(torch.OutOfMemoryError):  # The fallback, separate copies of pages, needs no memory.
                view, size = widened(self.views[layer]), len(blocks) * self.page_bytes[layer]
                side_by_side = view.index_select(0, _sent(blocks, view.device))
                part[:size].copy_(side_by_side.flatten().view(torch.uint8), non_blocking=True)
                return
        for at, start, count in _runs(blocks):
            self._in_part(layer, part, at, count).copy_(self.views[layer][start : start + count], non_blocking=True)

    def load(self, layer: int, blocks: Sequence[int], part: torch.Tensor, first: int) -> None:
        """Copy the pages of `part`, from its page `first` on, into `blocks`."""
        if self.gathers:
            with suppress(torch.OutOfMemoryError):
                view, size = widened(self.views[layer]), self.page_bytes[layer]
                side_by_side = part[first * size : (first + len(blocks)) * size].to(view.device, non_blocking=True)
                pages = side_by_side.view(view.dtype).view(len(blocks), *view.shape[1:])
                view.index_copy_(0, _sent(blocks, view.device), pages)
                return
        for at, start, count in _runs(blocks):
            source = self._in_part(layer, part, first + at, count)
            self.views[layer][start : start + count].copy_(source, non_blocking=True)

    def _in_part(self, layer: int, part: torch.Tensor, page: int, count: int) -> torch.Tensor:
        view, size = self.views[layer], self.page_bytes[layer]
        return part[page * size : (page + count) * size].view(view.dtype).view(count, *view.shape[1:])


class TokenAccess:
    """The keys and values of single tokens in one layer's cache, by slot number (block × block size + offset).

    This class is for caches in which the key and the value of a head stand side by side. If the cache is quantised, the
    model's numbers are those of the cache times a scale for all keys, or for all values.
    """

    def __init__(self, attention: Any, cache: torch.Tensor, kernels: Kernels, computes: torch.dtype) -> None:
        """Prepare the access. Raises `UnsupportedModel` if a token's key and value cannot be located in the cache.

        `computes` is the type of the model's own keys and values.
        """
        self._attention, self._cache = attention, cache
        cache = cache.view(quantised_type(attention, cache) or cache.dtype)
        self.kernels, self.dtype, self.computes = kernels, cache.dtype, computes
        keys, values = self._keys_and_values(cache)
        self.kv_heads, self.head_dim, self.value_dim = keys.shape[1], keys.shape[3], values.shape[3]
        self._pages = Paged(keys, values, torch.empty(0, dtype=torch.int32))

    def _keys_and_values(self, cache: torch.Tensor) -> Rows:
        """Return the keys and values `[B, H, N, D]` in a cache."""
        size: int = self._attention.head_size
        if cache.dim() != 4 or cache.shape[3] != KV * size:
            raise UnsupportedModel("the model's KV cache does not store a key and a value for each head and token")
        keys, values = cache.split(size, dim=-1)
        return keys, values

    @property
    def pages(self) -> Paged:
        """The pages of all prompts, without the blocks of one."""
        return self._pages._replace(scales=self._scales) if self._is_quantised else self._pages

    @property
    def shape(self) -> KVShape:
        """The shape of a token's KV in this layer, as it is stored."""
        dims = {"head_dim": self.head_dim, "value_dim": self.value_dim}
        return KVShape(layers=1, kv_heads=self.kv_heads, dtype=self.dtype, **dims)

    def empty(self, tokens: int) -> Rows:
        """Return uninitialized memory for keys and values `[T, H, D]` of the model."""
        return replace(self.shape, dtype=self.computes).empty(tokens, self._cache.device)

    def dequantised(self, stored: Rows) -> Rows:
        """Return stored keys and values, which may be in host memory, as those of the model."""
        if not self._is_quantised:
            return stored
        halves = (half.to(self._cache.device, non_blocking=True) for half in stored)
        keys, values = (half.to(self.computes) * scale for half, scale in zip(halves, self._scales, strict=True))
        return keys, values

    def quantised(self, rows: Rows) -> Rows:
        """Return keys and values of the model as they are stored."""
        if not self._is_quantised:
            return rows
        keys, values = ((half / scale).to(self.dtype) for half, scale in zip(rows, self._scales, strict=True))
        return keys, values

    @property
    def _is_quantised(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def _scales(self) -> tuple[float, float]:
        return float(self._attention._k_scale_float), float(self._attention._v_scale_float)

    def gather(self, slots: torch.Tensor) -> Rows:
        """Return keys and values `[T, H, D]` of `slots [T]`."""
        return self.dequantised(self.kernels.gather(self.pages, slots))

    def tokens_of(self, blocks: torch.Tensor, tokens: int) -> Rows:
        """Return copies of the keys and values `[H, T, D]` of the first `tokens` tokens in kernel blocks `[B]`."""
        keys, values = (half[blocks].transpose(0, 1).flatten(1, 2)[:, :tokens] for half in self._pages[:2])
        return self.dequantised((keys, values))

    def scatter(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values `[T, H, D]` into `slots`, with the backend's own writer, which knows its layout."""
        self._attention.impl.do_kv_cache_update(
            self._attention, keys.contiguous(), values.contiguous(), self._cache, slots
        )


class TransposedAccess(TokenAccess):
    """Pages of vLLM's CPU kernel. Each head has a block of keys `[D, N]`, and then for each token a row: its value."""

    def __init__(self, attention: Any, cache: torch.Tensor, kernels: Kernels, computes: torch.dtype) -> None:
        """Prepare the access. Raises `UnsupportedModel` for the layout of another instruction set."""
        super().__init__(attention, cache, TORCH, computes)  # Triton kernels need the numbers of a row side by side.
        cache = cache.view(self.dtype)
        if attention.isa not in CPU_LAYOUTS:
            raise UnsupportedModel(f"keys cannot be read from pages of the CPU kernel {attention.isa!r}")
        blocks, heads, self._size, _ = cache.shape
        self._halves = cache.view(blocks, heads, KV, self._size * self.head_dim)
        self._keys = self._halves[:, :, 0].view(blocks, heads, self.head_dim, self._size).transpose(2, 3)
        self._rows = cache.view(-1, self.head_dim)

    def gather(self, slots: torch.Tensor) -> Rows:
        """See `TokenAccess.gather`."""
        block, offset = slots // self._size, slots % self._size
        heads = block[:, None] * self.kv_heads + torch.arange(self.kv_heads)
        rows = (heads * KV + 1) * self._size + offset[:, None]  # [T, H]
        values = self._rows.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        return self.dequantised((self._keys[block, :, offset], values))

    def tokens_of(self, blocks: torch.Tensor, tokens: int) -> Rows:
        """See `TokenAccess.tokens_of`. Keys stay transposed until they are copied, so that whole rows are copied."""
        pages = self._halves.index_select(0, blocks).transpose(0, 1)  # [H, B, K, N·D]
        keys = pages[:, :, 0].unflatten(-1, (self.head_dim, self._size)).transpose(1, 2).flatten(2).transpose(1, 2)
        values = pages[:, :, 1].unflatten(-1, (self._size, self.head_dim)).flatten(1, 2)
        return self.dequantised((keys[:, :tokens], values[:, :tokens]))


class LatentAccess(TokenAccess):
    """Pages of MLA: a token has one row for all heads, which holds its latent vector, then its rotated key.

    The rotated key counts as the key of one KV head, and the latent vector as its value; see `LayerAttention.latent`.
    """

    def __init__(self, attention: Any, cache: torch.Tensor, kernels: Kernels, computes: torch.dtype) -> None:
        """Prepare the access. Raises `UnsupportedModel` if rows have anything else."""
        super().__init__(attention, cache.squeeze(1) if cache.dim() == 4 else cache, kernels, computes)

    def _keys_and_values(self, cache: torch.Tensor) -> Rows:
        """See `TokenAccess._keys_and_values`."""
        sizes = self._attention.kv_lora_rank, self._attention.qk_rope_head_dim
        if cache.dim() != 3 or cache.shape[2] != sum(sizes):
            raise UnsupportedModel(
                "the model's KV cache does not store a latent vector and a rotated key for each token"
            )
        latent, rotated = cache[:, None].split(sizes, dim=-1)
        return rotated, latent

    @property
    def _scales(self) -> tuple[float, float]:
        scale = float(self._attention._k_scale_float)  # of the whole row
        return scale, scale

    def scatter(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `TokenAccess.scatter`."""
        one = self._attention
        latent, rotated = values[:, 0].contiguous(), keys.contiguous()
        one.impl.do_kv_cache_update(latent, rotated, self._cache, slots, one.kv_cache_dtype, one._k_scale)


def quantised_type(attention: Any, cache: torch.Tensor) -> torch.dtype | None:
    """Return the type of the numbers in a quantised cache; None if the cache is not quantised.

    Raises `UnsupportedModel` if keys and values have no scale for a layer as a whole.
    """
    if cache.dtype.itemsize > 1:
        return None
    kind: str = attention.kv_cache_dtype
    if kind not in FP8:
        raise UnsupportedModel(f"the model's KV cache is quantised as {kind} (supported: {', '.join(FP8)})")
    # A checkpoint may have a scale for each KV head. The engine's floats are then the largest of these.
    scales = max(attention._k_scale.numel(), attention._v_scale.numel())
    if scales > 1:
        raise UnsupportedModel(
            f"the model's KV cache has {scales} scales in a layer (supported: one for keys, one for values)"
        )
    return FP8[kind]


def token_access(attention: Any, cache: torch.Tensor, kernels: Kernels, computes: torch.dtype) -> TokenAccess:
    """Return the access to a layer's cache. Raises `UnsupportedModel` if its tokens cannot be read or written."""
    backend = attention.attn_backend.get_name()
    if not hasattr(attention.impl, "do_kv_cache_update"):
        raise UnsupportedModel(f"the model's attention backend {backend} has no separate operation that writes KV")
    if isinstance(attention, vllm_api.MLAAttention):
        return LatentAccess(attention, cache, kernels, computes)
    return (TransposedAccess if backend == "CPU_ATTN" else TokenAccess)(attention, cache, kernels, computes)


def _address(part: torch.Tensor | int) -> int:
    return part if isinstance(part, int) else part.data_ptr()


def _sent(blocks: Sequence[int] | Addresses, device: torch.device) -> torch.Tensor:
    return sent(torch.from_numpy(np.asarray(blocks, np.int64)), device)


def _blocks_of(moves: Sequence[Move]) -> Addresses:
    return np.concatenate([np.asarray(move.blocks, np.int64) for move in moves])


def _divided(moves: Sequence[Move], pages: int) -> Iterator[Sequence[Move]]:
    """Yield successive moves with at most `pages` pages together, or a single move with more."""
    first = count = 0
    for at, move in enumerate(moves):
        count += len(move.blocks)
        if count > pages and at > first:
            yield moves[first:at]
            first, count = at, len(move.blocks)
    yield moves[first:]


def _order(cache: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a page in memory order.

    The order is used for comparisons, because the strides may depend on the number of blocks.
    """
    strides = cache.stride()
    return tuple(sorted(range(1, cache.dim()), key=lambda d: -strides[d]))


def _page_major(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the cache `[B, ratio, …]` with the dimensions of a page in memory order.

    `ratio` is the number of kernel blocks in a block of the scheduler.
    """
    if cache.shape[0] % blocks:
        raise UnsupportedModel(f"a cache of shape {tuple(cache.shape)} does not match the engine's {blocks} blocks")
    pages: torch.Tensor = cache.permute(0, *_order(cache)).unflatten(0, (blocks, cache.shape[0] // blocks))
    return pages


def widened(pages: torch.Tensor) -> torch.Tensor:
    """Return pages `[B, …]` as `[B, n]` numbers of 16 bytes, which a GPU moves faster, if possible.

    Otherwise the pages are returned unchanged. It is possible if each page is contiguous, has a multiple of 16 bytes,
    and begins at a multiple of 16 bytes.
    """
    apart = pages.stride(0) * pages.element_size()
    in_one_piece = pages[0].is_contiguous() and pages[0].numel() * pages.element_size() % WIDEST.itemsize == 0
    if not in_one_piece or apart % WIDEST.itemsize or pages.data_ptr() % WIDEST.itemsize:
        return pages
    offset = pages.storage_offset() * pages.element_size()
    if offset % WIDEST.itemsize:  # The page is aligned, but a view with 16-byte numbers needs an aligned offset, too.
        return pages
    return pages.as_strided((len(pages), pages[0].numel()), (pages.stride(0), 1)).view(WIDEST)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive numbers: index of the first number, first number, count."""
    at = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield at, blocks[at], i - at
            at = i
