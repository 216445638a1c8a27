"""What the router reads in requests: the prompts of all paths, and their sizes."""

import json
import tracemalloc

import pytest
from router_house import house

from lmc.blend.markers import Markers
from lmc.router.cut import Cutter
from lmc.router.document_tokens import DocumentTokens
from lmc.router.policies import POLICIES, make
from lmc.router.policy_types import Candidate, RoutingChoice, Usage
from lmc.router.requests import Received, read

TEXT = "word " * 2000
IDS = list(range(2500))
CHAT = [{"role": "user", "content": TEXT}]
SHORT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": TEXT}}]
CALL = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"text": TEXT})}}]
PROMPTS = {
    "/v1/chat/completions": {"messages": CHAT},
    "tools of a chat": {"messages": SHORT, "tools": TOOLS},
    "calls of tools": {"messages": [*SHORT, {"role": "assistant", "tool_calls": CALL}]},
    "/v1/chat/completions/batch": {"messages": [SHORT, CHAT]},
    "/v1/messages": {"system": TEXT, "messages": SHORT},
    "/v1/messages with blocks": {"system": [{"type": "text", "text": TEXT}], "messages": SHORT},
    "a result of a tool in /v1/messages": {
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": TEXT}]}]}
        ]
    },
    "a call of a tool in /v1/messages": {
        "messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"text": TEXT}}]}]
    },
    "/v1/responses": {"instructions": TEXT, "input": "hi"},
    "results in /v1/responses": {"input": [{"type": "function_call_output", "output": TEXT}]},
    "several texts": {"prompt": [TEXT[:5000], TEXT[5000:]]},
    "/v1/rerank": {"query": "q", "documents": [TEXT[:5000], {"text": TEXT[5000:]}]},
    "/v1/score": {"text_1": "q", "text_2": [TEXT]},
    "/v1/score with queries": {"queries": ["q"], "items": [{"content": [{"type": "text", "text": TEXT}]}]},
    "/v2/embed": {"texts": [TEXT]},
    "/v2/embed with parts": {"inputs": [{"content": [{"type": "text", "text": TEXT}]}]},
    "/classify": {"input": TEXT},
    "token ids": {"prompt": IDS},
    "token ids in a list": {"prompt": [IDS]},
    "several prompts of token ids": {"prompt": [IDS[:1000], IDS[1000:]]},
    "/inference/v1/generate": {"token_ids": IDS, "sampling_params": {}},
    "/v1/embeddings": {"input": IDS},
    "/v1/embeddings of several": {"input": [IDS[:1000], IDS[1000:]]},
    "a form that the router does not know": {"something": TEXT},
}


def received(fields, headers=None) -> Received:
    return read(json.dumps({"model": "m", **fields}).encode(), headers or {}, "x-session-id", " # # ")


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompt_of_a_request_has_a_size(name):
    """Most of these had a size of 0 to 2 tokens, so engines that computed them counted as idle."""
    found = received(PROMPTS[name])
    assert found.tokens == pytest.approx(2500, rel=0.05)
    assert Cutter().cut(found.request).tokens == pytest.approx(2500, rel=0.05)
    choice = make("documents").choose(found.request, [Candidate("a")])
    assert choice.cost == pytest.approx(2500, rel=0.05)


def test_prompts_with_other_systems_or_tools_have_nothing_in_common():
    policy, engines = make("documents"), [Candidate("a")]
    for field in ("system", "tools"):
        first, other = ({"messages": CHAT, field: text} for text in ("one " * 500, "two " * 500))
        policy.sent(received(first).request, "a")
        assert policy.choose(received(first).request, engines).expected_tokens > 1000
        assert policy.choose(received(other).request, engines).expected_tokens == 0


def test_a_prompt_that_was_not_read_teaches_nothing_about_characters():
    policy = make("documents")
    for request in (
        received({"something": TEXT}).request,
        read(b"--x--", {"content-type": "multipart/form-data; boundary=x"}, "", "").request,
    ):
        policy.answered(request, RoutingChoice("a", ""), Usage(prompt_tokens=10))
    assert not policy.cutter.rates


def test_only_what_tokenize_takes_is_sent_there():
    assert received({"messages": CHAT}).tokenize == {"model": "m", "messages": CHAT}
    assert received({"system": "x", "messages": CHAT}).tokenize is None
    assert received({"messages": [CHAT]}).tokenize is None
    assert received({"prompt": [IDS]}).tokenize is None


def test_a_request_that_is_not_understood_has_a_cost():
    with house(1) as built:
        (engine,) = built.ask("/lmc/explain", {"model": "echo", "something": TEXT})[1]["engines"]
        assert engine["cost_tokens"] > 2000


def test_null_is_a_missing_field():
    """Clients that write every field as null were refused, for the model, or routed without their prompt."""
    body = dict.fromkeys(("model", "cache_salt", "messages", "input", "user", "documents", "tools", "stream"))
    request = read(json.dumps(body | {"prompt": "one two"}).encode(), {}, "", " # # ").request
    assert (request.text, request.model, request.salt) == ("one two", "", "")


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"precise"}))
@pytest.mark.parametrize("field", ["cache_salt", "user"])
def test_names_that_clients_choose_take_little_memory(policy, field):
    """A hundred requests with a `user` of 4 MiB took 400 MB for good, and so did those with a `cache_salt`."""
    router, engines = make(policy), [Candidate("a"), Candidate("b")]
    if (cutter := router.needs.cutter) is not None:
        cutter.markers["m"] = Markers(separators=((9,),))
        cutter.find = DocumentTokens(None, cutter.markers, cutter.special_string_of).find
    tracemalloc.start()
    try:
        for number in range(20):
            request = received(
                {"prompt": f"s # # document {number} # # q", field: f"{number}" + "x" * (1 << 20)}
            ).request
            choice = router.choose(request, engines)
            router.sent(request, choice.engine)
            router.answered(request, choice, Usage(10, 5, 5, {}))
        request = choice = received({"prompt": "the last one is kept"}).request
        router.sent(request, router.choose(request, engines).engine)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
