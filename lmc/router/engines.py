"""The engines behind a router: what they are doing, and which of them may get a request."""

import asyncio
import errno
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

from lmc.errors import InputError
from lmc.http_client import with_scheme
from lmc.router.policy import Candidate

FAILURES = 3  # in a row, after which an engine gets no requests for a while
FAILED_CHECKS = 3  # in a row, after which requests that an engine has are given up
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds of that while, which doubles each time
USUAL_RATE = 10_000.0  # tokens computed in a second, for engines of which none has been measured
MEASURED_TOKENS = 256  # An engine takes some time for any request, so that few tokens tell nothing.
ALIKE = 1.5  # Engines whose rates differ by less are taken for equal: a measured rate varies as much.
KV_EVENTS = re.compile(r"tcp://\S+:\d{1,5}|(ipc|inproc)://\S+")
RATE_MEMORY = 0.1  # of a measured rate, what the last request counts


class EngineAddress(NamedTuple):
    """Where an engine is, and what is said of it."""

    url: str
    models: frozenset[str] = frozenset()  # that it serves; if empty, it is asked
    cache: str = ""  # a name that engines of one cache server have in common
    admin: str = ""  # its administration endpoint, LMC_ADMIN
    kv_events: str = ""  # where it publishes vLLM's KV events, and behind a + where they can be asked for again


def address(
    url: str, models: Collection[str] = (), cache: str = "", admin: str = "", kv_events: str = ""
) -> EngineAddress:
    """Return an engine's address; raise `InputError` if `url`, `admin` or `kv_events` is none of a server."""
    for one in kv_events.strip().split("+") if kv_events.strip() else ():
        if not KV_EVENTS.fullmatch(one):
            raise InputError(f"{kv_events!r} is no address of KV events: give tcp://host:5557, or two with + between")
    asked = _checked(with_scheme(admin.strip())) if admin.strip() else ""
    return EngineAddress(_checked(url).removesuffix("/v1"), frozenset(models), cache, asked, kv_events.strip())


class EnginePorts(NamedTuple):
    """Ports that all engines have alike; 0 for those that they do not have."""

    admin: int = 0
    kv_events: int = 0
    kv_replay: int = 0

    def completed(self, given: EngineAddress) -> EngineAddress:
        """Return an address with those of administration and KV events, at the host of the engine, that it lacks."""
        host = urlsplit(given.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        admin = f"http://{host}:{self.admin}" if self.admin else ""
        events = "+".join(f"tcp://{host}:{port}" for port in (self.kv_events, self.kv_replay) if port)
        return given._replace(admin=given.admin or admin, kv_events=given.kv_events or events)


def _checked(url: str) -> str:
    parts = urlsplit(url.strip())
    try:
        right = (
            url.strip().isprintable()
            and " " not in url.strip()
            and parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and not parts.query
        )
    except ValueError:  # a port that is no number
        right = False
    if not right or parts.username:
        raise InputError(f"{url!r} is no engine: give a URL such as http://host:8000")
    return url.strip().rstrip("/")


def has_ended(error: object) -> bool:
    """Return whether an error says that nobody listens at an engine's address: its process has ended.

    An engine that does not answer in time, or is not found by its name, may have all its memory.
    """
    return isinstance(error, OSError) and error.errno == errno.ECONNREFUSED


@dataclass(slots=True)
class EngineBreaker:
    """Keeps requests away from an engine that has failed several times in a row, and then lets one try.

    Only what that one finds makes the pause longer. Requests that were sent before and fail later say nothing new.
    """

    failures: int = 0  # in a row
    pause: float = FIRST_PAUSE
    until: float = 0.0  # when it may be tried again
    trying: bool = False  # whether a request is trying it

    def state(self, now: float) -> str:
        """Return `closed` (requests go through), `open` (none does), or `half-open` (one may try)."""
        if self.failures < FAILURES:
            return "closed"
        return "half-open" if now >= self.until and not self.trying else "open"

    def sent(self) -> bool:
        """Note that a request goes there, and return whether it is the one that tries."""
        self.trying = self.failures >= FAILURES
        return self.trying

    def succeeded(self) -> None:
        """Note that it has answered a request."""
        self.failures, self.pause, self.trying = 0, FIRST_PAUSE, False

    def passed(self) -> None:
        """Note that it has passed a health check: a request may try it now, and others if one is trying it already."""
        self.until = 0.0
        if self.trying:  # It is up and at work; the next failure opens the breaker again.
            self.failures, self.trying = FAILURES - 1, False

    def failed(self, now: float, *, trial: bool = False) -> None:
        """Note that it has not answered a request, which was perhaps the one that tried."""
        self.failures += 1
        if trial:
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        if trial or self.failures == FAILURES:
            self.until = now + self.pause

    def ended(self, *, trial: bool) -> None:
        """Note that a request has ended, whatever has become of it."""
        self.trying &= not trial


@dataclass(slots=True)
class Engine:
    """One vLLM server."""

    address: EngineAddress
    candidate: Candidate
    models: frozenset[str]
    breaker: EngineBreaker = field(default_factory=EngineBreaker)
    healthy: bool = True  # as the last look at it has found
    gone: bool = False  # whether it has ended since it was healthy, and its memory with it
    draining: bool = False
    missing: bool = False  # whether the last lookup of the engines has missed it
    failed_checks: int = 0  # in a row
    failing_since: float = 0.0  # when the first of them was noted
    # Limits of requests that wait for it to say something, and since when they do.
    awaited: dict[asyncio.Timeout, float] = field(default_factory=dict)
    rate: float = 0.0  # measured; 0 if it has not been
    requests: int = 0  # that it has been sent

    @property
    def url(self) -> str:
        """Its name, and where it is."""
        return self.address.url

    def serves(self, model: str) -> bool:
        """Whether it has a model, or may have it; an empty one is any model."""
        return not model or not self.models or model in self.models

    def usable(self, now: float) -> bool:
        """Whether it is up, as far as is known, and may get requests."""
        return self.healthy and not self.draining and self.breaker.state(now) != "open"

    def checked(self, up: bool, *, ended: bool = False) -> None:
        """Note whether it has passed a health check, or has even `ended`.

        Requests that wait for an engine which is down are given up, unless something of their answers has come since
        the first of the checks that failed. A single check that fails means little: an engine that cuts long prompts
        into tokens may be late.
        """
        self.healthy, self.gone = up, self.gone or ended
        if not up and not self.failed_checks:
            self.failing_since = time.monotonic()
        self.failed_checks = 0 if up else self.failed_checks + 1
        if up:
            self.breaker.passed()
        elif ended or self.failed_checks >= FAILED_CHECKS:
            for limit, since in self.awaited.items():
                if ended or since < self.failing_since:
                    limit.reschedule(0.0)

    def measured(self, tokens: float, seconds: float) -> None:
        """Take note of how long it took to compute tokens, while nothing else waited there."""
        if tokens >= MEASURED_TOKENS and seconds > 0:
            rate = tokens / seconds
            self.rate += (rate - self.rate) * (RATE_MEMORY if self.rate else 1.0)


class Engines:
    """All engines that a router knows. Used in one thread."""

    def __init__(self, ports: EnginePorts | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines: dict[str, Engine] = {}
        self.ports, self._clock = ports or EnginePorts(), clock

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def __contains__(self, url: str) -> bool:
        return url in self._engines

    def __getitem__(self, url: str) -> Engine:
        if url not in self._engines:
            raise InputError(f"no engine {url}: there are {', '.join(self._engines) or 'none'}")
        return self._engines[url]

    def add(self, new: EngineAddress) -> Engine:
        """Add an engine. One that is there already takes requests again if it was being drained.

        What is said of it now replaces what was said before.
        """
        new, known = self.ports.completed(new), self._engines.get(new.url)
        if known is None:
            known = self._engines[new.url] = Engine(new, Candidate(new.url, cache=new.cache), new.models)
        elif known.address != new:
            known.address, known.models, known.candidate.cache = new, new.models, new.cache or new.url
        known.draining = False
        return known

    def remove(self, url: str) -> None:
        """Remove an engine. What it is answering goes on."""
        self[url]
        del self._engines[url]

    def models(self) -> list[str]:
        """Return the models of all engines that can be used."""
        return sorted({model for one in self for model in one.models if one.healthy and not one.draining})

    def knows(self, model: str) -> bool:
        """Return whether any engine has a model, or may have it."""
        return any(one.serves(model) for one in self._engines.values())

    def candidates(self, model: str, without: Collection[str] = ()) -> list[Candidate]:
        """Return the engines that may get a request for a model; an empty one is any model.

        If none of them has passed its last health check, all of them may get it, because it is more likely that the
        checks were at fault. In the same way, those that the last lookup has missed may get it if there are no others.
        """
        now = self._clock()
        usual = median([one.rate for one in self._engines.values() if one.rate] or [USUAL_RATE])
        found = [
            one
            for one in self._engines.values()
            if one.serves(model) and not one.draining and one.url not in without and one.breaker.state(now) != "open"
        ]
        for one in found:
            alike = not one.rate or usual / ALIKE < one.rate < usual * ALIKE
            one.candidate.rate = usual if alike else one.rate
        up = [one for one in found if one.healthy] or found
        up = [one for one in up if model in one.models] or up  # before those that have not said which ones they have
        return [one.candidate for one in [one for one in up if not one.missing] or up]

    def sent(self, url: str, cost: float) -> Engine:
        """Note that an engine is sent a request whose prompt costs it so many tokens."""
        one = self._engines[url]
        one.requests += 1
        one.candidate.load += 1
        one.candidate.backlog += cost
        return one
