"""Requests with LoRA adapters: each adapter has pages of its own, as has the model without one."""

import json
from pathlib import Path

import pytest
import torch
from lab import BLOCK, DOCUMENTS, SAME, agree, answer, distance, engine, facts, words
from lab import PROMPT as DOCUMENT_PROMPT
from safetensors.torch import save_file
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.long

RANK, LAYERS, HIDDEN, HEADS_DIM = 8, 4, 256, 256
PROMPT, OTHER = words(700, 9), words(128, 60)
WHOLE = len(PROMPT) // BLOCK * BLOCK


def adapter(name: str, number: int, folder: Path) -> LoRARequest:
    """An adapter of the queries with random weights."""
    draw = torch.Generator().manual_seed(number)
    path, weights = folder / name, {}
    path.mkdir()
    for layer in range(LAYERS):
        where = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{where}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=draw)
        weights[f"{where}.lora_B.weight"] = torch.randn(HEADS_DIM, RANK, generator=draw)
    save_file(weights, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(about))
    return LoRARequest(name, number, str(path))


@pytest.fixture(scope="module")
def lab(models):
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine(models("llama"), enable_lora=True, max_lora_rank=RANK, max_loras=2, kv_events_config=events) as found:
        original, found.events = found.connector.take_events, []
        found.connector.take_events = lambda: (
            found.events.extend(original()) or []
        )  # The engine takes them at each step.
        yield found


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [None, adapter("one", 1, folder), adapter("two", 2, folder)]


def ask(lab, tokens, lora):
    parameters = lab.parameters()
    return lab.llm.generate([{"prompt_token_ids": tokens}], [parameters], lora_request=lora, use_tqdm=False)[0]


def test_two_adapters_and_the_model_alone_share_no_chunk(lab, adapters):
    first = []
    for lora in adapters:
        first.append(ask(lab, PROMPT, lora))
        lab.settle()
        lab.forget_prefixes()
        assert "exact_tokens" not in facts(first[-1]), "it has loaded pages of another adapter"
    assert len({tuple(answer(one)) for one in first}) == 3, "the adapters do not change anything"
    for lora, wanted in zip(adapters, first, strict=True):
        found = ask(lab, PROMPT, lora)
        assert facts(found)["exact_tokens"] == WHOLE
        assert answer(found) == answer(wanted)
        assert distance(found, wanted) <= SAME
        lab.settle()
        lab.forget_prefixes()
    lab.check()


def test_blocks_of_an_adapter_say_whose_they_are(lab, adapters):
    lab.connector.take_events()
    lab.events.clear()
    for lora in adapters:
        ask(lab, OTHER, lora)
        lab.settle()
        lab.forget_prefixes()
    lab.store.flush()
    lab.connector.take_events()
    stored = [event for event in lab.events if isinstance(event, BlockStored)]
    names = {(event.lora_name, str(event.extra_keys)) for event in stored if event.parent_block_hash is None}
    assert names == {(None, "None"), ("one", "[('one',)]"), ("two", "[('two',)]")}
    hashes = [event.block_hashes[0] for event in stored]
    assert len(set(hashes)) == len(hashes)


def test_without_an_adapter_a_blend_at_ratio_1_is_full_prefill(lab, adapters):
    """Also if the step before had tokens with an adapter."""
    wanted = lab.vanilla(DOCUMENT_PROMPT.tokens)
    lab.learn(DOCUMENTS)
    ask(lab, PROMPT, adapters[1])
    lab.forget_prefixes()
    lab.forget_pages()
    blind = lab.ask(DOCUMENT_PROMPT.tokens, DOCUMENT_PROMPT.blend(strategy="none"))
    assert distance(blind, wanted) > 100 * SAME, "the control: stored KV is used"
    for strategy in ("union", "deviation"):
        lab.forget_prefixes()
        lab.forget_pages()
        ask(lab, OTHER, adapters[2])
        found = lab.ask(DOCUMENT_PROMPT.tokens, DOCUMENT_PROMPT.blend(strategy=strategy, ratio=1.0))
        assert facts(found)["reused_tokens"] == sum(map(len, DOCUMENTS))
        assert agree(found, wanted)
    lab.check()


def test_learning_changes_nothing_for_a_request_with_an_adapter(lab, adapters):
    """Learning runs between the steps of the request, in whose batch lmc's rows have no adapter."""
    lab.forget()
    wanted = ask(lab, PROMPT, adapters[1])
    lab.forget()
    before = lab.numbers["documents_learned"]
    for document in DOCUMENTS:
        lab.ask(document, {"learn": True}, 1)
    found = ask(lab, PROMPT, adapters[1])
    assert agree(found, wanted)
    lab.settle()
    assert lab.numbers["documents_learned"] - before == len(DOCUMENTS)
    lab.forget_prefixes()
    lab.forget_pages()
    found = lab.ask(DOCUMENT_PROMPT.tokens, DOCUMENT_PROMPT.blend(ratio=1.0))
    assert facts(found)["reused_tokens"] == sum(map(len, DOCUMENTS))
    assert agree(found, lab.vanilla(DOCUMENT_PROMPT.tokens)), "documents have the KV of the model without an adapter"
    lab.check()


def test_a_document_of_a_request_with_an_adapter_is_not_reused_and_that_is_said(lab, adapters):
    asked = lab.parameters({"documents": [[0, 300]]})
    (found,) = lab.llm.generate([{"prompt_token_ids": PROMPT}], [asked], lora_request=adapters[1], use_tqdm=False)
    assert "note" in facts(found)
    assert "reused_tokens" not in facts(found)
