"""Exact chunks by block hashes: the longest stored run from the start, and nothing else's."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmc.engine import index as module
from lmc.engine.index import SHORT, BlockChain, CacheIndex, TokenChain, find_run
from lmc.keys import RecordKind

N = 3  # blocks of a chunk; a block has one token here


def hashes(blocks: str, salt: str = "") -> list[bytes]:
    """A hash a letter, each naming everything up to it."""
    return [hashlib.sha256((salt + blocks[: i + 1]).encode()).digest() for i in range(len(blocks))]


class Pages:
    """Chunks of pages in one namespace."""

    def __init__(self, namespace: bytes = b"namespace"):
        self.index, self.namespace = CacheIndex(), namespace

    def chain(self, found):
        return BlockChain(self.index, self.namespace, found, N, 1)

    def key(self, last):
        return self.chain([]).key(last)

    def find(self, found, lookup):
        chain = self.chain(found)
        return find_run(chain, N, dict(zip(chain.whole, lookup(chain.whole), strict=True)), lookup)

    def recall(self, key, label):
        self.index.recall(RecordKind.PAGES, key, 0, label)


class Stored:
    """What a store would say."""

    def __init__(self):
        self.keys = set()
        self.asked = 0

    def __call__(self, keys):
        self.asked += 1
        return ["host" if key in self.keys else None for key in keys]

    def put(self, pages: Pages, blocks: str, salt: str = "") -> dict:
        """The chunks of a prompt, its last as full as it is; their labels by key."""
        chain, labels = pages.chain(hashes(blocks, salt)), {}
        for start in range(0, len(blocks), N):
            count = min(N, len(blocks) - start)
            naming = chain.naming(start // N, count)
            chain.remember(start // N, count)
            labels[naming.key] = naming.label
            self.keys.add(naming.key)
        return labels


@pytest.fixture
def pages():
    return Pages()


@pytest.fixture
def stored():
    return Stored()


def blocks_of(pieces):
    return [piece.tokens for piece in pieces]


def places_of(pieces):
    return [(piece.key, piece.at, piece.tokens) for piece in pieces]


def test_nothing_is_found_in_nothing(pages, stored):
    assert pages.find([], stored) == []
    assert pages.find(hashes("abcdefg"), stored) == []


def test_whole_chunks_are_found_in_order(pages, stored):
    stored.put(pages, "abcdef")
    key = [pages.key(h) for h in hashes("abcdef")]
    assert places_of(pages.find(hashes("abcdef"), stored)) == [(key[2], 0, 3), (key[5], 3, 3)]
    assert places_of(pages.find(hashes("abcdefghijk"), stored)) == [(key[2], 0, 3), (key[5], 3, 3)]


def test_the_run_ends_at_the_first_chunk_that_is_missing(pages, stored):
    stored.put(pages, "abcdefghi")
    stored.keys.remove(pages.key(hashes("abcdef")[-1]))
    assert blocks_of(pages.find(hashes("abcdefghi"), stored)) == [3]


def test_leading_blocks_of_a_chunk_serve_a_prompt_that_goes_another_way(pages, stored):
    stored.put(pages, "abcdef")
    assert blocks_of(pages.find(hashes("abcdXX"), stored)) == [3, 1]
    assert blocks_of(pages.find(hashes("abcdeX"), stored)) == [3, 2]
    assert blocks_of(pages.find(hashes("abcde"), stored)) == [3, 2]
    assert blocks_of(pages.find(hashes("aX"), stored)) == [1]
    assert pages.find(hashes("Xb"), stored) == []


def test_a_partly_full_chunk_is_found_by_longer_and_shorter_prompts(pages, stored):
    stored.put(pages, "abcde")
    assert blocks_of(pages.find(hashes("abcdefgh"), stored)) == [3, 2]
    assert blocks_of(pages.find(hashes("abcd"), stored)) == [3, 1]


def test_a_partly_full_chunk_of_another_process_is_found_without_an_index(stored):
    stored.put(Pages(), "abcde")
    stranger = Pages()
    assert blocks_of(stranger.find(hashes("abcdefgh"), stored)) == [3, 2]
    assert blocks_of(stranger.find(hashes("abcd"), stored)) == [3], "only its own end names it"


def test_labels_bring_the_index_back_after_a_restart(pages, stored):
    labels = stored.put(pages, "abcdef")
    again = Pages()
    for key, label in labels.items():
        again.recall(key, label)
    assert again.find(hashes("abcdX"), stored) == pages.find(hashes("abcdX"), stored) != []


def test_another_namespace_finds_nothing(pages, stored):
    labels = stored.put(pages, "abcdef")
    other = Pages(b"another")
    assert other.find(hashes("abcdef"), stored) == []
    assert set(labels).isdisjoint(other.key(h) for h in hashes("abcdef"))


def test_another_tenant_s_hashes_find_nothing(pages, stored):
    stored.put(pages, "abcdef", salt="one")
    assert pages.find(hashes("abcdef", salt="another"), stored) == []


def test_a_chunk_that_was_evicted_is_not_found_by_its_index(pages, stored):
    stored.put(pages, "abcdef")
    stored.keys.clear()
    assert pages.find(hashes("abcdX"), stored) == []


def test_a_block_in_another_place_of_a_chunk_is_not_served(pages, stored):
    """With another number of blocks a chunk the same hashes stand elsewhere in theirs."""
    found = hashes("abcdef")
    key = pages.key(found[4])
    pages.index.remember_blocks(key, found[2:5])
    stored.keys.add(key)
    assert pages.find(found, stored) == []


def test_the_index_is_bounded_and_forgets_the_oldest(pages, stored, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 2 * N)
    stored.put(pages, "abc")
    stored.put(pages, "def")
    stored.put(pages, "ghi")
    assert blocks_of(pages.find(hashes("dX"), stored)) == [1]
    assert pages.find(hashes("aX"), stored) == []
    assert blocks_of(pages.find(hashes("abc"), stored)) == [3], "whole chunks need no index"


def test_blocks_of_earlier_processes_are_forgotten_first(pages, stored, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 2 * N)
    for newest_first in ("abc", "def"):
        for key, label in stored.put(Pages(), newest_first).items():
            pages.recall(key, label)
    assert blocks_of(pages.find(hashes("dX"), stored)) == [1]
    stored.put(pages, "ghi")
    assert pages.find(hashes("dX"), stored) == []
    assert blocks_of(pages.find(hashes("aX"), stored)) == [1]
    stored.put(pages, "abc")  # This process uses it now.
    stored.put(pages, "jkl")
    assert pages.find(hashes("gX"), stored) == []
    assert blocks_of(pages.find(hashes("aX"), stored)) == [1]


def test_a_long_prompt_takes_two_questions(pages, stored):
    stored.put(pages, "abcdef" * 50)
    stored.asked = 0
    assert sum(blocks_of(pages.find(hashes("abcdef" * 50 + "X"), stored))) == 300
    assert stored.asked <= 2


def test_a_longer_chunk_with_the_same_beginning_is_named(pages, stored):
    stored.put(pages, "abcdef")
    found = hashes("abcdef")
    assert pages.chain(found).naming(1, 2).longer == pages.key(found[5])
    assert pages.chain(hashes("abcX")).naming(1, 1).longer is None


def test_a_label_is_sixteen_bytes_a_block(pages):
    assert pages.chain(hashes("abc")).naming(0, 3).label == "".join(h[:SHORT].hex() for h in hashes("abc"))


prompts = st.text("ab", max_size=10)


@settings(max_examples=200, deadline=None)
@given(st.lists(prompts, max_size=8), prompts, st.booleans())
def test_what_is_found_is_the_longest_stored_run_of_the_prompt(written, asked, restarted):
    """A brute-force model: chunks as strings, a chunk serves every prompt that it begins with, from its own place
    on.
    """
    pages, stored, labels, chunks = Pages(), Stored(), {}, set()
    for text in written:
        labels |= stored.put(pages, text)
        chunks |= {(start, text[: start + N]) for start in range(0, len(text), N)}
    if restarted:
        pages = Pages()
        for key, label in labels.items():
            pages.recall(key, label)
    reach = 0
    while reach % N == 0:
        best = max((common(text, asked) for start, text in chunks if start == reach), default=0)
        if best <= reach:
            break
        reach = best
    hits = pages.find(hashes(asked), stored)
    assert sum(blocks_of(hits)) == reach
    assert [hit.at for hit in hits] == [N * i for i in range(len(hits))]
    assert all(hit.tokens == N for hit in hits[:-1])
    assert all(hit.key in stored.keys for hit in hits)


def common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# -- token chunks -----------------------------------------------------------------------------------------------------


def tokens_of(index, tokens, ends=()):
    return TokenChain(index, b"namespace", tokens, N, ends)


def store_tokens(stored, index, tokens):
    """The chunks of a prompt; the label of its end."""
    chain, label = tokens_of(index, tokens), ""
    for start in range(0, len(tokens), N):
        naming = chain.naming(start // N, min(N, len(tokens) - start))
        chain.remember(start // N, min(N, len(tokens) - start))
        stored.keys.add(naming.key)
        label = naming.label
    return naming.key, label


def reach(stored, chain):
    places = dict(zip(chain.whole, stored(chain.whole), strict=True))
    return sum(blocks_of(find_run(chain, N, places, stored)))


def test_the_end_of_a_stored_prompt_is_found_by_longer_prompts(stored):
    index = CacheIndex()
    store_tokens(stored, index, [1, 2, 3, 4, 5])
    assert reach(stored, tokens_of(index, [1, 2, 3, 4, 5, 6, 7])) == 5
    assert reach(stored, tokens_of(index, [1, 2, 3, 4, 6, 6, 7])) == 3
    assert reach(stored, tokens_of(index, [1, 2, 3, 4])) == 3


def test_an_end_of_another_process_is_found_where_the_prompt_ends_and_where_it_is_said_to_be(stored):
    store_tokens(stored, CacheIndex(), [1, 2, 3, 4, 5])
    stranger = CacheIndex()
    assert reach(stored, tokens_of(stranger, [1, 2, 3, 4, 5])) == 5
    assert reach(stored, tokens_of(stranger, [1, 2, 3, 4, 5, 6])) == 3
    assert reach(stored, tokens_of(stranger, [1, 2, 3, 4, 5, 6], ends=[5])) == 5


def test_the_label_of_an_end_brings_it_back_after_a_restart(stored):
    """Conversations shorter than a chunk were not reused by the next process."""
    key, label = store_tokens(stored, CacheIndex(), [1, 2])
    again = CacheIndex()
    again.recall(RecordKind.PREFIX, key, 2, label)
    assert reach(stored, tokens_of(again, [1, 2, 9, 9])) == 2


def test_ends_are_bounded_and_the_oldest_is_forgotten(stored, monkeypatch):
    monkeypatch.setattr(module, "ENDS", 2)
    index = CacheIndex()
    for first in (10, 20, 30):
        store_tokens(stored, index, [first, 1, 2, 4])
    assert [reach(stored, tokens_of(index, [first, 1, 2, 4, 9])) for first in (10, 20, 30)] == [3, 4, 4]


def chain_of(blocks: str, **kind) -> BlockChain:
    return BlockChain(CacheIndex(), b"namespace", hashes(blocks), N, 1, **kind)


def run_of(chain: BlockChain, keys: set) -> list:
    places = {key: "host" if key in keys else None for key in (*chain.whole, *chain.inner)}
    return find_run(chain, N, places, lambda asked: ["host" if key in keys else None for key in asked])


def test_indivisible_chunks_serve_all_of_their_blocks_or_none():
    """Such chunks lack the pages that only tokens inside of them see."""
    index = CacheIndex()
    chain = BlockChain(index, b"namespace", hashes("abcdef"), N, 1, divisible=False)
    keys = {chain.naming(at, N).key for at in range(2)}
    for at in range(2):
        chain.remember(at, N)
    for blocks, wanted in (("abcdef", [3, 3]), ("abcde", [3]), ("abcdX", [3]), ("ab", []), ("abc", [3])):
        other = BlockChain(index, b"namespace", hashes(blocks), N, 1, divisible=False)
        assert blocks_of(run_of(other, keys)) == wanted
    assert chain.naming(1, 2).longer is None, "a shorter chunk is worth storing"


@given(st.lists(st.sampled_from(["", "inner", "whole"]), min_size=4, max_size=4), st.booleans())
@settings(deadline=None)
def test_a_run_ends_at_the_last_chunk_after_which_a_prompt_can_continue(kinds, tail):
    chain, keys = chain_of("abcdefghijklmn", divisible=False, states=True), set()
    for at, kind in enumerate(kinds):
        if kind:
            keys.add(chain.naming(at, N, inner=kind == "inner").key)
    if tail:
        keys.add(chain.naming(4, 2).key)
    found = run_of(chain, keys)
    reach = kinds.index("") if "" in kinds else 4
    ends = [at + 1 for at in range(reach) if kinds[at] == "whole"]
    wanted = [N] * 4 + [2] if tail and reach == 4 else [N] * max(ends, default=0)
    assert blocks_of(found) == wanted
    assert [piece.ends for piece in found] == [kind == "whole" for kind in kinds[: min(len(found), 4)]] + [True] * (
        len(found) - min(len(found), 4)
    )


def test_an_inner_chunk_is_not_stored_beside_one_that_serves_more():
    chain = chain_of("abc", divisible=False, states=True)
    assert chain.naming(0, N, inner=True).longer == chain.naming(0, N).key
    assert chain_of("abc").inner == []
