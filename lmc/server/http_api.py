"""Administration of a cache server over HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

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
from lmc.documents.admin import DEFAULT_LIST_LENGTH, DocumentChange, Page
from lmc.documents.table import Filter
from lmc.errors import InputError, NotFound
from lmc.http.server import VISITOR, Guard, Visitor
from lmc.keys import TENANT_DIGITS, tenant_of
from lmc.server.overview import Overview, ServerCollector
from lmc.shapes import GIB, KIB, MIB

PAGE = Path(__file__).with_name("page.html")
EVENT_SECONDS = 0.2  # between two checks for new events
KEEP_ALIVE_SECONDS = 15.0  # A subscriber without events for this time gets a keep-alive comment.
MAX_QUOTA_GB = 1 << 20
OPEN_PATHS = ("/", "/health", "/ready")  # paths that need no token
MAX_SMALL_BODY_BYTES = 64 * KIB  # limit for a request body with names and numbers only
MAX_PROMPT_BODY_BYTES = 16 * MIB  # limit for a request body with a prompt
MAX_LIST_LENGTH = 1 << 30  # documents; a list is sent in pieces
STREAMED_DOCUMENTS = 100  # documents in one piece of a listing
MAX_SUBSCRIBERS = 16
TENANT = re.compile(f"[0-9a-f]{{{TENANT_DIGITS}}}")  # a tenant's name: digits of the cache salt's digest


class Owner(BaseModel):
    """A model, a tenant, or both."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    model: str | None = None
    tenant: str | None = Field(None, description="name of a tenant, from /v1/stat")
    cache_salt: str | None = Field(None, description="cache salt of a tenant, instead of the tenant's name")

    def named(self) -> tuple[str | None, str | None]:
        """Return the names of model and tenant; raise `InputError` for an invalid tenant name or cache salt."""
        if self.tenant and not TENANT.fullmatch(self.tenant):
            raise InputError(f"invalid tenant {self.tenant!r}: use its name from /v1/stat, or cache_salt")
        try:
            return self.model, self.tenant if self.cache_salt is None else tenant_of(self.cache_salt)
        except UnicodeEncodeError:
            raise InputError("cache_salt must be valid Unicode text") from None


class Clearing(Owner):
    """The owners whose chunks are removed."""

    everything: bool = Field(False, description="remove the chunks of all models and tenants")


class QuotaChange(Owner):
    """A new limit for memory, and a new weight. A missing value stays unchanged."""

    max_gb: Annotated[float, Field(ge=0, le=MAX_QUOTA_GB)] | None = Field(
        None, description="limit in GB; null: no limit"
    )
    weight: Annotated[float, Field(ge=0.001, le=1000)] = Field(
        1.0, description="weight of a model's fair share among models, or of a tenant's among the tenants of its models"
    )


def application(of: Overview, token: str, tenants: Mapping[str, str]) -> Guard:
    """Return the ASGI application. `tenants` maps the token of each tenant to its cache salt."""
    app = FastAPI(title="lmc cache server", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(NotFound, lambda _, error: JSONResponse({"error": str(error)}, 404))
    app.add_exception_handler(InputError, lambda _, error: JSONResponse({"error": str(error)}, 400))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(AnyHTTPException, _refused)
    registry = CollectorRegistry()
    registry.register(ServerCollector(of))
    _add_probes(app, of, registry)
    _add_documents(app, of)
    _add_memory(app, of)
    salts = {tenant_token: tenant_of(salt) for tenant_token, salt in tenants.items()}
    return Guard(app, token, salts, OPEN_PATHS, MAX_SMALL_BODY_BYTES, {"/v1/explain": MAX_PROMPT_BODY_BYTES})


def _visitor(request: Request) -> Visitor:
    visitor: Visitor = request.scope[VISITOR]
    return visitor


def _admin(request: Request) -> None:
    if _visitor(request).tenant is not None:
        raise HTTPException(403, "a tenant's token is not sufficient: send the server's token (LMC_ADMIN_TOKEN)")


Caller = Annotated[Visitor, Depends(_visitor)]
Limit = Annotated[int, Query(ge=1, le=MAX_LIST_LENGTH)]
ADMIN = [Depends(_admin)]


def _refused(_: Request, error: Any) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code)


def _invalid(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    return JSONResponse({"error": f"{field}: {first['msg']}"}, 400)


def _add_probes(app: FastAPI, of: Overview, registry: CollectorRegistry) -> None:
    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> str:
        return PAGE.read_text(encoding="utf-8")

    @app.get("/health", summary="Report that the process responds")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", summary="Report whether clients can attach; 503 if not")
    async def ready() -> Response:
        ends = of.server.ends
        return JSONResponse({"status": "the server is shutting down" if ends else "ready"}, 503 if ends else 200)

    @app.get("/metrics", summary="Return metrics for Prometheus", dependencies=ADMIN, response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/events", summary="Send changes as server-sent events", dependencies=ADMIN)
    async def events(request: Request) -> StreamingResponse:
        if of.subscribers >= MAX_SUBSCRIBERS:
            raise HTTPException(503, f"the limit of {MAX_SUBSCRIBERS} subscribers is reached: try again later")
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
    while not of.server.ends:
        events = of.events.after(last)
        while (event := await run_in_threadpool(next, events, None)) is not None:
            last, silent = event.id, 0.0
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(event.data)}\n\n"
            await asyncio.sleep(0)
        if silent >= KEEP_ALIVE_SECONDS:
            silent = 0.0
            yield ": no new events\n\n"
        await asyncio.sleep(EVENT_SECONDS)
        silent += EVENT_SECONDS


def _add_documents(app: FastAPI, of: Overview) -> None:
    @app.get("/v1/documents", summary="List documents, the most recently used first")
    def listed(
        caller: Caller,
        limit: Limit = DEFAULT_LIST_LENGTH,
        after: Annotated[str, Query(description="`next` of the previous page")] = "",
        name: Annotated[str, Query(description="only documents whose name contains this text")] = "",
        model: Annotated[str, Query(description="only documents of models whose name contains this text")] = "",
        tenant: Annotated[str, Query(description="only documents of tenants that begin with these digits")] = "",
        unused_for: Annotated[int, Query(ge=0, description="only documents not used for this number of seconds")] = 0,
    ) -> StreamingResponse:
        only = Filter(name=name, model=model, tenant=tenant, unused_for=unused_for)
        page = of.documents.page(limit, after, only, caller.tenant)
        return StreamingResponse(_pieces(page), media_type="application/json")

    @app.get("/v1/documents/{name:path}", summary="Show documents, by name or by the first digits of an id")
    def show(caller: Caller, name: str) -> dict[str, Any]:
        return dict(of.documents.show(name, caller.tenant))

    @app.patch("/v1/documents/{name:path}", summary="Pin documents, set their time limit, or name them")
    def change(caller: Caller, name: str, changes: DocumentChange) -> dict[str, Any]:
        if changes.pinned is not None and caller.tenant is not None:
            raise HTTPException(403, "a pin takes memory from all tenants: send the server's token (LMC_ADMIN_TOKEN)")
        return dict(of.documents.change(name, changes.model_dump(exclude_unset=True), caller.tenant))

    @app.delete("/v1/documents/{name:path}", summary="Remove documents from all tiers")
    def remove(caller: Caller, name: str) -> dict[str, Any]:
        return dict(of.documents.remove(name, caller.tenant))


def _pieces(page: Page) -> Iterator[str]:
    """Yield a page as JSON in pieces.

    While a piece is encoded, no other thread runs, and the threads that serve engines have to wait.
    """
    begun = False
    yield f'{{"total": {page.total}, "next": {json.dumps(page.next)}, "documents": ['
    while batch := list(islice(page.documents, STREAMED_DOCUMENTS)):
        yield ("," if begun else "") + json.dumps(batch)[1:-1]
        begun = True
    yield "]}"


def _add_memory(app: FastAPI, of: Overview) -> None:
    @app.get("/v1/stat", summary="Return memory and chunks in use, by model, tenant and tier")
    def stat(caller: Caller) -> dict[str, Any]:
        return of.stat() if caller.tenant is None else {"owners": of.owners(caller.tenant)}

    @app.get("/v1/clients", summary="List attached clients, and what each holds", dependencies=ADMIN)
    def clients() -> dict[str, Any]:
        return {"clients": of.server.attached()}

    @app.post("/v1/explain", summary="Explain what an engine would do with a prompt", dependencies=ADMIN)
    def explain(request: dict[str, Any]) -> dict[str, Any]:
        return of.explain(request)

    @app.post("/v1/clear", summary="Remove all chunks of a model or a tenant, with their pins", dependencies=ADMIN)
    def clear(owners: Clearing) -> dict[str, Any]:
        model, tenant = owners.named()
        if owners.everything == (model is not None or tenant is not None):
            raise InputError("set what to remove: model, tenant (or cache_salt), or everything")
        return {"removed": of.clear(model, tenant)}

    @app.get("/v1/quota", summary="List memory quotas, and how much of each is used", dependencies=ADMIN)
    def quotas() -> dict[str, Any]:
        return {"quotas": of.quotas()}

    @app.put("/v1/quota", summary="Set the memory quota or the weight of a model or a tenant", dependencies=ADMIN)
    def bound(change: QuotaChange) -> dict[str, Any]:
        model, tenant = change.named()
        if model is None and tenant is None:
            raise InputError("set the owner of the quota: model, or tenant (or cache_salt)")
        values: dict[str, Any] = {"weight": change.weight} if "weight" in change.model_fields_set else {}
        if "max_gb" in change.model_fields_set:
            values["bytes"] = None if change.max_gb is None else int(change.max_gb * GIB)
        if not values:
            raise InputError("set max_gb (null for no limit), or weight, or both")
        of.bound(model, tenant, **values)
        return {"quotas": of.quotas()}

    @app.post(
        "/v1/drain",
        summary="Write chunks that are only in memory to the tiers, and shut down",
        dependencies=ADMIN,
        status_code=202,
    )
    def drain() -> dict[str, str]:
        of.server.stop()
        return {"status": "the server is writing chunks to the tiers, and will shut down"}
