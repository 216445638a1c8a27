"""The scheduler's side of the vLLM connector, with an engine made of fakes: what is promised, kept, isolated and given
back.
"""

import itertools
import json
import random
import re
import threading
import time
from types import SimpleNamespace

import pytest
import storage_fakes
import torch
import vllm_fakes
from storage_fakes import DictTier, Gated, Shared, lose, note_load
from tier_wrappers import Counted, Faulty
from vllm_fakes import (
    APPROXIMATE,
    BLOCK,
    CHUNK,
    DOC_A,
    DOC_B,
    LAYERS,
    PAGE,
    PLAIN,
    QUESTION,
    SEPARATOR,
    SYSTEM,
    Adapter,
    Lab,
    Request,
    learn,
    page,
    prompt,
    state_of,
    token_bytes,
)  # fmt: skip

from lmc.background import Background
from lmc.blend.segments import Span
from lmc.connectors.vllm.messages import BlendJob, LoadJob, StepReport
from lmc.connectors.vllm.model_identity import layout_of, model_identity
from lmc.connectors.vllm.scheduler import claims, classifier
from lmc.connectors.vllm.scheduler.admission import MAX_BLEND_WAIT_SECONDS
from lmc.connectors.vllm.scheduler.idle import MAX_PAUSE_SECONDS
from lmc.connectors.vllm.scheduler.request_state import Role
from lmc.connectors.vllm.scheduler.scheduler import MAX_LEARN_SECONDS
from lmc.documents import finder
from lmc.documents.block_table import BlockTable
from lmc.documents.finder import DocumentFinder
from lmc.documents.repeats import NAME as REPEATED
from lmc.engine import CacheEngine, DocumentMatch, NewChunk, promotion
from lmc.engine.identity import adapter_stamp
from lmc.errors import ConfigError
from lmc.keys import RecordKind
from lmc.storage import loader
from lmc.storage.contract import PinState
from lmc.storage.cost_model import CostModel
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.record import RecordMeta

MB = 1 << 20


@pytest.fixture(autouse=True)
def part_by_part(monkeypatch):
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)


def gated():
    return Gated(DictTier(), parts=LAYERS)


def fill(tier, *prompts, documents=(), **options):
    """Records of these prompts and documents in a tier, by a lab that is gone."""
    lab = Lab([tier], **options)
    for i, tokens in enumerate(prompts):
        lab.serve(f"fill {i}", tokens, {"blend": False})
    learn(lab, *documents)
    lab.check()
    lab.scheduler.close()


class Turnstile:
    """A gate that lets one read through at a time."""

    def __init__(self):
        self._let_in = threading.Semaphore(0)

    def let_in(self):
        self._let_in.release()

    def set(self):
        for _ in range(100):
            self.let_in()

    def wait(self, seconds):
        return self._let_in.acquire(timeout=seconds)


def page_key(lab, block_hash):
    """Of the chunk whose last block has this hash."""
    return lab.engine.block_chain([], BLOCK).key(block_hash)


def document_keys(lab, tokens):
    return lab.engine.document_keys(tokens, lab.engine.namespace(RecordKind.DOCUMENT))


def run(lab, name, tokens):
    """A request that the engine has computed, though with no block of its own; what is said of it."""
    request = lab.arrive(name, tokens)
    request.num_computed_tokens = len(tokens)
    return lab.finish(request)


# -- exact ------------------------------------------------------------------------------------------------------------


def test_a_saved_prompt_is_loaded_again_byte_for_byte(make):
    lab = make()
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    request = lab.arrive("two", PLAIN)
    assert lab.admit(request) == 40
    lab.step()
    assert lab.right(request, 40)
    assert request.num_computed_tokens == 39
    lab.compute(request, 1)
    assert lab.finish(request) == {"exact_tokens": 40, "tokens_from": {"host": 40}}
    assert lab.scheduler.numbers()["loads"] == 1


def test_only_what_the_engine_does_not_have_is_loaded(make):
    lab = make()
    lab.serve("one", PLAIN)
    lab.settle()
    for block_hash in list(lab.pool.cached)[3:]:
        lab.pool.cached.pop(block_hash).block_hash = None
    request = lab.arrive("two", PLAIN)
    assert lab.admit(request) == 40 - 3 * BLOCK
    plan = lab.step()
    assert [copy.first for copy in plan.loads[0].copies] == [1, 0, 0, 0]
    assert lab.right(request, 40)
    lab.finish(request)


def test_two_adapters_and_the_model_alone_share_no_chunk(make, tmp_path):
    """The fakes' hashes of blocks know no adapters, so that lmc's own stamp has to keep them apart."""
    adapters = [None]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter.safetensors").write_bytes(b"the same size")
        adapters.append(Adapter(str(tmp_path / name), name=name, lora_int_id=len(adapters)))
    lab = make()
    for wanted in (0, 40):
        for adapter in adapters:
            assert lab.serve(f"{adapter}, {wanted}", PLAIN, lora_request=adapter).loaded == wanted
            lab.settle()
            lab.forget_prefixes()


def test_an_adapter_that_was_changed_in_place_finds_nothing_of_its_old_self(make, tmp_path):
    """The engine's hashes name an adapter's path; chunks on a disk may be older than what lies there."""
    weights, adapter = tmp_path / "adapter_model.safetensors", Adapter(str(tmp_path))
    weights.write_bytes(b"old")
    lab = make()
    lab.serve("one", PLAIN, lora_request=adapter)
    lab.forget_prefixes()
    assert lab.serve("two", PLAIN, lora_request=adapter).loaded == 40
    weights.write_bytes(b"newer")
    lab.forget_prefixes()
    assert lab.serve("still what was loaded", PLAIN, lora_request=adapter).loaded == 40
    lab.forget_prefixes()
    again = Adapter(str(tmp_path), load_inplace=True)
    assert lab.serve("loaded again", PLAIN, lora_request=again).loaded == 0


@pytest.mark.parametrize(("kind", "same"), [("longrope", False), ("yarn", True)])
def test_a_model_with_two_tables_of_angles_is_another_model_with_the_other_table(tmp_path, kind, same):
    """The engine takes the long one if prompts may be longer than the original length; the config says nothing of
    that.
    """
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    hf_config = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_type": kind}})
    load_config = SimpleNamespace(load_format="auto")

    def of(length):
        model = {"hf_config": hf_config, "hf_overrides": {}, "quantization": None, "model": tmp_path, "revision": None}
        model_config = SimpleNamespace(**model, max_model_len=length)
        return model_identity(SimpleNamespace(model_config=model_config, load_config=load_config), [])

    assert of(4096) == of(4096)
    assert (of(4096) == of(32768)) is same


def test_pages_of_another_draft_model_are_not_found(tmp_path):
    """Some of its layers may be in the cache. A model that drafts for itself adds nothing."""

    def of(draft):
        model = SimpleNamespace(model=tmp_path / "model", revision=None, dtype="bf16")
        drafts = draft and SimpleNamespace(draft_model_config=SimpleNamespace(model=tmp_path / draft, revision=None))
        config = SimpleNamespace(
            model_config=model,
            speculative_config=drafts,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        return layout_of(config, SimpleNamespace(kv_cache_groups=[]), "NHD")

    for name in ("one", "other", "same as one"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.removeprefix("same as ").encode())
    assert of(None) == of("model") != of("one")
    assert of("one") == of("same as one")
    assert len({of(name) for name in ("one", "other", "elsewhere")}) == 3


def test_an_adapter_whose_files_cannot_be_seen_is_kept_for_this_process_only(make):
    first, second = (adapter_stamp("someone/adapter") for _ in range(2))
    assert first != second


def test_after_a_reset_nothing_of_before_is_found_or_kept(make):
    """The weights may have changed under the same files."""
    lab, other = make(), PLAIN[::-1]
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    running = lab.arrive("running", other)
    lab.admit(running)
    lab.scheduler.reset()
    lab.compute(running, len(other))
    lab.finish(running)
    lab.forget_prefixes()
    for tokens in (PLAIN, other):
        assert lab.serve("again", tokens).loaded == 0
        lab.forget_prefixes()
        assert lab.serve("and again", tokens).loaded == 40


def test_after_a_reset_no_document_of_before_is_learned_stored_or_reused(make):
    """Under the old weights' keys other processes have documents, or find them later."""
    lab = make(shared := Shared())
    learn(lab, DOC_A)
    run(lab, "leaves a document to learn", prompt(DOC_B))
    learns, blends = lab.arrive("learns", DOC_B, {"learn": True}), lab.arrive("blends", prompt(DOC_A))
    assert lab.admit(learns) is None
    before = set(shared.records)
    lab.scheduler.reset()
    assert lab.admit(learns) == lab.admit(blends) == 0
    for request in (learns, blends):
        lab.compute(request, request.num_tokens)
        assert not lab.finish(request)
    lab.settle()
    assert set(shared.records) == before


def test_after_a_reset_nothing_is_learned_before_the_engine_runs_again(make):
    """vLLM resets the caches of an engine that goes to sleep, and unmaps its weights."""
    lab = make()
    lab.serve("one", PLAIN)
    lab.settle()
    lab.scheduler.reset()
    (document,) = lab.engine.learn_later(DOC_A, [DocumentMatch(span=Span(0, len(DOC_A)), pieces=())], "", wanted=True)
    assert not lab.scheduler.busy
    assert not lab.step().learn
    lab.serve("two", PLAIN)
    lab.settle()
    assert document not in lab.engine.learning
    assert lab.scheduler.numbers()["documents_learned"] == 1


def test_a_reset_empties_the_disk_too(make, tmp_path):
    lab = make(tier := DiskTier(tmp_path, MB))
    learn(lab, DOC_A)
    lab.serve("one", PLAIN)
    lab.settle()
    assert len(list(tier.entries())) > len(document_keys(lab, DOC_A))
    lab.scheduler.reset()
    due = time.monotonic() + 10
    while list(tier.entries()):  # they are removed in the background
        assert time.monotonic() < due
        time.sleep(0.001)


def test_a_partly_full_chunk_takes_nothing_along_of_what_was_in_its_slot(make):
    """A block of one tenant went to the disk with what had been behind it, a block of another."""
    tier = DictTier()
    lab = make(tier, slots=1)
    lab.serve("one", PLAIN[:8], cache_salt="one tenant")
    lab.settle()
    lab.serve("two", PLAIN[20:25], cache_salt="another")
    lab.settle()
    second = bytes(page(PLAIN[:8], 1, 0))
    whole, part = (bytes(record) for record in tier.records.values())
    assert second in whole
    assert second not in part
    assert bytes(page(PLAIN[20:25], 0, 0)) in part


def test_images_that_are_only_numbered_are_kept_for_this_process_only(make):
    """The ids of numbered images begin anew in every process, and block hashes are made of these ids."""
    tier, image = DictTier(), {"mm_features": ["renderer0-mm-1-image-0"]}
    for counted, loaded in ((True, 0), (False, 0), (False, 40)):
        lab = make(tier)
        lab.setup.counts_images = counted
        assert lab.serve("one", PLAIN, **image).loaded == loaded
        lab.forget_prefixes()
        assert lab.serve("two", PLAIN, **image).loaded == 40
        lab.settle()


def test_a_session_that_gets_a_numbered_image_shares_only_its_text_with_other_processes(make):
    """Images were looked for only in its first input. Chunks of two images with the same number had the same key."""
    tier, records = DictTier(), []
    for _ in range(2):
        lab = make(tier)
        lab.setup.counts_images = True
        request = lab.arrive("one", PLAIN[:12])
        lab.wait(lambda lab=lab, request=request: lab.admit(request) is not None)
        lab.load(request)
        lab.compute(request, 12 - request.num_computed_tokens)
        request.mm_features = ["renderer0-mm-1-image-0"]
        lab.decode(request, PLAIN[12:])
        lab.finish(request)
        lab.settle()
        records.append(len(tier.records))
    assert records == [5, 9], "the first chunk has text alone"


def test_pages_of_prompt_embeddings_are_loaded_again(make, monkeypatch):
    """The engine hashes the embeddings; there are no tokens."""

    class Embedded(Request):
        def __post_init__(self):
            super().__post_init__()
            self.prompt_token_ids, self.prompt_embeds = None, object()

        num_prompt_tokens = property(lambda self: len(PLAIN))
        num_output_tokens = property(lambda self: len(self.all_token_ids) - len(PLAIN))

    lab = make()
    monkeypatch.setattr(vllm_fakes, "Request", Embedded)
    assert lab.serve("one", PLAIN, output=[5]).loaded == 0
    lab.forget_prefixes()
    again = lab.arrive("two", PLAIN)
    assert lab.admit(again) == 40
    lab.load(again)
    assert lab.right(again, 40)
    assert lab.finish(again) == {"exact_tokens": 40, "tokens_from": {"host": 40}}


def test_a_prompt_that_goes_another_way_inside_a_chunk_gets_its_leading_blocks(make):
    lab = make()
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    request = lab.serve("two", [*PLAIN[:21], 9, 9, 9, 9])
    assert request.loaded == 20
    lab.forget_prefixes()


def test_chunks_survive_a_restart_on_disk(make, tmp_path):
    fill(DiskTier(tmp_path, MB), PLAIN)
    lab = make(DiskTier(tmp_path, MB))
    request = lab.arrive("two", [*PLAIN[:36], 1, 2, 3, 4])  # ends inside a chunk: only labels bring that back
    assert lab.wait(lambda: lab.admit(request)) == 36
    lab.load(request)
    assert lab.right(request, 36)
    assert lab.finish(request)["tokens_from"] == {"disk": 36}


def test_decoded_tokens_are_kept_and_the_last_one_is_not(make):
    lab = make()
    lab.serve("one", PLAIN[:6], output=range(10))
    lab.forget_prefixes()
    again = lab.arrive("two", [*PLAIN[:6], *range(10)])
    assert lab.admit(again) == 12, "the sixteenth token was sampled and never computed"
    lab.step()
    assert lab.right(again, 12)
    lab.finish(again)


def test_a_chunk_that_an_answer_fills_is_saved_in_the_next_step(make):
    lab = make()
    request = lab.arrive("one", PLAIN[:6])
    lab.admit(request)
    saves = []  # numbers of computed tokens before the steps that save something
    for token in range(20):
        computed = request.num_computed_tokens
        saves += [computed] if lab.compute(request, 1 if token else 6).saves else []
        request.append([token])
        lab.tables["one"] += [lab.pool.get_new_blocks(1)[0].block_id] if request.num_tokens % BLOCK == 1 else []
    assert saves == [CHUNK, 2 * CHUNK, 3 * CHUNK]
    lab.finish(request)


def test_a_chunk_is_kept_whose_last_tokens_were_unknown_when_the_last_step_was_planned(make):
    """Drafts that the model accepts, or the token in flight of asynchronous scheduling."""
    lab = make()
    request = lab.arrive("one", PLAIN[: CHUNK - 2])
    lab.admit(request)
    lab.compute(request, CHUNK - 2)
    request.append([1])
    lab.tables["one"].append(lab.pool.get_new_blocks(1)[0].block_id)
    lab.step({"one": 3})
    request.append([2, 3, 4])
    request.num_computed_tokens += 3
    lab.finish(request)
    lab.settle()
    lab.forget_prefixes()
    assert lab.serve("next turn", [*request.all_token_ids, 5]).loaded == CHUNK


def test_what_a_session_gets_while_it_decodes_is_kept(make):
    """The engine asks no hook about it, and computes it like a prompt."""
    lab = make()
    request = lab.arrive("one", PLAIN[:CHUNK])
    lab.admit(request)
    lab.decode(request, [1, 2])  # The second chunk is far from full.
    more = PLAIN[10:30]
    request.append(more)
    lab.tables["one"] += [block.block_id for block in lab.pool.get_new_blocks(6)]
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    assert len(lab.step().saves) == (2 + len(more)) // CHUNK
    lab.finish(request)


def test_a_preempted_blend_does_not_wait_for_the_blends_of_others(make):
    lab = make(batch_tokens=40)
    for document in (DOC_A, DOC_B):
        learn(lab, document)
    first, other = (lab.arrive(name, prompt(DOC_A, DOC_B)) for name in ("first", "other"))
    assert lab.wait(lambda: lab.admit(first))
    lab.load(first)
    lab.compute(first, first.num_tokens - first.num_computed_tokens)
    lab.preempt(first)
    lab.forget_prefixes()
    lab.workers.held_back = True
    assert lab.wait(lambda: lab.admit(other))
    assert lab.admit(first) is not None
    lab.workers.held_back = False
    lab.load(other)
    for request in (first, other):
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
        lab.finish(request)


def test_without_save_decode_cache_only_the_prompt_is_kept(make):
    lab = make(settings={"save_decode_cache": False})
    lab.serve("one", PLAIN[:6], output=range(20))
    lab.forget_prefixes()
    assert lab.serve("two", [*PLAIN[:6], *range(20)]).loaded == 4


@pytest.mark.parametrize("blends", [False, True])
def test_without_blending_documents_in_another_order_are_computed_and_the_same_prompt_is_loaded(make, blends):
    lab = make(settings={"enable_blending": blends}, blends=blends)
    lab.serve("one", first := prompt(DOC_A, DOC_B))
    lab.settle()
    lab.forget_prefixes()
    again = lab.serve("again", first, {"blend": False})
    assert again.facts["exact_tokens"] == len(first) // BLOCK * BLOCK
    lab.forget_prefixes()
    other = lab.serve("other", prompt(DOC_B, DOC_A))
    wanted = 4 + len(DOC_A) + len(DOC_B) if blends else 4  # blocks of the system text
    reused = {name: fact for name, fact in other.facts.items() if name != "found_documents"}
    assert reused == {"exact_tokens": 4, "tokens_from": {"host": wanted}}


def test_an_end_that_a_stored_chunk_serves_takes_no_slot(make):
    """Each prompt that ended inside a stored chunk kept a copy of the chunk's beginning, in a slot of its own."""
    lab = make()
    lab.serve("one", PLAIN[:8])
    lab.forget_prefixes()
    assert lab.serve("two", PLAIN[:6]).loaded == 4
    lab.settle()
    assert lab.scheduler.numbers()["stored_chunks"] == 1


def test_a_chunk_under_way_is_saved_once(make):
    lab = make()
    one, two = lab.arrive("one", PLAIN[:8]), lab.arrive("two", PLAIN[:8])
    lab.admit(one), lab.admit(two)
    for request in (one, two):
        for layer in range(LAYERS):
            for i in range(2):
                lab.workers.pages[layer, lab.tables[request.request_id][i]] = page(PLAIN, i, layer)
    assert not lab.step({"one": 8, "two": 8}).saves
    one.num_computed_tokens = two.num_computed_tokens = 8
    assert len(lab.step().saves) == 1
    lab.finish(one), lab.finish(two)


def test_a_chunk_is_visible_when_every_rank_has_reported_and_its_blocks_are_held_till_then(make):
    lab = make(ranks=2)
    request = lab.arrive("one", PLAIN[:8])
    lab.admit(request)
    assert not lab.scheduler.plan({"one": 8}, lab.tables_of).saves  # No first token waits for a copy.
    (save,) = lab.scheduler.plan({}, lab.tables_of).saves
    key = page_key(lab, request.block_hashes[1])
    lab.scheduler.finished(request, [[]])
    lab.pool.free_blocks([lab.pool.blocks[b] for b in lab.tables["one"]])
    for _ in range(2):
        assert lab.store.lookup([key]) == [None]
        assert [lab.pool.blocks[b].ref_cnt for b in save.tables[0]] == [1, 1]
        lab.scheduler.reported(StepReport(done={save.job: 1}), set())
    assert lab.store.lookup([key]) == ["host"]
    lab.scheduler.reported(StepReport(done={save.job: 1}), set())  # a report about nothing


def test_reports_of_ranks_add_up_and_one_failure_is_enough(make):
    lab = make(ranks=2)
    request = lab.arrive("one", PLAIN[:8])
    lab.admit(request)
    lab.scheduler.plan({"one": 8}, lab.tables_of)
    (save,) = lab.scheduler.plan({}, lab.tables_of).saves
    merged = StepReport(done={save.job: 1}).merge(StepReport(done={save.job: 1}, failed={save.job}))
    lab.scheduler.reported(merged, set())
    assert lab.store.lookup([page_key(lab, request.block_hashes[1])]) == [None]
    lab.finish(request)


@pytest.mark.parametrize(("tokens", "at_once"), [(1, 1), (2, 0)])
def test_a_request_for_one_token_is_saved_before_its_answer(make, tokens: int, at_once: int) -> None:
    """Another engine decodes, and looks for the chunks as soon as the first token is there."""
    lab = make()
    request = lab.arrive("one", words := list(range(100, 100 + CHUNK)), max_tokens=tokens)
    assert lab.admit(request) == 0
    plan = lab.step({"one": len(words)})
    assert len(plan.saves) == at_once
    request.num_computed_tokens = len(words)
    assert len(lab.step().saves) == 1 - at_once
    lab.finish(request)


def test_a_window_s_missing_blocks_are_never_saved(make):
    """The engine puts its null block where a sliding window has passed: its bytes were saved as the prompt's."""
    lab = make()
    request = lab.arrive("one", PLAIN[:16])
    lab.admit(request)
    gone, lab.tables["one"][0] = lab.tables["one"][0], 0
    lab.scheduler.plan({"one": 16}, lab.tables_of)
    plan = lab.scheduler.plan({}, lab.tables_of)
    assert [save.tables for save in plan.saves] == [(tuple(lab.tables["one"][2:4]),)]
    lab.workers.step(plan, set())
    lab.scheduler.reported(StepReport(done={plan.saves[0].job: 1}), set())
    lab.tables["one"][0] = gone
    lab.finish(request)


def test_nothing_is_loaded_into_the_null_block(make):
    lab = make()
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    request = lab.arrive("two", PLAIN)
    tokens = lab.scheduler.claim(request, 0)
    table = [0, 0, 0, *range(4, 11)]
    lab.scheduler.allocated(request, [table], tokens)
    (job,) = lab.scheduler.plan({}, lambda name: [table]).loads
    assert [(copy.blocks, copy.first) for copy in job.copies][:2] == [((4,), 1), ((5, 6), 0)]
    lab.scheduler.reported(StepReport(), {"two"})
    request.num_computed_tokens = 0
    lab.scheduler.finished(request, [[]])


def test_a_slab_full_of_held_chunks_saves_nothing_and_loads_on(make):
    lab = make(slots=2)
    lab.serve("one", PLAIN[:16])
    lab.forget_prefixes()
    holder = lab.arrive("holder", PLAIN[:16])
    assert lab.scheduler.claim(holder, 0) == 16
    other = lab.serve("other", [7] * 24)
    assert other.facts is None
    assert lab.store.stats().no_room > 0
    assert lab.admit(holder) == 16
    lab.step()
    assert lab.right(holder, 16)
    lab.finish(holder)


# -- slow and failing tiers -------------------------------------------------------------------------------------------


def test_a_claim_waits_for_a_slow_tier_and_goes_on_at_the_deadline(make):
    tier = gated()
    fill(tier.inner, PLAIN[:16])
    lab = make(tier)
    request = lab.arrive("one", PLAIN[:16])
    for lab.now in (0.0, 1.0, 2.0):
        assert lab.scheduler.claim(request, 0) is None
    lab.now = 2.1
    assert lab.scheduler.claim(request, 0) == 0
    tier.open_all()
    assert lab.store.held() <= 2  # a thread may still be at it
    assert lab.scheduler.claim(request, 0) == 0, "a claim is an answer"
    lab.finish(request)


def test_the_time_in_the_queue_is_not_the_tier_s(make):
    """A busy engine looks at a request seconds after it arrived: everything on disk was late before it was asked
    for.
    """
    tier = gated()
    fill(tier.inner, PLAIN[:16])
    lab = make(tier, slots=2)
    lab.arrive("first", [7] * 8)
    request = lab.arrive("one", PLAIN[:16])
    lab.now = 30.0
    assert lab.scheduler.claim(request, 0) is None
    tier.open_all()
    assert lab.wait(lambda: lab.admit(request)) == 16
    lab.now = 60.0  # and it waited for blocks in the meantime
    lab.load(request)
    assert lab.right(request, 16)
    lab.finish(request)
    lab.finish(lab.requests["first"])


def test_waiting_asks_nothing_of_the_store(make):
    """Every step of a waiting request hashed and looked up its whole prompt again."""
    tier = gated()
    fill(tier.inner, PLAIN[:16])
    lab = make(tier)
    request = lab.arrive("one", PLAIN[:16])
    assert lab.scheduler.claim(request, 0) is None
    asked = []
    tier.contains = lambda keys: asked.extend(keys) or [False] * len(keys)
    assert lab.scheduler.claim(request, 0) is None
    assert asked == []
    del tier.contains
    lab.finish(request)


def test_a_request_does_not_wait_for_chunks_whose_tokens_the_engine_has_computed_meanwhile(make):
    """Earlier, it waited until its deadline, although an earlier request had computed all that was stored."""
    tier = gated()
    fill(tier.inner, PLAIN[:16])
    lab = make(tier)
    first = lab.arrive("first", PLAIN[:18])
    assert lab.scheduler.claim(first, 0) is None
    lab.now = 1.0
    second = lab.arrive("second", [*PLAIN[:16], 7, 8, 9])
    assert lab.scheduler.claim(second, 0) is None
    lab.now = 2.1
    assert lab.admit(first) == 0
    lab.compute(first, 18)
    assert lab.look(second) == 16
    assert lab.admit(second) == 0
    for request in (first, second):
        lab.finish(request)


def test_a_claim_is_made_when_the_first_part_is_there_and_the_load_goes_on_beside(make):
    tier = gated()
    fill(tier.inner, PLAIN[:16])
    lab = make(tier)
    request = lab.arrive("one", PLAIN[:16])
    tier.read_gates[0].set()
    assert lab.wait(lambda: lab.admit(request)) == 16
    plan = lab.step()
    assert not plan.loads[0].ready
    assert "one" in lab.workers.loading
    tier.open_all()
    while "one" in lab.workers.loading:
        lab.step()
    assert lab.right(request, 16)
    lab.finish(request)


def hanging_load(make, token=None):
    """A request whose load hangs in its tier, after something of it has come. A `token` is computed in this time."""
    tier = gated()
    fill(tier.inner, PLAIN[:16])
    lab = make(tier)
    if token is not None:
        pretend(lab, byte=1e-12, token=token)
    request = lab.arrive("one", PLAIN[:16])
    tier.read_gates[0].set()
    assert lab.wait(lambda: lab.admit(request)) == 16
    lab.step()
    return lab, request


def computed_after_all(lab, request) -> None:
    """Check that a request's load is given up, and compute the request."""
    assert request.num_computed_tokens == 0
    assert lab.scheduler.claim(request, 0) == 0
    lab.compute(request, 16)
    lab.finish(request)


def test_a_load_that_stays_late_is_given_up_and_computed(make):
    """A read that hung in a dead mount held the request for ever: only the thread that hung could say that nothing
    comes.
    """
    lab, request = hanging_load(make)
    lab.now = 2.0
    lab.step()
    assert "one" in lab.workers.loading
    lab.now = 2.1
    lab.step()  # though the tier still hangs
    computed_after_all(lab, request)


def test_a_load_of_a_cache_server_that_was_killed_is_given_up_and_computed(make, monkeypatch):
    """Slots of a killed server never change, so the request waited without an end."""
    lab, request = hanging_load(make)
    assert "one" in lab.workers.loading
    with monkeypatch.context() as patch:
        patch.setattr(lab.store, "state", lambda pin: PinState.LOST)
        lab.step()
    assert "one" not in lab.workers.loading
    computed_after_all(lab, request)


@pytest.mark.parametrize(("deadlines", "loaded"), [(10, True), (2, False)])
def test_a_load_of_which_something_comes_is_not_late_for_some_deadlines(make, monkeypatch, deadlines, loaded):
    """Earlier, time counted from the start, so each load that took longer than `load_deadline` was thrown away."""
    monkeypatch.setattr(claims, "DEADLINES", deadlines)
    tier, turnstile = gated(), Turnstile()
    fill(tier.inner, PLAIN)
    tier.read_gates[1] = turnstile
    lab = make(tier)
    request = lab.arrive("one", PLAIN)
    tier.read_gates[0].set()
    assert lab.wait(lambda: lab.admit(request)) == 40
    pins = list(lab.states["one"].chunks.pins.values())
    assert len(pins) == 40 // CHUNK
    for number in range(1, len(pins) + 1):
        lab.now += 1.9
        turnstile.let_in()
        for _ in range(5000):
            if request.request_id not in lab.loading:
                break
            if sum(lab.store.arrived(pin) == LAYERS for pin in pins) >= number:
                break
            time.sleep(0.001)
        lab.step()
    lab.load(request)
    assert request.num_computed_tokens == (39 if loaded else 0)
    assert lab.right(request, 40 if loaded else 0)
    assert ("failed_loads" in lab.scheduler.numbers()) is not loaded
    lab.finish(request)


def test_a_failed_load_is_not_tried_again(make):
    failing = []
    faulty = Faulty(DictTier(), lambda verb, key: OSError("gone") if failing else None)
    fill(faulty.inner, PLAIN[:16])
    tier = Gated(faulty, parts=LAYERS)
    lab = make(tier)
    request = lab.arrive("one", PLAIN[:16], prefill_stats=PrefillStats())
    tier.read_gates[0].set()
    assert lab.wait(lambda: lab.admit(request)) == 16
    assert request.prefill_stats.counts == (16, 0, 16)
    failing.append(True)
    tier.open_all()
    lab.load(request)
    assert request.num_computed_tokens == 0
    assert request.prefill_stats.counts == (16, 0, 0), "cached_tokens of the response"
    assert state_of(lab, "one").given_up
    failing.clear()
    assert lab.scheduler.claim(request, 0) == 0
    lab.compute(request, 16)
    assert lab.finish(request) is None, "nothing was loaded"
    assert lab.scheduler.numbers()["failed_loads"] == 1


def test_a_tier_that_fails_at_everything_costs_a_hit_and_nothing_else(make):
    tier = Faulty(DictTier(), lambda verb, key: OSError("gone"))
    fill(tier.inner, PLAIN[:16])
    lab = make(tier)
    request = lab.serve("one", PLAIN[:16])
    assert request.loaded == 0


class SlowToAnswer(Shared):
    """A tier that answers lookups only after a while, like a bucket far away."""

    asked, answers = frozenset(), True

    def contains(self, keys):
        self.asked |= set() if self.answers else set(keys)
        return super().contains(keys) if self.answers else [False] * len(keys)

    def unanswered(self, keys):
        return not self.answers and not self.asked.isdisjoint(keys)


@pytest.fixture
def slow_bucket(make):
    """A lab whose documents are in a tier that does not answer lookups at once, and not in memory."""
    lab = make(tier := SlowToAnswer())
    learn(lab, DOC_A, DOC_B)
    lose(lab.store, *lab.store.known_keys())
    tier.answers = False
    return lab, tier


def test_a_request_with_known_documents_waits_for_the_answer_of_a_slow_tier(slow_bucket):
    """The first request for a document in a bucket far away computed it."""
    lab, tier = slow_bucket
    request = lab.arrive("asks", prompt(DOC_A, DOC_B))
    assert lab.admit(request) is None
    lab.now += 0.03
    assert lab.admit(request) is None
    tier.answers = True
    assert lab.wait(lambda: lab.admit(request)) > len(DOC_A) + len(DOC_B)
    lab.load(request)
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    lab.finish(request)
    assert lab.scheduler.counts["blends"] == 1
    lab.settle()
    lab.check()


@pytest.mark.parametrize("pace", [None, 0.0001])
def test_a_request_waits_for_an_answer_no_longer_than_it_computes(slow_bucket, pace, monkeypatch):
    lab, _ = slow_bucket
    monkeypatch.setattr(CostModel, "prefill_pace", lambda _: pace)
    request = lab.arrive("asks", prompt(DOC_A, DOC_B))
    lab.now += 0.9 * (claims.ANSWER_SECONDS if pace is None else pace * (len(DOC_A) + len(DOC_B)))
    assert lab.admit(request) is None
    lab.now += claims.ANSWER_SECONDS
    assert lab.admit(request) == 0
    lab.compute(request, request.num_tokens)
    lab.finish(request)
    lab.settle()
    lab.check()


def test_a_request_with_unknown_documents_waits_for_no_answer(slow_bucket):
    lab, _ = slow_bucket
    request = lab.arrive("asks", prompt(DOC_A[::-1], DOC_B[::-1]))
    assert lab.admit(request) == 0
    lab.compute(request, request.num_tokens)
    lab.finish(request)


def test_what_another_host_has_learned_into_a_slow_pool_is_not_learned_again(make):
    """The pool does not answer at once, and the document is not known here yet."""
    lab = make(tier := SlowToAnswer())
    learn(lab, DOC_A)
    lose(lab.store, *lab.store.known_keys())
    lab.engine.known.clear()
    tier.answers = False
    request = lab.arrive("learn", DOC_A, {"learn": True})
    assert lab.admit(request) is None
    lab.now += 2 * claims.ANSWER_SECONDS  # A request that a user waits for would compute it now.
    assert lab.admit(request) is None
    lab.step({})
    assert lab.scheduler.take_plan().learn == []
    tier.answers = True
    assert lab.wait(lambda: lab.admit(request)) == len(DOC_A)
    lab.load(request)
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    assert lab.finish(request)["learned"]
    assert lab.scheduler.numbers()["documents_learned"] == 1
    lab.settle()
    lab.check()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_that_ends_while_it_waits_for_an_answer_leaves_nothing(slow_bucket, when):
    lab, tier = slow_bucket
    request = lab.arrive("asks", prompt(DOC_A, DOC_B))
    assert lab.admit(request) is None
    tier.answers = when == "after"
    lab.finish(request)
    lab.settle()
    lab.check()


def test_prefetching_holds_half_of_the_slots_at_most(make):
    tier = gated()
    fill(tier.inner, PLAIN)
    lab = make(tier, slots=4)
    requests = [lab.arrive(str(i), PLAIN[:32]) for i in range(3)]
    assert lab.store.held() == 2
    for request in requests:
        lab.finish(request)


# -- loading or computing ---------------------------------------------------------------------------------------------


def pretend(lab, *, byte, token=1e-6):
    """As if five loads had taken so long a byte, and five prefills so long a token."""
    for _ in range(5):
        note_load(lab.store.cost, "dict", records=1, opening=0.0, bytes=10**6, reading=10**6 * byte)
        lab.store.cost.computed(10**5, 10**5 * token, 100)


def counted(*prompts, **options):
    tier = Counted(DictTier())
    fill(tier.inner, *prompts, **options)
    return tier


def test_what_is_faster_computed_is_not_loaded_not_waited_for_and_not_saved_again(make):
    tier = counted(PLAIN)
    lab = make(tier)
    pretend(lab, byte=1.0)
    request = lab.arrive("one", PLAIN)
    assert lab.scheduler.claim(request, 0) == 0, "at once"
    assert lab.admit(request) == 0
    lab.compute(request, 40)
    facts = lab.finish(request)
    assert facts.pop("note").startswith("stored tokens were computed, in about 4e-05 s: loading them would take about")
    assert facts == {"skipped_tokens": 40}
    lab.settle()
    assert (tier.counts.bytes_read, tier.counts.written) == (0, 0)
    assert lab.scheduler.numbers()["loads_skipped"] == 1
    assert lab.store.held() == 0


@pytest.mark.parametrize(("policy", "claimed"), [("auto", 0), ("always", None)])
def test_a_load_ends_if_its_rest_would_take_longer_than_computing(make, policy, claimed):
    """The first load from a slow bucket took twice as long as computing: no speed was known that could be compared."""
    tier, turnstile = gated(), Turnstile()
    fill(tier.inner, PLAIN)
    tier.read_gates[0] = turnstile
    lab = make(tier, settings={"load_policy": policy})
    pretend(lab, byte=1e-12, token=0.01)  # The prompt of 40 tokens takes 0.4 s.
    request = lab.arrive("one", PLAIN)
    turnstile.let_in()
    pins = lab.states["one"].chunks.pins.values()
    assert lab.wait(lambda: True if sum(map(lab.store.arrived, pins)) == 1 else None), "one part of ten"
    for now, answer in ((0.0, None), (0.099, None), (0.101, claimed)):  # In 0.1 s, the rest looks like 0.9 s.
        lab.now = now
        assert lab.scheduler.claim(request, 0) == answer
    assert lab.scheduler.numbers().get("loads_skipped", 0) == (claimed == 0)
    turnstile.set()
    tier.open_all()
    loaded = lab.wait(lambda: lab.admit(request))
    assert loaded == (40 if claimed is None else 0)
    lab.load(request)
    lab.compute(request, 40 - request.num_computed_tokens)
    assert lab.right(request, 40)
    note = lab.finish(request).get("note", "")
    assert note == ("" if claimed is None else "a load ended early, because computing takes about 0.4 s")


def test_a_load_of_which_nothing_arrives_ends_when_computing_would_have_ended(make):
    tier = gated()
    fill(tier.inner, PLAIN)
    lab = make(tier)
    pretend(lab, byte=1e-12, token=0.01)
    request = lab.arrive("one", PLAIN)
    for now, claimed in ((0.0, None), (0.5, None), (0.51, 0)):
        lab.now = now
        assert lab.scheduler.claim(request, 0) == claimed
    assert lab.admit(request) == 0
    lab.compute(request, 40)
    lab.finish(request)
    tier.open_all()


def test_a_document_that_is_removed_while_idle_steps_learn_it_is_not_queued_again(make):
    """The job was given up for a request, and the removed document was learned again."""
    lab = make()
    lab.serve("one", prompt(DOC_B))
    lab.workers.slow = True
    lab.wait(lambda: lab.step().learn or None)
    lab.engine.keeper.remove(lab.engine.known.list())
    lab.now += MAX_PAUSE_SECONDS + 1
    other = lab.arrive("two", PLAIN)
    lab.admit(other)
    assert lab.compute(other, 40).cancel
    lab.finish(other)
    lab.workers.slow = False
    lab.settle()
    assert (len(lab.engine.learning), lab.engine.known.count()) == (0, 0)


@pytest.mark.parametrize("separated", [False, True])
def test_an_evicted_document_that_comes_twice_is_learned_in_idle_steps_only(make, separated):
    """Between separators it counted as a new one. A memory that was too small was filled again and again."""
    lab, document = make(blocks=128, slots=16), [1000 + i for i in range(80)]
    learn(lab, document)
    lab.scheduler.forget_all()
    lab.engine.learning.clear()
    tokens = prompt(document) if separated else [*SYSTEM, *document, *QUESTION]
    lab.scheduler._saves.learn_next = lambda idle: None  # The engine is never idle.
    for name in ("one", "two"):
        request = lab.arrive(name, tokens)
        lab.wait(lambda request=request: lab.admit(request))
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
        lab.finish(request)
        lab.pool.forget()
        lab.scheduler.forget_all()
    assert (len(lab.engine.learning), lab.engine.learning.has_wanted) == (1, False)
    lab.engine.learning.clear()


@pytest.mark.parametrize("asked_again", [False, True])
def test_a_document_that_is_removed_while_its_prompt_runs_is_learned_only_for_later_prompts(make, asked_again):
    lab, document = make(blocks=128), [1000 + i for i in range(40)]
    learn(lab, document)
    lab.scheduler.forget_all()
    request = lab.arrive("one", prompt(document))
    lab.wait(lambda: lab.admit(request))
    lab.engine.keeper.remove(lab.engine.known.list())
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    lab.finish(request)
    if asked_again:
        lab.pool.forget()
        lab.serve("two", prompt(document))
    lab.settle()
    assert lab.engine.known.count() == asked_again


def test_a_load_that_becomes_slow_after_its_first_parts_is_given_up_and_computed(make):
    lab, request = hanging_load(make, token=0.01)  # Half of it has arrived, and 16 tokens take 0.16 s.
    for now, loads in ((0.2, True), (0.21, False)):
        lab.now = now
        lab.step()
        assert ("one" in lab.workers.loading) is loads
    computed_after_all(lab, request)
    numbers = lab.scheduler.numbers()
    assert (numbers["loads_skipped"], numbers.get("failed_loads", 0)) == (1, 0), "nothing has failed"
    assert lab.scheduler.recent["one"]["note"] == "a load ended early, because computing takes about 0.16 s"


def test_what_a_slow_tier_has_is_in_memory_for_the_next_request(make, monkeypatch):
    monkeypatch.setattr(promotion, "LONGEST_WAIT", float("inf"))
    monkeypatch.setattr(Background, "is_running", True)
    lab = make(tier := counted(PLAIN), slots=40, promotes=True)
    pretend(lab, byte=1.0)
    for name in ("one", "two"):
        assert lab.serve(name, PLAIN).loaded == 0
        lab.forget_prefixes()
    monkeypatch.setattr(Background, "is_running", False)
    lab.engine.promotion.wait()
    assert lab.store.held() == 0
    request = lab.serve("three", PLAIN)
    assert (request.loaded, request.facts["tokens_from"]) == (40, {"host": 40})
    assert tier.counts.written == 0


@pytest.mark.parametrize(("speeds", "ends"), [({"byte": 1e-12, "token": 1.0}, True), ({"byte": 1.0}, False)])
def test_a_request_that_loads_something_ends_a_load_in_the_background(make, monkeypatch, speeds, ends):
    """A tier has few threads, so the request would wait for the load in the background."""
    lab, ended = make(counted(PLAIN)), []
    monkeypatch.setattr(lab.engine.promotion, "cancel", lambda: ended.append(True))
    pretend(lab, **speeds)
    lab.serve("one", PLAIN)
    assert bool(ended) == ends
    ended.clear()
    lab.scheduler.forget_all()
    assert ended, "what is being loaded must not come back"


def test_what_is_faster_loaded_is_loaded(make):
    lab = make(counted(PLAIN))
    pretend(lab, byte=1e-12, token=1.0)
    request = lab.serve("one", PLAIN)
    assert request.loaded == 40
    assert request.facts == {"exact_tokens": 40, "tokens_from": {"dict": 40}}
    assert "loads_skipped" not in lab.scheduler.numbers()


def test_the_policy_always_loads_from_a_slow_tier(make):
    lab = make(counted(PLAIN), settings={"load_policy": "always"})
    pretend(lab, byte=1.0)
    assert lab.serve("one", PLAIN).loaded == 40


def test_what_is_in_memory_is_loaded_whatever_the_tier_is_like(make):
    lab = make(counted(PLAIN))
    assert lab.serve("one", PLAIN[:16]).loaded == 16
    lab.forget_prefixes()
    pretend(lab, byte=1.0)
    request = lab.arrive("two", PLAIN)
    assert lab.admit(request) == 16
    lab.step()
    assert lab.right(request, 16)
    lab.compute(request, 24)
    facts = lab.finish(request)
    assert (facts["exact_tokens"], facts["skipped_tokens"]) == (16, 24)


def test_documents_on_a_slow_tier_are_computed_and_not_learned_again(make):
    lab = make(counted(documents=[DOC_A, DOC_B]))
    assert lab.serve("one", prompt(DOC_A)).facts["tokens_from"] == {"dict": 12}
    lab.forget_prefixes()
    pretend(lab, byte=1.0)
    request = lab.arrive("two", prompt(DOC_B, DOC_A, system=[8, 9]))
    assert lab.wait(lambda: lab.admit(request)) == 45
    (job,) = lab.step().loads
    assert [piece.at for piece in job.documents] == [26, 34], "the document in memory"
    lab.compute(request, 2)
    facts = lab.finish(request)
    assert facts["skipped_tokens"] == 20
    assert facts["tokens_from"] == {"host": 12}
    assert "unknown_documents" not in facts
    assert not len(lab.engine.learning)


def test_a_blend_that_has_lost_most_of_its_documents_when_it_begins_is_computed(make):
    """As a blend, it would compute nearly all tokens, which takes longer than prefill."""
    lab = make(blocks=128, slots=32)
    learn(lab, DOC_A, PLAIN)
    tokens = prompt(DOC_A, PLAIN)
    request = lab.arrive("one", tokens)
    for piece in state_of(lab, "one").documents[-1].pieces:
        lab.store.forget(piece.key)
    assert lab.admit(request) == 0
    lab.compute(request, len(tokens))
    assert "a blend would compute" in lab.finish(request)["note"]
    assert lab.scheduler.counts["blends"] == 0
    lab.settle()  # The document is learned again.
    lab.forget_prefixes()
    again = lab.arrive("two", prompt(PLAIN, DOC_A))
    assert lab.admit(again) == len(tokens), "with both documents, a blend is faster"
    lab.load(again)
    lab.finish(again)


def test_what_the_engine_has_itself_is_neither_weighed_nor_loaded(make):
    """A request waited for chunks on a slow tier though the engine had every token of them."""
    tier = Counted(DictTier())
    lab = make(tier, slots=5)
    lab.serve("one", PLAIN)
    lab.settle()
    lab.serve("other", [7] * 40)
    lab.settle()
    for i, weigh in enumerate((False, True)):
        if weigh:
            pretend(lab, byte=1.0)
        again = lab.arrive(f"again {i}", [*PLAIN, 1, 2, 3, 4])
        assert lab.look(again) == 40
        assert lab.scheduler.claim(again, 40) == 0
        assert lab.finish(again) is None
    assert tier.counts.bytes_read == 0


def test_a_tier_that_is_fast_again_is_found_by_a_trial(make, monkeypatch):
    lab = make(counted(*(PLAIN[i:] for i in range(12)), slots=64), slots=64)
    pretend(lab, byte=1.0, token=0.1)
    speeds = lab.store.cost
    clock, speeds.clock = speeds.clock, lambda: clock() + later
    later, loaded = 0.0, []
    for i in range(12):
        if i == 8:
            later = 10.0
        loaded.append(lab.serve(str(i), PLAIN[i:]).loaded)
        while i >= 8 and storage_fakes.reading(speeds)["dict"].newest == 1.0:
            lab.step()
        lab.forget_prefixes()
    assert loaded[:8] == [0] * 8
    assert all(loaded[8:])


# -- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_is_stable_while_nothing_changes_and_follows_what_the_engine_has(make):
    lab = make()
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    request = lab.arrive("two", PLAIN)
    assert [lab.scheduler.claim(request, 0) for _ in range(3)] == [40] * 3
    lab.scheduler.forget_all()  # the claim's chunks are pinned: it stands, and a load would say that they are lost
    assert lab.scheduler.claim(request, 0) == 40
    assert lab.scheduler.claim(request, 8) == 0
    lab.serve("three", PLAIN)
    lab.step()
    assert lab.scheduler.claim(request, 16) == 24
    lab.finish(request)


def test_a_claim_that_the_engine_does_not_take_is_let_go_when_the_request_runs(make):
    lab = make()
    lab.serve("one", PLAIN)
    lab.settle()
    request = lab.arrive("two", PLAIN)
    assert lab.scheduler.claim(request, 0) == 40
    assert lab.store.held() == 5
    lab.tables["two"] = [block.block_id for block in lab.pool.get_new_blocks(10)]
    lab.compute(request, 4)
    lab.store.flush()
    assert lab.store.held() == 0
    lab.finish(request)


def test_a_request_that_reads_no_prefix_holds_nothing(make):
    tier = gated()
    fill(tier.inner, PLAIN[:16])
    lab = make(tier)
    request = lab.arrive("one", PLAIN[:16], skip_reading_prefix_cache=True)
    assert lab.store.held() == 0
    assert lab.scheduler.claim(request, 0) == 0
    lab.finish(request)


def test_a_preempted_request_finds_what_it_has_saved(make):
    """The claim of its first admission, which found nothing, was answered again."""
    lab = make()
    request = lab.arrive("one", PLAIN[:18])
    assert lab.admit(request) == 0
    lab.decode(request, [1])
    lab.settle()
    lab.preempt(request)
    lab.pool.forget()
    assert lab.admit(request) == 16
    lab.step()
    assert lab.right(request, 16)
    lab.compute(request, 3)
    lab.finish(request)


def exactly_loaded(lab: Lab) -> Request:
    """A request for which 16 of 18 tokens were loaded."""
    lab.serve("before", PLAIN[:18])
    lab.forget_prefixes()
    request = lab.arrive("one", PLAIN[:18])
    assert lab.admit(request) == 16
    lab.load(request)
    return request


def test_a_preempted_request_reports_the_tokens_of_its_last_load(make):
    """The tokens of both loads were added up, and were more than the prompt has."""
    lab = make()
    request = exactly_loaded(lab)
    lab.preempt(request)
    lab.pool.forget()
    assert lab.admit(request) == 16
    lab.load(request)
    lab.compute(request, 2)
    assert lab.finish(request) == {"exact_tokens": 16, "tokens_from": {"host": 16}}


def test_a_preempted_blend_is_computed_exactly_and_stays_isolated(make):
    lab = make()
    learn(lab, DOC_A)
    tokens = prompt(DOC_A, system=range(9))
    request = lab.arrive("one", tokens)
    assert lab.admit(request) == len(tokens)
    lab.step()
    lab.compute(request, 1)
    lab.settle()
    lab.preempt(request)
    lab.pool.forget()
    assert lab.admit(request) == 8, "the chunk before the document"
    lab.step()
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    lab.finish(request)
    lab.forget_prefixes()
    assert lab.serve("plain", tokens, {"blend": False}).loaded == 8


STAGES = ("arrived", "waiting", "claimed", "queued", "loading", "loaded", "computing")


@pytest.mark.parametrize("lmc", [None, {"blend": False}])
@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_leaves_nothing_behind(make, stage, lmc):
    tokens = prompt(DOC_A, DOC_B)
    tier = gated()
    fill(tier.inner, tokens[:24], documents=[DOC_A, DOC_B])
    lab = make(tier)
    request = lab.arrive("one", tokens, lmc)

    def reach():
        if stage == "arrived":
            return
        assert lab.scheduler.claim(request, 0) is None
        if stage == "waiting":
            return
        tier.read_gates[0].set()
        lab.wait(lambda: lab.scheduler.claim(request, 0))
        if stage == "claimed":
            return
        lab.admit(request)
        if stage == "queued":
            lab.workers.held_back = True
        lab.step()
        if stage in ("queued", "loading"):
            return
        tier.open_all()
        while "one" in lab.workers.loading:
            lab.step()
        if stage == "loaded":
            return
        lab.compute(request, 1)

    reach()
    lab.finish(request)  # and `make` proves that nothing is held
    tier.open_all()


# -- blends -----------------------------------------------------------------------------------------------------------


def test_learned_documents_are_reused_in_any_order(make):
    lab = make()
    learn(lab, DOC_A, DOC_B)
    tokens = prompt(DOC_B, DOC_A)
    request = lab.arrive("one", tokens)
    assert lab.admit(request) == len(tokens)
    (job,) = lab.step().loads
    assert isinstance(job, BlendJob)
    assert [(p.at, p.tokens, p.first, p.skip, p.stored) for p in job.documents] == [
        (7, 8, 0, 0, 8), (15, 8, 8, 0, 8), (23, 4, 16, 0, 4), (29, 8, 0, 0, 8), (37, 4, 8, 0, 4),
    ]  # fmt: skip
    found = lab.workers.documents["one"]
    assert torch.equal(found[7], token_bytes(DOC_B, 0, 8, 0))
    assert torch.equal(found[37], token_bytes(DOC_A, 8, 12, 0))
    assert (job.start, job.exact, job.question, len(job.tokens)) == (0, 0, 43, 48)
    lab.compute(request, 1)
    assert lab.finish(request)["tokens_from"] == {"host": 32}


def test_a_document_of_one_token_is_learned_and_its_request_ends(make):
    """The engine computes the last token again, and asks about a request without computed tokens as about a new one."""
    lab = make(settings={"blend_min_tokens": 1})
    assert lab.serve("learns", DOC_A[:1], {"learn": True}).loaded == 0
    assert lab.serve("two tokens", DOC_A[:2], {"learn": True}).loaded == 2
    assert all(lab.store.lookup(document_keys(lab, DOC_A[:1])))


def test_documents_whose_layers_have_other_types_have_other_keys(make):
    """Some layers may be excepted from a KV cache of 8 bits. Their bytes were read as numbers of another type."""
    types = "", "torch.float8_e4m3fn,torch.float32", "torch.float32,torch.float8_e4m3fn"
    assert len({document_keys(make(dtypes=one), DOC_A)[0] for one in types}) == 3


def test_of_a_document_of_an_engine_with_a_longer_context_only_positions_of_this_engine_are_used(make, tmp_path):
    """The model may have no RoPE angles for later ones, to turn the keys back from them."""
    document = [200 + i for i in range(8 * CHUNK)]
    fill(DiskTier(tmp_path, MB), documents=[document], longest=1000)
    lab = make(DiskTier(tmp_path, MB), longest=7 * CHUNK - 1)
    lab.wait(lambda: lab.engine.recall.ended or None)
    request = lab.arrive("one", [*SYSTEM, *document, *QUESTION])
    lab.wait(lambda: lab.admit(request))
    (job,) = lab.step().loads
    assert [piece.first for piece in job.documents] == [CHUNK * chunk for chunk in range(6)]
    lab.load(request)
    lab.finish(request)


@pytest.mark.parametrize("told", ["with the sink", "without it", "seen in a prompt"])
def test_documents_are_learned_behind_the_sink(make, told):
    """A request to learn may begin with the sink, which is no part of the document."""
    lab = make(prefix=(1,))
    if told == "seen in a prompt":
        lab.serve("first", prompt(DOC_B, system=range(900, 903)))
    else:
        learn(lab, [1, *DOC_B] if told == "with the sink" else DOC_B)
        assert lab.requests[f"learn 0 {len(DOC_B) + (told == 'with the sink')} {{}}"].facts["learned"]
    lab.settle()
    lab.forget_prefixes()

    request = lab.arrive("one", prompt(DOC_B))
    lab.admit(request)
    (job,) = lab.step().loads

    places = [(p.at, p.tokens, p.first, p.exact) for p in job.documents]
    assert places == [(7, 8, 1, False), (15, 8, 9, False), (23, 4, 17, False)]
    found = lab.workers.documents["one"]
    assert torch.equal(found[15], token_bytes([1, *DOC_B], 9, 17, 0))
    lab.compute(request, 1)
    lab.finish(request)


def test_documents_are_learned_behind_a_primer_whose_first_token_begins_prompts(make):
    """That token is no part of a document, in a request to learn or at the start of a prompt."""
    lab = make(prefix=(1, 50, 51))
    learn(lab, [1, *DOC_A], DOC_B)
    lab.settle()
    lab.forget_prefixes()
    assert all(lab.store.lookup([*document_keys(lab, DOC_A), *document_keys(lab, DOC_B)]))

    request = lab.arrive("one", [1, *DOC_A, *SEPARATOR, *DOC_B, *SEPARATOR, 9, 9])
    lab.admit(request)
    (job,) = lab.step().loads

    places = [(p.at, p.first, p.exact) for p in job.documents]
    assert places[0] == (1, 3, False)
    assert job.learned_after == 3
    assert places[-1][1:] == (3 + 16, False)
    lab.compute(request, 1)
    lab.finish(request)


def test_a_document_is_not_learned_at_positions_that_the_model_does_not_have(make, caplog):
    lab = make(prefix=(1, 50, 51), longest=len(DOC_A) + 2)
    learn(lab, DOC_A)
    lab.settle()
    assert f"a document of {len(DOC_A)} tokens is too long to be learned" in caplog.text
    assert not any(lab.store.lookup(document_keys(lab, DOC_A)))


def test_a_document_that_is_too_long_to_be_learned_is_said_in_the_response_and_not_in_the_log(make, caplog):
    """Each request with it queued it again, and each time it was dropped with a warning."""
    lab = make(prefix=(1, *range(200, 230)), longest=40)
    for question in (8, 9):
        facts = lab.serve(f"{question}", [1, *SEPARATOR, *DOC_A, *SEPARATOR, *[question] * 20]).facts
        lab.settle()
        assert facts == {
            "unknown_documents": 1,
            "note": f"a document of {len(DOC_A)} tokens is too long to be learned by this engine",
        }
    assert not caplog.records


def test_short_documents_of_prompts_are_not_learned(make):
    """A prompt of a hundred short texts took all slots, and evicted the documents of every tenant."""
    lab = make(settings={"chunk_size": 16 * BLOCK})
    assert lab.engine.least_tokens == BLOCK
    short, enough = DOC_A[: BLOCK - 1], DOC_B[:BLOCK]
    lab.serve("one", [1, *SEPARATOR, *short, *SEPARATOR, *enough, *SEPARATOR, 9, 9])
    lab.settle()
    assert [bool(lab.store.lookup(document_keys(lab, text))[0]) for text in (short, enough)] == [False, True]
    (one,) = (document for document in lab.engine.documents(short, [Span(0, len(short))]))
    assert lab.engine.learn_later(short, [one], wanted=True), "a request for it"


def test_a_document_behind_the_sink_alone_is_exact(make):
    lab = make(prefix=(1,))
    learn(lab, [1, *DOC_A])
    pieces = lab.engine.documents([1, *DOC_A, *SEPARATOR, 9], (), start=Span(0, 1 + len(DOC_A)))[0].pieces
    assert [(p.at, p.first, p.exact) for p in pieces] == [(1, 1, True), (9, 9, True)]
    assert not lab.engine.documents([2, *DOC_A, *SEPARATOR, 9], [Span(1, 1 + len(DOC_A))])[0].pieces[0].exact


def test_kinds_of_learning_never_mix(make):
    """What was learned alone is not found behind a sink, nor behind another one."""
    tier = DictTier()
    fill(tier, documents=[DOC_A])
    for prefix in ((1,), (2,)):
        lab = make(tier, prefix=prefix)
        assert lab.store.lookup(document_keys(lab, DOC_A)) == [None, None]
    alone = make(tier)
    assert all(alone.store.lookup(document_keys(alone, DOC_A)))


# -- documents anywhere -----------------------------------------------------------------------------------------------

LONG = [1000 + i for i in range(100)]
CHARACTERS = SimpleNamespace(
    encode=lambda text: list(map(ord, text)), decode=lambda tokens: "".join(map(chr, tokens))
)  # a tokenizer


@pytest.fixture
def knowing(make):
    """Makes a lab that knows the document `LONG`."""

    def make_lab(**options):
        lab = make(slots=40, longest=2048, blocks=128, **options)
        learn(lab, LONG)
        return lab

    return make_lab


def blended(lab, name, tokens, lmc=None, **more):
    """The pieces of a prompt's blend: (position, tokens, position at which they were computed)."""
    request = lab.arrive(name, tokens, lmc, **more)
    lab.wait(lambda: lab.admit(request))
    loads = lab.step().loads
    lab.load(request)
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    request.facts = lab.finish(request)
    return [(p.at, p.tokens, p.first) for job in loads for p in getattr(job, "documents", ())], request


def test_a_known_document_is_reused_without_separators(knowing):
    lab = knowing()
    pieces, request = blended(lab, "one", [*SYSTEM, *LONG, *QUESTION])
    assert pieces == [(5 + at, min(CHUNK, 100 - at), at) for at in range(0, 100, CHUNK)]
    assert request.facts["found_documents"] == {"known": 1}
    assert (lab.scheduler.counts["blends"], lab.scheduler.counts["documents_known"]) == (1, 1)
    assert lab.engine.known.list()[0].uses == 1


def test_a_response_says_how_the_documents_of_a_prompt_were_found(knowing):
    lab = knowing()
    repeated = [2000 + i for i in range(100)]
    lab.serve("repeated", repeated, {"learn": True, "name": REPEATED})
    learn(lab, DOC_A)
    documents = [*LONG, *repeated[10:90], *SEPARATOR, *DOC_A, *SEPARATOR, *DOC_B]
    _, request = blended(lab, "one", [*SYSTEM, *documents, *SEPARATOR, *QUESTION])
    assert request.facts["found_documents"] == {"known": 1, "repeated": 1, "separators": 1}
    assert request.facts["unknown_documents"] == 1
    assert lab.scheduler.recent["one"] == request.facts


def test_documents_that_a_request_names_count_as_found_by_it(knowing):
    lab = knowing(tokenizer=CHARACTERS)
    text, positions = "".join(map(chr, LONG)), [5, 5 + len(LONG)]
    for name, given in (("text", text), ("positions", positions)):
        _, request = blended(lab, name, [*SYSTEM, *LONG, *QUESTION], {"documents": [given]})
        assert request.facts["found_documents"] == {"request": 1}
        lab.forget_prefixes()


def test_documents_learned_ahead_are_stored_once_also_if_requests_give_them_as_texts(knowing):
    """In a prompt, the document's first token is joined with a blank before it: it was another document."""
    joining = SimpleNamespace(
        encode=lambda text: [ord(one[-1]) + 9000 * (len(one) - 1) for one in re.findall(r" ?\S|\s", text)],
        decode=CHARACTERS.decode,
    )
    lab = knowing(tokenizer=joining)
    text, other = "".join(map(chr, LONG)), "".join(chr(2000 + i) for i in range(100))
    for number, given in enumerate((text, other)):
        tokens = joining.encode(f"ab cd {given} ef gh")
        assert tokens[4] == 9000 + ord(given[0])
        pieces, request = blended(lab, f"{number}", tokens, {"documents": [given]})
        lab.settle()
        lab.forget_prefixes()
        assert (bool(pieces), request.facts.get("unknown_documents", 0)) == (given is text, given is other)
        assert request.facts.get("found_documents", {}) == ({"request": 1} if given is text else {})
    assert sorted(len(document.tokens) for document in lab.engine.known.list()) == [99, 100]


def test_the_note_gives_each_text_that_is_not_found_its_reason_within_a_bounded_length(make):
    lab = make(tokenizer=CHARACTERS, longest=2048, blocks=128)
    changed, escaped = "Ask Kai\nor Mara.", "Say 'no'\nto Tara."
    tokens = list(map(ord, f"{' '.join(changed.split())} {json.dumps(escaped)} the end"))
    note = lab.serve("three", tokens, {"documents": [changed, escaped, "Tara lives here", "the end"]}).facts["note"]
    assert note == (
        "lmc.documents: 3 of 4 texts were not found: "
        "'Ask Kai\\nor Mara.': it has other white space in the prompt; "
        "\"Say 'no'\\nto Tara.\": it is escaped as JSON in the prompt; "
        "'Tara lives here': it is not in the prompt"
    )
    many = [f"{number}{'x' * 100}" for number in range(20)]
    note = lab.serve("many", tokens, {"documents": many}).facts["note"]
    assert note.count("it is not in the prompt") == classifier.MAX_NAMED
    assert note.endswith(f"; and {20 - classifier.MAX_NAMED} more")
    assert len(note) < 1000


@pytest.mark.parametrize(
    ("lmc", "more"),
    [({"blend": False}, {}), ({"learn": True}, {}), (None, {"skip_reading_prefix_cache": True})],
    ids=["exact", "learn", "prompt_logprobs"],
)
def test_a_request_whose_documents_are_not_looked_up_reports_none(knowing, lmc, more):
    lab = knowing()
    request = lab.serve("one", [*SYSTEM, *SEPARATOR, *DOC_A, *SEPARATOR, *LONG, *QUESTION], lmc, **more)
    assert "found_documents" not in (lab.scheduler.recent[request.request_id] or {})


WORK = {
    Store: ("lookup", "pin", "begin", "release"),
    DocumentFinder: ("all_runs", "insert"),
    BlockTable: ("find",),
    finder: ("_run_around",),
    CostModel: ("choose", "against_blend"),
}


def test_the_work_for_a_tenant_does_not_depend_on_the_documents_of_others(make, monkeypatch):
    """Otherwise a tenant could find out by timing whether another one has a document."""
    prompts = {"anywhere": [*LONG[3:], *DOC_A], "separated": [*SEPARATOR, *LONG, *SEPARATOR, *DOC_A]}

    def work(lab, tier, salt):
        """What is done for a tenant's prompts: each call, facts of the responses, and what a tier is asked for."""
        calls, asked, opened = [], len(tier.counts.keys_asked), tier.counts.opened
        with monkeypatch.context() as patch:
            for owner, names in WORK.items():
                for name in names:
                    patch.setattr(owner, name, recorded(calls, getattr(owner, name)))
            for name, inner in [*prompts.items()] * 2:
                request = lab.serve(f"{salt} {len(calls)}", [*SYSTEM, *inner, *SEPARATOR, 7], cache_salt=salt)
                calls.append((name, request.facts, request.loaded))
                lab.settle()
                lab.forget_prefixes()
        return calls, tier.counts.keys_asked[asked:], tier.counts.opened - opened

    works = []
    for shift in (0, 5000):
        tier = Counted(DictTier())
        lab = make(tier, slots=80, longest=2048, blocks=256)
        learn(lab, *([token + shift for token in document] for document in (LONG, DOC_A)), cache_salt="other")
        learn(lab, [token + 9000 for token in LONG], cache_salt="asking")
        lab.store.flush()
        works.append((work(lab, tier, "asking"), work(lab, tier, "other")))
    (asking, owner), (asking_without, other_without) = works
    assert asking == asking_without
    assert {name for name, *_ in asking[0]} >= {"lookup", "pin", "all_runs", "find", "anywhere", "separated"}
    assert owner != other_without, "the work differs for the tenant that has the documents"


def recorded(calls, method):
    """A method that notes each of its calls, with the sizes of what it got and returned."""

    def call(*arguments, **more):
        found = method(*arguments, **more)
        calls.append((method.__name__, *(len(one) for one in (*arguments[1:], found) if hasattr(one, "__len__"))))
        return found

    return call


@pytest.mark.parametrize(("first", "stop"), [(0, 64), (3, 70), (8, 80), (13, 97), (36, 100)])
def test_a_part_of_a_document_is_reused_from_the_middle_of_a_chunk(knowing, first, stop):
    lab = knowing()
    pieces, _ = blended(lab, "one", [*SYSTEM, *LONG[first:stop], *QUESTION])
    assert pieces[0] == (5, min(CHUNK - first % CHUNK, stop - first), first)
    assert pieces[-1][0] + pieces[-1][1] == 5 + stop - first
    assert all(at - 5 + first == computed for at, _, computed in pieces)
    for piece, following in itertools.pairwise(pieces):
        assert piece[0] + piece[1] == following[0]


def test_short_parts_are_computed(knowing):
    lab = knowing()
    assert blended(lab, "one", [*SYSTEM, *LONG[10:73], *QUESTION])[0] == []
    lab = knowing(settings={"blend_min_run": 48})
    assert blended(lab, "one", [*SYSTEM, *LONG[10:58], *QUESTION])[0]


@pytest.mark.parametrize("how", ["separators", "blend: false", "another tenant"])
def test_documents_are_found_by_nobody_who_did_not_ask(knowing, how):
    lab = knowing(settings={"blend_find": "separators"} if how == "separators" else {})
    salt = {"cache_salt": "other"} if how == "another tenant" else {}
    pieces, request = blended(lab, "one", [*SYSTEM, *LONG, *QUESTION], {"blend": how != "blend: false"}, **salt)
    assert (pieces, request.facts) == ([], None)
    assert lab.right(request, 108)


def test_a_document_whose_ends_another_tokenization_has_changed_is_stored_once(knowing):
    """Learned from a file, and met between separators with other tokens at its ends."""
    lab = knowing()
    tokens = prompt([7, *LONG[1:99], 8])
    pieces, _ = blended(lab, "one", tokens)
    assert (pieces[0], sum(tokens for _, tokens, _ in pieces)) == ((8, 7, 1), 98)
    lab.settle()
    assert len(lab.engine.known.list()) == 1
    assert lab.scheduler.numbers()["documents_learned"] == 1


def test_a_document_that_was_evicted_is_learned_again_where_it_is_met(knowing):
    lab = knowing()
    lab.engine.forget_all()
    request = lab.serve("one", prompt([7, *LONG[1:99], 8]))
    assert request.facts["unknown_documents"] == 1
    lab.settle()
    assert lab.scheduler.numbers()["documents_learned"] == 2


def test_the_next_turn_goes_on_from_the_blend_of_a_found_document(knowing):
    lab = knowing()
    first = [*SYSTEM, *LONG, *QUESTION]
    lab.serve("one", first, output=range(20))
    lab.drop_backfills()
    request = lab.serve("two", [*first, *range(20), *QUESTION])
    assert request.facts["continued_tokens"] > 100
    assert lab.scheduler.counts["blends"] == 1


def test_unknown_text_between_separators_is_learned_though_it_quotes_a_known_document(knowing):
    lab = knowing()
    quoting = [*DOC_B, *LONG[:80], *DOC_A]
    pieces, request = blended(lab, "one", prompt(quoting))
    assert (pieces[0], sum(tokens for _, tokens, _ in pieces)) == ((7 + len(DOC_B), 8, 0), 80)
    assert request.facts["unknown_documents"] == 1
    lab.settle()
    pieces, _ = blended(lab, "two", prompt(quoting, system=[3, 4]))
    assert (pieces[0], sum(tokens for _, tokens, _ in pieces)) == ((4, 8, 0), len(quoting))


def test_approximate_positions_are_never_saved(make):
    """Neither as chunks, nor as the tail, nor decoded."""
    lab = make()
    learn(lab, DOC_A)
    tokens = prompt(DOC_A, system=range(9))
    lab.serve("one", tokens, output=range(20))
    lab.settle()
    lab.pool.forget()
    assert lab.serve("two", [*tokens, *range(20)], {"blend": False}).loaded == 8
    for slot in range(lab.store.slots):
        assert not (lab.workers.slab.slot(slot)[:, : 2 * PAGE] == APPROXIMATE).all(1).any()


def test_a_plain_request_never_meets_approximate_blocks(make):
    lab = make()
    learn(lab, DOC_A)
    tokens = prompt(DOC_A)
    lab.serve("blended", tokens)
    plain = lab.arrive("plain", tokens, {"blend": False})
    assert lab.look(plain) == 4
    lab.admit(plain)
    lab.step()
    lab.compute(plain, plain.num_tokens - plain.num_computed_tokens)
    assert lab.right(plain, len(tokens))
    lab.finish(plain)


def test_the_salted_chain_goes_on_into_what_is_decoded(make):
    lab = make()
    learn(lab, DOC_A)
    tokens = prompt(DOC_A)
    request = lab.arrive("one", tokens)
    exact = list(request.block_hashes)
    lab.admit(request)
    assert request.block_hashes[0] == exact[0]
    assert not set(request.block_hashes[1:]) & set(exact)
    lab.step()
    lab.decode(request, range(9))
    assert len(request.block_hashes) == request.num_tokens // BLOCK
    lab.finish(request)
    again = lab.arrive("two", [*tokens, *range(9)], {"blend": False})
    assert lab.look(again) == 4
    lab.finish(again)


@pytest.fixture(params=[False], ids=[""])
def blending(make, request):
    """A lab whose workers are blending a prompt, with steps of 100 tokens; a test may let it serve by priority."""
    lab = make(batch_tokens=100, by_priority=request.param)
    learn(lab, DOC_A, DOC_B)
    lab.workers.held_back = True
    blend = lab.arrive("blend", prompt(DOC_A, DOC_B))
    assert lab.admit(blend) > 0
    yield lab
    lab.workers.held_back = False
    lab.load(blend)
    lab.compute(blend, blend.num_tokens - blend.num_computed_tokens)
    lab.finish(blend)


def test_a_long_prompt_begins_after_the_blends_of_earlier_requests(blending):
    """Otherwise its prefill would fill the steps, and the earlier blends would end last."""
    lab = blending
    long, short = lab.arrive("long", PLAIN), lab.arrive("short", PLAIN[:9])
    assert (lab.admit(long), lab.admit(short)) == (None, 0)
    assert lab.step().first == {"blend"}
    lab.now += 10  # A deadline for chunks is no deadline for this.
    assert lab.admit(long) is None
    assert lab.step().first == {"blend"}
    lab.workers.held_back = False
    lab.step()
    assert lab.admit(long) == 0
    assert not lab.step().first
    for request in (long, short):
        lab.compute(request, request.num_tokens)
        lab.finish(request)


def test_a_step_with_the_first_token_of_a_blended_request_has_no_other_blends(blending):
    """The request waited for the blend of the next one, which was computed in the step of its first token."""
    lab = blending
    lab.workers.held_back = False
    request, plain = lab.requests["blend"], lab.arrive("plain", PLAIN[:9])
    lab.load(request)
    lab.admit(plain)
    plan = lab.compute(plain, 9)
    assert (plan.answers, plan.received) == (set(), {"blend"})
    assert lab.compute(request, 1).answers == {"blend"}
    request.append([5])
    assert not lab.compute(request, 1).answers
    lab.finish(plain)


@pytest.fixture
def sampled(make):
    """Two requests with one prompt, of which the beginning is stored; the first one loads it."""
    lab = make(blocks=256)
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    lab.workers.held_back = True
    first, second = (lab.arrive(name, [*PLAIN, *range(700, 720)]) for name in ("first", "second"))
    assert lab.admit(first) == len(PLAIN)
    assert lab.admit(second) is None
    lab.step()
    assert not state_of(lab, "second").chunks.pins
    return lab, first, second


def test_samples_of_a_prompt_share_one_load_and_what_is_computed_after_it(sampled):
    """Earlier, each sample loaded the beginning into its own blocks and computed the rest; in vLLM alone, one does."""
    lab, first, second = sampled
    different = lab.arrive("different", [*PLAIN[:20], *range(800, 840)])
    longer = lab.arrive("longer", [*PLAIN, *range(900, 920)])
    assert lab.scheduler.claim(different, lab.look(different)) is None, "it would load a part of the same"
    lab.workers.held_back = False
    lab.load(first)
    lab.compute(first, first.num_tokens - first.num_computed_tokens)
    assert lab.admit(second) == 0
    assert second.num_computed_tokens > len(PLAIN) + 10
    assert lab.admit(longer) == lab.admit(different) == 0
    assert longer.num_computed_tokens == len(PLAIN)
    for request in (second, longer, different):
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
    for request in (first, second, longer, different):
        lab.finish(request)
    lab.check()


def test_a_sample_begins_in_the_step_in_which_the_first_one_begins(sampled):
    lab, first, second = sampled
    lab.workers.held_back = False
    lab.load(first)
    assert first.running
    assert lab.admit(second) == 0
    assert second.num_computed_tokens == len(PLAIN), "what the first one has loaded"
    for request in (first, second):
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
        lab.finish(request)
    lab.check()


@pytest.mark.parametrize("event", ["abort", "failure"])
def test_a_sample_loads_by_itself_if_the_first_load_is_lost(sampled, event):
    lab, first, second = sampled
    lab.lose(first, event)
    loaded = lab.wait(lambda: lab.admit(second))
    assert loaded == (len(PLAIN) if event == "abort" else 0), "the engine has what the first one computed"
    lab.load(second)
    lab.compute(second, second.num_tokens - second.num_computed_tokens)
    lab.finish(second)
    lab.check()


def test_a_sample_does_not_wait_for_ever(sampled):
    lab, first, second = sampled
    lab.now += MAX_BLEND_WAIT_SECONDS + 1
    assert lab.wait(lambda: lab.admit(second)) == len(PLAIN)
    lab.workers.held_back = False
    for request in (first, second):
        lab.load(request)
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
        lab.finish(request)
    lab.check()


def test_few_stored_tokens_are_computed(make):
    """Loading takes a step of the engine, in which it would compute them."""
    lab = make(blocks=512, slots=32, settings={"blend_min_tokens": 256})
    long = [300 + number for number in range(200)]
    lab.serve("one", long)
    lab.forget_prefixes()
    assert lab.serve("few", [*long[:120], *range(700, 720)]).loaded == 0
    lab.forget_prefixes()
    assert lab.serve("many", [*long[:160], *range(700, 720)]).loaded == 160


def test_a_burst_of_blends_waits_until_those_before_have_ended(make):
    """Without a limit, a burst of blends takes the blocks that running requests need for their next tokens."""
    lab = make(batch_tokens=100, blocks=256, slots=32, settings={"load_policy": "always"})
    learn(lab, DOC_A, DOC_B)
    lab.workers.held_back = True
    prompts = [prompt(DOC_A, DOC_B, system=[50, 51, 52, 53, number]) for number in range(600, 608)]
    requests = [lab.arrive(f"{number}", tokens) for number, tokens in enumerate(prompts)]
    exact = lab.arrive("exact", PLAIN[:9])
    first = [request for request in requests if lab.admit(request)]
    assert len(first) == 2 * 100 // len(prompts[0])
    assert lab.admit(exact) == 0, "a prompt without a blend does not wait for that"
    lab.step()
    assert not any(lab.admit(request) for request in requests if request not in first)
    lab.workers.held_back = False
    for request in requests:
        lab.wait(lambda request=request: request in first or lab.admit(request))
        lab.load(request)
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
        lab.finish(request)
    lab.compute(exact, 9)
    lab.finish(exact)
    assert lab.scheduler.counts["blends"] == 8
    lab.drop_backfills()
    lab.check()


@pytest.mark.parametrize(
    ("blending", "change", "waits"),
    [
        (False, {"arrival_time": 0.0}, False),
        (False, {"priority": -1}, True),  # The engine does not look at priorities.
        (True, {"priority": -1}, False),
        (True, {"priority": 1, "arrival_time": 0.0}, True),
    ],
    indirect=["blending"],
    ids=str,
)
def test_a_long_prompt_waits_for_blends_that_the_engine_serves_before_it(blending, change, waits):
    request = blending.arrive("other", PLAIN, **change)
    assert (blending.admit(request) is None) is waits
    assert bool(blending.step().first) is waits
    blending.workers.held_back = False
    if waits:
        blending.wait(lambda: blending.admit(request))
    blending.compute(request, request.num_tokens)
    blending.finish(request)


def test_a_long_prompt_does_not_wait_for_ever(blending):
    request = blending.arrive("long", PLAIN)
    assert blending.admit(request) is None
    blending.now += MAX_BLEND_WAIT_SECONDS
    assert blending.admit(request) == 0
    blending.compute(request, request.num_tokens)
    blending.finish(request)


def test_a_prompt_that_waits_holds_no_chunks(blending):
    lab = blending
    lab.serve("stored", PLAIN[:16], arrival_time=0.0)
    lab.pool.forget()
    held = lab.store.held()
    request = lab.arrive("long", PLAIN)
    assert lab.admit(request) is None
    assert lab.store.held() == held
    lab.workers.held_back = False
    assert lab.wait(lambda: lab.admit(request)) == 16
    lab.load(request)
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    lab.finish(request)


def test_later_requests_leave_the_blocks_of_a_prompt_that_waits(blending):
    """A later blend took them, and the prompt waited until others had finished."""
    lab = blending
    taken = lab.pool.get_new_blocks(lab.pool.get_num_free_blocks() - len(PLAIN) // BLOCK - 2)
    long, later = lab.arrive("long", PLAIN), lab.arrive("later", prompt(DOC_B, DOC_A))
    assert (lab.admit(long), lab.admit(later)) == (None, None)
    lab.pool.free_blocks(taken)
    lab.step()
    assert lab.admit(long) is None
    assert lab.admit(later) > 0, "there are enough blocks for both"
    lab.workers.held_back = False
    lab.load(later)
    lab.wait(lambda: lab.admit(long))
    for request in (long, later):
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
        lab.finish(request)


def test_an_error_in_a_report_leaves_no_blend_for_which_prompts_wait(blending, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(blending.scheduler, "abandon", lambda request: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            blending.scheduler.recover(StepReport(), ["blend"])
    request = blending.arrive("long", PLAIN)
    assert blending.admit(request) == 0
    blending.compute(request, request.num_tokens)
    blending.finish(request)


def test_a_blend_does_not_wait_for_another_one(blending):
    """Workers do one after the other."""
    other = blending.arrive("other", prompt(DOC_B, DOC_A))
    assert blending.admit(other) > 0
    blending.workers.held_back = False
    blending.load(other)
    blending.finish(other)


def test_a_long_prompt_does_not_wait_for_a_blend_whose_chunks_a_tier_still_reads(make):
    tier = gated()
    fill(tier.inner, documents=(DOC_A, DOC_B))
    lab = make(tier, batch_tokens=100)
    blend = lab.arrive("blend", prompt(DOC_A, DOC_B))
    tier.read_gates[0].set()
    assert lab.wait(lambda: lab.admit(blend)) > 0
    assert not lab.step().loads[0].ready
    long = lab.arrive("long", PLAIN)
    assert lab.admit(long) == 0
    tier.open_all()
    for request in (blend, long):
        lab.load(request)
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
        lab.finish(request)


def test_a_repeat_of_the_same_blend_finds_its_own_blocks_and_another_does_not(make):
    lab = make()
    learn(lab, DOC_A)
    tokens = prompt(DOC_A)
    lab.serve("one", tokens)
    same = lab.arrive("same", tokens)
    assert lab.look(same) == 24
    lab.admit(same)
    lab.compute(same, same.num_tokens - same.num_computed_tokens)
    lab.finish(same)
    for name, lmc, other in (
        ("policy", {"ratio": 0.5}, tokens),
        ("strategy", {"strategy": "none"}, tokens),
        ("question", None, prompt(DOC_A, question=[1, 2, 3, 4, 5])),
    ):
        assert lab.look(lab.arrive(name, other, lmc)) == 4
        lab.finish(lab.requests[name])


def test_a_repeat_saves_nothing_approximate_either(make):
    lab = make()
    learn(lab, DOC_A)
    tokens = prompt(DOC_A)
    lab.serve("one", tokens)
    lab.drop_backfills()
    lab.settle()
    stored = lab.scheduler.numbers()["stored_chunks"]
    lab.serve("same", tokens, output=range(20))
    lab.drop_backfills()
    lab.settle()
    assert lab.scheduler.numbers()["stored_chunks"] == stored


def test_exact_blocks_of_the_engine_win_over_a_shorter_blend(make):
    lab = make()
    tokens = prompt(DOC_A)
    lab.serve("plain", tokens, {"blend": False})
    lab.settle()
    learned = lab.serve("learn", DOC_A, {"learn": True})
    assert learned.facts["learned"]
    lab.settle()
    request = lab.arrive("one", tokens)
    assert lab.look(request) == 24
    assert lab.scheduler.claim(request, 24) == 0
    lab.finish(request)


def test_documents_between_exact_chunks_and_the_question_start_where_the_exact_ends(make):
    lab = make(settings={"blend_learn": False})
    tokens = prompt(DOC_A, DOC_B)
    lab.serve("plain", tokens[:13], {"blend": False})
    learn(lab, DOC_A, DOC_B)
    request = lab.arrive("one", tokens)
    assert lab.admit(request) == len(tokens)
    (job,) = lab.step().loads
    assert (job.exact, job.documents[0].at, job.documents[0].skip, job.documents[0].first) == (
        12,
        12,
        5,
        5,
    )
    assert lab.right(request, 12)
    assert state_of(lab, "one").approximate == 12
    lab.compute(request, 1)
    lab.finish(request)


@pytest.mark.parametrize(
    ("about", "more"),
    [
        ("LoRA", {"lora_request": Adapter("nowhere")}),
        ("multimodal", {"mm_features": [object()]}),
        ("embeddings", {"prompt_embeds": object()}),
    ],
)
def test_what_cannot_be_blended_is_served_exactly_and_counted(make, about, more):
    lab = make()
    learn(lab, DOC_A)
    request = lab.serve("one", prompt(DOC_A), **more)
    assert about in request.facts["note"]
    assert request.loaded == 0
    assert lab.scheduler.counts["refused"] == 1


def test_a_response_says_why_too_few_tokens_are_not_reused_and_nothing_where_there_is_nothing_to_say(make):
    lab = make(settings={"blend_min_tokens": 100})
    learn(lab, DOC_A)
    said = "12 tokens of stored documents are fewer than blend_min_tokens=100"
    assert lab.serve("few", prompt(DOC_A)).facts == {"found_documents": {"separators": 1}, "note": said}
    assert lab.serve("no special string", [7] * 20).facts is None
    assert make(blends=False).serve("no blending", prompt(DOC_A)).facts is None


def test_blend_false_is_obeyed_whatever_else_is_said(make):
    """With `documents` beside it the request was blended all the same."""
    lab = make()
    learn(lab, DOC_A)
    request = lab.serve("one", prompt(DOC_A), {"blend": False, "documents": [[7, 19]]})
    assert request.loaded == 0


def test_a_wish_that_cannot_be_meant_is_noted_and_served_exactly(make):
    lab = make()
    learn(lab, DOC_A)
    for i, wish in enumerate(({"strategy": ["query"]}, {3: 4}, {"documents": [[-1, 4]]}, 7, {"ratio": 10**5000})):
        request = lab.serve(f"bad {i}", prompt(DOC_A), wish)
        assert request.loaded in (0, 4, 24, 28)
        assert request.facts["note"]
        lab.forget_prefixes()


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
@pytest.mark.parametrize("where", ["system", "document"])
def test_a_token_that_is_no_token_hurts_nobody(make, token, where):
    lab = make()
    learn(lab, DOC_A)
    tokens = prompt(DOC_A, system=[token, 2, 3, 4, 5]) if where == "system" else prompt([*DOC_A, token])
    request = lab.arrive("one", tokens)
    lab.scheduler.claim(request, 0)
    lab.finish(request)
    lab.finish(lab.arrive("two", [token, 5, 6], {"learn": True}))


class PrefillStats:
    """As vLLM's, which counts tokens for `cached_tokens` in the response."""

    def set(self, *counts):
        self.counts = counts


def test_cached_tokens_are_those_that_came_from_the_store(make):
    """The engine counts the whole claim, with what the blend has computed."""
    lab = make()
    learn(lab, DOC_A)
    lab.forget_prefixes()
    request = lab.arrive("one", prompt(DOC_A, DOC_B), prefill_stats=PrefillStats())
    lab.admit(request)
    assert request.prefill_stats.counts == (request.num_prompt_tokens, 0, len(DOC_A))
    lab.load(request)
    lab.compute(request, 1)
    lab.finish(request)


def test_cached_tokens_are_also_those_that_the_engine_has(make):
    lab = make()
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    lab.serve("two", PLAIN[:18])
    request = lab.arrive("three", PLAIN, prefill_stats=PrefillStats())
    assert lab.admit(request) == 24
    assert request.prefill_stats.counts == (len(PLAIN), 16, 24)
    lab.load(request)
    lab.finish(request)


def test_what_a_blend_computes_is_one_of_the_sources_of_what_the_engine_takes_for_loaded(make):
    lab = make()
    learn(lab, DOC_A)
    request = lab.arrive("one", tokens := prompt(DOC_A))
    assert lab.admit(request) == len(tokens)
    found = lab.scheduler.sources(request, len(tokens))
    assert found == {"host": len(DOC_A), "computed": len(tokens) - len(DOC_A)}
    lab.load(request)
    lab.compute(request, 1)
    lab.finish(request)


def test_the_facts_of_the_last_thousand_requests_are_kept(make):
    lab = make()
    for i in range(1002):
        run(lab, str(i), PLAIN[:3])
    assert list(lab.scheduler.recent) == [str(i) for i in range(2, 1002)]


def test_a_refusal_is_logged_once_and_counted(make, caplog):
    lab = make()
    for number in range(3):
        lab.serve(str(number), prompt(DOC_A), {"ratio": 2})
    (line,) = [record.message for record in caplog.records if "served without blending" in record.message]
    assert line == (
        "a request is served without blending: lmc.ratio must be between 0 and 1, not 2 "
        "(said once, counted as lmc:refused)"
    )
    assert lab.scheduler.numbers()["refused"] == 3


def test_each_request_has_a_line_in_the_log_at_debug(make, caplog):
    caplog.set_level("INFO")
    learn(make(), DOC_A)
    assert not [record for record in caplog.records if "tokens: {" in record.getMessage()]
    caplog.set_level("DEBUG")
    learn(make(), DOC_A)
    assert f"of {len(DOC_A)} tokens: {{'learned': True, 'documents': ['" in caplog.text


def test_a_load_and_a_blend_are_spans_of_their_requests(make):
    spans = []
    lab = make(trace=lambda request, *span: spans.append((request.request_id, *span)))
    learn(lab, DOC_A)
    lab.serve("blend", prompt(DOC_A))
    lab.forget_prefixes()
    lab.serve("full", [7] * 20)
    lab.forget_prefixes()
    lab.serve("exact", [7] * 20)
    (_, *learned), (one, blend, start, stop, about), (other, exact, _, _, more) = spans
    assert (learned[0], one, blend, other, exact) == ("lmc.learn", "blend", "lmc.blend", "exact", "lmc.exact")
    assert stop - 60 < start <= stop <= time.time()
    assert about["lmc.tokens_from.host"] == len(DOC_A)
    assert more["lmc.exact_tokens"] == 16
    assert all(isinstance(fact, str | int | float) for fact in about.values())


def test_times_and_shares_of_requests_are_observed_by_mode(make):
    lab = make()
    lab.serve("full", list(range(1, 17)), output=[5, 6])
    lab.forget_prefixes()
    lab.serve("exact", list(range(1, 20)), output=[5])
    learn(lab, DOC_A)
    lab.serve("blend", prompt(DOC_A, DOC_B), output=[5, 6, 7])
    found = lab.scheduler.take_observed()
    assert {key: len(times) for key, times in found.items() if key.startswith("ttft_seconds")} == {
        f"ttft_seconds|{mode}": 1 for mode in ("full", "exact", "blend")
    }
    assert all(0 <= seconds < 60 for seconds in found["ttft_seconds|blend"])
    assert found["reused_tokens|full"] == [0]
    assert found["reused_tokens|exact"] == [16]
    assert found["reused_tokens|blend"] == [len(DOC_A)]
    assert {len(found[f"load_seconds|{mode}"]) for mode in ("exact", "blend")} == {1}
    assert lab.scheduler.take_observed() == {}
    counts = lab.scheduler.numbers()
    assert (counts["documents_known"], counts["documents_unknown"], counts["documents_learned"]) == (1, 1, 1)


def test_a_request_that_was_loaded_exactly_counts_as_exact_after_a_reset(make):
    """Nothing of it is saved any more, as of approximate KV, and so it was counted as a blend."""
    lab = make()
    request = exactly_loaded(lab)
    lab.scheduler.reset()
    lab.compute(request, 2)
    lab.scheduler.take_observed()
    lab.finish(request)
    assert lab.scheduler.take_observed() == {"reused_tokens|exact": [16]}


def test_a_load_of_another_connector_is_not_observed(make):
    """Beside other connectors, `received` names their loads, too. Each was observed as a load of lmc."""
    lab = make()
    request = lab.arrive("theirs", list(range(1, 20)))
    assert lab.admit(request) == 0
    lab.scheduler.reported(StepReport(), {"theirs"})
    assert not [key for key in lab.scheduler.take_observed() if key.startswith("load_seconds")]
    lab.compute(request, 19)
    lab.finish(request)
    lab.settle()
    lab.check()


# -- learning ---------------------------------------------------------------------------------------------------------


def test_unknown_documents_are_learned_in_lent_blocks_that_come_back(make):
    lab = make()
    assert run(lab, "one", prompt(DOC_A, DOC_B))["unknown_documents"] == 2
    free = lab.pool.get_num_free_blocks()
    plan = lab.scheduler.plan({}, lab.tables_of)
    (job,) = plan.learn
    assert job.tokens == tuple(DOC_A)
    assert len(job.tables[0]) == 3
    assert lab.pool.get_num_free_blocks() == free - 3
    assert not lab.scheduler.plan({}, lab.tables_of).learn, "one at a time"
    report, _, _ = lab.workers.step(plan, set())
    lab.scheduler.reported(report, set())
    lab.settle()
    assert lab.pool.get_num_free_blocks() == free
    assert lab.serve("two", prompt(DOC_B, DOC_A)).loaded == len(prompt(DOC_A, DOC_B))


def test_the_next_request_does_not_wait_for_the_finder_to_take_learned_documents(make, monkeypatch):
    taken, insert = [], DocumentFinder.insert
    monkeypatch.setattr(DocumentFinder, "insert", lambda self, new: taken.extend(new) or insert(self, new))
    lab = make(slots=40, longest=2048, blocks=128)
    run(lab, "one", prompt(LONG, DOC_A))
    lab.settle()
    assert [list(document.tokens) for document in taken] == [LONG, DOC_A]


def test_nothing_is_learned_while_the_engine_computes_nothing(make):
    """A request that came and went while the engine slept made its workers run layers whose weights were gone."""
    lab = make()
    lab.finish(lab.arrive("never ran", prompt(DOC_A)))
    assert not lab.step().learn
    run(lab, "ran", prompt(DOC_B))
    lab.now = 10.0
    lab.finish(lab.arrive("never ran either", prompt(DOC_A)))
    assert not lab.step().learn
    assert not lab.scheduler.busy
    lab.serve("runs again", PLAIN)
    lab.settle()
    found = [all(lab.store.lookup(document_keys(lab, document))) for document in (DOC_A, DOC_B)]
    assert found == [False, True]


def running(lab, name="runs"):
    """A request that the engine goes on computing."""
    request = lab.arrive(name, list(range(900, 940)), {"blend": False})
    lab.admit(request)
    return request


def test_while_requests_run_a_document_is_learned_only_if_it_came_twice(make):
    """Documents that never come again took a part of each step of a busy engine."""
    lab = make()
    request = running(lab)
    run(lab, "one", prompt(DOC_A, DOC_B))
    assert not lab.compute(request, 4).learn
    run(lab, "two", prompt(DOC_B, system=[8, 9]))
    (job,) = lab.compute(request, 4).learn
    assert (job.tokens, job.idle) == (tuple(DOC_B), False)
    assert not lab.compute(request, 4).learn
    lab.finish(request)
    lab.settle()
    assert all(lab.store.lookup([*document_keys(lab, DOC_A), *document_keys(lab, DOC_B)]))


def test_a_document_that_a_request_waits_for_is_learned_while_others_run(make):
    lab = make()
    request = running(lab)
    asking = lab.arrive("learn", DOC_A, {"learn": True})
    assert lab.admit(asking) is None
    assert [job.idle for job in lab.compute(request, 4).learn] == [False]
    assert lab.admit(asking) is not None
    lab.finish(asking)
    lab.finish(request)


@pytest.mark.parametrize("why", ["time", "blocks", "few blocks", "another document"])
def test_a_document_for_idle_steps_makes_way_and_is_learned_later(make, why):
    lab = make()
    run(lab, "one", prompt(DOC_A))
    lab.workers.slow = True
    free = lab.pool.get_num_free_blocks()
    assert lab.step().learn[0].idle
    request = running(lab)
    assert not lab.compute(request, 4).cancel
    if why == "time":
        lab.now += MAX_PAUSE_SECONDS + 1
    elif why == "few blocks":  # Requests that run would be preempted.
        lab.pool.get_num_free_blocks = lambda: 0
    elif why == "blocks":
        waiting = lab.arrive("waits", prompt(DOC_B))
        lab.scheduler.claim(waiting, 0)
    else:
        asking = lab.arrive("learn", DOC_B, {"learn": True})
        assert lab.admit(asking) is None
    assert lab.compute(request, 4).cancel
    lab.workers.slow = False
    lab.pool.__dict__.pop("get_num_free_blocks", None)
    if why == "another document":
        assert [job.tokens for job in lab.compute(request, 4).learn] == [tuple(DOC_B)]
        lab.finish(asking)
    elif why == "blocks":
        lab.finish(waiting)
    lab.finish(request)
    lab.settle()
    assert lab.pool.get_num_free_blocks() == free
    assert all(lab.store.lookup(document_keys(lab, DOC_A)))


def test_a_document_that_failed_to_be_learned_is_met_again(make):
    lab = make()
    lab.workers.failing = True
    lab.serve("one", prompt(DOC_A))
    lab.settle()
    lab.workers.failing = False
    lab.forget_prefixes()
    lab.serve("two", prompt(DOC_A))
    lab.forget_prefixes()
    assert lab.serve("three", prompt(DOC_A, system=[8, 9])).loaded == 23


def test_a_request_may_forbid_that_its_documents_are_learned(make):
    lab = make()
    assert lab.serve("one", prompt(DOC_A), {"learn": False}).facts == {"unknown_documents": 1}
    assert not lab.engine.learning
    learn(lab, DOC_A)
    assert lab.serve("two", prompt(DOC_A), {"learn": False}).loaded


def test_without_blend_learn_documents_are_learned_only_if_a_request_says_so(make):
    lab = make(settings={"blend_learn": False})
    assert lab.serve("one", prompt(DOC_A)).facts == {"unknown_documents": 1}
    assert not lab.engine.learning
    learn(lab, DOC_A)
    assert all(lab.store.lookup(document_keys(lab, DOC_A)))


def test_one_document_in_many_requests_is_learned_once(make):
    lab = make()
    for i in range(5):
        run(lab, str(i), prompt(DOC_A))
    lab.settle()
    assert lab.scheduler.numbers()["stored_chunks"] == 2


def test_nobody_waits_forever_for_a_document_that_needs_the_last_block(make):
    """All blocks but the null one are free at most: a document that needed one more kept an idle engine stepping."""
    lab = make(blocks=8, batch_tokens=16, slots=16)
    for need in range(1, 8):
        run(lab, str(need), prompt([1000 + need * 100 + i for i in range(need * BLOCK)]))
    lab.settle()
    assert lab.scheduler.numbers()["stored_chunks"] == 1 + 1 + 2


def test_learning_waits_while_the_engine_needs_its_blocks(make):
    lab = make(blocks=16)
    request = lab.arrive("busy", PLAIN)
    lab.admit(request)
    run(lab, "one", prompt(DOC_A))
    assert not lab.step().learn
    lab.finish(request)
    assert lab.step().learn


def test_a_request_to_learn_does_not_wait_for_blocks_for_ever(make):
    lab = make(blocks=16)
    busy = lab.arrive("busy", PLAIN)
    lab.admit(busy)
    request = lab.arrive("learn", DOC_A, {"learn": True})
    assert lab.look(request) is None or lab.admit(request) is None
    lab.step()
    lab.now += MAX_LEARN_SECONDS + 1
    assert lab.scheduler.claim(request, 0) == 0
    lab.finish(busy)
    assert lab.admit(request) == 0
    lab.compute(request, len(DOC_A))
    facts = lab.finish(request)
    assert facts == {"learned": False, "note": "the engine had no blocks to learn all documents"}


def test_what_waits_to_be_learned_is_bounded(make):
    lab = make(slots=4)
    for i in range(400):
        run(lab, str(i), prompt([1000 + i] * CHUNK))
    assert len(lab.engine.learning)
    assert sum(len(document.tokens) for document in lab.engine.learning) <= 4 * CHUNK


def test_a_document_larger_than_the_slab_is_left_alone(make):
    lab = make(slots=2)
    document = [500 + i for i in range(3 * CHUNK)]
    run(lab, "one", prompt(document))
    lab.settle()
    assert "stored_chunks" not in lab.scheduler.numbers() or not lab.scheduler.numbers()["stored_chunks"]
    request = lab.serve("two", document, {"learn": True}, output=[1, 2, 3])
    assert not (request.facts or {}).get("learned")


@pytest.mark.parametrize("why", ["larger than memory", "the worker fails", "longer than the model takes"])
def test_a_request_for_a_document_that_cannot_be_learned_is_computed_and_says_so(make, why):
    lab = make(slots=2, longest=2 * CHUNK if why.startswith("longer") else 512, prefix=(9, 9))
    lab.workers.failing = why == "the worker fails"
    size = 3 * CHUNK if why == "larger than memory" else 2 * CHUNK
    request = lab.serve("one", [500 + i for i in range(size)], {"learn": True})
    assert request.loaded == 0
    assert request.facts == {"learned": False, "note": "not all documents could be learned; the log may say why"}
    lab.settle()
    assert not lab.scheduler.numbers().get("stored_chunks")


def test_a_request_to_learn_may_have_separators_around_its_documents(make):
    lab = make(prefix=(1, 9))
    request = lab.serve("one", [1, *SEPARATOR, *DOC_A, *SEPARATOR, *DOC_B, *SEPARATOR], {"learn": True})
    assert request.facts["learned"]
    assert request.loaded == 3 + len(DOC_A) + 2 + len(DOC_B)
    assert all(lab.store.lookup([*document_keys(lab, DOC_A), *document_keys(lab, DOC_B)]))
    assert lab.scheduler.numbers()["stored_chunks"] == 5
    nothing = lab.serve("two", [1, *SEPARATOR, *SEPARATOR], {"learn": True})
    assert nothing.facts["note"].startswith("there is no document to learn")


def test_a_known_document_is_not_learned_again(make):
    lab = make(prefix=(9, 9))
    for i in range(3):
        request = lab.serve(str(i), DOC_A, {"learn": True})
        assert (request.loaded, request.facts["learned"]) == (11, True)
    assert lab.scheduler.numbers()["stored_chunks"] == 2
    assert not lab.scheduler.counts["blends"]


def test_many_requests_to_learn_wait_for_room_in_the_queue(make):
    """Memory has room for two of the documents that wait."""
    lab = make(slots=4, prefix=(9, 9))
    documents = [[100 * i + j for j in range(2 * CHUNK)] for i in range(1, 7)]
    requests = [lab.arrive(str(i), document, {"learn": True}) for i, document in enumerate(documents)]
    assert [lab.admit(request) for request in requests] == [None] * 6
    for request in requests:
        assert lab.wait(lambda request=request: lab.admit(request)) == 2 * CHUNK - 1
        lab.load(request)
        lab.compute(request, 1)
        assert lab.finish(request)["learned"]


def test_a_request_to_learn_more_than_memory_holds_comes_to_an_end(make):
    lab = make(slots=4, prefix=(9, 9))
    documents = [[100 * i + j for j in range(2 * CHUNK)] for i in range(1, 7)]
    request = lab.serve("one", prompt(*documents), {"learn": True})
    assert not request.facts["learned"]
    assert lab.scheduler.numbers()["stored_chunks"] == 12


def test_what_a_request_to_learn_leaves_in_the_engine_is_found_by_no_other(make):
    """The KV of a document to learn is computed after other tokens than its prompt has."""
    lab = make(prefix=(9, 9))
    learn(lab, DOC_A)
    lab.settle()
    plain = lab.arrive("plain", [*DOC_A, 1, 2, 3], {"blend": False})
    assert lab.look(plain) == 0
    lab.finish(plain)


def test_a_document_to_learn_must_not_begin_with_the_first_token(make):
    lab = make()
    request = lab.serve("one", [1, *DOC_A], {"learn": True})
    assert "add_special_tokens: false" in request.facts["note"]
    assert lab.store.lookup(document_keys(lab, [1, *DOC_A])) == [None, None]


def test_two_learn_requests_for_one_document_store_it_once(make):
    lab = make()
    one, two = (lab.arrive(name, DOC_A, {"learn": True}) for name in ("one", "two"))
    for request in (one, two):
        lab.wait(lambda request=request: lab.admit(request))
        lab.load(request)
        lab.compute(request, 1)
        assert lab.finish(request)["learned"]
    lab.settle()
    assert lab.scheduler.numbers()["stored_chunks"] == 2


def test_tenants_share_neither_documents_nor_prefixes(make):
    lab = make(slots=64)
    learn(lab, DOC_A, cache_salt="one tenant")
    lab.serve("plain", PLAIN, cache_salt="one tenant")
    lab.forget_prefixes()
    for salt in (None, "another"):
        assert lab.serve(f"blend {salt}", prompt(DOC_A), cache_salt=salt).loaded == 0
        assert lab.serve(f"exact {salt}", PLAIN, cache_salt=salt).loaded == 0
        lab.engine.learning.clear()
        lab.forget_prefixes()
    assert lab.serve("mine", prompt(DOC_A), cache_salt="one tenant").loaded == len(prompt(DOC_A))
    assert lab.serve("mine too", PLAIN, cache_salt="one tenant").loaded == 40


def test_an_unknown_document_is_learned_for_the_tenant_that_brought_it(make):
    lab = make()
    lab.serve("one", prompt(DOC_A), cache_salt="one tenant")
    lab.forget_prefixes()
    request = lab.arrive("two", prompt(DOC_A))
    assert lab.scheduler.claim(request, 0) == 0
    lab.finish(request)
    assert lab.serve("three", prompt(DOC_A, system=[8, 9]), cache_salt="one tenant").loaded == 23


# -- start, forgetting, end -------------------------------------------------------------------------------------------


def test_blocks_that_do_not_divide_a_chunk_are_refused_with_the_nearest_that_do():
    with pytest.raises(ConfigError, match=r"set chunk_size .* to 8"):
        Lab(settings={"chunk_size": 9})


def test_what_is_saved_with_old_weights_is_not_kept_when_everything_is_forgotten(make):
    """A chunk under way when the cache was reset became visible afterwards."""
    lab = make()
    request = lab.arrive("one", PLAIN[:16])
    lab.admit(request)
    plan = lab.scheduler.plan({"one": 16}, lab.tables_of)
    lab.scheduler.forget_all()
    report, _, _ = lab.workers.step(plan, set())
    lab.scheduler.reported(report, set())
    assert lab.store.known_keys() == set()
    lab.finish(request)


def test_a_load_under_way_fails_when_everything_is_forgotten(make):
    lab = make()
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    request = lab.arrive("two", PLAIN)
    assert lab.admit(request) == 40
    lab.scheduler.forget_all()
    (job,) = lab.step().loads
    assert isinstance(job, LoadJob)
    assert request.num_computed_tokens == 0
    lab.finish(request)


def test_shutdown_with_jobs_under_way_leaves_nothing_behind():
    tier = gated()
    fill(tier.inner, PLAIN[:16])
    tier.open_all()
    lab = Lab([tier])
    request = lab.arrive("one", [7] * 16)
    lab.admit(request)
    waiting = lab.arrive("two", PLAIN[:16])
    plan = lab.scheduler.plan({"one": 16}, lab.tables_of)
    lab.scheduler.close()
    report, _, _ = lab.workers.step(plan, set())
    lab.scheduler.reported(report, set())
    lab.scheduler.close()
    lab.scheduler.claim(waiting, 0)
    lab.finish(waiting), lab.finish(request)
    assert not lab.states
    assert lab.store.held() == 0
    assert not any(block.ref_cnt for block in lab.pool.blocks)


def test_a_record_with_a_strange_label_does_not_keep_the_engine_from_starting(make):
    tier = DictTier()
    lab = Lab([tier])
    key, namespace = page_key(lab, b"x" * 32), lab.engine.namespace(RecordKind.PAGES)
    meta = RecordMeta(
        key=key, kind=RecordKind.PAGES, namespace=namespace, tokens=8, first=0, parts=lab.engine.layout.parts,
        part_bytes=2 * PAGE, label="no hash at all", model=lab.engine.names.model,
    )  # fmt: skip
    lab.store.commit(lab.store.begin([meta]))
    lab.scheduler.close()
    assert key in tier.records
    make(tier)


def test_a_slot_that_is_filled_anew_is_lost_to_whoever_still_reads_it(make):
    """A late load was let go, its slot taken for another chunk: until that one was whole the old label stood over its
    bytes.
    """
    lab = make(slots=1)
    lab.serve("one", PLAIN[:8])
    lab.settle()
    (pin,) = lab.store.pin([page_key(lab, lab.requests["one"].block_hashes[1])])
    assert lab.store.state(pin) is PinState.READY
    lab.store.release([pin])
    assert lab.workers.slab.ready(pin.slot, pin.tag) == LAYERS
    chain = lab.engine.block_chain([b"a" * 32, b"b" * 32], BLOCK)
    (writing,) = lab.engine.begin_exact(chain, [NewChunk(0, CHUNK)])
    assert lab.workers.slab.ready(pin.slot, pin.tag) == -1
    lab.store.abort(writing)


# -- anything in any order --------------------------------------------------------------------------------------------

WISHES = (None, None, {"blend": False}, {"learn": True}, {"strategy": "none"}, {"ratio": 2})
TEXTS = [
    *(prompt(*order, system=SYSTEM[:n]) for order in ((DOC_A, DOC_B), (DOC_B, DOC_A), (DOC_A,)) for n in (0, 5)),
    PLAIN,
    PLAIN[:21],
    DOC_A,
    DOC_B,
]


class Anything:
    """Requests that come, go on and go away as dice say."""

    def __init__(self, lab, dice):
        self.lab, self.dice, self.alive = lab, dice, {}

    def act(self):
        self.lab.now += self.dice.choice([0, 0, 0.1, 3])
        self.lab.workers.failing = self.dice.random() < 0.1
        drawn = self.dice.random()
        if drawn < 0.1 or not self.alive:
            name, salt = f"request {len(self.lab.requests)}", self.dice.choice([None, None, "tenant"])
            wish = self.dice.choice(WISHES)
            self.alive[name] = self.lab.arrive(name, self.dice.choice(TEXTS), wish, cache_salt=salt)
        elif drawn < 0.9:
            request = self.dice.choice(list(self.alive.values()))
            self.move(request)
            self.check(request)
        elif drawn < 0.95:
            self.lab.finish(self.alive.pop(self.dice.choice(list(self.alive))))
        elif drawn < 0.96:
            self.lab.scheduler.forget_all()
        else:
            self.lab.step()

    def move(self, request):
        lab, name = self.lab, request.request_id
        if name not in lab.tables:
            if lab.pool.get_num_free_blocks() >= lab.groups.count * (request.num_tokens // BLOCK + 4):
                lab.admit(request)
        elif state_of(lab, name).loading:
            lab.workers.held_back = self.dice.random() < 0.5
            lab.step()
            lab.workers.held_back = False
        elif request.num_computed_tokens < request.num_tokens:
            lab.compute(request, self.dice.randint(1, request.num_tokens - request.num_computed_tokens))
        elif len(lab.tables[name]) * BLOCK > request.num_tokens:
            request.append([self.dice.randrange(10)])
        else:
            lab.preempt(request)

    def check(self, request):
        state = state_of(self.lab, request.request_id)
        if request.request_id in self.lab.tables and not state.loading:
            exact = request.num_computed_tokens
            if state.approximate is not None:
                exact = min(exact, state.approximate)
            assert self.lab.right(request, exact)


@pytest.mark.parametrize("slots", [3, 24])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("windows", [(0,), (2, 0), (6, 0), (0, 11)], ids=str)
def test_whatever_happens_in_whatever_order_nothing_is_held_and_no_exact_page_is_wrong(make, seed, slots, windows):
    dice = random.Random(seed)
    faulty = Faulty(DictTier(), lambda verb, key: OSError("gone") if dice.random() < 0.1 else None)
    lab = make(*([faulty] if seed % 3 else []), slots=slots, blocks=48 * len(windows), windows=windows)
    anything = Anything(lab, dice)
    for _ in range(200):
        anything.act()
    for request in anything.alive.values():
        lab.finish(request)
    lab.workers.failing = False


def test_roles_follow_wishes(make):
    lab = make()
    for name, tokens, lmc, role in (
        ("plain", PLAIN, None, Role.EXACT),
        ("documents", prompt(DOC_A), None, Role.BLEND),
        ("spans", PLAIN, {"documents": [[4, 12]]}, Role.BLEND),
        ("off", prompt(DOC_A), {"blend": False}, Role.EXACT),
        ("learn", PLAIN, {"learn": True}, Role.LEARN),
    ):
        request = lab.arrive(name, tokens, lmc)
        assert state_of(lab, name).role is role
        lab.finish(request)
    lab.engine.learning.clear()


def test_an_engine_learns_documents_of_others_while_it_makes_steps_and_has_blocks_to_spare(make, monkeypatch):
    given = []
    monkeypatch.setattr(CacheEngine, "share_learning", lambda self, has_time: given.append(has_time))
    make(blends=False)
    make(settings={"blend_learn": False})
    assert given == []  # These learn nothing.
    lab = make(blocks=64)
    (has_time,) = given
    lab.serve("one", prompt(DOC_A))
    assert has_time()
    lab.now += 2.0
    assert not has_time()  # It makes no steps.
    lab.serve("two", prompt(DOC_A))
    taken = lab.pool.get_new_blocks(lab.pool.get_num_free_blocks() - 8)
    assert not has_time()
    lab.pool.free_blocks(taken)
    assert has_time()


def test_a_large_blend_is_not_overtaken_by_small_ones_for_ever(make):
    """A large blend fits only while few others are under way. Earlier, smaller ones replaced each one that ended."""
    lab = make(batch_tokens=32, blocks=256, slots=32, settings={"load_policy": "always"})
    learn(lab, DOC_A, DOC_B)

    def small(number):
        return lab.arrive(f"{number}", prompt(DOC_A, system=[5, 6, 7, 8, 600 + number]))

    first, large = small(0), lab.arrive("large", prompt(DOC_B, DOC_A, system=[9] * 20))
    assert 2 * 32 - first.num_tokens < large.num_tokens
    assert lab.admit(first)
    assert lab.admit(large) is None
    later = small(1)
    assert lab.admit(later) is None, "the engine asks about the large one first"
    lab.step()
    lab.load(first)
    lab.wait(lambda: lab.admit(large))
    for request in (first, large):
        lab.load(request)
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
        lab.finish(request)
    lab.wait(lambda: lab.admit(later))
    lab.load(later)
    lab.compute(later, later.num_tokens - later.num_computed_tokens)
    lab.finish(later)
    lab.drop_backfills()


def test_documents_of_a_request_that_reads_no_prefix_cache_are_not_known(make):
    """Nothing was looked up for it, so all of its documents counted as stored, and were never learned."""
    lab = make()
    new = list(range(900, 930))
    lab.serve("with logprobs of the prompt", prompt(new), skip_reading_prefix_cache=True)
    assert (lab.scheduler.counts["documents_known"], lab.engine.known.count()) == (0, 0)
    lab.serve("without", prompt(new))
    assert lab.scheduler.counts["documents_unknown"] == 1
    lab.engine.learning.clear()


def test_short_texts_are_forgotten_as_well(make, monkeypatch):
    """A text without inner tokens took no room, and such texts were kept without end."""
    monkeypatch.setattr(classifier, "MOST_REMEMBERED", 1000)
    encoded = []
    characters = SimpleNamespace(
        encode=lambda text: encoded.append(text) or list(map(ord, text)),
        decode=lambda tokens: "".join(map(chr, tokens)),
    )
    lab = make(tokenizer=characters)

    def name(text):
        encoded.clear()
        lab.finish(lab.arrive(f"{len(lab.scheduler.recent)}", PLAIN, {"documents": [text]}))
        return bool(encoded)

    assert all(name(f"{number:03}") for number in range(100))
    assert not name("099")
    assert name("000")
