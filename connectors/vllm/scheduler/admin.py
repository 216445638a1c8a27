"""The administration endpoint: it shows what the store holds, and explains how a prompt would be served.

It runs in a thread of the process that owns the store, while the engine runs. It is off unless the setting `admin`
names an address. Documents can be pinned, given a time limit, removed, and queued to be learned; the endpoint itself
computes no KV. An explanation is not counted as a choice of the cost model.
"""

import json
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmc.background import Background
from lmc.blend.segments import Span, document_tokens
from lmc.connectors.vllm.scheduler.claims import Claims
from lmc.connectors.vllm.scheduler.classifier import RequestClassifier
from lmc.connectors.vllm.scheduler.request_state import Role
from lmc.connectors.vllm.start import Setup
from lmc.documents.admin import DEFAULT_LIST_LENGTH, DocumentAdmin, Facts
from lmc.documents.table import Filter
from lmc.engine.advice import Advice, Adviser
from lmc.engine.explain import explain
from lmc.engine.planner import DocumentMatch
from lmc.errors import ConfigError, InputError, NotFound
from lmc.http import server as http_server
from lmc.http.address import ADDRESS, address_of_engine, url_of
from lmc.http.prompts import CHAT, COMPLETION, TOKENS, plain_chat, single_prompts
from lmc.metrics import flat

EXPLAIN = "/v1/explain"
BOOT = Path("/proc/sys/kernel/random/boot_id")  # identifies the host

log = logging.getLogger(__name__)


class Administration:
    """Answers administration requests for one engine. Any thread may call its methods."""

    def __init__(
        self,
        setup: Setup,
        requests: "OrderedDict[str, Facts]",
        number: int = 0,
        status: Callable[[], str] = lambda: "ok",
    ) -> None:
        """Prepare the endpoint of one engine.

        `requests` are the facts of the last requests, by the engine's request id. `number` is the number of the engine
        with data parallelism. `status` returns the state of lmc in the engine: "ok", or why it is off.
        """
        self.status, self.settings, self.server = status, setup.engine.settings, setup.engine.server
        self.number, self._setup, self._engine, self._tokenizer = number, setup, setup.engine, setup.tokenizer
        self._requests, self._claims = requests, Claims(setup, Counter())
        self.background = setup.engine.background
        self.documents = DocumentAdmin(lambda: [setup.engine], lambda tokens, _: self._text(tokens), self.background)
        self.explain_token = secrets.token_urlsafe(32)  # token of a cache server; it permits only explanations

    def stat(self) -> Facts:
        """Return the store's numbers, by the keys of `lmc.metrics`."""
        return {**flat(self._engine.stats()), "documents": self.documents.count()}

    def learn(self, asked: Facts) -> Facts:
        """Queue `texts` of the tenant `cache_salt` to be learned when the engine next runs. Raises `InputError`."""
        texts, salt = asked.get("texts"), str(asked.get("cache_salt") or "")
        if not isinstance(texts, list) or set(map(type, texts)) - {str} or asked.keys() - {"texts", "cache_salt"}:
            raise InputError('give {"texts": ["…", …]}, and cache_salt if a tenant has one, and nothing else')
        if self._tokenizer is None or self._setup.markers is None or not self._setup.blends:
            raise InputError(self._setup.refused or "this engine has no tokenizer, or does not blend")
        separator, queued, known = self.settings.blend_special_str, 0, 0
        for text in texts:
            for tokens in document_tokens(self._tokenizer.encode, self._setup.markers, separator, text):
                (document,) = self._engine.documents(tokens, [Span(0, len(tokens))], salt)
                if all(self._engine.lookup([piece.key for piece in document.pieces], {})):
                    known += 1
                else:
                    queued += len(self._engine.learn_later(tokens, [document], salt, wanted=True))
        return {"queued": queued, "known": known}

    def routing(self) -> Facts:
        """Return the facts with which a router splits prompts as this engine does."""
        settings, markers = self.settings, self._setup.markers if self._setup.blends else None
        events = settings.document_events or ""
        return {
            "special_string": settings.blend_special_str,
            "separators": markers.separators if markers else (),
            "special": sorted(markers.special) if markers else (),
            "answers": markers.answers if markers else (),
            "messages": markers.messages if markers else (),
            "ratio": settings.blend_recompute_ratios,
            "blend_min_tokens": settings.blend_min_tokens,
            "finds": self._setup.blends and settings.blend_find != "separators",
            "capacity": self._engine.capacity(),
            "chunk_size": self._engine.chunk_size,
            # Engines that use one cache server share its documents.
            "cache": f"{BOOT.read_text().strip()}:{settings.server}" if settings.server else "",
            "document_events": ",".join(address_of_engine(one.strip(), self.number) for one in events.split(",")),
        }

    def request(self, name: str) -> Facts:
        """Return the facts of one of the last requests, by its response id. Raises `NotFound` for an unknown id."""
        for known, facts in reversed(list(self._requests.items())):
            # The engine appends to the response id, and has the number of a sample before it (n > 1).
            number, _, sampled = known.partition("_")
            for one in (known, sampled if number.isdecimal() else known):
                if one == name or one.startswith((f"{name}-", f"{name}_")):
                    return facts
        raise NotFound(f"no request {name} among the last {len(self._requests)}")

    def explain(self, asked: Facts) -> Facts:
        """Return how a prompt would be served, without serving it.

        `asked` is a request as in `lmc.http.prompts`, and may have `lora` and `lmc`. For several prompts, returns their
        explanations as `prompts`. Raises `InputError` for an invalid request.
        """
        found = [self._explain(one) for one in self.background.gently(single_prompts(asked))]
        return found[0] if len(found) == 1 else {"prompts": found}

    def _explain(self, asked: Facts) -> dict[str, Any]:
        prompt, salt = self._tokens(asked), str(asked.get("cache_salt") or "")
        given = asked.get("kv_transfer_params")
        options = asked.get("lmc") or (given.get("lmc") if isinstance(given, dict) else None)
        if not 0 < len(prompt) <= self._setup.longest:
            raise InputError(f"the prompt has {len(prompt)} tokens, the engine takes 1 to {self._setup.longest}")
        request = SimpleNamespace(
            request_id="explain", prompt_token_ids=prompt, num_prompt_tokens=len(prompt), num_tokens=len(prompt),
            cache_salt=salt or None, kv_transfer_params={"lmc": options} if options else None,
            lora_request=asked.get("lora"), mm_features=[], prompt_embeds=None, skip_reading_prefix_cache=False,
            block_hashes=[], num_preemptions=0, all_token_ids=prompt,
        )  # fmt: skip
        if self._setup.hash_blocks and not request.lora_request:
            request.block_hashes = self._setup.hash_blocks(request)
        state = RequestClassifier(self._setup, Counter(), quiet=True).classify(request)
        refused = self._setup.refused or state.note
        advice = Advice()
        if not refused and state.policy and not state.blends:
            refused = "the request says blend: false"
        elif not refused:
            advice = self._advice(prompt, salt, state.documents)
            refused = advice.why if state.role is Role.EXACT else ""
        groups, hashes = self._setup.groups, request.block_hashes
        size = groups.block_size
        local = min(groups.cached(hashes), (len(prompt) - 1) // size) * size
        plan, documents = None, []
        if state.policy:
            match = replace(self._claims.usable(state, local), documents=state.documents, refused=refused)
            cost = self._engine.store.cost.snapshot()  # A copy, so that an explanation is not counted as a choice.
            plan = self._engine.plan(self._engine.look(match, self._engine.block_chain(hashes, size)), cost)
            documents = explain(self._engine, prompt, plan, salt, refused, self._text)
        reused = sum(piece.tokens for piece in plan.approximate) if plan and not refused else 0
        return {
            "tokens": len(prompt),
            "engine_tokens": local,
            "exact_tokens": plan.reach - local if plan else 0,
            "reused_tokens": reused,
            "repaired_tokens": round(reused * (state.policy.ratio if state.policy else 0)),
            "why": refused or advice.why or (plan.note if plan else ""),
            "advice": advice.lines,
            "documents": [asdict(one) for one in documents],
        }

    def _advice(self, prompt: list[int], salt: str, documents: Sequence[DocumentMatch]) -> Advice:
        """Return advice if documents of a prompt are not found."""
        encode = self._tokenizer and self._encode
        adviser = Adviser(engine=self._engine, salt=salt, encode=encode, decode=self._text)
        advice = adviser.on_escapes(prompt, documents)
        if not advice.why:
            advice = adviser.on_white_space(prompt, documents) if documents else adviser.on_nothing(prompt)
        return advice

    def _tokens(self, asked: Facts) -> list[int]:
        if TOKENS in asked:
            return list(asked[TOKENS])
        if self._tokenizer is None:
            why = self._setup.refused or "it was started with skip_tokenizer_init"
            raise InputError(f"this engine has no tokenizer ({why}): give prompt_token_ids")
        if COMPLETION in asked:
            return self._encode(asked[COMPLETION])
        options = {name: asked[name] for name in ("tools", "documents") if asked.get(name)}
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    plain_chat(asked[CHAT]), tokenize=True, add_generation_prompt=True, return_dict=False, **options
                )
            )
        except Exception as error:  # A template may raise any error.
            first = (str(error).splitlines() or [""])[0][:200]
            wrong = f"the tokenizer's own chat template cannot be applied ({type(error).__name__}: {first})"
            raise InputError(f"{wrong}: let the server do it, with lmc explain --server URL") from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens)) if self._tokenizer else " ".join(map(str, tokens))


def serve_if_wanted(of: Administration) -> Callable[[], None] | None:
    """Start the endpoint if the settings name an address, and return its stop function.

    If the engine uses a cache server, the server learns the URL and the token for explanations.
    """
    address, token = of.settings.admin, of.settings.admin_token or ""
    if not address:
        return None
    stop = serve(of, address, token)
    if of.server is not None:
        of.server.administered_at(url_of(address, token, of.number), of.explain_token)
    return stop


def serve(of: Administration, address: str, token: str) -> Callable[[], None]:
    """Serve at an address in a thread, and return the function that stops it; see `lmc.http.server.serve`."""
    return http_server.serve(application(of, token), address, token, setting=ADDRESS, number=of.number)


def application(of: Administration, token: str) -> Any:
    """Return the ASGI application. Raises `ConfigError` if Starlette is missing."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError(f"{ADDRESS} needs {error.name}: pip install starlette uvicorn") from error

    def answering(find: Callable[[Request, Any], Facts]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                body = await _body(request) if request.method in ("POST", "PATCH") else {}
                found = await run_in_threadpool(lambda: _encoded(find(request, body), of.background))
                return Response(found, media_type="application/json")
            except (InputError, ValueError, TypeError, KeyError, ClientDisconnect) as error:
                return JSONResponse({"error": str(error)}, 404 if isinstance(error, NotFound) else 400)

        return answer

    documents = of.documents
    routes: list[tuple[str, str, Callable[[Request, Any], Facts]]] = [
        ("GET", "/health", lambda _, __: {"status": of.status()}),
        ("GET", "/v1/stat", lambda _, __: of.stat()),
        ("GET", "/v1/routing", lambda _, __: of.routing()),
        ("POST", EXPLAIN, lambda _, body: of.explain(body)),
        ("GET", "/v1/documents", lambda request, _: documents.listed(**_listing(request.query_params))),
        ("GET", "/v1/documents/{name:path}", lambda request, _: documents.show(request.path_params["name"])),
        (
            "PATCH",
            "/v1/documents/{name:path}",
            lambda request, body: documents.change(request.path_params["name"], body),
        ),
        ("DELETE", "/v1/documents/{name:path}", lambda request, _: documents.remove(request.path_params["name"])),
        ("POST", "/v1/learn", lambda _, body: of.learn(body)),
        ("GET", "/v1/requests/{name}", lambda request, _: of.request(request.path_params["name"])),
    ]
    routed = Starlette(routes=[Route(path, answering(find), methods=[method]) for method, path, find in routes])
    return http_server.Guard(routed, token, path_tokens={EXPLAIN: of.explain_token})


def _encoded(facts: Facts, background: Background) -> bytes:
    """Return facts as JSON.

    The items of a list are encoded separately, because other threads cannot run while `json.dumps` runs.
    """

    def encoded(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(json.dumps, background.gently(value)))}]"
        return json.dumps(value)

    fields = ", ".join(f"{json.dumps(name)}: {encoded(value)}" for name, value in facts.items())
    return ("{" + fields + "}").encode()


async def _body(request: Any) -> Facts:
    """Return the request body, a JSON object. Raises `InputError` for any other body."""
    try:
        found = await request.json()
    except ValueError as error:
        raise InputError(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError("the body must be a JSON object")
    return found


def _listing(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `DocumentAdmin.listed` from those of a request."""
    limit, unused_for = parameters.get("limit", str(DEFAULT_LIST_LENGTH)), parameters.get("unused_for", "0")
    if not limit.isdecimal() or not int(limit):
        raise InputError(f"limit = {limit} must be a whole number from 1 on")
    if not unused_for.isdecimal():
        raise InputError(f"unused_for = {unused_for} must be a whole number of seconds")
    texts = {name: parameters[name] for name in ("name", "model", "tenant") if name in parameters}
    only = Filter(**texts, unused_for=float(unused_for))
    return {"limit": int(limit), "after": parameters.get("after", ""), "only": only}
