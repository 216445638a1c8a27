"""`lmc explain` for every form of a request, and texts as JSON strings in chats, with a real server of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import transformers
from http_engine import HttpEngine
from ports import free_port
from test_find_in_prompts import train

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
# The results of tools are JSON strings, as in Llama 3.1.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% for call in m.tool_calls or [] %}{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ (m.content | tojson if m.role == 'tool' else m.content) or '' }}\n{% endfor %}"
)
SERVE = (
    "export LMC_ENABLE_BLENDING=true LMC_MAX_LOCAL_CPU_SIZE=1 LMC_LOAD_POLICY=always VLLM_CPU_KVCACHE_SPACE=1 "
    "LMC_ADMIN=127.0.0.1:NUMBER\n"
    "vllm serve MODEL --port 8000 --max-model-len 4096 --chat-template TEMPLATE --kv-transfer-config "
    '\'{"kv_connector": "LMCConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}\''
)
TEXTS = {
    "rules.txt": "\n".join(
        f'Rule {number}: "Close the window {number * 7} times",\n\tthen rest.' for number in range(30)
    ),
    "規則.txt": "\n".join(f"規則{number}。「窓を{number * 7}回閉める」\n猫に昼ご飯をあげる。" for number in range(30)),
    "plain.txt": " ".join(f"The cat sat on mat {number * 3} and slept." for number in range(40)),
}
CALL = {"name": "search", "arguments": '{"x": "y"}'}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with random weights, its administration endpoint, and the folder of its documents."""
    folder, admin = tmp_path_factory.mktemp("explain"), free_port()
    config = transformers.Qwen3Config(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=train(TEXTS.values()))
    tokenizer.save_pretrained(folder / "model")
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "texts").mkdir()
    for name, text in TEXTS.items():
        (folder / "texts" / name).write_text(text)
    command = SERVE.replace("NUMBER", str(admin)).replace("TEMPLATE", str(folder / "template.jinja"))
    server = HttpEngine(folder, command.replace("MODEL", f"MODEL --model {folder / 'model'}"))
    server.admin, server.folder = f"127.0.0.1:{admin}", folder
    try:
        server.wait()
        yield server
    finally:
        server.close()


def lmc(served, *words) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(served.folder / "cache")}
    command = [sys.executable, "-m", "lmc", *map(str, words)]
    return subprocess.check_output(command, text=True, env=environment, cwd=ROOT, stderr=subprocess.STDOUT)


def learn(served, *options: str) -> str:
    return lmc(served, "learn", served.folder / "texts", "--url", served.url, "--admin", served.admin, *options)


def post(served, path: str, body: dict) -> dict:
    found = httpx.post(f"{served.url}{path}", json=body, timeout=60)
    assert found.is_success, found.text
    return found.json()


def explained(served, body) -> dict:
    path = served.folder / "body.json"
    path.write_text(json.dumps(body))
    return json.loads(lmc(served, "explain", path, "--url", served.admin, "--server", served.url, "--json"))


def tool_chat(text: str) -> list[dict]:
    call = {"id": "c1", "type": "function", "function": CALL}
    return [
        {"role": "user", "content": "What is rule 8?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": text},
    ]


def test_a_template_that_writes_json_strings_makes_learn_learn_them(served):
    assert "3 documents learned" in learn(served, "--no-escaped")
    found = explained(served, {"messages": tool_chat(TEXTS["rules.txt"])})
    assert ("rules.txt as a JSON string" in found["why"], "--escaped" in found["advice"][0]) == (True, True)
    said = learn(served)
    assert "the chat template writes the results of tools as JSON strings" in said
    assert "2 documents learned" in said  # plain.txt is the same text as a JSON string.
    assert "3 of 3 documents were learned before" in learn(served, "--no-escaped")
    assert "5 of 5 documents were learned before" in learn(served)
    listed = json.loads(lmc(served, "documents", "list", "--url", served.admin, "--json"))["documents"]
    escaped = {f"{name} (as JSON)" for name in TEXTS if name != "plain.txt"}
    assert {one["name"] for one in listed} == {*TEXTS, *escaped}
    for name, text in TEXTS.items():
        as_json = json.dumps(text, ensure_ascii=False)
        tokens = post(served, "/tokenize", {"prompt": as_json})["count"]
        found = post(served, "/v1/chat/completions", {"messages": tool_chat(text), "max_tokens": 1, "temperature": 0})
        assert found["kv_transfer_params"]["lmc"]["reused_tokens"] >= 0.97 * tokens, name


def test_what_is_explained_is_what_the_server_gets(served):
    learn(served)
    text = TEXTS["plain.txt"]
    prompt = f"Use this.\n{text}\nWhere did the cat sleep?"
    tokens = post(served, "/tokenize", {"prompt": prompt})["tokens"]
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Search."}, {"type": "input_text", "text": "Now."}],
        },
        {"type": "function_call", "call_id": "c1", **CALL},
        {"type": "function_call_output", "call_id": "c1", "output": text},
    ]
    for path, body, prompts in (
        ("/v1/chat/completions", {"messages": tool_chat(text), "max_tokens": 1}, 1),
        ("/v1/responses", {"input": prompt, "max_output_tokens": 1}, 1),
        ("/v1/responses", {"input": items, "instructions": "Be brief.", "max_output_tokens": 1}, 1),
        ("/v1/completions", {"prompt": prompt, "max_tokens": 1}, 1),
        ("/v1/completions", {"prompt": tokens, "max_tokens": 1}, 1),
        ("/v1/completions", {"prompt": [prompt, "Where?"], "max_tokens": 1}, 2),
        ("/v1/completions", {"prompt": [tokens, tokens[:200]], "max_tokens": 1}, 2),
    ):
        usage = post(served, path, body)["usage"]
        found = explained(served, body)
        explanations = found.get("prompts", [found])
        assert len(explanations) == prompts
        counted = sum(one["tokens"] for one in explanations)
        assert counted == usage.get("input_tokens", usage.get("prompt_tokens")), body
        assert [one["name"] for one in explanations[0]["documents"]] == ["plain.txt"], body
