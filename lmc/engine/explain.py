"""Explains for each document of a prompt whether it would be reused, and why not if it would not be."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmc.documents.known import SHOWN, KnownDocument
from lmc.engine.cache_engine import CacheEngine
from lmc.engine.planner import DocumentLookup, Plan
from lmc.keys import RecordKind

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What happens with one document of a prompt."""

    start: int  # positions [start, stop) of the prompt
    stop: int
    text: str  # how it begins
    places: tuple[str, ...]  # where its stored chunks are
    chunks: int  # how many it has, of which some may not be stored
    reused: bool  # if only as far as it is stored
    why: str  # why it is not reused, or not as a whole; empty if it is
    nearest: str = ""  # the id of the known document that is most like it, if it is not known itself
    differs_at: int = -1  # the first of its tokens that differs from the nearest one's


def explain(
    engine: CacheEngine,
    prompt: Sequence[int],
    documents: Sequence[DocumentLookup],
    plan: Plan,
    salt: str,
    refused: str,
    decode: Decode,
) -> list[Explanation]:
    """Return an explanation for each document that was looked up.

    `plan` is what would be done with the prompt; `refused` is why nothing of it is blended, if that is so.
    """
    planned = {piece.key for piece in plan.pieces}
    found = []
    for document in documents:
        tokens = list(prompt[document.span.start : document.span.stop])
        places = [piece.place for piece in document.pieces]
        there = tuple(place for place in places if place is not None)
        reused = bool(planned.intersection(piece.key for piece in document.pieces)) and not refused
        why, nearest, differs = "", "", -1
        if len(there) < len(places):
            why = _why_known_no_more(engine, prompt, document, salt)
            near = None if why else engine.known.nearest(tokens, engine.namespace(RecordKind.DOCUMENT, salt))
            if near is not None:
                nearest, differs = near.id, _first_difference(tokens, near)
                why = _what_differs(tokens, near, differs, decode)
            why = why or _why_never_known(engine)
        elif not reused:
            why = refused or plan.note or "it lies in the beginning of the prompt, which is reused exactly"
        if not document.learnable and not there:
            continue  # The system text may be a document, and mostly is none.
        text = decode(tokens[:SHOWN])[:SHOWN]
        found.append(
            Explanation(
                start=document.span.start, stop=document.span.stop, text=text, places=there, chunks=len(places),
                reused=reused, why=why, nearest=nearest, differs_at=differs,
            )
        )  # fmt: skip
    return found


def _why_known_no_more(engine: CacheEngine, prompt: Sequence[int], document: DocumentLookup, salt: str) -> str:
    """Return why a document is not stored although its text is known; nothing if it is not."""
    waiting = engine.unlearned(prompt, document.span, salt)
    if waiting in engine.learning:
        return "it waits to be learned"
    if waiting in engine.learning.under_way:
        return "it is being learned"
    same = engine.known.with_tokens(array("I", waiting.tokens))
    return _why_gone(engine, same, waiting.namespace) if same else ""


def _what_differs(tokens: list[int], near: KnownDocument, at: int, decode: Decode) -> str:
    """Return what a document has, and a known one that is like it has not, from the token `at` on."""
    here, there = (decode(list(one[at : at + 8])) for one in (tokens, near.tokens))
    alike = decode(tokens).split() == decode(near.tokens.tolist()).split()
    what = "the text is known with other white space" if alike else "a document that is much like it is known"
    return f"{what}: from token {at} on it has {here!r}, the known one {there!r}"


def _why_never_known(engine: CacheEngine) -> str:
    if not engine.settings.blend_learn:
        return "it is not learned: blend_learn is false, and no request has learned it"
    return "it is not learned yet: no request with it has ended"


def _why_gone(engine: CacheEngine, same: Sequence[KnownDocument], namespace: bytes) -> str:
    """Return why a document is not stored under a namespace, of which the same text is or was known."""
    own = [known for known in same if known.namespace == namespace]
    if own:
        if own[0].removed:
            return f"it was removed ({own[0].removed})"
        away = sorted(name for name, usable in engine.stats().usable.items() if not usable)
        if away:
            return f"it was learned, and may be in {', '.join(away)}, which does not answer now"
        return "it was learned, and has been evicted: the tiers are too small for all documents"
    tenants = {engine.namespace(RecordKind.DOCUMENT, one) for one in engine.names.salts}
    if any(known.namespace in tenants for known in same):
        return "it was learned under another cache_salt, or without one, and tenants share nothing"
    return "it was learned by another model, or with other settings (dtype, chunk_size, blend_learn_prefix)"


def _first_difference(tokens: Sequence[int], known: KnownDocument) -> int:
    pairs = enumerate(zip(tokens, known.tokens, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(known.tokens)))
