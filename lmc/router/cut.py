"""Cuts prompts for the router into the documents that engines cache, and the blocks of the prompt's beginning.

Without tokens, a prompt is cut at the special string in its text. Token counts are then estimated, and a document is
identified by its text without surrounding white space.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import xxhash

from lmc.blend.markers import Markers
from lmc.blend.segments import split
from lmc.keys import tenant_of, tokens_digest
from lmc.router.policy import PromptRequest
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN, byte_blocks, chained, encoded

# From a model, a text and a tenant to the digest and the number of tokens of a document, if they are known.
Find = Callable[[str, str, str], tuple[str, int] | None]

ROLE = "\0"  # encloses the role of a message in the text of a conversation
BLOCK_CHARACTERS = 512  # characters of a block where tokens are unknown
BLOCK_TOKENS = 128  # tokens of a block where they are known
CHARACTER_RATE_WEIGHT = 0.05  # weight of the last answer in the measured characters per token
MIN_RATE, MAX_RATE = 0.5, 12.0  # characters per token; values beyond are not from text
MAX_SCOPES = 10_000  # whose characters per token are remembered
# Limits for the part of a prompt that is read. No engine takes more, and cutting must not delay other requests.
MAX_TOKENS, MAX_CHARACTERS, MAX_DOCUMENTS = 1_000_000, 4_000_000, 1000
MAX_SEARCHED_CHARACTERS = 30_000_000  # characters searched for the documents that a request names


@dataclass(frozen=True, slots=True)
class CutDocument:
    """A document in a prompt."""

    key: bytes  # hash of its text, model and tenant
    tokens: float
    stop: float  # tokens of the prompt up to the document's end
    digest: str = ""  # digest of its tokens, as in engines' events; empty while unknown


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
    # Characters per token by scope, measured from answers: a tenant's texts never count for another tenant.
    rates: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def cut(self, request: PromptRequest) -> Cut:
        """Return the parts of a request's prompt."""
        seed, rate = xxhash.xxh3_64_intdigest(encoded(request.scope)), self.characters_per_token(request.scope)
        if request.tokens and request.text:
            rate = len(request.text) / len(request.tokens)
        if request.tokens is not None and (request.model in self.markers or not request.text):
            cut = request.tokens[:MAX_TOKENS]
            packed = array("I", cut).tobytes()
            tokens, documents = float(len(request.tokens)), self._by_tokens(request.model, cut, packed, seed)
            if request.documents and request.text:  # They have no separators around them.
                documents = self._by_text(request, seed, rate)
            content, size, block_tokens = packed, 4 * BLOCK_TOKENS, float(BLOCK_TOKENS)
        else:
            tokens, documents = max(1.0, len(request.text) / rate), self._by_text(request, seed, rate)
            # The encoding has 4 bytes per character, as a token has in the other case.
            content = request.text[:MAX_CHARACTERS].encode("utf-32-le", "surrogatepass")
            size, block_tokens = 4 * BLOCK_CHARACTERS, BLOCK_CHARACTERS / rate
        return Cut(
            tokens=tokens,
            documents=tuple(islice(documents, MAX_DOCUMENTS)),
            blocks=tuple(chained(byte_blocks(content, size), request.scope)),
            block_tokens=block_tokens,
            tenant=tenant(request),
        )

    def special_string_of(self, model: str) -> str:
        """Return the special string that a model's engines reported, or that of the settings."""
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

    def _by_tokens(self, model: str, tokens: Sequence[int], packed: bytes, seed: int) -> Iterator[CutDocument]:
        markers = self.markers.get(model)
        for span in split(tokens, markers).documents if markers else ():
            key = xxhash.xxh3_128_digest(packed[4 * span.start : 4 * span.stop], seed=seed)
            digest = tokens_digest(tokens[span.start : span.stop])
            yield CutDocument(key, len(span), span.stop, digest)

    def _by_text(self, request: PromptRequest, seed: int, rate: float) -> Iterator[CutDocument]:
        for part, stop in self._parts(request):
            stripped = part.strip()
            if stripped and ROLE not in stripped:
                key = xxhash.xxh3_128_digest(encoded(stripped), seed=seed)
                tokenized = self.find and self.find(request.model, part, request.salt)
                digest, tokens = tokenized or ("", len(stripped) / rate)
                yield CutDocument(key, tokens, stop / rate, digest)

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
