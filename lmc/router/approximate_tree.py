"""A radix tree of the texts that workers have been sent: which worker has seen the longest prefix of a text?

This is the approximate tree of SGLang's router. Workers are tenants of nodes, and a worker that has a node has all
nodes above it. Each scope has a tree of its own, and the limits of a worker hold over all scopes.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from lmc.router.radix_tree import common_length


class PrefixMatch(NamedTuple):
    """How many characters of a text match, and the workers that have seen them, in the order in which they did."""

    length: int
    workers: tuple[str, ...]


class _Tenancy:
    """A worker's part in a node, and its place in the order in which the worker's nodes were used."""

    __slots__ = ("newer", "node", "older")

    def __init__(self, node: "_TextNode | None" = None) -> None:
        self.node = node
        self.older = self.newer = self

    def unlink(self) -> None:
        """Leave the order."""
        self.older.newer, self.newer.older = self.newer, self.older

    def link_before(self, newer: "_Tenancy") -> None:
        """Enter the order as the next older one."""
        self.older, self.newer = newer.older, newer
        self.older.newer = newer.older = self


class _TextTree:
    """The tree of one scope."""

    __slots__ = ("counts", "root", "scope")

    def __init__(self, scope: str) -> None:
        self.scope, self.root = scope, _TextNode("", None, self)
        self.counts: Counter[str] = Counter()


class _TextNode:
    __slots__ = ("children", "edge", "parent", "tenants", "tree")

    def __init__(self, edge: str, parent: "_TextNode | None", tree: _TextTree) -> None:
        self.edge, self.parent, self.tree = edge, parent, tree
        self.children: dict[str, _TextNode] = {}
        self.tenants: dict[str, _Tenancy] = {}


class _NodesOfWorker:
    """What one worker has over all scopes.

    A node is used no earlier than those below it, so that the oldest one is always a leaf of the worker's part.
    """

    __slots__ = ("characters", "ends", "nodes")

    def __init__(self) -> None:
        self.ends = _Tenancy()  # its `newer` is the oldest tenancy, its `older` the newest
        self.characters = self.nodes = 0


class ApproximateTree:
    """Inserting and matching compare slices: the work of Python grows with the nodes of a path, not with characters."""

    def __init__(self, max_nodes: int = 1 << 18) -> None:
        """`max_nodes` is how many nodes a worker may have: short texts need more memory than their characters do."""
        self._max_nodes = max_nodes
        self._trees: dict[str, _TextTree] = {}
        self._workers: dict[str, _NodesOfWorker] = {}

    def insert(self, text: str, worker: str, scope: str = "") -> Callable[[], None]:
        """Note that a worker has been sent a text, and return what takes back the nodes that it did not have."""
        if not text:
            return lambda: None
        tree = self._trees.get(scope) or self._trees.setdefault(scope, _TextTree(scope))
        node, at, path = tree.root, 0, list[_TextNode]()
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = _TextNode(text[at:], node, tree)
            same = common_length(text, at, child.edge)
            node = child if same == len(child.edge) else self._split(child, same)
            at += same
            path.append(node)
        new = [node for node in path if worker not in node.tenants]
        self._use(path, worker)
        return lambda: self._take_back(new, worker)

    def match(self, text: str, scope: str = "", among: Collection[str] | None = None) -> PrefixMatch:
        """Return the longest prefix that one of the workers has seen, or one of those `among` which it is asked for."""
        at, workers = 0, tuple[str, ...]()
        node = (self._trees.get(scope) or _TextTree(scope)).root
        while at < len(text) and (child := node.children.get(text[at])) is not None:
            tenants = tuple(worker for worker in child.tenants if among is None or worker in among)
            if not tenants:
                break
            same = common_length(text, at, child.edge)
            at, workers, node = at + same, tenants, child
            if same < len(child.edge):
                break
        return PrefixMatch(at, workers)

    def characters(self, worker: str) -> int:
        """Return how many characters a worker has over all scopes."""
        return self._workers[worker].characters if worker in self._workers else 0

    def counts(self, scope: str = "") -> dict[str, int]:
        """Return how many characters each worker has in a scope."""
        return dict(self._trees[scope].counts) if scope in self._trees else {}

    @property
    def nodes(self) -> int:
        """The number of nodes of all workers; a node that several have counts for each."""
        return sum(of.nodes for of in self._workers.values())

    def evict(self, max_characters: int) -> None:
        """Evict the least recently used leaves of each worker that has more characters than that."""
        for worker in list(self._workers):
            while self.characters(worker) > max_characters:
                self._evict_leaf(worker)

    def remove(self, worker: str) -> None:
        """Drop everything that a worker has."""
        while worker in self._workers:
            self._evict_leaf(worker)

    def _use(self, path: list[_TextNode], worker: str) -> None:
        """Note that a worker has the nodes of a path, and has used them now."""
        of = self._workers.setdefault(worker, _NodesOfWorker())
        for node in reversed(path):
            tenancy = node.tenants.get(worker)
            if tenancy is None:
                tenancy = node.tenants[worker] = _Tenancy(node)
                node.tree.counts[worker] += len(node.edge)
                of.characters += len(node.edge)
                of.nodes += 1
            else:
                tenancy.unlink()
            tenancy.link_before(of.ends)
        for name, nodes in list(self._workers.items()):  # A split gives a node more to other workers as well.
            while nodes.nodes > self._max_nodes:
                self._evict_leaf(name)

    def _take_back(self, nodes: list[_TextNode], worker: str) -> None:
        """Drop a worker's part of nodes, from the last to the first, unless it has been sent more of the text since."""
        for node in reversed(nodes):
            tenancy = node.tenants.get(worker)
            if tenancy and not any(worker in child.tenants for child in node.children.values()):
                self._drop(tenancy, worker)

    def _split(self, node: _TextNode, at: int) -> _TextNode:
        """Cut the edge of a node, and return the new node that has the first `at` characters of it.

        Both parts have the node's tenants, and for each of them the age of the node.
        """
        assert node.parent is not None
        upper = _TextNode(node.edge[:at], node.parent, node.tree)
        node.parent.children[upper.edge[0]] = upper
        node.edge, node.parent = node.edge[at:], upper
        upper.children[node.edge[0]] = node
        for worker, tenancy in node.tenants.items():
            upper.tenants[worker] = _Tenancy(upper)
            upper.tenants[worker].link_before(tenancy.newer)
            self._workers[worker].nodes += 1
        return upper

    def _evict_leaf(self, worker: str) -> None:
        """Take the worker's part of the node that it has used least recently."""
        self._drop(self._workers[worker].ends.newer, worker)

    def _drop(self, tenancy: _Tenancy, worker: str) -> None:
        """Take a worker's part of a node, and the node if nobody else has it."""
        of, node = self._workers[worker], tenancy.node
        assert node is not None
        tree = node.tree
        tenancy.unlink()
        del node.tenants[worker]
        of.characters -= len(node.edge)
        of.nodes -= 1
        tree.counts[worker] -= len(node.edge)
        if not tree.counts[worker]:
            del tree.counts[worker]
        if not of.nodes:
            del self._workers[worker]
        if not node.tenants:
            assert node.parent is not None
            del node.parent.children[node.edge[0]]
        if not tree.counts:
            del self._trees[tree.scope]
