"""Finds the tokens of documents that the router has as text: an engine tokenizes each document once.

No request waits for this. Until the engine has answered, a document is identified by its text.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import xxhash
from cachetools import LRUCache

from lmc.blend.markers import Markers
from lmc.blend.segments import split
from lmc.errors import InputError
from lmc.keys import tokens_digest
from lmc.router.cut import MAX_CHARACTERS
from lmc.router.prefix_hashes import encoded

log = logging.getLogger(__name__)

MAX_KNOWN_DOCUMENTS = 100_000  # whose tokens are remembered
# Limits of the queue: documents, documents of one tenant, and characters. Others are queued when they come again.
MAX_QUEUED_LOOKUPS, MAX_TENANT_LOOKUPS, MAX_QUEUED_CHARACTERS = 1000, 100, 1 << 26
PARALLEL_LOOKUPS = 2
LOOKUP_PAUSE_SECONDS = 1.0  # seconds after a failed lookup

# From a model and a body for /tokenize to tokens. Raises `InputError`.
Tokenize = Callable[[str, Mapping[str, Any]], Awaitable[Sequence[int]]]


class DocumentTokens:
    """Digests and token counts of documents. Used in the thread of the event loop."""

    def __init__(
        self, tokenize: Tokenize, markers: dict[str, Markers], special_string_of: Callable[[str], str]
    ) -> None:
        """`markers` and `special_string_of` have the markers and separators of models, as they become known."""
        self._tokenize, self._markers, self._special_string_of = tokenize, markers, special_string_of
        # None stands for a text that is not a document for the engines.
        self._known: LRUCache[bytes, tuple[str, int] | None] = LRUCache(MAX_KNOWN_DOCUMENTS)
        # The queue of documents: the model, the text and the tenant that came first.
        self._waiting: OrderedDict[bytes, tuple[str, str, str]] = OrderedDict()
        self._characters, self._of = 0, Counter[str]()  # characters in the queue, and documents per tenant
        self._seeds: dict[str, tuple[Markers, str, int]] = {}  # by model, with its markers and separator
        self._wake, self._failed = asyncio.Event(), False  # whether the last lookup failed

    def find(self, model: str, text: str, owner: str = "") -> tuple[str, int] | None:
        """Return the digest and the token count of a text between two separators, white space included, if known.

        Otherwise the text is queued. The queue has a limit for each tenant, which is `owner` here.
        """
        if model not in self._markers:
            return None
        key = xxhash.xxh3_128_digest(encoded(text), seed=self._seed(model))
        if key in self._known:
            document: tuple[str, int] | None = self._known[key]
            return document
        room = len(self._waiting) < MAX_QUEUED_LOOKUPS and self._of[owner] < MAX_TENANT_LOOKUPS
        room = room and len(text) < MAX_CHARACTERS and self._characters + len(text) <= MAX_QUEUED_CHARACTERS
        if room and key not in self._waiting:
            self._waiting[key] = model, text, owner
            self._characters += len(text)
            self._of[owner] += 1
            self._wake.set()
        return None

    def _seed(self, model: str) -> int:
        """Return the hash seed of a model's documents. It depends on the markers, which change with the tokenizer."""
        markers, special = self._markers[model], self._special_string_of(model)
        entry = self._seeds.get(model)
        if entry is None or entry[:2] != (markers, special):
            identity = repr((model, special, markers.separators, markers.answers, markers.messages))
            seed = xxhash.xxh3_64_intdigest(identity.encode())
            entry = self._seeds[model] = markers, special, seed
        return entry[2]

    async def run(self) -> None:
        """Request the tokens of queued documents until cancelled."""
        async with asyncio.TaskGroup() as lookups:  # An error of one ends all.
            for _ in range(PARALLEL_LOOKUPS):
                lookups.create_task(self._run())

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            key, (model, text, owner) = self._waiting.popitem(last=False)
            self._characters -= len(text)
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]
            try:
                self._known[key] = await self._look_up(model, text)
                self._failed = False
            except InputError as error:
                level = logging.DEBUG if self._failed else logging.WARNING
                log.log(
                    level,
                    "lmc router: could not get the tokens of a document, so events about it are ignored: %s",
                    error,
                )
                self._failed = True
                await asyncio.sleep(LOOKUP_PAUSE_SECONDS)

    async def _look_up(self, model: str, text: str) -> tuple[str, int] | None:
        special_string = self._special_string_of(model)
        bare = special_string.strip()  # The text has all the white space between the two.
        prompt = special_string.replace(bare, f"{bare}{text}{bare}")
        tokens = await self._tokenize(model, {"model": model, "prompt": prompt, "add_special_tokens": False})
        documents = split(tokens, self._markers[model]).documents
        if len(documents) != 1:
            return None
        document = tokens[documents[0].start : documents[0].stop]
        return tokens_digest(document), len(document)
