"""Tests that the clients of a cache server share the documents that they have to learn, and learn each one once."""

import random
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from models import random_model
from service_fakes import arena_for, beat, serving

from lmc.blend.segments import Span
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.documents import learn_queue
from lmc.documents.known import KnownDocuments
from lmc.documents.learn_queue import LearnQueue, Unlearned
from lmc.documents.server import LearningEngine
from lmc.engine import CacheEngine, cache_engine
from lmc.engine.recall import Recall
from lmc.keys import RecordKind
from lmc.server import document_changes, messages
from lmc.server.client import remote_store
from lmc.server.client.remote_learning import RemoteLearning
from lmc.server.document_changes import MAX_SENT_DOCUMENTS, DocumentChanges
from lmc.server.learning import (
    CLAIM_SECONDS,
    MAX_CLAIMED_DOCUMENTS,
    MAX_CLAIMS,
    MAX_WAITING_DOCUMENTS,
    WaitingDocuments,
)

ONE, TWO = b"\1" * 32, b"\2" * 32  # namespaces


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def document(number, namespace=ONE):
    return Unlearned(namespace, (number, number + 1))


def test_a_document_is_given_to_one_client_that_has_time_and_did_not_offer_it():
    clock = Clock()
    waiting = WaitingDocuments(clock)
    waiting.offer("a", document(1), "met it")
    assert waiting.take("met it", {ONE}, has_time=True) == []
    assert waiting.take("busy", {ONE}, has_time=False) == []
    assert waiting.take("other tenant", {TWO}, has_time=True) == []
    assert waiting.take("idle", {ONE}, has_time=True) == [document(1)]
    assert waiting.take("also idle", {ONE}, has_time=True) == []
    clock.now += CLAIM_SECONDS + 1
    assert waiting.take("also idle", {ONE}, has_time=True) == [document(1)]


def test_a_document_waits_until_it_is_learned_or_nobody_can():
    clock = Clock()
    waiting = WaitingDocuments(clock)
    waiting.offer("a", document(1), "met it")
    waiting.discard("a")
    assert waiting.take("idle", {ONE}, has_time=True) == []
    waiting.offer("b", document(2), "met it")
    for _ in range(MAX_CLAIMS):
        assert waiting.take("idle", {ONE}, has_time=True) == [document(2)]
        clock.now += CLAIM_SECONDS + 1
    assert waiting.take("idle", {ONE}, has_time=True) == []
    assert len(waiting) == 0


def test_what_a_client_has_met_or_got_is_given_to_others_when_it_has_gone():
    waiting = WaitingDocuments(Clock())
    waiting.offer("a", document(1), "met it")
    assert waiting.take("idle", {ONE}, has_time=True) == [document(1)]
    waiting.left("idle")
    assert waiting.take("idle again", {ONE}, has_time=True) == [document(1)]
    waiting.left("idle again")
    waiting.left("met it")
    assert waiting.take("met it", {ONE}, has_time=True) == [document(1)]


def test_a_pinned_document_that_is_nowhere_is_given_to_clients_without_time():
    waiting = WaitingDocuments(Clock())
    waiting.want("a", document(1))
    assert waiting.take("busy", {ONE}, has_time=False) == [document(1)]


def test_clients_get_some_at_a_time_and_the_oldest_are_dropped():
    waiting = WaitingDocuments(Clock())
    for number in range(MAX_WAITING_DOCUMENTS + 3):
        waiting.offer(str(number), document(number), "met it")
    assert len(waiting) == MAX_WAITING_DOCUMENTS
    assert waiting.take("idle", {ONE}, has_time=True) == [
        document(3 + number) for number in range(MAX_CLAIMED_DOCUMENTS)
    ]


def test_an_engine_offers_what_has_waited_and_says_each_thing_once():
    queue, got = LearnQueue(room=100), []
    learning = RemoteLearning(LearningEngine(queue, lambda: [ONE, TWO], lambda: True, got.append))
    first = learning.news()
    assert (first.offered, first.namespaces, first.has_time) == ([], [ONE, TWO], True)
    queue.add(document(1))
    second = learning.news()
    assert (second.offered, second.namespaces, second.has_time) == ([], [], False)
    (offered,) = learning.news().offered
    assert (offered.namespace, offered.tokens) == (ONE, b"\1\0\0\0\2\0\0\0")
    assert learning.news().offered == []
    learning.got([document(5)])
    queue.add(document(5))
    learning.news()
    assert learning.news().offered == []  # The server knows of it.
    assert got == [document(5)]
    learning.begin()
    learning.news()
    assert len(learning.news().offered) == 2


def settings_of(server, **more):
    # A deadline for a machine that is busy with something else.
    return Settings(server=server.path, enable_blending=True, chunk_size=16, load_deadline=30.0, **more)


@contextmanager
def engine(server, **settings):
    with CachedModel(random_model(), settings_of(server, **settings), [7, 7]) as model:
        yield model


def queue(model, tokens):
    model.engine.learning.add(Unlearned(model.engine.namespace(RecordKind.DOCUMENT), tuple(tokens)))


def wait_for(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("dies", [False, True])
def test_an_engine_that_has_time_learns_what_another_one_has_met(tmp_path, dies):
    tokens = list(range(20, 60))
    with serving(tmp_path, 0, max_local_cpu_size=0.02) as server, engine(server) as idle:
        idle.engine.share_learning(lambda: True)
        with engine(server) as busy:
            arena = arena_for(server, busy.engine.store)
            queue(busy, tokens)
            if dies:  # before it has learned
                wait_for(lambda: len(arena.waiting) == 1)
                busy.engine.learning.clear()
                busy.engine.store.close()
            wait_for(lambda: len(idle.engine.learning) == 1)
            assert idle.learn_pending() == 1
            wait_for(lambda: idle.knows(tokens))
            assert len(arena.waiting) == 0
            assert dies or busy.knows(tokens)


def test_a_document_that_one_engine_has_learned_is_found_by_another_one_in_a_prompt(tmp_path):
    tokens = random.Random(0).choices(range(10, 90), k=100)
    with serving(tmp_path, 0, max_local_cpu_size=0.02) as server, engine(server) as other, engine(server) as one:
        assert one.learn(tokens)
        wait_for(other.engine.known.list)
        (found,) = other.engine.with_known([1, 2, 3, *tokens[:90], 4], [])
        assert (found.span, found.known.tokens.tolist()) == (Span(3, 93), tokens)
        assert other.prefill([1, 2, 3, *tokens, *tokens, *tokens, 4]).report.reused == 300


def numbered(known, number):
    return known.note(ONE, [number], [number.to_bytes(32, "big")])


def all_since(changes, number):
    """What a client gets that asks until nothing is left, and with how many requests."""
    documents, requests, more = [], 0, True
    while more:
        some, number, more, complete = changes.since(number)
        assert complete
        documents += some
        requests += 1
    return [document.tokens[0] for document in documents], requests, number


def test_clients_are_told_of_all_changes_since_those_that_they_know():
    known = KnownDocuments()
    changes = DocumentChanges(known)
    start = changes.last
    assert all_since(changes, start) == ([], 1, start)
    for number in range(3 * MAX_SENT_DOCUMENTS):
        changes.add(numbered(known, number))
    everything, requests, last = all_since(changes, start)
    assert (everything, requests) == (list(range(3 * MAX_SENT_DOCUMENTS)), 3)
    changes.add(numbered(known, 7))
    changes.add(numbered(known, 7))
    assert all_since(changes, last) == ([7], 1, last + 2)
    known.clear()
    assert all_since(changes, start) == ([], 4, last + 2), "they are forgotten"


def test_the_next_changes_are_found_without_a_look_at_those_before_them():
    """For an engine that knew all but the last of 131,072, the server passed all of them, which took a millisecond."""

    class Passed(deque):
        def __iter__(self):
            raise AssertionError("all entries are passed")

    known = KnownDocuments()
    changes = DocumentChanges(known)
    changes._keys = Passed(maxlen=changes._keys.maxlen)
    for number in range(10):
        changes.add(numbered(known, number))
    assert all_since(changes, changes.last - 3)[0] == [7, 8, 9]


def test_a_client_that_has_missed_changes_or_had_another_server_is_told_so(monkeypatch):
    monkeypatch.setattr(document_changes, "MAX_DOCUMENT_CHANGES", 10)
    known = KnownDocuments()
    earlier, changes = DocumentChanges(known), DocumentChanges(known)
    start = changes.last
    for number in range(13):
        changes.add(numbered(known, number))
        earlier.add(numbered(known, number))
    for wrong in (start, start + 2, earlier.last, changes.last + 1, 0):
        documents, _, more, complete = changes.since(wrong)
        assert ([one.tokens[0] for one in documents], more, complete) == (list(range(3, 13)), False, False)
    assert all_since(changes, start + 3)[0] == list(range(3, 13))


def learn_many(model, count, first=0):
    """Store documents as `CachedModel.learn` does, without the model."""
    engine, namespace = model.engine, model.engine.namespace(RecordKind.DOCUMENT)
    documents = [random.Random(number).choices(range(10, 90), k=40) for number in range(first, first + count)]
    for tokens in documents:
        engine.store.commit(engine.begin_document(namespace, tokens))
    engine.store.held()  # The server has noted them.
    return documents


def test_an_engine_knows_all_that_others_have_learned_after_one_heartbeat(tmp_path, monkeypatch):
    """Earlier, an engine got 64 documents a second, and missed those that were more than 1,024 before the last one."""
    monkeypatch.setattr(remote_store, "BEAT_SECONDS", 3600.0)
    with serving(tmp_path, 0, max_local_cpu_size=0.1) as server, engine(server) as other, engine(server) as one:
        documents = learn_many(one, 5 * MAX_SENT_DOCUMENTS)
        beat(other.engine.store)
        assert other.engine.known.count() == len(documents)
        assert all(other.engine.with_known([1, 2, *tokens, 3], []) for tokens in documents)


def test_an_engine_that_learns_nothing_knows_what_others_have_learned(tmp_path):
    """Such as one that only decodes."""
    with serving(tmp_path, 0, max_local_cpu_size=0.1) as server, engine(server) as one:
        given = settings_of(server, blend_learn=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CacheEngine, "share_learning", lambda *_: None)  # as in vLLM
            other = CachedModel(random_model(), given, [7, 7])
        with other:
            learn_many(one, 3)
            wait_for(lambda: other.engine.known.count() == 3)


def test_an_engine_that_has_missed_changes_reads_again_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(document_changes, "MAX_DOCUMENT_CHANGES", 10)
    monkeypatch.setattr(remote_store, "BEAT_SECONDS", 3600.0)
    with serving(tmp_path, 0, max_local_cpu_size=0.1) as server, engine(server) as other, engine(server) as one:
        documents = learn_many(one, 30)
        beat(other.engine.store)
        wait_for(lambda: other.engine.known.count() == len(documents))
        documents += learn_many(one, 1, first=30)
        beat(other.engine.store)
        assert all(other.engine.with_known([1, 2, *tokens, 3], []) for tokens in documents)


def test_an_engine_that_was_without_its_server_knows_what_others_have_learned_meanwhile(tmp_path):
    given = {"max_local_cpu_size": 0.1, "local_disk": tmp_path / "disk", "tiers": None}
    with ExitStack() as opened:
        with serving(tmp_path, 0, **given) as server:
            other = opened.enter_context(engine(server))
        (tmp_path / "elsewhere").mkdir()
        with serving(tmp_path / "elsewhere", 0, **given) as server, engine(server) as one:
            documents = learn_many(one, 5)
        with serving(tmp_path, 0, **given):
            wait_for(lambda: other.engine.known.count() == len(documents))
            assert all(other.engine.with_known([1, 2, *tokens, 3], []) for tokens in documents)


@pytest.mark.parametrize("expires", [False, True])
def test_a_document_that_is_removed_at_the_server_hides_no_other_one_in_any_engine(tmp_path, expires):
    text, settings = random.Random(1).choices(range(10, 90), k=100), {"blend_min_tokens": 32}
    with (
        serving(tmp_path, 0, max_local_cpu_size=0.1) as server,
        engine(server, **settings) as other,
        engine(server, **settings) as one,
    ):
        assert one.learn([*range(10, 50), *text], "new")
        assert one.learn([*range(60, 80), *text, 5], "old")
        wait_for(lambda: other.engine.known.count() == 2)
        arena = arena_for(server, one.engine.store)
        old, new = (arena.known.named(name) for name in ("old", "new"))
        queue(other, old[0].tokens)
        if expires:
            arena.keeper.expire(old, 1e-6)
            arena.keeper.remove_expired()
        else:
            arena.keeper.remove(old)
        for model in (one, other):
            wait_for(lambda model=model: model.engine.known.count() == 1)
            (found,) = model.engine.with_known([7, *text, 5, 8], [])
            assert found.known.id == new[0].id
            assert Unlearned.of(old[0]) not in model.engine.learning
            assert model.prefill([7, *text, 5, 8]).report.reused == 100
            assert model.engine.known.get(old[0].id).removed == old[0].removed
        assert one.learn(old[0].tokens.tolist())
        wait_for(lambda: other.engine.known.count() == 2)


@contextmanager
def reading_engine(server):
    """An engine that has got the first record of what is stored, and reads on when the event is set."""
    got, goes_on = threading.Event(), threading.Event()

    def late(chunks, take, *more):
        def take_late(chunk):
            got.set()
            assert goes_on.wait(30)
            take(chunk)

        return Recall(chunks, take_late, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_engine, "Recall", late)
        with engine(server) as model:
            assert got.wait(30)
            yield model, goes_on


def test_a_document_that_is_removed_while_an_engine_reads_what_is_stored_is_not_found(tmp_path, monkeypatch):
    """The engine knows it from a record only after it was told of its removal."""
    with serving(tmp_path, 0, max_local_cpu_size=0.1) as server, engine(server) as one:
        (tokens,) = learn_many(one, 1)
        arena = arena_for(server, one.engine.store)
        monkeypatch.setattr(remote_store, "BEAT_SECONDS", 3600.0)
        with reading_engine(server) as (other, goes_on):
            arena.keeper.remove(arena.known.list())
            beat(other.engine.store)
            goes_on.set()
            wait_for(lambda: other.engine.recall.ended)
            assert len(other.engine.known.list()) == 1
            beat(other.engine.store)
            assert (other.engine.known.count(), other.engine.with_known([1, 2, *tokens, 3], [])) == (0, ())


def test_an_engine_that_loses_its_server_while_it_reads_what_is_stored_reads_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "MAX_LISTED_RECORDS", 1)
    with serving(tmp_path, 0, max_local_cpu_size=0.1) as server, engine(server) as one:
        documents = learn_many(one, 5)
        with reading_engine(server) as (other, goes_on):
            lost = other.engine.store.attachment
            lost.hang_up()
            wait_for(lambda: other.engine.store.attachment is not lost)  # It may have attached again at once.
            goes_on.set()
            wait_for(lambda: other.engine.known.count() == len(documents))


def test_a_document_that_is_learned_again_before_an_engine_attaches_again_is_known(tmp_path, monkeypatch):
    """The engine has heard of its removal, and not that it was learned again."""
    monkeypatch.setattr(remote_store, "BEAT_SECONDS", 3600.0)
    with serving(tmp_path, 0, max_local_cpu_size=0.1) as server, engine(server) as one, engine(server) as other:
        (tokens,) = learn_many(one, 1)
        beat(other.engine.store)
        arena = arena_for(server, one.engine.store)
        arena.keeper.remove(arena.known.list())
        for model in (one, other):
            beat(model.engine.store)
        learn_many(one, 1)
        monkeypatch.setattr(arena.changes, "last", arena.changes.last + 1)  # The changes of an earlier server are lost.
        arena.changes._keys.clear()
        other.engine.keeper.attached_again()
        beat(other.engine.store)
        wait_for(lambda: not other.engine._reads())
        assert (other.engine.known.count(), len(other.engine.with_known([1, 2, *tokens, 3], []))) == (1, 1)


def test_a_document_that_is_being_removed_is_not_known_to_an_engine_that_reads_what_is_stored(tmp_path, monkeypatch):
    """The document's record is still there, and the engine does not hear of the removal, which was before its start."""
    monkeypatch.setattr(remote_store, "BEAT_SECONDS", 3600.0)
    with serving(tmp_path, 0, max_local_cpu_size=0.1) as server, engine(server) as one:
        learn_many(one, 2)
        arena = arena_for(server, one.engine.store)
        forget, found = arena.store.forget, []

        def read_and_forget(key):
            with engine(server) as other:
                wait_for(lambda: not other.engine._reads())
                beat(other.engine.store)
                found.append(other.engine.known.count())
            forget(key)

        monkeypatch.setattr(arena.store, "forget", read_and_forget)
        arena.keeper.remove(arena.known.list()[:1])
        assert found == [1] * len(found) != []


def test_a_document_that_the_server_does_not_know_and_an_engine_pins_is_known_to_all(tmp_path, monkeypatch):
    """Such as after a restart of a server without a disk."""
    monkeypatch.setattr(remote_store, "BEAT_SECONDS", 3600.0)
    with serving(tmp_path, 0, max_local_cpu_size=0.1) as server, engine(server) as one:
        learn_many(one, 1)
        (document,), arena = one.engine.known.list(), arena_for(server, one.engine.store)
        arena.known.clear()
        for key in document.keys:
            arena.store.forget(key)
        with engine(server) as other:
            one.engine.keeper.pin([document])
            beat(other.engine.store)
            assert other.engine.known.count() == 1


def test_a_document_may_have_the_name_of_a_file_in_another_encoding(tmp_path):
    """Earlier, the first chunk of such a document stayed reserved, so that the engine never attached again."""
    with serving(tmp_path, 0, max_local_cpu_size=0.02) as server, engine(server) as one:
        begun = one.engine.begin_document(one.engine.namespace(RecordKind.DOCUMENT), [7] * 40, "r\udce9sum\udce9")
        one.engine.store.commit(begun)
        assert one.engine.store.held() == 0
        (document,) = one.engine.known.list()
        one.engine.keeper.pin([document])
        assert document.name == "r\\udce9sum\\udce9"


def test_of_engines_that_begin_a_document_at_once_one_gets_all_of_it(tmp_path):
    with serving(tmp_path, 0, max_local_cpu_size=0.02) as server, ExitStack() as opened:
        engines = [opened.enter_context(engine(server)).engine for _ in range(3)]
        namespace = engines[0].namespace(RecordKind.DOCUMENT)
        for number in range(30):
            tokens, together = [number] * 64, threading.Barrier(len(engines))

            def begin(one, tokens=tokens, together=together):
                together.wait()
                return one.begin_document(namespace, tokens)

            with ThreadPoolExecutor(len(engines)) as pool:
                begun = [slots for slots in pool.map(begin, engines) if slots is not None]
            assert [len(slots) for slots in begun] == [4]
            for slots in begun:
                for one, slot in ((one, slot) for one in engines for slot in slots):
                    one.store.abort(slot)
            for one in engines:
                one.store.held()


def test_the_queue_has_each_document_once_and_as_many_tokens_as_there_is_room_for():
    queue = LearnQueue(room=10)
    one, two, three = (Unlearned(b"n", (number,) * 4) for number in range(3))
    assert [queue.add(document, wanted=True) for document in (one, two, one, three)] == [True, True, True, False]
    queue.discard(one)
    queue.discard(one)
    assert queue.add(three)
    assert (list(queue), len(queue), two in queue, one in queue) == ([two, three], 2, True, False)
    assert queue.take(lambda document: document != two) is None
    assert queue.take() == two
    assert queue.add(one)
    assert not queue.add(two)
    queue.clear()
    assert all(map(queue.add, (one, two)))
    queue.clear()
    assert queue.take() is None


def test_each_waiting_document_takes_whole_chunks():
    """Documents of one token were queued until their tokens filled memory, where each takes a chunk."""
    queue = LearnQueue(room=64, chunk_size=16)
    assert [queue.add(Unlearned(b"n", (number,)), wanted=True) for number in range(5)] == [True] * 4 + [False]
    assert queue.take(wanted=True)
    assert not queue.add(Unlearned(b"n", (9,) * 17), wanted=True)
    assert queue.add(Unlearned(b"n", (9,) * 16), wanted=True)


def test_a_document_that_is_learned_again_does_not_become_wanted_by_coming_often():
    """With too little memory for all known documents, each request had one computed while others ran."""
    queue, one = LearnQueue(room=100), Unlearned(b"n", (1,) * 4)
    assert [queue.add(one, again=True) for _ in range(3)] == [True] * 3
    assert not queue.has_wanted
    queue.add(one)
    queue.add(one)
    assert queue.has_wanted, "as an unknown one, it has come twice"


def test_a_document_that_comes_twice_is_wanted():
    queue = LearnQueue(room=100)
    one, two, three = (Unlearned(b"n", (number,) * 4) for number in range(3))
    assert queue.add(one)
    assert queue.add(two)
    assert not queue.has_wanted
    assert queue.take(wanted=True) is None
    assert queue.add(two)
    assert queue.add(three, wanted=True)
    assert queue.has_wanted
    assert queue.take(lambda document: document != two, wanted=True) is None
    assert [queue.take(wanted=True), queue.take(wanted=True), queue.take(wanted=True)] == [two, three, None]
    assert not queue.has_wanted
    assert queue.take() == one


def test_new_documents_replace_the_oldest_ones_that_came_once(monkeypatch):
    """A queue that was full of documents that came once took no other one on an engine that was never idle."""
    monkeypatch.setattr(learn_queue, "MAX_QUEUED_DOCUMENTS", 3)
    queue = LearnQueue(room=100)
    one, two, three, four, five = (Unlearned(b"n", (number,) * 4) for number in range(5))
    assert [queue.add(document) for document in (one, two, three, one, four)] == [True] * 5
    assert list(queue) == [one, three, four]
    assert queue.add(two), "it came before, so it is wanted"
    assert [queue.take(wanted=True), queue.take(wanted=True), queue.take(wanted=True)] == [one, two, None]
    assert queue.add(five, wanted=True)
    assert not queue.add(Unlearned(b"n", (9,) * 97)), "it does not fit beside what is wanted"
    assert list(queue) == [four, five]


def test_the_queue_remembers_a_bounded_number_of_documents_that_came(monkeypatch):
    monkeypatch.setattr(learn_queue, "MAX_SEEN_DOCUMENTS", 2)
    queue = LearnQueue(room=100)
    one, two, three = (Unlearned(b"n", (number,) * 4) for number in range(3))
    for document in (one, two, three):
        assert queue.add(document)
        assert queue.take() == document
    assert queue.add(one)
    assert not queue.has_wanted, "it is forgotten"
    assert queue.add(three)
    assert queue.take(wanted=True) == three


def test_a_document_that_was_taken_and_is_put_back_did_not_come_again():
    queue, one = LearnQueue(room=100), Unlearned(b"n", (1,) * 4)
    queue.add(one)
    queue.take()
    assert queue.put_back(one)
    assert (list(queue), queue.has_wanted) == ([one], False)


def test_a_document_that_expires_while_the_next_one_is_taken_is_taken_or_gone_and_never_another_one() -> None:
    """10,000 times, another thread removes the first document between the question whether it fits and the answer.

    A queue that asked and took in two steps raised `IndexError` there, or lost the document after it.
    """
    queue, asked, expired = LearnQueue(room=10**6), threading.Event(), threading.Event()
    one, two = Unlearned(b"n", (1,) * 4), Unlearned(b"n", (2,) * 4)
    rounds, taken = 10_000, []

    def expire() -> None:
        for _ in range(rounds):
            asked.wait()
            asked.clear()
            queue.discard(one)
            expired.set()

    def fits(document: Unlearned) -> bool:
        asked.set()  # The other thread begins to remove it now.
        return True

    thread = threading.Thread(target=expire)
    thread.start()
    for _ in range(rounds):
        queue.add(one)
        queue.add(two)
        taken.append(queue.take(fits))
        expired.wait()
        expired.clear()
        assert taken[-1] == one
        assert list(queue) == [two]
        queue.discard(two)
    thread.join()
    assert len(queue) == 0
