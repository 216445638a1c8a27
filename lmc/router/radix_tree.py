"""A radix tree of token sequences or texts: longest prefixes, a limit on its size, and the least used leaves go first.

This is the tree of RadixAttention (SGLang) as a data structure of its own. It holds keys and no values, and is not
limited to routing.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", str, tuple[int, ...])


def common_length(key: K, start: int, edge: K) -> int:
    """Return how many elements of `edge` stand in `key` from `start` on. It compares slices, in O(len(edge))."""
    length = min(len(edge), len(key) - start)
    if key[start : start + length] == edge[:length]:
        return length
    same, differs = 0, length  # key[start:][:same] is as in the edge, key[start:][:differs] is not
    while differs - same > 1:
        middle = (same + differs) // 2
        if key[start + same : start + middle] == edge[same:middle]:
            same = middle
        else:
            differs = middle
    return same


class EvictedLeaf(NamedTuple, Generic[K]):
    """The end of a key that has been evicted; what comes before it is still there."""

    key: K
    size: int  # how many elements at the end of `key` went

    @property
    def piece(self) -> K:
        """The elements that went."""
        return self.key[len(self.key) - self.size :]


class Insertion(NamedTuple, Generic[K]):
    """What an insert found and did."""

    hit: int  # elements that were there before
    stored: int  # elements that are there now: fewer than the key has if no more could be evicted
    evicted: list[EvictedLeaf[K]]  # in the order in which they went


class _RadixNode(Generic[K]):
    __slots__ = ("children", "edge", "locks", "parent")

    def __init__(self, edge: K, parent: "_RadixNode[K] | None", locks: int = 0) -> None:
        self.edge: K = edge
        self.parent: _RadixNode[K] | None = parent
        self.locks = locks
        self.children: dict[str | int, _RadixNode[K]] = {}


class RadixTree(Generic[K]):
    """Keys are strings or tuples of integers, and one tree has one kind of them.

    No thread safety. Inserting, matching and touching are O(len(key)), evicting a leaf is O(1) and the length of its
    key. Each prefix of a key that is in the tree is in the tree as well.
    """

    def __init__(self, empty: K, capacity: int | None = None) -> None:
        """`empty` is the key of no elements: `""` or `()`. `capacity` is how many elements there may be, if limited."""
        self._root: _RadixNode[K] = _RadixNode(empty, None)
        self._capacity, self._size = capacity, 0
        # Nodes that are not locked. Each is used no earlier than those below it, and nodes above a locked one are
        # locked, so that the first one is always a leaf, and nobody has to look for leaves.
        self._order: OrderedDict[_RadixNode[K], None] = OrderedDict()

    @property
    def size(self) -> int:
        """The number of elements in the tree; a common prefix counts once."""
        return self._size

    def __contains__(self, key: K) -> bool:
        return self.match(key) == len(key)

    def paths(self) -> Iterator[list[K]]:
        """Yield the edges from the root to each node."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield [above.edge for above in self._up(node)][::-1]
            waiting += node.children.values()

    def match(self, key: K) -> int:
        """Return the length of the longest prefix of `key` that is in the tree. Nothing changes."""
        node, at = self._root, 0
        while at < len(key) and (child := node.children.get(key[at])) is not None:
            same = common_length(key, at, child.edge)
            at += same
            if same < len(child.edge):
                break
            node = child
        return at

    def touch(self, key: K) -> int:
        """Note a use of the longest prefix of `key` that is in the tree, and return its length."""
        node, hit = self._reach(key)
        self._use(node)
        return hit

    def insert(self, key: K) -> Insertion[K]:
        """Put a key into the tree, and evict what was least recently used if it needs the room.

        If all that may be evicted is not enough, the longest prefix for which there is room is stored.
        """
        end, hit = self._reach(key)
        self._lock(end)
        missing, evicted = len(key) - hit, list[EvictedLeaf[K]]()
        if self._capacity is not None:
            evicted = self.evict(self._size + missing - self._capacity)
            missing = min(missing, self._capacity - self._size)
        if missing:
            leaf = _RadixNode(key[hit : hit + missing], end)
            end.children[key[hit]] = leaf
            self._order[leaf] = None
            self._size += missing
        self._unlock(end)
        return Insertion(hit, hit + missing, evicted)

    def evict(self, amount: int) -> list[EvictedLeaf[K]]:
        """Evict leaves that are not locked, the least recently used one first, until `amount` elements are gone."""
        evicted = []
        goal = self._size - amount
        while self._size > goal and self._order:
            leaf, _ = self._order.popitem(last=False)
            assert leaf.parent is not None
            assert not leaf.children
            evicted.append(EvictedLeaf(self._key(leaf), len(leaf.edge)))
            del leaf.parent.children[leaf.edge[0]]
            self._size -= len(leaf.edge)
        return evicted

    @contextmanager
    def locked(self, key: K) -> Iterator[int]:
        """Keep the longest prefix of `key` that is in the tree from being evicted; the value is its length."""
        end, hit = self._reach(key)
        self._lock(end)
        try:
            yield hit
        finally:
            self._unlock(end)

    def _reach(self, key: K) -> tuple[_RadixNode[K], int]:
        """Return the node at which the longest prefix of `key` ends, and its length. An edge is split if it has to be.

        The caller uses or locks the path, which gives a node that a split has made its place in the order.
        """
        node, at = self._root, 0
        while at < len(key) and (child := node.children.get(key[at])) is not None:
            same = common_length(key, at, child.edge)
            node = child if same == len(child.edge) else self._split(child, same)
            at += same
            if node is not child:
                break
        return node, at

    def _split(self, node: _RadixNode[K], at: int) -> _RadixNode[K]:
        """Cut the edge of a node, and return the new node that has the first `at` elements of it.

        The node keeps its end, because locks are given back from the end of what they hold.
        """
        assert node.parent is not None
        upper = _RadixNode(node.edge[:at], node.parent, node.locks)
        node.parent.children[upper.edge[0]] = upper
        node.edge, node.parent = node.edge[at:], upper
        upper.children[node.edge[0]] = node
        return upper

    def _up(self, node: _RadixNode[K]) -> Iterator[_RadixNode[K]]:
        """Yield a node and those above it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _use(self, end: _RadixNode[K]) -> None:
        for node in self._up(end):
            if not node.locks:
                self._order[node] = None
                self._order.move_to_end(node)

    def _lock(self, end: _RadixNode[K]) -> None:
        for node in self._up(end):
            node.locks += 1
            self._order.pop(node, None)

    def _unlock(self, end: _RadixNode[K]) -> None:
        for node in self._up(end):
            node.locks -= 1
        self._use(end)

    def _key(self, end: _RadixNode[K]) -> K:
        key = self._root.edge
        for node in self._up(end):
            key = node.edge + key
        return key
