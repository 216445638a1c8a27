"""A router with tokenizers of its own cuts prompts as engines do, and asks an engine where it cannot."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked import context
from router_house import house
from storage_fakes import eventually
from transformers import AutoTokenizer

from lmc.errors import ConfigError
from lmc.router import local_tokenizers
from lmc.router.arguments import checked, paths_of_models
from lmc.router.settings import RouterSettings

MODEL = Path(__file__).parent.parent / "lmc" / "demo" / "small_model" / "model"
ASK, EXPLAIN = "/v1/completions", "/lmc/explain"
TEMPLATE = "{% for one in messages %}{{ one.role }} : {{ one.content }} . {% endfor %}"
PROMPT = "name one owner . # # a red house belongs to the baker . # # the ship is old . # # question"


def asked_for_tokens(built) -> int:
    return sum(one["path"] == "/tokenize" for echo in built.echoes for one in echo.seen)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The shipped model's tokenizer with a chat template, which it has not."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def built(path):
    """A router whose tokenizer process is forked instead of spawned, which saves seconds of imports at each start."""
    forking = context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _: forking)
        with house(1, tokenizers={"echo": str(path)}, tokenizer_processes=1) as made:
            eventually(lambda: "echo" in made.router.application.proxy.tokenizers)
            yield made


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": PROMPT},
        {"messages": [{"role": "user", "content": PROMPT}]},
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": PROMPT}]},
    ],
)
def test_a_prompt_is_cut_exactly_and_no_engine_is_asked(built, path, asked):
    tokenizer, before = AutoTokenizer.from_pretrained(path), asked_for_tokens(built)
    if "prompt" in asked:
        tokens = tokenizer.encode(asked["prompt"])
    else:
        tokens = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_dict=False)
    status, found = built.ask(EXPLAIN, {"model": "echo", **asked})
    assert status == 200
    assert found["prompt"] == {"tokens": len(tokens), "exact": True}
    assert built.ask(ASK, {"model": "echo", "prompt": PROMPT})[0] == 200
    assert built.ask(EXPLAIN, {"model": "echo", "prompt": PROMPT})[1]["engines"][0]["documents"] == 2
    assert asked_for_tokens(built) == before


def test_what_only_an_engine_knows_is_asked_there(built):
    before = asked_for_tokens(built)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for message in ({"role": "user", "content": parts}, {"role": "user", "content": None, "tool_calls": []}):
        built.ask(EXPLAIN, {"model": "echo", "messages": [message]})
    assert asked_for_tokens(built) == before + 2


FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template": FOREVER},
        {"chat_template_kwargs": {"chat_template": FOREVER}},
        {"chat_template_kwargs": {"padding": "max_length", "max_length": 100_000_000}},
        {"chat_template_kwargs": {"return_tensors": "pt"}},
        {"chat_template_kwargs": "x"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": ["hi"]},
        {"add_special_tokens": None},
    ],
)
def test_what_a_client_gives_to_templates_is_left_to_the_engine(built, more):
    before = asked_for_tokens(built)
    body = {"model": "echo", "messages": [{"role": "user", "content": "x"}], **more}
    assert built.ask("/v1/chat/completions", body)[0] == 200
    assert asked_for_tokens(built) == before + 1
    assert "echo" in built.router.application.proxy.tokenizers, "no process was lost"


def test_an_empty_prompt_leaves_no_load(built):
    assert built.ask(ASK, {"model": "echo", "prompt": ""})[0] == 200
    assert built.numbers("engine_requests") == 0


def ready(built):
    """The tokenizers, when they can be asked, and their only process."""
    tokenizers = built.router.application.proxy.tokenizers
    eventually(lambda: "echo" in tokenizers)
    (process,) = multiprocessing.active_children()
    return tokenizers, process


def test_a_process_that_does_not_answer_is_replaced_and_prompts_behind_it_are_answered_by_an_engine(built, monkeypatch):
    """Earlier, these prompts got an error of the router: what waits for a killed process is cancelled."""
    monkeypatch.setattr(local_tokenizers, "RESTART_SECONDS", 0.01)
    tokenizers, process = ready(built)
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(local_tokenizers, "PROMPT_SECONDS", 0.3)
    with ThreadPoolExecutor(8) as pool:
        asked = {"model": "echo", "prompt": PROMPT}
        assert set(pool.map(lambda _: built.ask(ASK, asked)[0], range(8))) == {200}
    monkeypatch.setattr(local_tokenizers, "PROMPT_SECONDS", 5.0)
    eventually(lambda: "echo" in tokenizers)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert built.ask(EXPLAIN, asked)[1]["prompt"]["exact"]


def test_a_process_that_ends_is_replaced_and_no_request_fails(built, monkeypatch, caplog):
    monkeypatch.setattr(local_tokenizers, "RESTART_SECONDS", 0.01)
    tokenizers, process = ready(built)
    os.kill(process.pid, signal.SIGKILL)
    noticed = "a tokenizer process ended"  # Its successor may be ready before anything else is looked at.
    eventually(lambda: built.ask(ASK, {"model": "echo", "prompt": PROMPT})[0] == 200 and noticed in caplog.text)
    assert built.ask(EXPLAIN, {"model": "echo", "prompt": PROMPT})[0] == 200
    successors = lambda: [one for one in multiprocessing.active_children() if one.pid != process.pid]  # noqa: E731
    eventually(lambda: successors() and "echo" in tokenizers)
    before = asked_for_tokens(built)
    assert built.ask(EXPLAIN, {"model": "echo", "prompt": PROMPT})[1]["prompt"]["exact"]
    assert asked_for_tokens(built) == before


def test_a_process_that_has_much_to_do_is_not_replaced(built, monkeypatch):
    """The prompts that wait for it are cut otherwise."""
    tokenizers, process = ready(built)
    monkeypatch.setattr(local_tokenizers, "PROMPT_SECONDS", 0.5)

    turns = tokenizers._turns

    async def take_turn():
        await turns.acquire()

    built.router.call(take_turn())  # as another prompt has it
    try:
        assert built.ask(ASK, {"model": "echo", "prompt": PROMPT})[0] == 200
    finally:
        built.router.loop.call_soon_threadsafe(turns.release)
    assert "echo" in tokenizers
    assert process.is_alive()
    monkeypatch.setattr(local_tokenizers, "PROMPT_SECONDS", 5.0)
    assert built.ask(EXPLAIN, {"model": "echo", "prompt": PROMPT})[1]["prompt"]["exact"]


def test_too_many_prompts_at_once_do_not_wait(built, monkeypatch):
    monkeypatch.setattr(local_tokenizers, "MAX_QUEUED_PROMPTS", 0)
    before = asked_for_tokens(built)
    assert built.ask(EXPLAIN, {"model": "echo", "prompt": PROMPT})[0] == 200
    assert asked_for_tokens(built) == before + 1


def test_a_tokenizer_that_cannot_be_read_is_named_with_what_is_missing_and_engines_are_asked(
    caplog, tmp_path, monkeypatch
):
    """Of each of these, the log had what Hugging Face says of names of repositories, or of ways to make a tokenizer."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    missing = "the directory does not exist"
    wrong = {
        "/no/tokenizer": missing,
        "./no/tokenizer": missing,
        "no/such/tokenizer": missing,
        "tokenizers/": missing,
        str(tmp_path): "the directory has no tokenizer files, such as tokenizer.json",
        "~nosuchuser/tokenizer": missing,
        "x" * 300 + "/": missing,
        "no/tokenizer": f"{missing}, and the hub has no such model: We couldn't connect",
        str(tmp_path / "model"): "",
    }
    models = {f"model {number}": path for number, path in enumerate(wrong)}
    models["echo"] = models.popitem()[1]
    with caplog.at_level(logging.WARNING), house(1, tokenizers=models, tokenizer_processes=1) as built:
        eventually(lambda: len(caplog.messages) == len(wrong))
        assert built.ask(ASK, {"model": "echo", "prompt": PROMPT})[0] == 200
        assert "echo" not in built.router.application.proxy.tokenizers
        assert asked_for_tokens(built) == 1
    for said, (model, path) in zip(caplog.messages, models.items(), strict=True):
        assert f"--tokenizers {model}={path}, engines tokenize instead: {wrong[path]}" in said


def test_arguments():
    assert paths_of_models("a=/x, b = hub/y ,") == {"a": "/x", "b": "hub/y"}
    assert paths_of_models('{"a,b=c": "/x,y", "d": "hub/y"}') == {"a,b=c": "/x,y", "d": "hub/y"}
    for wrong in ("/x", "=/x", "a=", '{"a": 3}', '{"a": ""}', '{"": "/x"}', "{a"):
        with pytest.raises(ConfigError, match="MODEL=DIRECTORY"):
            paths_of_models(wrong)


def test_transformers_is_wanted(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        checked(RouterSettings(tokenizers={"a": "/x"}))
