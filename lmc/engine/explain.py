"""Explains for each document of a prompt whether it would be reused, and if not, why."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmc.documents.known import PREVIEW_CHARACTERS, KnownDocument
from lmc.engine.cache_engine import CacheEngine
from lmc.engine.planner import DocumentMatch, Plan
from lmc.keys import RecordKind, common_prefix

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What happens with one document of a prompt."""

    start: int  # positions [start, stop) of the prompt
    stop: int
    text: str  # its first characters
    places: tuple[str, ...]  # the tiers of its stored chunks
    chunks: int  # number of its chunks, stored or not
    reused: bool  # also True if only its stored part is reused
    why: str  # why it is not reused, or not completely; empty if it is reused completely
    known: str = ""  # id of the known document to which these tokens are equal; empty if there is none
    name: str = ""  # its name
    first: int = 0  # its token at which they begin
    nearest: str = ""  # id of the most similar known document, if the document itself is unknown
    differs_at: int = -1  # the document's first token that differs from the nearest document's


def explain(
    engine: CacheEngine, prompt: Sequence[int], plan: Plan, salt: str, refused: str, decode: Decode
) -> list[Explanation]:
    """Return an explanation for each document in the match of a prompt's plan.

    `refused` is the reason why nothing of the prompt is blended, or empty.
    """
    planned = {piece.key for piece in plan.pieces}
    found = []
    for document in plan.match.documents:
        tokens = list(prompt[document.span.start : document.span.stop])
        places = [piece.place for piece in document.pieces]
        there = tuple(place for place in places if place is not None)
        reused = bool(planned.intersection(piece.key for piece in document.pieces)) and not refused
        why, nearest, differs = "", "", -1
        if len(there) < len(places):
            why = _why_known_no_more(engine, prompt, document, salt)
            near = None if why else engine.known.nearest(tokens, engine.namespace(RecordKind.DOCUMENT, salt))
            if near is not None:
                nearest, differs = near.id, common_prefix(tokens, near.tokens)
                why = _what_differs(tokens, near, differs, decode)
            why = why or _why_never_known(engine, document)
        elif not reused:
            why = refused or plan.note or "it lies in the prefix of the prompt, which is reused exactly"
        if not document.learnable and not there and not document.known:
            continue  # The system text: it may be a document, but rarely is.
        text = decode(tokens[:PREVIEW_CHARACTERS])[:PREVIEW_CHARACTERS]
        found.append(
            Explanation(
                start=document.span.start, stop=document.span.stop, text=text, places=there, chunks=len(places),
                reused=reused, why=why, nearest=nearest, differs_at=differs, **_known(engine, document)
            )
        )  # fmt: skip
    return found


def known_document(engine: CacheEngine, document: DocumentMatch) -> KnownDocument | None:
    """Return the known document that a document of a prompt is, or is a part of; None if it is unknown.

    A document between separators is the known one whose last chunk has the same key.
    """
    if document.known is not None or not document.pieces:
        return document.known
    return engine.known.get(document.pieces[-1].key.hex())


def _known(engine: CacheEngine, document: DocumentMatch) -> dict[str, Any]:
    """Return the facts about the known document to which a part of a prompt is equal."""
    known = known_document(engine, document)
    if known is None:
        return {}
    first = document.pieces[0].first - len(engine.prefix)
    return {"known": known.id, "name": known.first_name, "first": first}


def _why_known_no_more(engine: CacheEngine, prompt: Sequence[int], document: DocumentMatch, salt: str) -> str:
    """Return why a document is not stored although its text is known; empty if the text is unknown."""
    waiting = engine.unlearned(prompt, document, salt)
    if waiting in engine.learning:
        return "it waits to be learned"
    if waiting in engine.learning.under_way:
        return "it is being learned"
    same = engine.known.with_tokens(array("I", waiting.tokens))
    return _why_gone(engine, same, waiting.namespace) if same else ""


def _what_differs(tokens: list[int], near: KnownDocument, at: int, decode: Decode) -> str:
    """Return how a document differs from a similar known document, from the token `at` on."""
    here, there = (decode(list(one[at : at + 8])) for one in (tokens, near.tokens))
    alike = decode(tokens).split() == decode(near.tokens.tolist()).split()
    what = "the text is known with other white space" if alike else "a document that is much like it is known"
    return f"{what}: from token {at} on it has {here!r}, the known one {there!r}"


def _why_never_known(engine: CacheEngine, document: DocumentMatch) -> str:
    if document.tokens < engine.least_tokens:
        return f"it is not learned from prompts, because it has less than {engine.least_tokens} tokens"
    if not engine.settings.blend_learn:
        return "it is not learned: blend_learn is false, and no request has learned it"
    return "it is not learned yet: no request with it has ended"


def _why_gone(engine: CacheEngine, same: Sequence[KnownDocument], namespace: bytes) -> str:
    """Return why a document is not stored under a namespace. `same` are the known documents with the same text."""
    own = [known for known in same if known.namespace == namespace]
    if own:
        if own[0].removed:
            return f"it was removed ({own[0].removed})"
        away = sorted(name for name, usable in engine.stats().usable.items() if not usable)
        if away:
            return f"it was learned, and may be in {', '.join(away)}, which does not answer now"
        return "it was learned, and has been evicted: the tiers are too small for all documents"
    return why_elsewhere(engine, same)


def why_elsewhere(engine: CacheEngine, documents: Sequence[KnownDocument]) -> str:
    """Return why documents of other namespaces cannot be used."""
    tenants = set(engine.names.namespaces_of_documents())
    if any(known.namespace in tenants for known in documents):
        return "it was learned under another cache_salt, or without one, and tenants share nothing"
    return "it was learned by another model, or with other settings (dtype, chunk_size, blend_method)"
