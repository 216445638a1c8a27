"""CachedModel: what a user of transformers sees."""

import gc
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from amount import cases, some
from models import OTHERS, SEPARATOR, VOCABULARY, random_model, random_tokens
from service_fakes import serving
from storage_fakes import computing, eventually, note_load, reading, tiers_of
from tier_wrappers import Counted, Delayed

from lmc.blend.kernels.choice import kernels_of
from lmc.blend.segments import Span, join
from lmc.blend.strategies import STRATEGIES, Evidence, RecomputePolicy, by_union
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.connectors.transformers import model as model_module
from lmc.connectors.transformers.continuation import greedy_answer
from lmc.connectors.transformers.hf import cache_argument, identity, prefilled, rows_of
from lmc.connectors.transformers.layers import DecoderLayers
from lmc.connectors.transformers.model import side_by_side
from lmc.connectors.transformers.report import How, Report
from lmc.copies import settle
from lmc.engine import Match
from lmc.engine.speeds import FILE as SPEEDS
from lmc.errors import ConfigError, InputError, NoMemory, UnsupportedModel
from lmc.storage import cost_model
from lmc.storage.contract import Reservation
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Written

EVERYTHING = RecomputePolicy(strategy="query", ratio=1.0)
DOCUMENTS = [random_tokens(20 + 5 * i, i) for i in range(6)]
SYSTEM = random_tokens(9, 70)


def settings(**changes: object) -> Settings:
    values = {"chunk_size": 16, "max_local_cpu_size": 0.02, "enable_blending": True, "blend_min_tokens": 0, **changes}
    return Settings(**values)  # type: ignore[arg-type]


def prompt(*order: int, question: int = 0) -> list[int]:
    return join(SYSTEM, [DOCUMENTS[i] for i in order], random_tokens(7, 80 + question), SEPARATOR)


def stored_prefix(cached: CachedModel, ids: list[int]) -> int:
    """How many leading tokens of a prompt are stored as exact."""
    match = cached.engine.look(Match(prompt=len(ids), exact_stop=len(ids)), cached.engine.token_chain(ids))
    return sum(piece.tokens for piece in match.exact)


@pytest.fixture(params=["store in this process", "cache server"])
def cached(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CachedModel]:
    if request.param == "cache server":
        with serving(tmp_path, 0, max_local_cpu_size=0.02) as server:
            with CachedModel(random_model(), settings(server=server.path, load_deadline=30.0), SEPARATOR) as model:
                yield model
                assert model.engine.store.held() == 0
            (arena,) = server.arenas.all()
            assert arena.store.check_integrity() == []
        return
    with CachedModel(random_model(), settings(), SEPARATOR) as model:
        yield model
        assert model.engine.store.held() == 0
        assert model.engine.store.check_integrity() == []


def learn(cached: CachedModel, documents: Sequence[list[int]]) -> None:
    for document in documents:
        cached.learn(document)


def test_known_documents_are_reused_wherever_they_stand(cached: CachedModel) -> None:
    learn(cached, DOCUMENTS[:4])

    report = cached.prefill(prompt(2, 0, 3)).report

    assert report.reused == len(DOCUMENTS[2]) + len(DOCUMENTS[0]) + len(DOCUMENTS[3])
    assert report.unknown == 0
    assert report.charged_budget == pytest.approx(0.15, abs=0.02)
    assert max(report.computed) < report.tokens
    assert report.loaded.keys() == {"host"}


def test_at_ratio_one_blending_is_full_prefill(cached: CachedModel) -> None:
    learn(cached, DOCUMENTS[:4])
    ids = prompt(3, 5, 1, 0)

    full = cached.prefill(ids, "full")
    blend = cached.prefill(ids, "blend", policy=EVERYTHING)

    assert (full.logits - blend.logits).abs().max() <= 1e-4
    assert blend.report.reused == sum(len(DOCUMENTS[i]) for i in (3, 1, 0))


def test_blind_reuse_is_something_else(cached: CachedModel) -> None:
    learn(cached, DOCUMENTS[:3])
    full = cached.prefill(prompt(0, 1, 2), "full").logits
    assert (cached.prefill(prompt(0, 1, 2), "reuse").logits - full).abs().max() > 0.1


def test_an_unknown_document_is_computed_and_then_known(cached: CachedModel) -> None:
    first = cached.prefill(prompt(0, 1)).report
    assert (first.reused, first.unknown) == (0, 2)

    second = cached.prefill(prompt(1, 0)).report

    assert second.unknown == 0
    assert second.reused == len(DOCUMENTS[0]) + len(DOCUMENTS[1])


def test_learning_can_be_switched_off() -> None:
    with CachedModel(random_model(), settings(blend_learn=False), SEPARATOR) as cached:
        cached.prefill(prompt(0, 1))
        assert cached.prefill(prompt(0, 1)).report.unknown == 2


def test_the_system_text_is_an_exact_prefix_of_the_next_prompt(cached: CachedModel) -> None:
    cached.prefill(prompt(0, 1))
    assert cached.prefill(prompt(1, 0)).report.exact == len(SYSTEM)


def test_many_prompts_of_shuffled_known_documents_create_no_chunk(cached: CachedModel) -> None:
    """The peers' stores chain documents to what stands before them, and drown in copies within 60 to 90 novel orders.
    With --long, there are a thousand prompts.
    """
    learn(cached, DOCUMENTS)
    cached.prefill(prompt(0, 1))
    before = cached.engine.store.known_keys()
    shuffle = random.Random(1)

    for question in range(some(1000)):
        order = shuffle.sample(range(len(DOCUMENTS)), 4)
        report = cached.prefill(prompt(*order, question=question)).report
        assert report.reused == sum(len(DOCUMENTS[i]) for i in order)

    assert cached.engine.store.known_keys() == before


def test_exact_reuse_of_a_conversation_includes_what_was_generated(cached: CachedModel) -> None:
    first = random_tokens(40, 1)
    answer, _ = cached.generate(first, "exact", max_new_tokens=12, do_sample=False)
    second = first + answer + random_tokens(10, 2)

    reused = cached.prefill(second, "exact")

    assert reused.report.exact == len(first) + len(answer) - 1  # whole chunks and the partly full one behind them
    assert (reused.logits - cached.prefill(second, "full").logits).abs().max() <= 1e-4


def test_generation_continues_from_a_blended_cache_as_from_the_models_own(cached: CachedModel) -> None:
    learn(cached, DOCUMENTS[:3])
    ids = prompt(2, 1, 0)
    cached.policy = EVERYTHING
    blended, report = cached.generate(ids, "blend", max_new_tokens=10, do_sample=False)
    own = cached.model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0, len(ids) :].tolist()
    assert report.reused > 0
    assert blended == own


def test_a_blended_cache_is_never_stored_as_exact(cached: CachedModel) -> None:
    learn(cached, DOCUMENTS[:2])
    ids = prompt(0, 1)
    done = cached.prefill(ids)
    with pytest.raises(InputError, match="approximate"):
        cached.keep(ids, done.cache)
    assert stored_prefix(cached, ids) == len(SYSTEM)  # what comes before all documents, and nothing else


def test_documents_survive_a_restart_on_disk(tmp_path: Path) -> None:
    with CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR) as cached:
        learn(cached, DOCUMENTS[:3])
        wanted = cached.prefill(prompt(2, 0, 1)).logits
    with CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR) as cached:
        assert cached.learn(DOCUMENTS[0]) == 0
        done = cached.prefill(prompt(2, 0, 1))
        assert torch.equal(done.logits, wanted)
        assert done.report.loaded["disk"] > 0


def test_another_model_or_tenant_finds_nothing(tmp_path: Path) -> None:
    with CachedModel(random_model(seed=0), settings(local_disk=tmp_path), SEPARATOR) as cached:
        cached.learn(DOCUMENTS[0])
    for model, salt in (
        (random_model(seed=1), ""),
        (random_model(seed=0, rms_norm_eps=1e-5), ""),
        (random_model(seed=0), "tenant"),
    ):
        with CachedModel(model, settings(local_disk=tmp_path), SEPARATOR, cache_salt=salt) as other:
            assert not other.knows(DOCUMENTS[0])


def test_a_record_that_rots_while_its_prompt_is_planned_costs_time_not_truth(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan counts on a chunk whose part 2 turns out corrupt while layer 2 is awaited: the prompt is planned again
    without it.
    """
    with CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR) as cached:
        learn(cached, DOCUMENTS[:3])
    victim = max(tmp_path.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    blob = bytearray(victim.read_bytes())
    blob[4096 + 2 * 4096 + 5] ^= 1
    victim.write_bytes(blob)
    with (
        CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR) as cached,
        caplog.at_level(logging.WARNING),
    ):
        ids = prompt(0, 1, 2)
        done = cached.prefill(ids, policy=EVERYTHING)
        assert done.report.unknown == 1
        assert (done.logits - cached.prefill(ids, "full").logits).abs().max() <= 1e-4
        assert cached.prefill(ids).report.unknown == 0  # and it was learned anew
        cached.engine.store.flush()  # what was learned is held until it is written
        assert cached.engine.store.held() == 0


def test_a_slab_too_small_for_the_prompt_costs_time_not_truth(tmp_path: Path) -> None:
    """Five documents on disk, room for two chunks in memory: what does not fit is computed."""
    with CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR) as cached:
        learn(cached, DOCUMENTS[:5])
    two_chunks = 2.5 * 4 * 4096 / 2**30
    with CachedModel(random_model(), settings(local_disk=tmp_path, max_local_cpu_size=two_chunks), SEPARATOR) as cached:
        ids = prompt(0, 1, 2, 3, 4)
        wanted = cached.prefill(ids, "full").logits
        for how in ("blend", "exact", "blend", "exact"):
            assert (cached.prefill(ids, how, policy=EVERYTHING).logits - wanted).abs().max() <= 1e-4  # type: ignore[arg-type]
            cached.engine.store.flush()
            assert cached.engine.store.held() == 0


def test_a_document_that_stands_twice_is_reused_twice(cached: CachedModel) -> None:
    cached.learn(DOCUMENTS[0])
    ids = prompt(0, 0)
    done = cached.prefill(ids, policy=EVERYTHING)
    assert done.report.reused == 2 * len(DOCUMENTS[0])
    assert (done.logits - cached.prefill(ids, "full").logits).abs().max() <= 1e-4


def test_a_device_slab_serves_what_was_read_before() -> None:
    with CachedModel(random_model(), settings(max_local_device_size=0.01), SEPARATOR) as cached:
        learn(cached, DOCUMENTS[:3])
        report = cached.prefill(prompt(0, 1, 2)).report
        assert report.loaded["device"] > 0


@pytest.mark.parametrize("how", ["blend", "reuse", "exact", "full"])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([3] * 1025, "1025 tokens, but the model accepts at most 1024"),
        ([3, VOCABULARY], "vocabulary"),
        ([3, -1], "vocabulary"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_by_name(
    cached: CachedModel, how: str, ids: list[int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        cached.prefill(ids, how)  # type: ignore[arg-type]


def test_documents_of_no_token_and_of_one(cached: CachedModel) -> None:
    with pytest.raises(InputError, match="empty"):
        cached.learn([])
    assert cached.learn([5]) == 1
    ids = join(SYSTEM, [[5], DOCUMENTS[0]], random_tokens(3, 9), SEPARATOR)
    assert cached.prefill(ids, policy=EVERYTHING).report.reused == 1


@pytest.mark.parametrize(
    "ids", [[5], [*SEPARATOR], [*SEPARATOR, *SEPARATOR, 5], [*DOCUMENTS[0], *SEPARATOR], [5, 6, 7]]
)
def test_odd_prompts_are_answered_as_full_prefill_would(cached: CachedModel, ids: list[int]) -> None:
    cached.learn(DOCUMENTS[0])
    cached.learn([5])
    wanted = cached.prefill(ids, "full").logits
    for how in ("blend", "exact", "exact", "blend"):
        assert (cached.prefill(ids, how, policy=EVERYTHING).logits - wanted).abs().max() <= 1e-4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "qeury"}, "use one of"),
        ({"strategy": "query", "ratio": 7.0}, "use a number from 0 to 1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecomputePolicy(**values)


def test_an_unknown_way_is_refused(cached: CachedModel) -> None:
    with pytest.raises(InputError, match="'blend', 'reuse', 'exact' or 'full'"):
        cached.prefill([3, 4], "blnd")  # type: ignore[arg-type]


def test_start_refuses_what_cannot_work() -> None:
    with pytest.raises(UnsupportedModel, match="dynamic"):
        CachedModel(random_model(rope="dynamic"), settings(), SEPARATOR)
    with pytest.raises(ConfigError, match="separators"):
        CachedModel(random_model(), settings(), [])
    with pytest.raises(NoMemory, match="does not fit"):
        CachedModel(random_model(), settings(max_local_cpu_size=1e6), SEPARATOR)
    with pytest.raises(NoMemory, match="holds no chunk"):
        CachedModel(random_model(), settings(max_local_cpu_size=1e-6), SEPARATOR)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_pass_the_self_test_and_blend(family: str) -> None:
    documents = [random_tokens(60, 1), random_tokens(40, 2)]
    with CachedModel(random_model(family), settings(), SEPARATOR) as cached:
        assert cached.blends
        for document in documents:
            cached.learn(document)
        prompt = join(random_tokens(9, 3), documents[::-1], random_tokens(8, 4), SEPARATOR)
        done = cached.prefill(prompt, policy=RecomputePolicy(strategy="union", ratio=1.0))
        assert done.report.reused == 100
        full = cached.prefill(prompt, "full")
        said, wanted = (greedy_answer(cached, prompt, one, 12) for one in (done, full))
        assert said == wanted, "the model goes on from the cache that a blend has filled"


def test_a_model_that_fails_the_self_test_is_served_in_full_and_reuses_exact_prefixes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model whose layers do something that ours do not know (here: the model scales its embeddings)."""
    model = random_model()
    forward, embed = model.model.forward, model.model.embed_tokens
    model.model.forward = lambda input_ids=None, **more: forward(**more | {"inputs_embeds": 1.5 * embed(input_ids)})
    with caplog.at_level(logging.ERROR), CachedModel(model, settings(), SEPARATOR) as cached:
        cached.learn(DOCUMENTS[0])
        done = cached.prefill(prompt(0))
        assert torch.equal(done.logits, cached.prefill(prompt(0), "full").logits)
        ids = random_tokens(50, 1)
        cached.prefill(ids, "exact")
        longer = ids + random_tokens(20, 2)
        again = cached.prefill(longer, "exact")
        assert again.report.exact == 50
        assert (again.logits - cached.prefill(longer, "full").logits).abs().max() <= 1e-4
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "self-test" in done.report.note


def test_a_corpus_larger_than_memory_is_learned_whole_onto_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning waits for the disk; a full write queue would drop chunks that are then evicted, and the documents with
    them.
    """
    slots = 6.5 * 4 * 4096 / 2**30
    corpus = [random_tokens(30, 900 + i) for i in range(25)]
    write = DiskTier.write

    def write_slowly(tier: DiskTier, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        time.sleep(0.01)
        return write(tier, meta, parts)

    monkeypatch.setattr(DiskTier, "write", write_slowly)
    with CachedModel(random_model(), settings(local_disk=tmp_path, max_local_cpu_size=slots), SEPARATOR) as cached:
        learn(cached, corpus)
    with CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR) as cached:
        assert all(cached.knows(document) for document in corpus)


def test_a_document_larger_than_the_device_slab_is_kept_on_the_host() -> None:
    two_chunks = 2.5 * 4 * 4096 / 2**30
    with CachedModel(random_model(), settings(max_local_device_size=two_chunks), SEPARATOR) as cached:
        long = random_tokens(160, 1)
        assert cached.learn(long) == 10
        assert cached.knows(long)


def test_an_exact_prefix_is_kept_when_documents_are_too_few_to_blend() -> None:
    with CachedModel(random_model(), settings(blend_min_tokens=100), SEPARATOR) as cached:
        cached.learn(DOCUMENTS[0])
        cached.prefill(prompt(0))
        report = cached.prefill(prompt(0)).report
        assert (report.exact, report.reused) == (len(SYSTEM), 0)
        assert "blend_min_tokens" in report.note


@pytest.mark.parametrize("ids", ["text", None, [3.7], [[3, 4], [5, 6]], [None], 7, {"input_ids": [3]}])
def test_what_is_no_sequence_of_token_ids_is_refused(cached: CachedModel, ids: object) -> None:
    with pytest.raises(InputError, match="integer token ids"):
        cached.prefill(ids)  # type: ignore[arg-type]


def test_token_ids_may_be_a_tensor_as_tokenizers_return_it(cached: CachedModel) -> None:
    ids = random_tokens(9, 1)
    wanted = cached.prefill(ids, "full").logits
    for given in (torch.tensor(ids), torch.tensor([ids]), tuple(ids), [ids]):
        assert torch.equal(cached.prefill(given, "full").logits, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("separators", ["# #", None, [500], [[1], []], [[1, None]]])
def test_separators_that_cannot_be_found_are_refused(separators: object) -> None:
    with pytest.raises(ConfigError, match="separators"):
        CachedModel(random_model(), settings(), separators)  # type: ignore[arg-type]


def test_a_dropped_model_gives_its_directory_back(tmp_path: Path) -> None:
    cached = CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR)
    cached.learn(DOCUMENTS[0])
    cached.engine.store.flush()
    del cached
    gc.collect()
    CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR).close()


@pytest.mark.parametrize("how", ["full", "exact", "blend"])
def test_model_generate_continues_from_a_prefilled_cache(cached: CachedModel, how: str) -> None:
    """The line of docs/serve.md: `model.generate(prompt, cache=done.cache)`."""
    cached.policy = EVERYTHING
    learn(cached, DOCUMENTS[:2])
    ids = torch.tensor([prompt(0, 1)])
    own = cached.model.generate(ids, max_new_tokens=8, do_sample=False)
    done = cached.prefill(prompt(0, 1), how)  # type: ignore[arg-type]
    given = {cache_argument(cached.model): done.cache}
    assert torch.equal(cached.model.generate(ids, **given, max_new_tokens=8, do_sample=False), own)


def test_a_cache_of_other_tokens_is_never_stored(cached: CachedModel) -> None:
    ids = random_tokens(40, 3)
    cache = cached.prefill(ids, "full").cache
    with pytest.raises(InputError, match="the cache has 39 tokens"):
        cached.keep([*ids, 5, 6], cache)
    assert cached.keep(ids, cache) > 0
    assert stored_prefix(cached, ids) == 39


@pytest.mark.parametrize(
    "option",
    [
        *({"num_beams": 2}, {"num_return_sequences": 2}, {"return_dict_in_generate": True}, {"use_cache": False}),
        *({"prompt_lookup_num_tokens": 3}, {"assistant_model": object()}, {"cache_implementation": "static"}),
        {"attention_mask": torch.ones(1, 10)},
    ],
)
def test_options_that_need_other_caches_are_refused_by_name(cached: CachedModel, option: dict) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        cached.generate(random_tokens(10, 1), "full", **option)


@pytest.mark.parametrize("option", [{"use_cache": False}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_a_generation_config_with_other_caches_changes_no_answer(option: dict) -> None:
    """Checkpoints that were saved after training often have `use_cache: false`."""
    model, ids, given = random_model(), random_tokens(40, 1), {"max_new_tokens": 8, "do_sample": False}
    usual = model.generate(torch.tensor([ids]), **given)[0].tolist()[40:]
    for name, value in option.items():
        setattr(model.generation_config, name, value)
    with CachedModel(model, settings(), SEPARATOR) as cached:
        assert cached.generate(ids, "exact", **given)[0] == usual
        turn = [*ids, *usual, 5, 6]
        exact, full = cached.prefill(turn, "exact"), cached.prefill(turn, "full")
        assert exact.report.exact >= 40
        torch.testing.assert_close(exact.logits, full.logits, atol=1e-4, rtol=0)


def test_a_conversation_that_outgrows_the_model_still_gets_its_answer() -> None:
    with CachedModel(random_model(max_position_embeddings=96), settings(), SEPARATOR) as cached:
        answer, _ = cached.generate(random_tokens(90, 1), "exact", max_new_tokens=12, do_sample=False)
        assert len(answer) == 12


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("family", "parameters", "length", "longest"),
    [
        ("qwen3", YARN, 96, 192),
        ("qwen3", {**YARN, "original_max_position_embeddings": 64}, 96, 128),
        ("qwen3", {**YARN, "original_max_position_embeddings": 64}, 256, 256),
        ("gemma3", {"sliding_attention": PLAIN, "full_attention": YARN}, 96, 192),
        ("qwen3", PLAIN, 96, 96),
    ],
)
def test_yarn_gives_longer_prompts(family: str, parameters: dict[str, object], length: int, longest: int) -> None:
    """Models say to add it to the configuration, in which `max_position_embeddings` stays the original length."""
    model = random_model(family, rope_parameters=parameters, max_position_embeddings=length)
    with CachedModel(model, settings(), SEPARATOR) as cached:
        assert len(cached.prefill(random_tokens(longest, 1), "full").logits) == VOCABULARY
        with pytest.raises(InputError, match=f"{longest}"):
            cached.prefill(random_tokens(longest + 1, 1), "full")


def test_a_short_conversation_is_reused_at_the_default_chunk_size() -> None:
    with CachedModel(random_model(), settings(chunk_size=256), SEPARATOR) as cached:
        turn = random_tokens(30, 1)
        for question in range(4):
            answer, report = cached.generate(turn, "exact", max_new_tokens=5, do_sample=False)
            assert report.exact == (0 if question == 0 else len(turn) - 8)
            turn = [*turn, *answer, *random_tokens(7, question)]


def test_a_document_at_the_start_of_a_prompt_is_exact(cached: CachedModel) -> None:
    """Nothing stands before it: alone and here are the same."""
    cached.learn(DOCUMENTS[4])
    cached.learn(DOCUMENTS[1])
    ids = join(DOCUMENTS[4], [DOCUMENTS[1]], random_tokens(5, 9), SEPARATOR)
    report = cached.prefill(ids).report
    assert report.exact == len(DOCUMENTS[4])
    assert report.reused == len(DOCUMENTS[1])


@pytest.mark.parametrize("strategy", ["query", "union", "deviation", "head", "random", "none"])
def test_what_is_stored_as_exact_after_approximate_blends_is_exact(cached: CachedModel, strategy: str) -> None:
    """Long system texts that share a chunk, unknown documents of every length between known ones, little recomputed."""
    learn(cached, DOCUMENTS)
    shuffle = random.Random(3)
    system = random_tokens(16, 500)
    for turn in range(6):
        text = system + random_tokens(shuffle.choice([0, 5, 40, 190]), 600 + turn)
        unknown = [random_tokens(shuffle.choice([3, 60, 200]), 700 + turn + i) for i in range(2)]
        parts = [*unknown, *shuffle.sample(DOCUMENTS, 2)]
        shuffle.shuffle(parts)
        ids = join(text, parts, random_tokens(6, turn), SEPARATOR)
        cached.prefill(ids, policy=RecomputePolicy(strategy=strategy, ratio=0.1))
        exact, full = cached.prefill(ids, "exact"), cached.prefill(ids, "full")
        assert exact.report.exact >= len(text)
        assert (exact.logits - full.logits).abs().max() <= 1e-4
        for mine, own in zip(exact.cache.layers, full.cache.layers, strict=True):
            assert (mine.keys - own.keys).abs().max() <= 1e-4


def test_a_document_that_memory_cannot_hold_is_refused_and_not_learned() -> None:
    two_chunks = 2.5 * 4 * 4096 / 2**30
    with CachedModel(random_model(), settings(max_local_cpu_size=two_chunks), SEPARATOR) as cached:
        cached.learn(DOCUMENTS[0])
        with pytest.raises(InputError, match="max_local_cpu_size"):
            cached.learn(random_tokens(100, 1))
        ids = join(SYSTEM, [random_tokens(100, 1)], random_tokens(3, 1), SEPARATOR)
        wanted = cached.prefill(ids, "full").logits
        for how in ("blend", "exact", "blend"):
            assert (cached.prefill(ids, how).logits - wanted).abs().max() <= 1e-4  # type: ignore[arg-type]


def test_a_document_of_which_a_chunk_cannot_be_filled_holds_nothing(
    cached: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of its other chunks were held for ever."""
    view, seen = cached.engine.store.view, []

    def failing(slot: Reservation) -> torch.Tensor:
        seen.append(slot)
        if len(seen) == 2:
            raise MemoryError
        return view(slot)

    with monkeypatch.context() as patch:
        patch.setattr(cached.engine.store, "view", failing)
        with pytest.raises(MemoryError):
            cached.learn(DOCUMENTS[5])  # 45 tokens in chunks of 16
    assert cached.engine.store.held() == 0
    assert cached.learn(DOCUMENTS[5]) == 3


def test_blending_needs_to_be_switched_on() -> None:
    with CachedModel(random_model(), settings(enable_blending=False), SEPARATOR) as cached:
        with pytest.raises(ConfigError, match="enable_blending"):
            cached.prefill(prompt(0))
        assert cached.prefill(prompt(0), "exact").report.exact == 0


def test_an_error_inside_the_block_lets_go_of_the_directory(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR) as cached,
    ):
        cached.prefill(1 / 0)  # type: ignore[arg-type]
    CachedModel(random_model(), settings(local_disk=tmp_path), SEPARATOR).close()


def test_one_layer_blends_by_question_and_has_no_check_layer_so_that_deviation_computes_all() -> None:
    with CachedModel(random_model(layers=1), settings(), SEPARATOR) as cached:
        cached.learn(DOCUMENTS[0])
        assert cached.prefill(prompt(0)).report.reused == len(DOCUMENTS[0])
        report = cached.prefill(prompt(0), policy=RecomputePolicy(strategy="deviation")).report
        assert (report.reused, report.charged_budget) == (len(DOCUMENTS[0]), 1.0)


def test_the_same_weights_have_the_same_fingerprint_and_one_value_changes_it(tmp_path: Path) -> None:
    model = random_model()
    before = identity(model, None)
    model.save_pretrained(tmp_path)
    assert identity(type(model).from_pretrained(tmp_path), None) == before
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[5, 7] += 1e-6
    changed = identity(model, None)
    assert changed != before
    with torch.no_grad():  # a permutation, which sums would not see
        model.model.layers[1].mlp.down_proj.weight.copy_(model.model.layers[1].mlp.down_proj.weight.flip(1))
    assert identity(model, None) != changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_is_blended(dtype: torch.dtype) -> None:
    with CachedModel(random_model().to(dtype), settings(), SEPARATOR) as cached:
        assert cached.blends
        learn(cached, DOCUMENTS[:3])
        full = cached.prefill(prompt(2, 0, 1), "full").logits.float()
        blend = cached.prefill(prompt(2, 0, 1), policy=EVERYTHING).logits.float()
        assert (full - blend).abs().max() <= 0.05 * full.abs().max()


def test_a_rotation_that_does_nothing_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmc.blend.kernels.place.rotate", lambda keys, _turn, out, **_: out.copy_(keys))
    with CachedModel(random_model(), settings(), SEPARATOR) as cached:
        assert not cached.blends


# -- loading or computing ---------------------------------------------------------------------------------------------

CORPUS = [random_tokens(60, 300 + i) for i in range(40)]


def asking(*order: int) -> list[int]:
    return join(SYSTEM, [CORPUS[i] for i in order], random_tokens(7, 80), SEPARATOR)


@pytest.fixture(scope="module")
def corpus_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    with CachedModel(random_model(), settings(local_disk=path, chunk_size=64), SEPARATOR) as cached:
        learn(cached, CORPUS)
        cached.prefill(asking(0))
    return path


def over(path: Path, **changes: object) -> tuple[CachedModel, Delayed, Counted]:
    """A model over the corpus's disk, which can be made slow, and counts. No speed is known from an earlier test."""
    (path / SPEEDS).unlink(missing_ok=True)
    cached = CachedModel(random_model(), settings(local_disk=path, chunk_size=64, **changes), SEPARATOR)
    tiers = tiers_of(cached.engine.store)
    counted = Counted(tiers[0])
    tiers[0] = slow = Delayed(counted)
    return cached, slow, counted


def pretend(cached: CachedModel, *, byte: float, token: float = 1e-6) -> None:
    """As if five loads had taken so long a byte, and five prefills so long a token."""
    for _ in range(5):
        note_load(cached.engine.store.cost, "disk", records=1, opening=0.0, bytes=1_000_000, reading=1_000_000 * byte)
        cached.engine.store.cost.computed(100_000, 100_000 * token, 100)


@pytest.fixture(scope="module")
def in_memory() -> Iterator[CachedModel]:
    """What the answers have to be: the same documents, where nothing is ever loaded."""
    with CachedModel(random_model(), settings(chunk_size=64), SEPARATOR) as cached:
        learn(cached, CORPUS)
        cached.prefill(asking(0))
        yield cached


def test_a_slow_disk_is_not_waited_for_and_is_found_again_when_it_is_fast(
    corpus_on_disk: Path, in_memory: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second for what the model computes in a few milliseconds."""
    monkeypatch.setattr(cost_model, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(cost_model, "TRIAL_CHOICES", 2)
    cached, slow, counted = over(corpus_on_disk)

    def serve(i: int) -> Report:
        """Documents that nobody has asked for yet."""
        ids = asking(2 * i, 2 * i + 1)
        done = cached.prefill(ids)
        wanted = in_memory.prefill(ids, "full" if done.report.skipped else "blend")
        assert (done.logits - wanted.logits).abs().max() <= 1e-4
        assert done.report.unknown == 0
        return done.report

    with cached:
        slow.per_part = 0.1
        for i in range(2):
            cached.prefill(asking(i, i), "full")
            assert serve(i).loaded["disk"] > 0, "the speed of the model is unknown"
        cached.prefill(asking(2, 2), "full")
        eventually(lambda: reading(cached.engine.store.cost)["disk"].guess)
        before = counted.counts.opened
        for i in (3, 4):
            report = serve(i)
            assert (report.skipped, report.reused) == (120, 0)
            assert report.loaded.keys() <= {"host"}
            assert "loading them would take about" in report.note
        assert counted.counts.opened == before

        slow.per_part, was = 0.0, reading(cached.engine.store.cost)["disk"].newest
        assert serve(5).loaded["disk"] > 0, "a trial"
        eventually(lambda: reading(cached.engine.store.cost)["disk"].newest < was / 5)
        for _ in range(9):  # what this machine computes in the time of a read is not the point
            cached.engine.store.cost.computed(100_000, 1e5, len(asking(0, 1)))
        for i in range(6, 10):
            assert serve(i).loaded["disk"] > 0


@pytest.mark.parametrize("how", ["blend", "reuse"])
def test_what_is_stored_and_not_loaded_is_neither_learned_nor_written_again(corpus_on_disk: Path, how: How) -> None:
    cached, _, counted = over(corpus_on_disk)
    with cached:
        pretend(cached, byte=1.0)
        before = cached.engine.store.known_keys()
        for _ in range(3):
            done = cached.prefill(asking(0), how)
            assert done.report.unknown == 0
            assert done.report.skipped == 60 + len(SYSTEM)
            assert (done.logits - cached.prefill(asking(0), "full").logits).abs().max() <= 1e-4
        assert cached.learn_pending() == 0
        assert cached.knows(CORPUS[0])
        assert cached.engine.store.known_keys() == before
        assert (counted.counts.opened, counted.counts.written) == (0, 0)


def test_an_exact_prefix_on_a_slow_disk_is_computed_and_is_right(tmp_path: Path) -> None:
    ids = random_tokens(150, 1)
    with CachedModel(random_model(), settings(local_disk=tmp_path, chunk_size=64), SEPARATOR) as cached:
        cached.prefill(ids, "exact")
    cached, _, counted = over(tmp_path)
    with cached:
        pretend(cached, byte=1.0)
        done = cached.prefill([*ids[:140], *random_tokens(20, 2)], "exact")
        assert (done.report.exact, done.report.skipped) == (0, 128)
        cached.engine.store.flush()
        assert (counted.counts.opened, counted.counts.written) == (0, 1), (
            "the new end, and not the first two chunks again"
        )
        wanted = cached.prefill([*ids[:140], *random_tokens(20, 2)], "full")
        assert (done.logits - wanted.logits).abs().max() <= 1e-4


def test_what_is_in_memory_is_reused_whatever_the_disk_is_like(corpus_on_disk: Path) -> None:
    cached, _, _ = over(corpus_on_disk)
    with cached:
        assert cached.prefill(asking(0)).report.reused == 60
        pretend(cached, byte=1.0)
        done = cached.prefill(asking(1, 0, 2), policy=EVERYTHING)
        assert (done.report.reused, done.report.skipped, done.report.unknown) == (60, 120, 0)
        assert done.report.exact == len(SYSTEM)
        assert (done.logits - cached.prefill(asking(1, 0, 2), "full").logits).abs().max() <= 1e-4


def test_a_disk_that_is_faster_than_computing_changes_nothing(corpus_on_disk: Path) -> None:
    cached, _, _ = over(corpus_on_disk)
    with cached:
        pretend(cached, byte=1e-12, token=1.0)
        for i in range(6):
            report = cached.prefill(asking(i)).report
            assert (report.reused, report.skipped, report.note) == (60, 0, "")


def test_a_load_that_spares_nothing_is_not_begun(corpus_on_disk: Path) -> None:
    cached, _, _ = over(corpus_on_disk)
    with cached:
        cached.prefill(asking(0))
        pretend(cached, byte=1e-9)
        assert cached.prefill(asking(1), policy=EVERYTHING).report.skipped == 60


def test_what_computing_takes_is_learned_from_what_was_computed_and_nothing_else(cached: CachedModel) -> None:
    rates = computing(cached.engine.store.cost)
    cached.learn(CORPUS[0])
    assert set(rates) == {(60).bit_length()}
    rates.clear()
    cached.prefill(asking(0))
    assert not rates, "most of that was reused"
    ids = asking(1, 2)
    assert cached.prefill(ids).report.exact == len(SYSTEM)
    assert set(rates) == {(len(SYSTEM) + len(ids)).bit_length()}, "behind the system text, as a longer prompt's tokens"


def test_parts_of_a_plan_on_different_devices_are_joined_on_the_model_s() -> None:
    """With a slab on the device, some chunks of a prefix are there already and others come from the host."""
    shape = DecoderLayers(random_model()).shape
    parts = [torch.zeros(2, 3, 2, 16), torch.zeros(2, 5, 2, 16, device="meta")]
    keys, values = side_by_side(parts, shape, kernels_of(torch.device("cpu")), torch.device("meta"))
    assert (keys.shape, values.shape) == ((2, 8, 16), (2, 8, 16))
    assert keys.device.type == "meta"


# -- behind an attention sink ------------------------------------------------------------------------------------------

SINK, PRIMER = 2, random_tokens(20, 90)


def test_a_document_is_learned_behind_the_sink_and_exact_there() -> None:
    with CachedModel(random_model(), settings(), SEPARATOR, learn_prefix=[SINK]) as cached:
        document = DOCUMENTS[0]
        sink = prefilled(cached.model, [SINK])
        wanted = rows_of(prefilled(cached.model, document, sink))
        cached.learn(document)
        placed = cached.engine.documents([*SYSTEM, *document], [Span(len(SYSTEM), len(SYSTEM) + len(document))])
        with closing(cached.engine.layers(placed[0].pieces)) as reader:
            for layer, parts in reader:
                for halves, side in zip(zip(*parts, strict=True), wanted[layer], strict=True):
                    assert torch.allclose(torch.cat(halves), side[1:], atol=1e-6)
        ids = [SINK, *document, *SEPARATOR, *random_tokens(7, 80)]
        blend = cached.prefill(ids)
        assert blend.report.reused == 0
        assert (blend.logits - cached.prefill(ids, "full").logits).abs().max() <= 1e-4


@pytest.mark.parametrize("primer", [[], PRIMER, random_tokens(150, 90)])
def test_at_ratio_one_documents_behind_a_sink_are_full_prefill(primer: list[int]) -> None:
    with CachedModel(random_model(), settings(), SEPARATOR, learn_prefix=[SINK, *primer]) as cached:
        learn(cached, DOCUMENTS[:4])
        # The first document begins before the position at which it was learned.
        for ids in (prompt(3, 1, 0), join([], [DOCUMENTS[i] for i in (2, 0)], random_tokens(7, 80), SEPARATOR)):
            blend = cached.prefill(ids, "blend", policy=EVERYTHING)
            assert blend.report.reused > 0
            assert (cached.prefill(ids, "full").logits - blend.logits).abs().max() <= 1e-4


def kv_of(cached: CachedModel, document: list[int]) -> list[torch.Tensor]:
    """The stored keys and values of a document, `[2, T, H, D]` of each layer."""
    placed = cached.engine.documents(document, [Span(0, len(document))])
    match = cached.engine.look(Match(prompt=0, exact_stop=0, documents=placed), cached.engine.token_chain([]))
    pieces = match.documents[0].pieces
    assert all(piece.place for piece in pieces)
    with closing(cached.engine.layers(pieces)) as reader:
        return [torch.cat([torch.stack(part) for part in parts], dim=1) for _, parts in reader]


@pytest.mark.parametrize("how", ["blend", "reuse"])
@pytest.mark.parametrize("prefix", [[SINK, *PRIMER], [SINK], []])
def test_a_system_text_that_is_a_document_is_never_stored_as_exact(how: How, prefix: list[int]) -> None:
    """A system text that is a document is reused like a document, and so its KV may be approximate."""
    document = DOCUMENTS[3]
    ids = [SINK, *document, *SEPARATOR, *random_tokens(7, 80)]
    with CachedModel(random_model(), settings(), SEPARATOR, learn_prefix=prefix) as cached:
        cached.learn(document)
        cached.prefill(ids, how)
        exact, full = cached.prefill(ids, "exact"), cached.prefill(ids, "full")
        assert (exact.logits - full.logits).abs().max() <= 1e-4


def test_a_learned_document_is_found_in_part_in_a_prompt_of_the_next_process(tmp_path):
    text = random.Random(0).choices(range(10, 90), k=200)
    given = settings(local_disk=tmp_path, blend_min_tokens=0)
    with CachedModel(random_model(), given, SEPARATOR) as cached:
        cached.learn(text, "a.txt")
    with CachedModel(random_model(), given, SEPARATOR) as cached:
        prompt = [1, 2, 3, *text[30:150], 4, 5]
        (found,) = cached.engine.with_known(prompt, [])
        assert (found.known.name, found.span) == ("a.txt", Span(3, 123))
        report = cached.prefill(prompt, policy=RecomputePolicy(strategy="all")).report
        assert report.reused == 120
        exact = cached.prefill(prompt, "full").logits
        blended = cached.prefill(prompt, policy=RecomputePolicy(strategy="all")).logits
        assert torch.allclose(blended, exact, atol=1e-4)


def test_small_parts_of_an_evicted_document_do_not_have_all_of_it_learned() -> None:
    text = random.Random(0).choices(range(10, 90), k=400)
    with CachedModel(random_model(), settings(blend_min_tokens=0), SEPARATOR) as cached:
        cached.learn(text, "a.txt")
        for key in cached.engine.known.list()[0].keys:
            cached.engine.store.forget(key)
        small, enough = [1, *text[100:190], 2, 3], [1, *text[:70], 2, *text[100:170], 3]
        for prompt, learned in ((small, False), (enough, True)):
            for _ in range(2):
                cached.generate(prompt, max_new_tokens=1)
            assert cached.knows(text) == learned


@pytest.mark.parametrize("part", [slice(0, 200), slice(30, 150)], ids=["whole", "part"])
def test_a_known_document_that_was_evicted_is_learned_again_from_a_prompt_without_separators(part: slice) -> None:
    """Earlier, an evicted document was found in every prompt, never stored again, and so computed for ever."""
    text = random.Random(0).choices(range(10, 90), k=200)
    prompts = [[1, 2, 3, *text[part], 4, 5 + number] for number in range(3)]
    with CachedModel(random_model(), settings(blend_min_tokens=0), SEPARATOR) as cached:
        cached.learn(text, "a.txt")
        (known,) = cached.engine.known.list()
        for key in known.keys:
            cached.engine.store.forget(key)  # as an eviction does
        lost = cached.prefill(prompts[0]).report
        assert (lost.reused, lost.unknown) == (0, 1)
        cached.generate(prompts[1], max_new_tokens=1)  # An idle moment follows it.
        assert cached.knows(text)
        assert cached.prefill(prompts[2]).report.reused == len(text[part])
        cached.engine.keeper.remove([known])
        for number in range(2):
            cached.generate([*prompts[0], 7 + number], max_new_tokens=1)
        assert not cached.knows(text), "what somebody has removed is not learned again"


@pytest.mark.parametrize("prefix", [[], [SINK], [SINK, *PRIMER]])
def test_a_choice_knows_the_depth_of_each_token(monkeypatch: pytest.MonkeyPatch, prefix: list[int]) -> None:
    text, seen = random.Random(0).choices(range(10, 90), k=200), list[Evidence]()
    monkeypatch.setitem(STRATEGIES, "union", lambda evidence, count: by_union(seen.append(evidence) or evidence, count))
    with CachedModel(random_model(), settings(blend_min_tokens=0), SEPARATOR, learn_prefix=prefix) as cached:
        cached.learn(text)
        cached.prefill([1, 2, 3, *text[30:150], 4, 5])
    (evidence,) = seen
    assert (evidence.computed_at - evidence.learned_after).tolist() == [*range(30, 150)]


@pytest.mark.parametrize("prefix", [[], [SINK], [SINK, *PRIMER]])
@pytest.mark.parametrize("edited", [range(8), range(100, 104)], ids=["at the beginning", "in the middle"])
def test_an_edited_document_at_the_start_of_a_prompt_is_approximate(prefix: list[int], edited: range) -> None:
    """Tokens after the edit stand where they were learned, but after others. Earlier, they were taken for exact."""
    text = random.Random(0).choices(range(10, 60), k=200)
    changed = [61 + at % 8 if at in edited else token for at, token in enumerate(text)]
    question = [4, 5, 6]
    with CachedModel(random_model(), settings(blend_min_tokens=0), SEPARATOR, learn_prefix=prefix) as cached:
        cached.learn(text)
        (whole,) = cached.engine.with_known([*prefix, *text, *question], [])
        assert all(piece.exact for piece in whole.pieces), "the control"
        prompt = [*prefix, *changed, *question]
        *_, last = cached.engine.with_known(prompt, [])
        assert last.span.stop == len(prefix) + len(text)
        assert not any(piece.exact for piece in last.pieces)
        cached.prefill(prompt[: len(prefix) + edited.stop + 12], "exact")
        blended = cached.prefill(prompt, "blend")
        assert blended.report.reused > 0
        assert blended.cache.lmc_approximate
        exact, full = cached.prefill(prompt, "exact"), cached.prefill(prompt, "full")
        assert (exact.logits - full.logits).abs().max() <= 1e-4


def test_a_document_that_does_not_fit_behind_the_primer_stops_no_later_prompt(caplog: pytest.LogCaptureFixture) -> None:
    with CachedModel(random_model(), settings(), SEPARATOR, learn_prefix=random_tokens(40, 1)) as cached:
        longest = random_tokens(cached.layers.positions - 30, 2)
        ids = join([SINK], [longest], random_tokens(7, 3), SEPARATOR)
        assert len(ids) <= cached.layers.positions
        cached.prefill(ids)
        cached.prefill(random_tokens(10, 4))
        assert not cached.engine.learning
        (warning,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
        assert warning.startswith("a document of an earlier prompt was not learned: the document has ")
        assert len(cached.generate(ids, max_new_tokens=1)[0]) == 1


PREFIXES = [], [SINK], [SINK, *PRIMER]
WAYS_IN = list(
    product(PREFIXES, (SYSTEM, *PREFIXES), ("blend", "reuse", "exact", "full", "generate", "keep", "learn_documents"))
)


@pytest.mark.parametrize(("prefix", "start", "way"), cases(WAYS_IN, *WAYS_IN[::5]))
def test_no_way_in_lets_a_prompt_change_what_a_document_is_for_others(
    prefix: list[int], start: list[int], way: str
) -> None:
    """A document that was met behind another one, which might say anything, is stored as if it had been met alone."""
    poison, document = DOCUMENTS[0], DOCUMENTS[3]
    ids = join(start, [poison, document], random_tokens(7, 80), SEPARATOR)
    with CachedModel(random_model(), settings(), SEPARATOR, learn_prefix=prefix) as cached:
        cached.learn(poison)  # It is reused, and what it changes in the other document is computed.
        if way == "generate":
            cached.generate(ids, max_new_tokens=3, do_sample=False)
        elif way == "keep":
            cached.keep(ids, cached.prefill(ids, "full").cache)
        elif way == "learn_documents":
            cached.learn_documents(ids)
        else:
            cached.prefill(ids, way)  # type: ignore[arg-type]
        cached.learn_pending()
        assert cached.knows(document) == (way in ("blend", "reuse", "generate", "learn_documents"))
        cached.learn(document)
        found = kv_of(cached, document)
        wanted = rows_of(prefilled(cached.model, [*prefix, *document]))
    for stored, layer in zip(found, wanted, strict=True):
        assert (stored - torch.stack(layer)[:, len(prefix) :]).abs().max() <= 1e-5


@pytest.mark.parametrize("prefix", [[VOCABULARY], [-1], ["a"]])
def test_a_sink_that_is_no_token_is_refused(prefix: list) -> None:
    with pytest.raises(InputError, match="learn_prefix"):
        CachedModel(random_model(), settings(), SEPARATOR, learn_prefix=prefix)


@pytest.mark.parametrize("kind", ["mps", "xpu", "cuda"])
def test_copies_to_and_from_any_gpu_are_waited_for(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Before chunks that were copied are found by others, and before slots that were read are given back."""
    waited: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waited.append(device.type))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device.type))
    with CachedModel(random_model(), settings(), SEPARATOR) as cached:
        device = torch.device(kind)
        cached.learn(DOCUMENTS[0])
        start = len(SYSTEM) + len(SEPARATOR)
        (document,) = cached.engine.documents(prompt(0), [Span(start, start + len(DOCUMENTS[0]))])
        assert not waited, "nothing waits on a CPU"
        monkeypatch.setattr(cached.engine, "_device", device)
        with closing(cached.engine.layers(document.pieces)) as layers:
            next(layers)
        assert waited == [kind]
        monkeypatch.undo()


@pytest.mark.parametrize("kind", ["mps", "xpu", "cuda", "cpu"])
def test_a_time_is_taken_when_the_work_on_the_device_is_done(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waited.append(device.type))
    settle(torch.device(kind))
    assert waited == ([] if kind == "cpu" else [kind])
    steps: list[object] = []
    with CachedModel(random_model(), settings(), SEPARATOR) as cached:
        monkeypatch.setattr(model_module, "settle", steps.append)
        monkeypatch.setattr(model_module, "time", SimpleNamespace(perf_counter=lambda: steps.append("time") or 0.0))
        cached.prefill(prompt(0), "full")
    assert steps[-2:] == [cached.layers.device, "time"]
