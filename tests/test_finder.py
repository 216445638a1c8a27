"""Known documents are found wherever they stand, and nothing that was not compared is ever found."""

import gc
import random
import weakref
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
from amount import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmc.documents.block_table import _Table
from lmc.documents.finder import (
    BLOCK,
    COMPARED,
    MIN_RUNS,
    RUN_TOKENS,
    STRIDE,
    WHOLE,
    DocumentFinder,
    FoundRun,
    polynomials,
    stored_without_overlaps,
)
from lmc.documents.finder import _equal as measured
from lmc.documents.finder import _run_around as run_around
from lmc.documents.known import KnownDocuments, known_bytes
from lmc.keys import document_keys


@dataclass(eq=False)
class Text:
    tokens: array

    @classmethod
    def of(cls, tokens):
        return cls(array("I", tokens))


def texts(dice, count, length=400):
    return [Text.of(dice.choices(range(100_000), k=length)) for _ in range(count)]


def knowing(documents):
    finder = DocumentFinder()
    finder.insert(documents)
    return finder


def places(finder, prompt, min_run=64):
    """What is found. Every token of it is compared first."""
    runs, end = finder.find(prompt, min_run), 0
    for run in runs:
        assert (
            list(prompt[run.at : run.at + run.tokens])
            == run.document.tokens[run.first : run.first + run.tokens].tolist()
        )
        assert run.at >= end
        end = run.at + run.tokens
    return [(run.at, run.document, run.first, run.tokens) for run in runs]


def test_whole_documents_are_found_with_anything_around_them():
    dice = random.Random(0)
    one, two, three = texts(dice, 3)
    finder = knowing([one, two, three])
    prompt = [5, *two.tokens, 6, 7, *one.tokens, *three.tokens]
    assert places(finder, prompt) == [(1, two, 0, 400), (403, one, 0, 400), (803, three, 0, 400)]


@pytest.mark.parametrize("lost", [(0, 0), (1, 0), (0, 1), (2, 2)])
@pytest.mark.parametrize("length", [WHOLE, WHOLE + 4, 47, 63, 64, 100])
def test_a_document_is_found_whose_ends_the_tokenizer_has_joined_with_other_text(length, lost):
    (document,) = texts(random.Random(length), 1, length)
    inner = document.tokens[lost[0] : length - lost[1]]
    found = places(knowing([document]), [1, 2, 3, *inner, 4, 5])
    assert found == ([(3, document, lost[0], len(inner))] if len(inner) >= WHOLE else [])


@pytest.mark.parametrize("first", [0, 1, 31, 32, 33, 250])
@pytest.mark.parametrize("count", [63, 64, 65, 100])
def test_parts_are_found_from_min_run_tokens_on(first, count):
    (document,) = texts(random.Random(1), 1)
    prompt = [7, *document.tokens[first : first + count], 8]
    assert places(knowing([document]), prompt) == ([(1, document, first, count)] if count >= 64 else [])


def test_every_run_that_contains_a_block_is_found():
    (document,) = texts(random.Random(2), 1, 1000)
    finder, count = knowing([document]), BLOCK + STRIDE - 1
    for first in range(1000 - count - 3):
        assert places(finder, document.tokens[first : first + count], WHOLE) == [(0, document, first, count)]


def test_of_a_thousand_versions_of_a_page_each_is_found_but_for_its_own_token():
    """An finder keeps few holders of a block. A version whose token is in no block is found as parts of others."""
    dice = random.Random(3)
    (page,) = texts(dice, 1, 500)
    versions = []
    for number in range(1000):
        tokens = page.tokens[:]
        tokens[dice.randrange(500)] = 200_000 + number
        versions.append(Text.of(tokens))
    finder = knowing(versions)
    for version in dice.sample(versions, 40):
        found = places(finder, [1, *version.tokens, 2])
        assert found == [(1, version, 0, 500)] or sum(count for *_, count in found) >= 500 - 2 * 64


def test_of_two_documents_that_overlap_in_a_prompt_the_longer_run_stays_whole():
    dice = random.Random(4)
    (long,) = texts(dice, 1, 300)
    short = Text.of([*long.tokens[250:], *dice.choices(range(100_000), k=150)])
    prompt = [*long.tokens, *short.tokens[50:]]
    assert places(knowing([long, short]), prompt) == [(0, long, 0, 300), (300, short, 50, 150)]
    assert places(knowing([long, short]), prompt, 200) == [(0, long, 0, 300)]


def test_a_removed_document_is_not_found_and_can_come_back_any_number_of_times():
    dice = random.Random(5)
    documents = texts(dice, 50)
    finder = knowing(documents)
    for _ in range(20):
        gone = dice.choice(documents)
        finder.remove(gone)
        finder.remove(gone)
        assert (places(finder, gone.tokens), len(finder)) == ([], 49)
        finder.insert([gone])
        assert places(finder, gone.tokens) == [(0, gone, 0, 400)]
    for document in documents[1:]:
        finder.remove(document)
    assert places(finder, [*documents[1].tokens, *documents[0].tokens]) == [(400, documents[0], 0, 400)]


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 7, 16])
def test_a_prompt_of_one_repeated_phrase_is_searched_in_bounded_time(period, monkeypatch):
    """In a line of dashes, each window would be a hit in each other line of dashes."""
    compared = []
    monkeypatch.setattr(
        "lmc.documents.finder._run_around",
        lambda prompt, document, at, first: compared.append(at) or FoundRun(at, document, first, 0),
    )
    phrase = [7 + i for i in range(period)]
    finder = knowing([Text.of((phrase * 400)[: 300 + i]) for i in range(100)])
    finder.find((phrase * 16_000)[:16_000])
    assert len(compared) <= 64 + 16_000 // 16


@pytest.mark.parametrize("period", [5, 7, 13])
def test_rows_of_a_table_that_are_alike_are_compared_for_a_bounded_number_of_tokens(period, monkeypatch):
    """Each shift by a row was compared to the end: prompts of 128,000 tokens kept the scheduler for 1.8 s."""
    compared, row = [], [7 + i for i in range(period)]
    monkeypatch.setattr(
        "lmc.documents.finder._run_around", lambda *given: compared.append(run_around(*given)) or compared[-1]
    )
    document, prompt = Text.of((row * 8000)[:8000]), (row * 16_000)[:16_000]
    found = knowing([document]).find(prompt)
    assert sum(run.tokens for run in compared) <= (COMPARED + 1) * len(prompt)
    assert sum(run.tokens for run in found) > 0.9 * len(prompt)


@pytest.mark.parametrize("tokens", [40, 50])
def test_each_of_many_short_documents_in_one_prompt_is_found(tokens):
    documents = texts(random.Random(9), 500, tokens)
    prompt = [token for document in documents for token in [*document.tokens, 7]]
    assert [document for _, document, *_ in places(knowing(documents), prompt)] == documents


def test_rows_that_are_alike_are_compared_only_around_their_hits(monkeypatch):
    """Rows of a log have much in common, and each of the prompt's is like each of the document's."""
    dice, compared = random.Random(10), []
    monkeypatch.setattr(
        "lmc.documents.finder._equal", lambda one, two: compared.append(measured(one, two)) or compared[-1]
    )
    row = dice.choices(range(100_000), k=24)

    def rows(count):
        return [token for _ in range(count) for token in [*row, *dice.choices(range(100_000), k=6)]]

    assert places(knowing([Text.of(rows(1000))]), rows(500)) == []
    assert sum(compared) < 4 * 500 * 30


@pytest.mark.parametrize("values", [1, 64])
def test_blocks_with_equal_hashes_cost_a_bounded_number_of_comparisons_and_find_nothing_wrong(values, monkeypatch):
    """Somebody might find texts whose hashes collide, although the base of the hashes is secret."""
    compared = []

    def collides(tokens, base):
        return (polynomials(tokens, base) >> np.uint64(32)) % np.uint64(values) << np.uint64(32)

    def counted(*pair):
        compared.append(pair)
        return run_around(*pair)

    monkeypatch.setattr("lmc.documents.finder.polynomials", collides)
    monkeypatch.setattr("lmc.documents.finder._run_around", counted)
    dice = random.Random(12)
    documents = texts(dice, 20)
    finder = knowing(documents)
    others = dice.choices(range(100_000), k=900)
    prompt = [*others[:300], *documents[3].tokens, *others[300:600], *documents[11].tokens[100:350], *others[600:]]
    found = places(finder, prompt)
    assert 0 < len(compared) <= MIN_RUNS + len(prompt) // RUN_TOKENS
    if values > 1:  # Otherwise only four blocks of all documents have a place in the table.
        assert found == [(300, documents[3], 0, 400), (1000, documents[11], 100, 250)]
    before = len(finder)
    finder.remove(documents[3])
    assert (len(finder), [one for _, one, *_ in places(finder, prompt) if one is documents[3]]) == (before - 1, [])


def test_a_table_that_grows_moves_a_bounded_number_of_blocks_at_once(monkeypatch):
    moved, take = [], _Table.take
    monkeypatch.setattr(
        _Table, "take", lambda table, start, stop: moved.append(stop - start) or take(table, start, stop)
    )
    dice, finder, documents = random.Random(11), DocumentFinder(), []
    for _ in range(60):
        documents += (new := texts(dice, 25))
        finder.insert(new)
        for known in dice.sample(documents, 3):
            assert places(finder, known.tokens) == [(0, known, 0, 400)]
    assert max(moved) <= 2 * 25 * 12
    assert len(moved) > 5
    for gone in documents[::2]:
        finder.remove(gone)
    assert places(finder, documents[0].tokens) == []
    assert all(places(finder, kept.tokens) == [(0, kept, 0, 400)] for kept in documents[1::200])


def test_removed_documents_make_room_for_new_ones():
    dice, finder = random.Random(12), DocumentFinder()
    documents = texts(dice, 300)
    finder.insert(documents)
    size = finder.bytes
    for _ in range(3000):
        finder.remove(documents.pop(0))
        documents += (new := texts(dice, 1, 100))
        finder.insert(new)
    assert finder.bytes <= 2 * size
    assert len(finder) == 300
    assert all(places(finder, document.tokens) == [(0, document, 0, 100)] for document in documents)


def test_a_document_of_many_blocks_is_found_at_its_end_until_it_is_removed():
    dice = random.Random(13)
    (long,), (other,) = texts(dice, 1, 100_000), texts(dice, 1)
    finder = knowing([long, other])
    assert places(finder, long.tokens[90_000:90_300]) == [(0, long, 90_000, 300)]
    assert places(finder, long.tokens) == [(0, long, 0, 100_000)]
    finder.remove(long)
    assert (places(finder, long.tokens), len(finder)) == ([], 1)


def test_the_finder_keeps_to_its_size():
    documents = texts(random.Random(6), 3000)
    assert knowing(documents).bytes <= 300 * len(documents)


def test_short_documents_and_short_prompts_are_no_error():
    finder = knowing([Text.of([]), Text.of(range(WHOLE - 1)), Text.of(range(WHOLE))])
    assert len(finder) == 1
    assert finder.find([], 64) == finder.find(range(WHOLE - 1), 64) == []
    assert DocumentFinder().find(range(100), 64) == []


@settings(max_examples=some(300), deadline=None, suppress_health_check=[HealthCheck.large_base_example])
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_nothing_is_left_that_a_search_at_every_shift_would_find(dice, count):
    """Documents have much in common, and prompts are made of parts of them."""
    source = dice.choices(range(1000), k=600)
    starts = [dice.randrange(500) for _ in range(count)]
    documents = [
        Text.of([*source[at : at + dice.randrange(40, 300)], *dice.choices(range(1000), k=9)]) for at in starts
    ]
    prompt = []
    while len(prompt) < 600:
        part, start = dice.choice(documents).tokens, dice.randrange(100)
        prompt += [*part[start : start + dice.randrange(200)], *dice.choices(range(1000), k=dice.randrange(5))]
    finder = DocumentFinder()
    for document in documents:
        finder.insert([document])
    rest = np.array(prompt, np.int64)
    for at, _, _, length in places(finder, prompt):
        rest[at : at + length] = -1
    for document in documents:
        tokens = np.array(document.tokens, np.int64)
        for shift in range(-len(tokens) + 1, len(rest)):
            start, stop = max(0, shift), min(len(rest), shift + len(tokens))
            equal = rest[start:stop] == tokens[start - shift : stop - shift]
            assert max(map(len, equal.tobytes().split(b"\0"))) < 64


def test_of_runs_that_overlap_stored_ones_are_chosen():
    dice, asked = random.Random(16), []
    parts = texts(dice, 3, 100)
    joined, apart = Text.of([*parts[0].tokens, *parts[1].tokens]), parts[2]
    finder = knowing([*parts, joined])
    prompt = [*joined.tokens, 7, *apart.tokens]

    def chosen(stored):
        def parts_of(runs):
            asked.append(len(runs))
            return [run for run in runs if run.document in stored]

        found = stored_without_overlaps(finder.all_runs(prompt), 64, parts_of)
        return [(run.at, run.document) for run in found]

    assert chosen([*parts, joined]) == [(0, joined), (201, apart)]
    assert asked == [2], "all that have won are stored"
    assert chosen(parts) == [(0, parts[0]), (100, parts[1]), (201, apart)]
    assert asked[1:] == [2, 4]
    assert chosen([]) == [(0, joined), (201, apart)], "without stored ones, the longest are chosen"
    asked.clear()
    prompt = [*parts[0].tokens, 7, *apart.tokens]
    finder.remove(joined)
    assert chosen([]) == [(0, parts[0]), (101, apart)]
    assert not asked, "they do not overlap"


def test_known_documents_are_found_in_their_own_namespace_until_they_are_forgotten():
    dice = random.Random(8)
    known, mine, yours = KnownDocuments(finds=True, max_bytes=2 * known_bytes(400, 2)), b"mine", b"yours"
    first, second = (text.tokens for text in texts(dice, 2))
    for namespace, tokens in ((mine, first), (yours, second)):
        known.note(namespace, tokens, document_keys(namespace, tokens, 256))
    prompt = [*first, *second]
    assert [(run.at, run.tokens) for run in known.find(mine, prompt, 64)] == [(0, 400)]
    assert [(run.at, run.tokens) for run in known.find(yours, prompt, 64)] == [(400, 400)]
    assert known.find(b"another", prompt, 64) == []
    known.note(mine, second, document_keys(mine, second, 256))
    assert known.find(mine, first, 64) == []
    assert [run.tokens for run in known.find(mine, second, 64)] == [400]
    known.clear()
    assert known.find(mine, second, 64) == []


def test_tenants_without_documents_take_no_memory(monkeypatch):
    made = []

    class Counted(DocumentFinder):
        def __init__(self, used):
            super().__init__(used)
            made.append(weakref.ref(self))

    monkeypatch.setattr("lmc.documents.known.DocumentFinder", Counted)
    known, tokens = KnownDocuments(finds=True), list(range(100))
    known.note(b"has one", tokens, document_keys(b"has one", tokens, 256))
    assert [len(known.find(namespace, tokens, 64)) for namespace in (b"a", b"b", b"has one", b"c")] == [0, 0, 1, 0]
    assert len(made) == 1
    assert made[0]() is not None
    known.remove(known.list(), "by a user")
    gc.collect()
    assert made[0]() is None


def test_versions_without_blocks_of_their_own_are_removed_and_their_places_used_again():
    """More versions of a text than a block is kept for. No search for their places looks at those of all documents."""
    dice, (text,) = random.Random(14), texts(random.Random(15), 1)
    versions = [Text.of([*text.tokens[:-1], number]) for number in range(8)]
    finder, others = DocumentFinder(), texts(dice, 50)
    finder.insert(others)
    assert finder.insert(versions) == versions[4:]
    finder.remove(versions[0])
    assert [finder.has_room_for_more_of(one) for one in (versions[1], versions[7], others[0])] == [False, True, False]
    finder.remove(versions[7])
    assert finder.insert([versions[7]]) == []
    for one in versions[1:]:
        finder.remove(one)
    assert (len(finder), places(finder, text.tokens)) == (50, [])
    size = finder.bytes
    for _ in range(3):
        finder.insert(versions)
        for one in versions:
            finder.remove(one)
    assert (finder.bytes, len(finder)) == (size, 50)
    assert all(places(finder, one.tokens) == [(0, one, 0, 400)] for one in others)
