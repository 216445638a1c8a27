"""The prompts in bodies of requests, and the chats that bodies of /v1/responses become."""

from lmc.http.prompts import plain_chat, single_prompts

CALL = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"x": "y"}'}
TOOL = {"type": "function", "name": "search", "parameters": {"type": "object"}}
RESPONSE = {
    "model": "m",
    "instructions": "Be brief.",
    "tools": [TOOL, {"type": "web_search"}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_image", "image_url": "i"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I search."}]},
        CALL,
        CALL | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "developer", "content": "three"},
    ],
}


def call(number: int) -> dict:
    return {"id": f"c{number}", "type": "function", "function": {"name": "search", "arguments": '{"x": "y"}'}}


def test_a_response_is_a_chat_with_its_instructions_tools_and_calls() -> None:
    (chat,) = single_prompts(RESPONSE)
    assert chat == {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, RESPONSE["input"][0]["content"][1]]},
            {"role": "assistant", "reasoning": "I search.", "tool_calls": [call(1), call(2)]},
            {"role": "tool", "content": '{"a": 1}', "tool_call_id": "c1"},
            {"role": "tool", "content": [{"type": "text", "text": "b"}], "tool_call_id": "c2"},
            {"role": "assistant", "content": "two"},
            {"role": "developer", "content": "three"},
        ],
    }
    assert single_prompts({"input": "one", "max_output_tokens": 3}) == [
        {"messages": [{"role": "user", "content": "one"}], "max_output_tokens": 3}
    ]


def test_chat_templates_get_texts_and_objects() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    image = [*parts, {"type": "image_url", "image_url": {"url": "i"}}]
    chat = [
        {"role": "user", "content": parts},
        {"role": "user", "content": image},
        {"role": "assistant", "content": None, "tool_calls": [call(1)]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": "no JSON"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": "[" * 100_000}}]},
    ]
    assert plain_chat(chat) == [
        {"role": "user", "content": "one\ntwo"},
        chat[1],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call(1) | {"function": {"name": "search", "arguments": {"x": "y"}}}],
        },
        chat[3],
        chat[4],
    ]
