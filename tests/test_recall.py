"""An engine that starts over many stored chunks serves before it has read what all of them are."""

import threading
from collections.abc import Iterator

import pytest
from storage_fakes import eventually, key_of, meta_of
from test_keeper import A, B, C, engine_of, learn

from lmc.background import Background
from lmc.documents.known import known_bytes
from lmc.engine import recall
from lmc.engine.recall import Recall
from lmc.keys import RecordKind
from lmc.shapes import GIB
from lmc.storage.contract import StoredChunk
from lmc.storage.tiers.disk import tier
from lmc.storage.tiers.disk.reader import DiskReader


class Listing:
    """A listing of stored chunks that waits before the one numbered `pause`, until it may go on."""

    def __init__(self, chunks: list[StoredChunk], pause: int) -> None:
        self.chunks, self.pause, self.goes_on = chunks, pause, threading.Event()

    def __iter__(self) -> Iterator[StoredChunk]:
        for number, chunk in enumerate(self.chunks):
            if number == self.pause:
                self.goes_on.wait()
            yield chunk


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(recall, "START_SECONDS", 0.05)


CHUNKS = [StoredChunk("disk", meta_of(key), 1.0) for key in map(key_of, range(4))]


def test_the_rest_is_read_after_the_start():
    listing, taken, prepared = Listing(CHUNKS, pause=2), [], []
    reading = Recall(listing, taken.append, lambda: prepared.append(len(taken)), Background())
    eventually(lambda: reading.count == 2)
    assert (taken, reading.ended) == (CHUNKS[:2], False)
    listing.goes_on.set()
    eventually(lambda: reading.ended)
    assert (taken, prepared) == (CHUNKS, [4])


def test_nothing_is_taken_after_a_stop():
    listing, taken = Listing(CHUNKS, pause=2), []
    reading = Recall(listing, taken.append, lambda: None, Background())
    eventually(lambda: reading.count == 2)
    reading.stop()
    listing.goes_on.set()
    eventually(lambda: reading.ended)
    assert taken == CHUNKS[:2]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("the disk is away"), "the disk is away; documents after the first 1 chunks"),
        (ZeroDivisionError(), "failed unexpectedly after 1 chunks"),
    ],
)
def test_an_error_ends_the_reading_and_not_the_engine(error, said, caplog):
    def failing():
        yield CHUNKS[0]
        raise error

    reading = Recall(failing(), lambda _: None, lambda: None, Background())
    eventually(lambda: reading.ended)
    assert said in caplog.text


def test_documents_are_known_in_the_order_of_their_use_and_the_newest_survive(tmp_path):
    engine = engine_of(tmp_path)
    for document in (A, B, C):
        learn(engine, document)
    engine.close()
    again = engine_of(tmp_path, max_document_index_size=2 * known_bytes(len(A), 2) / GIB)
    eventually(lambda: again.recall.ended)
    assert [document.tokens.tolist() for document in again.known.latest(9)[1]] == [C, B]
    again.close()


def test_a_document_that_was_removed_during_the_listing_stays_removed(tmp_path):
    engine = engine_of(tmp_path)
    document = learn(engine, A)
    engine.keeper.remove([document])
    namespace = engine.namespace(RecordKind.DOCUMENT)
    assert engine.known.recall(namespace, A, document.keys, name="", used=1.0) is document
    assert document.removed
    engine.close()


def test_a_disk_serves_what_it_has_found_while_it_reads_the_rest(tmp_path, monkeypatch):
    """A directory without an index took its time for each record before the first lookup was answered."""
    engine = engine_of(tmp_path)
    documents = [learn(engine, document) for document in (A, B)]
    engine.close()
    (tmp_path / "disk" / "index.sqlite").unlink()
    waits, goes_on = threading.Event(), threading.Event()

    def waits_at_first(path, key, *more):
        if key == documents[1].keys[-1]:
            waits.set()
            goes_on.wait()
        return DiskReader(path, key, *more)

    monkeypatch.setattr(tier, "DiskReader", waits_at_first)
    monkeypatch.setattr(tier, "START_SECONDS", 0.2)
    again = engine_of(tmp_path)
    assert waits.wait(60)
    assert again.store.lookup(documents[0].keys) == ["disk", "disk"]
    assert again.store.lookup(documents[1].keys[-1:]) == [None]
    goes_on.set()
    eventually(lambda: again.recall.ended)
    assert again.store.lookup(documents[1].keys) == ["disk", "disk"]
    assert {document.id for document in again.known.list()} == {document.id for document in documents}
    again.close()
