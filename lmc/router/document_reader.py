"""Reads the tokens and texts of documents that an engine reports, so that the router finds them in prompts.

An engine returns one document at a time. Documents are read one after the other with a pause, because an engine reads
them in the process that schedules its requests.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import quote

import aiohttp

from lmc.router.cut import content_of
from lmc.router.document_search import DocumentSearch

log = logging.getLogger(__name__)

MAX_QUEUED_DOCUMENTS = 50_000  # per engine; others are read when the engine reports them again
READ_PAUSE_SECONDS = 0.01  # between two documents of an engine


class DocumentReader:
    """Reads documents of one engine. Used in the thread of the event loop."""

    def __init__(
        self,
        search: DocumentSearch,
        ask: Callable[[str], Awaitable[Any]],
        models: Callable[[], Iterable[str]] = lambda: (),
    ) -> None:
        """`ask` returns the JSON at a path of the engine's administration endpoint. The `search` gets the documents.

        `models` returns the engine's models.
        """
        self._search, self._ask, self._models = search, ask, models
        self._queue: OrderedDict[str, tuple[str, str]] = OrderedDict()  # tenants and digests by id
        self._wake = asyncio.Event()

    def add(self, name: str, tenant: str, digest: str) -> None:
        """Queue the document with the id `name`."""
        if len(self._queue) < MAX_QUEUED_DOCUMENTS:
            self._queue[name] = tenant, digest
            self._wake.set()

    async def run(self) -> None:
        """Read queued documents until cancelled, or until it turns out that the engine does not return tokens."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            name, (tenant, digest) = self._queue.popitem(last=False)
            if self._search.by_tokens.get(tenant, content_of(digest)) is not None:
                continue
            try:
                listing = await self._ask(f"/v1/documents/{quote(name, safe='')}")
                for document in listing["documents"]:
                    if "token_ids" not in document:
                        log.info("lmc router: an engine of an earlier version does not return the tokens of documents")
                        return
                    self._search.note_reported(tenant, digest, document["token_ids"], document["text"], self._models())
            except (aiohttp.ClientError, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
                log.debug("lmc router: could not read a document: %s", error or type(error).__name__)
            await asyncio.sleep(READ_PAUSE_SECONDS)
