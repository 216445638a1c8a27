"""KV cache groups with windows, as vLLM's hybrid KV cache manager makes them, on the scheduler's side."""

import random

import pytest
from storage_fakes import DictTier
from vllm_fakes import BLOCK, CHUNK, DOC_A, DOC_B, LAYERS, PLAIN, SYSTEM, Lab, Pool, page, prompt, state_of

from lmc.connectors.vllm.messages import BlendJob
from lmc.connectors.vllm.scheduler.admission import MAX_BLEND_WAIT_SECONDS
from lmc.connectors.vllm.scheduler.kv_groups import KVGroups
from lmc.connectors.vllm.scheduler.scheduler import LACKS_BLOCKS

WINDOW = 6
LONG = [*SYSTEM, *range(600, 615)]  # 5 blocks before the documents


@pytest.fixture
def lab():
    """Layer 0 sees everything, layer 1 has a window."""
    made = Lab(windows=(0, WINDOW), blocks=160, slots=64)
    yield made
    made.drop_backfills()
    made.check()


def learned(lab, *documents):
    for number, document in enumerate(documents):
        lab.serve(f"learn {number}", document, {"learn": True})
    lab.forget_prefixes()


def after_cached_blocks(lab):
    """A prompt with documents whose system text the engine has cached, and how many of its tokens are cached."""
    learned(lab, DOC_A, DOC_B)
    lab.serve("one", [*LONG, *range(700, 703)])
    lab.settle()
    request = lab.arrive("two", prompt(DOC_B, DOC_A, system=LONG))
    local = lab.look(request)
    return request, local


def visible(position, window):
    """The blocks that a token sees, one by one."""
    first = max(0, position - window + 1) if window else 0
    return {at // BLOCK for at in range(first, position)}


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 17])
def test_the_first_block_that_a_token_sees(window):
    groups = KVGroups(None, BLOCK, (0, window))
    for position in range(1, 60):
        assert groups.first_seen(0, position) == 0
        seen = visible(position, window)
        assert groups.first_seen(1, position) <= min(seen, default=position // BLOCK)
        assert not seen or groups.first_seen(1, position) == min(seen)


@pytest.mark.parametrize("windows", [(0,), (0, 6), (6, 0), (0, 6, 11), (7,)], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_an_engine_continues_after_the_longest_prefix_whose_windows_it_has(windows, seed):
    dice, pool, hashes = random.Random(seed), Pool(200), [bytes([i]) for i in range(12)]
    for one in hashes:
        for group in range(len(windows)):
            if dice.random() < 0.8:
                pool.enter(pool.get_new_blocks(1)[0], pool.key(one, group))

    def continues(count):
        """Whether every block is there that the token after `count` blocks sees."""
        return all(
            pool.get_cached_block(hashes[at], [group])
            for group, window in enumerate(windows)
            for at in visible(count * BLOCK, window)
        )

    wanted = max(count for count in range(len(hashes) + 1) if continues(count))
    assert KVGroups(pool, BLOCK, windows).cached(hashes) == wanted


def test_a_blend_gets_every_block_that_its_tokens_see_and_returns_what_it_borrowed(lab):
    learned(lab, DOC_A, DOC_B)
    tokens = prompt(DOC_B, DOC_A, system=LONG)
    free = lab.pool.get_num_free_blocks()
    request = lab.arrive("one", tokens)
    lab.admit(request)
    (windowed,) = lab.windowed["one"]
    passed = windowed.count(0)
    assert passed > 0
    plan = lab.step()
    (job,) = plan.loads
    assert isinstance(job, BlendJob)
    assert all(map(all, job.tables))
    assert job.tables[0] == tuple(lab.tables["one"])
    assert job.tables[1][passed:] == tuple(windowed[passed:])
    whole = -(-len(tokens) // BLOCK)
    lab.load(request)
    held = len({block.block_id for block in lab.pool.blocks if block.ref_cnt})
    assert held <= 2 * whole - passed + 5 + 5, "beside its own blocks only those that are being saved"
    lab.finish(request)
    lab.drop_backfills()
    lab.settle()
    assert lab.pool.get_num_free_blocks() == free


@pytest.mark.parametrize("more", range(BLOCK))
def test_the_engine_keeps_every_block_that_the_last_token_of_a_blended_prompt_sees(lab, more):
    """A blend provides the whole prompt, and the engine computes the last token again.

    It kept the blocks for the token after the prompt, and read null blocks for one length of a prompt in `BLOCK`.
    """
    learned(lab, DOC_A, DOC_B)
    tokens = [*prompt(DOC_B, DOC_A, system=LONG), *range(900, 900 + more)]
    request = lab.arrive("one", tokens)
    assert lab.admit(request) in (len(tokens) - 1, len(tokens))
    seen = visible(len(tokens) - 1, WINDOW) | {(len(tokens) - 1) // BLOCK}
    assert all(lab.windowed["one"][0][at] for at in seen)
    lab.step()
    lab.load(request)
    lab.finish(request)


def test_a_blend_borrows_a_block_for_the_last_token_if_the_engine_has_allocated_none():
    """In layers with this window, the first block leaves the window at a token that begins a new block."""
    groups = KVGroups(Pool(40), BLOCK, (0, BLOCK + 2))
    tokens = 3 * BLOCK + 1
    assert groups.loadable(tokens) == tokens - 1
    free = groups.pool.get_num_free_blocks()
    tables = [[block.block_id for block in blocks] for blocks in groups.take(tokens - 1)]
    borrowed = groups.completed(tables, [], 0, 0, tokens)
    assert [table[:-1] for table in borrowed.tables] == [tuple(table) for table in tables]
    assert all(map(all, borrowed.tables))
    groups.release([groups.pool.blocks[number] for table in tables for number in table])
    groups.release(borrowed.blocks)
    assert groups.pool.get_num_free_blocks() == free


def test_blocks_before_documents_are_cached_and_stored_in_all_groups(lab):
    learned(lab, DOC_A, DOC_B)
    lab.serve("one", prompt(DOC_B, DOC_A, system=LONG))
    lab.drop_backfills()
    lab.settle()
    request = lab.arrive("two", prompt(DOC_A, DOC_B, system=LONG))
    assert lab.look(request) == len(LONG) // BLOCK * BLOCK
    lab.forget_prefixes()
    other = lab.serve("three", [*LONG, *range(700, 720)])
    assert other.facts["exact_tokens"] == len(LONG) // BLOCK * BLOCK
    lab.finish(request)


def test_a_blend_that_is_aborted_leaves_nothing_in_the_engine_s_cache(lab):
    learned(lab, DOC_A, DOC_B)
    tokens = prompt(DOC_B, DOC_A, system=LONG)
    request = lab.arrive("one", tokens)
    lab.admit(request)
    lab.workers.held_back = True
    lab.step()
    request.aborted = True
    lab.finish(request)
    lab.workers.held_back = False
    lab.step()
    lab.settle()
    other = lab.arrive("two", tokens)
    assert lab.look(other) == 0
    lab.finish(other)


def test_a_blend_behind_cached_blocks_holds_the_window_before_its_first_row(lab):
    request, local = after_cached_blocks(lab)
    assert local == len(LONG) // BLOCK * BLOCK
    lab.admit(request)
    (job,) = lab.step().loads
    first = lab.groups.first_seen(1, job.exact)
    assert not any(job.tables[1][:first])
    assert all(job.tables[1][first:])
    for at in range(first, local // BLOCK):  # as the engine computed them for the first request
        assert (lab.workers.pages[1, job.tables[1][at]] == page(request.all_token_ids, at, 1)).all()
    lab.load(request)
    lab.finish(request)


def test_a_block_that_was_evicted_in_the_meantime_is_a_miss(lab):
    request, local = after_cached_blocks(lab)
    tokens = lab.scheduler.claim(request, local)
    tables = lab.allocate(request, local, tokens)
    lost = lab.pool.key(request.block_hashes[local // BLOCK - 1], 1)
    lab.pool.cached.pop(lost).block_hash = None
    lab.loading.add("two")
    lab.scheduler.allocated(request, tables, tokens)
    assert state_of(lab, "two").given_up
    lab.load(request)
    assert request.num_computed_tokens == 0
    lab.compute(request, request.num_tokens)
    lab.finish(request)


def test_a_blend_waits_for_blocks_while_others_run_and_is_then_computed(lab):
    learned(lab, DOC_A, DOC_B)
    running = lab.arrive("one", PLAIN)
    lab.admit(running)
    lab.compute(running, len(PLAIN))
    taken = lab.pool.get_new_blocks(lab.pool.get_num_free_blocks() - 22)
    request = lab.arrive("two", prompt(DOC_B, DOC_A, system=LONG))
    assert lab.scheduler.claim(request, 0) is None
    lab.now += MAX_BLEND_WAIT_SECONDS
    assert lab.scheduler.claim(request, 0) == 0
    lab.pool.free_blocks(taken)
    assert LACKS_BLOCKS in lab.finish(request)["note"]
    lab.finish(running)


@pytest.mark.parametrize("sizes", [[40], [8, 32], [3, 37], [7, 1, 32], [1] * 40, [16, 7, 17]], ids=str)
def test_every_chunk_is_saved_however_a_prompt_is_computed(lab, sizes):
    """Windows pass blocks between steps. A chunk needs only those that a token after it sees."""
    request = lab.arrive("one", PLAIN)
    lab.admit(request)
    for size in sizes:
        lab.compute(request, size)
    lab.decode(request, range(20))
    lab.finish(request)
    lab.forget_prefixes()
    lab.workers.pages.fill_(0xAA)
    for length in (CHUNK, 3 * CHUNK, len(PLAIN)):
        again = lab.arrive(f"again {length}", [*PLAIN[:length], 1, 2, 3])
        assert lab.admit(again) == length
        lab.load(again)
        assert lab.right(again, length, max(0, length - WINDOW))
        lab.finish(again)
        lab.forget_prefixes()


@pytest.mark.parametrize("window", [2, 3, 6, 11])
@pytest.mark.parametrize("common", [3, 4, 9, 12, 13, 20, 31, 36, 39])
def test_a_prompt_that_leaves_another_one_inside_a_chunk_is_loaded_up_to_the_chunk(window, common):
    """A chunk lacks the pages that only tokens inside it see."""
    lab = Lab(windows=(0, window), blocks=160, slots=64)
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    lab.workers.pages.fill_(0xAA)
    request = lab.arrive("two", [*PLAIN[:common], *range(800, 830)])
    assert lab.admit(request) == common // CHUNK * CHUNK
    lab.load(request)
    assert lab.right(request, request.num_computed_tokens, max(0, request.num_computed_tokens - window + 1))
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    lab.finish(request)
    lab.forget_prefixes()
    assert lab.serve("three", [*PLAIN, 1]).facts["exact_tokens"] == len(PLAIN)
    lab.check()


def test_chunks_that_the_store_has_lost_are_saved_again_from_the_engine_s_cache(lab):
    lab.serve("one", PLAIN)
    lab.settle()
    lab.scheduler.forget_all()
    request = lab.serve("two", [*PLAIN, 1, 2, 3])
    assert request.loaded == 0, "the engine has its blocks, of windows too, until they are evicted"
    lab.forget_prefixes()
    assert lab.serve("three", [*PLAIN, 4, 5, 6]).facts["exact_tokens"] == len(PLAIN)


def test_pages_that_no_later_token_sees_are_not_copied(lab):
    lab.serve("one", PLAIN)
    lab.forget_prefixes()
    request = lab.arrive("two", [*PLAIN, 1])
    lab.admit(request)
    (job,) = lab.step().loads
    blocks = [sum(len(copy.blocks) for copy in job.copies if copy.group == group) for group in range(LAYERS)]
    assert blocks == [len(PLAIN) // BLOCK, 2]
    lab.load(request)
    lab.finish(request)


def test_idle_steps_put_exact_blocks_of_all_groups_into_the_engine_s_cache():
    lab = Lab(windows=(0, WINDOW), blocks=160, slots=64, tiers=[DictTier()])
    learned(lab, DOC_A, DOC_B)
    tokens = prompt(DOC_B, DOC_A, system=LONG)
    lab.serve("one", tokens)
    lab.now += 1.0
    lab.settle()
    request = lab.arrive("two", [*tokens, 1, 2, 3])
    assert lab.look(request) == len(tokens) // BLOCK * BLOCK
    lab.finish(request)
    lab.check()
