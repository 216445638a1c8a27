"""KV events of our tiers, in the engine's own stream: a router that follows them knows what is where."""

from typing import Any

import pytest
from lab import BLOCK, engine, words
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored


@pytest.fixture
def lab(models, tmp_path):
    # Room for four chunks in memory: the fifth evicts the first, which the disk still has.
    slots = 4.5 * 4 * 128 * 2 * 4 * 32 * 4 / 2**30
    settings = {"max_local_cpu_size": slots, "local_disk": str(tmp_path), "chunk_size": 128}
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine(models("llama"), settings, kv_events_config=events) as found:
        yield found


def take(lab) -> list[Any]:
    lab.settle()
    lab.connector._scheduler.library.store.flush()
    return list(lab.connector.take_events())


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


def test_a_router_that_follows_the_events_knows_what_is_in_memory_and_on_disk(lab):
    known: dict[tuple[str, Any], Any] = {}
    kept: list[Any] = []
    original = lab.connector.take_events
    lab.connector.take_events = lambda: kept.extend(original()) or []  # the engine takes them at every step
    prompts = [words(128, 40 + i) for i in range(6)]
    for tokens in prompts:
        lab.ask(tokens, {"blend": False}, 1)
        take(lab)
    follow(kept, known)
    media = [medium for medium, _ in known]
    assert media.count("CPU") == 4 * 128 // BLOCK
    assert media.count("STORAGE") == 2 * 128 // BLOCK
    first = next(event for event in known.values() if event.token_ids == prompts[0][:BLOCK])
    assert first.medium == "STORAGE"
    assert first.parent_block_hash is None
    second = next(event for event in known.values() if event.token_ids == prompts[0][BLOCK : 2 * BLOCK])
    assert second.parent_block_hash == first.block_hashes[0]


def test_without_listeners_nothing_is_kept(models):
    with engine(models("llama")) as lab:
        lab.ask(words(300, 1), None, 1)
        assert list(lab.connector.take_events()) == []
        assert lab.connector._scheduler.events is None
