"""Administration of a cache server over HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import Receive, Scope, Send

from lmc import __version__
from lmc.documents.admin import DEFAULT_LIST_LENGTH
from lmc.errors import InputError, NotFound
from lmc.http.server import VISITOR, Guard, Visitor
from lmc.keys import LONGEST_NAME, MAX_TTL_SECONDS, TENANT_DIGITS, tenant_of
from lmc.server.overview import Overview, ServerCollector
from lmc.shapes import GIB, KIB, MIB

PAGE = Path(__file__).with_name("page.html")
EVENT_SECONDS = 0.2  # between two checks for new events
SILENT_SECONDS = 15.0  # without events, after which a subscriber gets a keep-alive comment
LARGEST_QUOTA = 1 << 20  # GB
OPEN = ("/", "/health", "/ready")  # paths that need no token
LARGEST, PROMPT = 64 * KIB, 16 * MIB  # limits for a request body: with names and numbers only, and with a prompt
MOST_LISTED, SENT_AT_ONCE = 100_000, 100  # documents in a listing, and in one piece of it
MOST_SUBSCRIBERS = 16
TENANT = re.compile(f"[0-9a-f]{{{TENANT_DIGITS}}}")  # a tenant's name: digits of the cache salt's digest


class DocumentChange(BaseModel):
    """A change of documents: pin, time limit or name."""

    model_config = ConfigDict(extra="forbid")
    pinned: bool | None = None
    ttl: Annotated[float, Field(gt=0, lt=MAX_TTL_SECONDS)] | None = None
    name: Annotated[str, Field(max_length=LONGEST_NAME)] = ""


class Owner(BaseModel):
    """A model, a tenant, or both."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    model: str | None = None
    tenant: str | None = Field(None, description="as /v1/stat shows it")
    cache_salt: str | None = Field(None, description="of the tenant, instead of its name")

    def named(self) -> tuple[str | None, str | None]:
        """Return the names of model and tenant; raise `InputError` for an invalid tenant name."""
        if self.tenant and not TENANT.fullmatch(self.tenant):
            raise InputError(f"no tenant is called {self.tenant!r}: give its cache_salt, or its name of /v1/stat")
        return self.model, self.tenant if self.cache_salt is None else tenant_of(self.cache_salt)


class Clearing(Owner):
    """The owners whose chunks are removed."""

    everything: bool = Field(False, description="of all models and tenants")


class QuotaChange(Owner):
    """A new limit for memory, and a new weight. A missing value stays unchanged."""

    max_gb: Annotated[float, Field(ge=0, le=LARGEST_QUOTA)] | None = Field(None, description="null: no bound")
    weight: Annotated[float, Field(ge=0.001, le=1000)] = Field(
        1.0, description="of the fair share of a model among models, or of a tenant among the tenants of its models"
    )


def application(of: Overview, token: str, tenants: Mapping[str, str]) -> Guard:
    """Return the ASGI application. `tenants` maps the token of each tenant to its cache salt."""
    app = FastAPI(title="lmc cache server", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(NotFound, lambda _, error: JSONResponse({"error": str(error)}, 404))
    app.add_exception_handler(InputError, lambda _, error: JSONResponse({"error": str(error)}, 400))
    app.add_exception_handler(RequestValidationError, _wrong)
    app.add_exception_handler(AnyHTTPException, _refused)
    registry = CollectorRegistry()
    registry.register(ServerCollector(of))
    _add_probes(app, of, registry)
    _add_documents(app, of)
    _add_memory(app, of)
    salts = {one: tenant_of(salt) for one, salt in tenants.items()}
    return Guard(app, token, salts, OPEN, LARGEST, {"/v1/explain": PROMPT})


def _visitor(request: Request) -> Visitor:
    found: Visitor = request.scope[VISITOR]
    return found


def _admin(request: Request) -> None:
    if _visitor(request).tenant is not None:
        raise HTTPException(403, "this needs the token of the server, not that of a tenant")


Seen = Annotated[Visitor, Depends(_visitor)]
Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]
ADMIN = [Depends(_admin)]


def _refused(_: Request, error: Any) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code)


def _wrong(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return JSONResponse({"error": f"{where}: {first['msg']}"}, 400)


def _add_probes(app: FastAPI, of: Overview, registry: CollectorRegistry) -> None:
    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> str:
        return PAGE.read_text(encoding="utf-8")

    @app.get("/health", summary="The process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", summary="Clients can attach; 503 if not")
    async def ready() -> Response:
        why = of.why_not_ready()
        return JSONResponse({"status": why or "ready"}, 503 if why else 200)

    @app.get("/metrics", summary="Numbers for Prometheus", dependencies=ADMIN, response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/events", summary="Changes as server-sent events", dependencies=ADMIN)
    async def events(request: Request) -> StreamingResponse:
        if of.subscribers >= MOST_SUBSCRIBERS:
            raise HTTPException(503, f"there are {MOST_SUBSCRIBERS} subscribers already")
        return Subscription(of, request.headers.get("last-event-id", ""))


class Subscription(StreamingResponse):  # type: ignore[misc]
    """An event stream for one subscriber, who is counted from the request until the response ends in any way."""

    def __init__(self, of: Overview, last: str) -> None:
        super().__init__(_events(of, last), media_type="text/event-stream")
        self._of = of
        of.subscribers += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the subscriber disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._of.subscribers -= 1


async def _events(of: Overview, last: str) -> AsyncIterator[str]:
    silent = 0.0
    while not of.ended:
        events = of.events.after(last)
        while (event := await run_in_threadpool(next, events, None)) is not None:
            last, silent = event.id, 0.0
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(event.data)}\n\n"
            await asyncio.sleep(0)
        if silent >= SILENT_SECONDS:
            silent = 0.0
            yield ": nothing new\n\n"
        await asyncio.sleep(EVENT_SECONDS)
        silent += EVENT_SECONDS


def _add_documents(app: FastAPI, of: Overview) -> None:
    @app.get("/v1/documents", summary="List documents, the one that was used last first")
    def listed(seen: Seen, limit: Limit = DEFAULT_LIST_LENGTH) -> StreamingResponse:
        total, documents = of.documents.listing(limit, seen.tenant)
        return StreamingResponse(_listing(total, documents), media_type="application/json")

    @app.get("/v1/documents/{name:path}", summary="Show documents, by name or by the first digits of an id")
    def show(seen: Seen, name: str) -> dict[str, Any]:
        return dict(of.documents.show(name, seen.tenant))

    @app.patch("/v1/documents/{name:path}", summary="Pin documents, limit their time, or name them")
    def change(seen: Seen, name: str, wanted: DocumentChange) -> dict[str, Any]:
        if wanted.pinned is not None and seen.tenant is not None:
            raise HTTPException(403, "a pin takes room from everybody, and needs the token of the server")
        return dict(of.documents.change(name, wanted.model_dump(exclude_unset=True), seen.tenant))

    @app.delete("/v1/documents/{name:path}", summary="Remove documents from all tiers")
    def remove(seen: Seen, name: str) -> dict[str, Any]:
        return dict(of.documents.remove(name, seen.tenant))


def _listing(total: int, documents: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a list as JSON in pieces.

    While a piece is encoded, no other thread runs, and the threads that serve engines have to wait.
    """
    documents, begun = iter(documents), False
    yield f'{{"total": {total}, "documents": ['
    while some := list(islice(documents, SENT_AT_ONCE)):
        yield ("," if begun else "") + json.dumps(some)[1:-1]
        begun = True
    yield "]}"


def _add_memory(app: FastAPI, of: Overview) -> None:
    @app.get("/v1/stat", summary="What is in use, by model, tenant and tier")
    def stat(seen: Seen) -> dict[str, Any]:
        return of.stat() if seen.tenant is None else {"owners": of.owners(seen.tenant)}

    @app.get("/v1/clients", summary="Who is attached, and what each holds", dependencies=ADMIN)
    def clients() -> dict[str, Any]:
        return {"clients": of.clients()}

    @app.post("/v1/explain", summary="What an engine would do with a prompt, and why", dependencies=ADMIN)
    def explain(asked: dict[str, Any]) -> dict[str, Any]:
        return of.explain(asked)

    @app.post("/v1/clear", summary="Remove all chunks of a model or a tenant, with their pins", dependencies=ADMIN)
    def clear(wanted: Clearing) -> dict[str, Any]:
        model, tenant = wanted.named()
        if wanted.everything == (model is not None or tenant is not None):
            raise InputError("say what to remove: a model, a tenant (or its cache_salt), or everything")
        return {"removed": of.clear(model, tenant)}

    @app.get("/v1/quota", summary="The bounds for memory, and how much of each is taken", dependencies=ADMIN)
    def quotas() -> dict[str, Any]:
        return {"quotas": of.quotas()}

    @app.put("/v1/quota", summary="Bound the memory of a model or a tenant, or weigh its share", dependencies=ADMIN)
    def bound(wanted: QuotaChange) -> dict[str, Any]:
        model, tenant = wanted.named()
        if model is None and tenant is None:
            raise InputError("say whose quota it is: a model, a tenant (or its cache_salt)")
        given: dict[str, Any] = {"weight": wanted.weight} if "weight" in wanted.model_fields_set else {}
        if "max_gb" in wanted.model_fields_set:
            given["bytes"] = None if wanted.max_gb is None else int(wanted.max_gb * GIB)
        if not given:
            raise InputError("give max_gb (null for no bound), or weight, or both")
        of.bound(msgspec.structs.replace(of.quota(model, tenant), **given))
        return {"quotas": of.quotas()}

    @app.post("/v1/drain", summary="Write down what is in memory only, and end", dependencies=ADMIN, status_code=202)
    def drain() -> dict[str, str]:
        of.drain()
        return {"status": "the server writes down what is in memory only, and ends"}
