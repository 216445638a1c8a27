"""A document learned through one connector is a hit in the other, on disk and through Redis: with the same checkpoint,
dtype and chunk size, and without tensor parallelism.
"""

import sys
from pathlib import Path

import pytest
import torch
from lab import SETTINGS, engine, facts, words
from transformers import AutoModelForCausalLM

from lmc.blend.segments import join
from lmc.blend.strategies import RecomputePolicy
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.connectors.vllm.worker.canvas import prefill_alone
from lmc.demo import SHIPPED as SMALL

sys.path.append(str(Path(__file__).parent.parent))
from redis_servers import RedisServer

SAME = 1e-4  # logprobs, float32
SEPARATOR = (1021, 1022, 1021)
DOCUMENTS = [words(150, 1), words(300, 2), words(90, 3)]
PROMPT = join(words(37, 1000), [DOCUMENTS[i] for i in (2, 0, 1)], words(23, 1001), SEPARATOR)
TOKENS = sum(map(len, DOCUMENTS))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["disk", "redis"])
def place(request, tmp_path):
    """A tier that outlives a connector, and the settings that name it."""
    if request.param == "disk":
        return "disk", {"local_disk": str(tmp_path / "disk")}
    return "redis", {"remote_url": request.getfixturevalue("server").tcp_url(), "remote_prefix": tmp_path.name}


def cached_model(path: Path, settings: dict[str, object]) -> CachedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return CachedModel(model, Settings(**{**SETTINGS, **settings}), SEPARATOR, checkpoint=path)


@pytest.mark.long
@pytest.mark.parametrize("policy", [("union", 0.15), ("deviation", 0.15)], ids=lambda policy: policy[0])
def test_vllm_finds_what_transformers_has_learned(place, policy):
    """With the shipped model and its tokenizer, which find the separator in both connectors."""
    tier, settings = place
    strategy, ratio = policy
    texts = [path.read_text().strip() for path in sorted((SMALL / "documents").glob("*.txt"))[:4]]
    cached, tokenizer = CachedModel.load(SMALL / "model", Settings(**{**SETTINGS, **settings}))
    with cached:
        system, *documents, question, separator = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in ("name one owner and no more .", *texts, "at the abbey , owner of goose", " # # ")
        )
        prompt, tokens = join(system, documents, question, separator), sum(map(len, documents))
        assert all(cached.learn(document) for document in documents)
        chosen = RecomputePolicy.of(cached.settings, strategy, ratio)
        wanted = cached.prefill(prompt, "blend", policy=chosen).logits.log_softmax(-1)
        full = cached.prefill(prompt, "full").logits.log_softmax(-1)
    with engine(SMALL / "model", settings, skip_tokenizer_init=False) as lab:
        out = lab.ask(prompt, {"strategy": strategy, "ratio": ratio}, count=1, logprobs=5)
        lab.check()
    told = facts(out)
    assert told["tokens_from"] == {tier: tokens}
    assert told["reused_tokens"] == tokens
    assert "unknown_documents" not in told
    found = {token: one.logprob for token, one in out.outputs[0].logprobs[0].items()}
    assert max(abs(float(wanted[token]) - logprob) for token, logprob in found.items()) <= SAME
    assert max(abs(float(full[token]) - logprob) for token, logprob in found.items()) > 10 * SAME, "it was no blend"


@pytest.mark.long
def test_transformers_finds_what_vllm_has_learned(models, place):
    tier, settings = place
    with engine(models("llama"), settings) as lab:
        lab.learn(DOCUMENTS)
    with cached_model(models("llama"), settings) as cached:
        assert all(cached.knows(document) for document in DOCUMENTS)
        report = cached.prefill(PROMPT).report
    assert (report.reused, report.unknown) == (TOKENS, 0)
    assert set(report.loaded) == {tier}


def note_what_is_known(monkeypatch, prefix):
    """Learn documents behind a prefix; return a list to which each of them adds how many tokens are known before it."""
    monkeypatch.setattr("lmc.connectors.vllm.connector.learn_prefix", lambda *_: prefix)
    monkeypatch.setattr("lmc.connectors.vllm.scheduler.backfill.MAX_WAITING", 0)  # Backfill calls it, too.
    known = []

    def noted(*given):
        known.append(given[-1])
        return prefill_alone(*given)

    monkeypatch.setattr("lmc.connectors.vllm.worker.worker.prefill_alone", noted)
    return known


@pytest.mark.long
@pytest.mark.parametrize("primer", [(), (9, 11, 12, 5)])
def test_documents_behind_a_sink_are_the_same_in_both(tmp_path, monkeypatch, primer):
    """Documents are learned by a request that begins with the sink, by one that does not, and from a prompt."""
    settings, sink = {"local_disk": str(tmp_path / "disk")}, 7
    prefix = (sink, *primer)
    texts = [path.read_text().strip() for path in sorted((SMALL / "documents").glob("*.txt"))[:3]]
    own, tokenizer = CachedModel.load(SMALL / "model", Settings(**SETTINGS))
    with own:
        question, separator, *documents = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in ("at the abbey , owner of goose", " # # ", *texts)
        )
    known = note_what_is_known(monkeypatch, prefix)
    with engine(SMALL / "model", settings, skip_tokenizer_init=False) as lab:
        told = [facts(lab.ask(tokens, {"learn": True})) for tokens in ([sink, *documents[0]], documents[1])]
        lab.ask(join([sink], documents[2:], question, separator))
        lab.settle()
        lab.check()
    assert [one["learned"] for one in told] == [True, True]
    assert known == [0, *[len(prefix)] * (len(known) - 1)], "what documents are learned behind is computed once"
    prompt = join([sink], documents, question, separator)
    model, found = own.model, []
    for place in (settings, {}):
        with CachedModel(
            model, Settings(**SETTINGS, **place), separator, checkpoint=SMALL / "model", learn_prefix=prefix
        ) as cached:
            assert [cached.knows(document) for document in documents] == [bool(place)] * 3
            for document in documents:
                cached.learn(document)
            found.append(cached.prefill(prompt).logits.log_softmax(-1))
    assert (found[0] - found[1]).abs().max() <= SAME
    with CachedModel(model, Settings(**SETTINGS, **settings), separator, checkpoint=SMALL / "model") as alone:
        assert not any(alone.knows(document) for document in documents)


@pytest.mark.parametrize("change", ["weights", "dtype", "chunk size", "rope"])
def test_what_was_learned_with_something_else_is_no_hit(models, tmp_path, change):
    """KV of other weights, in another dtype, of another RoPE or in other chunks would be wrong."""
    settings: dict[str, object] = {"local_disk": str(tmp_path / "disk")}
    path, options, dtype = tmp_path / "changed", dict(settings), torch.float32
    model = AutoModelForCausalLM.from_pretrained(models("llama"), dtype=torch.float32)
    if change == "weights":
        with torch.no_grad():
            model.model.layers[3].mlp.down_proj.weight[5, 7] += 2.0**-20
    elif change == "rope":
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 20000.0}
    elif change == "dtype":
        dtype = torch.bfloat16
    else:
        options["chunk_size"] = 64
    model.save_pretrained(path)
    changed = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with CachedModel(changed, Settings(**{**SETTINGS, **options}), SEPARATOR, checkpoint=path) as cached:
        assert all(cached.learn(document) for document in DOCUMENTS)
    with cached_model(models("llama"), settings) as cached:
        assert not any(cached.knows(document) for document in DOCUMENTS)


@pytest.mark.long
def test_after_a_reset_what_documents_are_learned_behind_is_computed_anew(monkeypatch):
    """The weights may have changed, and keys and values of the old ones must not stand before new documents."""
    known = note_what_is_known(monkeypatch, (7, 9, 11, 12, 5))
    with engine(SMALL / "model", skip_tokenizer_init=False) as lab:
        for seed in (1, 2):
            lab.learn([words(50, seed)])
        assert lab.llm.reset_prefix_cache(reset_connector=True)
        for seed in (1, 2):
            lab.learn([words(50, seed)])
        lab.check()
    assert known == [0, 5, 0, 5]
