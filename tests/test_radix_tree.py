"""The radix tree of the texts that were sent to workers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmc.router.policies.published.radix_tree import RadixTree, common_length

VECTORS = json.loads((Path(__file__).parent / "data/router.json").read_text())["approximate_radix_tree"]
KEYS = st.text("ab", min_size=1, max_size=8)
WORKERS = ("w1", "w2", "w3")


def same(one: str, other: str) -> int:
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


@given(key=st.text("ab", max_size=40), start=st.integers(0, 5), edge=st.text("ab", max_size=40))
@example(key="a" * 40, start=0, edge="a" * 40)
def test_a_common_length_is_found_by_slices(key: str, start: int, edge: str) -> None:
    start = min(start, len(key))
    assert common_length(key, start, edge) == same(key[start:], edge)


@pytest.mark.parametrize("case", VECTORS["counts"])
def test_characters_are_counted_as_published(case: dict[str, Any]) -> None:
    tree = RadixTree()
    for text, worker in case["insert"]:
        tree.insert(text, worker)
    assert tree.counts() == case["counts"]


def test_eviction_is_as_published() -> None:
    case, tree = VECTORS["evict"], RadixTree()
    for text, worker in case["insert"]:
        tree.insert(text, worker)
    assert tree.counts() == case["counts_before"]
    tree.evict(case["max"])
    assert tree.counts() == case["counts_after"]
    match = tree.match(case["match"]["text"])
    assert case["match"]["text"][: match.length] == case["match"]["matched"]
    assert match.workers == (case["match"]["worker"],)


def test_matches_for_one_worker_are_as_published() -> None:
    case, tree = VECTORS["match_for_worker"], RadixTree()
    for text, worker in case["insert"]:
        tree.insert(text, worker)
    for text, worker, matched in case["cases"]:
        assert text[: tree.match(text, among={worker}).length] == matched


def test_an_empty_tree_matches_nothing_as_published() -> None:
    match = RadixTree().match(VECTORS["empty"]["text"])
    assert (match.length, match.workers) == (len(VECTORS["empty"]["matched"]), ())


INSERTS = st.lists(st.tuples(KEYS, st.sampled_from(WORKERS), st.sampled_from(["s", "t"])), max_size=30)


@given(INSERTS, KEYS)
def test_the_tree_does_what_lists_of_texts_do(inserts: list[tuple[str, str, str]], asked: str) -> None:
    tree = RadixTree()
    for text, worker, scope in inserts:
        tree.insert(text, worker, scope)
    for scope in ("s", "t"):
        lists = {name: [text for text, worker, at in inserts if (worker, at) == (name, scope)] for name in WORKERS}
        best = {name: max((same(text, asked) for text in texts), default=0) for name, texts in lists.items()}
        for name in WORKERS:
            assert tree.match(asked, scope, {name}).length == best[name]
        match, most = tree.match(asked, scope), max(best.values())
        assert match.length == most
        assert set(match.workers) == {name for name in WORKERS if most and best[name] == most}
        prefixes = {
            name: {text[:end] for text in texts for end in range(1, 1 + len(text))} for name, texts in lists.items()
        }
        assert tree.counts(scope) == {name: len(prefixes[name]) for name in WORKERS if prefixes[name]}


@given(INSERTS, st.integers(0, 20), st.sampled_from(WORKERS))
def test_eviction_keeps_what_was_used_last(inserts: list[tuple[str, str, str]], limit: int, gone: str) -> None:
    tree, whole = RadixTree(), RadixTree()
    for insert in inserts:
        tree.insert(*insert)
        whole.insert(*insert)
    tree.evict(limit)
    for name in WORKERS:
        assert tree.characters(name) == sum(tree.counts(scope).get(name, 0) for scope in ("s", "t")) <= limit
        last = next((insert for insert in reversed(inserts) if insert[1] == name), None)
        if last is not None and len(last[0]) <= limit:
            assert tree.match(last[0], last[2], {name}).length == len(last[0])
    for text, name, scope in inserts:
        assert tree.match(text, scope, {name}).length <= whole.match(text, scope, {name}).length
    tree.remove(gone)
    assert all(gone not in tree.counts(scope) for scope in ("s", "t"))
    for name in WORKERS:
        tree.remove(name)
    assert (tree.nodes, vars(tree)["_trees"], vars(tree)["_workers"]) == (0, {}, {})


def test_a_tree_may_be_deeper_than_python_may_call() -> None:
    tree = RadixTree()
    for length in range(1, 1500):
        tree.insert("x" * length, "w")
    assert (tree.characters("w"), tree.nodes, tree.match("x" * 5000).length) == (1499, 1499, 1499)
    tree.evict(1498)
    assert tree.match("x" * 5000).length == 1498


def test_many_short_texts_are_bounded_by_nodes() -> None:
    """Each text takes few characters and much memory; another worker's texts split the nodes of the first one."""
    tree = RadixTree(max_nodes=100)
    for number in range(500):
        tree.insert(f"{number:04}-first", "w1", scope=str(number % 7))
        tree.insert(f"{number:04}-other", "w2", scope=str(number % 7))
        assert tree.nodes <= 200
    assert tree.match("0499-first", "2").workers == ("w1",)
    assert tree.match("0000-first", "0").length < 4
