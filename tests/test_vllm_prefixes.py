"""Exact chunks by block hashes: the longest stored run from the start, and nothing else's."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmc.connectors.vllm import prefixes as module
from lmc.connectors.vllm.prefixes import SHORT, Hit, Prefixes

N = 3  # blocks of a chunk


def hashes(blocks: str, salt: str = "") -> list[bytes]:
    """A hash a letter, each naming everything up to it."""
    return [hashlib.sha256((salt + blocks[: i + 1]).encode()).digest() for i in range(len(blocks))]


class Stored:
    """What a store would say."""

    def __init__(self):
        self.keys = set()
        self.asked = 0

    def __call__(self, keys):
        self.asked += 1
        return ["host" if key in self.keys else None for key in keys]

    def put(self, prefixes: Prefixes, blocks: str, salt: str = "") -> dict:
        """The chunks of a prompt, its last as full as it is; their labels by key."""
        found, labels = hashes(blocks, salt), {}
        for start in range(0, len(found), N):
            chunk = found[start : start + N]
            key = prefixes.key(chunk[-1])
            prefixes.remember(key, chunk)
            labels[key] = prefixes.label(chunk)
            self.keys.add(key)
        return labels


@pytest.fixture
def prefixes():
    return Prefixes(b"namespace", N)


@pytest.fixture
def stored():
    return Stored()


def blocks_of(hits):
    return [hit.blocks for hit in hits]


def test_nothing_is_found_in_nothing(prefixes, stored):
    assert prefixes.find([], stored) == []
    assert prefixes.find(hashes("abcdefg"), stored) == []


def test_whole_chunks_are_found_in_order(prefixes, stored):
    stored.put(prefixes, "abcdef")
    key = [prefixes.key(h) for h in hashes("abcdef")]
    assert prefixes.find(hashes("abcdef"), stored) == [Hit(key[2], 0, 3), Hit(key[5], 1, 3)]
    assert prefixes.find(hashes("abcdefghijk"), stored) == [Hit(key[2], 0, 3), Hit(key[5], 1, 3)]


def test_the_run_ends_at_the_first_chunk_that_is_missing(prefixes, stored):
    stored.put(prefixes, "abcdefghi")
    stored.keys.remove(prefixes.key(hashes("abcdef")[-1]))
    assert blocks_of(prefixes.find(hashes("abcdefghi"), stored)) == [3]


def test_leading_blocks_of_a_chunk_serve_a_prompt_that_goes_another_way(prefixes, stored):
    stored.put(prefixes, "abcdef")
    assert blocks_of(prefixes.find(hashes("abcdXX"), stored)) == [3, 1]
    assert blocks_of(prefixes.find(hashes("abcdeX"), stored)) == [3, 2]
    assert blocks_of(prefixes.find(hashes("abcde"), stored)) == [3, 2]
    assert blocks_of(prefixes.find(hashes("aX"), stored)) == [1]
    assert prefixes.find(hashes("Xb"), stored) == []


def test_a_partly_full_chunk_is_found_by_longer_and_shorter_prompts(prefixes, stored):
    stored.put(prefixes, "abcde")
    assert blocks_of(prefixes.find(hashes("abcdefgh"), stored)) == [3, 2]
    assert blocks_of(prefixes.find(hashes("abcd"), stored)) == [3, 1]


def test_a_partly_full_chunk_of_another_process_is_found_without_an_index(stored):
    stored.put(Prefixes(b"namespace", N), "abcde")
    stranger = Prefixes(b"namespace", N)
    assert blocks_of(stranger.find(hashes("abcdefgh"), stored)) == [3, 2]
    assert blocks_of(stranger.find(hashes("abcd"), stored)) == [3], "only its own end names it"


def test_labels_bring_the_index_back_after_a_restart(prefixes, stored):
    labels = stored.put(prefixes, "abcdef")
    again = Prefixes(b"namespace", N)
    for key, label in labels.items():
        again.recall(key, label)
    assert again.find(hashes("abcdX"), stored) == prefixes.find(hashes("abcdX"), stored) != []


def test_another_namespace_finds_nothing(prefixes, stored):
    labels = stored.put(prefixes, "abcdef")
    other = Prefixes(b"another", N)
    assert other.find(hashes("abcdef"), stored) == []
    assert set(labels).isdisjoint(other.key(h) for h in hashes("abcdef"))


def test_another_tenant_s_hashes_find_nothing(prefixes, stored):
    stored.put(prefixes, "abcdef", salt="one")
    assert prefixes.find(hashes("abcdef", salt="another"), stored) == []


def test_a_chunk_that_was_evicted_is_not_found_by_its_index(prefixes, stored):
    stored.put(prefixes, "abcdef")
    stored.keys.clear()
    assert prefixes.find(hashes("abcdX"), stored) == []


def test_a_block_in_another_place_of_a_chunk_is_not_served(prefixes, stored):
    """With another number of blocks a chunk the same hashes stand elsewhere in theirs."""
    found = hashes("abcdef")
    key = prefixes.key(found[4])
    prefixes.remember(key, found[2:5])
    stored.keys.add(key)
    assert prefixes.find(found, stored) == []


def test_the_index_is_bounded_and_forgets_the_oldest(prefixes, stored, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 2 * N)
    stored.put(prefixes, "abc")
    stored.put(prefixes, "def")
    stored.put(prefixes, "ghi")
    assert len(prefixes._index) == 2 * N
    assert blocks_of(prefixes.find(hashes("dX"), stored)) == [1]
    assert prefixes.find(hashes("aX"), stored) == []
    assert blocks_of(prefixes.find(hashes("abc"), stored)) == [3], "whole chunks need no index"


def test_a_long_prompt_takes_two_questions(prefixes, stored):
    stored.put(prefixes, "abcdef" * 50)
    stored.asked = 0
    assert sum(blocks_of(prefixes.find(hashes("abcdef" * 50 + "X"), stored))) == 300
    assert stored.asked <= 2


def test_holders_are_longer_chunks_with_the_same_beginning(prefixes, stored):
    stored.put(prefixes, "abcdef")
    found = hashes("abcdef")
    assert prefixes.holders(found[3:5]) == [prefixes.key(found[5])]
    assert prefixes.holders(hashes("abcX")[3:]) == []


def test_a_label_is_sixteen_bytes_a_block(prefixes):
    assert prefixes.label(hashes("abc")) == "".join(h[:SHORT].hex() for h in hashes("abc"))


prompts = st.text("ab", max_size=10)


@settings(max_examples=200, deadline=None)
@given(st.lists(prompts, max_size=8), prompts, st.booleans())
def test_what_is_found_is_the_longest_stored_run_of_the_prompt(written, asked, restarted):
    """A brute-force model: chunks as strings, a chunk serves every prompt that it begins with, from its own place on."""
    prefixes, stored, labels, chunks = Prefixes(b"namespace", N), Stored(), {}, set()
    for text in written:
        labels |= stored.put(prefixes, text)
        chunks |= {(start, text[: start + N]) for start in range(0, len(text), N)}
    if restarted:
        prefixes = Prefixes(b"namespace", N)
        for key, label in labels.items():
            prefixes.recall(key, label)
    reach = 0
    while reach % N == 0:
        best = max((common(text, asked) for start, text in chunks if start == reach), default=0)
        if best <= reach:
            break
        reach = best
    hits = prefixes.find(hashes(asked), stored)
    assert sum(blocks_of(hits)) == reach
    assert [hit.chunk for hit in hits] == list(range(len(hits)))
    assert all(hit.blocks == N for hit in hits[:-1])
    assert all(hit.key in stored.keys for hit in hits)


def common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
