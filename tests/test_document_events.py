"""Document events from the change log, without an engine, and from the scheduler with a store that evicts."""

import hashlib
import tracemalloc
from dataclasses import replace

import pytest
from storage_fakes import DictTier, key_of, meta_of
from vllm_fakes import DOC_A, DOC_B, learn

from lmc.background import Background
from lmc.documents.events import DocumentEvents, DocumentMoved
from lmc.documents.known import KnownDocuments
from lmc.keys import RecordKind, tokens_digest
from lmc.storage.change_log import ChangeLog


class Router:
    """Follows the events: which documents are on which medium."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, str], DocumentMoved] = {}

    def follow(self, moves) -> set[tuple[str, str]]:
        for moved in moves:
            place = moved.medium, moved.document
            if moved.stored:
                assert place not in self.there, "announced twice"
                self.there[place] = moved
            else:
                assert replace(self.there.pop(place), stored=False) == moved
        return set(self.there)


class World:
    """Documents by their chunks, and a log of where those are."""

    def __init__(self, kept: int) -> None:
        self.log, self.known, self.router = ChangeLog(kept), KnownDocuments(), Router()
        self.events = DocumentEvents(self.log, self.known.get, lambda namespace: "tenant", Background())

    def document(self, *chunks: str) -> str:
        return self.known.note(bytes(32), [len(chunks), ord(chunks[-1])], list(map(key_of, chunks))).id

    def appeared(self, place, *chunks):
        for chunk in chunks:
            self.log.appeared(place, replace(meta_of(key_of(chunk)), kind=RecordKind.DOCUMENT))

    def left(self, place, *chunks):
        for chunk in chunks:
            self.log.left(place, key_of(chunk))

    def follow(self):
        return self.router.follow(self.events.take())


@pytest.fixture(params=[1000, 1])
def world(request):
    """With one kept change, every step starts again from what is present."""
    return World(request.param)


def test_a_document_is_there_while_all_of_its_chunks_are(world):
    one = world.document("a", "b")
    world.appeared("host", "b")
    assert world.follow() == set()
    world.appeared("host", "a")
    assert world.follow() == {("CPU", one)}
    world.appeared("disk", "a", "b")
    assert world.follow() == {("CPU", one), ("STORAGE", one)}
    world.left("host", "a")
    assert world.follow() == {("STORAGE", one)}
    world.appeared("host", "a")
    assert world.follow() == {("CPU", one), ("STORAGE", one)}
    world.left("disk", "b")
    world.left("host", "b", "a")
    assert world.follow() == set()
    world.appeared("host", "a", "b")
    assert world.follow() == {("CPU", one)}


def test_documents_that_begin_alike_go_together(world):
    one, two = world.document("a", "b"), world.document("a", "c")
    world.appeared("host", "a", "b", "c")
    assert world.follow() == {("CPU", one), ("CPU", two)}
    world.left("host", "c")
    assert world.follow() == {("CPU", one)}
    world.left("host", "a")
    assert world.follow() == set()


def test_places_without_a_medium_other_chunks_and_unknown_documents_are_left_out(world):
    world.document("a")
    world.appeared("redis", "a")
    world.appeared("host", "never noted")
    world.log.appeared("host", meta_of(key_of("a")))
    assert world.follow() == set()
    assert world.events.take() == []


def test_a_document_that_becomes_known_after_its_last_chunk_is_announced(world):
    """A publisher that asked between the two never announced it."""
    world.appeared("host", "a", "b", "c")
    assert world.follow() == set()
    one = world.document("a", "b")
    assert world.follow() == {("CPU", one)}
    world.left("host", "c")
    world.document("a", "c")
    assert world.follow() == {("CPU", one)}
    world.left("host", "b")
    assert world.follow() == set()


def test_events_keep_little_of_each_document_however_often_it_is_stored():
    """With a dictionary for each chunk, and digests and ids as text, a document took 1.4 KB."""
    count, chunks = 4000, 2
    log, known = ChangeLog(), KnownDocuments()
    events = DocumentEvents(log, known.get, lambda namespace: "tenant", Background())
    keys = [[key_of(f"{number} {chunk}") for chunk in range(chunks)] for number in range(count)]
    for number, of_document in enumerate(keys):
        known.note(bytes(32), [number] * 500, of_document, model="m")

    def change(act):
        for key in (key for of_document in keys for key in of_document):
            act(key)
        log.counts()
        before = tracemalloc.get_traced_memory()[0]
        assert len(events.take()) == count
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        taken = 0
        for _ in range(3):
            taken += change(lambda key: log.appeared("disk", replace(meta_of(key), kind=RecordKind.DOCUMENT)))
            assert taken < 700 * count
            taken += change(lambda key: log.left("disk", key))
    finally:
        tracemalloc.stop()


def test_a_document_that_is_no_longer_known_is_withdrawn(world):
    one, two = world.document("a", "b"), world.document("a", "c")
    world.appeared("host", "a", "b", "c")
    assert world.follow() == {("CPU", one), ("CPU", two)}
    world.known.clear()
    world.left("host", "b")
    assert world.follow() == {("CPU", two)}
    world.left("host", "a", "c")
    assert world.follow() == set()


def test_an_event_says_what_a_router_needs(world):
    one = world.document("a")
    world.appeared("host", "a")
    (moved,) = world.events.take()
    assert (moved.document, moved.tokens, moved.medium) == (one, 2, "CPU")
    assert moved.digest == tokens_digest([1, ord("a")])
    assert moved.salt == hashlib.sha256(b"tenant").hexdigest()


def test_a_router_computes_the_digest_of_a_document_without_lmc():
    packed = bytes.fromhex("01000000 61000000 00000100 ffffffff")
    assert tokens_digest([1, 0x61, 0x10000, 0xFFFFFFFF]) == hashlib.sha256(packed).hexdigest()


def test_what_a_scheduler_has_learned_and_lost_is_announced(make):
    router = Router()
    lab = make(DictTier(), slots=8)
    events = DocumentEvents(lab.store.changes, lab.engine.known.get, lab.engine.names.salt_of, Background())
    learn(lab, DOC_A)
    lab.settle()
    sent = events.take()
    assert router.follow(sent) == {("CPU", lab.engine.known.list()[0].id)}
    assert {(moved.tokens, moved.digest, moved.salt) for moved in sent} == {(len(DOC_A), tokens_digest(DOC_A), "")}
    learn(lab, DOC_B, cache_salt="tenant")
    lab.serve("pages", list(range(1, 50)))
    lab.settle()
    for document in lab.engine.known.list():
        for key in document.keys:
            lab.store.forget(key)
    sent = events.take()
    assert router.follow(sent) == set()
    assert any(moved.salt for moved in sent)
