"""Whole pages of caches of every layout, copied to a slot and back, and nothing beside them."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lmc.blend.kernels.choice import TORCH
from lmc.connectors.vllm import vllm_api
from lmc.connectors.vllm.worker.paged import FP8, LatentAccess, Pages, TokenAccess, token_access
from lmc.errors import UnsupportedModel

L, B, H, N, C = 2, 6, 3, 4, 5
DIMENSIONS = "LBHNC"
LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"]


def caches_of(layout: str, *, blocks=B, ratio=1, dtype=torch.float32, layers=L, heads=H, fill=True):
    """Views [B, H, N, C] of each layer, as the engine gives them, over one allocation in the order of `layout`."""
    sizes = dict(zip(DIMENSIONS, (layers, blocks * ratio, heads, N, C), strict=True))
    raw = torch.zeros([sizes[d] for d in layout], dtype=dtype)
    if fill:
        raw.copy_(torch.arange(raw.numel()).view(raw.shape) % 251)
    logical = raw.permute([layout.index(d) for d in DIMENSIONS])
    return {f"layer {i}": logical[i] for i in range(layers)}


def part_of(pages: Pages, layer: int, count: int) -> torch.Tensor:
    return torch.full((count * pages.page_bytes[layer] + 64,), 0xAB, dtype=torch.uint8)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_as_they_were_and_nothing_beside_them_changes(layout, ratio, dtype, gathers):
    given = caches_of(layout, ratio=ratio, dtype=dtype)
    before = {name: cache.clone() for name, cache in given.items()}
    pages = Pages(given, B)
    pages.gathers = gathers
    blocks, moved = [4, 1, 2], [0, 3, 5]
    parts = [part_of(pages, layer, 3) for layer in range(L)]
    for layer in range(L):
        pages.save(layer, blocks, parts[layer])
        assert bool((parts[layer][-64:] == 0xAB).all())
        pages.load(layer, moved, parts[layer], 0)
    for name, cache in given.items():
        rows, old = cache.unflatten(0, (B, ratio)), before[name].unflatten(0, (B, ratio))
        for source, target in zip(blocks, moved, strict=True):
            assert torch.equal(rows[target], old[source])
        assert torch.equal(rows[blocks], old[blocks])


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_may_begin_at_any_page_of_the_part(layout, gathers):
    given = caches_of(layout)
    pages = Pages(given, B)
    pages.gathers = gathers
    part = part_of(pages, 1, 3)
    pages.save(1, [3, 4, 5], part)
    expected = given["layer 1"][[4, 5]].clone()
    pages.load(1, [0, 2], part, 1)
    assert torch.equal(given["layer 1"][[0, 2]], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_pages_of_a_part_are_those_that_are_copied_one_by_one(layout):
    given, (wanted, found) = caches_of(layout), [caches_of(layout, fill=False) for _ in range(2)]
    one_by_one, gathering = Pages(given, B), Pages(given, B)
    gathering.gathers = True
    parts = [part_of(one_by_one, 1, 4) for _ in range(2)]
    one_by_one.save(1, [5, 1, 2, 0], parts[0])
    gathering.save(1, [5, 1, 2, 0], parts[1])
    assert torch.equal(*parts)
    Pages(wanted, B).load(1, [0, 4], parts[0], 2)
    gathering = Pages(found, B)
    gathering.gathers = True
    gathering.load(1, [0, 4], parts[0], 2)
    assert torch.equal(wanted["layer 1"], found["layer 1"])


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(LAYOUTS, 2)))
def test_equal_layouts_mean_equal_bytes(one, other):
    """Two engines may share pages if, and only if, they say the same of them."""
    texts, bytes_ = [], []
    for layout in (one, other):
        given = caches_of(layout, fill=False)
        for layer, cache in enumerate(given.values()):
            cache.copy_(torch.arange(B * H * N * C).view(B, H, N, C) + layer)
        pages = Pages(given, B)
        part = part_of(pages, 0, 2)
        pages.save(0, [1, 3], part)
        texts.append(pages.layout)
        bytes_.append(part)
    assert (texts[0] == texts[1]) == torch.equal(*bytes_)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_does_not_depend_on_how_many_blocks_or_layers_there_are(layout):
    """Strides over blocks were part of it: with another amount of memory an engine found none of its chunks again."""
    few, many = (Pages(caches_of(layout, blocks=blocks, layers=layers), blocks) for blocks, layers in ((6, 2), (60, 4)))
    assert few.layout == many.layout


def test_the_layout_says_what_is_in_every_layer():
    mixed = {**caches_of("LBHNC", layers=1), "other": caches_of("LBNHC", layers=1)["layer 0"]}
    assert Pages(mixed, B).layout != Pages(caches_of("LBHNC"), B).layout


def test_kernel_blocks_that_are_smaller_go_with_their_page():
    given = caches_of("LBHNC", ratio=2)
    pages = Pages(given, B)
    assert pages.page_bytes == (2 * H * N * C * 4,) * L
    part = part_of(pages, 0, 1)
    pages.save(0, [2], part)
    assert torch.equal(part[:-64].view(torch.float32).view(2, H, N, C), given["layer 0"][4:6])


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(UnsupportedModel, match="does not match the engine"):
        Pages(caches_of("LBHNC"), B - 1)


@pytest.mark.parametrize(
    ("writer", "kind", "scales", "cache", "said"),
    [
        (False, "auto", 1, torch.zeros(B, H, N, 2 * 8), "the model's attention backend FUSED has no separate"),
        (
            True,
            "int8_per_token_head",
            1,
            torch.zeros(B, H, N, 2 * 8, dtype=torch.int8),
            "quantised as int8_per_token_head",
        ),
        (True, "auto", 1, torch.zeros(B, H, N, 2 * 8 + 1), "does not store a key and a value"),
        (True, "auto", 1, torch.zeros(B, H, N, 2 * 8), ""),
        (True, "fp8", 1, torch.zeros(B, H, N, 2 * 8, dtype=torch.uint8), ""),
        (True, "fp8", H, torch.zeros(B, H, N, 2 * 8, dtype=torch.uint8), f"has {H} scales in a layer"),
    ],
)
def test_single_tokens_are_found_only_where_the_backend_writes_keys_and_values_itself(
    monkeypatch, writer, kind, scales, cache, said
):
    monkeypatch.setitem(vars(vllm_api), "MLAAttention", type("MLAAttention", (), {}))
    attention = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: "FUSED"), head_size=8, kv_cache_dtype=kind,
        _k_scale=torch.ones(scales), _v_scale=torch.ones(scales),
        impl=SimpleNamespace(do_kv_cache_update=print) if writer else object(),
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match=said) if said else nullcontext():
        token_access(attention, cache, TORCH, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_8_bits_are_those_of_the_model_divided_by_scales(dtype):
    """What the pages have is given back bit by bit, also through a model in bfloat16."""
    name = next(name for name, one in FP8.items() if one is dtype)
    attention = SimpleNamespace(
        head_size=8, kv_cache_dtype=name, _k_scale=torch.tensor(0.013), _k_scale_float=0.013,
        _v_scale=torch.tensor(3.7), _v_scale_float=3.7,
    )  # fmt: skip
    cache = torch.zeros(B, H, N, 2 * 8, dtype=torch.uint8)
    cache.view(dtype).copy_(torch.randn(B, H, N, 2 * 8) * 20)
    for computes in (torch.bfloat16, torch.float32):
        access = TokenAccess(attention, cache, TORCH, computes)
        keys, values = access.gather(torch.arange(B * N))
        assert keys.dtype is computes
        raw = cache.view(dtype).transpose(1, 2).flatten(0, 1).float()
        assert torch.allclose(keys.float(), 0.013 * raw[..., :8], rtol=1e-2)
        assert torch.allclose(values.float(), 3.7 * raw[..., 8:], rtol=1e-2)
        again = torch.cat(access.quantised((keys, values)), dim=-1)
        assert torch.equal(again.view(torch.uint8), cache.transpose(1, 2).flatten(0, 1))
        assert access.pages.scales == (0.013, 3.7)
        assert torch.equal(access.pages.keys.view(torch.uint8), cache[..., :8])


def test_a_row_of_latent_attention_has_one_scale():
    """The engine's function that writes such rows is told the type and the scale of the cache."""
    written = []
    attention = SimpleNamespace(
        kv_lora_rank=12, qk_rope_head_dim=4, kv_cache_dtype="fp8", _k_scale=torch.tensor(0.5), _k_scale_float=0.5,
        _v_scale=torch.tensor(1.0), impl=SimpleNamespace(do_kv_cache_update=lambda *given: written.extend(given)),
    )  # fmt: skip
    cache = torch.zeros(B, N, 16, dtype=torch.uint8)
    cache.view(torch.float8_e4m3fn).copy_(torch.randn(B, N, 16) * 20)
    access = LatentAccess(attention, cache, TORCH, torch.bfloat16)
    rotated, latent = access.gather(torch.arange(B * N))
    raw = cache.view(torch.float8_e4m3fn).flatten(0, 1).float()
    assert torch.equal(latent[:, 0].float(), 0.5 * raw[:, :12])
    assert torch.equal(rotated[:, 0].float(), 0.5 * raw[:, 12:])
    assert (access.pages.scales, access.shape.token_bytes) == ((0.5, 0.5), 16)
    again = torch.cat(access.quantised((latent, rotated)), dim=-1)
    assert torch.equal(again.view(torch.uint8)[:, 0], cache.flatten(0, 1))
    access.scatter(torch.arange(3), rotated[:3], latent[:3])
    assert [one.shape for one in written[:2]] == [(3, 12), (3, 1, 4)]
    assert written[2] is cache
    assert written[4:] == ["fp8", attention._k_scale]


def test_layers_that_share_a_cache_are_copied_once():
    given = caches_of("LBHNC")
    pages = Pages({**given, "layer 2": given["layer 0"]}, B)
    assert pages.layers == L
    assert len(pages.page_bytes) == L


def test_layers_of_several_block_tables_are_apart():
    """Layers of several block tables share memory. The engine describes only one of the layers that share a cache."""
    one, two = caches_of("LBHNC").values()
    given = {"layer 2": two, "layer 3": one, "layer 10": one, "alias": two, "sharing": one}
    pages = Pages(given, B, {"layer 10": 0, "layer 2": 0, "layer 3": 1, "sharing": 0})
    assert (pages.names, pages.group_of) == (["layer 2", "layer 3", "layer 10"], [0, 1, 0])


@pytest.mark.parametrize("blocks", [[], [0], [5], [0, 1, 2, 3, 4, 5], [5, 4, 3], [1, 2, 4, 5, 0], [3, 3]])
def test_any_run_of_blocks_keeps_its_order(blocks):
    given = caches_of("BLHNC")
    pages = Pages(given, B)
    part = part_of(pages, 0, len(blocks))
    pages.save(0, blocks, part)
    found = part[: len(blocks) * pages.page_bytes[0]].view(torch.float32).view(len(blocks), H, N, C)
    assert torch.equal(found, given["layer 0"][blocks])


def test_one_head_is_as_good_as_many():
    for layout in LAYOUTS:
        given = caches_of(layout, heads=1)
        pages = Pages(given, B)
        part = part_of(pages, 0, 1)
        pages.save(0, [1], part)
        expected = given["layer 0"][1].clone()
        pages.load(0, [5], part, 0)
        assert torch.equal(given["layer 0"][5], expected)
