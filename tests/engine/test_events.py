"""KV events of our tiers, in the engine's own stream: a router that follows them knows what is where."""

import socket
import time
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from lab import BLOCK, engine, words
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from lmc.documents.publisher import DocumentPublisher
from lmc.errors import ConfigError
from lmc.keys import tokens_digest


@contextmanager
def listened_to(models, tmp_path):
    """An engine with events, and all that it has announced."""
    # Room for four chunks in memory: the fifth evicts the first, which the disk still has.
    slots = 4.5 * 4 * 128 * 2 * 4 * 32 * 4 / 2**30
    settings = {"max_local_cpu_size": slots, "local_disk": str(tmp_path), "chunk_size": 128}
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine(models("llama"), settings, kv_events_config=events) as lab:
        kept: list[Any] = []
        original = lab.connector.take_events
        lab.connector.take_events = lambda: kept.extend(original()) or []  # the engine takes them at every step
        yield lab, kept


def take(lab) -> None:
    lab.settle()
    lab.store.flush()
    lab.connector.take_events()


def follow(events: list[Any], known: dict[tuple[str, Any], Any]) -> None:
    """What a router does."""
    for event in events:
        for found in event.block_hashes:
            if isinstance(event, BlockStored):
                assert (event.medium, found) not in known
                known[event.medium, found] = event
            else:
                assert isinstance(event, BlockRemoved)
                del known[event.medium, found]


def test_a_router_that_follows_the_events_knows_what_is_in_memory_and_on_disk(models, tmp_path):
    known: dict[tuple[str, Any], Any] = {}
    prompts = [words(128, 40 + i) for i in range(6)]
    with listened_to(models, tmp_path) as (lab, kept):
        for tokens in prompts:
            lab.ask(tokens, {"blend": False}, 1)
            take(lab)
    follow(kept, known)
    media = [medium for medium, _ in known]
    assert media.count("CPU") == 4 * 128 // BLOCK
    assert media.count("STORAGE") == 6 * 128 // BLOCK
    (first,) = [event for event in known.values() if event.token_ids == prompts[0][:BLOCK]]
    assert first.medium == "STORAGE"
    assert first.parent_block_hash is None
    (second,) = [event for event in known.values() if event.token_ids == prompts[0][BLOCK : 2 * BLOCK]]
    assert second.parent_block_hash == first.block_hashes[0]


@pytest.mark.long
def test_what_an_earlier_process_has_left_on_disk_is_announced_at_the_start(models, tmp_path):
    """A router learned of it only when it was loaded again."""
    tokens, told = words(128 + BLOCK, 50), []
    for _ in range(2):
        known: dict[tuple[str, Any], Any] = {}
        with listened_to(models, tmp_path) as (lab, kept):
            if not told:
                lab.ask(tokens, {"blend": False}, 1)
            take(lab)
        follow(kept, known)
        told.append(
            {
                (hash_, tuple(event.token_ids), event.parent_block_hash)
                for (medium, hash_), event in known.items()
                if medium == "STORAGE"
            }
        )
    assert len(told[0]) == len(tokens) // BLOCK
    assert told[1] == told[0]


@pytest.mark.long
def test_without_listeners_nothing_is_kept(models):
    with engine(models("llama")) as lab:
        lab.ask(words(300, 1), None, 1)
        assert list(lab.connector.take_events()) == []
        assert lab.lmc.events is None


@pytest.mark.long
def test_blocks_of_a_tenant_say_what_their_hashes_cover_and_the_disk_does_not(models, tmp_path):
    with listened_to(models, tmp_path) as (lab, kept):
        lab.ask(words(128, 60), {"blend": False}, 1, salt="a tenant's secret")
        lab.ask(words(128, 61), {"blend": False}, 1)
        take(lab)
    stored = [event for event in kept if isinstance(event, BlockStored)]
    first = {tuple(event.token_ids): event.extra_keys for event in stored if event.parent_block_hash is None}
    assert first == {tuple(words(128, 60)[:BLOCK]): [("a tenant's secret",)], tuple(words(128, 61)[:BLOCK]): None}
    for record in (tmp_path / "records").rglob("*.safetensors"):
        assert b"secret" not in record.read_bytes()


@pytest.mark.long
def test_documents_are_published_on_a_topic_of_their_own_and_batches_can_be_asked_for_again(
    models, tmp_path, monkeypatch
):
    with socket.socket() as one, socket.socket() as two:
        ports = []
        for free in (one, two):
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    monkeypatch.setenv("LMC_DOCUMENT_EVENTS", f"tcp://127.0.0.1:{ports[0]}, tcp://*:{ports[1]}")
    document = words(150, 70)
    context = zmq.Context.instance()
    with engine(models("llama"), {"local_disk": str(tmp_path)}) as lab, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(f"tcp://127.0.0.1:{ports[0]}")
        subscriber.setsockopt_string(zmq.SUBSCRIBE, "lmc.documents")
        time.sleep(0.5)  # ZeroMQ does not say when a subscription has arrived.
        lab.ask(document, {"learn": True}, 1)
        lab.settle()
        lab.store.flush()  # The engine is idle from now on.
        found: dict[str, Any] = {}
        while len(found) < 2:
            assert subscriber.poll(30_000), found
            topic, _, payload = subscriber.recv_multipart()
            assert topic == b"lmc.documents"
            found |= {event["medium"]: event for event in msgspec.msgpack.decode(payload)[1]}
        assert found.keys() == {"CPU", "STORAGE"}
        for event in found.values():
            assert (event["type"], event["tokens"], event["salt"]) == ("DocumentStored", len(document), "")
            assert event["digest"] == tokens_digest(document)
            assert event["document"] == lab.lmc.engine.known.list()[0].id
        with context.socket(zmq.REQ) as asking:
            asking.connect(f"tcp://127.0.0.1:{ports[1]}")
            asking.send((0).to_bytes(8, "big"))
            assert asking.poll(30_000)
            *_, first, payload = asking.recv_multipart()
            assert int.from_bytes(first, "big") == 0
            assert msgspec.msgpack.decode(payload)[1][0]["type"] == "DocumentStored"
        for key in lab.document_keys(document):
            lab.store.forget(key)
        gone: dict[str, Any] = {}
        while len(gone) < 2:
            assert subscriber.poll(30_000), gone
            gone |= {event["medium"]: event for event in msgspec.msgpack.decode(subscriber.recv_multipart()[2])[1]}
        for event in found.values():
            assert event.pop("tokens") == len(document)
            event["type"] = "DocumentRemoved"
        assert gone == found


def test_an_address_that_cannot_be_had_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"LMC_DOCUMENT_EVENTS = tcp://\*:none is not a ZeroMQ address"):
        DocumentPublisher("tcp://*:none", None)
