"""Reads the prompts in requests of OpenAI's API: completions, chats and responses."""

import json
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from lmc.errors import InputError

Chat = list[dict[str, Any]]

TOKENS, COMPLETION, CHAT, RESPONSE = "prompt_token_ids", "prompt", "messages", "input"
FIELDS = TOKENS, COMPLETION, CHAT, RESPONSE  # of a request; each has the prompt in a form of its own
HINT = (
    "use messages as in /v1/chat/completions, prompt as in /v1/completions (a text, a list of texts, token ids, or a "
    "list of lists of token ids), or input as in /v1/responses"
)


def single_prompts(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a request for each prompt of a request, with `messages`, a text as `prompt`, or `prompt_token_ids`.

    Their other fields are those of the request. Raises `InputError` for a request without a prompt, or with another
    form of it.
    """
    fields = [name for name in FIELDS if request.get(name) is not None]
    if fields[:1] == [TOKENS]:
        fields = [TOKENS]  # They may be given with the text from which they were made.
    if len(fields) != 1:
        raise InputError(f"request has {' and '.join(fields) or 'no prompt'}: {HINT}")
    (field,), others = fields, {name: value for name, value in request.items() if name not in FIELDS}
    given = request[field]
    if field == RESPONSE:
        return [_chat_of_response(given, others)]
    if field == CHAT:
        if not _are_objects(given):
            raise InputError(f"messages = {reprlib.repr(given)} must be a list of objects: {HINT}")
        if "system" in request:
            raise InputError(f"request has system beside messages, as in /v1/messages, which is not understood: {HINT}")
        return [others | {CHAT: given}]
    if field == COMPLETION and isinstance(given, str):
        return [others | {COMPLETION: given}]
    if _are_tokens(given):
        return [others | {TOKENS: given}]
    if isinstance(given, list) and given:
        if field == COMPLETION and all(isinstance(prompt, str) for prompt in given):
            return [others | {COMPLETION: prompt} for prompt in given]
        if all(map(_are_tokens, given)):
            return [others | {TOKENS: prompt} for prompt in given]
    raise InputError(f"{field} = {reprlib.repr(given)} is not a prompt: {HINT}")


def plain_chat(messages: Iterable[Mapping[str, Any]]) -> Chat:
    """Return messages as most chat templates expect them.

    Contents that consist of texts are joined with line breaks, as vLLM does. Arguments of tool calls are objects.
    """
    return [{name: _plain(name, value) for name, value in message.items()} for message in messages]


def _plain(name: str, value: Any) -> Any:
    if name == "content" and _are_objects(value) and all(isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    if name == "tool_calls" and _are_objects(value):
        return [_plain_call(call) for call in value]
    return value


def _plain_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


def _are_tokens(given: Any) -> bool:
    return isinstance(given, list) and set(map(type, given)) == {int} and min(given) >= 0


def _are_objects(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(one, dict) for one in given)


# -- responses ---------------------------------------------------------------------------------------------------------


def _chat_of_response(given: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request to which vLLM renders a request of /v1/responses."""
    if others.get("previous_response_id"):
        raise InputError("previous_response_id names turns that only the engine has: give all turns as input")
    if not isinstance(given, str) and not _are_objects(given):
        raise InputError(f"input = {reprlib.repr(given)} must be a text or a list of items, which are objects: {HINT}")
    instructions = others.get("instructions")
    messages: Chat = [{"role": "system", "content": instructions}] if instructions else []
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        _add_item(messages, item)
    given_tools = others.get("tools") or []
    functions = [tool for tool in given_tools if isinstance(tool, dict) and tool.get("type") == "function"]
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in functions]
    kept = {name: value for name, value in others.items() if name not in ("instructions", "tools")}
    return kept | {CHAT: messages} | ({"tools": tools} if tools else {})


def _add_item(messages: Chat, item: Mapping[str, Any]) -> None:
    """Add an item of a response's input to a chat."""
    kind, role = item.get("type") or "message", item.get("role")
    if kind == "message" and role == "assistant":
        _add_to_answer(messages, "content", _text(item.get("content")))
    elif kind == "message" and role:
        messages.append({"role": role, "content": _parts(item.get("content"))})
    elif kind == "reasoning":
        _add_to_answer(messages, "reasoning", _text(item.get("content") or item.get("summary")))
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        _add_to_answer(messages, "tool_calls", [{"id": item.get("call_id"), "type": "function", "function": function}])
    elif kind == "function_call_output":
        content = {"content": _parts(item.get("output")), "tool_call_id": item.get("call_id")}
        messages.append({"role": "tool", **content})
    else:
        known = "messages with a role, reasoning, function_call and function_call_output"
        raise InputError(f"input has an item of type {kind!r} that is not understood: use {known}")


def _add_to_answer(messages: Chat, name: str, value: Any) -> None:
    """Add a part of the model's answer. An answer of several items is one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    if name == "tool_calls" and name in last:
        last[name] += value
    elif last and name not in last:
        last[name] = value
    else:
        messages.append({"role": "assistant", name: value})


def _text(content: Any) -> str:
    """Return the text of an answer or of reasoning, of which vLLM uses the first part."""
    parts = _parts(content)
    return str(parts[0].get("text") or "") if _are_objects(parts) else str(parts or "")


def _parts(content: Any) -> Any:
    """Return a content with its texts in the form of chats."""
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part["text"]} if _is_text(part) else part for part in content]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
