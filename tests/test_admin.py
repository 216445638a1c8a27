"""The administration endpoint, over real HTTP, and the commands that ask it. The engine is a fake, the store is not."""

import asyncio
import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from http_stub import http_stub
from ports import free_port
from rich.console import Console
from storage_fakes import DictTier
from test_cli import lmc
from test_vllm_scheduler import counted, pretend
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm_fakes import DOC_A, DOC_B, Adapter, Lab, hashes_of, learn, prompt

from lmc.blend.markers import Markers
from lmc.commands.administration import document_table
from lmc.connectors.vllm.scheduler.admin import Administration, serve, serve_if_wanted
from lmc.documents.escaped import as_json
from lmc.documents.sources import name_of
from lmc.documents.table import Filter
from lmc.errors import ConfigError, InputError, NotFound
from lmc.http import client as http_client
from lmc.http import server as http_server
from lmc.http import timeouts
from lmc.http.client import DocumentList, HttpClient, Refused, Unreachable, engine_client
from lmc.keys import LONGEST_NAME, RecordKind

BLANK = 70  # a token of white space; all others are words


class Words:
    """A tokenizer whose tokens are words."""

    def decode(self, tokens):
        return " ".join("" if token == BLANK else f"w{token}" for token in tokens)

    def encode(self, text):
        return [int(number) for number in re.findall(r"w(\d+)", text.replace(" # # ", " w90 w91 "))]

    def apply_chat_template(self, messages, **_):
        return [token for message in messages for token in self.encode(message["content"])]


ALWAYS = {"load_policy": "always"}  # These prompts are so short that prefill computes less than a blend.


def administration(lab: Lab, **setup) -> Administration:
    for name, value in {"tokenizer": Words(), **setup}.items():
        setattr(lab.setup, name, value)
    return Administration(lab.setup, lab.scheduler.recent)


def explained(lab: Lab, tokens, *, setup=None, **more):
    return administration(lab, **(setup or {})).explain({"prompt_token_ids": tokens, **more})


# -- explain ----------------------------------------------------------------------------------------------------------


def test_known_documents_are_said_to_be_reused_and_nothing_changes(make):
    lab = make()
    learn(lab, DOC_A, DOC_B)
    stats = lab.scheduler.numbers()
    found = explained(lab, prompt(DOC_B, DOC_A))
    assert [(one["reused"], one["why"], set(one["places"])) for one in found["documents"]] == [(True, "", {"host"})] * 2
    assert (found["reused_tokens"], found["why"]) == (len(DOC_A) + len(DOC_B), "")
    assert found["tokens"] == len(prompt(DOC_B, DOC_A))
    assert lab.scheduler.numbers() == stats
    assert not lab.states


def test_the_beginning_is_looked_for_in_the_engine_s_cache_and_in_the_store(make):
    lab = make()
    hashed = {"hash_blocks": lambda request: hashes_of(request.prompt_token_ids, salt=request.cache_salt)}
    whole = list(range(2, 34))
    lab.serve("one", whole)
    found = explained(lab, [*whole, 40, 41], setup=hashed)
    assert (found["engine_tokens"], found["exact_tokens"], found["reused_tokens"]) == (32, 0, 0)
    lab.forget_prefixes()
    found = explained(lab, [*whole, 40, 41], setup=hashed)
    assert (found["engine_tokens"], found["exact_tokens"]) == (0, 32)
    assert explained(lab, [*whole, 40, 41], setup=hashed, cache_salt="tenant")["exact_tokens"] == 0
    learn(lab, DOC_A)
    found = explained(lab, [*whole, *prompt(DOC_A)], setup=hashed)
    assert (found["exact_tokens"], found["reused_tokens"]) == (32, len(DOC_A))


def test_why_a_document_is_not_known(make):
    lab = make(slots=64)
    learn(lab, DOC_A)
    learn(lab, DOC_B, cache_salt="tenant")
    assert why(explained(lab, prompt([5, 6, 7, 8, 9, 10]))) == ["it is not learned yet: no request with it has ended"]
    assert why(explained(lab, prompt(DOC_B))) == [
        "it was learned under another cache_salt, or without one, and tenants share nothing"
    ]
    assert why(explained(lab, prompt(DOC_A), cache_salt="tenant")) == [
        "it was learned under another cache_salt, or without one, and tenants share nothing"
    ]

    blank = explained(lab, prompt([BLANK, *DOC_A]))
    assert why(blank) == [
        f"the text is known with other white space: from token 0 on it has {Words().decode([BLANK, *DOC_A][:8])!r}, "
        f"the known one {Words().decode(DOC_A[:8])!r}"
    ]
    assert blank["documents"][0]["nearest"] == lab.engine.known.nearest(DOC_A, document_namespace(lab)).id
    other = explained(lab, prompt([*DOC_A[:5], 60, *DOC_A[6:]]))
    assert why(other)[0].startswith("a document that is much like it is known: from token 5 on")
    assert other["documents"][0]["differs_at"] == 5

    for document in lab.engine.known.list():
        for key in document.keys:
            lab.store.forget(key)
    assert why(explained(lab, prompt(DOC_A)))[0].startswith("it was learned, and has been evicted")


def test_a_document_of_which_a_chunk_is_gone_is_said_to_be_stored_in_part(make, tmp_path):
    lab = make(settings=ALWAYS)
    learn(lab, DOC_A)
    chunks = len(lab.engine.known.list()[0].keys)
    lab.store.forget(lab.engine.known.list()[0].keys[-1])
    (one,) = explained(lab, prompt(DOC_A))["documents"]
    assert (len(one["places"]), one["chunks"], one["reused"]) == (chunks - 1, chunks, True)
    assert one["why"].startswith("it was learned, and has been evicted")
    port = free_port()
    stop = serve(administration(lab), f"127.0.0.1:{port}", "")
    (tmp_path / "prompt.txt").write_text(Words().decode(prompt(DOC_A)))
    out = lmc("explain", tmp_path / "prompt.txt", "--url", f"127.0.0.1:{port}")[1]
    stop()
    assert f"reused from memory, {chunks - 1} of {chunks} chunks" in out


def test_a_document_whose_time_was_over_and_one_of_a_tier_that_is_away_are_said_to_be_that(make, monkeypatch):
    lab = make()
    learn(lab, DOC_A, DOC_B)
    one, other = lab.engine.known.list()
    lab.engine.keeper.expire([one], 1e-9)
    time.sleep(0.001)
    lab.engine.keeper.remove_expired()
    assert why(explained(lab, prompt(one.tokens.tolist()))) == ["it was removed (its time limit expired)"]
    for key in other.keys:
        lab.store.forget(key)
    stats = lab.engine.stats()
    monkeypatch.setattr(lab.engine, "stats", lambda: replace(stats, usable={"disk": True, "redis": False}))
    said = why(explained(lab, prompt(other.tokens.tolist())))
    assert said == ["it was learned, and may be in redis, which does not answer now"]


def test_a_document_that_waits_to_be_learned_or_is_being_learned_is_said_to(make):
    lab = make()
    lab.serve("one", prompt(DOC_A))
    assert lab.engine.learning
    assert why(explained(lab, prompt(DOC_A))) == ["it waits to be learned"]
    plan = lab.scheduler.plan({}, lab.tables_of)
    assert why(explained(lab, prompt(DOC_A))) == ["it is being learned"]
    report, received, _ = lab.workers.step(plan, set())
    lab.scheduler.reported(report, received)
    lab.settle()
    assert not lab.engine.learning.under_way
    (document,) = explained(lab, prompt(DOC_A))["documents"]
    assert document["places"]


def test_learning_that_is_off_is_named(make):
    lab = make(settings={"blend_learn": False})
    assert why(explained(lab, prompt(DOC_A)))[0].startswith("it is not learned: blend_learn is false")


def test_a_document_of_another_model_is_named_after_a_restart(make):
    tier = DictTier()
    lab = make(tier)
    learn(lab, DOC_A)
    lab.settle()
    lab.scheduler.close()

    again = make(tier)
    assert why(explained(again, prompt(DOC_A))) == [""]
    said = why(explained(make(tier, model="another model"), prompt(DOC_A)))[0]
    assert said.startswith("it was learned by another model, or with other settings")


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({"blend_min_tokens": 100}, {}, "12 tokens of stored documents are fewer than blend_min_tokens=100"),
        ({}, {"lora": "an adapter"}, "requests with LoRA are not blended"),
        ({}, {"lmc": {"ratio": 3}}, "lmc.ratio must be between 0 and 1, not 3"),
    ],
)
def test_why_a_stored_document_is_not_reused(make, settings, more, said):
    lab = make(settings=settings)
    learn(lab, DOC_A)
    if "lora" in more:
        more = {"lora": Adapter(more["lora"])}
    found = explained(lab, prompt(DOC_A), **more)
    assert said in (found["why"], *why(found))
    assert found["reused_tokens"] == 0
    assert not any(one["reused"] for one in found["documents"])


def test_a_failed_self_test_is_named(make):
    lab = make()
    learn(lab, DOC_A)
    found = explained(lab, prompt(DOC_A), setup={"blends": False, "refused": "the self-test failed for this model"})
    assert found["why"] == "the self-test failed for this model"
    setup = {"blends": False, "refused": "the self-test failed", "tokenizer": None}
    with pytest.raises(InputError, match=re.escape("no tokenizer (the self-test failed): give prompt_token_ids")):
        administration(lab, **setup).explain({"prompt": "w1 w2"})


def test_a_slow_tier_is_named(make):
    lab = make(counted(documents=[DOC_A, DOC_B]))
    lab.serve("one", prompt(DOC_A))
    lab.forget_prefixes()
    pretend(lab, byte=1.0)
    near, far = explained(lab, prompt(DOC_A, DOC_B))["documents"]
    assert (near["reused"], near["places"]) == (True, ("host", "host"))
    assert (far["reused"], far["places"]) == (False, ("dict", "dict", "dict"))
    assert far["why"].startswith("stored tokens were computed, in about")


def why(found):
    return [one["why"] for one in found["documents"]]


def document_namespace(lab: Lab):
    return lab.engine.namespace(RecordKind.DOCUMENT, "")


# -- the endpoint -----------------------------------------------------------------------------------------------------


@contextmanager
def endpoint(found: Administration, token: str = "") -> Iterator[str]:
    """The address at which an engine can be asked."""
    address = f"127.0.0.1:{free_port()}"
    stop = serve(found, address, token)
    try:
        yield address
    finally:
        stop()


@pytest.fixture
def served(make):
    lab = make(settings=ALWAYS)
    learn(lab, DOC_A, DOC_B)
    lab.serve("cmpl-7-0-1a2b3c4d", prompt(DOC_A, DOC_B))
    with endpoint(administration(lab)) as lab.url:
        yield lab


def test_a_list_goes_on_where_the_page_before_ended_and_has_what_was_asked_for(served):
    code, out, _ = lmc("documents", "list", "--limit", "1", "--url", served.url)
    place = out.split("for more: --after ")[1].strip()
    assert (code, "1 of 2 documents" in out) == (0, True)
    code, rest, _ = lmc("documents", "list", "--after", place, "--url", served.url)
    assert (code, "1 of 2 documents" in rest, "for more" in rest) == (0, True, False)
    assert out.splitlines()[1] != rest.splitlines()[1]
    for option, value in (("--name", "other"), ("--model", "other"), ("--tenant", "f"), ("--unused-for", "1h")):
        assert "0 of 0 documents" in lmc("documents", "list", option, value, "--url", served.url)[1]
    for wrong, said in ((("--after", "x"), "use `next`"), (("--unused-for", "long"), "invalid time 'long'")):
        code, _, err = lmc("documents", "list", *wrong, "--url", served.url)
        assert (code, said in err) == (2, True)
    with pytest.raises(Refused, match="must be a whole number of seconds"):
        HttpClient(served.url).ask("/v1/documents?unused_for=1h")


@pytest.mark.parametrize("page", [1, 2, 3, 100])
@pytest.mark.parametrize("used", [None, 0, 1, 4])
def test_a_list_of_many_pages_has_documents_that_are_used_meanwhile(make, monkeypatch, page, used):
    """Documents that are used move to the beginning of the list, which has been read."""
    monkeypatch.setattr(http_client, "PAGE", page)
    lab = make(settings=ALWAYS)
    documents = [[100 * number + i for i in range(12)] for number in range(1, 6)]
    learn(lab, *documents)
    known, listing, asked = lab.engine.known.list(), DocumentList(), 0
    with endpoint(administration(lab)) as url:
        client = HttpClient(url)
        while listing.path:
            listing.take(client.ask(listing.path))
            asked += 1
            if used is not None and asked == 1:
                lab.engine.known.use(known[used].keys[-1:])
    assert listing.documents.keys() == {one.id for one in known}
    assert asked <= -(-5 // page) + 3


def test_the_endpoint_answers_what_the_commands_ask(served, tmp_path):
    client = HttpClient(served.url)
    assert client.ask("/health") == {"status": "ok"}
    assert client.ask("/v1/stat")["documents"] == 2
    assert client.ask("/v1/requests/cmpl-7")["tokens_from"] == {"host": len(DOC_A) + len(DOC_B)}
    for name in ("cmpl-8", "cmpl-7-0-1a2b"):  # The second one is not a whole id.
        with pytest.raises(Refused, match=f"no request {name}"):
            client.ask(f"/v1/requests/{name}")

    code, out, _ = lmc("documents", "list", "--url", served.url)
    assert code == 0
    assert "2 of 2 documents" in out
    listed = json.loads(lmc("documents", "list", "--url", served.url, "--json")[1])["documents"]
    assert [(one["tokens"], one["places"], one["uses"]) for one in listed] == [
        (len(DOC_B), ["host"], 1),
        (len(DOC_A), ["host"], 1),
    ]
    name = listed[0]["id"]
    assert Words().decode(DOC_B) in lmc("documents", "show", name[:8], "--url", served.url)[1]

    (tmp_path / "prompt.json").write_text(
        json.dumps({"messages": [{"content": Words().decode(prompt(DOC_B, [5] * 6))}]})
    )
    code, out, _ = lmc("explain", tmp_path / "prompt.json", "--url", served.url)
    assert code == 0
    assert "document 1, 20 tokens from 7 on: reused from memory" in out
    assert "document 2, 6 tokens" in out
    assert "why: it is not learned yet" in out
    (tmp_path / "prompt.txt").write_text(Words().decode(prompt(DOC_B)))
    assert json.loads(lmc("explain", tmp_path / "prompt.txt", "--url", served.url, "--json")[1])["reused_tokens"] == 20

    assert "removed " in lmc("documents", "remove", name[:8], "--url", served.url)[1]
    assert json.loads(lmc("documents", "list", "--url", served.url, "--json")[1])["total"] == 1
    code, _, err = lmc("documents", "show", name[:8], "--url", served.url)
    assert (code, "lmc documents list` shows names and ids" in err) == (2, True)
    assert "document name is empty" in lmc("documents", "show", "", "--url", served.url)[2]
    wrong = '{"prompt": "w1", "kv_transfer_params": "x"}', "kv_transfer_params must be an object"
    for text, said in (
        ("", "is empty"),
        ('{"messages": [', "is not valid JSON"),
        ("7", "is neither a request nor a text"),
        ("[" * 100_000, "is not valid JSON"),
        wrong,
    ):
        (tmp_path / "prompt.txt").write_text(text)
        code, _, err = lmc("explain", tmp_path / "prompt.txt", "--url", served.url)
        assert (code, said in err) == (2, True)
    code, _, err = lmc("explain", "w1 w2", "--url", served.url)
    assert (code, err) == (
        2, "error: file w1 w2 does not exist: use a file with a request or a text, or - for standard input\n"
    )  # fmt: skip


def test_a_server_that_is_no_administration_endpoint_is_said_to_be_none(tmp_path):
    (tmp_path / "prompt.txt").write_text("w1 w2")
    with http_stub((200, {})) as server:
        url = server.url
        for words in (
            ("documents", "list", "--url", url),
            ("documents", "pin", "a", "--url", url),
            ("explain", tmp_path / "prompt.txt", "--url", url),
            ("explain", tmp_path / "prompt.txt", "--server", url),
            ("learn", tmp_path, "--url", url),
        ):
            code, _, err = lmc(*words)
            assert (code, err.count("\n"), err.startswith("error: ")) == (2, 1, True), words
            assert "is not a" in err or "listed no models" in err


def test_the_variable_lmc_admin_is_the_address_that_commands_ask(served, tmp_path, monkeypatch):
    monkeypatch.setenv("LMC_ADMIN", served.url)
    assert json.loads(lmc("documents", "list", "--json")[1])["total"] == 2
    (tmp_path / "prompt.txt").write_text(Words().decode(prompt(DOC_B)))
    assert json.loads(lmc("explain", tmp_path / "prompt.txt", "--json")[1])["reused_tokens"] == len(DOC_B)


def test_texts_that_are_posted_are_learned_when_the_engine_runs_next(served):
    client, asked = HttpClient(served.url), {"texts": [Words().decode([5, 6, 7, 8, 9, 10])]}
    served.now = 60.0
    assert client.ask("/v1/learn", asked) == {"queued": 1, "known": 0}
    assert not served.step().learn
    served.serve("runs", [7] * 8)
    served.settle()
    assert client.ask("/v1/learn", asked) == {"queued": 0, "known": 1}


def test_each_data_parallel_engine_has_an_address_of_its_own(make, tmp_path):
    lab = make()
    found = Administration(lab.setup, lab.scheduler.recent, 2)
    port, path = free_port(), f"unix://{tmp_path}/lmc.sock"
    for given, own in ((f"127.0.0.1:{port - 2}", f"127.0.0.1:{port}"), (path, f"{path}2")):
        found.settings = found.settings.model_copy(update={"admin": given})
        stop = serve_if_wanted(found)
        try:
            assert HttpClient(own).ask("/health") == {"status": "ok"}
        finally:
            stop()


def test_a_document_that_was_removed_is_named_until_it_is_learned_again(make):
    lab = make()
    learn(lab, DOC_A)
    found = administration(lab)
    (document,) = found.documents.listed()["documents"]
    found.documents.remove(document["id"])
    assert found.documents.listed()["total"] == found.stat()["documents"] == 0
    assert why(explained(lab, prompt(DOC_A))) == ["it was removed (lmc documents remove)"]
    learn(lab, [*DOC_A])
    assert found.documents.listed()["total"] == 1


def test_documents_have_names_and_are_pinned_and_limited_in_time_by_them(make):
    lab = make()
    found = administration(lab)
    for name, tokens in (("notes/one.txt", DOC_A), ("notes/two.txt", DOC_B)):
        lab.serve(name, tokens, {"learn": True, "name": name})
    with endpoint(found) as address:
        url = "--url", address
        code, out, _ = lmc("documents", "pin", "notes/one.txt", "notes/two.txt", "--ttl", "2h", *url)
        assert (code, out.count(": pinned, removed at 20")) == (0, 2)
        listed = json.loads(lmc("documents", "list", *url, "--json")[1])["documents"]
        assert [(one["name"], one["pinned"], one["expires"] > 0) for one in listed] == [
            ("notes/two.txt", True, True),
            ("notes/one.txt", True, True),
        ]
        assert "notes/one.txt" in lmc("documents", "list", *url)[1]
        assert Words().decode(DOC_A) in lmc("documents", "show", "notes/one.txt", *url)[1]
        code, out, _ = lmc("documents", "unpin", "notes/one.txt", *url)
        assert (code, "unpinned, without a time limit (host)" in out) == (0, True)
        assert lmc("documents", "remove", "notes/one.txt", "notes/two.txt", *url)[1].count("removed ") == 2
        code, _, err = lmc("documents", "pin", "notes/one.txt", *url)
        assert (code, "unknown document 'notes/one.txt'" in err) == (2, True)
        client = HttpClient(address)
        for wrong in ({"pinned": 3}, {"ttl": -1}, {"ttl": True}, {"ttl": 1e300}, {"pin": True}, []):
            with pytest.raises(Refused):
                client.ask("/v1/documents/00", wrong, "PATCH")


def test_texts_are_queued_to_be_learned(make):
    lab = make()
    learn(lab, DOC_A)
    found = administration(lab)
    texts = [Words().decode(DOC_A), Words().decode(DOC_B)]
    assert found.learn({"texts": texts}) == {"queued": 1, "known": 1}
    assert [list(one.tokens) for one in lab.engine.learning] == [DOC_B]
    for wrong in ({}, {"texts": "a"}, {"texts": [3]}, {"texts": texts, "pin": True}):
        with pytest.raises(InputError, match="cache_salt if"):
            found.learn(wrong)
    with pytest.raises(InputError, match="the self-test failed"):
        administration(lab, blends=False, refused="the self-test failed").learn({"texts": texts})


@pytest.mark.parametrize("options", [{"learn": True, "name": 3}, {"name": "a"}, {"learn": True, "name": "a" * 501}])
def test_a_wrong_name_is_refused(make, options):
    lab = make()
    request = lab.serve("one", DOC_A, options)
    assert "name" in request.facts["note"]


def test_a_unix_socket_is_for_this_user_alone_and_an_abandoned_one_is_replaced(make, tmp_path):
    lab, path = make(), tmp_path / "lmc.sock"
    learn(lab, DOC_A)
    abandoned = socket.socket(socket.AF_UNIX)
    abandoned.bind(str(path))
    abandoned.close()
    stop = serve(administration(lab), f"unix://{path}", "")
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(lmc("documents", "list", "--url", f"unix://{path}", "--json")[1])["total"] == 1
        with pytest.raises(ConfigError, match="is another engine or server using it"):
            serve(administration(lab), f"unix://{path}", "")
    finally:
        stop()
    assert not path.exists()
    code, _, err = lmc("documents", "list", "--url", f"unix://{path}")
    assert (code, "no server answers at unix://" in err) == (2, True)


def test_a_document_is_chosen_by_its_id_before_a_name_and_never_by_nothing(make):
    lab = make()
    learn(lab, DOC_A)
    found = administration(lab)
    (first,) = (one["id"] for one in found.documents.listed()["documents"])
    lab.serve("named as another's id", DOC_B, {"learn": True, "name": first[:6] + " "})
    for one in lab.engine.known.list():
        lab.engine.known.rename(one, first if list(one.tokens) == DOC_B else "")
    assert [one["id"] for one in found.documents.show(first)["documents"]] == [first]
    for nothing in ("", " "):
        with pytest.raises(InputError, match="unknown document"):
            found.documents.remove(nothing)
    assert found.documents.listed()["total"] == 2
    for one in lab.engine.known.list():
        lab.engine.known.rename(one, first[:6] if list(one.tokens) == DOC_B else "")
    with pytest.raises(InputError, match=f"2 known documents have the name .*, such as .*{first[:12]}"):
        found.documents.remove(first[:6])
    for one in lab.engine.known.list():
        lab.engine.known.rename(one, first[:5] if list(one.tokens) == DOC_B else "")
    assert [one["name"] for one in found.documents.show(first[:5])["documents"]] == [first[:5]]


def test_a_name_that_several_tenants_have_does_not_choose(make):
    lab = make()
    lab.serve("one", DOC_A, {"learn": True, "name": "a.txt"})
    lab.serve("two", DOC_A, {"learn": True, "name": "a.txt"}, cache_salt="tenant")
    found = administration(lab)
    with pytest.raises(InputError, match="documents of several tenants or models have the name"):
        found.documents.remove("a.txt")
    assert len({one["tenant"] for one in found.documents.listed()["documents"]}) == 2


def test_no_request_renames_a_document(make):
    lab = make()
    lab.serve("one", DOC_A, {"learn": True, "name": "a.txt"})
    lab.serve("two", DOC_A, {"learn": True, "name": "b.txt"})
    found = administration(lab)
    assert [one["name"] for one in found.documents.listed()["documents"]] == ["a.txt"]
    found.documents.change("a.txt", {"name": "c.txt"})
    assert [one["name"] for one in found.documents.listed()["documents"]] == ["c.txt"]


def test_a_document_is_found_by_each_of_its_names(make):
    lab = make()
    lab.serve("one", DOC_A, {"learn": True, "name": "a.txt\nb.txt"})
    lab.serve("two", DOC_A, {"learn": True, "name": "c.txt"})
    lab.serve("other", DOC_B, {"learn": True, "name": "d.txt"})
    found, same = administration(lab).documents, ["a.txt", "b.txt", "c.txt"]
    assert [(one["name"], one["names"]) for one in found.listed(only=Filter(name="b.t"))["documents"]] == [
        ("a.txt", same)
    ]
    for name in same:
        assert [one["tokens"] for one in found.show(name)["documents"]] == [len(DOC_A)]
    with pytest.raises(NotFound):
        found.show("a.txt\nb.txt")
    assert found.change("c.txt", {"pinned": True, "add_names": "e.txt"})["documents"][0]["names"] == [*same, "e.txt"]
    found.change("e.txt", {"name": "f.txt"})
    with pytest.raises(NotFound):
        found.show("b.txt")
    assert len(found.remove("f.txt")["removed"]) == 1
    assert [one["name"] for one in found.listed()["documents"]] == ["d.txt"]


def test_names_beyond_the_longest_are_left_out_and_no_name_is_kept_twice(make):
    lab = make()
    for name in ("a.txt", "b.txt", "x" * LONGEST_NAME, "a.txt"):
        lab.serve(f"learn {len(lab.scheduler.recent)}", DOC_A, {"learn": True, "name": name})
    (document,) = lab.engine.known.list()
    assert document.names == ["a.txt", "b.txt"]


def test_a_request_that_forbids_blends_is_said_to(make):
    lab = make()
    learn(lab, DOC_A)
    found = explained(lab, prompt(DOC_A), lmc={"blend": False})
    assert (found["why"], found["advice"]) == ("the request says blend: false", ())


# -- advice -----------------------------------------------------------------------------------------------------------

NOTES = (
    'Rule 7: "Keep the\nwindow closed."\nRule 8: "Feed the\ncat at noon, not at\nnight; then lock up."\nRule 9: rest.'
)
JAPANESE = "規則七。窓を閉める。\n規則八。猫に昼ご飯をあげる。\n規則九。夜は休む。\n規則十。朝は早い。"
SEPARATORS = {"blend_find": "separators"}
OTHER = "A text of which no part is in any of the documents. " * 4


@pytest.fixture
def advised(make):
    """A function that learns texts, and returns the reason and the advice for a prompt."""
    symbols = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(symbols, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    def advise(text, *known, settings=None, salt="", **more):
        lab = make(slots=128, blocks=256, longest=4096, special=frozenset(), settings=settings)
        lab.setup.markers = Markers(separators=(tuple(tokenizer.encode(" # # ")),))
        for number, document in enumerate(known):
            tokens = tokenizer.encode(document)
            lab.serve(f"{number}", tokens, {"learn": True, "name": f"{number}.txt"}, cache_salt=salt or None)
        found = administration(lab, tokenizer=tokenizer).explain({"prompt": text, **more})
        assert len(found["advice"]) <= 7
        return found["why"], "\n".join(found["advice"])

    return advise


def test_an_engine_that_knows_no_documents_advises_how_to_learn(advised):
    why, advice = advised(OTHER)
    assert why == "this engine knows no documents"
    assert advice.startswith("lmc learn FILES --url http://localhost:8000 ")
    for way in (
        'create_stuff_documents_chain(…, document_separator=" # # ")',
        "{context_str}",
        "{% for d in documents %} # # {{ d.content }}{% endfor %} # # ",
        'extra_body={"kv_transfer_params": {"lmc": {"documents": ["TEXT", …]}}}',
    ):
        assert way in advice
    assert "LangChain" not in advised(OTHER, settings={"blend_learn": False})[1]
    assert advised(OTHER, NOTES)[0] == "none of 1 known documents is in the prompt"


def test_settings_because_of_which_nothing_is_found_are_named(advised):
    text = f"Use this: {NOTES} What is rule 8?"
    why, advice = advised(text, NOTES, settings={"blend_find": "separators"})
    assert why == "blend_find is separators, and the prompt has no separator ' # # '"
    assert "LMC_BLEND_FIND=known" in advice
    why, advice = advised(text, NOTES, settings={"blend_min_tokens": 256})
    assert "fewer than blend_min_tokens=256" in why
    why, advice = advised(OTHER, NOTES, settings={"blend_min_tokens": 256})
    assert why == f"the prompt has {len(OTHER)} tokens, and blend_min_tokens is 256"
    assert "LMC_BLEND_MIN_TOKENS" in advice
    why, advice = advised(f"{OTHER}{NOTES[10:62]}{OTHER}", NOTES)
    assert why == "the prompt has 52 tokens in a row of 0.txt, and blend_min_run is 64"
    assert advice == "lower blend_min_run, to 48 or more"
    assert advised(text, NOTES) == ("", "")


def test_a_document_of_another_tenant_is_named(advised):
    text = f"Use this: {NOTES} What is rule 8?"
    why, advice = advised(text, NOTES, salt="a", cache_salt="b")
    assert why.startswith("the prompt has 0.txt: it was learned under another cache_salt")
    assert "--salt b" in advice
    assert "--salt 'b; c'" in advised(text, NOTES, salt="a", cache_salt="b; c")[1]
    why, advice = advised(OTHER, NOTES, salt="a")
    assert why == "this engine knows no documents of this model and this cache_salt"


def test_a_document_with_other_white_space_is_named(advised):
    for text in (" ".join(NOTES.split()), NOTES.replace("\n", "\r\n"), " ".join(NOTES[20:].split())):
        why, advice = advised(f"Use this: {text} What is rule 8?", OTHER, NOTES)
        assert why == "the prompt has 1.txt with other white space"
        assert "the texts that the application sends" in advice
        assert ("--crlf" in advice) == ("\r\n" in text)
    beside = " ".join(NOTES.split())
    assert advised(f"{OTHER}\n{beside} What is rule 8?", OTHER, NOTES)[0].startswith("the prompt has 1.txt with other")
    joined = "".join(JAPANESE.split())
    assert advised(f"{joined} 何ですか", OTHER, JAPANESE)[0] == "the prompt has 1.txt with other white space"


def test_of_many_documents_the_last_used_ones_are_compared_without_white_space(advised, monkeypatch):
    """The oldest ones were, so that a document that had just been learned was not named."""
    monkeypatch.setattr("lmc.engine.advice.MAX_RANKED", 1)
    why, _ = advised(f"Use this: {' '.join(NOTES.split())} What is rule 8?", OTHER, NOTES)
    assert why == "the prompt has 1.txt with other white space"


def test_documents_between_separators_that_are_reused_need_no_advice(advised):
    """The note said that they stand there with other white space, or as JSON strings."""
    for known in (NOTES, OTHER, NOTES.replace("\n", "\\n")):
        assert advised(f"Use this: # # {known} # # What is rule 8?", known, settings=SEPARATORS) == ("", "")
    for settings in (SEPARATORS, None):  # the same text is also known with other white space
        other = NOTES.replace("\n", "  ")
        assert advised(f"Use this: # # {NOTES} # # What is rule 8?", other, NOTES, settings=settings) == ("", "")
    beside = f"Use this: # # {OTHER} # # {' '.join(NOTES.split())} # # What is rule 8?"
    assert advised(beside, OTHER, NOTES, settings=SEPARATORS)[0] == "the prompt has 1.txt with other white space"


def test_documents_between_separators_are_named(make):
    lab = make()
    lab.serve("one", DOC_A, {"learn": True, "name": "a.txt"})
    learn(lab, DOC_B)
    found = explained(lab, prompt(DOC_A, DOC_B, [5, 6, 7, 8, 9, 10]))["documents"]
    assert [(one["name"], bool(one["known"]), one["first"]) for one in found] == [
        ("a.txt", True, 0),
        ("", True, 0),
        ("", False, 0),
    ]


def test_a_part_of_a_document_is_named_with_its_tokens(make, tmp_path):
    lab = make(slots=80, longest=2048, blocks=256)
    page = [1000 + i for i in range(500)]
    lab.serve("learn", page, {"learn": True, "name": "handbook.md"})
    asked = {"prompt": [*range(1, 9), *page[210:460], 5, 6, 7]}
    found = administration(lab)
    (part,) = found.explain(asked)["documents"]
    assert (part["start"], part["stop"], part["name"], part["first"]) == (8, 258, "handbook.md", 210)
    (tmp_path / "prompt.json").write_text(json.dumps(asked))
    with endpoint(found) as address:
        out = lmc("explain", tmp_path / "prompt.json", "--url", address)[1]
    assert "document 1, 250 tokens from 8 on: reused from memory" in out
    assert "equal to tokens 210 to 460 of handbook.md" in out


def test_a_document_that_is_escaped_as_json_is_named(advised):
    once = json.dumps({"content": NOTES})
    for text, known in ((once, (NOTES,)), (f"{OTHER}{once}", (NOTES, OTHER))):
        why, advice = advised(f"Tool: {text} What is rule 8?", *known)
        assert why == "the prompt has 0.txt as a JSON string: line breaks and quotes are escaped"
        assert advice.startswith("lmc learn FILES --url http://localhost:8000 --escaped ")
    why, advice = advised(f"Tool: {json.dumps(once)} What is rule 8?", NOTES)
    assert (", twice: " in why, "let tools return the text itself" in advice) == (True, True)
    why, advice = advised(f"Tool: {json.dumps(JAPANESE)} 何ですか", JAPANESE)
    assert ("as a JSON string" in why, "ensure_ascii=False" in advice) == (True, True)
    both = f"{OTHER}{once}", json.dumps(JAPANESE, ensure_ascii=False)
    learned = NOTES, OTHER, JAPANESE, *map(as_json, (NOTES, JAPANESE))
    for text in both:
        assert advised(f"Tool: {text} What is rule 8?", *learned) == ("", "")


# -- bodies -----------------------------------------------------------------------------------------------------------


def test_each_prompt_of_a_body_is_explained(served, tmp_path):
    client, texts = HttpClient(served.url), [Words().decode(prompt(document)) for document in (DOC_A, DOC_B)]
    tokens = [*map(Words().encode, texts)]
    wanted = [client.ask("/v1/explain", {"prompt_token_ids": one}) for one in tokens]
    assert [one["reused_tokens"] for one in wanted] == [len(DOC_A), len(DOC_B)]
    for body in ({"prompt": texts}, {"prompt": tokens}, {"prompt_token_ids": tokens}):
        assert client.ask("/v1/explain", body)["prompts"] == wanted
    items = [{"role": "user", "content": [{"type": "input_text", "text": texts[0]}]}]
    message = {"role": "user", "content": texts[0]}
    for body in (
        {"prompt": tokens[0]}, {"prompt": texts[:1]}, {"messages": [message]}, {"input": texts[0]}, {"input": items},
    ):  # fmt: skip
        assert client.ask("/v1/explain", body) == wanted[0], body
    for given in (texts, tokens, {"prompt": texts}):
        (tmp_path / "prompts.json").write_text(json.dumps(given))
        out = lmc("explain", tmp_path / "prompts.json", "--url", served.url)[1]
        assert [out.count(f"prompt {number} of 2") for number in (1, 2)] == [1, 1]
        assert out.count("reused from memory") == 2
    for given in (tokens[0], items, {"input": items}):
        (tmp_path / "prompt.json").write_text(json.dumps(given))
        found = json.loads(lmc("explain", tmp_path / "prompt.json", "--url", served.url, "--json")[1])
        assert found == wanted[0]


def test_a_body_that_is_wrong_is_answered_with_what_is_understood(served, tmp_path):
    message = {"role": "user", "content": "w1"}
    for body, said in (
        ({}, "request has no prompt"),
        ({"prompt": "w1", "messages": [message]}, "request has prompt and messages"),
        ({"prompt": []}, "prompt = [] is not a prompt"),
        ({"prompt": ["w1", 3]}, "prompt = ['w1', 3] is not a prompt"),
        ({"prompt": [-1]}, "prompt = [-1] is not a prompt"),
        ({"prompt_token_ids": "w1"}, "prompt_token_ids = 'w1' is not a prompt"),
        ({"messages": "w1"}, "messages = 'w1' must be a list of objects"),
        ({"messages": [message], "system": "w1"}, "as in /v1/messages"),
        ({"input": 3}, "input = 3 must be a text or a list of items"),
        ({"input": [{"type": "computer_call"}]}, "type 'computer_call' that is not understood"),
        ({"input": "w1", "previous_response_id": "resp_1"}, "give all turns as input"),
    ):
        with pytest.raises(Refused, match=re.escape(said)):
            HttpClient(served.url).ask("/v1/explain", body)
        (tmp_path / "body.json").write_text(json.dumps(body))
        code, _, err = lmc("explain", tmp_path / "body.json", "--url", served.url)
        assert (code, said in err, err.count("\n")) == (2, True, 1), body


def test_a_server_that_renders_is_asked_for_the_tokens_of_chats_and_responses(served, tmp_path):
    chat, response = {"messages": [{"role": "user", "content": "x"}]}, {"input": "x", "instructions": "y"}
    words = "explain", tmp_path / "body.json", "--url", served.url
    with http_stub((404, {"error": {"message": "Not Found"}})) as server:
        server.answers["/v1/models"] = 200, {"data": [{"id": "m"}]}
        server.answers["/tokenize"] = 200, {"tokens": prompt(DOC_B)}
        for body, path in ((chat, "/v1/chat/completions/render"), (response, "/v1/responses/render")):
            (tmp_path / "body.json").write_text(json.dumps(body))
            found = [json.loads(lmc(*words, "--server", server.url, "--json")[1])["tokens"]]
            server.answers[path] = 200, {"token_ids": prompt(DOC_A)}
            found.append(json.loads(lmc(*words, "--server", server.url, "--json")[1])["tokens"])
            assert found == [len(prompt(DOC_B)), len(prompt(DOC_A))]
            server.answers[path] = 400, {"error": {"message": "no such item"}}
            assert "no such item" in lmc(*words, "--server", server.url)[2]


def test_a_body_that_does_not_arrive_in_time_is_answered_408(served, monkeypatch, caplog):
    """Earlier, it was answered with 500, and the log had a traceback."""
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(timeouts, "HEAD_SECONDS", 0.2)
    host, port = served.url.split(":")
    with socket.create_connection((host, int(port)), 30) as sent:
        head = "POST /v1/explain HTTP/1.1", "host: localhost", "content-type: application/json", "content-length: 10"
        sent.sendall("\r\n".join([*head, "", "{"]).encode())
        answer = b""
        while part := sent.recv(1000):  # until the server has closed the connection
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"error": "request body did not arrive within 0.2 s"}
    assert "Traceback" not in caplog.text
    assert HttpClient(served.url).ask("/health") == {"status": "ok"}


def test_the_scheme_of_a_token_may_be_in_any_case(make):
    """A client that wrote `bearer` was refused, and a token without its scheme was accepted."""
    with endpoint(administration(make()), "hunter2") as address:
        for given, code in (
            ("bearer hunter2", 200), ("BEARER hunter2", 200), ("hunter2", 401), ("Basic hunter2", 401),
        ):  # fmt: skip
            with closing(HTTPConnection(address, timeout=30)) as connection:
                connection.request("GET", "/v1/stat", headers={"authorization": given})
                assert connection.getresponse().status == code, given


def test_a_web_page_of_elsewhere_cannot_ask(served):
    for headers, code in (
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost", "Content-Type": "text/plain"}, 400),
        ({"Host": "localhost", "Content-Type": "application/json"}, 200),
    ):
        asked = Request(f"http://{served.url}/v1/explain", json.dumps({"prompt": "w1 w2"}).encode(), headers)
        if code == 200:
            with urlopen(asked, timeout=30) as answer:
                assert answer.status == 200
            continue
        with pytest.raises(HTTPError) as caught:
            urlopen(asked, timeout=30)
        with caught.value as error:
            assert error.code == code


def test_a_wrong_question_is_answered_and_not_more(served):
    client, long = HttpClient(served.url), {"prompt": "w1 " * 600}
    for body in (
        {}, [], {"messages": 3}, {"messages": [{}]}, {"prompt_token_ids": ["x"]}, {"prompt": 5}, long,
    ):  # fmt: skip
        with pytest.raises(Refused):
            client.ask("/v1/explain", body)
        assert client.ask("/health") == {"status": "ok"}
    for path in ("/v1/documents/none", "/v1/requests/none"):
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://{served.url}{path}")


def test_a_token_is_wanted_and_asked_for(make, monkeypatch):
    with endpoint(administration(make()), "hunter2") as address:
        code, _, err = lmc("documents", "list", "--url", address)
        assert (code, "set LMC_ADMIN_TOKEN to the server's key" in err) == (2, True)
        monkeypatch.setenv("LMC_ADMIN_TOKEN", "hunter2")
        assert lmc("documents", "list", "--url", address)[0] == 0


def test_the_token_of_a_cache_server_opens_explanations_and_nothing_else(make):
    """A cache server asks for explanations with a token that the engine has given to it, not the operator's."""
    ours, other = administration(make()), administration(make())
    with endpoint(ours, "operator") as address:
        url, body = f"http://{address}", {"prompt_token_ids": prompt(DOC_A)}
        client = engine_client(url, ours.explain_token)
        assert client.ask("/v1/explain", body)["tokens"] == len(prompt(DOC_A))
        for path in ("/v1/documents", "/v1/stat", "/v1/explain/", "/v1/explain/../stat"):
            with pytest.raises(Unreachable, match="401"):
                client.ask(path)
        with pytest.raises(Unreachable, match="401"):
            client.ask("/v1/learn", {"texts": ["a"]})
        for wrong in (other.explain_token, "", "operato"):
            with pytest.raises(Unreachable, match="401"):
                engine_client(url, wrong).ask("/v1/explain", body)
        assert engine_client(url, "operator").ask("/v1/stat")


def test_an_address_that_cannot_be_had_is_refused(make):
    lab = make()
    with (
        endpoint(administration(lab)) as taken,
        pytest.raises(ConfigError, match="is another engine or server using it"),
    ):
        serve(administration(lab), taken, "")
    for address, said in (("0.0.0.0:1", "set LMC_ADMIN_TOKEN"), ("a:b", "must be an address")):
        with pytest.raises(ConfigError, match=said):
            serve(administration(lab), address, "")


@pytest.mark.parametrize("fails", [True, False], ids=["ends", "hangs"])
def test_an_endpoint_that_does_not_start_is_an_error_and_gives_its_address_back(
    make, tmp_path, monkeypatch, fails, caplog
):
    """The thread of the endpoint ended for lack of open files, or hung, and the log said that it listened."""
    import uvicorn

    async def startup(self, sockets=None):
        if fails:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        while not self.should_exit:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(http_server, "START_SECONDS", 60.0 if fails else 0.1)
    path, said = tmp_path / "admin.sock", "Too many open files" if fails else "it did not start within 0.1 s"
    with monkeypatch.context() as patch:
        patch.setattr(uvicorn.Server, "startup", startup)
        with pytest.raises(ConfigError, match=said):
            serve(administration(make()), f"unix://{path}", "")
    assert "administration at" not in caplog.text
    assert not path.exists()
    serve(administration(make()), f"unix://{path}", "")()


def test_a_data_parallel_engine_says_where_it_publishes_itself():
    """A router followed the documents of the first one for all of them."""
    lab = Lab()
    setup, requests = lab.setup, lab.scheduler.recent
    assert Administration(setup, requests, 2).routing()["document_events"] == ""
    setup.engine.settings = setup.engine.settings.model_copy(update={"document_events": "tcp://*:5558, tcp://*:6558"})
    assert Administration(setup, requests, 2).routing()["document_events"] == "tcp://*:5560,tcp://*:6560"
    assert Administration(setup, requests).routing()["document_events"] == "tcp://*:5558,tcp://*:6558"


@pytest.mark.parametrize(("find", "finds"), [("known", True), ("separators", False)])
def test_a_router_learns_whether_documents_are_found_without_separators_and_reads_their_tokens(make, find, finds):
    lab = make(settings={"blend_find": find})
    learn(lab, DOC_A)
    found = administration(lab)
    assert found.routing()["finds"] == finds
    (listed,) = found.documents.listed()["documents"]
    (shown,) = found.documents.show(listed["id"])["documents"]
    assert shown["token_ids"] == DOC_A
    assert "token_ids" not in listed


def test_a_document_whose_file_s_name_is_not_utf_8_is_found_by_that_name(make):
    """The command ended with a traceback."""
    lab, name = make(), os.fsdecode(b"\xff.txt")
    lab.serve("one", DOC_A, {"learn": True, "name": name_of(name)})
    with endpoint(administration(lab)) as address:
        assert "\\xff.txt" in lmc("documents", "show", name, "--url", address)[1]
        assert "1 of 1 document" in lmc("documents", "list", "--name", name, "--url", address)[1]


@pytest.mark.parametrize("closed", ["documents list >&-", "explain - <&-"])
def test_a_closed_standard_input_or_output_ends_no_command_with_a_traceback(served, closed):
    words, stream = closed.rsplit(" ", 1)
    program = [sys.executable, "-m", "lmc", *words.split(), "--url", served.url]
    done = subprocess.run(["sh", "-c", f'exec "$@" {stream}', "sh", *program], capture_output=True, check=False)
    refused = b"error: standard input is closed: pipe a text into the command, or name a file\n"
    assert (done.returncode, done.stderr) == ((0, b"") if stream == ">&-" else (2, refused))


def test_control_characters_of_documents_and_their_names_are_shown_escaped(make):
    """A client may name a document, and its text may be anything: a terminal would obey it."""

    class Colourful(Words):
        def decode(self, tokens):
            return "red \x1b[31m and \x1b]0;title\x07\r\x9b\u202e,\tbut\nreadable"

    lab = make()
    found = administration(lab, tokenizer=Colourful())
    lab.serve("one", DOC_A, {"learn": True, "name": "a\x1b[2J.txt"})
    with endpoint(found) as address:
        (shown_id,) = (
            one["id"] for one in json.loads(lmc("documents", "list", "--url", address, "--json")[1])["documents"]
        )
        out = lmc("documents", "show", shown_id, "--url", address)[1]
        listed = lmc("documents", "list", "--url", address)[1]
    assert r"red \x1b[31m and \x1b]0;title\x07\r\x9b\u202e," in out
    assert "but\nreadable" in out
    assert r"a\x1b[2J.txt" in listed
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + listed)


def test_a_list_of_documents_fits_into_80_columns():
    document = {
        "id": "0123456789abcdef", "name": "a/long/folder/with/a/long name of a file.md", "begins": "", "model": "m",
        "tenant": "", "names": ["a/long/folder/with/a/long name of a file.md"],
        "tokens": 98_765, "places": ["host", "disk"], "uses": 1234, "used": 1.79e9, "pinned": True, "expires": 1.8e9,
    }  # fmt: skip
    screen = io.StringIO()
    name = "a/long/folder/with/a/long name.md (as JSON)"
    other = document | {"pinned": False, "expires": 0}
    listed = document, other | {"name": name}, other | {"names": ["a", "b"]}
    Console(file=screen, width=80).print(document_table(listed))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for value in ("0123456789ab", "98765", "1234 ", "09-21 "):
        assert screen.getvalue().count(value) == 3
    assert len(lines) <= 6
    for shown in ("a/long/fo… a file.md ", "a/long/fo… (as JSON) ", "a/long/fo… (2 names) "):
        assert shown in screen.getvalue()
