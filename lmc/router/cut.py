"""Cuts prompts for the router: into the documents that engines keep, and the blocks of their beginning.

Without tokens, a prompt is cut at the special string in its text. The numbers of tokens are then estimated, and a
document is known by its text without white space around it.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from lmc.blend.markers import Markers
from lmc.blend.segments import split
from lmc.keys import tenant_of
from lmc.router.policy import PromptRequest

Find = Callable[[str, str], tuple[str, int] | None]  # of a model and a text

ROLE = "\0"  # stands before and behind the role of a message, in the text of a conversation
BLOCK_LETTERS = 512  # of a text
BLOCK_TOKENS = 128  # of tokens
LETTERS_A_TOKEN = 4.0  # until answers have shown better
RATE_MEMORY = 0.05  # of the letters of a token, what the last answer counts


@dataclass(frozen=True, slots=True)
class CutDocument:
    """A document in a prompt."""

    key: bytes  # of its text, its model and its tenant
    tokens: float
    stop: float  # how many tokens of the prompt end with it
    digest: str = ""  # of its tokens, as events of engines name it; empty while it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What of a prompt an engine may have."""

    tokens: float
    documents: tuple[CutDocument, ...]
    blocks: tuple[int, ...]  # Each stands for all tokens of the prompt up to its end.
    block_tokens: float
    tenant: str  # as events of engines name it


@dataclass(slots=True)
class Cutter:
    """Cuts prompts. With the `markers` of a model, those whose tokens are known are cut by their tokens."""

    special_string: str = " # # "
    markers: dict[str, Markers] = field(default_factory=dict)  # by model
    find: Find | None = None  # the digest and the number of tokens of a document that stands in a text
    letters_a_token: float = field(default=LETTERS_A_TOKEN)

    def cut(self, request: PromptRequest) -> Cut:
        """Return the parts of a request's prompt."""
        known = request.tokens is not None and (request.model in self.markers or not request.text)
        return self._by_tokens(request, request.tokens or ()) if known else self._by_text(request)

    def counted(self, letters: int, tokens: int) -> None:
        """Take note of how many tokens a text has turned out to have, to estimate those of others."""
        if letters > 0 and tokens > 0:
            self.letters_a_token += (letters / tokens - self.letters_a_token) * RATE_MEMORY

    def _by_tokens(self, request: PromptRequest, tokens: Sequence[int]) -> Cut:
        scope, markers = scope_of(request), self.markers.get(request.model)
        packed = array("I", tokens).tobytes()  # 4 bytes a token, as in the digest of an engine's document event
        documents = []
        for span in split(tokens, markers).documents if markers else ():
            content = packed[4 * span.start : 4 * span.stop]
            digest = hashlib.sha256(content).hexdigest()
            documents.append(CutDocument(document_key(scope, content), len(span), span.stop, digest))
        return Cut(
            tokens=len(tokens),
            documents=tuple(documents),
            blocks=_blocks(packed, scope, 4 * BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
            tenant=tenant_of(request.salt.encode("utf-8", "replace").decode()),
        )

    def _by_text(self, request: PromptRequest) -> Cut:
        scope, text, rate = scope_of(request), request.text, self.letters_a_token
        documents: list[CutDocument] = []
        for part, stop in self._parts(request):
            stripped = part.strip()
            if stripped and ROLE not in stripped:
                key = document_key(scope, stripped.encode("utf-8", "surrogatepass"))
                digest, tokens = (self.find and self.find(request.model, part)) or ("", len(stripped) / rate)
                documents.append(CutDocument(key, tokens, stop / rate, digest))
        return Cut(
            tokens=max(1.0, len(text) / rate),
            documents=tuple(documents),
            blocks=_blocks(text.encode("utf-32-le", "surrogatepass"), scope, 4 * BLOCK_LETTERS),
            block_tokens=BLOCK_LETTERS / rate,
            tenant=tenant_of(request.salt.encode("utf-8", "replace").decode()),
        )

    def _parts(self, request: PromptRequest) -> list[tuple[str, int]]:
        """Return texts that may be documents, and where they end in the prompt."""
        if request.documents:
            found = [(text, request.text.find(text)) for text in request.documents]
            return [(text, at + len(text)) for text, at in found if at >= 0]
        bare, parts, at = self.special_string.strip(), [], 0
        pieces = request.text.split(bare)
        for piece in pieces:
            at += len(piece)
            parts.append((piece, at))
            at += len(bare)
        return parts[1:-1]


def scope_of(request: PromptRequest) -> bytes:
    """Return within what keys are compared. JSON may have halves of surrogate pairs in it."""
    return request.scope.encode("utf-8", "surrogatepass")


def document_key(scope: bytes, content: bytes) -> bytes:
    """Return the key of a document: a text, or the digest of tokens, of one model and tenant."""
    return xxhash.xxh3_128_digest(content, seed=xxhash.xxh3_64_intdigest(scope))


def _blocks(content: bytes, scope: bytes, size: int) -> tuple[int, ...]:
    """Return a hash of each full block of a content, and of all that comes before it."""
    found, last = [], xxhash.xxh3_64_intdigest(scope)
    for at in range(0, len(content) - size + 1, size):
        last = xxhash.xxh3_64_intdigest(content[at : at + size], seed=last)
        found.append(last)
    return tuple(found)
