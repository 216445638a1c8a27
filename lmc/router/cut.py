"""Cuts prompts for the router into the documents that engines cache, and the blocks of the prompt's prefix.

Without tokens, a prompt is cut at the separator in its text. Token counts are then estimated, and a document is
identified by its text without surrounding white space. Documents elsewhere in the prompt are found before
(`lmc.router.document_search`).
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import xxhash

from lmc.blend.markers import Markers
from lmc.blend.segments import split
from lmc.keys import tenant_of, tokens_digest
from lmc.router.policy_types import FoundDocument, PromptRequest
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN, byte_blocks, chained, encoded

# From a model, a text and a tenant to the digest and the number of tokens of a document, if they are known.
Find = Callable[[str, str, str], tuple[str, int] | None]
# Called with each document between separators: tenant, content, digest, number of tokens, text or tokens, and model.
Note = Callable[[str, bytes, str, float, str | Sequence[int], str], None]

HOW = SEPARATED, FOUND_BY_TOKENS, FOUND_BY_WORDS = "separators", "tokens", "words"  # how documents in prompts are found

ROLE = "\0"  # encloses the role of a message in the text of a conversation
BLOCK_CHARACTERS = 512  # characters of a block where tokens are unknown
BLOCK_TOKENS = 128  # tokens of a block where they are known
CHARACTER_RATE_WEIGHT = 0.05  # weight of the last answer in the measured characters per token
MIN_RATE, MAX_RATE = 0.5, 12.0  # characters per token; values beyond are not from text
MAX_SCOPES = 10_000  # whose characters per token are remembered
# Limits for the part of a prompt that is read. No engine takes more, and cutting must not delay other requests.
MAX_TOKENS, MAX_CHARACTERS, MAX_DOCUMENTS = 1_000_000, 4_000_000, 1000
MAX_SEARCHED_CHARACTERS = 30_000_000  # characters searched for the documents that a request names
# A document between separators is a known one if at most this much of it is different.
SEAM_TOKENS, SEAM_CHARACTERS = 4, 32


@dataclass(frozen=True, slots=True)
class CutDocument:
    """A document in a prompt."""

    key: bytes  # hash of its tokens or text, its model and its tenant
    tokens: float
    stop: float  # tokens of the prompt up to the document's end
    digest: str = ""  # digest of its tokens, as in engines' events; empty while unknown
    how: str = SEPARATED  # how it was found; engines learn only documents between separators


# A document, and its place in the prompt's tokens or characters.
PlacedDocument = tuple[range, CutDocument]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The parts of a prompt that an engine may have cached."""

    tokens: float
    documents: tuple[CutDocument, ...]
    blocks: tuple[int, ...]  # hashes; each covers the prompt from its start
    block_tokens: float
    tenant: str  # as in engines' events


def tenant(request: PromptRequest) -> str:
    """Return the tenant of a request, as in engines' events."""
    return tenant_of(request.salt.encode("utf-8", "replace").decode())


@dataclass(slots=True)
class Cutter:
    """Cuts prompts: by tokens where they and the model's `markers` are known, else by text."""

    special_string: str = " # # "
    markers: dict[str, Markers] = field(default_factory=dict)  # by model
    special_strings: dict[str, str] = field(default_factory=dict)  # by model, as reported by engines
    find: Find | None = None
    note: Note | None = None
    # Characters per token by scope, measured from answers: a tenant's texts never count for another tenant.
    rates: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def cut(self, request: PromptRequest) -> Cut:
        """Return the parts of a request's prompt."""
        seed, rate = xxhash.xxh3_64_intdigest(encoded(request.scope)), self.characters_per_token(request.scope)
        if request.tokens and request.text:
            rate = len(request.text) / len(request.tokens)
        if by_tokens := self.reads_tokens(request):
            assert request.tokens is not None
            cut = request.tokens[:MAX_TOKENS]
            packed = array("I", cut)
            tokens, documents = float(len(request.tokens)), self._by_tokens(request, cut, packed, seed)
            if request.documents and request.text:  # They have no separators around them.
                documents = self._by_text(request, seed, rate)
            content, size, block_tokens = packed.tobytes(), 4 * BLOCK_TOKENS, float(BLOCK_TOKENS)
        else:
            tokens = max(1.0, len(request.text) / rate, request.unread_tokens)
            documents = self._by_text(request, seed, rate)
            # The encoding has 4 bytes per character, as a token has in the other case.
            content = request.text[:MAX_CHARACTERS].encode("utf-32-le", "surrogatepass")
            size, block_tokens = 4 * BLOCK_CHARACTERS, BLOCK_CHARACTERS / rate
        places = list(islice(documents, MAX_DOCUMENTS))
        if request.found:
            places = with_found(places, request.found, seed, 0.0 if by_tokens else rate)[:MAX_DOCUMENTS]
        return Cut(
            tokens=tokens,
            documents=tuple(document for _, document in places),
            blocks=tuple(chained(byte_blocks(content, size), request.scope)),
            block_tokens=block_tokens,
            tenant=tenant(request),
        )

    def reads_tokens(self, request: PromptRequest) -> bool:
        """Return whether a prompt is cut by its tokens, and not by its text."""
        return request.tokens is not None and (request.model in self.markers or not request.text)

    def special_string_of(self, model: str) -> str:
        """Return the separator that a model's engines reported, or that of the settings."""
        return self.special_strings.get(model, self.special_string)

    def characters_per_token(self, scope: str) -> float:
        """Return the estimated characters per token of a model and a tenant."""
        return self.rates.get(scope, CHARACTERS_PER_TOKEN)

    def counted(self, scope: str, characters: int, tokens: int) -> None:
        """Update the estimated characters per token of a scope with the token count of a text."""
        if characters > 0 and tokens > 0:
            rate, measured = self.characters_per_token(scope), min(max(characters / tokens, MIN_RATE), MAX_RATE)
            self.rates[scope] = rate + (measured - rate) * CHARACTER_RATE_WEIGHT
            self.rates.move_to_end(scope)
            if len(self.rates) > MAX_SCOPES:
                self.rates.popitem(last=False)

    def _by_tokens(
        self, request: PromptRequest, tokens: Sequence[int], packed: "array[int]", seed: int
    ) -> Iterator[PlacedDocument]:
        markers = self.markers.get(request.model)
        for span in split(tokens, markers).documents if markers else ():
            text = packed[span.start : span.stop]
            digest = tokens_digest(text)
            content = content_of(digest)
            if self.note is not None:
                self.note(tenant(request), content, digest, len(span), text, request.model)
            document = CutDocument(key_of(content, seed), len(span), span.stop, digest)
            yield range(span.start, span.stop), document

    def _by_text(self, request: PromptRequest, seed: int, rate: float) -> Iterator[PlacedDocument]:
        owner = tenant(request)
        for part, stop in self._parts(request):
            stripped = part.strip()
            if stripped and ROLE not in stripped:
                content = content_of(stripped)
                tokenized = self.find and self.find(request.model, part, owner)
                digest, tokens = tokenized or ("", len(stripped) / rate)
                if self.note is not None:
                    size = tokens if digest else 0.0
                    self.note(owner, content, digest, size, stripped, request.model)
                document = CutDocument(key_of(content, seed), tokens, stop / rate, digest)
                yield range(stop - len(part), stop), document

    def _parts(self, request: PromptRequest) -> list[tuple[str, int]]:
        """Return the texts that may be documents, with their ends in the prompt."""
        prompt = request.text[:MAX_CHARACTERS]
        if request.documents:
            named = request.documents[: min(MAX_DOCUMENTS, MAX_SEARCHED_CHARACTERS // (len(prompt) + 1))]
            positions = [(text, prompt.find(text)) for text in named]
            return [(text, at + len(text)) for text, at in positions if at >= 0]
        bare, parts, at = self.special_string_of(request.model).strip(), [], 0
        for piece in prompt.split(bare, MAX_DOCUMENTS + 1):
            at += len(piece)
            parts.append((piece, at))
            at += len(bare)
        return parts[1:-1]


def content_of(text: str) -> bytes:
    """Return what identifies a document, from its text, or from the digest of its tokens."""
    return xxhash.xxh3_128_digest(encoded(text.strip()))


def key_of(content: bytes, seed: int) -> bytes:
    """Return the key of a document from what identifies its tokens or text, and the hash of its model and tenant."""
    return xxhash.xxh3_128_digest(content, seed=seed)


def with_found(
    separated: Sequence[PlacedDocument], found: Sequence[FoundDocument], seed: int, rate: float
) -> list[PlacedDocument]:
    """Return the documents between separators, and those found elsewhere. Both are in the order of the prompt.

    A document between separators that is a known one, except for its ends, becomes the known one, as in engines.
    `rate` is the number of characters per token; 0 if places are in tokens.
    """
    places, stops = list(separated), [place.stop for place, _ in separated]
    how, seam = (FOUND_BY_WORDS, SEAM_CHARACTERS) if rate else (FOUND_BY_TOKENS, SEAM_TOKENS)
    for one in found:
        at, length = bisect_right(stops, one.start), one.stop - one.start
        if at == len(stops) or separated[at][0].start >= one.stop:
            tokens, stop = (length / rate, one.stop / rate) if rate else (length, one.stop)
            document = CutDocument(key_of(one.content, seed), one.size or tokens, stop, one.digest, how)
            places.append((range(one.start, one.stop), document))
        elif one.whole and one.digest and len(separated[at][0]) - length <= seam:
            place, document = separated[at]
            places[at] = place, replace(document, digest=one.digest)
    return places
