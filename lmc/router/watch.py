"""Watches the engines: their health, their models, and which engines exist. Also the tasks that repeat such work.

An error in one of these tasks never ends the task, and is always logged.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp

from lmc.errors import InputError, LmcError
from lmc.router.engines import Engine, EngineAddress, Engines, has_ended
from lmc.router.policies.base import Policy
from lmc.router.settings import RouterSettings

log = logging.getLogger(__name__)

HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
MAX_MISSED_LOOKUPS = 3  # an engine is removed when this many lookups in a row have missed it
LOOKUP_SECONDS = 10.0  # timeout of a lookup of the engines
TASK_RETRY_SECONDS = 5.0  # after an error of a task
Follow = Callable[[Engine], Coroutine[Any, Any, None]]
Discovery = Callable[[aiohttp.ClientSession], Awaitable[Collection[EngineAddress]]]


class Following(NamedTuple):
    """The task that follows an engine, and the engine's address when it started."""

    engine: Engine
    address: EngineAddress
    task: asyncio.Task[None]


class Watch:
    """Checks all engines periodically."""

    def __init__(
        self,
        settings: RouterSettings,
        engines: Engines,
        policy: Policy,
        session: aiohttp.ClientSession,
        discovery: Discovery | None = None,
        follow: Follow | None = None,
    ) -> None:
        """With a `discovery`, the engines are those that it finds; without one, they are not changed here.

        `follow` runs for each engine, from when it is healthy until it restarts or is removed.
        """
        self._follow, self._following = follow, dict[str, Following]()
        self._settings, self._engines, self._policy = settings, engines, policy
        self._session, self._discovery = session, discovery
        self._found: dict[str, EngineAddress] = {}  # engines found by discovery
        self._missed: dict[str, int] = {}  # lookups in a row that missed each engine
        self._lookup: asyncio.Future[Collection[EngineAddress]] | None = None  # the lookup in progress

    async def open(self) -> list[asyncio.Task[None]]:
        """Check all engines once, and return the tasks that repeat this.

        Lookups have a task of their own, so a slow lookup delays no health check.
        """
        tasks = [(self.look, "check of the engines")]
        if self._discovery is not None:
            tasks.insert(0, (self.discover, "lookup of the engines"))
        for work, name in tasks:
            await attempt(work, name)
        return [keep_up(work, name, self._settings.health_seconds) for work, name in tasks]

    async def close(self) -> None:
        """Cancel all tasks that were started here."""
        tasks: list[asyncio.Future[Any]] = [following.task for following in self._following.values()]
        tasks += [self._lookup] if self._lookup else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> None:
        """Check each engine once."""
        for url in self._following.keys() - {engine.url for engine in self._engines}:
            self._unfollow(url)
            self._policy.forget(url)  # again, because its events may have arrived since it was removed
        await asyncio.gather(*map(self._look_at, self._engines))

    async def discover(self) -> None:
        """Discover the engines once. After a timeout, the lookup continues and its result is used in the next call."""
        assert self._discovery is not None
        if self._lookup is None:
            self._lookup = asyncio.ensure_future(self._discovery(self._session))
        finished, _ = await asyncio.wait((self._lookup,), timeout=LOOKUP_SECONDS)
        if not finished:
            log.warning(
                "lmc router: lookup of the engines timed out after %g s; the engines are unchanged", LOOKUP_SECONDS
            )
            return
        lookup, self._lookup = self._lookup, None
        try:
            self._take({engine.url: engine for engine in lookup.result()})
        except (InputError, OSError, ValueError, aiohttp.ClientError) as error:
            log.warning("lmc router: lookup of the engines failed; the engines are unchanged: %s", error)

    def _take(self, addresses: dict[str, EngineAddress]) -> None:
        """Apply the result of a lookup. A missing engine is removed after `MAX_MISSED_LOOKUPS` lookups."""
        for url, address in addresses.items():
            if address != self._found.get(url):
                self._engines.add(address)
                log.info("lmc router: %s engine %s", "changed" if url in self._found else "added", url)
            self._missed.pop(url, None)
        for url in self._found.keys() - addresses.keys():
            self._missed[url] = self._missed.get(url, 0) + 1
            if self._missed[url] < MAX_MISSED_LOOKUPS:
                addresses[url] = self._found[url]
                continue
            del self._missed[url]
            if url in self._engines:
                self._engines.remove(url)
                self._policy.forget(url)
                log.info("lmc router: removed engine %s", url)
        for url in addresses:
            if url in self._engines:
                self._engines[url].missing = url in self._missed
        self._found = addresses

    async def _look_at(self, engine: Engine) -> None:
        ended, before, cause = False, (engine.healthy, engine.unhealthy_because), ""
        try:
            await self._get(engine, "/health")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            ended, cause = has_ended(error), cause_of(error)
        up, engine.unhealthy_because = not cause, cause
        engine.checked(up, ended=ended)
        if (up, cause) != before:
            log.log(*_health_log(engine.url, cause))
        if up and engine.gone:  # It was restarted, so its memory is empty.
            engine.gone = False
            engine.models = engine.address.models
            self._policy.forget(engine.url)
            self._unfollow(engine.url)
        if up:  # Adapters are loaded and unloaded while it is up.
            await self._ask_models(engine)
        followed = self._following.get(engine.url)
        # It may have been removed and added again since the last check.
        if followed and (followed.engine is not engine or followed.address != engine.address):
            self._unfollow(engine.url)
        if up and engine.models and self._follow and engine.url not in self._following:
            following = keep_up(partial(self._follow, engine), f"following {engine.url}", TASK_RETRY_SECONDS)
            self._following[engine.url] = Following(engine, engine.address, following)

    def _unfollow(self, url: str) -> None:
        if url in self._following:
            self._following.pop(url).task.cancel()

    async def _ask_models(self, engine: Engine) -> None:
        cause = ""
        try:
            listing = await self._get(engine, "/v1/models", json=True)
            engine.cards = {str(model["id"]): model for model in listing["data"]}
            engine.models = engine.address.models or frozenset(engine.cards)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = cause_of(error)
        except (TypeError, KeyError):
            cause = "it answered with other JSON than a list of models"
        if cause and cause != engine.unlisted_because:
            level = logging.DEBUG if engine.address.models else logging.WARNING
            log.log(level, "lmc router: could not read the models of %s: %s", engine.url, cause)
        engine.unlisted_because = cause

    async def _get(self, engine: Engine, path: str, *, json: bool = False) -> Any:
        """Return the JSON of an answer, or `True` without `json`. Raises `StatusError` if its status is not 200."""
        async with self._session.get(
            engine.url + path, headers=self._settings.login, timeout=HEALTH_TIMEOUT
        ) as response:
            if response.status != HTTPStatus.OK:
                raise StatusError(path, response.status, has_key=bool(self._settings.api_key))
            return await response.json() if json else True


class StatusError(ValueError):
    """An engine answered with another status than 200."""

    def __init__(self, path: str, status: int, *, has_key: bool) -> None:
        """`has_key` is whether the request had an API key."""
        text = f"it answered {path} with {status}"
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            text += "; check the key in --api-key" if has_key else "; set --api-key to the engines' key"
        super().__init__(text)


def cause_of(error: Exception) -> str:
    """Return why a request to an engine failed, as a clause."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        return f"its certificate is not trusted ({reason}); set SSL_CERT_FILE to the certificate of its issuer"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its host name was not resolved"
    if isinstance(error, TimeoutError):
        return f"it did not answer within {HEALTH_TIMEOUT.total:g} s"
    if has_ended(error):
        return "it refused the connection"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _health_log(url: str, cause: str) -> tuple[int, str, *tuple[str, ...]]:
    if not cause:
        return logging.INFO, "lmc router: engine %s passed its health check", url
    text = "lmc router: engine %s failed its health check and will get no requests until it passes one: %s"
    return logging.WARNING, text, url, cause


def keep_up(work: Callable[[], Awaitable[None]], name: str, pause: float = TASK_RETRY_SECONDS) -> asyncio.Task[None]:
    """Start a task that repeats some work until it is cancelled. `name` names the work in the log.

    An error ends one run and is logged, and the next run starts after `pause` seconds.
    """
    task = asyncio.create_task(_repeat(work, name, pause))
    task.add_done_callback(lambda finished: _report(finished, name))
    return task


async def attempt(work: Callable[[], Awaitable[None]], name: str, before: str = "") -> str:
    """Run some work once, and return its error, or an empty string. An error equal to `before` is not logged again."""
    try:
        await work()
    except LmcError as error:
        if str(error) != before:
            log.warning("lmc router: %s: %s", name, error)
        return str(error)
    except Exception as error:
        log.exception("lmc router: %s failed and will be retried", name, exc_info=repr(error) != before)
        return repr(error)
    return ""


async def _repeat(work: Callable[[], Awaitable[None]], name: str, pause: float) -> None:
    error = ""
    while True:
        error = await attempt(work, name, error)
        await asyncio.sleep(pause)


def _report(task: asyncio.Task[None], name: str) -> None:
    """Log the error that ended a task, because nothing awaits the task."""
    if not task.cancelled() and (error := task.exception()):
        log.error("lmc router: %s ended with an error", name, exc_info=error)
