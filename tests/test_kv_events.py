"""KV events from the change log, without an engine: blocks in several chunks, and a reader that fell behind."""

from array import array

import pytest
from storage_fakes import key_of, meta_of

from lmc.connectors.vllm.scheduler.kv_events import BlockDetails, KVEvents
from lmc.storage.change_log import ChangeLog

SIZE = 4


def details(*names: str) -> BlockDetails:
    return BlockDetails(hashes=tuple(name.encode() for name in names), parent=None, tokens=array("I", range(8)))


class Router:
    """Follows the events, as a router would: which blocks are on which medium."""

    def __init__(self, events: KVEvents) -> None:
        self.events = events
        self.known: set[tuple[str, str]] = set()

    def follow(self) -> set[tuple[str, str]]:
        for moved in self.events.take():
            blocks = {(moved.medium, moved.details.hashes[place].decode()) for place in moved.blocks}
            if moved.stored:
                assert blocks.isdisjoint(self.known), "announced twice"
                self.known |= blocks
            else:
                assert blocks <= self.known, "withdrawn, and never announced"
                self.known -= blocks
        return self.known


@pytest.mark.parametrize("kept", [1000, 1])
def test_a_block_is_known_while_one_chunk_that_has_it_is_there(kept: int) -> None:
    """With one kept change, every step starts again from what is present."""
    log = ChangeLog(kept)
    router = Router(KVEvents(log, SIZE))
    long, short = meta_of(key_of(1)), meta_of(key_of(2))
    router.events.expect(long.key, details("a", "b"))
    router.events.expect(short.key, details("a"))
    assert router.follow() == set()
    log.appeared("host", long)
    log.appeared("host", short)
    assert router.follow() == {("CPU", "a"), ("CPU", "b")}
    log.left("host", long.key)
    log.appeared("disk", long)
    assert router.follow() == {("CPU", "a"), ("STORAGE", "a"), ("STORAGE", "b")}
    log.left("host", short.key)
    log.left("disk", long.key)
    assert router.follow() == set()


def test_a_chunk_that_came_and_went_while_nobody_read_is_not_announced() -> None:
    log = ChangeLog(2)
    router = Router(KVEvents(log, SIZE))
    for number in range(5):
        meta = meta_of(key_of(number))
        router.events.expect(meta.key, details(f"block {number}"))
        log.appeared("host", meta)
        if number != 3:
            log.left("host", meta.key)
    assert router.follow() == {("CPU", "block 3")}
    log.left("host", key_of(3))
    assert router.follow() == set()


def test_chunks_in_redis_and_chunks_that_nobody_described_are_not_announced() -> None:
    log = ChangeLog()
    router = Router(KVEvents(log, SIZE))
    router.events.expect(key_of(1), details("a"))
    log.appeared("redis", meta_of(key_of(1)))
    log.appeared("host", meta_of(key_of(2)))
    assert router.follow() == set()
