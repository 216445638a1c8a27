"""One request at one engine: it is sent there, and its answer begins, or the engine has failed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from lmc.router.engines import Engine, has_ended
from lmc.router.policy import RoutingChoice

RETRIED = (502, 503, 504)  # answers of an engine that is not up; another one is asked


class EngineFailed(Exception):
    """An engine has not answered, or not to the end."""

    def __init__(self, engine: Engine, why: object) -> None:
        self.ended = has_ended(why)
        # An engine that has a request and says nothing for long may be at work on it. A second one would do it again.
        self.silent = isinstance(why, aiohttp.SocketTimeoutError)
        said = getattr(why, "strerror", None) or str(why) or type(why).__name__
        super().__init__(f"{engine.url}: {said}")


class Opened(NamedTuple):
    """An answer that has begun."""

    answer: aiohttp.ClientResponse
    first: bytes


@dataclass(slots=True)
class Visit:
    """One request at one engine."""

    engine: Engine
    choice: RoutingChoice
    cost: float  # tokens that the engine is expected to compute
    began: float
    alone: bool  # whether nothing else waited there
    trial: bool  # whether it finds out if the engine is up again
    take_back: Callable[[], None] | None  # what the policy has noted
    answered: bool = False  # whether its answer has begun
    waiting: bool = True  # whether the cost is in the engine's backlog

    async def open(
        self, session: aiohttp.ClientSession, target: str, body: bytes, headers: CIMultiDict[str], method: str = "POST"
    ) -> Opened:
        """Send a request, and wait for the first bytes of the answer; raise `EngineFailed` if none come."""
        url = URL(self.engine.url + target, encoded=True)
        with ExitStack() as unless_it_begins:
            async with self.while_up():
                answer = await session.request(method, url, data=body or None, headers=headers, allow_redirects=False)
                unless_it_begins.callback(answer.close)
                if answer.status in RETRIED:
                    raise EngineFailed(self.engine, f"{answer.status} {answer.reason}")
                first = await answer.content.readany()
            unless_it_begins.pop_all()
        self.answered = True
        return Opened(answer, first)

    @asynccontextmanager
    async def while_up(self) -> AsyncIterator[None]:
        """Wait for the engine; raise `EngineFailed` if it fails, or if health checks find that it is down."""
        try:
            async with asyncio.timeout(None) as limit:
                self.engine.awaited[limit] = time.monotonic()
                try:
                    yield
                finally:
                    del self.engine.awaited[limit]
        except (aiohttp.ClientError, OSError) as error:
            why = "health checks have found it down" if limit.expired() else error
            raise EngineFailed(self.engine, why) from None

    def begun(self) -> None:
        """Note that the answer has begun, or never will: the prompt is computed."""
        if self.waiting:
            self.waiting = False
            self.engine.candidate.backlog = max(0.0, self.engine.candidate.backlog - self.cost)

    def failed(self, now: float, error: EngineFailed) -> None:
        """Note that the engine has failed."""
        self.engine.breaker.failed(now, trial=self.trial)
        self.engine.gone |= error.ended
        if self.take_back and not self.answered and not error.silent:
            self.take_back()

    def ended(self) -> None:
        """Note that the engine has nothing to do with the request any more."""
        self.begun()
        self.engine.breaker.ended(trial=self.trial)
        self.engine.candidate.load -= 1
