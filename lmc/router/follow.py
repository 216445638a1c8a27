"""Follows engines: how they cut prompts, how much their caches hold, and which documents are where.

An engine's administration endpoint says the first two, and lists its documents. From then on its document events say
what changes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lmc.admin_address import address_of_engine
from lmc.blend.markers import Markers
from lmc.errors import InputError
from lmc.router.cut import Cutter
from lmc.router.document_index import DocumentIndex, Told
from lmc.router.engines import Engine
from lmc.router.event_stream import Batch, EventStream, Lost
from lmc.router.kv_events import BlockEvents
from lmc.router.kv_index import BlockIndex, CacheSource
from lmc.router.policies.base import Policy
from lmc.storage.places import place_of

log = logging.getLogger(__name__)

TOPIC = "lmc.documents"
AGAIN_SECONDS = 5.0
STORED, REMOVED = "DocumentStored", "DocumentRemoved"
Lag = Callable[[str, float], None]  # is told an engine, and the age of a batch of its events in seconds
ASKING = aiohttp.ClientTimeout(total=30.0)


class Follower:
    """Fills the indexes that a policy needs."""

    def __init__(self, policy: Policy, session: aiohttp.ClientSession, token: str, lag: Lag) -> None:
        """`token` is the engines' administration token."""
        self._policy, self._session, self._lag = policy, session, lag
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
                where = engine.address.admin
                log.warning(
                    "lmc router: %s does not say what %s has: %s", where, engine.url, error or type(error).__name__
                )
            await asyncio.sleep(AGAIN_SECONDS)

    async def _follow(self, engine: Engine, index: DocumentIndex) -> None:
        facts = await self._ask(engine, "/v1/routing")
        candidate, cutter = engine.candidate, self._policy.needs.cutter
        cache = engine.address.cache or facts["cache"] or engine.url
        if candidate.cache != cache:  # Nobody looks for it by the former name any more.
            self._policy.forget(engine.url)
            candidate.cache = cache
        candidate.ratio = float(facts["ratio"])
        candidate.blend_min_tokens = int(facts.get("blend_min_tokens", 0))  # Earlier versions do not say it.
        index.resize(candidate.cache, max(facts["capacity"].values()), facts["chunk_size"])
        if cutter is not None:
            _adopt(cutter, engine, facts)
        stream = _stream(facts["document_events"], engine.address.admin)
        if stream is None:
            log.info("lmc router: %s publishes no document events (LMC_DOCUMENT_EVENTS)", engine.url)
            await asyncio.Event().wait()
            return
        log.info("lmc router: follows the documents of %s", engine.url)
        try:
            async for event in stream.batches():
                if isinstance(event, Lost):
                    index.untold(cache, engine.url)
                    index.listed(cache, await self._listing(engine), engine.url)
                else:
                    self._take(index, engine, cache, event)
        finally:  # From now on, nobody says what changes.
            index.untold(cache, engine.url)

    async def _listing(self, engine: Engine) -> list[tuple[Told, str]]:
        found = await self._ask(engine, f"/v1/documents?limit={1 << 30}")
        return [
            (Told(one["tenant"], one["digest"]), medium)
            for one in found["documents"]
            for place in one["places"]
            if (medium := place_of(place).medium)
        ]

    def _take(self, index: DocumentIndex, engine: Engine, cache: str, batch: Batch) -> None:
        sent, events = decoded(batch.payload)
        self._lag(engine.url, max(0.0, time.time() - sent))
        for event in events:
            kind = event.get("type")
            if kind in (STORED, REMOVED):
                told = Told(str(event["tenant"]), str(event["digest"]))
                medium, stored = str(event["medium"]), kind == STORED
                index.moved(cache, told, medium, stored=stored, source=engine.url)

    async def _ask(self, engine: Engine, path: str) -> Any:
        url = engine.address.admin + path
        async with self._session.get(url, headers=self._headers, timeout=ASKING) as answer:
            if answer.status != 200:
                raise InputError(f"{url} answers {answer.status} {answer.reason}")
            return msgspec.json.decode(await answer.read())


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
            log.info("lmc router: prompts of %s are cut at %r, as at %s", model, special_string, engine.url)
        cutter.special_strings[model] = special_string


async def follow_blocks(index: BlockIndex, ranks: int, lag: Lag, engine: Engine) -> None:
    """Tell an index what an engine says in its KV events, until cancelled.

    An engine with data parallelism has a publisher for each of its ranks, at ports that follow each other. Of one whose
    address of KV events nobody has given, a warning says so.
    """
    address, _, replay = engine.address.kv_events.partition("+")
    if not address:
        wanted = "give kv_events for this engine, or --kv-events-port for all of them"
        log.warning(
            "lmc router: nothing says which blocks %s has, so that no prompt matches there: %s", engine.url, wanted
        )
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
    finally:  # From now on, nobody says what changes.
        index.drop(source)


def decoded(payload: bytes) -> tuple[float, Iterable[dict[str, Any]]]:
    """Return when a batch was sent, in seconds since 1970, and its events; raise `ValueError` if it is no batch."""
    try:
        found = msgspec.msgpack.decode(payload)
        return float(found[0]), [event for event in found[1] if isinstance(event, dict)]
    except (msgspec.DecodeError, TypeError, IndexError, KeyError) as error:
        raise ValueError(f"events that cannot be read: {error}") from None


def _stream(addresses: str, admin: str) -> EventStream | None:
    """Return the stream of an engine that listens at `tcp://*:5558`, or at two such addresses; None without one."""
    host = urlsplit(admin).hostname or "127.0.0.1"
    listening, _, replay = addresses.replace(" ", "").partition(",")
    if not listening:
        return None
    named = [one.replace("*", host).replace("0.0.0.0", host) for one in (listening, replay)]
    return EventStream(named[0], named[1], TOPIC)
