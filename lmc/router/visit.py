"""One request at one engine: sending it, waiting for its answer, and reading the token counts at the answer's end."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from lmc.router.engines import Engine, has_ended
from lmc.router.policy_types import RoutingChoice, Usage
from lmc.router.prefills import Prefill

RETRIED_STATUSES = (502, 503, 504)  # statuses of an engine that is down; the request goes to another one
# vLLM answers 500 with this message when the process that computes has ended.
DEAD_ENGINE, MAX_ERROR_BYTES = b"EngineCore encountered an issue", 4096
# In generated text, quotation marks have a backslash before them.
PROMPT_TOKENS_FIELD = re.compile(rb'(?<!\\)"prompt_tokens":\s*(\d{1,9})')
GENERATED_TOKENS_FIELD = re.compile(rb'(?<!\\)"(?:completion|output)_tokens":\s*(\d{1,9})')
CACHED_TOKENS_FIELD = re.compile(rb'(?<!\\)"cached_tokens":\s*(\d{1,9})')
DOCUMENT_TOKENS_FIELD = re.compile(rb'(?<!\\)"reused_tokens":\s*(\d{1,9})')
UNKNOWN_DOCUMENTS_FIELD = re.compile(rb'(?<!\\)"unknown_documents":\s*\d')  # the only field if no token was reused
TOKENS_FROM_FIELD = re.compile(rb'(?<!\\)"tokens_from":\s*(\{[^{}]{0,500}\})')

EARLY_EVENTS = frozenset({b"response.created", b"response.in_progress", b"response.queued", b"ping"})
MAX_EVENT_LINE_BYTES = 64  # part of a line that is read to see which event begins


class EngineFailed(Exception):
    """An engine did not answer, or its answer broke off."""

    def __init__(self, engine: Engine, cause: object) -> None:
        self.ended = has_ended(cause)
        # A silent engine may still be computing the request. Sending it to a second engine would compute it twice.
        self.silent = isinstance(cause, aiohttp.SocketTimeoutError)
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        super().__init__(f"{engine.url}: {reason}")


class Opened(NamedTuple):
    """An answer that has begun, with its first bytes."""

    answer: aiohttp.ClientResponse
    first: bytes


@dataclass(slots=True)
class Visit:
    """One request at one engine."""

    engine: Engine
    choice: RoutingChoice
    prefill: Prefill
    trial: bool  # whether it tests if the engine has recovered
    take_back: Callable[[], None] | None  # reverts what the policy noted
    answer_seconds: float | None = None  # timeout for a part of the answer
    answered: bool = False  # whether its answer has begun
    error: bool = False  # whether this answer is an error of the engine
    report: Usage = field(default_factory=Usage)  # of the engine, at the end of its answer

    async def open(
        self,
        session: aiohttp.ClientSession,
        target: str,
        body: bytes,
        headers: CIMultiDict[str],
        method: str = "POST",
        is_last: Callable[[], bool] = lambda: False,
    ) -> Opened:
        """Send a request, and wait for the first bytes of the answer. Raises `EngineFailed` if the engine fails.

        If `is_last`, because no other engine can answer, the error of an engine that is down is returned as an answer.
        """
        url = URL(self.engine.url + target, encoded=True)
        with ExitStack() as on_failure:
            async with self.while_up():
                answer = await session.request(method, url, data=body or None, headers=headers, allow_redirects=False)
            on_failure.callback(answer.close)
            async with self.while_up(self.answer_seconds):
                first = await _beginning_of_error(answer) if self._is_error(answer) else b""
                is_down = answer.status in RETRIED_STATUSES or DEAD_ENGINE in first
                if is_down and not is_last():
                    raise EngineFailed(self.engine, f"{answer.status} {answer.reason}")
                first = first or await answer.content.readany()
            on_failure.pop_all()
        self.answered, self.error = not is_down, self._is_error(answer)
        return Opened(answer, first)

    @staticmethod
    def _is_error(answer: aiohttp.ClientResponse) -> bool:
        return answer.status == HTTPStatus.INTERNAL_SERVER_ERROR

    @asynccontextmanager
    async def while_up(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Wait for the engine, or for a part of its answer for up to some seconds.

        Raises `EngineFailed` if the engine fails, or if health checks find that it is down. After an invalid part of an
        answer, aiohttp waits without a timeout of its own.
        """
        try:
            async with asyncio.timeout(seconds) as limit:
                self.engine.awaited[limit] = time.monotonic()
                try:
                    yield
                finally:
                    del self.engine.awaited[limit]
        except (aiohttp.ClientError, OSError) as error:
            cause: object = error
            if limit.expired():  # Health checks set the time 0.
                cause = aiohttp.SocketTimeoutError("it sent nothing") if limit.when() else "it failed its health checks"
            raise EngineFailed(self.engine, cause) from None

    def failed(self, now: float, error: EngineFailed) -> None:
        """Record a failure of the engine, and revert the policy's note if nothing was computed."""
        self.engine.breaker.failed(now, trial=self.trial)
        self.engine.gone |= error.ended
        if not self.answered and not error.silent:
            self.revert()

    def revert(self) -> None:
        """Revert the policy's note, because nothing was computed."""
        if self.take_back:
            self.take_back()

    def ended(self) -> None:
        """Release what the request holds at the engine."""
        self.engine.breaker.ended(trial=self.trial)
        self.engine.ended(self.prefill)
        self.engine.prefills.measure(self.prefill, self._computed(), self.report.generated_tokens)

    def _computed(self) -> float | None:
        """Return how many tokens of the prompt the engine has computed, as it reports them; None if it does not."""
        prompt, cached, documents, *_ = self.report
        if prompt is None or cached is None:
            return None
        if documents is None:
            documents = max(cached - round(self.choice.prefix_tokens), 0)
        return prompt - cached + documents * self.engine.candidate.ratio


class FirstToken:
    """Finds the first token in a stream of server-sent events.

    vLLM sends some events before it computes anything, and comments while it computes (`--sse-keep-alive-interval`).
    """

    def __init__(self) -> None:
        self._line = b""  # the beginning of a line whose end has not arrived
        self._is_early = False  # whether the current event comes before the first token

    def is_in(self, part: bytes) -> bool:
        """Return whether the first token is in the next part of the stream, or in an earlier one."""
        *lines, last = (self._line + part).split(b"\n")
        for line in lines:
            if line.startswith(b"event:"):
                self._is_early = line[len(b"event:") :].strip() in EARLY_EVENTS
            elif line.startswith(b"data:") and not self._is_early:
                return True
            elif not line.strip():
                self._is_early = False
        self._line = last[:MAX_EVENT_LINE_BYTES]
        return last.startswith(b"data:") and not self._is_early


async def _beginning_of_error(answer: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of an error, which may arrive in several parts."""
    first = b""
    while len(first) < MAX_ERROR_BYTES and (part := await answer.content.readany()):
        first += part
    return first


def usage(tail: bytes) -> Usage:
    """Read from the end of an answer the tokens of its prompt, those that were reused, and those of the answer."""
    prompt, cached, documents = (
        _number(pattern.search(tail)) for pattern in (PROMPT_TOKENS_FIELD, CACHED_TOKENS_FIELD, DOCUMENT_TOKENS_FIELD)
    )
    if documents is None and UNKNOWN_DOCUMENTS_FIELD.search(tail):
        documents = 0
    places, generated = TOKENS_FROM_FIELD.search(tail), _number(GENERATED_TOKENS_FIELD.search(tail))
    return Usage(prompt, cached, documents, _places(places[1]) if places else {}, generated)


def _number(match: re.Match[bytes] | None) -> int | None:
    return int(match[1]) if match else None


def _places(text: bytes) -> Mapping[str, int]:
    try:
        return msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError:
        return {}
