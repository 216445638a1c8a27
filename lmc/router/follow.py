"""Follows engines: how they cut prompts, the size of their caches, and the documents and blocks they have.

An engine's administration endpoint reports how it cuts prompts and its cache size, and lists its documents. Document
events report the changes after that. vLLM's KV events report the blocks. When batches of events are lost for good, the
documents are listed again, and the blocks are dropped.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lmc.blend.markers import Markers
from lmc.errors import InputError
from lmc.http.address import DOCUMENT_TOPIC, address_of_engine, host_in_url
from lmc.http.client import DocumentList
from lmc.router.cut import Cutter
from lmc.router.document_index import DocumentIndex, ReportedDocument
from lmc.router.document_reader import DocumentReader
from lmc.router.document_search import DocumentSearch
from lmc.router.engines import Engine
from lmc.router.event_stream import EventStream, Lost
from lmc.router.kv_index import BlockIndex, BlockName, CacheSource, Medium
from lmc.router.policies.base import Policy
from lmc.storage.places import place_of

log = logging.getLogger(__name__)

FOLLOW_RETRY_SECONDS = 5.0
STORED_EVENT, REMOVED_EVENT = "DocumentStored", "DocumentRemoved"
Lag = Callable[[str, float], None]  # called with an engine, and the age of a batch of its events in seconds
ADMIN_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Follower:
    """Fills the indexes that a policy needs."""

    def __init__(
        self,
        policy: Policy,
        session: aiohttp.ClientSession,
        token: str,
        lag: Lag,
        search: DocumentSearch | None = None,
    ) -> None:
        """`token` is the engines' administration token. The `search` gets the documents that engines report."""
        self._policy, self._session, self._lag, self._search = policy, session, lag, search or DocumentSearch()
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def follow(self, engine: Engine) -> None:
        """Follow an engine until cancelled, also if the policy needs nothing or the engine publishes nothing."""
        needs, address = self._policy.needs, engine.address
        async with asyncio.TaskGroup() as following:
            if needs.documents is not None and address.admin:
                following.create_task(self._follow_documents(engine, needs.documents))
            if needs.blocks is not None and (address.kv_events or needs.kv_events):
                following.create_task(follow_blocks(needs.blocks, needs.ranks, self._lag, engine))
            await asyncio.Event().wait()

    async def _follow_documents(self, engine: Engine, index: DocumentIndex) -> None:
        while True:
            try:
                await self._follow(engine, index)
            except (aiohttp.ClientError, OSError, ValueError, TypeError, KeyError) as error:
                reason = error or type(error).__name__
                log.warning(
                    "lmc router: could not read the documents of %s from %s: %s",
                    engine.url,
                    engine.address.admin,
                    reason,
                )
            await asyncio.sleep(FOLLOW_RETRY_SECONDS)

    async def _follow(self, engine: Engine, index: DocumentIndex) -> None:
        facts = await self._ask(engine, "/v1/routing")
        candidate, cutter = engine.candidate, self._policy.needs.cutter
        cache = engine.address.cache or facts["cache"] or engine.url
        if candidate.cache != cache:  # The index must not keep it under the old name.
            self._policy.forget(engine.url)
            candidate.cache = cache
        candidate.ratio = float(facts["ratio"])
        candidate.blend_min_tokens = int(facts.get("blend_min_tokens", 0))  # missing in earlier versions
        candidate.finds = bool(facts.get("finds", False))
        index.resize(candidate.cache, max(facts["capacity"].values()), facts["chunk_size"])
        if cutter is not None:
            _adopt(cutter, engine, facts)
        stream = _stream(facts["document_events"], engine.address.admin)
        if stream is None:
            log.info("lmc router: %s publishes no document events (LMC_DOCUMENT_EVENTS)", engine.url)
            await asyncio.Event().wait()
            return
        log.info("lmc router: following the documents of %s", engine.url)
        ask = partial(self._ask, engine)
        reader = DocumentReader(self._search, ask, lambda: engine.models) if candidate.finds else None
        reading = asyncio.create_task(reader.run()) if reader is not None else None
        try:
            async for event in stream.batches():
                if isinstance(event, Lost):
                    index.drop_reports(cache, engine.url)
                    index.listed(cache, await self._listing(engine, reader), engine.url)
                else:
                    self._take(index, engine, cache, event, reader)
        finally:  # Changes are no longer reported.
            index.drop_reports(cache, engine.url)
            if reading is not None:
                reading.cancel()

    async def _listing(self, engine: Engine, reader: DocumentReader | None) -> list[tuple[ReportedDocument, str]]:
        listing = DocumentList()
        while listing.path:
            listing.take(await self._ask(engine, listing.path))
        documents = listing.documents.values()
        if reader is not None:
            for document in documents:
                reader.add(document["id"], document["tenant"], document["digest"])
        return [
            (ReportedDocument(document["tenant"], document["digest"]), medium)
            for document in documents
            for place in document["places"]
            if (medium := place_of(place).medium)
        ]

    def _take(
        self, index: DocumentIndex, engine: Engine, cache: str, batch: bytes, reader: DocumentReader | None
    ) -> None:
        sent, events = decoded(batch)
        self._lag(engine.url, max(0.0, time.time() - sent))
        for event in events:
            kind = event.get("type")
            if kind in (STORED_EVENT, REMOVED_EVENT):
                document = ReportedDocument(str(event["tenant"]), str(event["digest"]))
                medium, stored = str(event["medium"]), kind == STORED_EVENT
                index.moved(cache, document, medium, stored=stored, source=engine.url)
                if stored and reader is not None:
                    reader.add(str(event["document"]), *document)

    async def _ask(self, engine: Engine, path: str) -> Any:
        url = engine.address.admin + path
        async with self._session.get(url, headers=self._headers, timeout=ADMIN_TIMEOUT) as response:
            if response.status != 200:
                raise InputError(f"{url} answered {response.status} {response.reason}")
            return msgspec.json.decode(await response.read())


def _adopt(cutter: Cutter, engine: Engine, facts: Mapping[str, Any]) -> None:
    """Cut the prompts of an engine's models as the engine does."""
    for model in engine.models if facts["separators"] else ():
        cutter.markers[model] = Markers(
            separators=tuple(map(tuple, facts["separators"])),
            special=frozenset(facts["special"]),
            answers=tuple(map(tuple, facts["answers"])),
            messages=tuple(map(tuple, facts["messages"])),
        )
    special_string = str(facts["special_string"])
    for model in engine.models if special_string.strip() else ():
        if special_string != cutter.special_string_of(model):
            log.info("lmc router: prompts of %s are cut at %r, the separator of %s", model, special_string, engine.url)
        cutter.special_strings[model] = special_string


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Consecutive blocks were stored on a medium. Only the fields that the router reads are declared."""

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[Token]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks were removed from a medium."""

    block_hashes: list[BlockName]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The engine cleared its prefix cache."""


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one engine step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockEvents:
    """Applies the KV events of one cache to the index."""

    def __init__(self, index: BlockIndex, source: CacheSource, lag: Callable[[float], None] | None = None) -> None:
        """`lag` is called with the age of each batch in seconds."""
        self._index, self._source, self._lag = index, source, lag
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.unreadable = 0  # batches; each one drops the source's blocks

    async def follow(self, stream: EventStream) -> None:
        """Apply events until cancelled."""
        async for event in stream.batches():
            if isinstance(event, Lost):
                self._index.drop(self._source)
            else:
                self.take(event)
            await asyncio.sleep(0)  # Many batches may arrive at once; requests are served in between.

    def take(self, payload: bytes) -> None:
        """Apply a batch. If it is unreadable, all blocks of the source are dropped."""
        try:
            batch = self._decoder.decode(payload)
            if self._lag is not None:
                self._lag(max(0.0, time.time() - batch.ts))
            for event in batch.events:
                self._apply(event)
        except msgspec.MsgspecError as error:
            if not self.unreadable:
                log.warning("lmc router: received unreadable KV events of %s: %s", self._source.engine, error)
            self.unreadable += 1
            self._index.unreadable += 1
            self._index.drop(self._source)

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self._index.drop(self._source)  # The event names no medium.
            return
        medium: Medium = ((event.medium or "gpu").lower(), event.group_idx)
        if isinstance(event, BlockRemoved):
            self._index.removed(self._source, event.block_hashes, medium)
            return
        names, extra, size = event.block_hashes, event.extra_keys, event.block_size
        if size <= 0 or len(event.token_ids) != size * len(names) or (extra is not None and len(extra) != len(names)):
            raise msgspec.ValidationError(f"{len(event.token_ids)} tokens do not make {len(names)} blocks of {size}")
        self._index.stored(
            self._source, names, event.parent_block_hash, event.token_ids, size, medium, event.lora_name or "", extra
        )


async def follow_blocks(index: BlockIndex, ranks: int, lag: Lag, engine: Engine) -> None:
    """Apply the KV events of an engine to an index until cancelled.

    An engine with data parallelism has one publisher per rank, at consecutive ports. An engine without an address for
    KV events is reported with a warning.
    """
    address, _, replay = engine.address.kv_events.partition("+")
    if not address:
        hint = "set kv_events for this engine, or --option kv_events_port for all engines"
        log.warning("lmc router: %s has no address for KV events, so no prompt matches there: %s", engine.url, hint)
        await asyncio.Event().wait()
    async with asyncio.TaskGroup() as following:
        for rank in range(ranks):
            stream = EventStream(address_of_engine(address, rank), address_of_engine(replay, rank), from_start=True)
            source = CacheSource(engine.url, rank)
            following.create_task(_follow_rank(index, source, stream, partial(lag, engine.url)))


async def _follow_rank(
    index: BlockIndex, source: CacheSource, stream: EventStream, lag: Callable[[float], None]
) -> None:
    try:
        await BlockEvents(index, source, lag).follow(stream)
    finally:  # Changes are no longer reported.
        index.drop(source)


def decoded(payload: bytes) -> tuple[float, Iterable[dict[str, Any]]]:
    """Return the time of a batch, in seconds since 1970, and its events. Raises `ValueError` if it is unreadable."""
    try:
        batch = msgspec.msgpack.decode(payload)
        return float(batch[0]), [event for event in batch[1] if isinstance(event, dict)]
    except (msgspec.DecodeError, TypeError, IndexError, KeyError) as error:
        raise ValueError(f"document events are unreadable: {error}") from None


def _stream(addresses: str, admin: str) -> EventStream | None:
    """Return the stream of an engine that publishes at one address or two, such as `tcp://*:5558`; None without any."""
    host = host_in_url(urlsplit(admin).hostname or "127.0.0.1")
    publisher, _, replay = addresses.replace(" ", "").partition(",")
    if not publisher:
        return None
    endpoints = [re.sub(r"(?<=//)(\*|0\.0\.0\.0|\[::\])(?=:)", host, part) for part in (publisher, replay)]
    return EventStream(endpoints[0], endpoints[1], DOCUMENT_TOPIC)
