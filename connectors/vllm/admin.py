"""The administration endpoint: what the store holds, and what would happen with a prompt, while the engine runs.

It runs in a thread of the process that owns the store, and is off unless LMC_ADMIN names an address. It computes
nothing itself: documents can be pinned, limited in time, removed, and queued to be learned. An explanation counts as a
choice of the cost model.
"""

import errno
import hmac
import json
import logging
import os
import socket
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

from lmc.admin_address import ADDRESS, LOCAL, TOKEN, UNIX, host_and_port, socket_path
from lmc.background import Background
from lmc.blend.segments import Span, document_tokens
from lmc.connectors.vllm.claims import Claims
from lmc.connectors.vllm.isolation import cached_blocks
from lmc.connectors.vllm.request_state import Role
from lmc.connectors.vllm.roles import Roles
from lmc.connectors.vllm.start import Setup
from lmc.engine import PromptView
from lmc.engine.explain import SHOWN, explain
from lmc.engine.known_documents import KnownDocument
from lmc.errors import ConfigError, InputError
from lmc.metrics import flat

log = logging.getLogger(__name__)

STARTED = 10.0  # seconds within which the endpoint is up
ID_DIGITS = 12  # of an id that people are shown
BEGINNING = 30  # tokens of a document, whose letters a list shows
LISTED = 100  # documents in a list, unless more are asked for
LONGEST = 100 * 365 * 86400  # seconds of a time limit

Facts = Mapping[str, Any]


class Administration:
    """Answers questions about one engine. Its methods may be called by any thread."""

    def __init__(self, setup: Setup, requests: "OrderedDict[str, Facts]") -> None:
        """`requests` are the facts of the last requests, by the engine's id."""
        self._setup, self._engine, self._tokenizer, self._requests = setup, setup.engine, setup.tokenizer, requests
        self._claims, self.background = Claims(setup), setup.engine.background

    def stat(self) -> Facts:
        """Return the store's numbers, by the keys of `lmc.metrics`."""
        return {**flat(self._engine.stats()), "documents": len(self._known())}

    def documents(self, limit: int = LISTED) -> Facts:
        """Return the known documents, the one that was used last first."""
        known = self._known()
        listed = [self._described(one) for one in self.background.gently(known[:limit])]
        return {"documents": listed, "total": len(known)}

    def document(self, name: str) -> Facts:
        """Return the documents of a name, or the one whose id begins with it; raise `InputError` if there is none."""
        found = [self._described(one) | {"text": self._text(one.tokens.tolist())} for one in self._find(name)]
        return {"documents": found}

    def change(self, name: str, wanted: Facts) -> Facts:
        """Pin documents (`pinned`: true or false), limit their time (`ttl`: seconds, or null), or `name` them.

        Raises `InputError` as `document`, and if there is no room for the pin.
        """
        found, keeper = self._find(name), self._engine.keeper
        pinned, ttl, title = wanted.get("pinned"), wanted.get("ttl"), wanted.get("name", "")
        number = isinstance(ttl, int | float) and not isinstance(ttl, bool) and 0 < ttl < LONGEST
        right = isinstance(pinned, bool | None) and (ttl is None or number) and isinstance(title, str)
        if not right or not wanted.keys() <= {"pinned", "ttl", "name"}:
            raise InputError("give pinned (true or false), ttl (seconds, more than 0, or null), or name (a text)")
        for one in found if title else ():
            one.name = title
        if pinned is not None:
            (keeper.pin if pinned else keeper.unpin)(found)
        if "ttl" in wanted:
            keeper.expire(found, ttl)
        return {"documents": [self._described(one) for one in found]}

    def remove(self, name: str) -> Facts:
        """Remove documents from all tiers; raise `InputError` as `document`."""
        found = self._find(name)
        self._engine.keeper.remove(found)
        return {"removed": [one.id for one in found]}

    def learn(self, asked: Facts) -> Facts:
        """Queue `texts` to be learned when the engine runs next, for the tenant `cache_salt`; raise `InputError`."""
        texts, salt = asked.get("texts"), str(asked.get("cache_salt") or "")
        if not isinstance(texts, list) or set(map(type, texts)) - {str} or asked.keys() - {"texts", "cache_salt"}:
            raise InputError('give {"texts": ["…", …]}, and cache_salt if a tenant has one, and nothing else')
        if self._tokenizer is None or self._setup.markers is None or not self._setup.blends:
            raise InputError(self._setup.refused or "this engine has no tokenizer, or does not blend")
        separator, queued, known = self._engine.settings.blend_special_str, 0, 0
        for text in texts:
            for tokens in document_tokens(self._tokenizer.encode, self._setup.markers, separator, text):
                (document,) = self._engine.documents(tokens, [Span(0, len(tokens))], salt)
                if all(self._engine.lookup([piece.key for piece in document.pieces], {})):
                    known += 1
                else:
                    queued += len(self._engine.learn_later(tokens, [document.span], salt))
        return {"queued": queued, "known": known}

    def request(self, name: str) -> Facts:
        """Return the facts of one of the last requests, by the id of its response; raise `InputError` otherwise."""
        for known, facts in reversed(list(self._requests.items())):
            if known.startswith(name):  # The engine adds to the id of a response.
                return facts
        raise InputError(f"no request {name} among the last {len(self._requests)}")

    def explain(self, asked: Facts) -> Facts:
        """Return what would happen with a prompt: `messages`, `prompt` or `prompt_token_ids`, with `cache_salt`, `lora`
        and `lmc` as in a request. Raises `InputError` for anything else.
        """
        prompt, salt = self._tokens(asked), str(asked.get("cache_salt") or "")
        if not 0 < len(prompt) <= self._setup.longest:
            raise InputError(f"the prompt has {len(prompt)} tokens, the engine takes 1 to {self._setup.longest}")
        request = SimpleNamespace(
            request_id="explain", prompt_token_ids=prompt, num_prompt_tokens=len(prompt), num_tokens=len(prompt),
            cache_salt=salt or None, kv_transfer_params={"lmc": asked["lmc"]} if asked.get("lmc") else None,
            lora_request=asked.get("lora"), mm_features=[], prompt_embeds=None, skip_reading_prefix_cache=False,
            block_hashes=[], num_preemptions=0, all_token_ids=prompt,
        )  # fmt: skip
        if self._setup.hash_blocks and not request.lora_request:
            request.block_hashes = self._setup.hash_blocks(request)
        state = Roles(self._setup, Counter(), quiet=True).classify(request)
        refused = self._setup.refused or state.note
        if state.role is Role.EXACT and not refused:
            special = f"there is no special string {self._engine.settings.blend_special_str!r} in the prompt"
            refused = "the request says blend: false" if state.policy and not state.blends else special
        size, hashes = self._setup.block_size, request.block_hashes
        local = min(cached_blocks(self._setup.pool, hashes), (len(prompt) - 1) // size) * size
        found = self._engine.look(PromptView(self._engine.block_chain(hashes, size), state.documents))
        wish = self._claims.wish(state, local) if state.policy else None
        plan = self._engine.plan(found, replace(wish, refused=refused))[0] if wish else None
        documents = []
        if plan is not None:
            documents = explain(self._engine, prompt, found.documents, plan, salt, refused, self._text)
        reused = sum(piece.tokens for piece in plan.approximate) if plan and not refused else 0
        return {
            "tokens": len(prompt),
            "engine_tokens": local,
            "exact_tokens": plan.reach - local if plan else 0,
            "reused_tokens": reused,
            "repaired_tokens": round(reused * (state.policy.ratios[-1] if state.policy else 0)),
            "why": refused or (plan.note if plan else ""),
            "documents": [asdict(one) for one in documents],
        }

    def _tokens(self, asked: Facts) -> list[int]:
        given = asked.get("prompt_token_ids")
        if given is None and isinstance(asked.get("prompt"), list):
            given = asked["prompt"]
        if given is not None:
            return [int(token) for token in given]
        if self._tokenizer is None:
            raise InputError("this engine has no tokenizer, or does not blend: give prompt_token_ids")
        if isinstance(asked.get("messages"), list):
            try:
                return list(
                    self._tokenizer.apply_chat_template(
                        asked["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
                    )
                )
            except Exception as error:  # templates raise whatever they like
                first = str(error).splitlines()[0][:200]
                wrong = f"the tokenizer's own chat template cannot be applied ({type(error).__name__}: {first})"
                raise InputError(f"{wrong}: let the server do it, with lmc explain --server URL") from error
        if isinstance(asked.get("prompt"), str):
            return list(self._tokenizer.encode(asked["prompt"]))
        raise InputError("give messages, prompt or prompt_token_ids")

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens)) if self._tokenizer else " ".join(map(str, tokens))

    def _known(self) -> list[KnownDocument]:
        return [known for known in self._engine.known.list() if not known.removed]

    def _find(self, name: str) -> list[KnownDocument]:
        exact = self._engine.known.get(name.lower())
        if exact is not None and not exact.removed:
            return [exact]
        named, begun = [], []
        for one in self.background.gently(self._known() if name.strip() else []):
            if one.name == name:
                named.append(one)
            elif one.id.startswith(name.lower()):
                begun.append(one)
        if len(begun) > 1 or bool(named) == bool(begun):
            hint = "give more digits of an id" if begun else "lmc documents list shows those that there are"
            count = len(named) + len(begun)
            raise InputError(f"{count} known documents have the name {name!r}, or an id that begins with it: {hint}")
        if len({one.namespace for one in named}) > 1:
            ids = ", ".join(one.id[:ID_DIGITS] for one in named)
            raise InputError(f"documents of several tenants have the name {name!r}: say which, by its id ({ids})")
        return named or begun

    def _described(self, known: KnownDocument) -> dict[str, Any]:
        known.begins = known.begins or " ".join(self._text(known.tokens[:BEGINNING].tolist()).split())[:SHOWN]
        return {
            "id": known.id,
            "name": known.name,
            "tokens": len(known.tokens),
            "begins": known.begins,
            "places": self._engine.store.copies(known.keys),
            "uses": known.uses,
            "used": known.used,
            "pinned": known.pinned,
            "expires": known.expires,
            "tenant": known.namespace.hex()[:ID_DIGITS],
        }


def serve(of: Administration, address: str, token: str, engine: int = 0) -> Callable[[], None]:
    """Answer at an address from a thread, and return the function that ends it.

    The address is `host:port`, where engine number n has the port + n, or `unix:///path`, where n is added to the path
    if it is not 0. Raises `ConfigError` if the address cannot be had, or can be reached from elsewhere without a token.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError(f"{ADDRESS} needs {error.name}: pip install starlette uvicorn") from error
    try:
        listening = _unix_socket(address, engine) if address.startswith(UNIX) else _tcp_socket(address, token, engine)
    except OSError as error:
        taken = "; is another engine using it?" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"{ADDRESS} = {address} cannot be had: {error.strerror or error}{taken}") from None
    config = uvicorn.Config(application(of, token), log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="lmc-admin", daemon=True)
    thread.start()
    listening_at = listening.getsockname()
    until = time.monotonic() + STARTED
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    where = f"unix://{listening_at}" if isinstance(listening_at, str) else "http://{}:{}".format(*listening_at[:2])
    log.info("lmc: administration at %s", where)

    def stop() -> None:
        server.should_exit = True
        thread.join(STARTED)
        if listening.family is socket.AF_UNIX:
            with suppress(FileNotFoundError):
                os.unlink(listening_at)

    return stop


def _tcp_socket(address: str, token: str, engine: int) -> socket.socket:
    host, port = host_and_port(address, token)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port + engine), family=family)


def _unix_socket(address: str, engine: int) -> socket.socket:
    """Listen at a path that only this user may open. A socket at which nobody listens any more is replaced."""
    path = socket_path(address, engine)
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as asking:
        if stat.S_ISSOCK(os.stat(path).st_mode) and asking.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)
    listening, before = socket.socket(socket.AF_UNIX), os.umask(0o177)
    try:
        listening.bind(path)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(before)
    listening.listen()
    return listening


def application(of: Administration, token: str) -> Any:
    """Return the Starlette application."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    def answering(find: Callable[[Request, Any], Facts]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if token and not hmac.compare_digest(given.encode(), token.encode()):
                return JSONResponse({"error": f"{TOKEN} of the engine is wanted as a bearer token"}, 401)
            if not token and request.url.hostname not in LOCAL:  # A web page may have led a browser here.
                return JSONResponse({"error": f"this is not {request.url.hostname}; {TOKEN} is not set"}, 403)
            try:
                body = await _body(request) if request.method in ("POST", "PATCH") else {}
                found = await run_in_threadpool(lambda: _encoded(find(request, body), of.background))
                return Response(found, media_type="application/json")
            except (InputError, ValueError, TypeError, KeyError, ClientDisconnect) as error:
                return JSONResponse({"error": str(error)}, 400)

        return answer

    routes: list[tuple[str, str, Callable[[Request, Any], Facts]]] = [
        ("GET", "/health", lambda _, __: {"status": "ok"}),
        ("GET", "/v1/stat", lambda _, __: of.stat()),
        ("POST", "/v1/explain", lambda _, body: of.explain(body)),
        ("GET", "/v1/documents", lambda request, _: of.documents(_limit(request))),
        ("GET", "/v1/documents/{name:path}", lambda request, _: of.document(request.path_params["name"])),
        ("PATCH", "/v1/documents/{name:path}", lambda request, body: of.change(request.path_params["name"], body)),
        ("DELETE", "/v1/documents/{name:path}", lambda request, _: of.remove(request.path_params["name"])),
        ("POST", "/v1/learn", lambda _, body: of.learn(body)),
        ("GET", "/v1/requests/{name}", lambda request, _: of.request(request.path_params["name"])),
    ]
    return Starlette(routes=[Route(path, answering(find), methods=[method]) for method, path, find in routes])


def _encoded(facts: Facts, background: Background) -> bytes:
    """Return facts as JSON. The items of a list are encoded one by one: while JSON is encoded, no other thread runs."""

    def encoded(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(json.dumps, background.gently(value)))}]"
        return json.dumps(value)

    fields = ", ".join(f"{json.dumps(name)}: {encoded(value)}" for name, value in facts.items())
    return ("{" + fields + "}").encode()


async def _body(request: Any) -> Facts:
    """Return what was sent as JSON; raise `InputError` for anything else."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InputError("content-type: application/json is wanted")  # A web page cannot send that without being asked.
    try:
        found = await request.json()
    except ValueError as error:
        raise InputError(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError("a JSON object is wanted")
    return found


def _limit(request: Any) -> int:
    text = request.query_params.get("limit", str(LISTED))
    if not text.isdecimal() or not int(text):
        raise InputError(f"limit = {text} must be a whole number from 1 on")
    return int(text)


def serve_if_wanted(of: Administration, engine: int) -> Callable[[], None] | None:
    """Open the endpoint that the environment asks for, if it does, for one of several data-parallel engines."""
    address = os.environ.get(ADDRESS, "")
    return serve(of, address, os.environ.get(TOKEN, ""), engine) if address else None
