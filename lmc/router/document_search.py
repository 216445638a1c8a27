"""Finds known documents anywhere in prompts, as engines do: without separators, in whole or in part.

Known are the documents that earlier prompts had between separators, and those that engines report. They are found by
tokens if a prompt is cut by tokens, exactly as engines find them. Otherwise they are found by words, which is
approximate: an engine may find a little more or less of a document, because tokens are not words.

Each tenant has finders of its own. All documents together take at most `MAX_BYTES` as tokens, and as much as words,
with their entries and finders.
"""

import asyncio
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lmc.documents.finder import DocumentFinder, FoundRun
from lmc.router.cut import content_of, tenant
from lmc.router.fair_lru import FairLru
from lmc.router.policy_types import FoundDocument, PromptRequest
from lmc.router.prefix_hashes import encoded

MAX_BYTES = 64 << 20  # limit for the documents as tokens, and again for the documents as words
ENTRY_BYTES = 600  # memory of a document besides its tokens; measured with 100,000 short documents
MAX_NAMES = 8  # models of a document; a client may name any number of them
SEARCH_SECONDS = 0.05  # longest wait of a request for a search
MAX_QUEUED_SEARCHES = 32  # prompts that wait for a search; others are not searched
MAX_PROMPT_TOKENS, MAX_PROMPT_CHARACTERS = 1 << 18, 1 << 19  # searched part of a prompt
# A word, or one character of a script without blanks between words, and the white space before it.
WORD = re.compile(r"\s*(?:[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\U0010ffff]+|\S)")


@dataclass(slots=True, eq=False)
class KnownText:
    """A document of a tenant."""

    content: bytes  # identifies its tokens or its text
    tokens: "array[int]"  # what the finder compares: tokens, or hashes of words
    text: str = ""  # its words, until they are in `tokens`
    is_evicted: bool = False
    is_inserted: bool = False  # whether it is in a finder
    # The digest of its tokens, as in engines' events, and their number, with the base model that has this tokenizer.
    names: tuple[tuple[str, str, float], ...] = ()

    def name(self, model: str) -> tuple[str, float]:
        """Return its digest and its number of tokens for a base model; an empty digest and 0 while they are unknown.

        If all models name it alike, so does an unknown model.
        """
        of_model = {name[1:] for name in self.names if name[0] == model} or {name[1:] for name in self.names}
        return of_model.pop() if len(of_model) == 1 else ("", 0.0)

    def set_name(self, model: str, digest: str, size: float) -> None:
        """Set its digest and its number of tokens for a base model."""
        others = [name for name in self.names if name[0] != model]
        self.names = (*others[1 - MAX_NAMES :], (model, digest, size))


class KnownTexts:
    """The documents of all tenants, as tokens or as words.

    `update` and `find` run in one thread, the other methods in that of the event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known = FairLru[bytes, KnownText](max_bytes, self._evict)
        self._finders: dict[str, DocumentFinder[KnownText]] = {}  # by tenant
        self._changes = deque[tuple[str, KnownText]]()  # documents that were added or evicted, by tenant

    def __len__(self) -> int:
        return len(self._known)

    def get(self, owner: str, content: bytes) -> KnownText | None:
        """Return a tenant's document; None if it is unknown."""
        return self._known.get(owner, content)

    def put(self, owner: str, document: KnownText) -> None:
        """Add a tenant's document, or mark it as the most recently used."""
        if self.get(owner, document.content) is None:
            self._changes.append((owner, document))
        # A text has about as many bytes as the hashes of its words.
        size = ENTRY_BYTES + (4 * len(document.tokens) or len(encoded(document.text)))
        self._known.put(owner, document.content, size, document)

    def has_documents(self, owner: str) -> bool:
        """Return whether a tenant has documents."""
        return self._known.owns(owner)

    def update(self) -> None:
        """Insert new documents into the finders, and remove evicted ones."""
        new: dict[str, list[KnownText]] = {}
        for _ in range(len(self._changes)):
            owner, document = self._changes.popleft()
            if not document.is_evicted:
                if document.text:
                    document.tokens, document.text = _words(document.text)[0], ""
                new.setdefault(owner, []).append(document)
                document.is_inserted = True
            elif document.is_inserted:
                self._insert(owner, new)
                finder = self._finders.get(owner)
                if finder is not None:  # Documents that are too short to be found may outlive the finder.
                    finder.remove(document)
                    if not len(finder):
                        del self._finders[owner]
        for owner in list(new):
            self._insert(owner, new)

    def find(self, owner: str, tokens: Sequence[int]) -> list[FoundRun[KnownText]]:
        """Return the runs of a tenant's documents in a prompt, in its order."""
        self.update()
        return self._finders[owner].find(tokens) if owner in self._finders else []

    def _insert(self, owner: str, new: dict[str, list[KnownText]]) -> None:
        if documents := new.pop(owner, ()):
            self._finders.setdefault(owner, DocumentFinder()).insert(documents)

    def _evict(self, owner: str, document: KnownText) -> None:
        document.is_evicted = True
        self._changes.append((owner, document))


class DocumentSearch:
    """Searches prompts in a thread of its own. Used in the thread of the event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES, base_of: Callable[[str], str] = str) -> None:
        """`max_bytes` limits the documents as tokens, and the documents as words.

        `base_of` returns the base model of a model. Adapters have the tokenizer of their base model.
        """
        self._base_of = base_of
        self.by_tokens, self.by_words = KnownTexts(max_bytes), KnownTexts(max_bytes)
        self._thread = ThreadPoolExecutor(1, "lmc-search")
        self._waiting, self._updating = 0, False
        self.skipped = 0  # prompts that were not searched, because searches were too slow or too many

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def note(
        self, owner: str, content: bytes, digest: str, size: float, text: str | Sequence[int], model: str = ""
    ) -> None:
        """Record a tenant's document, as a text or as tokens.

        `content` identifies the text or the tokens. `digest` and `size` are those of the model's tokens, if they are
        known.
        """
        texts = self.by_words if isinstance(text, str) else self.by_tokens
        document = texts.get(owner, content)
        if document is None:
            words, tokens = (text, array("I")) if isinstance(text, str) else ("", array("I", text))
            document = KnownText(content, tokens, words)
        if digest:
            document.set_name(self._base_of(model), digest, size)
        texts.put(owner, document)
        if not (document.is_inserted or self._updating):
            self._updating = True
            self._thread.submit(self._update)

    def note_reported(
        self, owner: str, digest: str, tokens: Sequence[int], text: str, models: Iterable[str] = ()
    ) -> None:
        """Record a document that an engine of some models reports. Its text is its token ids if it has none."""
        for model in set(map(self._base_of, models)) or {""}:
            self.note(owner, content_of(digest), digest, len(tokens), tokens, model)
            if text != " ".join(map(str, tokens)):
                self.note(owner, content_of(text), digest, len(tokens), text.strip(), model)

    async def find(self, request: PromptRequest, *, by_tokens: bool) -> Sequence[FoundDocument]:
        """Return the known documents in a prompt, in its order; none if this would take too long."""
        texts, owner = self.by_tokens if by_tokens else self.by_words, tenant(request)
        if request.documents or not texts.has_documents(owner):  # A request may name its documents itself.
            return ()
        if self._waiting >= MAX_QUEUED_SEARCHES:
            self.skipped += 1
            return ()
        self._waiting += 1
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                search = self._thread.submit(_found, texts, owner, request, by_tokens, self._base_of(request.model))
                found = await asyncio.wrap_future(search)
        except TimeoutError:
            self.skipped += 1
            return ()
        finally:
            self._waiting -= 1
        for _, document in found:
            if not document.is_evicted:
                texts.put(owner, document)
        return [place for place, _ in found]

    def _update(self) -> None:
        self._updating = False
        self.by_tokens.update()
        self.by_words.update()


def _found(
    texts: KnownTexts, owner: str, request: PromptRequest, by_tokens: bool, model: str
) -> list[tuple[FoundDocument, KnownText]]:
    """Return the documents in a prompt, with their places in its tokens or in its characters."""
    if by_tokens:
        tokens: Sequence[int] = array("I", (request.tokens or ())[:MAX_PROMPT_TOKENS])
        ends: Sequence[int] = range(1, len(tokens) + 1)
    else:
        tokens, ends = _words(request.text[:MAX_PROMPT_CHARACTERS])
    found = []
    for run in texts.find(owner, tokens):
        start, stop = ends[run.at - 1] if run.at else 0, ends[run.at + run.tokens - 1]
        digest, size = run.document.name(model)
        place = FoundDocument(start, stop, run.document.content, digest, size if run.whole else 0.0, run.whole)
        found.append((place, run.document))
    return found


def _words(text: str) -> tuple["array[int]", "array[int]"]:
    """Return a hash of each word of a text without the white space before it, and where each word ends."""
    words = WORD.findall(text.rstrip())  # At white space without a word after it, a search is quadratic.
    hashes = np.fromiter(map(hash, map(str.lstrip, words)), np.int64, len(words)).astype(np.uint32)
    return array("I", hashes.tobytes()), array("I", accumulate(map(len, words)))
