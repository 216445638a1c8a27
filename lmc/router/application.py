"""The router as an ASGI application: the proxy for requests to engines, and the router's own paths.

GET /health, /ready, /ping and /version need no token. /v1/models and /metrics are for clients. /engines and /lmc/… are
administration.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmc.blend.markers import Markers
from lmc.errors import InputError
from lmc.http.server import Guard, Receive, Send
from lmc.router.client import REQUEST_ID_HEADER, Client, Refusal, error_object, sent_back, sent_on
from lmc.router.cors import OriginHeaders, RawHeaders, is_preflight
from lmc.router.cut import HOW
from lmc.router.document_tokens import DocumentTokens
from lmc.router.engines import Engine, EngineAddress, Engines, address
from lmc.router.follow import Follower
from lmc.router.local_tokenizers import LocalTokenizers
from lmc.router.policies.base import Policy
from lmc.router.proxy import Proxy, ShortAnswer
from lmc.router.requests import json_object
from lmc.router.router_metrics import (
    ENGINE_INDEXED,
    FOUND,
    INDEXED,
    IS_REPORTED,
    LAG,
    UNPLACED,
    UNREADABLE,
    UNSEARCHED,
    RouterMetrics,
)
from lmc.router.settings import RouterSettings
from lmc.router.watch import Discovery, Watch, keep_up

log = logging.getLogger(__name__)

METRICS_PATH, MODELS_PATH, ADMIN_PATHS = "/metrics", "/v1/models", ("/engines", "/lmc/")
# The router's own paths for all clients, with their methods.
PUBLIC_PATHS = {
    "/health": ["GET"], "/ready": ["GET"], "/ping": ["GET", "POST"], "/version": ["GET"], METRICS_PATH: ["GET"],
    MODELS_PATH: ["GET"],
}  # fmt: skip
NO_CLIENT = "missing or wrong token: send it as `Authorization: Bearer …`"
NO_TOKEN = "administration is off: a router that other hosts can reach needs LMC_ADMIN_TOKEN"
Handler = Callable[[Request], Awaitable[Response]]


class Router:
    """A router as an ASGI application."""

    def __init__(
        self, settings: RouterSettings, policy: Policy, engines: Engines, discovery: Discovery | None = None
    ) -> None:
        self.settings, self.policy, self.engines = settings, policy, engines
        self.metrics = RouterMetrics(settings.name_of)
        self.proxy = Proxy(settings, policy, engines, self.metrics)
        self._discovery, self._ready = discovery, False
        self._tasks: list[asyncio.Task[None]] = []
        self._watch: Watch | None = None
        self._public, private = self._applications()
        self._private = Guard(private, settings.admin_token, error=error_object)
        self._origins = OriginHeaders(self._headers_of)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] != "http":
            return
        elif not scope["path"].startswith(ADMIN_PATHS):
            scope, send = _without_slash(scope), self._origins.added(scope, send)
            client = Client(scope, receive, send)
            try:
                await self._serve(client, scope, receive, send)
            except Refusal as refusal:
                await client.refuse(refusal)
        elif self.settings.open_admin or self.settings.admin_token:
            await self._private(_without_slash(scope), receive, send)
        else:
            await Client(scope, receive, send).refuse(Refusal(403, NO_TOKEN))

    async def _serve(self, client: Client, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a request that is not administration. Raises `Refusal`."""
        path, methods = client.path, self.proxy.methods(scope)
        if not methods and path not in PUBLIC_PATHS:
            raise Refusal(404, f"the router has no {client.method} {path}")
        if is_preflight(client.method, client.headers):
            await self._preflight(client)
            return
        login = client.headers.get("authorization", "")
        if (methods or path == MODELS_PATH) and not self.settings.admits(login):
            raise Refusal(401, NO_CLIENT)
        if path == METRICS_PATH and not self.settings.may_read_metrics(login):
            raise Refusal(401, NO_CLIENT)
        if not methods:
            await self._public(scope, receive, send)
        elif client.method in methods:
            await self.proxy(scope, receive, send)
        else:
            raise Refusal(405, f"{path} takes {' and '.join(methods)}, not {client.method}", allow=", ".join(methods))

    async def _preflight(self, client: Client) -> None:
        """Have an engine answer whether web pages of an origin may send a request. Raises `Refusal`."""
        headers = sent_on(client.header_list, {}, {"authorization"})  # By the Fetch standard, it has no login.
        answer = await self._short(client.method, client.target, headers)
        name = self.settings.name_of(answer.engine)
        await client.begin(answer.status, sent_back(answer.headers, headers[REQUEST_ID_HEADER], name, 0))
        await client.write(answer.content)
        await client.end()

    async def _short(self, method: str, target: str, headers: Mapping[str, str]) -> ShortAnswer:
        """Return an engine's answer to a short request. Raises `Refusal` if no engine answers."""
        try:
            return await self.proxy.short(method, target, headers)
        except InputError as error:
            log.info("lmc router: %s", error)
            raise Refusal(503, "no engine is available: try again later") from None

    async def _headers_of(self, origin: str) -> RawHeaders:
        return (await self._short("GET", "/health", {"origin": origin})).headers

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.open()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def open(self) -> None:
        """Open connections to the engines, and start the tasks that watch them."""
        session = await self.proxy.open()
        if self.settings.tokenizers:
            self.proxy.tokenizers = LocalTokenizers(self.settings.tokenizers, self.settings.tokenizer_processes)
            read = partial(self.proxy.tokenizers.run, self.proxy.special_string_of, self._cut_as)
            self._tasks.append(keep_up(read, "loading of tokenizers"))
        if (cutter := self.policy.needs.cutter) is not None:
            lookups = DocumentTokens(self.proxy.tokenize, cutter.markers, cutter.special_string_of)
            cutter.find = lookups.find
            self._tasks.append(keep_up(lookups.run, "lookup of document tokens"))
            cutter.note = self.proxy.search.note
        follow = Follower(self.policy, session, self.settings.admin_token, self._lagged, self.proxy.search).follow
        self._watch = Watch(self.settings, self.engines, self.policy, session, self._discovery, follow)
        self._tasks += await self._watch.open()
        self._ready = True

    async def close(self) -> None:
        """Stop the tasks and close the connections."""
        self._ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._watch is not None:
            await self._watch.close()
        await self.proxy.close()
        if self.proxy.tokenizers is not None:
            self.proxy.tokenizers.close()

    def _cut_as(self, model: str, markers: Markers) -> None:
        """Cut a model's prompts at these markers, unless an engine has reported others."""
        if (cutter := self.policy.needs.cutter) is not None:
            cutter.markers.setdefault(model, markers)

    def _lagged(self, engine: str, seconds: float) -> None:
        self.metrics.set(LAG, seconds, engine)

    def _applications(self) -> tuple[Starlette, Starlette]:
        public = {
            "/health": self._health, "/ready": self._is_ready, "/ping": self._ping, "/version": self._version,
            METRICS_PATH: self._metrics, MODELS_PATH: self._models,
        }  # fmt: skip
        private = [
            ("GET", "/engines", self._listed),
            ("POST", "/engines", self._added),
            ("DELETE", "/engines", self._removed),
            ("POST", "/engines/drain", self._drained),
            ("POST", "/lmc/explain", self._explained),
            ("POST", "/lmc/learn", self._learned),
        ]
        return (
            Starlette(
                routes=[Route(path, _handler(handler), methods=PUBLIC_PATHS[path]) for path, handler in public.items()],
                exception_handlers={405: _not_found},
            ),
            Starlette(
                routes=[Route(path, _handler(handler), methods=[method]) for method, path, handler in private],
                exception_handlers={404: _not_found, 405: _not_found},
            ),
        )

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _is_ready(self, _: Request) -> Response:
        usable = sum(engine.usable(time.monotonic()) for engine in self.engines)
        return JSONResponse({"engines": usable}, 200 if self._ready and usable else 503)

    async def _ping(self, _: Request) -> Response:
        """Answer whether any engine is usable, with an empty body, as vLLM does for hosting services."""
        if not (self._ready and any(engine.usable(time.monotonic()) for engine in self.engines)):
            raise Refusal(503, "no engine is available: try again later")
        return Response()

    async def _version(self, _: Request) -> Response:
        """Answer the version of an engine."""
        answer = await self._short("GET", "/version", {})
        if answer.status != 200:
            raise Refusal(502, f"{self.settings.name_of(answer.engine)} answered {answer.status}")
        return Response(answer.content, media_type="application/json")

    async def _metrics(self, _: Request) -> Response:
        self._count_index()
        return Response(self.metrics.text(self.engines, time.monotonic()), media_type="text/plain; version=0.0.4")

    def _count_index(self) -> None:
        """Set the metrics of the indexes that the policy needs."""
        documents, blocks = self.policy.needs.documents, self.policy.needs.blocks
        for engine in self.engines:
            sizes: dict[str, int] = {}
            if documents is not None:
                sizes |= documents.sizes(engine.candidate.cache)
                self.metrics.set(IS_REPORTED, documents.is_reported(engine.candidate.cache), engine.url)
            if blocks is not None:
                sizes["blocks reported"] = blocks.count(engine.url)
            for kind, count in sizes.items():
                self.metrics.set(ENGINE_INDEXED, count, engine.url, kind)
        if documents is not None:
            self.metrics.set(INDEXED, len(documents))
            for how in HOW:
                self.metrics.set(FOUND, documents.noted[how], how)
            self.metrics.set(UNSEARCHED, self.proxy.search.skipped)
        elif blocks is not None:
            self.metrics.set(INDEXED, len(blocks))
        if blocks is not None:
            self.metrics.set(UNPLACED, blocks.unplaced)
            self.metrics.set(UNREADABLE, blocks.unreadable)

    async def _models(self, _: Request) -> Response:
        models = self.engines.models().items()
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "lmc", **card} for name, card in models]
        return JSONResponse({"object": "list", "data": data})

    async def _listed(self, _: Request) -> Response:
        return JSONResponse({"engines": [self._described(engine) for engine in self.engines]})

    def _described(self, engine: Engine) -> dict[str, Any]:
        """Return the state of an engine, with its name for clients and metrics."""
        return {"name": self.settings.name_of(engine.url), **_described(engine)}

    async def _added(self, request: Request) -> Response:
        body = await _body(request, set(EngineAddress._fields))
        models = body.pop("models", None) or ()
        if not isinstance(models, list | tuple) or set(map(type, [*models, *body.values()])) - {str}:
            raise InputError("url, cache, admin and kv_events must be strings, and models a list of strings")
        engine = self.engines.add(address(body.pop("url", ""), models, **body))
        log.info("lmc router: added engine %s", engine.url)
        return JSONResponse({"engines": [self._described(engine)]}, 201)

    async def _removed(self, request: Request) -> Response:
        url = str((await _body(request, {"url"})).get("url", ""))
        self.engines.remove(url)
        self.policy.forget(url)
        log.info("lmc router: removed engine %s", url)
        return JSONResponse({"removed": url})

    async def _drained(self, request: Request) -> Response:
        body = await _body(request, {"url", "drain"})
        engine, draining = self.engines[str(body.get("url", ""))], body.get("drain", True)
        if not isinstance(draining, bool):
            raise InputError("drain must be true or false")
        engine.draining = draining
        return JSONResponse({"engines": [self._described(engine)]})

    async def _explained(self, http: Request) -> Response:
        """Answer where a request would go, and what each engine would reuse and compute."""
        received = await self.proxy.understood(await http.body(), dict(http.headers))
        request = received.request
        candidates = self.engines.candidates(request.model)
        if not candidates:
            raise InputError(f"no engine is available for the model {request.model!r}: try again later")
        choice = self.policy.choose(request, candidates)
        scores, facts = self.policy.scores(request, candidates), self.policy.explain(request, candidates)
        engines = [
            {
                "engine": candidate.name,
                "requests": candidate.load,
                "backlog_tokens": round(candidate.backlog),
                "score": scores.get(candidate.name),
                **facts.get(candidate.name, {}),
            }
            for candidate in candidates
        ]
        exact = request.tokens is not None
        prompt = {"tokens": len(request.tokens or ()) or round(received.tokens), "exact": exact}
        answer = {"engine": choice.engine, "why": choice.why, "prompt": prompt, "engines": engines}
        if (cutter := self.policy.needs.cutter) is not None:
            documents = Counter(document.how for document in cutter.cut(request).documents)
            answer["documents"] = {how: documents[how] for how in HOW}
        return JSONResponse(answer)

    async def _learned(self, request: Request) -> Response:
        """Have each text learned by the engine that the policy chooses for it."""
        body = await _body(request, {"texts", "model", "cache_salt"})
        texts, salt = body.get("texts"), body.get("cache_salt") or ""
        if not isinstance(texts, list) or set(map(type, texts)) - {str} or not isinstance(salt, str):
            raise InputError('expected {"texts": ["…", …]}, with model and cache_salt as optional strings')
        model = body.get("model") or next(iter(self.engines.models()), "")
        separator, placed = self.proxy.special_string_of(str(model)), []
        for text in texts:
            learn = {
                "model": model, "max_tokens": 1, "prompt": separator.join(("", text.strip(), "")),
                "kv_transfer_params": {"lmc": {"learn": True}}, **({"cache_salt": salt} if salt else {}),
            }  # fmt: skip
            engine, response = await self.proxy.ask("/v1/completions", msgspec.json.encode(learn))
            facts = (response.get("kv_transfer_params") or {}).get("lmc") or {}
            placed.append({"engine": engine, "learned": bool(facts.get("learned")), "note": facts.get("note", "")})
        return JSONResponse({"placed": placed})


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"the router has no {request.method} {request.url.path}"
    return _failed(error.status_code, reason, error.headers)


def _failed(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": error_object(status, reason)}, status, headers)


def _handler(handle: Handler) -> Handler:
    async def handle_errors(request: Request) -> Response:
        try:
            return await handle(request)
        except InputError as error:
            return _failed(400, str(error))
        except Refusal as refusal:
            return _failed(refusal.status, refusal.why)
        except Exception:
            log.exception("lmc router: request for %s failed", request.url.path)
            return _failed(500, "unexpected error; see the router's log")

    return handle_errors


def _without_slash(scope: Any) -> Any:
    """Return the scope of a request without a slash at the end of its path, to which vLLM redirects."""
    raw, path = scope["raw_path"], scope["path"]
    return {**scope, "path": path[:-1], "raw_path": raw[:-1]} if raw.endswith(b"/") and raw != b"/" else scope


def _described(engine: Engine) -> dict[str, Any]:
    engine.update_backlog()
    return {
        "url": engine.url,
        "models": sorted(engine.models),
        "cache": engine.candidate.cache,
        "admin": engine.address.admin,
        "kv_events": engine.address.kv_events,
        "healthy": engine.healthy,
        "draining": engine.draining,
        "breaker": engine.breaker.state(time.monotonic()),
        "requests": engine.candidate.load,
        "backlog_tokens": round(engine.candidate.backlog),
        "tokens_a_second": round(engine.prefills.rate) or None,
        "sent": engine.requests,
    }


async def _body(request: Request, fields: set[str]) -> dict[str, Any]:
    """Return the JSON object of a body with some of these fields. Raises `InputError` for anything else."""
    content = json_object(await request.body())
    if content.keys() - fields:
        raise InputError(f"unknown fields in the request body; use only {', '.join(sorted(fields))}")
    return content
