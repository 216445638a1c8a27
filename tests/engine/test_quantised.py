"""KV caches of 8 bits with a scale for the keys and one for the values of a layer."""

import pytest
import torch
from amount import mostly_long
from lab import DOCUMENTS, PROMPT, SAME, check_at_ratio_1, distance, engine, facts
from stepping import layers_of_lmc, poison
from vllm.model_executor.layers.attention import attention

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's CPU build has KV caches of 8 bits only with AVX-512"
)
SCALES = {"_k_scale": 0.02, "_v_scale": 0.07}  # of a checkpoint; the engine's default is 1
ALL_DOCUMENTS = sum(map(len, DOCUMENTS))  # tokens


KINDS = [("fp8", "llama"), ("fp8_e5m2", "llama"), ("fp8", "gemma3mixed"), ("fp8", "gptoss")]


@pytest.fixture(scope="module", params=mostly_long(KINDS, KINDS[0]), ids="-".join)
def lab(request, models):
    kind, family = request.param
    set_default = attention.set_default_quant_scales

    def scaled(layer, **options):
        set_default(layer, **options)
        for name, scale in SCALES.items():
            getattr(layer, name).fill_(scale)
            setattr(layer, f"{name}_float", scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "set_default_quant_scales", scaled)
        with engine(models(family), kv_cache_dtype=kind) as lab:
            yield lab


@pytest.mark.parametrize("strategy", ["union", "deviation"])
def test_at_ratio_1_the_blend_is_the_engine_s_own_prefill(lab, strategy):
    """Each number is rounded as the engine rounds it."""
    check_at_ratio_1(lab, strategy)


def test_documents_are_stored_in_8_bits(lab):
    shape = layers_of_lmc().shape
    assert shape.dtype.itemsize == 1
    assert shape.token_bytes == 2 * shape.kv_heads * shape.head_dim


def test_what_is_stored_is_what_the_pages_have(lab):
    """Rounding twice is rounding once: a document that does not move keeps its bits."""
    lab.learn(DOCUMENTS)
    access, slots = layers_of_lmc().access[1], torch.arange(64)
    rows = access.gather(slots)
    for stored, raw in zip(
        access.quantised(rows), access.quantised(access.dequantised(access.quantised(rows))), strict=True
    ):
        assert torch.equal(stored.view(torch.uint8), raw.view(torch.uint8))


def test_pages_are_loaded_again_as_they_were(lab):
    wanted = lab.vanilla(PROMPT.tokens)
    lab.ask(PROMPT.tokens, {"blend": False})
    lab.forget_prefixes()
    poison()
    found = lab.ask(PROMPT.tokens, {"blend": False})
    assert facts(found)["exact_tokens"] > ALL_DOCUMENTS
    assert distance(found, wanted) <= SAME
