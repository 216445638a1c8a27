"""Reads what clients ask: model, text of the prompt, tenant and session, from bodies of OpenAI's API."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import xxhash

from lmc.errors import InputError
from lmc.router.cut import MOST_LETTERS, MOST_TOKENS, ROLE
from lmc.router.policy import PromptRequest
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN

Body = Mapping[str, Any]
# What vLLM's /tokenize takes of a request.
OF_TEXTS = ("model", "prompt", "add_special_tokens")
OF_CHATS = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs",
)  # fmt: skip
FORM = "multipart/form-data"
# Small values need many times the memory of their letters.
MOST_CONTAINERS, MOST_VALUES = 1_000_000, 4_000_000
MOST_PARTS = 100_000  # messages, and parts of a message, that are looked at; more would hold up other requests
MODEL_OF_A_FORM = re.compile(rb'(?<!\w)name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{0,1024})\r\n')
STREAMED_FORM = re.compile(rb'(?<!\w)name="?stream"?\r\n(?:[^\r\n]+\r\n)*\r\n(?i:true|1)\r\n')
MEDIA = ROLE + "\1"  # before the hash of an image or a sound
ANSWER = "assistant"  # the role of what a model has said


class Received(NamedTuple):
    """What a client asks."""

    request: PromptRequest
    stream: bool
    tokens: float  # of the prompt, roughly
    tokenize: Body | None  # what to ask an engine under /tokenize for the tokens; None if it does not help
    response: str = ""  # the id of an earlier response, which one engine alone has


def json_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object; raise `InputError` for anything else."""
    if len(body) > MOST_CONTAINERS and (_containers(body) > MOST_CONTAINERS or body.count(b",") > MOST_VALUES):
        raise InputError(f"the body may have {MOST_VALUES} values at most, and {MOST_CONTAINERS} lists or objects")
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise InputError("the body is nested too deeply") from None
    if not isinstance(found, dict):
        raise InputError("the body must be a JSON object")
    return found


def _containers(body: bytes) -> int:
    """Return how many lists and objects a body has at most; one more than are allowed stands for all larger numbers.

    In 22 MB of text, `bytes.count` takes 14 ms for a letter, and this takes 3 ms because it skips what has none.
    """
    return sum(len(body) - len(body.replace(begin, b"", MOST_CONTAINERS + 1)) for begin in (b"{", b"["))


def read(
    body: bytes,
    headers: Mapping[str, str],
    session_key: str,
    special_string: str,
    special_strings: Mapping[str, str] = MappingProxyType({}),
) -> Received:
    """Return what a body asks; raise `InputError` if it is no JSON object, or no request.

    `special_strings` are those of models, where they have one of their own.

    The session is the value of the header `session_key`, or the field `user`. A form, which carries a sound or a file,
    goes by its model and its load.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() == FORM:
        return _form(body)
    asked = json_object(body)
    model, salt = asked.get("model", ""), asked.get("cache_salt") or ""
    if not isinstance(model, str) or not isinstance(salt, str):
        raise InputError("model and cache_salt must be texts")
    session = headers.get(session_key.lower(), "") or asked.get("user") or ""
    before = asked.get("previous_response_id") or ""
    tokens = _tokens(asked)
    whole = "" if tokens is not None else prompt_text(asked, special_strings.get(model, special_string))
    text = whole[:MOST_LETTERS]
    request = PromptRequest(
        text=text,
        media=MEDIA in text,
        model=model,
        salt=salt,
        session=session if isinstance(session, str) else "",
        tokens=tokens,
        documents=tuple(_named_documents(asked)),
    )
    size = len(whole) / CHARACTERS_PER_TOKEN if tokens is None else len(tokens)
    return Received(
        request,
        asked.get("stream") is True,
        size,
        tokenize=None if tokens is not None else _tokenize(asked),
        response=before if isinstance(before, str) else "",
    )


def about_a_response(response: str) -> Received:
    """Return the question about a response that an engine has made before."""
    return Received(PromptRequest(text=""), stream=False, tokens=1.0, tokenize=None, response=response)


def _form(body: bytes) -> Received:
    model = MODEL_OF_A_FORM.search(body)
    name = model[1].decode("utf-8", "replace").strip() if model else ""
    same = xxhash.xxh3_128_hexdigest(body)  # Equal files are at home at the same engine.
    return Received(PromptRequest(text=same, model=name), STREAMED_FORM.search(body) is not None, 1.0, tokenize=None)


def prompt_text(asked: Body, special_string: str) -> str:
    """Return the text of a prompt in its order, of no more messages than are looked at.

    The `documents` of a chat come first, between separators, as the chat template of `lmc template` has them. What the
    model has said is never cut.
    """
    parts = list(_messages(asked, special_string.strip()))
    documents = list(_chat_documents(asked))
    if documents:
        parts.insert(0, special_string.join(("", *documents, "")))
    return "".join(parts)


def _messages(asked: Body, bare: str) -> Iterator[str]:
    instructions, said = asked.get("instructions"), asked.get("messages", asked.get("input", asked.get("prompt")))
    if isinstance(instructions, str):
        yield f"{ROLE}system{ROLE}{instructions}"
    if isinstance(said, str):
        yield said
    elif isinstance(said, list):
        for message in islice(said, MOST_PARTS):
            if isinstance(message, str):  # one of several prompts
                yield message + ROLE
            elif isinstance(message, dict):
                role, text = str(message.get("role", "")), "".join(_contents(message.get("content")))
                if role == ANSWER:
                    text = text.replace(bare, ROLE)
                yield f"{ROLE}{role}{ROLE}{text}"


def _contents(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in islice(content, MOST_PARTS):
            if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                yield text
            elif isinstance(part, dict):  # An image or a sound is the same only if all of it is.
                yield f"{MEDIA}{xxhash.xxh3_128_hexdigest(msgspec.json.encode(part))}"


def _chat_documents(asked: Body) -> Iterator[str]:
    documents = asked.get("documents")
    for one in documents if isinstance(documents, list) else ():
        if isinstance(one, dict) and isinstance(text := one.get("text"), str):
            yield text.strip()


def _named_documents(asked: Body) -> Iterator[str]:
    """Yield the texts that `kv_transfer_params.lmc.documents` names."""
    found: Any = asked
    for name in ("kv_transfer_params", "lmc", "documents"):
        found = found.get(name) if isinstance(found, dict) else None
    for one in found if isinstance(found, list) else ():
        if isinstance(one, str) and one.strip():
            yield one


def _tokenize(asked: Body) -> Body | None:
    fields = OF_CHATS if isinstance(asked.get("messages"), list) else OF_TEXTS
    if fields is OF_TEXTS and not isinstance(asked.get("prompt"), str):
        return None
    found = {name: asked[name] for name in fields if name in asked}
    if fields is OF_CHATS and asked.get("documents"):  # vLLM's /tokenize has them among those of the template only.
        given = asked.get("chat_template_kwargs")
        found["chat_template_kwargs"] = {**(given if isinstance(given, dict) else {}), "documents": asked["documents"]}
    return found


def _tokens(asked: Body) -> list[int] | None:
    given = asked.get("prompt_token_ids", asked.get("prompt"))
    found = given[:MOST_TOKENS] if isinstance(given, list) else []
    if set(map(type, found)) == {int} and min(found) >= 0 and max(found) < 1 << 32:
        return found
    return None
