"""What people ask about documents while an engine or a cache server runs: lists, pins, time limits, names, removal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lmc.background import Background
from lmc.engine.explain import SHOWN
from lmc.engine.keeper import DocumentKeeper
from lmc.engine.known_documents import KnownDocument, KnownDocuments
from lmc.errors import InputError
from lmc.storage.contract import ChunkStore

ID_DIGITS = 12  # of an id that people are shown
BEGINNING = 30  # tokens of a document, whose letters a list shows
LISTED = 100  # documents in a list, unless more are asked for
LONGEST = 100 * 365 * 86400  # seconds of a time limit

Facts = Mapping[str, Any]


class Shelf(Protocol):
    """Documents, who keeps them, and the store that has their chunks: a cache engine, or an arena of a server."""

    known: KnownDocuments

    @property
    def keeper(self) -> DocumentKeeper:
        """Who keeps them."""

    @property
    def store(self) -> ChunkStore:
        """Their chunks."""


class DocumentDesk:
    """Answers questions about the documents on some shelves. Any thread may call any method.

    With a `tenant`, a question sees that tenant's documents only, and takes no longer if others have more of them.
    """

    def __init__(
        self, shelves: Callable[[], Sequence[Shelf]], text: Callable[[list[int], str], str], background: Background
    ) -> None:
        """`text` turns tokens of a model, which it gets the name of, into what people can read."""
        self._shelves, self._text, self._background = shelves, text, background

    def listed(self, limit: int = LISTED, tenant: str | None = None) -> Facts:
        """Return the known documents, the one that was used last first."""
        known = self._known(tenant)
        for shelf, some in _by_shelf(known[:limit]):
            shelf.keeper.refresh(some)
        listed = [self._described(shelf, one) for shelf, one in self._background.gently(known[:limit])]
        return {"documents": listed, "total": len(known)}

    def count(self) -> int:
        """Return how many documents are known."""
        return len(self._known(None))

    def show(self, name: str, tenant: str | None = None) -> Facts:
        """Return the documents of a name, or the one whose id begins with it; raise `InputError` if there is none."""
        found = self._find(name, tenant)
        for shelf, some in _by_shelf(found):
            shelf.keeper.refresh(some)
        return {"documents": [self._described(shelf, one) | {"text": self._whole(one)} for shelf, one in found]}

    def change(self, name: str, wanted: Facts, tenant: str | None = None) -> Facts:
        """Pin documents (`pinned`: true or false), limit their time (`ttl`: seconds, or null), or `name` them.

        Raises `InputError` as `show`, and if there is no room for the pin.
        """
        pinned, ttl, title = wanted.get("pinned"), wanted.get("ttl"), wanted.get("name", "")
        number = isinstance(ttl, int | float) and not isinstance(ttl, bool) and 0 < ttl < LONGEST
        right = isinstance(pinned, bool | None) and (ttl is None or number) and isinstance(title, str)
        if not right or not wanted.keys() <= {"pinned", "ttl", "name"}:
            raise InputError("give pinned (true or false), ttl (seconds, more than 0, or null), or name (a text)")
        found = self._find(name, tenant)
        for _, one in found if title else ():
            one.name = title
        for shelf, some in _by_shelf(found):
            if pinned is not None:
                (shelf.keeper.pin if pinned else shelf.keeper.unpin)(some)
            if "ttl" in wanted:
                shelf.keeper.expire(some, ttl)
        return {"documents": [self._described(shelf, one) for shelf, one in found]}

    def remove(self, name: str, tenant: str | None = None) -> Facts:
        """Remove documents from all tiers; raise `InputError` as `show`."""
        found = self._find(name, tenant)
        for shelf, some in _by_shelf(found):
            shelf.keeper.remove(some)
        return {"removed": [one.id for _, one in found]}

    def _known(self, tenant: str | None) -> list[tuple[Shelf, KnownDocument]]:
        shelves = self._shelves()
        found = [(shelf, one) for shelf in shelves for one in shelf.known.list(tenant) if not one.removed]
        return found if len(shelves) < 2 else sorted(found, key=lambda one: one[1].used, reverse=True)

    def _find(self, name: str, tenant: str | None) -> list[tuple[Shelf, KnownDocument]]:
        for shelf in self._shelves():
            exact = shelf.known.get(name.lower())
            if exact is not None and not exact.removed and tenant in (None, exact.tenant):
                return [(shelf, exact)]
        named, begun = [], []
        for shelf, one in self._background.gently(self._known(tenant) if name.strip() else []):
            if one.name == name:
                named.append((shelf, one))
            elif one.id.startswith(name.lower()):
                begun.append((shelf, one))
        if len(begun) > 1 or bool(named) == bool(begun):
            hint = "give more digits of an id" if begun else "lmc documents list shows those that there are"
            count = len(named) + len(begun)
            raise InputError(f"{count} known documents have the name {name!r}, or an id that begins with it: {hint}")
        if len({one.namespace for _, one in named}) > 1:
            ids = ", ".join(one.id[:ID_DIGITS] for _, one in named)
            raise InputError(f"documents of several tenants or models have the name {name!r}: say which ({ids})")
        return named or begun

    def _described(self, shelf: Shelf, known: KnownDocument) -> dict[str, Any]:
        if not known.begins:
            text = self._text(known.tokens[:BEGINNING].tolist(), known.model)
            known.begins = " ".join(text.split())[:SHOWN]
        return {
            "id": known.id,
            "name": known.name,
            "tokens": len(known.tokens),
            "begins": known.begins,
            "places": shelf.store.copies(known.keys),
            "uses": known.uses,
            "used": known.used,
            "pinned": known.pinned,
            "expires": known.expires,
            "model": known.model,
            "tenant": known.tenant,
        }

    def _whole(self, known: KnownDocument) -> str:
        return self._text(known.tokens.tolist(), known.model)


def _by_shelf(found: list[tuple[Shelf, KnownDocument]]) -> list[tuple[Shelf, list[KnownDocument]]]:
    shelves = {id(shelf): shelf for shelf, _ in found}
    return [(shelf, [one for its, one in found if its is shelf]) for shelf in shelves.values()]
