"""Models with layers that have a state (Qwen3-Next): exact prefixes are stored with the states after them."""

import logging

import pytest
from amount import mostly_long
from apart import PYTEST, run_apart
from lab import agree, answer, engine, facts, words
from stepping import engine_pages, only_on_disk, poison
from test_multimodal import VISION
from tier_wrappers import Faulty

BLOCK = 288  # vLLM chooses it, so that a state fits into a block of attention
CHUNK, STEP = 2 * BLOCK, 3 * BLOCK  # vLLM ends steps of at most 1,024 tokens at whole blocks
OPTIONS = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "max_num_batched_tokens": 1024, "max_num_seqs": 8}
CLOSE = 0.06  # logprob of the first token in bfloat16, if steps are divided differently
LONG = words(1732, 9)  # 4 tokens after the last block: states forget fast in a model with random weights


@pytest.fixture(scope="module")
def shared(models, tmp_path_factory):
    settings = {"chunk_size": CHUNK, "local_disk": str(tmp_path_factory.mktemp("disk"))}
    with engine(models("qwen3next"), settings, **OPTIONS) as lab:
        assert (lab.scheduler.block_size, lab.setup.groups.states) == (BLOCK, {0})
        yield lab


@pytest.fixture
def lab(shared):
    shared.forget()
    poison()
    yield shared
    shared.check()


def stored(lab, tokens, count=8):
    """What the engine answers; the prompt's chunks are in our store, and nowhere in the engine."""
    wanted = lab.vanilla(tokens, count)
    lab.ask(tokens, None, count)
    lab.forget_prefixes()
    poison()
    return wanted


def likely(out) -> float:
    """The logprob of the first token."""
    return next(iter(out.outputs[0].logprobs[0].values())).logprob


def close(found, wanted) -> bool:
    """Tokens may differ: with random weights and bfloat16, several are equally likely."""
    return abs(likely(found) - likely(wanted)) <= CLOSE


def loaded(out) -> int:
    return facts(out).get("exact_tokens", 0)


@pytest.mark.parametrize(
    "length", mostly_long([100, 288, 289, 576, 577, 700, 864, 865, 1152, 1200, 1728, 1732], 288, 289, 700, 1732)
)
def test_a_prompt_continues_from_the_last_state_before_its_end(lab, length):
    """The engine has states at the ends of its steps, and at the last whole block of a prompt."""
    tokens = LONG[:length]
    wanted = stored(lab, tokens)
    out = lab.ask(tokens)
    ends = {0, *range(0, length, STEP), (length - 1) // BLOCK * BLOCK}
    assert loaded(out) in ends
    assert loaded(out) == length // BLOCK * BLOCK or length % BLOCK == 0, "of whole blocks, the last one is computed"
    assert agree(out, wanted)


def test_without_its_state_a_prompt_is_answered_differently(lab, monkeypatch):
    """The control of all others."""
    wanted, moved = stored(lab, LONG), engine_pages()
    load = moved.load_all
    monkeypatch.setattr(
        moved, "load_all", lambda layer, moves: None if moved.group_of[layer] == 0 else load(layer, moves)
    )
    assert not close(lab.ask(LONG), wanted)


@pytest.mark.parametrize("common", mostly_long([200, 576, 600, 863, 864, 900, 1152, 1500, 1728, 1731], 200, 864, 900))
def test_a_prompt_that_leaves_another_one_continues_from_a_state_that_they_share(lab, common):
    tokens = [*LONG[:common], *words(150, 80)]
    wanted = lab.vanilla(tokens)
    stored(lab, LONG)
    out = lab.ask(tokens)
    assert loaded(out) <= common
    assert loaded(out) % BLOCK == 0
    assert (loaded(out) > 0) == (common >= 2 * STEP)
    assert close(out, wanted)


def test_a_chunk_without_a_state_is_loaded_for_the_sake_of_a_later_one(lab):
    """A step of 864 tokens ends inside a chunk of 576, so the first state at the end of a chunk is that at 1,728."""
    wanted = stored(lab, LONG)
    out = lab.ask(LONG)
    assert loaded(out) == 1728
    assert agree(out, wanted)


@pytest.mark.parametrize("length", mostly_long([250, 560, 700], 560))
def test_the_next_turn_of_a_conversation_finds_the_state_after_the_last_chunk(lab, length):
    """vLLM's own cache has no states of decoded tokens."""
    turn = words(length, 50)
    following = [*turn, *answer(stored(lab, turn, 400)), *words(20, 51)]
    wanted = lab.vanilla(following)
    stored(lab, turn, 400)
    out = lab.ask(following)
    assert loaded(out) >= (length + 399) // CHUNK * CHUNK
    assert close(out, wanted)


def test_prompts_that_share_their_steps_are_stored_with_their_own_states(lab):
    prompts = [words(length, length) for length in (600, 1500, 900, 320)]
    wanted = [lab.vanilla(tokens) for tokens in prompts]
    lab.ask_all([(tokens, None) for tokens in prompts])
    lab.forget_prefixes()
    poison()
    found = lab.ask_all([(tokens, None) for tokens in prompts])
    assert all(map(close, found, wanted))
    assert sum(map(loaded, found)) > 0


def test_states_come_back_from_disk(lab):
    wanted = stored(lab, LONG)
    only_on_disk(lab)
    out = lab.ask(LONG)
    assert facts(out) == {"exact_tokens": 1728, "tokens_from": {"disk": 1728}}
    assert agree(out, wanted)


def test_a_disk_that_cannot_be_read_is_a_miss(lab):
    wanted, disk = stored(lab, LONG), lab.tiers[0]
    only_on_disk(lab)
    lab.tiers[0] = Faulty(disk, lambda verb, key: OSError("gone") if verb == "read" else None)
    out = lab.ask(LONG)
    lab.tiers[0] = disk
    assert agree(out, wanted)


@pytest.mark.long
@pytest.mark.skipif(not VISION.is_dir(), reason="this environment has no torchvision")
def test_qwen35_starts_and_continues_from_stored_states():
    run_apart(*PYTEST, "-p", "engine.vision", "engine/qwen35.py", interpret=False)


@pytest.mark.long
def test_chunks_become_whole_blocks_and_documents_are_not_blended(models, caplog):
    with caplog.at_level(logging.WARNING, "lmc"), engine(models("qwen3next"), **OPTIONS) as lab:
        assert "blending is off: the model has layers with a state" in caplog.text
        assert lab.lmc.engine.chunk_size == BLOCK, "instead of 128, without an error: vLLM chooses the size of blocks"
        wanted = stored(lab, LONG)
        out = lab.ask(LONG, {"documents": [[10, 200]]})
        assert loaded(out) == 1728
        assert agree(out, wanted)
        lab.check()
