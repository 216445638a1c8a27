"""Models with sliding windows keep a block table for windows: as few blocks as without lmc, and the same answers."""

import pytest
from lab import DOCUMENTS, PLAIN, PROMPT, Prompt, agree, answer, facts, words
from stepping import Steps, poison

from lmc.connectors.vllm.scheduler.kv_groups import KVGroups
from lmc.connectors.vllm.scheduler.scheduler import LACKS_BLOCKS

WINDOW, BLOCK, CHUNK = 128, 32, 256
SETTINGS = {"chunk_size": CHUNK}
EXACT = {"ratio": 1.0}


@pytest.fixture(scope="module")
def shared(models, shared_engine):
    """Layers with a window in group 0, and layers that see the whole prompt in group 1."""
    lab = shared_engine(models("gemma3mixed"), SETTINGS)
    lab.wanted = {len(tokens): lab.vanilla(tokens) for tokens in (PROMPT.tokens, PLAIN)}
    return lab


def right(lab, out) -> bool:
    return agree(out, lab.wanted[len(out.prompt_token_ids)])


def kept(lab, request) -> list[int]:
    """How many blocks a request holds in each group."""
    tables = lab.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return [sum(block != 0 for block in table) for table in tables]


@pytest.mark.parametrize("asked", [None, PROMPT.blend(**EXACT)], ids=["computed", "blended"])
def test_a_request_keeps_only_the_blocks_of_its_window(lab, asked):
    """With one block table it kept 24 blocks for layers with a window, too."""
    steps = Steps(lab)
    name = steps.add(PROMPT.tokens, asked)
    steps.until(lambda: name in steps.outputs)
    steps.step(2)  # The engine frees blocks in the step after the one that has passed them.
    windowed, whole = kept(lab, steps.request(name))
    free = lab.pool.get_num_free_blocks()
    steps.run()
    assert whole == -(-len(PROMPT.tokens) // BLOCK)
    assert windowed <= WINDOW // BLOCK + 1
    assert free == lab.free_at_start - windowed - whole, "a blend has returned the blocks that it has borrowed"
    assert right(lab, steps.outputs[name])
    assert bool(facts(steps.outputs[name]).get("reused_tokens")) == bool(asked)


@pytest.mark.parametrize("tokens", [WINDOW + k * BLOCK + end for k, end in ((1, 31), (2, 30), (2, 31), (3, 0), (3, 1))])
def test_the_last_token_of_a_blended_prompt_sees_its_whole_window(lab, tokens):
    """The engine had null blocks where the window of the last token begins, for one length of a prompt in 32."""
    prompt = Prompt([DOCUMENTS[3]], system=32, question=tokens - 32 - len(DOCUMENTS[3]))
    wanted = lab.vanilla(prompt.tokens)
    lab.learn([DOCUMENTS[3]])
    poison()
    out = lab.ask(prompt.tokens, prompt.blend(**EXACT))
    assert facts(out)["reused_tokens"] == len(DOCUMENTS[3])
    assert agree(out, wanted)


def test_pages_that_a_window_has_passed_are_neither_saved_nor_loaded(lab, monkeypatch):
    """A prompt continues after 672 tokens, and sees the last 128 of them in half of the layers."""
    lab.ask(PLAIN)
    lab.forget_prefixes()
    poison()
    found, steps = [], Steps(lab)
    name = steps.add(PLAIN)
    original = lab.lmc.take_plan
    monkeypatch.setattr(lab.lmc, "take_plan", lambda: found.append(original()) or found[-1])
    steps.run()
    assert right(lab, steps.outputs[name])
    (job,) = [job for plan in found for job in plan.loads]
    blocks = [sum(len(copy.blocks) for copy in job.copies if copy.group == group) for group in (0, 1)]
    assert blocks == [WINDOW // BLOCK, 672 // BLOCK]


@pytest.mark.parametrize("common", [40, 255, 256, 300, 500, 600])
def test_a_prompt_that_leaves_another_one_inside_a_chunk_is_loaded_up_to_the_chunk(lab, common):
    """A chunk lacks the pages of a window that only tokens inside it see."""
    tokens = [*PLAIN[:common], *words(100, 70)]
    wanted = lab.vanilla(tokens)
    lab.ask(PLAIN)
    lab.forget_prefixes()
    poison()
    out = lab.ask(tokens)
    assert facts(out).get("exact_tokens", 0) == common // CHUNK * CHUNK
    assert agree(out, wanted)


LENGTHS = pytest.mark.parametrize("length", [127, 128, 129, 160, 250, 384, 385])


@LENGTHS
def test_a_conversation_finds_its_last_turn_whatever_its_length(lab, length):
    """The window has passed most of the chunk that decoding fills."""
    assert found_after_a_turn(lab, words(length, 50)) == (length + 199) // BLOCK * BLOCK


def found_after_a_turn(lab, turn) -> int:
    """How many tokens are loaded for a turn that follows a turn with an answer of 200 tokens."""
    said = answer(lab.ask(turn, count=200))
    following = [*turn, *said, *words(20, 51)]
    wanted = lab.vanilla(following)
    lab.ask(turn, count=200)
    lab.forget_prefixes()
    poison()
    out = lab.ask(following)
    assert agree(out, wanted)
    return facts(out).get("exact_tokens", 0)


def test_a_blend_behind_a_prefix_borrows_the_window_before_its_documents(lab):
    """The engine drops its cached blocks there, because it expects a load to bring the window at its end."""
    beginning = words(300, 60)
    prompt = Prompt([DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2]], system=0)
    tokens = [*beginning, *prompt.tokens]
    spans = [[start + 300, stop + 300] for start, stop in prompt.spans]
    wanted = lab.vanilla(tokens)
    lab.learn(DOCUMENTS)
    lab.ask(beginning, {"blend": False}, 1)
    lab.settle()
    lab.forget_pages()
    out = lab.ask(tokens, {"documents": spans, **EXACT})
    assert out.num_cached_tokens == 288 + sum(map(len, (DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2])))
    assert agree(out, wanted)


def test_blocks_before_documents_stay_in_the_engine_s_cache(lab):
    """The engine has them only for layers that see the whole prompt. So it computed the system text for each prompt."""
    first = Prompt([DOCUMENTS[0], DOCUMENTS[1]], system=100)
    second = Prompt([DOCUMENTS[2], DOCUMENTS[1]], system=100, question=30)
    wanted = lab.vanilla(second.tokens)
    lab.learn(DOCUMENTS)
    lab.ask(first.tokens, first.blend(**EXACT))
    out = lab.ask(second.tokens, second.blend(**EXACT))
    assert agree(out, wanted)
    assert facts(out)["fresh_tokens"] == len(second.tokens) - 96 - 450, "3 of the blocks before the documents"


def test_an_aborted_blend_returns_its_blocks_and_leaves_nothing_in_the_engine_s_cache(lab):
    steps = Steps(lab)
    name = steps.add(PROMPT.tokens, PROMPT.blend(**EXACT))
    steps.until(lambda: steps.loading(name))
    steps.abort(name)
    lab.settle()
    assert lab.pool.get_num_free_blocks() == lab.free_at_start
    out = lab.ask(PROMPT.tokens, {"blend": False})
    assert out.num_cached_tokens == 0
    assert right(lab, out)


def test_without_free_blocks_for_a_blend_its_prompt_is_computed(lab):
    """A blend borrows about as many blocks as one block table for all layers would take."""
    taken = lab.pool.get_new_blocks(lab.pool.get_num_free_blocks() - 40)
    out = lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))
    lab.pool.free_blocks(taken)
    assert right(lab, out)
    assert facts(out)["note"] == LACKS_BLOCKS


def test_a_blend_waits_for_the_blocks_of_a_running_request(lab):
    steps = Steps(lab)
    taken = lab.pool.get_new_blocks(lab.pool.get_num_free_blocks() - 60)
    first = steps.add(PLAIN, None, 8)
    steps.until(lambda: first in steps.outputs)
    second = steps.add(PROMPT.tokens, PROMPT.blend(**EXACT))
    steps.run()
    lab.pool.free_blocks(taken)
    assert right(lab, steps.outputs[first])
    assert right(lab, steps.outputs[second])
    assert facts(steps.outputs[second])["reused_tokens"] > 0


def test_an_evicted_window_is_a_miss(lab, monkeypatch):
    """The engine's own allocation evicted a block that a blend sees: the prompt is computed."""
    prompt = Prompt([DOCUMENTS[0], DOCUMENTS[1]], system=200)
    wanted = lab.vanilla(prompt.tokens)
    lab.learn(DOCUMENTS)
    lab.ask(prompt.tokens[:200], {"blend": False}, 1)
    lab.settle()
    monkeypatch.setattr(KVGroups, "completed", lambda *_: None)
    out = lab.ask(prompt.tokens, prompt.blend(**EXACT))
    assert agree(out, wanted)
    assert lab.numbers["failed_loads"] > 0


@pytest.mark.long
def test_without_decoded_tokens_the_end_of_each_prompt_is_found(models, shared_engine):
    """The end of a prompt is a part of a chunk, and is saved before decoding moves the window beyond it."""
    lab = shared_engine(models("gemma3mixed"), {**SETTINGS, "save_decode_cache": False})
    for length in LENGTHS.args[1]:
        assert found_after_a_turn(lab, words(length, 50)) == length // BLOCK * BLOCK
    lab.check()
