"""The radix tree, and the approximate tree of the texts that workers were sent."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmc.router.approximate_tree import ApproximateTree
from lmc.router.radix_tree import RadixTree, common_length

VECTOR = json.loads((Path(__file__).parent / "data/radix_tree.json").read_text())
VECTORS = json.loads((Path(__file__).parent / "data/router.json").read_text())["approximate_radix_tree"]
KEYS = st.text("ab", min_size=1, max_size=8)
WORKERS = ("w1", "w2", "w3")


def same(one: str, other: str) -> int:
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def test_the_published_steps_are_reproduced() -> None:
    tree = RadixTree("", VECTOR["capacity"])
    for step in VECTOR["steps"]:
        if step["op"] == "touch":
            assert tree.touch(step["key"]) == len(step["key"])
            continue
        done = tree.insert(step["key"])
        assert (done.hit, done.stored) == (step["hit"], len(step["key"]))
        assert [leaf.piece for leaf in done.evicted] == step.get("evicted", [])
        if "paths" in step:
            assert sorted(tree.paths()) == sorted(step["paths"])
        if "split" in step:
            upper, lower = step["split"]
            assert {(upper,), (upper, lower)} <= {tuple(path) for path in tree.paths()}
        assert tree.size == step.get("size", tree.size) <= VECTOR["capacity"]


@given(key=st.text("ab", max_size=40), start=st.integers(0, 5), edge=st.text("ab", max_size=40))
@example(key="a" * 40, start=0, edge="a" * 40)
def test_a_common_length_is_found_by_slices(key: str, start: int, edge: str) -> None:
    start = min(start, len(key))
    assert common_length(key, start, edge) == same(key[start:], edge)
    assert common_length(tuple(map(ord, key)), start, tuple(map(ord, edge))) == same(key[start:], edge)


class Model:
    """A radix tree as a dict: each prefix, and when it was used last."""

    def __init__(self, tree: RadixTree[Any], to_key: Callable[[str], Any]) -> None:
        self.tree, self.to_key = tree, to_key
        self.used: dict[str, int] = {}
        self.locked: list[tuple[str, AbstractContextManager[int]]] = []
        self.now = 0

    def match(self, key: str) -> str:
        return max((key[:end] for end in range(len(key) + 1) if end == 0 or key[:end] in self.used), key=len)

    def use(self, key: str) -> None:
        self.now += 1
        self.used |= {key[:end]: self.now for end in range(1, len(key) + 1)}

    def evicted(self, leaves: Any, in_use: str = "") -> None:
        """Check that each leaf was the one to go next."""
        for leaf in leaves:
            key = next(prefix for prefix in self.used if self.to_key(prefix) == leaf.key)
            held = [in_use, *(prefix for prefix, _ in self.locked)]
            free = [end for end in self.used if not any(prefix.startswith(end) for prefix in held)]
            ends = [end for end in free if not any(other != end and other.startswith(end) for other in self.used)]
            assert key == min(ends, key=self.used.__getitem__)
            for end in range(len(key) - leaf.size + 1, len(key) + 1):
                assert key[:end] in free
                del self.used[key[:end]]

    def step(self, verb: str, key: str, capacity: int | None) -> None:
        found = self.match(key)
        if verb == "insert":
            done = self.tree.insert(self.to_key(key))
            self.evicted(done.evicted, found)
            room = len(key) if capacity is None else capacity - len(self.used)
            stored = key[: len(found) + min(room, len(key) - len(found))]
            assert (done.hit, done.stored) == (len(found), len(stored))
            self.use(stored)
        elif verb == "touch":
            assert self.tree.touch(self.to_key(key)) == len(found)
            self.use(found)
        elif verb == "lock":
            lock = self.tree.locked(self.to_key(key))
            assert lock.__enter__() == len(found)
            self.locked.append((found, lock))
        elif verb == "unlock" and self.locked:
            found, lock = self.locked.pop(len(key) % len(self.locked))
            lock.__exit__(None, None, None)
            self.use(found)
        elif verb == "evict":
            before = len(self.used)
            leaves = self.tree.evict(len(key))
            self.evicted(leaves)
            assert sum(leaf.size for leaf in leaves) == before - len(self.used)


@pytest.mark.parametrize("capacity", [None, 7, 20])
@pytest.mark.parametrize("numbers", [False, True])
@given(st.lists(st.tuples(st.sampled_from(["insert"] * 3 + ["touch", "lock", "unlock", "evict"]), KEYS), max_size=25))
def test_the_tree_does_what_a_dict_of_prefixes_does(
    capacity: int | None, numbers: bool, steps: list[tuple[str, str]]
) -> None:
    def to_key(text: str) -> Any:
        return tuple(map(ord, text)) if numbers else text

    tree: RadixTree[Any] = RadixTree((), capacity) if numbers else RadixTree("", capacity)
    model = Model(tree, to_key)
    for verb, key in steps:
        model.step(verb, key, capacity)
        assert tree.size == len(model.used) <= (capacity or 10_000)
        assert tree.match(to_key(key)) == len(model.match(key))
        assert (to_key(key) in tree) == (key in model.used)
    while model.locked:
        model.step("unlock", "a", capacity)
    tree.evict(tree.size)
    assert (tree.size, list(tree.paths())) == (0, [])


def test_a_locked_prefix_stays_and_only_what_fits_is_stored() -> None:
    tree = RadixTree((), capacity=4)
    tree.insert((1, 2, 3))
    with tree.locked((1, 2, 9)) as held:
        done = tree.insert((7, 8, 9))
        assert (held, done.stored, done.evicted) == (2, 2, [((1, 2, 3), 1)])
    assert tree.match((1, 2, 3)) == 2
    assert tree.match((7, 8, 9)) == 2


def test_a_tree_may_be_deeper_than_python_may_call() -> None:
    tree = RadixTree("")
    for length in range(1, 1500):
        tree.insert("x" * length)
    assert (tree.size, tree.match("x" * 5000), sum(1 for _ in tree.paths())) == (1499, 1499, 1499)
    assert tree.evict(1)[0].key == "x" * 1499


@pytest.mark.parametrize("case", VECTORS["counts"])
def test_characters_are_counted_as_published(case: dict[str, Any]) -> None:
    tree = ApproximateTree()
    for text, worker in case["insert"]:
        tree.insert(text, worker)
    assert tree.counts() == case["counts"]


def test_eviction_is_as_published() -> None:
    case, tree = VECTORS["evict"], ApproximateTree()
    for text, worker in case["insert"]:
        tree.insert(text, worker)
    assert tree.counts() == case["counts_before"]
    tree.evict(case["max"])
    assert tree.counts() == case["counts_after"]
    match = tree.match(case["match"]["text"])
    assert case["match"]["text"][: match.length] == case["match"]["matched"]
    assert match.workers == (case["match"]["worker"],)


def test_matches_for_one_worker_are_as_published() -> None:
    case, tree = VECTORS["match_for_worker"], ApproximateTree()
    for text, worker in case["insert"]:
        tree.insert(text, worker)
    for text, worker, matched in case["cases"]:
        assert text[: tree.match(text, among={worker}).length] == matched


def test_an_empty_tree_matches_nothing_as_published() -> None:
    match = ApproximateTree().match(VECTORS["empty"]["text"])
    assert (match.length, match.workers) == (len(VECTORS["empty"]["matched"]), ())


INSERTS = st.lists(st.tuples(KEYS, st.sampled_from(WORKERS), st.sampled_from(["s", "t"])), max_size=30)


@given(INSERTS, KEYS)
def test_the_tree_does_what_lists_of_texts_do(inserts: list[tuple[str, str, str]], asked: str) -> None:
    tree = ApproximateTree()
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
    tree, whole = ApproximateTree(), ApproximateTree()
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


@given(st.lists(KEYS, max_size=25), st.integers(0, 30))
def test_with_one_worker_eviction_is_that_of_the_radix_tree(texts: list[str], limit: int) -> None:
    tree, other = ApproximateTree(), RadixTree("")
    for text in texts:
        tree.insert(text, "w")
        other.insert(text)
    tree.evict(limit)
    other.evict(other.size - limit)
    assert tree.characters("w") == other.size
    assert [tree.match(text).length for text in texts] == [other.match(text) for text in texts]


def test_many_short_texts_are_bounded_by_nodes() -> None:
    """Each text takes few characters and much memory; another worker's texts split the nodes of the first one."""
    tree = ApproximateTree(max_nodes=100)
    for number in range(500):
        tree.insert(f"{number:04}-first", "w1", scope=str(number % 7))
        tree.insert(f"{number:04}-other", "w2", scope=str(number % 7))
        assert tree.nodes <= 200
    assert tree.match("0499-first", "2").workers == ("w1",)
    assert tree.match("0000-first", "0").length < 4
