"""Administration of documents while an engine or a cache server runs: lists, pins, time limits, names, removal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lmc.background import Background
from lmc.documents.keeper import DocumentKeeper
from lmc.documents.known import SHOWN, KnownDocument, KnownDocuments
from lmc.errors import InputError, NotFound
from lmc.keys import LONGEST_NAME, tokens_digest
from lmc.storage.contract import ChunkStore

ID_DIGITS = 12  # digits of an id that messages show
SHORT = 6  # characters; a shorter string that is a name is not looked up as the beginning of ids
SOME = 3  # maximum number of candidate ids in an error message
BEGINNING = 30  # leading tokens of a document whose text a list shows
LISTED = 100  # default number of documents in a list
LONGEST = 100 * 365 * 86400  # time limits are shorter than this many seconds

Facts = Mapping[str, Any]


class Shelf(Protocol):
    """A source of documents, with their keeper and the store of their chunks: a cache engine, or a server's arena."""

    known: KnownDocuments

    @property
    def keeper(self) -> DocumentKeeper:
        """The keeper of the documents' pins and time limits."""

    @property
    def store(self) -> ChunkStore:
        """The store of the documents' chunks."""

    def owns(self, document: KnownDocument) -> bool:
        """Whether a document belongs to this shelf. Several shelves may know a document."""


class DocumentDesk:
    """Lists and changes the documents of some shelves. Any thread may call any method.

    With a `tenant`, a call sees only that tenant's documents. Its duration does not depend on other tenants' documents.
    """

    def __init__(
        self,
        shelves: Callable[[], Sequence[Shelf]],
        text: Callable[[list[int], str], str | None],
        background: Background,
    ) -> None:
        """`text` decodes tokens, given the name of their model; None if it cannot."""
        self._shelves, self._text, self._background = shelves, text, background

    def listed(self, limit: int = LISTED, tenant: str | None = None) -> Facts:
        """Return the known documents, most recently used first."""
        total, documents = self.listing(limit, tenant)
        return {"documents": list(documents), "total": total}

    def listing(self, limit: int, tenant: str | None = None) -> tuple[int, Iterator[Facts]]:
        """Return the number of known documents, and descriptions of up to `limit` of them."""
        known = self._known(tenant)
        _refresh(known[:limit])
        return len(known), (self._described(one) for one in self._background.gently(known[:limit]))

    def count(self) -> int:
        """Return the number of known documents."""
        shelves = self._shelves()
        return shelves[0].known.count() if len(shelves) == 1 else len(self._known(None))

    def show(self, name: str, tenant: str | None = None) -> Facts:
        """Return the documents with this name, or the one whose id begins with it. Raises `InputError` without one."""
        found = self._find(name, tenant)
        _refresh(found)
        return {"documents": [self._described(one) | {"text": self._text_of(one.known)[0]} for one in found]}

    def change(self, name: str, wanted: Facts, tenant: str | None = None) -> Facts:
        """Pin documents (`pinned`: true or false), set their time limit (`ttl`: seconds, or null), or `name` them.

        Raises `InputError` as `show` does, and if the pin quota is exceeded.
        """
        pinned, ttl, title = wanted.get("pinned"), wanted.get("ttl"), wanted.get("name", "")
        number = isinstance(ttl, int | float) and not isinstance(ttl, bool) and 0 < ttl < LONGEST
        text = isinstance(title, str) and len(title) <= LONGEST_NAME
        right = isinstance(pinned, bool | None) and (ttl is None or number) and text
        if not right or not wanted.keys() <= {"pinned", "ttl", "name"}:
            letters = f"a text of up to {LONGEST_NAME} letters"
            raise InputError(f"give pinned (true or false), ttl (seconds, more than 0, or null), or name ({letters})")
        found = self._find(name, tenant)
        for one in found if title else ():
            one.known.name = title
        for shelf, some in _by_shelf([(one.shelves[0], one.known) for one in found]):
            if pinned is not None:
                (shelf.keeper.pin if pinned else shelf.keeper.unpin)(some)
            if "ttl" in wanted:
                shelf.keeper.expire(some, ttl)
            if title:
                shelf.keeper.renamed(some)
        return {"documents": [self._described(one) for one in found]}

    def remove(self, name: str, tenant: str | None = None) -> Facts:
        """Remove documents from all tiers. Raises `InputError` as `show` does."""
        found = self._find(name, tenant)
        everywhere = [(shelf, shelf.known.get(one.known.id)) for one in found for shelf in one.shelves]
        for shelf, some in _by_shelf([(shelf, known) for shelf, known in everywhere if known is not None]):
            shelf.keeper.remove(some)
        return {"removed": [one.known.id for one in found]}

    def _known(self, tenant: str | None) -> list["_Found"]:
        shelves = self._shelves()
        if len(shelves) == 1:
            listed = self._background.gently(shelves[0].known.list(tenant))
            return [_Found(known, shelves) for known in listed if not known.removed]
        by_id: dict[str, list[tuple[Shelf, KnownDocument]]] = {}
        for shelf in shelves:
            for known in shelf.known.list(tenant):
                if not known.removed:
                    by_id.setdefault(known.id, []).append((shelf, known))
        found = [_found(some) for some in by_id.values()]
        return sorted(found, key=lambda one: one.known.used, reverse=True)

    def _find(self, name: str, tenant: str | None) -> list["_Found"]:
        there = [(shelf, known) for shelf in self._shelves() if (known := shelf.known.get(name.lower()))]
        exact = [(shelf, one) for shelf, one in there if not one.removed and tenant in (None, one.tenant)]
        if exact:
            return [_found(exact)]
        named, begun = [], []
        for one in self._background.gently(self._known(tenant) if name.strip() else []):
            if one.known.name == name:
                named.append(one)
            elif one.known.id.startswith(name.lower()):
                begun.append(one)
        if named and len(name) < SHORT:
            begun = []
        if len(begun) > 1 or bool(named) == bool(begun):
            ids = ", ".join(one.known.id[:ID_DIGITS] for one in (*named, *begun)[:SOME])
            hint = f"give more digits of an id, as {ids}" if begun else "lmc documents list shows those that there are"
            count = len(named) + len(begun)
            have = f"{count} known documents have" if count else "no known document has"
            wrong = InputError if count else NotFound
            raise wrong(f"{have} the name {name!r}, or an id that begins with it: {hint}")
        if len({one.known.namespace for one in named}) > 1:
            ids = ", ".join(one.known.id[:ID_DIGITS] for one in named)
            raise InputError(f"documents of several tenants or models have the name {name!r}: say which ({ids})")
        return named or begun

    def _described(self, found: "_Found") -> dict[str, Any]:
        known = found.known
        begins = known.begins
        if not begins:
            text, readable = self._text_of(known, BEGINNING)
            begins = " ".join(text.split())[:SHOWN]
            known.begins = begins if readable else ""
        places = (place for shelf in found.shelves for place in shelf.store.copies(known.keys))
        return {
            "id": known.id,
            "name": known.name,
            "tokens": len(known.tokens),
            "begins": begins,
            "places": list(dict.fromkeys(places)),
            "uses": known.uses,
            "used": known.used,
            "pinned": known.pinned,
            "expires": known.expires,
            "model": known.model,
            "tenant": known.tenant,
            "digest": tokens_digest(known.tokens),
        }

    def _text_of(self, known: KnownDocument, tokens: int | None = None) -> tuple[str, bool]:
        """Return the text of a document's first tokens, and True. Without a text, return the token ids, and False."""
        some = known.tokens[:tokens].tolist()
        text = self._text(some, known.model)
        return (" ".join(map(str, some)), False) if text is None else (text, True)


class _Found(NamedTuple):
    """A document, and the shelves that know it. The shelf to which it belongs comes first."""

    known: KnownDocument
    shelves: Sequence[Shelf]


def _found(some: list[tuple[Shelf, KnownDocument]]) -> _Found:
    owned = sorted(some, key=lambda one: not one[0].owns(one[1]))
    return _Found(owned[0][1], [shelf for shelf, _ in owned])


def _refresh(found: Sequence[_Found]) -> None:
    for shelf, some in _by_shelf([(one.shelves[0], one.known) for one in found]):
        shelf.keeper.refresh(some)


def _by_shelf(found: list[tuple[Shelf, KnownDocument]]) -> list[tuple[Shelf, list[KnownDocument]]]:
    shelves = {id(shelf): shelf for shelf, _ in found}
    return [(shelf, [one for its, one in found if its is shelf]) for shelf in shelves.values()]
