"""Reads requests of OpenAI's API: whether a path is for engines, and a body's model, prompt, tenant and session.

Only paths that compute something are forwarded. Paths that administer an engine, such as loading an adapter, are not,
unless the option `allowed_paths` has them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import xxhash
from cachetools import LRUCache

from lmc.errors import InputError
from lmc.router.cut import MAX_CHARACTERS, MAX_TOKENS, ROLE
from lmc.router.forms import FORM_TYPE, read_form
from lmc.router.policy_types import PromptRequest
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN

Body = Mapping[str, Any]
# The paths on which vLLM computes something. All of them are forwarded.
COMPUTING = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/score", "/v1/rerank", "/v2/rerank",
    "/v1/pooling", "/v1/classify", "/tokenize", "/detokenize", "/score", "/rerank", "/pooling", "/classify",
    "/v1/completions/render", "/v1/completions/derender", "/v1/chat/completions/render",
    "/v1/chat/completions/derender", "/v1/chat/completions/batch", "/v1/responses/render", "/v1/messages/render",
    "/v2/embed", "/cohere/v2/chat", "/cohere/v2/chat/render", "/generative_scoring", "/inference/v1/generate",
    "/invocations",
})  # fmt: skip
# Of these, the paths on which it computes no prompt.
NOT_PREFILLING = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"}) | {
    path for path in COMPUTING if path.endswith(("/render", "/derender"))
}
PREFILLING = COMPUTING - NOT_PREFILLING
RESPONSES = "/v1/responses"
RESPONSE_PATH = re.compile(rf"{RESPONSES}/([\w.-]{{1,128}})(/cancel|/input_items)?", re.ASCII)
RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[\w.-]{1,123})"')
MAX_RESPONSES = 100_000  # whose engines are remembered
PROMPT_FIELDS = "messages", "input", "prompt"  # One of them has the texts of a request.
TOKEN_FIELDS = "prompt_token_ids", "token_ids", "prompt", "input"  # fields of a request that may have token ids
# Texts of /score, /rerank and /v2/embed.
SCORED_FIELDS = (
    "query", "queries", "text_1", "data_1", "documents", "items", "text_2", "data_2", "texts", "inputs",
)  # fmt: skip
# The fields of a request that vLLM's /tokenize accepts.
TEXT_FIELDS = ("model", "prompt", "add_special_tokens")
CHAT_FIELDS = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs",
)  # fmt: skip
# Small values need many times the memory of their characters.
MAX_CONTAINERS, MAX_VALUES = 1_000_000, 4_000_000
MAX_PARTS = 100_000  # messages, and parts of a message, that are read; more would delay other requests
MEDIA = ROLE + "\1"  # precedes the hash of an image or of audio
ASSISTANT = "assistant"  # the role of the model's own messages


def response_of(path: str) -> str:
    """Return the id of the stored response that a path names, or an empty string."""
    match = None if path in COMPUTING else RESPONSE_PATH.fullmatch(path)
    return match[1] if match else ""


class ResponseHomes:
    """The engine that made each response. An engine keeps its responses in memory, and no other engine has them."""

    def __init__(self) -> None:
        self._engines: LRUCache[str, str] = LRUCache(MAX_RESPONSES)

    def note(self, beginning: bytes, engine: str) -> None:
        """Store the response id in the beginning of an engine's answer."""
        if match := RESPONSE_ID.search(beginning):
            self._engines[match[1].decode()] = engine

    def engine_of(self, response: str) -> str:
        """Return the engine that made a response, or an empty string."""
        return str(self._engines.get(response, ""))


class Received(NamedTuple):
    """A request as read from its body."""

    request: PromptRequest
    stream: bool
    tokens: float  # estimated tokens of the prompt
    tokenize: Body | None  # the body for /tokenize that returns the prompt's tokens; None if there is none
    response: str = ""  # the id of a stored response, which only one engine has
    prefills: bool = True  # whether an engine computes the prompt


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, in UTF-8, UTF-16 or UTF-32. Raises `InputError` for anything else."""
    if len(body) > MAX_CONTAINERS and (_containers(body) > MAX_CONTAINERS or body.count(b",") > MAX_VALUES):
        raise InputError(f"request body exceeds {MAX_VALUES} values, or {MAX_CONTAINERS} lists and objects")
    try:
        encoding = json.detect_encoding(body)
        content = msgspec.json.decode(body if encoding == "utf-8" else body.decode(encoding))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"request body is not valid JSON: {error}") from None
    except RecursionError:
        raise InputError("request body is nested too deeply") from None
    if not isinstance(content, dict):
        raise InputError("request body must be a JSON object")
    return content


def _containers(body: bytes) -> int:
    """Return an upper bound of the lists and objects in a body; counting stops above the limit.

    In 22 MB of text, this takes 3 ms for a character and `bytes.count` 14 ms.
    """
    return sum(len(body) - len(body.replace(begin, b"", MAX_CONTAINERS + 1)) for begin in (b"{", b"["))


def read(
    body: bytes,
    headers: Mapping[str, str],
    session_key: str,
    special_string: str,
    special_strings: Mapping[str, str] = MappingProxyType({}),
) -> Received:
    """Return the request in a body. Raises `InputError` if it is not a JSON object or its fields are invalid.

    `special_strings` has the separator of each model that has its own. The session is the value of the header
    `session_key`, or the field `user`. A form, which carries audio or a file, is routed by its model and by load.
    """
    content_type = headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() == FORM_TYPE:
        return _form(body, content_type)
    fields = json_object(body)
    model, salt = fields.get("model") or "", fields.get("cache_salt") or ""  # vLLM accepts null for both.
    if not isinstance(model, str) or not isinstance(salt, str):
        raise InputError("model and cache_salt must be strings")
    session = headers.get(session_key.lower(), "") or fields.get("user") or ""
    before = fields.get("previous_response_id") or ""
    tokens = _tokens(fields)
    prompt = "" if tokens is not None else prompt_text(fields, special_strings.get(model, special_string))
    text = prompt[:MAX_CHARACTERS]
    unread = 0.0 if text or tokens else len(body) / CHARACTERS_PER_TOKEN
    request = PromptRequest(
        text=text,
        media=MEDIA in text,
        model=model,
        salt=salt,
        session=session if isinstance(session, str) else "",
        tokens=tokens,
        unread_tokens=unread,
        documents=tuple(_named_documents(fields)),
    )
    size = unread or (len(prompt) / CHARACTERS_PER_TOKEN if tokens is None else len(tokens))
    return Received(
        request,
        fields.get("stream") is True,
        size,
        tokenize=None if tokens is not None else _tokenize(fields),
        response=before if isinstance(before, str) else "",
    )


def about_a_response(response: str) -> Received:
    """Return the request about a stored response."""
    return Received(PromptRequest(text=""), stream=False, tokens=1.0, tokenize=None, response=response)


def _form(body: bytes, content_type: str) -> Received:
    form = read_form(body, content_type, ("model", "stream"))
    streamed = form.fields.get("stream", "").lower() in ("true", "1")
    # Identical files are routed to the same engine.
    request = PromptRequest(text=form.digest, model=form.fields.get("model", ""), media=True)
    return Received(request, streamed, 1.0, tokenize=None)


def prompt_text(body: Body, special_string: str) -> str:
    """Return the text of a prompt in order, up to `MAX_PARTS` messages.

    The `documents` of a chat come first, between separators, as in the chat template of `lmc template`. The model's own
    messages are never cut into documents. The texts of a batch, and those that are scored, follow each other.
    """
    given = (body[name] for name in PROMPT_FIELDS if body.get(name) is not None)
    content, bare = next(given, None), special_string.strip()
    parts = [*_before_messages(body), *_messages(content, bare)]
    if content is None:
        scored = (body.get(name) for name in SCORED_FIELDS)
        parts += [part for text in scored for part in _messages([text] if isinstance(text, str) else text, bare)]
    elif documents := list(_chat_documents(body)):
        parts.insert(0, special_string.join(("", *documents, "")))
    return "".join(parts)


def _before_messages(body: Body) -> Iterator[str]:
    """Yield the system text of a response or a message, and the tools."""
    for name in ("instructions", "system"):
        if text := "".join(_contents(body.get(name))):
            yield f"{ROLE}system{ROLE}{text}"
    if tools := body.get("tools"):
        yield f"{ROLE}tools{ROLE}{_as_json(tools)}"


def _messages(content: Any, bare: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for message in islice(_flattened(content), MAX_PARTS):
            if isinstance(message, str):  # one of several prompts
                yield message + ROLE
            elif isinstance(message, dict):
                role, text = str(message.get("role", "")), "".join(_texts_of(message))
                if role == ASSISTANT:
                    text = text.replace(bare, ROLE)
                yield f"{ROLE}{role}{ROLE}{text}"


def _flattened(content: list[Any]) -> Iterator[Any]:
    """Yield the items of a list, or those of several lists: messages of conversations, or token ids of prompts."""
    for item in content:
        if isinstance(item, list):
            yield from item
        else:
            yield item


def _texts_of(message: Body) -> Iterator[str]:
    """Yield the texts of a message, of calls of tools and of their results, and a text without a role."""
    yield from _contents(message.get("content"))
    if tool_calls := message.get("tool_calls"):
        yield _as_json(tool_calls)
    for name in ("arguments", "output", "text"):  # items of /v1/responses, and scored texts
        yield from _contents(message.get(name))


def _contents(content: Any, *, nested: bool = False) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in islice(content, MAX_PARTS):
            if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                yield text
            elif isinstance(part, dict) and part.get("type") == "tool_result" and not nested:
                yield from _contents(part.get("content"), nested=True)
            elif isinstance(part, dict) and part.get("type") == "tool_use":
                yield _as_json(part)
            elif isinstance(part, dict):  # Images and audio match only as a whole.
                yield f"{MEDIA}{xxhash.xxh3_128_hexdigest(msgspec.json.encode(part))}"


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _chat_documents(body: Body) -> Iterator[str]:
    documents = body.get("documents")
    for document in documents if isinstance(documents, list) else ():
        text = document.get("text") if isinstance(document, dict) else document
        if isinstance(text, str):
            yield text.strip()


def _named_documents(body: Body) -> Iterator[str]:
    """Yield the texts in `kv_transfer_params.lmc.documents`."""
    content: Any = body
    for name in ("kv_transfer_params", "lmc", "documents"):
        content = content.get(name) if isinstance(content, dict) else None
    for text in content if isinstance(content, list) else ():
        if isinstance(text, str) and text.strip():
            yield text


def _tokenize(body: Body) -> Body | None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return tokenize_body(body) if isinstance(body.get("prompt"), str) else None
    # vLLM's /tokenize takes one conversation, without a system text of its own.
    return None if "system" in body or any(isinstance(message, list) for message in messages) else tokenize_body(body)


def tokenize_body(body: Body) -> Body:
    """Return the body for vLLM's /tokenize that returns the tokens of a request with one chat or one text."""
    is_chat = isinstance(body.get("messages"), list)
    request = {name: body[name] for name in (CHAT_FIELDS if is_chat else TEXT_FIELDS) if name in body}
    if is_chat and body.get("documents"):  # vLLM's /tokenize takes documents only as a template argument.
        arguments = body.get("chat_template_kwargs")
        request["chat_template_kwargs"] = {
            **(arguments if isinstance(arguments, dict) else {}),
            "documents": body["documents"],
        }
    return request


def _tokens(body: Body) -> list[int] | None:
    """Return the token ids of a prompt, or those of several prompts one after the other; None if it has a text."""
    prompt: Any = next((body[name] for name in TOKEN_FIELDS if body.get(name) is not None), None)
    if not isinstance(prompt, list):
        return None
    several = prompt and isinstance(prompt[0], list)
    ids: list[Any] = list(islice(_flattened(prompt), MAX_TOKENS)) if several else prompt[:MAX_TOKENS]
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 1 << 32:
        return ids
    return None
