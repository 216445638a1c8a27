"""Forwards requests to engines and their answers to clients, byte for byte, as an ASGI application.

If an engine fails before the first byte of its answer, the request goes to another one. An answer that breaks off later
breaks off for the client too. If the client disconnects, so does the router from the engine.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from lmc.errors import InputError
from lmc.http.server import Receive, Send
from lmc.router import router_metrics as numbers
from lmc.router.client import REQUEST_ID_HEADER, Client, Refusal, Room, sent_back, sent_on
from lmc.router.cut import MAX_CHARACTERS
from lmc.router.document_search import DocumentSearch
from lmc.router.engines import Engines
from lmc.router.local_tokenizers import LocalTokenizers
from lmc.router.policies.base import Policy
from lmc.router.policy_types import Candidate, PromptRequest
from lmc.router.requests import (
    COMPUTING,
    PREFILLING,
    RESPONSES,
    Received,
    ResponseHomes,
    about_a_response,
    read,
    response_of,
)
from lmc.router.router_metrics import RouterMetrics
from lmc.router.settings import RouterSettings
from lmc.router.visit import EngineFailed, FirstToken, Opened, Visit, usage

log = logging.getLogger(__name__)

STREAM_TYPE = "text/event-stream"  # content type of a streamed answer
JSON_HEADERS = {"content-type": "application/json"}  # required by vLLM, and not added by the session
SHORT_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
IDLE_CONNECTION_SECONDS = 3.0  # for idle connections; vLLM closes them after 5 s, and a request must not race with that
TAIL_BYTES = 4096  # bytes at the end of an answer, which report what was reused


class ShortAnswer(NamedTuple):
    """An engine's whole answer to a short request."""

    engine: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    content: bytes


class Proxy:
    """Answers clients. Runs in the thread of the event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        policy: Policy,
        engines: Engines,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._policy, self._engines = settings, policy, engines
        self._metrics, self._clock = metrics, clock
        self.session: aiohttp.ClientSession | None = None  # connections to engines; None while closed
        self.tokenizers: LocalTokenizers | None = None  # the router's own tokenizers, if any
        self.answering = 0  # requests in flight
        self._cutter = policy.needs.cutter
        self._special_strings = {} if self._cutter is None else self._cutter.special_strings
        # For the documents that the cutter notes and engines report.
        self.search = DocumentSearch(base_of=engines.base_of)
        self._homes, self._room = ResponseHomes(), Room(settings.max_held)

    async def open(self) -> aiohttp.ClientSession:
        """Open the pool of connections to engines."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._settings.connect_seconds, sock_read=self._settings.answer_seconds
        )
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS),
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
        )
        return self.session

    async def close(self) -> None:
        """Close all connections to engines."""
        if self.session is not None:
            await self.session.close()
        self.search.close()

    def methods(self, scope: Mapping[str, Any]) -> Sequence[str]:
        """Return the methods with which a request's path is forwarded to engines; none if it is not forwarded."""
        path = scope["path"]
        if scope.get("raw_path", b"").partition(b"?")[0] != path.encode():  # An engine may decode it differently.
            return ()
        if path in COMPUTING or path in self._settings.allowed_paths:
            return ("POST",)
        return ("GET", "POST", "DELETE") if response_of(path) else ()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        arrived, self.answering = self._clock(), self.answering + 1
        client = Client(scope, receive, send)
        try:
            if self.answering > self._settings.max_requests:
                self._metrics.count(numbers.REFUSED)
                limit = self._settings.max_requests
                raise Refusal(429, f"more than {limit} requests are in flight: try again later")
            await self._answer(client, arrived)
        except InputError as error:
            await client.refuse(Refusal(400, str(error)))
        except Refusal as refusal:
            await client.refuse(refusal)
        except Exception:
            log.exception("lmc router: request for %s failed", scope["path"])
            await client.refuse(Refusal(500, "unexpected error in the router; see its log"))
        finally:
            self.answering -= 1
            self._room.taken -= client.held
            self._metrics.count(numbers.ANSWERS, str(client.status))

    async def _answer(self, client: Client, arrived: float) -> None:
        body = await client.body(self._settings.max_body, self._room)
        response = response_of(client.path)
        received = about_a_response(response) if response else await self.understood(body, client.headers)
        received = received._replace(prefills=client.path in PREFILLING)
        work = asyncio.create_task(self._work(received, body, client, arrived))
        leaving = asyncio.create_task(client.leaves())
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._metrics.count(numbers.CLIENTS_LEFT)
        finally:
            work.cancel()  # This closes the connection to the engine, which then stops computing.
            leaving.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
        if not work.cancelled():
            work.result()

    def _read(self, body: bytes, headers: Mapping[str, str]) -> Received:
        settings = self._settings
        return read(body, headers, settings.session_key, settings.special_string, self._special_strings)

    def special_string_of(self, model: str) -> str:
        """Return the separator of a model's engines."""
        return self._special_strings.get(model, self._settings.special_string)

    async def understood(self, body: bytes, headers: Mapping[str, str]) -> Received:
        """Return the request in a body, with the prompt's tokens if they are needed and available, and known documents.

        Raises `InputError` if the body is not a valid request.
        """
        received = await self._tokenized(self._read(body, headers))
        if self._cutter is None:
            return received
        by_tokens = self._cutter.reads_tokens(received.request)
        found = await self.search.find(received.request, by_tokens=by_tokens)
        return received._replace(request=replace(received.request, found=found))

    async def _tokenized(self, received: Received) -> Received:
        exact = self._settings.exact_tokens or self._policy.needs.tokens
        exact = exact or received.request.model in self._settings.tokenizers
        if not exact or received.tokenize is None:
            return received
        try:
            tokens = await self.tokenize(received.request.model, received.tokenize, len(received.request.text))
        except InputError as error:
            log.debug("lmc router: cutting a prompt by its text: %s", error)
            return received
        return received._replace(request=replace(received.request, tokens=tokens), tokens=len(tokens))

    async def _work(self, received: Received, body: bytes, client: Client, arrived: float) -> None:
        """Send a request to engines until one answers, and forward the answer to the client."""
        failed: set[str] = set()
        without = {"authorization"} if self._settings.client_tokens else set()  # Client tokens end at the router.
        headers = sent_on(client.header_list, self._settings.login, without)
        client.request_id = headers[REQUEST_ID_HEADER]
        while True:
            with self._visit(received, failed) as visit:
                if not failed:
                    self._metrics.observe(numbers.ROUTING_SECONDS, self._clock() - arrived)
                is_last = partial(self._is_last, received, {*failed, visit.engine.url})
                try:
                    opened = await visit.open(self._connections, client.target, body, headers, client.method, is_last)
                except EngineFailed as error:
                    failed.add(visit.engine.url)
                    self._note_failure(visit, error)
                    if error.silent:
                        raise Refusal(504, f"the engine timed out: {self._public_error(visit, error)}") from None
                    if is_last():
                        raise Refusal(
                            502, f"all attempts failed; the last error: {self._public_error(visit, error)}"
                        ) from None
                    self._metrics.count(numbers.RETRIES, visit.engine.url)
                    continue
                async with opened.answer:
                    await self._send_back(received, visit, opened, client, arrived)
                return

    async def ask(self, target: str, body: bytes) -> tuple[str, Mapping[str, Any]]:
        """Send a request of the router's own to an engine, and return the engine and its answer. Raises `Refusal`."""
        headers = CIMultiDict({**JSON_HEADERS, **self._settings.login})
        received = self._read(body, {})
        with self._visit(received, set()) as visit:
            try:
                opened = await visit.open(self._connections, target, body, headers)
                async with opened.answer, visit.while_up():
                    content = opened.first + await opened.answer.content.read()
                self._note_answer(received.request, visit)
                answer = msgspec.json.decode(content)
            except EngineFailed as error:
                self._note_failure(visit, error)
                raise Refusal(502, f"the engine failed: {error}") from None
            except msgspec.DecodeError as error:
                raise Refusal(502, f"{visit.engine.url} answered with invalid JSON: {error}") from None
            if opened.answer.status != 200 or not isinstance(answer, dict):
                raise Refusal(502, f"{visit.engine.url} answered {opened.answer.status}: {content[:200]!r}")
            return visit.engine.url, answer

    async def tokenize(self, model: str, fields: Mapping[str, Any], characters: int = 0) -> list[int]:
        """Return the tokens for a body of /tokenize, from the router's tokenizer or else the least loaded engine.

        Raises `InputError` if the engine fails, or if the prompt is longer than any engine takes.
        """
        if characters >= MAX_CHARACTERS:  # Longer prompts were cut there.
            raise InputError("the prompt is too long")
        if self.tokenizers is not None and model in self.tokenizers:
            try:
                return await self.tokenizers.tokens(model, fields)
            except InputError as error:
                log.debug("lmc router: requesting tokens from an engine: %s", error)
        answer = await self.short("POST", "/tokenize", JSON_HEADERS, msgspec.json.encode(fields), model)
        if answer.status != 200:
            raise InputError(f"{answer.engine}/tokenize answered {answer.status}: {answer.content[:200]!r}")
        try:
            return list(msgspec.json.decode(answer.content)["tokens"])
        except (msgspec.DecodeError, TypeError, KeyError) as error:
            raise InputError(f"{answer.engine}/tokenize returned no tokens: {error}") from None

    async def short(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None = None, model: str = ""
    ) -> "ShortAnswer":
        """Send a request that computes little to the least loaded engine, and return its answer.

        Raises `InputError` if no engine is available, or the engine fails.
        """
        candidates = self._engines.candidates(model)
        if not candidates or self.session is None:
            of_model = f" for the model {model!r}" if model else ""
            raise InputError(f"no engine is available{of_model}: try again later")
        engine = min(candidates, key=lambda candidate: candidate.load).name
        url, headers = URL(engine + target, encoded=True), CIMultiDict({**headers, **self._settings.login})
        try:
            async with self.session.request(
                method, url, data=body, headers=headers, timeout=SHORT_TIMEOUT, allow_redirects=False
            ) as answer:
                return ShortAnswer(engine, answer.status, answer.raw_headers, await answer.read())
        except (aiohttp.ClientError, OSError) as error:
            raise InputError(f"{url} failed: {error or type(error).__name__}") from None

    @contextmanager
    def _visit(self, received: Received, failed: set[str]) -> Iterator[Visit]:
        """Choose an engine, and count the request there until the block ends."""
        request = received.request
        is_new_work = bool(not received.response or request.text)  # Reading and cancelling a stored response is not.
        candidates = self._engines.candidates(request.model, failed, draining=not is_new_work)
        if received.response:
            candidates = self._at_home(received.response, candidates)
        if not candidates:
            raise self._no_candidate(request.model)
        began = self._clock()
        choice = self._policy.choose(request, candidates)
        take_back = self._policy.sent(request, choice.engine)
        self._metrics.observe(numbers.DECISION, self._clock() - began)
        cost = choice.cost or max(received.tokens - choice.expected_tokens, 1.0)
        cost = cost if received.prefills else 0.0
        engine = self._engines[choice.engine]
        prefill, trial = engine.sent(cost, streamed=received.stream), engine.breaker.sent()
        seconds = self._settings.answer_seconds
        visit = Visit(engine, choice, prefill, trial=trial, take_back=take_back, answer_seconds=seconds)
        self._metrics.count(numbers.SENT_REQUESTS, engine.url, choice.why)
        self._metrics.count(numbers.EXPECTED, engine.url, n=choice.expected_tokens)
        try:
            yield visit
        finally:
            visit.ended()

    def _is_last(self, received: Received, failed: set[str]) -> bool:
        """Return whether a request can be sent to no other engine after these."""
        if received.response or len(failed) >= self._settings.attempts:
            return True
        return not self._engines.candidates(received.request.model, failed)

    def _at_home(self, response: str, candidates: list[Candidate]) -> list[Candidate]:
        """Return the engine that made a response. Raises `Refusal` if it is unknown or unavailable."""
        home = self._homes.engine_of(response)
        if not home and len(self._engines) != 1:
            raise Refusal(404, f"unknown response {response!r}")
        usable = [candidate for candidate in candidates if not home or candidate.name == home]
        if not usable:
            raise Refusal(
                503,
                f"{self._settings.name_of(home)} made the response {response!r} and is unavailable: try again later",
            )
        return usable

    def _public_error(self, visit: Visit, error: EngineFailed) -> str:
        """Return an engine's error for a client, without the engine's address if addresses are hidden."""
        if not self._settings.hides_engines:
            return str(error)
        return f"{self._settings.name_of(visit.engine.url)} failed; see the router's log"

    @property
    def _connections(self) -> aiohttp.ClientSession:
        assert self.session is not None
        return self.session

    def _no_candidate(self, model: str) -> Refusal:
        if not len(self._engines):
            return Refusal(503, "the router has no engines: add one at /engines, or check --discovery")
        if not self._engines.knows(model):
            models = ", ".join(self._engines.models()) or "none"
            return Refusal(404, f"The model `{model}` does not exist; there are: {models}", "model")
        return Refusal(503, "no engine of this model is available now: try again later")

    async def _send_back(
        self, received: Received, visit: Visit, opened: Opened, client: Client, arrived: float
    ) -> None:
        """Forward an answer to the client as it arrives."""
        answer, now = opened.answer, self._clock()
        if visit.answered:
            self._note_answer(received.request, visit)
        else:
            self._note_failure(visit, EngineFailed(visit.engine, f"{answer.status} {answer.reason}"))
        self._metrics.observe(numbers.FIRST_BYTE, now - arrived)
        computes = received.prefills and answer.status == HTTPStatus.OK
        first_token = FirstToken() if answer.content_type == STREAM_TYPE else None
        url, expected = visit.engine.url, visit.choice.expected_tokens
        name = self._settings.name_of(url)
        await client.begin(answer.status, sent_back(answer.raw_headers, client.request_id, name, expected))
        part, tail = opened.first, b""
        if client.path == RESPONSES:
            self._homes.note(part, url)
        try:
            while part:
                if computes and not visit.prefill.begun and (first_token is None or first_token.is_in(part)):
                    visit.engine.begun(visit.prefill)
                await client.write(part)
                tail = (tail + part)[-TAIL_BYTES:]
                async with visit.while_up(visit.answer_seconds):
                    part = await answer.content.readany()
        except EngineFailed as error:
            self._metrics.count(numbers.BROKEN, visit.engine.url)
            self._note_failure(visit, error)
            return  # without an end, so the client sees that the answer is incomplete
        await client.end()
        self._note_usage(received.request, visit, tail)

    def _note_answer(self, request: PromptRequest, visit: Visit) -> None:
        self._engines.note_answer(visit.engine, request.model, error=visit.error, trial=visit.trial)
        if visit.error:
            visit.revert()

    def _note_failure(self, visit: Visit, error: EngineFailed) -> None:
        visit.failed(self._clock(), error)
        log.warning("lmc router: an engine failed: %s", error)

    def _note_usage(self, request: PromptRequest, visit: Visit, tail: bytes) -> None:
        visit.report = report = usage(tail)
        if report.prompt_tokens is not None:
            self._metrics.count(numbers.COUNTED_PROMPT_TOKENS, visit.engine.url, n=report.prompt_tokens)
        if report.cached_tokens is not None:
            self._metrics.count(numbers.REPORTED, visit.engine.url, n=report.cached_tokens)
        self._policy.answered(request, visit.choice, report)
