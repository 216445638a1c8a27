"""Administration of a cache server over real HTTP: documents, tenants, quotas, events. Engines and stores are real."""

import asyncio
import base64
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import msgspec
import pytest
import test_cli
from hypothesis import given
from hypothesis import strategies as st
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from service_fakes import arena_for, beat, eventually, serving
from storage_fakes import key_of, meta_of, state_of, with_stray_holder
from test_keeper import CHUNK, RECORD, A, B, C, D, engine_of, known, learn, places
from vllm_fakes import DOC_A, DOC_B, Lab, prompt
from vllm_fakes import learn as learn_in

import lmc.demo as lmc_demo
from lmc.connectors.vllm.scheduler.admin import Administration, serve_if_wanted
from lmc.documents.admin import DocumentAdmin
from lmc.documents.keeper import PinnedShare
from lmc.documents.kept import FILE
from lmc.documents.known import pack_tokens
from lmc.errors import ConfigError, InputError
from lmc.http import server as http_server
from lmc.http import timeouts
from lmc.http.client import Unreachable, admin_client
from lmc.keys import ChunkKey, RecordKind, tenant_of, tokens_digest
from lmc.server import arenas, http_api
from lmc.server.client import remote_store
from lmc.server.client.connection import Gone
from lmc.server.events import Events
from lmc.server.http_api import application
from lmc.server.overview import Overview
from lmc.server.quotas import Quotas
from lmc.shapes import GIB
from lmc.storage.change_log import ChangeLog
from lmc.storage.contract import ChunkStore

TOKEN = "s3cret"
SMALL_MODEL = Path(lmc_demo.__file__).parent / "small_model" / "model"
SLOT = 2 * 4096  # bytes


class Service:
    """A server that is administered, and engines that are attached to it."""

    def __init__(self, server, port, opened, stop_http):
        self.server, self.url, self._opened = server, f"http://127.0.0.1:{port}", opened
        self.stop_http = stop_http

    def engine(self, **settings):
        return self._opened.enter_context(closing(engine_of(server=self.server.path, **settings)))

    def ask(self, path, body=None, method=None, token=TOKEN):
        with urlopen(self._request(path, body, method, token), timeout=30) as answer:
            return json.loads(answer.read())

    def refusal(self, path, body=None, method=None, token=TOKEN):
        with pytest.raises(HTTPError) as raised:
            self.ask(path, body, method, token)
        with raised.value as error:
            return error.code, json.loads(error.read())["error"]

    def documents(self, token=TOKEN):
        return self.ask("/v1/documents", token=token)["documents"]

    def _request(self, path, body, method, token):
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
        return Request(self.url + path, body if body is None else json.dumps(body).encode(), headers, method=method)


@contextmanager
def administered(folder, slots=16, tenants=(), token=TOKEN, **settings):
    settings = {"max_local_cpu_size": slots * SLOT / GIB, **settings}
    with serving(folder, 0, None, **settings) as server, ExitStack() as opened:
        port = free_port()
        app = application(Overview(server), token, dict(tenants))
        stop = http_server.serve(app, f"127.0.0.1:{port}", token, setting="--http")
        opened.callback(stop)
        yield Service(server, port, opened, stop)


@pytest.fixture
def service(tmp_path):
    with administered(tmp_path, tenants={"token of t": "t", "token of u": "u"}) as found:
        yield found


def lmc(*words, token=TOKEN):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMC_ADMIN_TOKEN", token)
        return test_cli.lmc(*words)


def stored(store: ChunkStore) -> int:
    return len(store.known_keys())


def test_a_server_that_cannot_start_does_not_end_the_one_that_it_would_take_over(service):
    for wrong, said in (
        (["--http", "127.0.0.1:1234", "--certificate", "none.pem", "--key", "none.key"], "invalid certificate"),
        (["--group", "there is none"], "this host has no such group"),
        (["--http", "127.0.0.1:123456"], "--http"),
        (["--document-events", "*:5558"], "is not a ZeroMQ address"),
    ):
        code, _, err = lmc("serve", "--socket", str(service.server.path), "--takeover", *wrong)
        assert (code, said in " ".join(err.split())) == (2, True), wrong
        assert not service.server.ends


@pytest.mark.parametrize(
    ("setting", "value", "package"),
    [("LMC_REMOTE_SERDE", "planes", "lz4"), ("LMC_REMOTE_URL", "redis://127.0.0.1:1", "redis")],
    ids=["codec", "Redis"],
)
def test_a_missing_package_does_not_end_the_server_that_would_be_taken_over(
    service, monkeypatch, setting, value, package
):
    monkeypatch.setenv(setting, value)
    for name in [name for name in sys.modules if name.startswith(("lmc.storage.tiers.redis", package))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = lmc("serve", "--socket", str(service.server.path), "--takeover")
    assert (code, f"package {package}" in err) == (2, True)
    assert not service.server.ends


RUN_WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from typer.testing import CliRunner
from lmc.commands.cli import app
print(json.dumps([CliRunner().invoke(app, words).output for words in json.load(sys.stdin)]))
"""


def test_a_command_that_asks_a_running_server_does_not_wait_for_torch(service, tmp_path):
    """The import of torch takes seconds."""
    learn(service.engine(), A, name="a.txt")
    (tmp_path / "prompt.txt").write_text("a text")
    commands = {
        ("stat", "--server", str(service.server.path)): "connection",
        ("stat", "--json", "--server", str(service.server.path)): '"arenas"',
        ("check", "--server", str(service.server.path)): "0 faults",
        ("top", "--once", service.url): "hits",
        ("documents", "list", "--url", service.url): "1 of 1 document",
        ("documents", "pin", "a.txt", "--url", service.url): "pinned",
        ("documents", "remove", "a.txt", "--url", service.url): "removed ",
        ("explain", str(tmp_path / "prompt.txt"), "--url", service.url): "start an engine with LMC_ADMIN=",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_TORCH],
        input=json.dumps(list(commands)), capture_output=True, text=True, check=True,
        env={**os.environ, "LMC_ADMIN_TOKEN": TOKEN},
    )  # fmt: skip
    for said, (words, wanted) in zip(json.loads(done.stdout), commands.items(), strict=True):
        assert wanted in said, words


def test_a_check_of_a_running_server_reports_faults_of_its_bookkeeping(service):
    store = service.engine().store
    assert lmc("check", "--server", service.server.path, "--json")[:2] == (0, "[]\n")
    (arena,) = service.server.arenas.all()
    with with_stray_holder(arena.store, 3):
        code, out, _ = lmc("check", "--server", service.server.path)
    assert code == 1
    assert "slot 3 is unassigned and held or being filled" in " ".join(out.split())
    assert lmc("check", "--server", service.server.path)[0] == 0
    assert store.held() == 0, "the client goes on"


def test_a_server_is_only_checked_and_not_mended(service):
    code, _, err = lmc("check", "--server", service.server.path, "--fix")
    assert (code, "without --fix" in err) == (2, True)


# -- documents ---------------------------------------------------------------------------------------------------------


def test_documents_of_all_engines_are_listed_and_those_of_a_name_shown(service):
    one, other = service.engine(), service.engine()
    learn(one, A, name="a.txt\nb.txt")
    learn(other, B, "t")
    found = {document["name"]: document for document in service.documents()}
    assert found["a.txt"] | {"id": "", "used": 0} == {
        "id": "", "name": "a.txt", "names": ["a.txt", "b.txt"], "tokens": 20,
        "begins": " ".join(map(str, A)), "places": ["host"], "uses": 0,
        "used": 0, "pinned": False, "expires": 0.0, "model": "", "tenant": "", "digest": tokens_digest(A),
    }  # fmt: skip
    assert found[""]["tenant"] == tenant_of("t")
    for name in ("a.txt", "b.txt"):
        (shown,) = service.ask(f"/v1/documents/{name}")["documents"]
        assert shown["text"] == " ".join(map(str, A))
    code, out, _ = lmc("documents", "list", "--url", service.url)
    assert (code, "a.txt" in out, "2 of 2 documents" in out) == (0, True, True)


def names(engine, tokens):
    return [document.names for document in engine.known.list() if list(document.tokens) == tokens]


def learn_as(engine, tokens, name):
    """Learn a stored document once more, from a file of another name."""
    engine.note(tokens, engine.documents(tokens, [engine.document_span(tokens)]), name=name)


def test_a_name_that_one_engine_learns_a_stored_document_as_is_known_to_the_server_and_to_other_engines(service):
    """The server and other engines knew the first name only. A name that was replaced since stays replaced."""
    one, other = service.engine(), service.engine()
    learn(one, A, name="a.txt")
    eventually(lambda: names(other, A) == [["a.txt"]])
    service.ask("/v1/documents/a.txt", {"name": "b.txt"}, "PATCH")
    learn_as(one, A, "c.txt")
    eventually(lambda: service.documents()[0]["names"] == ["b.txt", "c.txt"])
    eventually(lambda: names(other, A) == [["a.txt", "b.txt", "c.txt"]])


def test_a_name_of_a_document_that_the_server_lacks_or_has_removed_is_ignored(service):
    engine = service.engine()
    document = learn(engine, A, name="a.txt")
    engine.keeper.remove([document])
    engine.keeper.renamed([document], learned_as="b.txt")
    engine.keeper.renamed([replace(document, keys=(ChunkKey(bytes(32)),))], learned_as="c.txt")
    learn(engine, B, name="d.txt")
    learn_as(engine, B, "e.txt")
    eventually(lambda: [one["names"] for one in service.documents()] == [["d.txt", "e.txt"]])


def test_a_name_is_sent_again_if_the_server_did_not_answer(service, monkeypatch):
    monkeypatch.setattr(remote_store, "BEAT_SECONDS", 1000)
    engine = service.engine()
    learn(engine, A, name="a.txt")
    learn_as(engine, A, "b.txt")
    with monkeypatch.context() as patched:
        patched.setattr(engine.store.attachment.quick, "ask", fails)
        with pytest.raises(Gone):
            beat(engine.store)
    beat(engine.store)
    assert service.documents()[0]["names"] == ["a.txt", "b.txt"]


def fails(*given):
    raise Gone("the server has ended")


def test_a_use_by_an_engine_counts(service):
    engine = service.engine()
    document = learn(engine, A)
    engine.store.release(engine.store.pin(document.keys))
    assert [one["uses"] for one in service.documents()] == [1]


def test_a_document_that_is_pinned_stays_when_its_engine_has_ended_and_the_server_is_another(tmp_path):
    with administered(tmp_path, local_disk=tmp_path / "disk") as service:
        engine = service.engine()
        engine.keeper.pin([learn(engine, A, name="a.txt")])
        assert known(engine, A).pinned
        assert [one["pinned"] for one in service.documents()] == [True]
        engine.keeper.expire([known(engine, A)], 3600)
        assert known(engine, A).expires == service.documents()[0]["expires"] > 0
    with administered(tmp_path, local_disk=tmp_path / "disk", max_local_disk_size=6 * RECORD / GIB) as service:
        engine = service.engine()
        for start in range(1000, 2000, 50):
            learn(engine, list(range(start, start + 20)))
        found = service.ask("/v1/documents/a.txt")["documents"][0]
        assert (found["pinned"], "disk" in found["places"], found["expires"] > 0) == (True, True, True)
        service.ask("/v1/documents/a.txt", {"pinned": False, "ttl": None}, "PATCH")
        engine.keeper.refresh([known(engine, A)])
        assert (known(engine, A).pinned, known(engine, A).expires) == (False, 0.0)


def test_all_is_cleared_from_the_disk_of_a_server_with_its_pins(tmp_path):
    disk = {"local_disk": tmp_path / "disk", "max_local_disk_size": 1.0}
    with administered(tmp_path, **disk) as service:
        engine = service.engine()
        engine.keeper.pin([learn(engine, A, name="a.txt")])
        file = disk["local_disk"] / FILE
        assert file.exists()
    (mine := disk["local_disk"] / "documents-of-mine.jsonl").write_text('{"id": "a", "text": "b"}\n')
    assert lmc("clear", str(disk["local_disk"]), "--all", "--yes")[0] == 0
    assert (file.exists(), mine.exists()) == (False, True)
    with administered(tmp_path, **disk) as service:
        service.engine()
        assert service.documents() == []


def test_the_disk_of_a_server_with_a_key_has_no_tokens_and_no_names(tmp_path):
    key, tenant = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))
    (tmp_path / "keys").write_text(f"{key}\nacme {tenant}\n")
    disk = {"local_disk": tmp_path / "disk", "max_local_disk_size": 1.0, "encryption_key": str(tmp_path / "keys")}
    with administered(tmp_path, **disk) as service:
        engine = service.engine()
        engine.keeper.pin([learn(engine, A, name="alpha.txt"), learn(engine, B, "acme", name="beta.txt")])
    kept = b"".join(file.read_bytes() for file in disk["local_disk"].rglob("*") if file.is_file())
    for secret in (b"alpha.txt", b"beta.txt", *(pack_tokens(tokens).encode() for tokens in (A, B))):
        assert secret not in kept
    with administered(tmp_path, **disk) as service:
        service.engine()
        eventually(lambda: {one["name"] for one in service.documents()} == {"alpha.txt", "beta.txt"})
        assert all(one["pinned"] for one in service.documents())
    (tmp_path / "keys").write_text(f"{key}\n")
    with administered(tmp_path, **disk) as service:
        service.engine()
        eventually(lambda: [one["name"] for one in service.documents()] == ["alpha.txt"])


def test_pins_of_all_engines_share_one_room(service):
    one, other = service.engine(), service.engine()
    one.keeper.pin([learn(one, tokens) for tokens in (A, B)])
    other.keeper.pin([learn(other, C), learn(other, D)])  # 8 of 16 slots: the share of documents
    with pytest.raises(InputError, match="pin quota exceeded"):
        other.keeper.pin([learn(other, [7] * 20)])
    eventually(lambda: one.keeper.pinned_chunks == other.keeper.pinned_chunks == 8)
    one.keeper.unpin([known(one, A)])
    other.keeper.pin([known(other, [7] * 20)])


def test_pins_on_the_disk_of_a_cache_server_take_no_memory_from_documents_to_learn(tmp_path):
    """The pinned documents of a cache server exceeded its memory and lay on its disk; no engine learned any more.

    Without a disk in the server they count, because they cannot leave its memory.
    """
    disk = {"local_disk": tmp_path / "disk", "max_local_disk_size": 40 * RECORD / GIB, "document_share": 1.0}
    with administered(tmp_path, slots=5, **disk) as service:
        engine = service.engine()
        for tokens in (A, B, C, D):
            engine.keeper.pin([learn(engine, tokens)])
        eventually(lambda: engine.keeper.pinned_chunks == 8)
        assert engine.store.slots == 5
        assert (engine.fits(5 * CHUNK), engine.fits(6 * CHUNK)) == (True, False)
    with administered(tmp_path, slots=5) as service:
        engine = service.engine()
        engine.keeper.pin([learn(engine, A)])
        eventually(lambda: engine.keeper.pinned_chunks == 2)
        assert (engine.fits(3 * CHUNK), engine.fits(4 * CHUNK)) == (True, False)


def test_a_removed_document_is_nowhere(tmp_path):
    with administered(tmp_path, local_disk=tmp_path / "disk") as service:
        engine = service.engine()
        document = learn(engine, A)
        assert places(engine, A) == ["host"] * 2
        assert service.ask(f"/v1/documents/{document.id}", method="DELETE") == {"removed": [document.id]}
        assert (places(engine, A), service.documents()) == ([None] * 2, [])
        learn(engine, A)
        engine.keeper.remove([document])
        assert (places(engine, A), service.documents(), bool(document.removed)) == ([None] * 2, [], True)


@pytest.mark.parametrize("late", [False, True], ids=["before its chunks are visible", "just after"])
def test_a_document_that_is_removed_while_an_engine_learns_it_again_stays_removed(service, monkeypatch, late):
    engine = service.engine()
    document = learn(engine, A, name="secret")
    (arena,) = service.server.arenas.all()
    for key in document.keys:
        arena.store.forget(key)
    slots = engine.begin_document(document.namespace, A, "secret")
    commit_one = arena.store.commit_one

    def commit_and_remove(reservation):
        visible = commit_one(reservation)
        if reservation.meta.key == document.keys[-1]:
            assert service.ask("/v1/documents/secret", method="DELETE") == {"removed": [document.id]}
        return visible

    if late:
        monkeypatch.setattr(arena.store, "commit_one", commit_and_remove)
    else:
        assert service.ask("/v1/documents/secret", method="DELETE") == {"removed": [document.id]}
    engine.store.commit(slots)
    engine.store.held()  # The server has done that.
    assert (service.documents(), places(engine, A)) == ([], [None, None])
    monkeypatch.undo()
    learn(engine, A, name="secret")
    assert ([one["name"] for one in service.documents()], places(engine, A)) == (["secret"], ["host", "host"])


@pytest.mark.parametrize(
    "change",
    [
        lambda keeper, documents: keeper.pin(documents),
        lambda keeper, documents: keeper.unpin(documents),
        lambda keeper, documents: keeper.expire(documents, 60.0),
    ],
    ids=["pin", "unpin", "expire"],
)
def test_a_removed_document_stays_removed_when_an_engine_changes_it_that_has_not_heard_of_that(
    service, monkeypatch, change
):
    """The server listed it again, without chunks, and no engine knew it."""
    monkeypatch.setattr(remote_store, "BEAT_SECONDS", 3600.0)
    engine = service.engine()
    document = learn(engine, A)
    service.ask(f"/v1/documents/{document.id}", method="DELETE")
    change(engine.keeper, [document])
    (arena,) = service.server.arenas.all()
    assert (service.documents(), arena.keeper.pinned_chunks, arena.keeper._all()) == ([], 0, [])
    beat(engine.store)
    assert (engine.known.count(), document.pinned, document.expires) == (0, False, 0.0)
    learn(engine, A)
    assert [one["id"] for one in service.documents()] == [document.id]


def test_a_pinned_document_that_was_lost_is_learned_again_by_an_engine_of_its_model_and_tenant(service):
    engine, stranger = service.engine(), service.engine()
    pinned = [learn(engine, A), learn(engine, B, "t")]
    engine.keeper.pin(pinned)
    for document in pinned:
        for key in document.keys:
            engine.store.forget(key)
    engine.close()
    (arena,) = service.server.arenas.all()
    later = service.engine()
    for one in (later, stranger):
        one.share_learning(lambda: False)
    arena.keeper.restore()
    eventually(lambda: len(later.learning) + len(stranger.learning) > 0)
    waiting = [*later.learning, *stranger.learning]
    assert [list(one.tokens) for one in waiting] == [A]  # Nobody has asked for anything of the other tenant.
    for one in (later, stranger):
        one.learning.clear()
    later.namespace(RecordKind.DOCUMENT, "t")
    eventually(lambda: len(later.learning) > 0)
    assert [list(one.tokens) for one in later.learning] == [B]


def test_a_document_that_one_engine_learns_is_not_begun_by_another_one(service):
    one, other = service.engine(), service.engine()
    namespace = one.namespace(RecordKind.DOCUMENT)
    slots = one.begin_document(namespace, A)
    assert (len(slots), other.begin_document(namespace, A)) == (2, None)
    for slot in slots:
        one.store.abort(slot)
    one.store.held()  # The server has done that.
    assert len(other.begin_document(namespace, A)) == 2


def test_without_the_server_nothing_can_be_pinned(tmp_path):
    with administered(tmp_path) as service:
        engine = engine_of(server=service.server.path)
        document = learn(engine, A)
    with pytest.raises(InputError, match="the cache server is unreachable"):
        engine.keeper.pin([document])
    assert not document.pinned
    engine.close()


def test_documents_that_were_stored_before_the_server_began_are_known(tmp_path):
    long = [9] * 100  # tokens, so that its chunks of 16 are found by trying
    for run in range(2):
        with administered(tmp_path, local_disk=tmp_path / "disk") as service:
            engine = service.engine()
            if run == 0:
                for tokens in (A, A[:5], long):
                    learn(engine, tokens)
            eventually(lambda found=service: len(found.documents()) == 3)
            eventually(lambda found=service: all("disk" in one["places"] for one in found.documents()))
            assert sorted(one["tokens"] for one in service.documents()) == [5, 20, 100]


def test_a_document_that_two_arenas_could_have_is_listed_once_and_removed_from_memory_too(tmp_path):
    """The chunks of both have two parts, so the arena of larger chunks takes the record of smaller ones for its own."""
    with administered(tmp_path, local_disk=tmp_path / "disk") as service:
        learn(service.engine(), A)
    with administered(tmp_path, local_disk=tmp_path / "disk") as service:
        service.engine(chunk_size=64)
        eventually(lambda: len(service.documents()) == 1)
        engine = service.engine()
        learn(engine, B)
        eventually(lambda: all(len(arena.known.list()) > 0 for arena in service.server.arenas.all()))
        engine.store.release(engine.store.pin(known(engine, A).keys))
        eventually(lambda: engine.store.held() == 0)
        name = known(engine, A).id
        assert [one["id"] for one in service.documents()].count(name) == 1
        engine.keeper.pin([known(engine, A)])
        assert service.ask(f"/v1/documents/{name}")["documents"][0]["pinned"]
        assert service.ask(f"/v1/documents/{name[:20]}", method="DELETE") == {"removed": [name]}
        assert places(engine, A) == [None] * 2


def test_a_document_that_is_given_twice_takes_its_room_once(tmp_path, monkeypatch):
    share = PinnedShare()
    monkeypatch.setattr(arenas, "PinnedShare", lambda: share)
    with administered(tmp_path) as service:
        engine = service.engine()
        document = learn(engine, A)
        engine.keeper.pin([document, document])
        keeper = arena_for(service.server, engine.store).keeper
        assert share.take(0.0) > 0
        assert keeper.pinned_chunks == len(document.keys)
        engine.keeper.unpin([document, document])
        assert (share.take(0.0), keeper.pinned_chunks) == (0, 0)


def test_an_odd_label_is_no_document_and_a_long_one_is_not_stored(service):
    engine = service.engine()
    document = learn(engine, A)
    arena = arena_for(service.server, engine.store)
    (meta,) = (held.meta for held in state_of(arena.store).resident().values() if held.meta.label)
    for odd in ({"first": 1 << 60}, {"tokens": 3}, {"label": "AAAA"}, {"label": "x" * 1000}):
        arena.note(replace(meta, key=key_of(7), **odd))
    assert [one.id for one in arena.known.list()] == [document.id]
    long = replace(meta, key=key_of(8), label="x" * 600_000, checksums=())
    assert engine.store.begin([long]) == [None]
    assert engine.store.attachment is not None


def test_a_name_that_is_too_long_is_refused_before_the_server_is_asked(service):
    engine = service.engine()
    learn(engine, A, name="a.txt")
    admin = DocumentAdmin(lambda: [engine], lambda *_: None, engine.background)
    with pytest.raises(InputError, match="up to 500 characters"):
        admin.change("a.txt", {"name": "x" * 501})


# -- who may see what --------------------------------------------------------------------------------------------------


def test_a_tenant_sees_and_changes_what_is_its_own_and_nothing_else(service):
    engine = service.engine()
    theirs, mine = learn(engine, A, "u", "a.txt"), learn(engine, B, "t", "b.txt")
    token = "token of t"
    assert [one["name"] for one in service.documents(token)] == ["b.txt"]
    assert [one["tenant"] for one in service.ask("/v1/stat", token=token)["owners"]] == [tenant_of("t")]
    assert set(service.ask("/v1/stat", token=token)) == {"owners"}
    nothing = service.refusal(f"/v1/documents/{'0' * 64}", token=token)[1].replace("0" * 64, "X")
    for name in (theirs.id, theirs.id[:10]):
        assert service.refusal(f"/v1/documents/{name}", token=token) == (404, nothing.replace("X", name))
    for method, body in (("DELETE", None), ("PATCH", {"name": "mine"})):
        assert service.refusal(f"/v1/documents/{theirs.id}", body, method, token)[0] == 404
    for pinned in (True, False):
        assert service.refusal(f"/v1/documents/{mine.id}", {"pinned": pinned}, "PATCH", token)[0] == 403
    assert service.ask("/v1/documents/b.txt", {"name": "c.txt"}, "PATCH", token)["documents"][0]["name"] == "c.txt"
    assert service.ask("/v1/documents/c.txt", method="DELETE", token=token) == {"removed": [mine.id]}
    for path in ("/metrics", "/v1/events", "/v1/clients", "/v1/quota"):
        assert service.refusal(path, token=token)[0] == 403
    for path, body in (("/v1/clear", {"everything": True}), ("/v1/drain", {})):
        assert service.refusal(path, body, token=token)[0] == 403
    assert [one["name"] for one in service.documents()] == ["a.txt"]


def test_without_a_token_nothing_is_told(service):
    learn(service.engine(), A)
    for token in ("", "wrong", "sécret".encode().decode("latin-1")):
        for path in ("/v1/documents", "/v1/stat", "/metrics", "/v1/events", "/openapi.json", "/nothing"):
            assert service.refusal(path, token=token)[0] == 401, (token, path)
    assert service.ask("/health", token="") == {"status": "ok"}
    assert service.ask("/ready", token="") == {"status": "ready"}
    with urlopen(service.url + "/") as page:
        assert b"lmc cache server" in page.read()


def test_a_server_without_a_token_answers_to_this_host_only(tmp_path):
    with administered(tmp_path, token="") as service:
        assert service.ask("/v1/documents", token="") == {"total": 0, "next": "", "documents": []}
        connection = HTTPConnection("127.0.0.1", int(service.url.rpartition(":")[2]))
        with closing(connection):
            connection.request("GET", "/v1/documents", headers={"host": "rebound.example"})
            assert connection.getresponse().status == 403
    app = application(Overview(service.server), "", {})
    with pytest.raises(
        ConfigError, match=r"--http = 0\.0\.0\.0:1 can be reached from other hosts: set LMC_ADMIN_TOKEN"
    ):
        http_server.serve(app, "0.0.0.0:1", "", setting="--http")


def test_questions_that_are_too_large_or_wrong_are_refused_and_the_next_is_answered(service):
    learn(service.engine(), A)
    assert service.refusal("/v1/clear", {"model": "x" * 70_000})[0] == 413
    port = int(service.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 30) as sent:  # Nobody knows how long it will be.
        head = "POST /v1/clear HTTP/1.1", "host: localhost", "content-type: application/json"
        head += f"authorization: Bearer {TOKEN}", "transfer-encoding: chunked"
        part = b"2710\r\n" + b"[" * 10_000 + b"\r\n"
        sent.sendall("\r\n".join([*head, "", ""]).encode() + 7 * part + b"0\r\n\r\n")
        assert b"413" in sent.recv(1000)
    wrong = [
        ("/v1/clear", {}), ("/v1/clear", {"everything": True, "model": "m"}), ("/v1/clear", {"modell": "m"}),
        ("/v1/clear", []), ("/v1/quota", {"max_gb": 1}), ("/v1/quota", {"model": "m", "max_gb": -1}),
        ("/v1/documents/aa", {"pinned": "perhaps"}), ("/v1/documents/aa", {"ttl": 0}),
    ]  # fmt: skip
    methods = {"/v1/clear": "POST", "/v1/quota": "PUT"}
    for path, body in wrong:
        assert service.refusal(path, body, methods.get(path, "PATCH"))[0] == 400
    for path in ("/v1/documents/..%2f..%2fetc%2fpasswd", "/v1/documents/%00", "/v1/documents/%20"):
        assert service.refusal(path)[0] == 404
    for path in ("/../etc/passwd", "/v1/documents/../../stat", "//etc/passwd"):
        assert service.refusal(path)[0] in (400, 404)
    assert service.refusal("/v1/documents?limit=0")[0] == 400
    assert service.refusal("/v1/clear", json.loads("[" * 500 + "]" * 500))[0] == 400
    assert len(service.documents()) == 1


def test_connections_over_which_nothing_is_asked_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(timeouts, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.5)
    with administered(tmp_path) as service:
        address = "127.0.0.1", int(service.url.rpartition(":")[2])
        head = f"POST /v1/clear HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
        head += "content-type: application/json\r\ncontent-length: 10\r\n\r\n{"
        with ExitStack() as opened:
            silent = [opened.enter_context(socket.create_connection(address, 30)) for _ in range(20)]
            begun = opened.enter_context(socket.create_connection(address, 30))
            begun.sendall(b"GET /health HTTP/1.1\r\nhost: local")
            half = opened.enter_context(socket.create_connection(address, 30))
            half.sendall(head.encode())
            refused = opened.enter_context(socket.create_connection(address, 4))
            refused.sendall(head.replace(TOKEN, "another").encode())
            assert refused.recv(1000)[:12] == b"HTTP/1.1 401"
            refused.sendall(b"x")  # This stops the timeout of an idle connection.
            while refused.recv(1000):
                pass
            assert [one.recv(10) for one in (*silent, begun)] == [b""] * 21
            assert half.recv(100)[:12] == b"HTTP/1.1 408", "the rest of the question does not come"
        assert service.ask("/health") == {"status": "ok"}


def test_a_server_that_ends_answers_the_requests_that_it_has(monkeypatch):
    """Earlier, these requests were cancelled, answered with 500, and logged with a traceback."""
    came, goes_on, port = threading.Event(), threading.Event(), free_port()

    async def application(scope, receive, send):
        came.set()
        await asyncio.to_thread(goes_on.wait, 60)
        await http_server.refuse(send, 203, "late")

    monkeypatch.setattr(http_server, "GRACE_SECONDS", 60.0)
    stop = http_server.serve(application, f"127.0.0.1:{port}", TOKEN, setting="--http")
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(urlopen, f"http://127.0.0.1:{port}", timeout=60)
        assert came.wait(60)
        stopping = pool.submit(stop)
        eventually(lambda: not listens(port))
        goes_on.set()
        assert answer.result().status == 203
        stopping.result()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_that_ends_with_a_subscriber_ends_quietly(service, monkeypatch, caplog):
    monkeypatch.setattr(http_server, "GRACE_SECONDS", 60.0)
    headers = {"authorization": f"Bearer {TOKEN}"}
    service.engine()
    with urlopen(Request(f"{service.url}/v1/events", headers=headers), timeout=60) as events:
        service.server.stop()
        service.stop_http()
        events.read()
    assert [record.levelname for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_there_are_no_more_subscribers_than_so_many(service, monkeypatch):
    monkeypatch.setattr(http_api, "MAX_SUBSCRIBERS", 1)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with urlopen(Request(service.url + "/v1/events", headers=headers), timeout=30) as stream:
        assert stream.readline()
        assert service.refusal("/v1/events")[0] == 503


def test_a_long_list_comes_in_pieces(service, monkeypatch):
    monkeypatch.setattr(http_api, "STREAMED_DOCUMENTS", 2)
    engine = service.engine()
    for tokens in (A, B, C):
        learn(engine, tokens)
    assert len(service.documents()) == 3
    page = service.ask("/v1/documents?limit=2")
    assert (page["total"], len(page["documents"])) == (3, 2)
    rest = service.ask(f"/v1/documents?limit=2&after={quote(page['next'])}")
    assert (rest["total"], rest["next"]) == (3, "")
    assert len({one["id"] for one in page["documents"] + rest["documents"]}) == 3
    assert service.ask("/v1/documents?unused_for=1000")["total"] == 0
    assert service.refusal("/v1/documents?after=somewhere")[0] == 400
    assert service.refusal(f"/v1/documents?limit={(1 << 30) + 1}")[0] == 400


def test_tls(tmp_path):
    pair = tmp_path / "chain.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-out", pair[0], "-keyout", pair[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    with administered(tmp_path) as service:
        port, app = free_port(), application(Overview(service.server), TOKEN, {})
        files = http_server.Certificate(*pair)
        stop = http_server.serve(app, f"127.0.0.1:{port}", TOKEN, setting="--http", certificate=files)
        try:
            trusted = ssl.create_default_context(cafile=str(pair[0]))
            with urlopen(f"https://localhost:{port}/health", context=trusted, timeout=30) as answer:
                assert json.loads(answer.read()) == {"status": "ok"}
        finally:
            stop()
        missing = http_server.Certificate(tmp_path / "no.pem", tmp_path / "no.key")
        with pytest.raises(ConfigError, match="invalid certificate"):
            http_server.serve(app, f"127.0.0.1:{port}", TOKEN, setting="--http", certificate=missing)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--http", "0.0.0.0:9180"], "can be reached from other hosts: set LMC_ADMIN_TOKEN"),
        (["--http", "here"], "--http = here must be an address"),
        (["--document-events", "here"], "--document-events = here is not a ZeroMQ address"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml cannot be read"),
        (["--http", "127.0.0.1:99999"], "must be an address"),
        (["--tenants", "t.yaml"], "need --http"),
        (["--http", "127.0.0.1:0", "--key", "k.pem"], "set both --certificate and --key"),
        (["--http", "127.0.0.1:0", "--tenants", "t.yaml"], "needs a token for the server itself"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_opened(tmp_path, words, why):
    code, _, err = lmc("serve", "--socket", tmp_path / "lmc.sock", *words, token="")
    assert (code, why in err, list(tmp_path.iterdir())) == (2, True, [])


def test_an_error_names_the_variable_of_an_address_that_is_not_an_option(tmp_path, monkeypatch):
    for variable in ("LMC_ADMIN", "LMC_DOCUMENT_EVENTS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "here")
            code, _, err = lmc("serve", "--socket", tmp_path / "lmc.sock", token="")
        assert (code, f"error: {variable} = here " in err) == (2, True)


def test_the_socket_of_a_server_may_be_named_as_a_path_or_as_engines_name_it(tmp_path):
    for named in (f"unix://{tmp_path}/no/lmc.sock", tmp_path / "no" / "lmc.sock"):
        code, _, err = lmc("serve", "--socket", named, token="")
        assert (code, f"{tmp_path}/no/lmc.sock: create the directory {tmp_path}/no first" in err) == (2, True)
    with serving(tmp_path, 4) as server:
        for named in (f"unix://{server.path}", server.path):
            code, out, _ = lmc("stat", "--server", named, "--json", token="")
            assert (code, json.loads(out)["clients"]) == (0, 0)
    code, _, err = lmc("stat", "--server", "http://127.0.0.1:9180", token="")
    assert (code, "or `lmc top URL` for a URL" in err) == (2, True)
    assert "error: http://127.0.0.1:9180 is not a socket" in err


@pytest.mark.parametrize(
    "text",
    [
        "[a]",
        "t: 3",
        "t: ''",
        "t: ' '",
        "t: ' a'",
        "' ': a",
        "t: same\nu: same",
        "t: one\nt: two",
        f"t: {TOKEN}",
        "a: [",
        "\xff",
    ],
)
def test_a_file_of_tenants_that_is_wrong_is_refused(tmp_path, text):
    file = tmp_path / "tenants.yaml"
    file.write_bytes(text.encode("latin-1"))
    words = "--socket", tmp_path / "lmc.sock", "--http", "127.0.0.1:0", "--tenants", file
    code, _, err = lmc("serve", *words)
    assert (code, "--tenants" in err) == (2, True)


def test_documents_are_learned_through_the_server_and_read_with_the_model_s_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "harbour.txt").write_text("the harbour opens at six .")
    with administered(tmp_path, max_local_cpu_size=0.02) as service:
        monkeypatch.setenv("LMC_SERVER", str(service.server.path))
        words = tmp_path / "harbour.txt", "--model", SMALL_MODEL, "--manifest", tmp_path / "manifest", "--pin"
        code, out, err = lmc("learn", *words)
        assert (code, "1 document learned" in out) == (0, True), err
        (found,) = service.documents()
        assert (found["name"], found["pinned"], found["model"]) == ("harbour.txt", True, "model")
        assert found["begins"] == "the harbour opens at six ."


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_is_in_use_is_told_by_model_tenant_and_place(service):
    engine = service.engine()
    learn(engine, A)
    learn(engine, B, "t")
    found = service.ask("/v1/stat")
    amount = {"chunks": 2, "tokens": 20, "bytes": 2 * SLOT}
    assert found["owners"] == [
        {"model": "", "tenant": tenant, "places": {"host": amount}} for tenant in ("", tenant_of("t"))
    ]
    assert (found["used_bytes"], found["memory_bytes"], found["documents"]) == (4 * SLOT, 16 * SLOT, 2)
    assert found["totals"]["chunks|host"] == 4
    (client,) = service.ask("/v1/clients")["clients"]
    known = {
        "process",
        "user",
        "model",
        "admin",
        "attached",
        "pinned",
        "reserved",
        "hits",
        "misses",
        "stored",
        "refused",
    }
    assert client.keys() == known
    assert (client["stored"], client["reserved"], client["hits"]) == (4, 0, {})


def test_prometheus_and_lmc_top_read_the_numbers_of_all_arenas(service):
    one, other = service.engine(), service.engine(chunk_size=32)
    learn(one, A)
    learn(other, B)
    one.store.release(one.store.pin(known(one, A).keys))
    with urlopen(Request(service.url + "/metrics", headers={"authorization": f"Bearer {TOKEN}"})) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    values = {tuple(one.labels.values()): one.value for one in families["lmc_chunks"].samples}
    assert values == {("host",): 3}
    assert families["lmc_server_used_bytes"].samples[0].value == 2 * SLOT + SLOT
    hits = [sample.value for sample in families["lmc_hits"].samples if sample.labels["place"] == "host"]
    assert hits == [2]
    code, out, _ = lmc("top", service.url, "--once")
    assert (code, "hit rate" in out) == (0, True)
    code, _, err = lmc("top", service.url, "--once", token="")
    assert (code, "LMC_ADMIN_TOKEN" in err) == (2, True)


def test_a_tenant_beyond_its_quota_evicts_its_own_oldest_chunks(service):
    engine = service.engine()
    learn(engine, A, "u")
    service.ask("/v1/quota", {"cache_salt": "t", "max_gb": 4 * SLOT / GIB}, "PUT")
    for tokens in (B, C):
        learn(engine, tokens, "t")
    assert places(engine, B, "t") == ["host"] * 2
    learn(engine, D, "t")
    assert [places(engine, tokens, "t") for tokens in (B, C, D)] == [[None] * 2, ["host"] * 2, ["host"] * 2]
    assert places(engine, A, "u") == ["host"] * 2
    (quota,) = service.ask("/v1/quota")["quotas"]
    assert (quota["model"], quota["tenant"], quota["weight"]) == (None, tenant_of("t"), 1.0)
    assert quota["max_bytes"] == quota["used_bytes"] == 4 * SLOT
    service.ask("/v1/quota", {"cache_salt": "t", "max_gb": 2 * SLOT / GIB}, "PUT")
    assert [places(engine, tokens, "t") for tokens in (C, D)] == [[None] * 2, ["host"] * 2]
    service.ask("/v1/quota", {"cache_salt": "t", "max_gb": None}, "PUT")
    learn(engine, C, "t")
    assert service.ask("/v1/quota") == {"quotas": []}
    assert stored(engine.store) == 6


def test_a_change_of_one_field_of_a_quota_keeps_the_others(service):
    service.ask("/v1/quota", {"model": "m", "max_gb": 1}, "PUT")
    service.ask("/v1/quota", {"model": "m", "weight": 3}, "PUT")
    (quota,) = service.ask("/v1/quota")["quotas"]
    assert (quota["max_bytes"], quota["weight"]) == (GIB, 3.0)


def test_two_changes_of_a_quota_at_once_both_count(monkeypatch):
    """One read what the other one was about to replace."""
    quotas, changes = Quotas(ChangeLog(), None), [{"bytes": 5}, {"weight": 2.0}]
    both = threading.Barrier(2)
    replaced = msgspec.structs.replace

    def slowly(quota, **values):
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return replaced(quota, **values)

    monkeypatch.setattr(msgspec.structs, "replace", slowly)
    threads = [threading.Thread(target=quotas.change, args=("m", None), kwargs=values) for values in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    quota = quotas.get("m", None)
    assert (quota.bytes, quota.weight) == (5, 2.0)


def test_a_chunk_that_is_larger_than_its_quota_or_finds_only_held_ones_is_not_stored(service):
    engine = service.engine()
    service.ask("/v1/quota", {"tenant": "", "max_gb": 2 * SLOT / GIB}, "PUT")
    first = learn(engine, A)
    pins = engine.store.pin(first.keys)
    assert engine.begin_document(first.namespace, B) is None
    engine.store.release(pins)
    assert engine.store.held() == 0  # The answer comes after the server has done what it was told.
    service.ask("/v1/quota", {"tenant": "", "max_gb": 0}, "PUT")
    assert engine.begin_document(first.namespace, B) is None
    assert stored(engine.store) == 0


def test_a_quota_that_one_model_has_filled_gives_room_to_another_one(service):
    one, other = service.engine(), service.engine(chunk_size=64)
    service.ask("/v1/quota", {"tenant": "", "max_gb": 4 * SLOT / GIB}, "PUT")
    for tokens in (A, B):
        learn(one, tokens)
    learn(other, C)
    assert places(other, C) == ["host"]
    (quota,) = service.ask("/v1/quota")["quotas"]
    assert quota["used_bytes"] <= 4 * SLOT


def test_what_is_cleared_is_not_learned_again(service):
    engine = service.engine()
    document = learn(engine, A, "t")
    engine.keeper.pin([document])
    for key in document.keys:
        engine.store.forget(key)
    service.ask("/v1/clear", {"cache_salt": "t"})
    arena = arena_for(service.server, engine.store)
    arena.keeper.restore()
    assert (len(arena.waiting), service.documents()) == (0, [])


def test_a_cache_salt_that_is_given_as_a_tenant_is_refused(service):
    """A quota for a salt would limit no tenant, and removing its chunks would remove none."""
    for path, method, more in (("/v1/quota", "PUT", {"max_gb": 1}), ("/v1/clear", "POST", {})):
        code, error = service.refusal(path, {"tenant": "acme", **more}, method)
        assert (code, "or cache_salt" in error) == (400, True)
    assert service.ask("/v1/clear", {"tenant": tenant_of("acme")}) == {"removed": 0}


def test_names_that_are_not_unicode_are_refused(service):
    """A cache salt was answered with an internal error, and a traceback in the log."""
    for path, method, more in (("/v1/quota", "PUT", {"max_gb": 1}), ("/v1/clear", "POST", {})):
        code, error = service.refusal(path, {"cache_salt": "\ud800", **more}, method)
        assert (code, "valid Unicode" in error) == (400, True)


def test_quotas_hold_for_the_next_server(tmp_path):
    Quotas(ChangeLog(), tmp_path).change("m", None, bytes=5)
    assert [(one.model, one.tenant, one.bytes) for one, _ in Quotas(ChangeLog(), tmp_path).all()] == [("m", None, 5)]
    with pytest.raises(InputError, match="Unicode"):
        Quotas(ChangeLog(), tmp_path).change("\ud800", None, bytes=5)
    assert len(Quotas(ChangeLog(), tmp_path).all()) == 1
    (tmp_path / "quotas.json").write_text("[{]")
    assert Quotas(ChangeLog(), tmp_path).all() == []


def test_all_of_a_tenant_is_removed_with_its_pins(tmp_path):
    with administered(tmp_path, local_disk=tmp_path / "disk") as service:
        engine = service.engine()
        learn(engine, A)
        engine.keeper.pin([learn(engine, B, "t")])
        assert service.ask("/v1/clear", {"cache_salt": "t"}) == {"removed": 2}
        eventually(lambda: places(engine, B, "t") == [None] * 2)
        assert places(engine, A) == ["host"] * 2
        assert [one["tokens"] for one in service.documents()] == [20]
        assert service.ask("/v1/clear", {"everything": True}) == {"removed": 2}
        eventually(lambda: stored(engine.store) == 0)


def test_a_drained_server_writes_everything_down_and_is_not_ready(tmp_path):
    with administered(tmp_path, local_disk=tmp_path / "disk") as service:
        learn(service.engine(), A)
        assert service.ask("/v1/drain", {}, "POST")["status"].startswith("the server is writing chunks")
        eventually(lambda: service.server.ends)
    with administered(tmp_path, local_disk=tmp_path / "disk") as service:
        assert places(service.engine(), A) == ["disk"] * 2


def test_every_question_is_described(service):
    paths = service.ask("/openapi.json")["paths"]
    assert set(paths) == {
        "/health", "/ready", "/metrics", "/v1/events", "/v1/documents", "/v1/documents/{name}", "/v1/stat",
        "/v1/clients", "/v1/clear", "/v1/quota", "/v1/drain", "/v1/explain",
    }  # fmt: skip
    assert all(asked["summary"] for methods in paths.values() for asked in methods.values())


# -- events ------------------------------------------------------------------------------------------------------------


class Subscriber:
    """Keeps up with events, and knows what is where."""

    def __init__(self):
        self.last, self.there = "", {}

    def take(self, events):
        for event in events:
            self.last = event.id
            if event.kind == "listing":
                self.there = {}
            for chunk in event.data.get("chunks", ()):
                self.there.setdefault(chunk["place"], set()).add(chunk["key"])
            for change in event.data.get("changes", ()):
                keys = self.there.setdefault(change["place"], set())
                (keys.add if change["appeared"] else keys.remove)(change["key"])


schedules = st.lists(
    st.one_of(
        st.tuples(st.booleans(), st.sampled_from(["host", "disk"]), st.integers(0, 5)), st.sampled_from(["a", "b"])
    ),
    max_size=60,
)


@given(schedules)
def test_a_subscriber_that_comes_late_or_seldom_knows_what_is_there(schedule):
    log = ChangeLog(kept=4)
    events, subscribers = Events(log, "server"), {"a": Subscriber(), "b": Subscriber()}
    for step in [*schedule, "a", "b"]:
        if isinstance(step, str):
            subscribers[step].take(events.after(subscribers[step].last))
            continue
        appeared, place, number = step
        if appeared:
            log.appeared(place, meta_of(key_of(number)))
        else:
            log.left(place, key_of(number))
    there = {place: {one.key.hex() for one in found} for place, found in log.present()[1].items()}
    for one in subscribers.values():
        assert {place: keys for place, keys in one.there.items() if keys} == {
            place: keys for place, keys in there.items() if keys
        }


def test_events_of_another_server_are_not_taken_for_ours():
    log = ChangeLog()
    log.appeared("host", meta_of(key_of(1)))
    ours = Events(log, "ours")
    (listing,) = ours.after("theirs-1")
    assert (listing.kind, list(ours.after(listing.id))) == ("listing", [])


def read_events(service, last, count):
    """Return so many events after `last`."""
    headers = {"authorization": f"Bearer {TOKEN}", "last-event-id": last}
    found, event = [], {}
    with urlopen(Request(service.url + "/v1/events", headers=headers), timeout=30) as stream:
        for line in stream:
            name, _, text = line.decode().rstrip("\n").partition(": ")
            if name:
                event[name] = text
            elif event:
                found.append(event)
                event = {}
            if len(found) == count:
                return found
    return found


def test_events_arrive_over_http_and_go_on_where_a_subscriber_was(service):
    engine = service.engine()
    learn(engine, A)
    (listing,) = read_events(service, "", 1)
    assert (listing["event"], len(json.loads(listing["data"])["chunks"])) == ("listing", 2)
    learn(engine, B)
    (changes,) = read_events(service, listing["id"], 1)
    changed = json.loads(changes["data"])["changes"]
    assert [(one["place"], one["appeared"], one["kind"]) for one in changed] == [("host", True, "document")] * 2
    waiting = threading.Thread(target=read_events, args=(service, changes["id"], 1))
    waiting.start()
    learn(engine, C)
    waiting.join(30)
    assert not waiting.is_alive()


# -- explanations ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_explained_by_an_engine_of_its_model(service):
    code, error = service.refusal("/v1/explain", {"prompt_token_ids": A})
    assert (code, "start an engine with LMC_ADMIN=" in error) == (400, True)
    silent = service.engine()
    address, token = f"127.0.0.1:{free_port()}", "of the engine, which the server does not know"
    server = {"server": service.server.path, "load_deadline": 30.0, "admin": address, "admin_token": token}
    lab = Lab(settings={**server, "load_policy": "always"})
    stop = serve_if_wanted(Administration(lab.setup, lab.scheduler.recent))
    try:
        learn_in(lab, DOC_A)
        eventually(lambda: any(one["admin"] for one in service.ask("/v1/clients")["clients"]))
        question = {"prompt_token_ids": prompt(DOC_A, DOC_B), "model": "served under this name"}
        found = service.ask("/v1/explain", question)
        assert [one["reused"] for one in found["documents"]] == [True, False]
        assert len(service.ask("/v1/explain", question | {"more": "a" * 100_000})["documents"]) == 2
        assert found["engine"] == f"http://{address}"
        assert lab.scheduler.numbers()["attached"] == 1.0
    finally:
        stop()
        lab.scheduler.close()
    assert service.refusal("/v1/explain", {"prompt_token_ids": A})[0] == 400  # That engine has gone.
    assert silent.store.lookup([]) == []


def test_it_must_be_said_of_which_of_several_models_a_prompt_is(service):
    engines = [service.engine(model=name) for name in ("one", "two")]
    for engine in engines:
        engine.store.administered_at("http://127.0.0.1:9", "")
    eventually(lambda: sum(bool(one["admin"]) for one in service.ask("/v1/clients")["clients"]) == 2)
    code, error = service.refusal("/v1/explain", {"prompt_token_ids": A, "model": "three"})
    assert (code, "set model to one of one, two" in error) == (400, True)
    code, error = service.refusal("/v1/explain", {"prompt_token_ids": A, "model": "two"})
    assert (code, "no server answers at http://127.0.0.1:9" in error) == (400, True)


class Listener:
    """An HTTP server of a client that is not to be trusted: it keeps the headers of what it is asked."""

    def __init__(self, status=200, location=""):
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"] or 0))
                asked.append((self.path, dict(self.headers)))
                self.send_response(status)
                if location:
                    self.send_header("location", location)
                self.end_headers()
                self.wfile.write(b"{}")

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def introduce(engine, admin, token="of-the-client"):
    """Name an address for explanations as a client of another make might, which checks nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_store, "is_local_url", lambda address: True)
        engine.store.administered_at(admin, token)
    engine.store.held()


def test_a_client_of_the_socket_does_not_get_the_operator_s_token(service, monkeypatch):
    """A process of `--group` named an address of its own, and `explain` sent LMC_ADMIN_TOKEN there.

    Now the server sends the token that the client itself has given, and no list shows that one.
    """
    monkeypatch.setenv("LMC_ADMIN_TOKEN", TOKEN)
    with Listener() as listener:
        introduce(service.engine(model="m"), listener.url)
        assert service.ask("/v1/explain", {"prompt_token_ids": A})["engine"] == listener.url
        ((path, headers),) = listener.asked
        assert (path, headers["Authorization"]) == ("/v1/explain", "Bearer of-the-client")
        assert TOKEN not in str(headers)
        assert "of-the-client" not in json.dumps(service.ask("/v1/clients"))


ELSEWHERE = [
    "http://192.0.2.1:9180", "http://example.com:9180", "http://127.0.0.1.example.com:80",
    "http://127.0.0.1:1@192.0.2.1:80", "http://me@127.0.0.1:80", "http://127.0.0.1:80/elsewhere",
    "http://127.0.0.1:80\n", "http://127.0.0:80", "http://127.0.0.1.1:80", "https://192.0.2.1:443", "192.0.2.1:9180", "unix://relative",
]  # fmt: skip


def test_explanations_are_asked_of_this_host_only(service, caplog):
    """A client named an address of another host, and the server sent the operator's prompts there."""
    engine = service.engine(model="m")
    for admin in ELSEWHERE:
        caplog.clear()
        introduce(engine, admin)
        assert [one["admin"] for one in service.ask("/v1/clients")["clients"]] == [""], admin
        code, error = service.refusal("/v1/explain", {"prompt_token_ids": A})
        assert (code, "start an engine with LMC_ADMIN=" in error) == (400, True), admin
        assert "it is not on this host" in caplog.text, admin


def test_an_engine_that_only_other_hosts_can_ask_does_not_name_its_address(service, caplog):
    engine = service.engine(model="m")
    engine.store.administered_at("http://192.0.2.1:9180", "token")
    engine.store.held()
    assert [one["admin"] for one in service.ask("/v1/clients")["clients"]] == [""]
    assert "cannot request explanations at http://192.0.2.1:9180" in caplog.text


def test_a_client_cannot_take_the_place_of_an_engine_of_its_model(service):
    """A second client introduced itself under the model of an engine, and got the prompts that are explained."""
    with Listener() as engine, Listener() as other:
        for listener in (engine, other):
            introduce(service.engine(model="m"), listener.url)
        for model in ("m", "any"):
            assert service.ask("/v1/explain", {"prompt_token_ids": A, "model": model})["engine"] == engine.url
        assert other.asked == []


def test_a_redirect_leads_to_nobody_else(service, monkeypatch):
    """An address of this host redirected the server to another one, with all headers."""
    monkeypatch.setenv("LMC_ADMIN_TOKEN", TOKEN)
    with Listener() as other, Listener(302, f"{other.url}/v1/explain") as listener:
        introduce(service.engine(model="m"), listener.url)
        code, error = service.refusal("/v1/explain", {"prompt_token_ids": A})
        assert (code, f"redirects are not followed; use the address {other.url}/v1/explain" in error) == (400, True)
        with pytest.raises(Unreachable, match="redirects are not followed"):
            admin_client(listener.url).ask("/v1/documents")
        assert len(listener.asked) == 2
        assert other.asked == []
