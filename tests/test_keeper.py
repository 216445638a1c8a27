"""What people want for documents: pins, time limits and names, over a real store and a real disk."""

import base64
import gc
import json
import logging
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from storage_fakes import DictTier, Shared, eventually, lose, threads_named, tiers_of, with_stray_holder
from tier_wrappers import Faulty

from lmc.blend.segments import Span
from lmc.config.settings import Settings
from lmc.documents import keeper, kept
from lmc.documents.admin import DocumentAdmin
from lmc.documents.kept import FILE, VERSION, KeptDocuments, forget_kept, pinned_keys
from lmc.documents.known import known_bytes, pack_tokens
from lmc.documents.table import Filter
from lmc.engine import CacheEngine, names
from lmc.errors import InputError, NotFound
from lmc.keys import Namespace, RecordKind, tenant_of
from lmc.open_store import open_store
from lmc.shapes import GIB, KVShape
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.tiers.disk import DiskTier, index

SHAPE = KVShape(layers=2, kv_heads=1, head_dim=8, dtype=torch.float32)
CHUNK = 16
RECORD = 4096 + 2 * 4096  # bytes of a chunk on the disk: its header, and two parts of a kibibyte
A, B, C, D = ([n * 100 + i for i in range(20)] for n in range(4))  # documents of two chunks


def engine_of(tmp_path=None, *, slots=8, records=12, tiers=None, chunk_size=CHUNK, model="", **settings) -> CacheEngine:
    size = 2 * 4096 * slots / GIB
    if "server" in settings:
        settings = {"load_deadline": 30.0, **settings}  # for a machine that is busy with something else
    given = Settings(chunk_size=chunk_size, max_local_cpu_size=size, local_disk=tmp_path and tmp_path / "disk",
                     max_local_disk_size=records * RECORD / GIB, **settings)  # fmt: skip
    namespace = Namespace(
        model="m", dtype="float32", layers=2, kv_heads=1, head_dim=8, rope="r", chunk_size=chunk_size, tensor_parallel=1
    )
    layout = ChunkLayout.of(SHAPE, chunk_size)
    store = open_store(given, layout, tiers=tiers, model=model)
    return CacheEngine(given, store, layout, SHAPE, namespace, model=model)


def learn(engine, tokens, salt="", name=""):
    namespace = engine.namespace(RecordKind.DOCUMENT, salt)
    for reservation in engine.begin_document(namespace, tokens, name) or ():
        if reservation is not None:
            engine.store.view(reservation).fill_(tokens[0] % 250)
            engine.store.commit([reservation])
    engine.store.flush()
    return known(engine, tokens)


def known(engine, tokens):
    return next(one for one in engine.known.list() if list(one.tokens) == tokens)


def places(engine, tokens, salt=""):
    return engine.lookup(engine.document_keys(tokens, engine.namespace(RecordKind.DOCUMENT, salt)))


def others(engine, count):
    """Push everything out that may be evicted."""
    for number in range(count):
        learn(engine, [5000 + number * 20 + i for i in range(20)])


def test_removing_a_version_of_a_text_keeps_the_chunks_of_the_other_one(tmp_path):
    """Both versions begin with the same chunk."""
    with closing(engine_of(tmp_path)) as engine:
        old, new = learn(engine, A), learn(engine, [*A[:CHUNK], 7, 8, 9])
        assert old.keys[0] == new.keys[0]
        engine.keeper.remove([old])
        assert (all(places(engine, new.tokens.tolist())), any(places(engine, A)[1:])) == (True, False)
        engine.keeper.remove([new])
        assert not any(places(engine, new.tokens.tolist()))


def test_a_process_that_is_killed_while_it_removes_a_document_leaves_no_pin_of_it(tmp_path, monkeypatch):
    """The next process knew a pinned document without chunks, and had it learned again."""
    with closing(engine_of(tmp_path)) as engine:
        document = learn(engine, A)
        engine.keeper.pin([document])
        engine.keeper.expire([document], 60.0)
        forget, rows = engine.store.forget, KeptDocuments(tmp_path / "disk")
        left = [[row.id for row in rows.read()]]

        def forget_and_look(key):
            left.append([row.id for row in rows.read()])
            forget(key)

        monkeypatch.setattr(engine.store, "forget", forget_and_look)
        engine.keeper.remove([document])
        assert left == [[document.id], [], []]


def test_a_document_that_is_removed_while_a_prompt_uses_it_stays_removed(tmp_path):
    """Earlier, such a document was listed again after the request, found in prompts, and so learned again."""
    with closing(engine_of(tmp_path)) as engine:
        document, used = learn(engine, A), engine.documents(A, [Span(0, len(A))])
        assert engine.note(A, used, used=True) == [document]
        engine.keeper.remove([document])
        assert engine.note(A, used, used=True) == []
        assert (engine.known.count(), document.removed) == (0, "lmc documents remove")
        learn(engine, A)
        assert engine.note(A, used, used=True) == [document]
        assert engine.known.count() == 1


def test_a_removed_document_hides_no_other_one_with_its_text_until_it_is_learned_again(tmp_path):
    text = list(range(900, 1000))
    with closing(engine_of(tmp_path, slots=32, records=32, enable_blending=True)) as engine:
        namespace = engine.namespace(RecordKind.DOCUMENT)
        old, new = learn(engine, [1, *text]), learn(engine, [*range(50), *text])

        def holder():
            return [run.document for run in engine.known.find(namespace, [5, *text, 6], 64)]

        assert holder() == [new]
        engine.keeper.remove([new])
        assert holder() == [old]
        engine.keeper.remove([old])
        assert holder() == []
        assert learn(engine, [1, *text]) is old
        assert holder() == [old]


def test_of_two_documents_with_the_same_text_the_one_that_was_used_last_is_found(tmp_path):
    """The other one may have been evicted."""
    text = list(range(900, 1000))
    with closing(engine_of(tmp_path, slots=32, records=32, enable_blending=True)) as engine:
        old, new = learn(engine, [1, *text]), learn(engine, [*range(50), *text])
        old.used, new.used = 1.0, 2.0

        def holder():
            return [run.document for run in engine.known.find(old.namespace, [5, *text, 6], 64)]

        assert holder() == [new]
        old.used = 3.0
        assert holder() == [old]


def test_a_pinned_document_survives_others_and_a_restart(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        learn(engine, B)
        engine.keeper.pin([learn(engine, A, name="the first")])
        others(engine, 10)
        assert all(places(engine, A))
        assert places(engine, B) == [None, None]
    with closing(engine_of(tmp_path)) as engine:
        assert (known(engine, A).pinned, known(engine, A).name) == (True, "the first")
        others(engine, 10)
        assert all(places(engine, A))
        engine.keeper.unpin([known(engine, A)])
        others(engine, 10)
        assert places(engine, A) == [None, None]
    with closing(engine_of(tmp_path)) as engine:
        assert not [one for one in engine.known.list() if one.name]  # Names go with their documents.


def test_pins_are_refused_beyond_the_share_of_documents(tmp_path):
    with closing(engine_of(tmp_path, records=8)) as engine:  # Half of it is room for two documents.
        engine.keeper.pin([learn(engine, A)])
        engine.keeper.pin([known(engine, A)])
        engine.keeper.pin([learn(engine, B)])
        with pytest.raises(InputError, match=r"pinned documents would take 1\d\d% of the quota"):
            engine.keeper.pin([learn(engine, C)])
        assert not known(engine, C).pinned
        engine.keeper.unpin([known(engine, A)])
        engine.keeper.pin([known(engine, C)])
    with closing(engine_of(tmp_path, records=8, document_share=0.0)) as engine:
        assert not known(engine, B).pinned
        with pytest.raises(InputError, match="document_share"):
            engine.keeper.pin([learn(engine, A)])


def test_without_a_disk_pins_hold_in_memory():
    with closing(engine_of(slots=8)) as engine:
        engine.keeper.pin([learn(engine, A), learn(engine, B)])
        with pytest.raises(InputError, match="pin quota exceeded"):
            engine.keeper.pin([learn(engine, C)])
        others(engine, 10)
        assert places(engine, A) == places(engine, B) == ["host", "host"]


def test_a_change_that_exceeds_the_pin_quota_changes_no_name():
    with closing(engine_of(slots=8)) as engine:
        engine.keeper.pin([learn(engine, A), learn(engine, B)])
        document = learn(engine, C, name="before")
        admin = DocumentAdmin(lambda: [engine], lambda tokens, model: "", engine.background)
        with pytest.raises(InputError, match="pin quota exceeded"):
            admin.change(document.id, {"name": "after", "pinned": True})
        assert document.name == "before"
        admin.change(document.id, {"name": "after"})
        assert document.name == "after"


def test_fewer_pins_are_kept_if_the_disk_has_become_smaller(tmp_path, caplog):
    with closing(engine_of(tmp_path, records=20)) as engine:
        engine.keeper.pin([learn(engine, tokens) for tokens in (A, B, C, D)])
    with closing(engine_of(tmp_path, records=10)) as engine:
        assert [known(engine, tokens).pinned for tokens in (A, B, C, D)] == [True, True, False, False]
        assert "unpinned 2 documents: they exceed the pin quota" in caplog.text
    with closing(engine_of(tmp_path, records=20)) as engine:
        assert [known(engine, tokens).pinned for tokens in (A, B, C, D)] == [True, True, False, False]


def test_a_document_goes_when_its_time_is_over_pinned_or_not(tmp_path, monkeypatch):
    with closing(engine_of(tmp_path)) as engine:
        documents = [learn(engine, A), learn(engine, B), learn(engine, C)]
        engine.keeper.pin(documents[:1])
        engine.keeper.expire(documents[:2], 3600)
        engine.keeper.expire(documents[1:2], None)
        engine.keeper.remove_expired()
        assert all(places(engine, A))
    later = time.time() + 3601
    monkeypatch.setattr(keeper.time, "time", lambda: later)
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.remove_expired()
        assert places(engine, A) == [None, None]
        assert all(places(engine, B) + places(engine, C))
        assert known(engine, A).removed
    with closing(engine_of(tmp_path)) as engine:
        assert [list(one.tokens) for one in engine.known.list() if one.kept] == []


def during_the_first_removal(engine, monkeypatch, act):
    """Call `act` once, when a chunk of the first document is being removed."""
    forget, called = engine.store.forget, []

    def forget_and_act(key, **options):
        if not called:
            called.append(key)
            act()
        forget(key, **options)

    monkeypatch.setattr(engine.store, "forget", forget_and_act)


def test_a_document_whose_time_limit_is_lifted_while_others_are_removed_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "MAX_REMOVED_CHUNKS", 2)
    with closing(engine_of(tmp_path)) as engine:
        documents = [learn(engine, A), learn(engine, B), learn(engine, C)]
        engine.keeper.expire(documents, 1e-6)

        def change():
            engine.keeper.expire(documents[1:2], None)
            engine.keeper.expire(documents[2:], 3600)

        during_the_first_removal(engine, monkeypatch, change)
        engine.keeper.remove_expired()
        assert [bool(document.removed) for document in documents] == [True, False, False]
        assert places(engine, A) == [None, None]
        assert all(places(engine, B) + places(engine, C))


def test_documents_that_are_forgotten_while_others_expire_are_not_removed(tmp_path, monkeypatch):
    """After new weights, their keys belong to no document of this engine."""
    monkeypatch.setattr(keeper, "MAX_REMOVED_CHUNKS", 2)
    with closing(engine_of(tmp_path)) as engine:
        documents = [learn(engine, A), learn(engine, B)]
        engine.keeper.expire(documents, 1e-6)
        during_the_first_removal(engine, monkeypatch, engine.begin_anew)
        engine.keeper.remove_expired()
        assert [bool(document.removed) for document in documents] == [True, False]


def test_a_time_limit_of_a_document_that_was_removed_meanwhile_is_not_changed(tmp_path, monkeypatch):
    with closing(engine_of(tmp_path)) as engine:
        admin = DocumentAdmin(lambda: [engine], lambda tokens, model: "", engine.background)
        documents, expire = [learn(engine, A, name="a"), learn(engine, B, name="b")], engine.keeper.expire

        def expire_late(changed, seconds):
            engine.keeper.remove(changed)
            expire(changed, seconds)

        monkeypatch.setattr(engine.keeper, "expire", expire_late)
        for limit in (None, 3600):
            learn(engine, A)
            with pytest.raises(NotFound, match="document 'a' was removed"):
                admin.change("a", {"ttl": limit})
            assert not documents[0].kept
        assert {row.id for row in KeptDocuments(tmp_path / "disk").read()} == set()


@pytest.mark.parametrize("expire", [False, True])
def test_other_threads_do_not_wait_until_many_documents_are_removed(tmp_path, monkeypatch, expire):
    monkeypatch.setattr(keeper, "MAX_REMOVED_CHUNKS", 4)
    sleep, left = time.sleep, []
    with closing(engine_of(tmp_path)) as engine:
        documents = [learn(engine, tokens) for tokens in (A, B, C, D)]

        def wait_for_moving():
            with engine.keeper.moving:
                left.append([bool(document.removed) for document in documents])

        def pause(seconds):
            if seconds == keeper.PAUSE_SECONDS:
                thread = threading.Thread(target=wait_for_moving)
                thread.start()
                thread.join(30)
            sleep(seconds)

        monkeypatch.setattr(keeper.time, "sleep", pause)
        if expire:
            engine.keeper.expire(documents, 1e-6)
            engine.keeper.remove_expired()
        else:
            engine.keeper.remove(documents)
        assert left == [[True, True, False, False]]
        assert all(document.removed for document in documents)


def test_a_document_that_is_learned_again_while_it_is_removed_is_removed(tmp_path, monkeypatch):
    with closing(engine_of(tmp_path)) as engine:
        document = learn(engine, A)

        def learn_again():
            engine.store.forget(document.keys[-1])
            learn(engine, A)

        during_the_first_removal(engine, monkeypatch, learn_again)
        engine.keeper.remove([document])
        assert (places(engine, A), bool(document.removed)) == ([None, None], True)


def test_a_restart_is_no_use_of_pinned_documents(tmp_path):
    """A pinned document was never listed as unused if its engine restarted now and then."""
    with closing(engine_of(tmp_path)) as engine:
        documents = [learn(engine, A), learn(engine, B)]
        engine.keeper.pin(documents[:1])
    restarted = time.time()
    with closing(engine_of(tmp_path)) as engine:
        engine.recall.wait()
        assert [(document.pinned, document.used < restarted) for document in map(partial(known, engine), (A, B))] == [
            (True, True),
            (False, True),
        ]
        engine.known.use([known(engine, A).keys[-1]])
        assert known(engine, A).used > restarted


def test_names_of_documents_that_are_neither_known_nor_stored_are_forgotten(tmp_path, monkeypatch):
    """Each document with a second name kept its row, with all of its tokens, until a restart."""
    monkeypatch.setattr(keeper, "EXPIRY_SECONDS", 0.01)

    def rows() -> set[str]:
        try:
            return {row.id for row in KeptDocuments(tmp_path / "disk").read()}
        except sqlite3.OperationalError:  # The keeper has yet to create the table.
            return set()

    with closing(engine_of(tmp_path, records=100, max_document_index_size=6 * known_bytes(20, 2) / GIB)) as engine:
        namespace, named = engine.namespace(RecordKind.DOCUMENT), [learn(engine, A, name="a.txt")]
        engine.known.rename(named[0], "b.txt")
        engine.keeper.renamed(named)
        for number in range(1, 30):
            tokens = [number * 1000 + i for i in range(20)]
            keys = engine.document_keys(tokens, namespace)
            for name in ("old.txt", "new.txt"):
                document = engine.known.note(namespace, tokens, keys, name=name)
                engine.keeper.renamed([document])
            named.append(document)
        eventually(lambda: rows() == {document.id for document in named})
        engine.keeper.forget_names()
        kept = {document.id for document in engine.known.list()} | {named[0].id}
        assert (rows(), len(kept) < 10) == (kept, True)


def test_a_tenant_that_is_forgotten_while_its_document_waits_keeps_its_encryption(tmp_path, monkeypatch):
    """The record had no tenant, and so no key: the text of the document was on the disk as it is."""
    monkeypatch.setattr(names, "SALTS", 4)
    keys = tmp_path / "keys"
    keys.write_text(f"alice {base64.b64encode(bytes(range(32))).decode()}\n")
    with closing(engine_of(tmp_path, encryption_key=str(keys))) as engine:
        namespace = engine.namespace(RecordKind.DOCUMENT, "alice")
        learn(engine, A, "alice")
        for number in range(100):
            engine.namespace(RecordKind.DOCUMENT, f"tenant {number}")
        assert engine.begin_document(namespace, B) is None, "not learned without a name"
        learn(engine, B, "alice")
        engine.store.flush()
        assert {document.tenant for document in engine.known.list()} == {tenant_of("alice")}
        stored = b"".join(file.read_bytes() for file in (tmp_path / "disk").rglob("*") if file.is_file())
        assert not any(pack_tokens(tokens).encode() in stored for tokens in (A, B))


def test_the_thread_removes_what_is_over(monkeypatch):
    monkeypatch.setattr(keeper, "EXPIRY_SECONDS", 0.01)
    with closing(engine_of()) as engine:
        engine.keeper.expire([learn(engine, A)], 0.05)
        until = time.monotonic() + 30
        while any(places(engine, A)) and time.monotonic() < until:
            time.sleep(0.01)
        assert places(engine, A) == [None, None]


def test_what_a_shared_tier_has_dropped_is_written_again(tmp_path):
    remote = DictTier()
    remote.name, remote.shared = "redis", True
    disk = DiskTier(tmp_path / "disk", 40 * RECORD, document_share=0.5)
    with closing(engine_of(tmp_path, records=40, tiers=[disk, remote])) as engine:
        engine.keeper.pin([learn(engine, A)])
        learn(engine, B)
        remote.records.clear()
        engine.keeper.restore()
        assert set(remote.records) == set(known(engine, A).keys)
        assert len(engine.learning) == 0


def test_the_thread_looks_once_a_minute_for_what_a_shared_tier_has_dropped(monkeypatch):
    assert keeper.EXPIRY_SECONDS == 1.0
    for name in ("EXPIRY_SECONDS", "RESTORE_SECONDS"):  # a second takes a millisecond
        monkeypatch.setattr(keeper, name, getattr(keeper, name) / 1024)
    restore, calls = keeper.Keeper.restore, []
    monkeypatch.setattr(keeper.Keeper, "remove_expired", lambda self: calls.append("second"))
    monkeypatch.setattr(keeper.Keeper, "restore", lambda self: (calls.append("restored"), restore(self)))
    remote = DictTier()
    remote.name, remote.shared = "redis", True
    with closing(engine_of(tiers=[remote])) as engine:
        document = learn(engine, A)
        engine.keeper.pin([document])
        remote.records.clear()
        until = time.monotonic() + 30
        while not all(key in remote.records for key in document.keys) and time.monotonic() < until:
            time.sleep(0.01)
        assert all(key in remote.records for key in document.keys)
    assert calls[:61] == ["second"] * 60 + ["restored"]


def test_a_pinned_document_that_is_nowhere_is_computed_again(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.pin([learn(engine, C, "somebody whom the next one never meets")])
    with closing(engine_of(tmp_path)) as engine:
        engine.documents([1], [], "tenant")
        for document in (learn(engine, A), learn(engine, B, "tenant"), known(engine, C)):
            engine.keeper.pin([document])
            for key in document.keys:
                engine.store.forget(key)
        assert len([one for one in engine.known.list() if one.pinned]) == 3
        engine.keeper.restore()
        assert [list(one.tokens) for one in engine.learning] == [A, B]
        engine.begin_anew()
        engine.learning.clear()
        engine.keeper.restore()
        assert len(engine.learning) == 0, "new weights must not be stored under old keys"


def test_documents_that_begin_alike_share_chunks_and_do_not_lose_them(tmp_path):
    longer = [*A[:16], 7, 8, 9]
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.pin([learn(engine, A), learn(engine, longer)])
        engine.keeper.remove([known(engine, longer)])
        others(engine, 10)
        assert all(places(engine, A))
        assert places(engine, longer)[1] is None


@pytest.mark.parametrize("damage", [
    "text = '{'", "text = zeroblob(9)", "text = NULL", "keys = NULL, expires = 'soon'", "id = '00'",
    "text = '{\"name\": 1, \"tokens\": 2}'",
])  # fmt: skip
def test_a_row_that_is_wrong_is_passed_over(tmp_path, damage):
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.pin([learn(engine, A), learn(engine, B)])
        wrong = known(engine, B).id
    rows(tmp_path, f"UPDATE kept SET {damage} WHERE id = '{wrong}'")
    with closing(engine_of(tmp_path)) as engine:
        assert [known(engine, tokens).pinned for tokens in (A, B)] == [True, False]
    # What cannot be a document with these settings may be one with others.
    assert rows(tmp_path, "SELECT count(*) FROM kept") == [(2,)]


@pytest.mark.parametrize("damage", ["bytes", "version", "columns"])
def test_a_database_that_is_damaged_is_set_aside(tmp_path, damage, caplog):
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.pin([learn(engine, A)])
    path = tmp_path / "disk" / FILE
    if damage == "bytes":
        path.write_bytes(b"no database" * 1000)
    elif damage == "columns":
        rows(tmp_path, "ALTER TABLE kept DROP COLUMN expires")
    else:
        rows(tmp_path, f"PRAGMA user_version = {VERSION + 1}")
    with closing(engine_of(tmp_path)) as engine:
        assert "cannot read all pins" in caplog.text
        assert f"it is renamed to {FILE}.damaged" in caplog.text
        engine.keeper.pin([known(engine, A)])
    with closing(engine_of(tmp_path)) as engine:
        assert known(engine, A).pinned


def line_about(document, **changes):
    """A line of the file that lmc had before the database: the first one about a document."""
    return json.dumps({
        "id": document.id, "pinned": True, "expires": 0.0, "name": "old.txt", "namespace": document.namespace.hex(),
        "tokens": pack_tokens(document.tokens), "model": document.model, "tenant": document.tenant,
        "keys": b"".join(document.keys).hex(), **changes,
    })  # fmt: skip


def test_pins_time_limits_and_names_of_versions_before_the_database_are_imported(tmp_path, caplog):
    """Earlier, pins, time limits and names of these versions were dropped without a word in the log."""
    with closing(engine_of(tmp_path)) as engine:
        first, second, third = learn(engine, A), learn(engine, B), learn(engine, list(range(700, 720)))
        engine.keeper.expire([third], 9e9)
        newest = third.expires
    lines = [
        line_about(first), line_about(second, pinned=False), line_about(third, expires=1.0),
        json.dumps({"id": second.id, "pinned": False, "expires": 8e9, "name": "new.txt"}),
        json.dumps({"id": "00", "pinned": True, "expires": 0.0, "name": ""}), "[]", line_about(first)[:50],
    ]  # fmt: skip
    file = tmp_path / "disk/documents.jsonl"
    file.write_text("\n".join(lines))
    for _ in range(2):
        with caplog.at_level(logging.INFO), closing(engine_of(tmp_path)) as engine:
            found = [known(engine, list(one.tokens)) for one in (first, second, third)]
            assert [one.pinned for one in found] == [True, False, False], "a row is newer than a line"
            assert [one.expires for one in found] == [0.0, 8e9, newest]
            assert [one.name for one in found[:2]] == ["old.txt", "new.txt"]
        assert not file.exists()
    assert caplog.text.count(f"imported the pins, time limits and names of 2 documents from {file}") == 1


def test_a_cache_server_imports_the_file_of_each_layout(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        line = line_about(learn(engine, A))
    for layout in ("2x4096", "2x8192"):
        (tmp_path / f"documents-{layout}.jsonl").write_text(line)
    assert [len(list(KeptDocuments(tmp_path, layout).read())) for layout in ("", "2x4096", "2x8192")] == [0, 1, 1]


def test_a_database_that_cannot_be_written_is_said_and_the_pin_holds(tmp_path, caplog):
    with closing(engine_of(tmp_path)) as engine:
        (tmp_path / "disk" / FILE).mkdir()
        with caplog.at_level(logging.WARNING):
            engine.keeper.pin([learn(engine, A)])
        assert "end with this process" in caplog.text
        others(engine, 10)
        assert all(places(engine, A))
    with closing(engine_of(tmp_path)) as engine:
        assert "cannot read all pins" in caplog.text
        assert (tmp_path / "disk" / FILE).is_dir(), "it may be readable later"


def test_looking_at_a_prompt_counts_as_before(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        learn(engine, A)
        (found,) = engine.documents(A, [Span(0, len(A))])
        (noted,) = engine.note(A, [found], used=True)
        assert (noted.uses, noted.kept) == (1, False)


def test_the_time_of_the_last_use_is_that_of_the_record_after_a_restart(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        learn(engine, A, name="a")
    with closing(sqlite3.connect(tmp_path / "disk" / index.FILE)) as database, database:
        database.execute("UPDATE records SET used = ?", (10**18,))
    with closing(engine_of(tmp_path)) as engine:
        assert (known(engine, A).used, known(engine, A).name) == (1e9, "a")


# -- what a review has found -----------------------------------------------------------------------------------------


def test_a_document_whose_second_reservation_is_interrupted_holds_nothing(monkeypatch):
    """As by Ctrl-C. The first chunk stayed reserved, so that no engine could learn the document."""
    with closing(engine_of()) as engine:
        begin = engine.store.begin

        def interrupted(metas):
            if metas[0].first > 0:
                raise KeyboardInterrupt
            return begin(metas)

        with monkeypatch.context() as patch:
            patch.setattr(engine.store, "begin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                learn(engine, A)
        assert engine.store.held() == 0
        assert all(places(engine, learn(engine, A).tokens))


def test_a_removed_document_does_not_come_back_from_the_queue_or_from_a_worker(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        document = learn(engine, A)
        engine.keeper.pin([document])
        for key in document.keys:
            engine.store.forget(key)
        engine.keeper.restore()
        assert len(engine.learning) == 1
        slots = engine.begin_document(document.namespace, A)  # A worker fills them meanwhile.
        engine.keeper.remove([document])
        assert len(engine.learning) == 0
        for reservation in slots:
            engine.store.commit([reservation])
        assert places(engine, A) == [None, None]
        learn(engine, A)
        assert all(places(engine, A))


def found_in(engine, prompt):
    return [(one.span.start, one.span.stop, list(one.known.tokens)) for one in engine.with_known(prompt, ())]


@pytest.mark.parametrize("whole", [False, True])
def test_a_document_hides_others_only_if_it_is_stored(whole):
    """Text between marks of a prompt was taken for a document, and hid stored documents until it was learned."""
    first, second = ([number * 1000 + i for i in range(40)] for number in (1, 2))
    joined = [*first, *second]
    with closing(engine_of(slots=10, enable_blending=True)) as engine:
        learn(engine, first)
        learn(engine, second)
        prompt, separate = [1, 2, *joined, 3], [(2, 42, first), (42, 82, second)]
        together = [(2, 82, joined)]
        assert found_in(engine, prompt) == separate
        new = [slot for slot in engine.begin_document(known(engine, first).namespace, joined) if slot]
        assert found_in(engine, prompt) == separate, "it is being learned"
        if whole:
            engine.store.commit(new)
            assert found_in(engine, prompt) == together
            lose(engine.store, known(engine, joined).keys[-1])
            assert found_in(engine, prompt) == together, "a part that is stored is longer than the others"
            for key in known(engine, joined).keys[-3:]:
                lose(engine.store, key)
            assert found_in(engine, prompt) == separate, "what is left of it is shorter than the others"
        else:
            for slot in new:
                engine.store.abort(slot)
            assert found_in(engine, prompt) == separate, "its learning was cancelled"
            engine.keeper.remove([known(engine, first), known(engine, second)])
            assert found_in(engine, prompt) == together, "it is found to be learned again"


def test_a_tier_that_is_away_makes_nobody_compute_pinned_documents_again(tmp_path):
    remote = DictTier()
    remote.name, remote.shared = "redis", True
    with closing(engine_of(slots=8, tiers=[remote])) as engine:
        document = learn(engine, A)
        engine.keeper.pin([document])
        lose(engine.store, document.keys[0])
        remote.usable = False
        engine.keeper.restore()
        assert len(engine.learning) == 0
        remote.usable = True
        engine.keeper.restore()
        assert all(places(engine, A))


@pytest.mark.parametrize("removed", ["another one", "the same"])
def test_nobody_waits_for_a_tier_from_which_a_pinned_document_is_restored(tmp_path, removed):
    """Restoring held a lock while it waited for a slow tier, and everybody waited who pinned or removed something.

    A document that is removed meanwhile is not written again.
    """
    reading, gate, events = threading.Event(), threading.Event(), []

    def slow(verb, _):
        if verb == "read":
            reading.set()
            gate.wait(60)

    remote = Faulty(Shared(), slow)
    disk = DiskTier(tmp_path / "disk", 40 * RECORD, document_share=0.5)
    with closing(engine_of(tmp_path, records=40, tiers=[disk, remote])) as engine:
        pinned, other = learn(engine, A), learn(engine, B)
        engine.keeper.pin([pinned])
        for key in pinned.keys:
            disk.delete(key)
            lose(engine.store, key)

        def restore():
            engine.keeper.restore()
            events.append("restored")

        thread = threading.Thread(target=restore)
        thread.start()
        assert reading.wait(60)
        engine.keeper.pin([other])
        engine.keeper.unpin([other])
        engine.keeper.remove([other if removed == "another one" else pinned])
        events.append("removed")
        gate.set()
        thread.join(60)
        engine.store.flush()
        assert events == ["removed", "restored"]
        there = removed == "another one"
        assert [bool(place) for place in places(engine, A)] == [there, there]
        assert disk.contains(pinned.keys) == remote.inner.contains(pinned.keys) == [there, there]
        assert places(engine, B) == [None, None] if there else all(places(engine, B))


def test_a_version_that_is_removed_while_it_is_restored_leaves_the_chunks_of_the_other_one(tmp_path, monkeypatch):
    with closing(engine_of(tmp_path)) as engine:
        old, new = learn(engine, A), learn(engine, [*A[:CHUNK], 7, 8, 9])
        engine.keeper.pin([old])
        monkeypatch.setattr(engine.store, "spread", lambda keys: engine.keeper.remove([old]) or [])
        engine.keeper.restore()
        assert places(engine, A)[1] is None
        assert all(places(engine, new.tokens.tolist()))


def test_pins_leave_room_for_others_if_there_is_a_disk(tmp_path):
    long = list(range(7000, 7000 + 6 * CHUNK))
    with closing(engine_of(tmp_path, slots=8, records=40, document_share=1.0)) as engine:
        engine.keeper.pin([learn(engine, tokens) for tokens in (A, B, C, D)])
        assert engine.fits(len(long))
        assert learn(engine, long)
        engine.store.flush()
        with engine.store.pinned(known(engine, long).keys) as pins:
            assert all(pins)
        assert all(places(engine, A) + places(engine, B) + places(engine, C) + places(engine, D))
    with closing(engine_of(slots=8)) as engine:
        engine.keeper.pin([learn(engine, A), learn(engine, B)])
        assert not engine.fits(5 * CHUNK)


def test_a_smaller_disk_does_not_evict_what_is_pinned_at_the_start(tmp_path):
    with closing(engine_of(tmp_path, records=20)) as engine:
        engine.keeper.pin([learn(engine, A)])
        others(engine, 8)
    with closing(engine_of(tmp_path, records=6)) as engine:
        assert all(places(engine, A))
        assert sum(one.bytes for one in tiers_of(engine.store)[0].entries()) <= 6 * RECORD


def test_pins_and_limits_survive_a_time_with_another_chunk_size(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.pin([learn(engine, A)])
        engine.keeper.expire([known(engine, A)], 3600)
    with closing(engine_of(tmp_path, chunk_size=8)) as engine:
        assert not [one for one in engine.known.list() if one.kept]
    with closing(engine_of(tmp_path)) as engine:
        assert known(engine, A).pinned
        assert known(engine, A).expires > time.time()


def test_new_weights_forget_pins_and_their_room(tmp_path):
    with closing(engine_of(tmp_path, records=8)) as engine:
        engine.keeper.pin([learn(engine, A), learn(engine, B)])
        engine.begin_anew()
        engine.keeper.pin([learn(engine, C), learn(engine, D)])
    with closing(engine_of(tmp_path, records=8)) as engine:
        assert known(engine, A).pinned
        assert not [one for one in engine.known.list() if list(one.tokens) in (C, D) and one.pinned]


def test_the_database_is_for_this_user_alone_and_has_nothing_of_removed_documents(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.pin([learn(engine, A, name="a.txt"), learn(engine, B, name="b.txt")])
        path = tmp_path / "disk" / FILE
        assert b"a.txt" in path.read_bytes()
        engine.keeper.remove([known(engine, A)])
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"a.txt" not in path.read_bytes()
        assert len(list(path.parent.glob(f"{FILE}*"))) == 1, "no journal stays"


def test_pins_of_a_tenant_with_a_secret_key_are_encrypted(tmp_path):
    key = base64.b64encode(bytes(32)).decode()
    with closing(engine_of(tmp_path, encryption_key=key)) as engine:
        engine.keeper.pin([learn(engine, A, name="a.txt")])
    kept = b"".join(file.read_bytes() for file in (tmp_path / "disk").rglob("*") if file.is_file())
    assert b"a.txt" not in kept
    assert pack_tokens(A).encode() not in kept
    with closing(engine_of(tmp_path, encryption_key=key)) as engine:
        assert (known(engine, A).pinned, known(engine, A).name) == (True, "a.txt")
    with closing(engine_of(tmp_path)) as engine:
        assert engine.known.list() == [], "without the key"
    with closing(engine_of(tmp_path, encryption_key=key)) as engine:
        assert known(engine, A).pinned


def test_an_engine_that_nobody_has_any_more_ends_its_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "EXPIRY_SECONDS", 0.01)
    engine = engine_of()
    engine.keeper.pin([learn(engine, A)])
    (thread,) = threads_named("lmc-keeper")
    engine.store.close()
    del engine
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_documents_with_names_are_forgotten_when_there_are_too_many(tmp_path):
    with closing(engine_of(tmp_path, records=100, max_document_index_size=3 * known_bytes(20, 2) / GIB)) as engine:
        engine.keeper.pin([learn(engine, A, name="a")])
        for number in range(10):
            learn(engine, [5000 + number * 20 + i for i in range(20)], name=f"n{number}")
        assert {one.name for one in engine.known.list()} == {"a", "n8", "n9"}


def test_a_change_is_noted_while_another_thread_writes(tmp_path, monkeypatch):
    with closing(engine_of(tmp_path, records=40)) as engine:
        first, second = learn(engine, A), learn(engine, B)
        engine.keeper.pin([first, learn(engine, C)])
        write, pinning = KeptDocuments.write, threading.Thread(target=engine.keeper.expire, args=([second], 3600))

        def while_another_pins(self, documents):
            monkeypatch.undo()
            pinning.start()
            pinning.join(0.2)  # It must wait.
            write(self, documents)

        monkeypatch.setattr(KeptDocuments, "write", while_another_pins)
        engine.keeper.remove([first])
        pinning.join(30)
        monkeypatch.undo()
    with closing(engine_of(tmp_path, records=40)) as engine:
        assert (known(engine, B).expires > 0, known(engine, C).pinned) == (True, True)


def test_a_killed_process_leaves_whole_rows(tmp_path):
    """The process is killed in the middle of a commit: the journal has what was there before."""
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.pin([learn(engine, A), learn(engine, B)])
    path = tmp_path / "disk" / FILE
    script = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA cache_size = 1")
database.execute("PRAGMA cache_spill = 1")
database.execute("BEGIN")
for _ in range(200):
    columns = "namespace, model, tenant, keys, 0, 0, text, 0"
    database.execute(f"INSERT INTO kept SELECT layout, id || random(), {columns} FROM kept LIMIT 1")
database.execute("UPDATE kept SET pinned = 0")
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == 9
    assert path.with_name(f"{FILE}-journal").exists()
    with closing(engine_of(tmp_path)) as engine:
        assert [known(engine, tokens).pinned for tokens in (A, B)] == [True, True]


def test_what_is_noted_is_as_before_when_the_disk_is_full(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        gone = learn(engine, A)
        engine.keeper.pin([gone, learn(engine, B)])
    rows(tmp_path, "CREATE TRIGGER full BEFORE DELETE ON kept BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    with pytest.raises(InputError, match="disk is full"):
        forget_kept(tmp_path / "disk", {gone.id})
    assert rows(tmp_path, "SELECT count(*) FROM kept") == [(2,)]


def test_all_pins_can_be_forgotten_also_of_documents_whose_records_are_gone(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.pin([learn(engine, A), learn(engine, B)])
        namespace = engine.namespace(RecordKind.DOCUMENT, "").hex()
        keys = {key for tokens in (A, B) for key in known(engine, tokens).keys}
    disk = tmp_path / "disk"
    assert pinned_keys(disk) == keys
    forget_kept(disk, (), "ff" if namespace[:2] != "ff" else "00")
    assert rows(tmp_path, "SELECT count(*) FROM kept") == [(2,)]
    forget_kept(disk, (), namespace.upper())  # as `lmc clear --namespace` takes it
    assert not (disk / FILE).exists()
    forget_kept(disk, (), "")
    assert pinned_keys(disk) == set()


def test_a_pin_after_one_that_could_not_be_noted_is_noted_with_it(tmp_path, monkeypatch, caplog):
    with closing(engine_of(tmp_path)) as engine:
        first, second = learn(engine, A), learn(engine, B)
        with monkeypatch.context() as patch:
            patch.setattr(KeptDocuments, "write", Mock(side_effect=sqlite3.OperationalError("disk is full")))
            engine.keeper.pin([first])
        assert "(disk is full): they will end with this process" in caplog.text
        engine.keeper.pin([second])
    with closing(engine_of(tmp_path)) as engine:
        assert [known(engine, tokens).pinned for tokens in (A, B)] == [True, True]


@pytest.mark.parametrize("when", ["later", "at the end"])
def test_a_removal_that_could_not_be_noted_is_noted_when_the_database_is_free(tmp_path, monkeypatch, when, caplog):
    """A backup read the database: the removed document was pinned again after a restart, and computed again."""
    monkeypatch.setattr(kept, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(keeper, "EXPIRY_SECONDS", 0.01 if when == "later" else 3600)
    with closing(engine_of(tmp_path)) as engine:
        document = learn(engine, A)
        engine.keeper.pin([document])
        with closing(sqlite3.connect(tmp_path / "disk" / FILE, isolation_level=None)) as backup:
            backup.execute("BEGIN")
            backup.execute("SELECT * FROM kept").fetchone()
            engine.keeper.remove([document])
            assert rows(tmp_path, "SELECT count(*) FROM kept") == [(1,)]
        if when == "later":
            eventually(lambda: rows(tmp_path, "SELECT count(*) FROM kept") == [(0,)])
    assert rows(tmp_path, "SELECT count(*) FROM kept") == [(0,)]
    assert caplog.text.count("cannot write the pins") == 1


def rows(folder, query):
    """The result of a query in the database of kept documents."""
    with closing(sqlite3.connect(folder / "disk" / FILE)) as database, database:
        return database.execute(query).fetchall()


@pytest.mark.parametrize("before", ["", "draft"])
def test_a_name_that_is_given_to_a_pinned_document_survives_a_restart(tmp_path, before):
    def admin(engine):
        return DocumentAdmin(lambda: [engine], lambda tokens, model: "", engine.background)

    with closing(engine_of(tmp_path)) as engine:
        document = learn(engine, A, name=before)
        engine.keeper.pin([document])
        assert admin(engine).change(document.id, {"name": "contract"})["documents"][0]["name"] == "contract"
    with closing(engine_of(tmp_path)) as engine:
        assert [(one.name, one.pinned) for one in engine.known.list()] == [("contract", True)]


def name_again(engine, document, name):
    """Learn the text of a document under another name."""
    view = engine.documents(document.tokens, [Span(0, len(document.tokens))], "")
    engine.note(list(document.tokens), view, "", name=name)


def test_names_that_a_document_gets_after_it_was_learned_survive_a_restart(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        name_again(engine, learn(engine, A, name="first.md"), "second.md")
        learn(engine, B, name="other.md")
    for _ in range(2):
        with closing(engine_of(tmp_path)) as engine:
            assert known(engine, A).names == ["first.md", "second.md"]
            assert known(engine, B).names == ["other.md"]
            assert [one.renamed for one in (known(engine, A), known(engine, B))] == [True, False]
    with closing(engine_of(tmp_path)) as engine:
        engine.keeper.remove(engine.known.named("second.md"))
        learn(engine, A, name="third.md")
    with closing(engine_of(tmp_path)) as engine:
        assert known(engine, A).names == ["third.md"], "names went with the document"


def test_the_row_of_a_renamed_document_goes_with_it_also_after_a_pin(tmp_path):
    """A document that was named before its record was read is written with its names when it is pinned."""
    with closing(engine_of(tmp_path)) as engine:
        document = learn(engine, A, name="second.md")
        again = {"name": "first.md", "used": 0.0}  # as its record says
        engine.known.recall(document.namespace, document.tokens, document.keys, **again)
        assert document.renamed
        engine.keeper.pin([document])
        engine.keeper.unpin([document])
        assert rows(tmp_path, "SELECT count(*) FROM kept") == [(1,)]
        engine.keeper.remove([document])
        assert rows(tmp_path, "SELECT count(*) FROM kept") == [(0,)]


def test_names_are_kept_when_a_pin_ends_and_go_with_the_chunks_of_their_document(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        document = learn(engine, A, name="first.md")
        engine.keeper.pin([document])
        name_again(engine, document, "second.md")
        engine.keeper.unpin([document])
    with closing(engine_of(tmp_path)) as engine:
        assert known(engine, A).names == ["first.md", "second.md"]
        others(engine, 12)
        assert set(places(engine, A)) == {None}
    with closing(engine_of(tmp_path)) as engine:
        assert A not in [list(one.tokens) for one in engine.known.list()]
    assert rows(tmp_path, "SELECT count(*) FROM kept") == [(0,)]


def test_documents_with_another_chunk_size_are_not_listed(tmp_path):
    """Earlier, such documents were listed, under ids that no document has, and removing them removed nothing."""
    with closing(engine_of(tmp_path)) as engine:
        learn(engine, A)
    with closing(engine_of(tmp_path, chunk_size=8)) as engine:
        assert engine.known.list() == []
    with closing(engine_of(tmp_path)) as engine:
        assert [list(one.tokens) for one in engine.known.list()] == [A]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_documents_that_several_arenas_know_are_listed_once(limit):
    """Arenas with equal chunks read the same disk. Each has its own time of the last use."""
    with closing(engine_of(slots=32)) as one, closing(engine_of(slots=32)) as other:
        documents = [[number * 20 + i for i in range(20)] for number in range(6)]
        for tokens in documents:
            learn(one, tokens)
        for tokens in (documents[4], documents[0], documents[5]):
            learn(other, tokens)
        one.known.use(known(one, documents[2]).keys[-1:])
        admin = DocumentAdmin(lambda: [one, other], lambda tokens, model: "", one.background)
        listed, after = [], ""
        while True:
            page = admin.listed(limit, after)
            listed += [document["id"] for document in page["documents"]]
            if not (after := page["next"]):
                break
        assert listed == [known(one, documents[number]).id for number in (2, 5, 0, 4, 3, 1)]
        assert page["total"] == admin.count() == 6


def test_documents_of_several_arenas_are_counted_without_a_look_at_each_of_them(monkeypatch):
    with closing(engine_of(slots=32, model="m")) as one, closing(engine_of(slots=32, model="n")) as other:
        for number in range(6):
            learn(one, [number * 20 + i for i in range(20)], name=f"of one {number}")
        for number in range(4, 9):
            learn(other, [number * 20 + i for i in range(20)], name=f"of the other {number}")
        one.known.remove([known(one, list(range(20)))], "by somebody")
        admin = DocumentAdmin(lambda: [one, other], lambda tokens, model: "", one.background)
        assert admin.listed(1, only=Filter(name="of one"))["total"] == 5
        assert admin.listed(1, only=Filter(name="the other"))["total"] == 5
        assert admin.listed(1, tenant="")["total"] == 8
        assert admin.listed(1, tenant="t")["total"] == 0
        for source in (one, other):
            monkeypatch.setattr(source.known, "list", Mock(side_effect=AssertionError("all are looked at")))
        assert admin.listed(1)["total"] == admin.count() == 8
        assert admin.listed(1, only=Filter(model="n"))["total"] == 5
        assert DocumentAdmin(list, lambda tokens, model: "", one.background).count() == 0


def test_documents_without_a_time_limit_any_more_are_forgotten_as_others_are():
    with closing(engine_of(slots=64, max_document_index_size=5 * known_bytes(20, 2) / GIB)) as engine:
        limited = []
        for number in range(20):
            limited.append(learn(engine, [number * 20 + i for i in range(20)]))
            engine.keeper.expire(limited[-1:], 1e6)
        for one in limited:
            engine.keeper.expire([one], None)
        others(engine, 5)
        assert {one.tokens[0] for one in engine.known.list()} == {5000, 5020, 5040, 5060, 5080}


def test_the_capacity_of_an_engine_that_does_not_blend_is_that_of_exact_chunks(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        blends = engine.capacity()
        engine.shape = replace(engine.shape, kv_heads=0)  # The tokens of these pages cannot be read.
        assert engine.capacity() == blends


# -- integrity -------------------------------------------------------------------------------------------------------


def test_a_store_that_is_checked_regularly_has_its_faults_logged(monkeypatch, caplog):
    for name in ("EXPIRY_SECONDS", "RESTORE_SECONDS"):
        monkeypatch.setattr(keeper, name, 0.001)
    monkeypatch.setenv("LMC_CHECK_INTEGRITY", "true")
    with closing(engine_of()) as engine, with_stray_holder(engine.store, 0):
        while not caplog.records:
            time.sleep(0.001)
    assert caplog.records[0].levelname == "ERROR"
    assert caplog.records[0].message.endswith("host: slot 0 is empty and held or being filled")


@pytest.mark.parametrize("value", ["", "false", None])
def test_a_store_is_not_checked_unless_that_is_requested(value, monkeypatch, caplog):
    if value is not None:
        monkeypatch.setenv("LMC_CHECK_INTEGRITY", value)
    with closing(engine_of()) as engine:
        with with_stray_holder(engine.store, 0):
            engine.keeper.check_integrity()
        assert not threads_named("lmc-keeper")
    assert caplog.records == []
