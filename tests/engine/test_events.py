"""KV events of our tiers, in the engine's own stream: a router that follows them knows what is where."""

from contextlib import contextmanager
from typing import Any

from lab import BLOCK, engine, words
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored


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


def test_without_listeners_nothing_is_kept(models):
    with engine(models("llama")) as lab:
        lab.ask(words(300, 1), None, 1)
        assert list(lab.connector.take_events()) == []
        assert lab.connector._scheduler.events is None
