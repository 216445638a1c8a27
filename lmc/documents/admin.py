"""Administration of documents while an engine or a cache server runs: lists, pins, time limits, names, removal."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmc.background import Background
from lmc.documents.keeper import DocumentKeeper
from lmc.documents.known import PREVIEW_CHARACTERS, KnownDocument, KnownDocuments
from lmc.documents.names import joined_names, names_in
from lmc.documents.table import ALL, Filter, Use
from lmc.errors import InputError, NotFound
from lmc.keys import LONGEST_NAME, MAX_TTL_SECONDS, tokens_digest
from lmc.storage.contract import ChunkStore

ID_DIGITS = 12  # digits of an id that messages show
MIN_PREFIX_LENGTH = 6  # characters; a shorter string that is a document's name is not looked up as the start of ids
MAX_SHOWN_IDS = 3  # candidate ids in an error message
PREVIEW_TOKENS = 30  # leading tokens of a document whose text a list shows
DEFAULT_LIST_LENGTH = 100  # documents

Facts = Mapping[str, Any]


class DocumentChange(BaseModel):
    """A change of documents: pin, time limit or names."""

    model_config = ConfigDict(extra="forbid")
    pinned: bool | None = None
    ttl: Annotated[float, Field(gt=0, lt=MAX_TTL_SECONDS)] | None = None  # seconds
    name: Annotated[str, Field(max_length=LONGEST_NAME)] = ""
    add_names: Annotated[str, Field(max_length=LONGEST_NAME, description="more names, each on a line")] = ""


class DocumentSource(Protocol):
    """A source of documents, with their keeper and the store of their chunks: a cache engine, or a server's arena."""

    known: KnownDocuments

    @property
    def keeper(self) -> DocumentKeeper:
        """The keeper of the documents' pins and time limits."""

    @property
    def store(self) -> ChunkStore:
        """The store of the documents' chunks."""

    def owns(self, document: KnownDocument) -> bool:
        """Whether a document belongs to this source. Several sources may know a document."""


class DocumentAdmin:
    """Lists and changes the documents of some sources. Any thread may call any method.

    With a `tenant`, a call sees only that tenant's documents. Its duration does not depend on other tenants' documents.
    """

    def __init__(
        self,
        sources: Callable[[], Sequence[DocumentSource]],
        text: Callable[[list[int], str], str | None],
        background: Background,
    ) -> None:
        """`text` decodes tokens, given the name of their model; None if it cannot."""
        self._sources, self._text, self._background = sources, text, background

    def listed(
        self, limit: int = DEFAULT_LIST_LENGTH, after: str = "", only: Filter = ALL, tenant: str | None = None
    ) -> Facts:
        """Return the known documents that pass a filter, most recently used first; see `page`."""
        page = self.page(limit, after, only, tenant)
        return page._asdict() | {"documents": list(page.documents)}

    def page(self, limit: int, after: str = "", only: Filter = ALL, tenant: str | None = None) -> "Page":
        """Return a page of the list of documents that pass a filter, most recently used first.

        It begins after the place `after`, which is `next` of an earlier page. Documents that were used since then have
        moved to the beginning of the list. Raises `InputError` for another text.
        """
        place, sources = Use.parse(after) if after else None, self._sources()
        lists = [source.known.latest(limit + 1, place, only, tenant) for source in sources]
        if len(sources) == 1:
            ((total, documents),) = lists
        else:
            total, documents = self._count(only, tenant), _merged(documents for _, documents in lists)
        following = str(Use.of(documents[limit - 1])) if len(documents) > limit else ""
        documents = documents[:limit]
        if len(sources) > 1:  # If another source has seen a later use, the document was on an earlier page.
            documents = [one for one in documents if all(copy.used <= one.used for copy in self._copies(one.id))]
        matches = self._matches(documents)
        _refresh(matches)
        return Page(total, following, (self._described(match) for match in self._background.gently(matches)))

    def count(self) -> int:
        """Return the number of known documents."""
        sources = self._sources()
        return sources[0].known.count() if len(sources) == 1 else self._count(ALL, None)

    def show(self, name: str, tenant: str | None = None) -> Facts:
        """Return the documents with this name, or the one whose id begins with it. Raises `InputError` without one."""
        matches = self._find(name, tenant)
        _refresh(matches)
        return {"documents": [self._described(match) | self._contents(match.known) for match in matches]}

    def change(self, name: str, changes: Facts, tenant: str | None = None) -> Facts:
        """Pin documents (`pinned`: true or false), set their time limit (`ttl`: seconds, or null), or `name` them.

        A `name` replaces all names, and `add_names` adds some, each on a line. Raises `InputError` as `show` does, and
        if the pin quota is exceeded.
        """
        try:
            change = DocumentChange.model_validate(changes, strict=True)
        except ValidationError:
            of_names = f"name or add_names (up to {LONGEST_NAME} characters)"
            fields = f"pinned (true or false), ttl (seconds above 0, or null), {of_names}"
            raise InputError(f"invalid change of documents {dict(changes)}: use only {fields}") from None
        matches = self._find(name, tenant)
        for source, documents in _by_source([(match.sources[0], match.known) for match in matches]):
            if change.pinned is not None:
                (source.keeper.pin if change.pinned else source.keeper.unpin)(documents)
            if "ttl" in change.model_fields_set:
                source.keeper.expire(documents, change.ttl)
            if change.name or change.add_names:
                for document in documents:
                    names = names_in(change.name) or document.names
                    source.known.rename(document, joined_names([*names, *names_in(change.add_names)]))
                source.keeper.renamed(documents)
        if not (changed := self._matches(match.known for match in matches)):
            raise NotFound(f"document {name!r} was removed in the meantime")
        return {"documents": [self._described(match) for match in changed]}

    def remove(self, name: str, tenant: str | None = None) -> Facts:
        """Remove documents from all tiers. Raises `InputError` as `show` does."""
        matches = self._find(name, tenant)
        copies = [(source, source.known.get(match.known.id)) for match in matches for source in match.sources]
        for source, documents in _by_source(
            [(source, document) for source, document in copies if document is not None]
        ):
            source.keeper.remove(documents)
        return {"removed": [match.known.id for match in matches]}

    def _count(self, only: Filter, tenant: str | None) -> int:
        """Return the number of documents that pass a filter, in any source. Several sources may have one document."""
        ids = np.concatenate([np.empty(0, np.uint64), *(one.known.ids(only, tenant) for one in self._sources())])
        ids.sort()  # `np.unique` takes a hundred times as long.
        return int(np.count_nonzero(np.diff(ids))) + bool(len(ids))

    def _copies(self, name: str) -> list[KnownDocument]:
        """Return what the sources know of the document with this id."""
        copies = (source.known.get(name) for source in self._sources())
        return [copy for copy in copies if copy is not None and not copy.removed]

    def _matches(self, documents: Iterable[KnownDocument]) -> list["_Match"]:
        """Return documents with all sources that know them, except those that were removed in the meantime."""
        matches, sources = [], self._sources()
        for document in documents:
            copies = [(source, copy) for source in sources if (copy := source.known.get(document.id))]
            copies = [(source, copy) for source, copy in copies if not copy.removed]
            if owned := sorted(copies, key=lambda copy: not copy[0].owns(copy[1])):
                matches.append(_Match(owned[0][1], [source for source, _ in owned]))
        return matches

    def _find(self, name: str, tenant: str | None) -> list["_Match"]:
        if exact := [copy for copy in self._copies(name.lower()) if tenant in (None, copy.tenant)]:
            return self._matches(exact[:1])
        named, prefixed = dict[str, KnownDocument](), dict[str, KnownDocument]()
        for known in [source.known for source in self._sources() if name.strip()]:
            named |= {document.id: document for document in known.named(name, tenant)}
            prefixed |= {document.id: document for document in known.with_digits(name.lower(), tenant)}
        prefixed = (
            {} if named and len(name) < MIN_PREFIX_LENGTH else {i: d for i, d in prefixed.items() if i not in named}
        )
        if len(prefixed) > 1 or bool(named) == bool(prefixed):
            ids = ", ".join(one[:ID_DIGITS] for one in (*named, *prefixed)[:MAX_SHOWN_IDS])
            count = len(named) + len(prefixed)
            if not count:
                raise NotFound(f"unknown document {name!r}: `lmc documents list` shows names and ids")
            hint = f"use more digits of an id, such as {ids}" if prefixed else "use an id from `lmc documents list`"
            raise InputError(f"{count} known documents have the name {name!r}, or an id that begins with it: {hint}")
        if len({document.namespace for document in named.values()}) > 1:
            ids = ", ".join(one[:ID_DIGITS] for one in named)
            raise InputError(f"documents of several tenants or models have the name {name!r}: use an id ({ids})")
        return self._matches((named or prefixed).values())

    def _described(self, match: "_Match") -> dict[str, Any]:
        document = match.known
        begins = document.begins
        if not begins:
            text, readable = self._text_of(document, PREVIEW_TOKENS)
            begins = " ".join(text.split())[:PREVIEW_CHARACTERS]
            document.begins = begins if readable else ""
        places = (place for source in match.sources for place in source.store.copies(document.keys))
        return {
            "id": document.id,
            "name": document.first_name,
            "names": document.names,
            "tokens": len(document.tokens),
            "begins": begins,
            "places": list(dict.fromkeys(places)),
            "uses": document.uses,
            "used": document.used,
            "pinned": document.pinned,
            "expires": document.expires,
            "model": document.model,
            "tenant": document.tenant,
            "digest": tokens_digest(document.tokens),
        }

    def _contents(self, document: KnownDocument) -> dict[str, Any]:
        return {"text": self._text_of(document)[0], "token_ids": document.tokens.tolist()}

    def _text_of(self, document: KnownDocument, tokens: int | None = None) -> tuple[str, bool]:
        """Return the text of a document's first tokens, and True. Without a text, return the token ids, and False."""
        ids = document.tokens[:tokens].tolist()
        text = self._text(ids, document.model)
        return (" ".join(map(str, ids)), False) if text is None else (text, True)


class Page(NamedTuple):
    """A page of a list of documents."""

    total: int  # number of documents in all pages
    next: str  # the place after which the next page begins; empty on the last page
    documents: Iterator[Facts]


class _Match(NamedTuple):
    """A document, and the sources that know it. The source to which it belongs comes first."""

    known: KnownDocument
    sources: Sequence[DocumentSource]


def _merged(lists: Iterable[Sequence[KnownDocument]]) -> Sequence[KnownDocument]:
    """Return the documents of some lists, each once with its latest use, most recently used first."""
    by_id: dict[str, KnownDocument] = {}
    for document in chain.from_iterable(lists):
        by_id[document.id] = max(document, by_id.get(document.id, document), key=Use.of)
    return sorted(by_id.values(), key=Use.of, reverse=True)


def _refresh(matches: Sequence[_Match]) -> None:
    for source, documents in _by_source([(match.sources[0], match.known) for match in matches]):
        source.keeper.refresh(documents)


def _by_source(pairs: list[tuple[DocumentSource, KnownDocument]]) -> list[tuple[DocumentSource, list[KnownDocument]]]:
    sources = {id(source): source for source, _ in pairs}
    return [(source, [document for owner, document in pairs if owner is source]) for source in sources.values()]
