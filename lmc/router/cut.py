"""Cuts prompts for the router: into the documents that engines keep, and the blocks of their beginning.

Without tokens, a prompt is cut at the special string in its text. The numbers of tokens are then estimated, and a
document is known by its text without white space around it.
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

Find = Callable[[str, str, str], tuple[str, int] | None]  # of a model and a text, for a tenant

ROLE = "\0"  # stands before and behind the role of a message, in the text of a conversation
BLOCK_LETTERS = 512  # of a text
BLOCK_TOKENS = 128  # of tokens
RATE_MEMORY = 0.05  # of the letters of a token, what the last answer counts
LEAST_RATE, GREATEST_RATE = 0.5, 12.0  # letters of a token; what is beyond was no text
SCOPES = 10_000  # of which the letters of a token are remembered
# What of a prompt is looked at. No engine takes more, and cutting it must not hold up others.
MOST_TOKENS, MOST_LETTERS, MOST_DOCUMENTS = 1_000_000, 4_000_000, 1000
SEARCHED_LETTERS = 30_000_000  # for documents that a request names, all names together


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


def tenant(request: PromptRequest) -> str:
    """Return the tenant of a request, as events of engines name it."""
    return tenant_of(request.salt.encode("utf-8", "replace").decode())


@dataclass(slots=True)
class Cutter:
    """Cuts prompts. With the `markers` of a model, those whose tokens are known are cut by their tokens."""

    special_string: str = " # # "
    markers: dict[str, Markers] = field(default_factory=dict)  # by model
    special_strings: dict[str, str] = field(default_factory=dict)  # by model, as engines have said them
    find: Find | None = None  # the digest and the number of tokens of a document that stands in a text
    # Letters of a token by model and tenant, as answers have shown them: no tenant's texts count for another one.
    rates: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def cut(self, request: PromptRequest) -> Cut:
        """Return the parts of a request's prompt."""
        seed, rate = xxhash.xxh3_64_intdigest(encoded(request.scope)), self.letters_a_token(request.scope)
        if request.tokens and request.text:
            rate = len(request.text) / len(request.tokens)
        if request.tokens is not None and (request.model in self.markers or not request.text):
            cut = request.tokens[:MOST_TOKENS]
            packed = array("I", cut).tobytes()
            tokens, documents = float(len(request.tokens)), self._by_tokens(request.model, cut, packed, seed)
            if request.documents and request.text:  # No separators stand around those that a request names.
                documents = self._by_text(request, seed, rate)
            content, size, block_tokens = packed, 4 * BLOCK_TOKENS, float(BLOCK_TOKENS)
        else:
            tokens, documents = max(1.0, len(request.text) / rate), self._by_text(request, seed, rate)
            content = request.text[:MOST_LETTERS].encode("utf-32-le", "surrogatepass")  # 4 bytes, as a token has
            size, block_tokens = 4 * BLOCK_LETTERS, BLOCK_LETTERS / rate
        return Cut(
            tokens=tokens,
            documents=tuple(islice(documents, MOST_DOCUMENTS)),
            blocks=tuple(chained(byte_blocks(content, size), request.scope)),
            block_tokens=block_tokens,
            tenant=tenant(request),
        )

    def special_string_of(self, model: str) -> str:
        """Return the special string of a model's engines, or that of the settings while they have said none."""
        return self.special_strings.get(model, self.special_string)

    def letters_a_token(self, scope: str) -> float:
        """Return how many letters a token of a model and a tenant has, about."""
        return self.rates.get(scope, CHARACTERS_PER_TOKEN)

    def counted(self, scope: str, letters: int, tokens: int) -> None:
        """Take note of how many tokens a text has turned out to have, to estimate those of others in its scope."""
        if letters > 0 and tokens > 0:
            rate, shown = self.letters_a_token(scope), min(max(letters / tokens, LEAST_RATE), GREATEST_RATE)
            self.rates[scope] = rate + (shown - rate) * RATE_MEMORY
            self.rates.move_to_end(scope)
            if len(self.rates) > SCOPES:
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
                known = self.find and self.find(request.model, part, request.salt)
                digest, tokens = known or ("", len(stripped) / rate)
                yield CutDocument(key, tokens, stop / rate, digest)

    def _parts(self, request: PromptRequest) -> list[tuple[str, int]]:
        """Return texts that may be documents, and where they end in the prompt."""
        whole = request.text[:MOST_LETTERS]
        if request.documents:
            named = request.documents[: min(MOST_DOCUMENTS, SEARCHED_LETTERS // (len(whole) + 1))]
            found = [(text, whole.find(text)) for text in named]
            return [(text, at + len(text)) for text, at in found if at >= 0]
        bare, parts, at = self.special_string_of(request.model).strip(), [], 0
        for piece in whole.split(bare, MOST_DOCUMENTS + 1):
            at += len(piece)
            parts.append((piece, at))
            at += len(bare)
        return parts[1:-1]
