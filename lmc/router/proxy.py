"""Sends requests on to engines, and their answers back, byte for byte, as an ASGI application.

A request whose engine fails before the first byte of the answer goes to another one. An answer that breaks off later
breaks off for the client, too. If the client goes away, the engine is told at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from lmc.errors import InputError
from lmc.http_server import Receive, Send
from lmc.router import router_metrics as numbers
from lmc.router.client import Client, Refusal, Room, Stalled
from lmc.router.cut import MOST_LETTERS
from lmc.router.engines import Engines
from lmc.router.headers import REQUEST, sent_back, sent_on
from lmc.router.local_tokenizers import LocalTokenizers
from lmc.router.paths import COMPUTING, RESPONSES, ResponseHomes, response_of
from lmc.router.policies.base import Policy
from lmc.router.policy import Candidate, PromptRequest
from lmc.router.questions import Received, about_a_response, read
from lmc.router.router_metrics import RouterMetrics
from lmc.router.settings import RouterSettings
from lmc.router.usage import usage
from lmc.router.visit import EngineFailed, Opened, Visit

log = logging.getLogger(__name__)

STREAM = "text/event-stream"  # the type of an answer that comes in parts, as its tokens are made
JSON = {"content-type": "application/json"}  # vLLM refuses questions without it, and the session does not add it.
TOKENIZING = aiohttp.ClientTimeout(total=5.0)
KEPT_SECONDS = 3.0  # that an idle connection is kept; vLLM closes them after 5, and a request must not meet that
TAIL = 4096  # bytes of the end of an answer, where it says what was reused


class Proxy:
    """Answers clients. Runs in one thread, that of the event loop."""

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
        self.session: aiohttp.ClientSession | None = None  # the connections to engines, while they are open
        self.tokenizers: LocalTokenizers | None = None  # the router's own, if there are any
        self.answering = 0  # requests
        cutter = policy.needs.cutter
        self._special_strings = {} if cutter is None else cutter.special_strings
        self._homes, self._room = ResponseHomes(), Room(settings.max_held)

    async def open(self) -> aiohttp.ClientSession:
        """Prepare connections to engines."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._settings.connect_seconds, sock_read=self._settings.answer_seconds
        )
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS),
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

    def takes(self, scope: Mapping[str, Any]) -> bool:
        """Return whether a request is one for engines."""
        path = scope["path"]
        if scope.get("raw_path", b"").partition(b"?")[0] != path.encode():  # An engine may read it otherwise.
            return False
        if scope["method"] == "POST" and (path in COMPUTING or path in self._settings.allowed_paths):
            return True
        return scope["method"] in ("GET", "POST", "DELETE") and bool(response_of(path))

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        arrived, self.answering = self._clock(), self.answering + 1
        client = Client(scope, receive, send)
        try:
            if self.answering > self._settings.max_requests:
                self._metrics.count(numbers.REFUSED)
                most = self._settings.max_requests
                raise Refusal(429, f"the router answers {most} requests at once: try again later")
            await self._answer(client, arrived)
        except InputError as error:
            await client.refuse(Refusal(400, str(error)))
        except Refusal as refusal:
            await client.refuse(refusal)
        except Stalled as stalled:
            self._metrics.count(numbers.LEFT)
            log.info("lmc router: an answer is given up: %s", stalled)
        except Exception:
            log.exception("lmc router: a request to %s could not be answered", scope["path"])
            await client.refuse(Refusal(500, "something unexpected has happened in the router; its log says what"))
        finally:
            self.answering -= 1
            self._room.taken -= client.held
            self._metrics.count(numbers.ANSWERS, str(client.status))

    async def _answer(self, client: Client, arrived: float) -> None:
        body = await client.body(self._settings.max_body, self._room)
        response = response_of(client.path)
        question = about_a_response(response) if response else await self.understood(body, client.headers)
        work = asyncio.create_task(self._work(question, body, client, arrived))
        leaving = asyncio.create_task(client.leaves())
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._metrics.count(numbers.LEFT)
        finally:
            work.cancel()  # This closes the connection to the engine, which then computes no more.
            leaving.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
        if not work.cancelled():
            work.result()

    def _read(self, body: bytes, headers: Mapping[str, str]) -> Received:
        settings = self._settings
        return read(body, headers, settings.session_key, settings.special_string, self._special_strings)

    def special_string_of(self, model: str) -> str:
        """Return the special string of a model's engines."""
        return self._special_strings.get(model, self._settings.special_string)

    async def understood(self, body: bytes, headers: Mapping[str, str]) -> Received:
        """Return what a body asks, with the tokens of its prompt if they are wanted and an engine says them.

        Raises `InputError` if it is no request.
        """
        question = self._read(body, headers)
        exact = self._settings.exact_tokens or self._policy.needs.tokens
        exact = exact or question.request.model in self._settings.tokenizers
        if not exact or question.tokenize is None:
            return question
        try:
            tokens = await self.tokenize(question.request.model, question.tokenize, len(question.request.text))
        except InputError as error:
            log.debug("lmc router: a prompt is cut by its text: %s", error)
            return question
        return question._replace(request=replace(question.request, tokens=tokens), tokens=len(tokens))

    async def _work(self, question: Received, body: bytes, client: Client, arrived: float) -> None:
        """Send a request to engines until one answers, and its answer to the client."""
        failed: set[str] = set()
        without = {"authorization"} if self._settings.client_tokens else set()  # They are the router's.
        headers = sent_on(client.header_list, self._settings.login, without)
        client.request_id = headers[REQUEST]
        while True:
            with self._visit(question, failed) as visit:
                if not failed:
                    self._metrics.observe(numbers.OVERHEAD, self._clock() - arrived)
                try:
                    opened = await visit.open(self._connections, client.target, body, headers, client.method)
                except EngineFailed as error:
                    failed.add(visit.engine.url)
                    self._note_failure(visit, error)
                    if error.silent:
                        raise Refusal(504, f"an engine has not answered in time: {self._told(visit, error)}") from None
                    if len(failed) >= self._settings.attempts:
                        raise Refusal(502, f"no engine has answered: {self._told(visit, error)}") from None
                    self._metrics.count(numbers.RETRIES, visit.engine.url)
                    continue
                async with opened.answer:
                    await self._send_back(question, visit, opened, client, arrived)
                return

    async def ask(self, target: str, body: bytes) -> tuple[str, Mapping[str, Any]]:
        """Ask an engine a question of the router's own, and return which one it was and its answer; raise `Refusal`."""
        headers = CIMultiDict({**JSON, **self._settings.login})
        question = self._read(body, {})
        with self._visit(question, set()) as visit:
            try:
                opened = await visit.open(self._connections, target, body, headers)
                async with opened.answer, visit.while_up():
                    found = opened.first + await opened.answer.content.read()
                visit.engine.breaker.succeeded()
                answer = msgspec.json.decode(found)
            except EngineFailed as error:
                self._note_failure(visit, error)
                raise Refusal(502, f"an engine has not answered: {error}") from None
            except msgspec.DecodeError as error:
                raise Refusal(502, f"{visit.engine.url} does not answer with JSON: {error}") from None
            if opened.answer.status != 200 or not isinstance(answer, dict):
                raise Refusal(502, f"{visit.engine.url} answers {opened.answer.status}: {found[:200]!r}")
            return visit.engine.url, answer

    async def tokenize(self, model: str, asked: Mapping[str, Any], letters: int = 0) -> list[int]:
        """Return the tokens of what is asked under /tokenize: by a tokenizer of the router, or by an engine.

        Of the engines of a model, the one that has least to do is asked. Raises `InputError` if it does not answer, or
        if the prompt is longer than any engine takes.
        """
        if letters >= MOST_LETTERS:  # What is longer has been cut there.
            raise InputError("the prompt is too long")
        if self.tokenizers is not None and model in self.tokenizers:
            try:
                return await self.tokenizers.tokens(model, asked)
            except InputError as error:
                log.debug("lmc router: an engine is asked for tokens: %s", error)
        candidates = self._engines.candidates(model)
        if not candidates or self.session is None:
            raise InputError(f"no engine of the model {model!r} can be asked now")
        url = URL(min(candidates, key=lambda one: one.load).name + "/tokenize", encoded=True)
        try:
            question, headers = msgspec.json.encode(asked), {**JSON, **self._settings.login}
            async with self.session.post(url, data=question, headers=headers, timeout=TOKENIZING) as answer:
                said = await answer.read()
                if answer.status != 200:
                    raise InputError(f"{url} answers {answer.status}: {said[:200]!r}")
                return list(msgspec.json.decode(said)["tokens"])
        except (aiohttp.ClientError, OSError, msgspec.DecodeError, TypeError, KeyError) as error:
            raise InputError(f"{url} does not answer with tokens: {error}") from None

    @contextmanager
    def _visit(self, question: Received, failed: set[str]) -> Iterator[Visit]:
        """Choose an engine, and keep account of what it has to do."""
        request = question.request
        candidates = self._engines.candidates(request.model, failed)
        if question.response:
            candidates = self._at_home(question.response, candidates)
        if not candidates:
            raise self._nobody(request.model, failed)
        began = self._clock()
        choice = self._policy.choose(request, candidates)
        take_back = self._policy.sent(request, choice.engine)
        self._metrics.observe(numbers.DECISION, self._clock() - began)
        cost = choice.cost or max(question.tokens - choice.expected_tokens, 1.0)
        engine = self._engines.sent(choice.engine, cost)
        alone, trial = engine.candidate.load == 1, engine.breaker.sent()
        visit = Visit(engine, choice, cost, began, alone=alone, trial=trial, take_back=take_back)
        self._metrics.count(numbers.REQUESTS, engine.url, choice.why)
        self._metrics.count(numbers.EXPECTED, engine.url, n=choice.expected_tokens)
        if not question.stream:  # The first byte of its answer comes with the last one.
            asyncio.get_running_loop().call_later(cost / engine.candidate.rate, visit.begun)
        try:
            yield visit
        finally:
            visit.ended()

    def _at_home(self, response: str, candidates: list[Candidate]) -> list[Candidate]:
        """Return the one engine that has made a response; raise `Refusal` if it is not known, or cannot be used."""
        home = self._homes.engine_of(response)
        if not home and len(self._engines) != 1:
            raise Refusal(404, f"no engine behind this router is known to have made the response {response!r}")
        found = [one for one in candidates if not home or one.name == home]
        if not found:
            raise Refusal(
                503, f"{self._settings.name_of(home)} has made the response {response!r}, and cannot be used now"
            )
        return found

    def _told(self, visit: Visit, error: EngineFailed) -> str:
        """Return what a client is told about an engine that has failed; errors may name its address."""
        if not self._settings.hides_engines:
            return str(error)
        return f"{self._settings.name_of(visit.engine.url)} has failed, and the router's log says why"

    @property
    def _connections(self) -> aiohttp.ClientSession:
        assert self.session is not None
        return self.session

    def _nobody(self, model: str, failed: set[str]) -> Refusal:
        if failed:
            return Refusal(502, "no engine has answered, and there is no other one")
        if not len(self._engines):
            return Refusal(503, "the router knows no engine: none was found, or none was added under /engines yet")
        if not self._engines.knows(model):
            models = ", ".join(self._engines.models()) or "none"
            return Refusal(404, f"The model `{model}` does not exist; there are: {models}", "model")
        return Refusal(503, "no engine of this model can take requests now: try again later")

    async def _send_back(
        self, question: Received, visit: Visit, opened: Opened, client: Client, arrived: float
    ) -> None:
        """Send an answer to the client as it comes."""
        answer, now = opened.answer, self._clock()
        visit.engine.breaker.succeeded()
        self._metrics.observe(numbers.FIRST_BYTE, now - arrived)
        if visit.alone and answer.content_type == STREAM:
            visit.engine.measured(visit.cost, now - visit.began)
        visit.begun()
        url, expected = visit.engine.url, visit.choice.expected_tokens
        name = self._settings.name_of(url)
        await client.begin(answer.status, sent_back(answer.raw_headers, client.request_id, name, expected))
        part, tail = opened.first, b""
        if client.path == RESPONSES:
            self._homes.note(part, url)
        try:
            while part:
                await client.write(part)
                tail = (tail + part)[-TAIL:]
                async with visit.while_up():
                    part = await answer.content.readany()
        except EngineFailed as error:
            self._metrics.count(numbers.BROKEN, visit.engine.url)
            self._note_failure(visit, error)
            return  # without an end, by which the client sees that something is missing
        await client.end()
        self._note_usage(question.request, visit, tail)

    def _note_failure(self, visit: Visit, error: EngineFailed) -> None:
        visit.failed(self._clock(), error)
        log.warning("lmc router: an engine has failed: %s", error)

    def _note_usage(self, request: PromptRequest, visit: Visit, tail: bytes) -> None:
        said = usage(tail)
        if said.prompt_tokens is not None:
            self._metrics.count(numbers.PROMPTS, visit.engine.url, n=said.prompt_tokens)
        if said.cached_tokens is not None:
            self._metrics.count(numbers.REPORTED, visit.engine.url, n=said.cached_tokens)
        self._policy.answered(request, visit.choice, said)
