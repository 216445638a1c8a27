"""The tokens of documents, of which a router has the texts only: an engine is asked once for each document.

It is asked while no request waits for the answer. Until it has answered, a document is known by its text alone.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import xxhash

from lmc.blend.markers import Markers
from lmc.blend.segments import split
from lmc.errors import InputError
from lmc.keys import tokens_digest
from lmc.router.cut import MOST_LETTERS
from lmc.router.prefix_hashes import encoded

log = logging.getLogger(__name__)

REMEMBERED = 100_000  # documents
# Documents of all tenants and of one, and letters of all, at most. Others are asked for when they come again.
WAITING, WAITING_OF_ONE, WAITING_LETTERS = 1000, 100, 1 << 26
AT_ONCE = 2  # questions
PAUSE = 1.0  # seconds after a question without an answer

# Of a model, and of what an engine of it is asked under /tokenize. Raises `InputError`.
Tokenize = Callable[[str, Mapping[str, Any]], Awaitable[Sequence[int]]]


class DocumentTokens:
    """Digests and numbers of tokens of documents. Used in one thread, that of the event loop."""

    def __init__(
        self, tokenize: Tokenize, markers: dict[str, Markers], special_string_of: Callable[[str], str]
    ) -> None:
        """`markers` and special strings are those of models, as they become known."""
        self._tokenize, self._markers, self._special_string_of = tokenize, markers, special_string_of
        self._known: OrderedDict[bytes, tuple[str, int] | None] = OrderedDict()  # None: no document to the engines
        self._waiting: OrderedDict[bytes, tuple[str, str, str]] = OrderedDict()  # model, text, and who asked first
        self._letters, self._of = 0, Counter[str]()  # of those that wait, and how many of them each tenant has
        self._seeds: dict[str, tuple[Markers, str, int]] = {}  # by model, and of which markers and special string
        self._wake, self._failed = asyncio.Event(), False  # whether the last question had no answer

    def find(self, model: str, text: str, asking: str = "") -> tuple[str, int] | None:
        """Return the digest and the number of tokens of a text, with white space, between two separators, if known.

        The tenant `asking` can let only some documents wait at once.
        """
        if model not in self._markers:
            return None
        key = xxhash.xxh3_128_digest(encoded(text), seed=self._seed(model))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        room = len(self._waiting) < WAITING and self._of[asking] < WAITING_OF_ONE
        room = room and len(text) < MOST_LETTERS and self._letters + len(text) <= WAITING_LETTERS
        if room and key not in self._waiting:
            self._waiting[key] = model, text, asking
            self._letters += len(text)
            self._of[asking] += 1
            self._wake.set()
        return None

    def _seed(self, model: str) -> int:
        """Return what tells documents of a model apart, as it is cut now: another tokenizer has other markers."""
        markers, special = self._markers[model], self._special_string_of(model)
        known = self._seeds.get(model)
        if known is None or known[:2] != (markers, special):
            known_by = repr((model, special, markers.separators, markers.answers, markers.messages))
            seed = xxhash.xxh3_64_intdigest(known_by.encode())
            known = self._seeds[model] = markers, special, seed
        return known[2]

    async def run(self) -> None:
        """Ask for the tokens of documents until cancelled."""
        async with asyncio.TaskGroup() as asking:  # If one ends with an error, so do the others.
            for _ in range(AT_ONCE):
                asking.create_task(self._run())

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            key, (model, text, asking) = self._waiting.popitem(last=False)
            self._letters -= len(text)
            self._of[asking] -= 1
            if not self._of[asking]:
                del self._of[asking]
            try:
                self._known[key] = await self._look_up(model, text)
                self._failed = False
            except InputError as error:
                level = logging.DEBUG if self._failed else logging.WARNING
                log.log(level, "lmc router: events about a document are not understood, without its tokens: %s", error)
                self._failed = True
                await asyncio.sleep(PAUSE)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)

    async def _look_up(self, model: str, text: str) -> tuple[str, int] | None:
        special_string = self._special_string_of(model)
        bare = special_string.strip()  # The text has all white space that is between two of them in the prompt.
        prompt = special_string.replace(bare, f"{bare}{text}{bare}")
        tokens = await self._tokenize(model, {"model": model, "prompt": prompt, "add_special_tokens": False})
        documents = split(tokens, self._markers[model]).documents
        if len(documents) != 1:
            return None
        found = tokens[documents[0].start : documents[0].stop]
        return tokens_digest(found), len(found)
