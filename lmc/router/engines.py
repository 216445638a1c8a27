"""The engines of a router: their addresses, health, load and circuit breakers."""

import asyncio
import errno
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lmc.errors import InputError
from lmc.http.address import host_in_url
from lmc.http.client import with_scheme
from lmc.router.policy_types import Candidate
from lmc.router.prefills import Prefill, PrefillQueue

log = logging.getLogger(__name__)

BREAKER_FAILURES = 3  # failed requests in a row that open the circuit breaker
MAX_ERRORS = 10  # answers 500 in a row that open the circuit breaker, while other engines of the model answer
FAILED_CHECKS = 3  # failed health checks in a row that abort an engine's requests
FIRST_BREAKER_SECONDS, MAX_BREAKER_SECONDS = 1.0, 30.0  # seconds that a breaker is open; each failed trial doubles them
DEFAULT_RATE = 10_000.0  # tokens per second, until any engine has been measured
EQUAL_RATE_FACTOR = 1.5  # rates within this factor count as equal, because measured rates vary as much
MAX_RATE_FACTOR = 8.0  # rates beyond this factor count as at it, so an engine is neither banished nor gets everything
KV_EVENTS = re.compile(r"tcp://\S+:\d{1,5}|(ipc|inproc)://\S+")


class EngineAddress(NamedTuple):
    """The addresses of an engine, with its configured models and cache."""

    url: str
    models: frozenset[str] = frozenset()  # names of the models that it serves; if empty, the router reads /v1/models
    cache: str = ""  # the name of its cache; engines of one cache server share one name
    admin: str = ""  # its LMC_ADMIN endpoint
    kv_events: str = ""  # address of its KV events, and after a + their replay address


def address(
    url: str, models: Collection[str] = (), cache: str = "", admin: str = "", kv_events: str = ""
) -> EngineAddress:
    """Return an engine's address. Raises `InputError` if `url`, `admin` or `kv_events` is invalid."""
    for part in kv_events.strip().split("+") if kv_events.strip() else ():
        if not KV_EVENTS.fullmatch(part):
            raise InputError(
                f"{kv_events!r} is not an address of KV events: use tcp://host:5557, or two addresses joined by +"
            )
    admin_url = _checked(with_scheme(admin.strip())) if admin.strip() else ""
    return EngineAddress(_checked(url).removesuffix("/v1"), frozenset(models), cache, admin_url, kv_events.strip())


class EnginePorts(NamedTuple):
    """Ports that all engines have in common; 0 for none."""

    admin: int = 0
    kv_events: int = 0
    kv_replay: int = 0

    def completed(self, address: EngineAddress) -> EngineAddress:
        """Return an address with missing endpoints filled in, at the engine's host and these ports."""
        host = host_in_url(urlsplit(address.url).hostname or "")
        admin = f"http://{host}:{self.admin}" if self.admin else ""
        events = "+".join(f"tcp://{host}:{port}" for port in (self.kv_events, self.kv_replay) if port)
        return address._replace(admin=address.admin or admin, kv_events=address.kv_events or events)


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
        valid = (
            url.strip().isprintable()
            and " " not in url.strip()
            and parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and not parts.query
            and not parts.username
        )
    except ValueError:  # a port that is not a number, or an IPv6 address without its bracket
        valid = False
    if not valid:
        raise InputError(f"{url!r} is not the URL of an engine: use one such as http://host:8000")
    return url.strip().rstrip("/")


def has_ended(error: object) -> bool:
    """Return whether an error means that an engine's process has ended, because it refuses connections.

    An engine that times out, or whose name is not resolved, may still have its memory.
    """
    return isinstance(error, OSError) and error.errno == errno.ECONNREFUSED


@dataclass(slots=True)
class EngineBreaker:
    """Keeps requests away from an engine that has failed several times in a row, and then lets one try.

    Only what that one finds makes the pause longer. Requests that were sent before and fail later say nothing new.
    """

    failures: int = 0  # in a row
    pause: float = FIRST_BREAKER_SECONDS
    until: float = 0.0  # when it may be tried again
    trying: bool = False  # whether a request is trying it

    def state(self, now: float) -> str:
        """Return `closed` (requests pass), `open` (none passes), or `half-open` (one trial passes)."""
        if self.failures < BREAKER_FAILURES:
            return "closed"
        return "half-open" if now >= self.until and not self.trying else "open"

    def sent(self) -> bool:
        """Count a request, and return whether it is the trial of a half-open breaker."""
        self.trying = self.failures >= BREAKER_FAILURES
        return self.trying

    def succeeded(self) -> None:
        """Record a success, which closes the breaker."""
        self.failures, self.pause, self.trying = 0, FIRST_BREAKER_SECONDS, False

    def passed(self) -> None:
        """Record a passed health check: a trial may start at once, and a running trial closes the breaker."""
        self.until = 0.0
        if self.trying:  # The engine responds while it computes the trial. One more failure opens the breaker.
            self.failures, self.trying = BREAKER_FAILURES - 1, False

    def failed(self, now: float, *, trial: bool = False) -> None:
        """Record a failure, of a trial or any other request."""
        self.failures += 1
        if trial:
            self.pause = min(2 * self.pause, MAX_BREAKER_SECONDS)
        if trial or self.failures == BREAKER_FAILURES:
            self.until = now + self.pause

    def open(self, now: float, *, trial: bool) -> None:
        """Open at once, because of other signs than failures."""
        self.failures = max(self.failures, BREAKER_FAILURES - 1)
        self.failed(now, trial=trial)

    def ended(self, *, trial: bool) -> None:
        """Record the end of a request, with any result."""
        self.trying &= not trial


@dataclass(slots=True)
class Engine:
    """One vLLM server."""

    address: EngineAddress
    candidate: Candidate
    models: frozenset[str]
    cards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # its models by name, as /v1/models lists them
    breaker: EngineBreaker = field(default_factory=EngineBreaker)
    healthy: bool = True  # according to the last health check
    unhealthy_because: str = ""  # why this check failed, as it was logged
    unlisted_because: str = ""  # why its models could not be read, as it was logged
    gone: bool = False  # whether its process has ended since it was healthy, which empties its memory
    draining: bool = False
    missing: bool = False  # whether the last lookup did not find it
    failed_checks: int = 0  # in a row
    failing_since: float = 0.0  # time of the first of them
    # Timeouts of the requests that wait for it, with the times since when they wait.
    awaited: dict[asyncio.Timeout, float] = field(default_factory=dict)
    prefills: PrefillQueue = field(default_factory=PrefillQueue)
    drain_rate: float = 0.0  # tokens per second that leave its backlog; 0 until any engine has been measured
    requests: int = 0  # sent so far
    errors: int = 0  # answers 500 in a row
    erring_since: float = 0.0  # time of the first of them
    answered: float = float("-inf")  # time of its last other answer

    @property
    def url(self) -> str:
        """Its URL, which is also its name."""
        return self.address.url

    def serves(self, model: str) -> bool:
        """Whether it serves a model, or may serve it; an empty name stands for any model."""
        return not model or not self.models or model in self.models

    def usable(self, now: float) -> bool:
        """Whether it may get requests: it is healthy, not draining, and its breaker is not open."""
        return self.healthy and not self.draining and self.breaker.state(now) != "open"

    def checked(self, up: bool, *, ended: bool = False) -> None:
        """Record the result of a health check. `ended` means that its process refuses connections.

        Requests that wait for an engine which is down are aborted, unless a part of their answer has arrived since the
        first failed check. A single failed check means little: an engine that tokenizes long prompts may be late.
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

    def sent(self, tokens: float, *, streamed: bool) -> Prefill:
        """Count a request whose prompt has `tokens` to compute, and return the prompt."""
        self.requests += 1
        self.candidate.load += 1
        prefill = self.prefills.add(tokens, streamed=streamed)
        self.update_backlog()
        return prefill

    def begun(self, prefill: Prefill) -> None:
        """Record the first token of a request."""
        self.prefills.begin(prefill)
        self.update_backlog()

    def ended(self, prefill: Prefill) -> None:
        """Record the end of a request, with any result."""
        self.candidate.load -= 1
        self.prefills.end(prefill)
        self.update_backlog()

    def update_backlog(self) -> None:
        """Remove from the backlog what the engine has computed since."""
        self.candidate.backlog = self.prefills.backlog(self.drain_rate)

    def set_rate(self, usual: float) -> None:
        """Set the rate by which its expected times are estimated. `usual` is the median of all engines; 0 if unknown.

        Equal engines measure rates that differ, and a single engine may have measured something else.
        """
        rate = self.prefills.rate or usual
        if usual / EQUAL_RATE_FACTOR < rate < usual * EQUAL_RATE_FACTOR:
            rate = usual
        self.drain_rate = min(max(rate, usual / MAX_RATE_FACTOR), usual * MAX_RATE_FACTOR)
        self.candidate.rate = self.drain_rate or DEFAULT_RATE


class Engines:
    """All engines of a router. Used by one thread."""

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
            raise InputError(f"unknown engine {url}; the engines are: {', '.join(self._engines) or 'none'}")
        return self._engines[url]

    def add(self, new: EngineAddress) -> Engine:
        """Add an engine, or replace the address of an engine with this URL and end its draining."""
        new, engine = self.ports.completed(new), self._engines.get(new.url)
        if engine is None:
            engine = self._engines[new.url] = Engine(
                new, Candidate(new.url, cache=new.cache), new.models, prefills=PrefillQueue(self._clock)
            )
        elif engine.address != new:
            engine.address, engine.models, engine.candidate.cache = new, new.models, new.cache or new.url
        engine.draining = False
        return engine

    def remove(self, url: str) -> None:
        """Remove an engine. Its requests in flight continue."""
        self[url]
        del self._engines[url]

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the models of all healthy engines that are not draining, by name, as the engines list them.

        Several engines may list the same model. The values of the first one are returned, but the smallest
        `max_model_len`, because a request may go to any of them.
        """
        models: dict[str, dict[str, Any]] = {}
        for engine in self:
            names = [*engine.cards, *sorted(engine.models - engine.cards.keys())]
            for name in names if engine.healthy and not engine.draining else ():
                if name in engine.models:
                    models[name] = _merged(models.get(name, {}), engine.cards.get(name, {}))
        return models

    def knows(self, model: str) -> bool:
        """Return whether any engine serves a model, or may serve it."""
        return any(engine.serves(model) for engine in self._engines.values())

    def base_of(self, model: str) -> str:
        """Return the model to which an adapter belongs, or the model itself."""
        cards = (engine.cards[model] for engine in self._engines.values() if model in engine.cards)
        return str(next(cards, {}).get("parent") or model)

    def candidates(self, model: str, without: Collection[str] = (), *, draining: bool = False) -> list[Candidate]:
        """Return the engines that may get a request for a model; an empty name stands for any model.

        Engines that drain get no new work: they are returned only with `draining`.

        If none of them passed its last health check, all of them are returned, because faulty checks are more likely.
        Likewise, engines that the last lookup missed are returned only if there are no others.
        """
        now, of_model = self._clock(), [engine for engine in self._engines.values() if engine.serves(model)]
        usual = median([rate for engine in of_model if (rate := engine.prefills.rate)] or [0.0])
        engines = [
            engine
            for engine in of_model
            if (draining or not engine.draining) and engine.url not in without and engine.breaker.state(now) != "open"
        ]
        for engine in engines:
            engine.set_rate(usual)
            engine.update_backlog()
        up = [engine for engine in engines if engine.healthy] or engines
        up = [engine for engine in up if model in engine.models] or up  # engines with unknown models come last
        return [engine.candidate for engine in [engine for engine in up if not engine.missing] or up]

    def note_answer(self, engine: Engine, model: str, *, error: bool, trial: bool) -> None:
        """Record an answer of an engine for its breaker.

        An `error` is an answer 500. The cause may be the request, so it counts as a failure only after some in a row,
        while another engine of the model has given other answers.
        """
        now = self._clock()
        if not error:
            engine.errors, engine.answered = 0, now
            engine.breaker.succeeded()
            return
        engine.erring_since = engine.erring_since if engine.errors else now
        engine.errors += 1
        others = (other for other in self._engines.values() if other is not engine and other.serves(model))
        if engine.errors >= MAX_ERRORS and any(other.answered >= engine.erring_since for other in others):
            if engine.errors == MAX_ERRORS:
                log.warning("lmc router: %s answered 500 to %d requests in a row", engine.url, engine.errors)
            engine.breaker.open(now, trial=trial)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return one entry of /v1/models for a model of two engines."""
    lengths = [card["max_model_len"] for card in (first, second) if isinstance(card.get("max_model_len"), int)]
    return {**second, **first, **({"max_model_len": min(lengths)} if lengths else {})}
