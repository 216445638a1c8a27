"""Looks after the engines: whether they are up, which models they serve, and which ones there are now."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, NamedTuple

import aiohttp

from lmc.errors import InputError
from lmc.router.engines import Engine, EngineAddress, Engines, has_ended
from lmc.router.policies.base import Policy
from lmc.router.settings import RouterSettings
from lmc.router.tasks import AGAIN_SECONDS, attempt, keep_up

log = logging.getLogger(__name__)

LOOK = aiohttp.ClientTimeout(total=5.0)
MISSES = 3  # lookups in a row that do not find an engine, after which it has gone
LOOKUP_SECONDS = 10.0  # for which a lookup of the engines is waited for
Follow = Callable[[Engine], Coroutine[Any, Any, None]]
Discovery = Callable[[aiohttp.ClientSession], Awaitable[Collection[EngineAddress]]]


class Following(NamedTuple):
    """What follows an engine, which had this address when that began."""

    engine: Engine
    address: EngineAddress
    task: asyncio.Task[None]


class Watch:
    """Looks at all engines again and again."""

    def __init__(
        self,
        settings: RouterSettings,
        engines: Engines,
        policy: Policy,
        session: aiohttp.ClientSession,
        discovery: Discovery | None = None,
        follow: Follow | None = None,
    ) -> None:
        """With a `discovery`, the engines are those that it finds; otherwise they are not changed here.

        What `follow` does runs for each engine, from when it is up until it has ended or gone.
        """
        self._follow, self._following = follow, dict[str, Following]()
        self._settings, self._engines, self._policy = settings, engines, policy
        self._session, self._discovery = session, discovery
        self._found: dict[str, EngineAddress] = {}  # engines that discovery has found
        self._missed: dict[str, int] = {}  # in how many lookups, since each of them was found
        self._lookup: asyncio.Future[Collection[EngineAddress]] | None = None  # the one that has not ended

    async def open(self) -> list[asyncio.Task[None]]:
        """Look once, and return the tasks that go on with it.

        Lookups have a task of their own, so that a slow one holds up no health check.
        """
        works = [(self.look, "looking at the engines")]
        if self._discovery is not None:
            works.insert(0, (self.discover, "finding the engines"))
        for work, what in works:
            await attempt(work, what)
        return [keep_up(work, what, self._settings.health_seconds) for work, what in works]

    async def close(self) -> None:
        """End what this has begun."""
        tasks: list[asyncio.Future[Any]] = [one.task for one in self._following.values()]
        tasks += [self._lookup] if self._lookup else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> None:
        """Look at each engine once."""
        for url in self._following.keys() - {one.url for one in self._engines}:
            self._unfollow(url)
            self._policy.forget(url)  # once more, because events of it may have come since it was removed
        await asyncio.gather(*map(self._look_at, self._engines))

    async def discover(self) -> None:
        """Find the engines once. A lookup that takes too long goes on, and is asked for its result the next time."""
        assert self._discovery is not None
        if self._lookup is None:
            self._lookup = asyncio.ensure_future(self._discovery(self._session))
        done, _ = await asyncio.wait((self._lookup,), timeout=LOOKUP_SECONDS)
        if not done:
            log.warning(
                "lmc router: looking up the engines takes more than %g s; they stay as they are", LOOKUP_SECONDS
            )
            return
        lookup, self._lookup = self._lookup, None
        try:
            self._take({one.url: one for one in lookup.result()})
        except (InputError, OSError, ValueError, aiohttp.ClientError) as error:
            log.warning("lmc router: the engines cannot be looked up, and stay as they are: %s", error)

    def _take(self, found: dict[str, EngineAddress]) -> None:
        """Take the engines that a lookup has found. One that it misses keeps its place for some more lookups."""
        for url, one in found.items():
            if one != self._found.get(url):
                self._engines.add(one)
                log.info("lmc router: engine %s has %s", url, "changed" if url in self._found else "come")
            self._missed.pop(url, None)
        for url in self._found.keys() - found.keys():
            self._missed[url] = self._missed.get(url, 0) + 1
            if self._missed[url] < MISSES:
                found[url] = self._found[url]
                continue
            del self._missed[url]
            if url in self._engines:
                self._engines.remove(url)
                self._policy.forget(url)
                log.info("lmc router: engine %s has gone", url)
        for url in found:
            if url in self._engines:
                self._engines[url].missing = url in self._missed
        self._found = found

    async def _look_at(self, engine: Engine) -> None:
        ended, before = False, engine.healthy
        try:
            up = await self._asked(engine, "/health") is not None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            up, ended = False, has_ended(error)
        engine.checked(up, ended=ended)
        if up != before:
            log.log(*_said(engine.url, up))
        if up and engine.gone:  # It was started anew, and its memory is empty.
            engine.gone = False
            engine.models = engine.address.models
            self._policy.forget(engine.url)
            self._unfollow(engine.url)
        if up and not engine.address.models:  # Adapters come and go while it is up.
            await self._ask_models(engine)
        followed = self._following.get(engine.url)
        # It may have been removed and added again since the last look.
        if followed and (followed.engine is not engine or followed.address != engine.address):
            self._unfollow(engine.url)
        if up and engine.models and self._follow and engine.url not in self._following:
            following = keep_up(partial(self._follow, engine), f"following {engine.url}", AGAIN_SECONDS)
            self._following[engine.url] = Following(engine, engine.address, following)

    def _unfollow(self, url: str) -> None:
        if url in self._following:
            self._following.pop(url).task.cancel()

    async def _ask_models(self, engine: Engine) -> None:
        try:
            found = await self._asked(engine, "/v1/models", json=True)
            engine.models = frozenset(str(one["id"]) for one in found["data"])
        except (aiohttp.ClientError, OSError, ValueError, TypeError, KeyError) as error:
            log.warning("lmc router: %s does not say which models it has: %s", engine.url, error)

    async def _asked(self, engine: Engine, path: str, *, json: bool = False) -> Any:
        """Return an answer, or `True` for one whose content is not wanted; None if it is not 200."""
        async with self._session.get(engine.url + path, headers=self._settings.login, timeout=LOOK) as answer:
            if answer.status != 200:
                return None
            return await answer.json() if json else True


def _said(url: str, up: bool) -> tuple[int, str, str]:
    if up:
        return logging.INFO, "lmc router: engine %s is up", url
    return logging.WARNING, "lmc router: engine %s does not answer, and gets no requests until it does", url
