"""What a slow tier has is loaded into memory while the engine rests, and no request waits for it."""

from collections.abc import Iterator

import pytest
from storage_fakes import PART_BYTES, PARTS, Clock, DictTier, Gated, eventually, key_of, meta_of, note_load, raw_record

from lmc.background import Background
from lmc.engine import promotion
from lmc.engine.promotion import Promotion
from lmc.keys import ChunkKey
from lmc.storage.cost_model import TRIAL_CHOICES, TRIAL_SECONDS, LoadPolicy, Offer
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store

KEYS = [key_of(i) for i in range(6)]


class Engine(Background):
    """An engine that is told whether it runs."""

    is_running = False


class Opened:
    """A promotion over a store of eight slots, with a tier whose reads wait at a gate."""

    def __init__(self) -> None:
        inner = DictTier()
        inner.records |= {key: bytearray(raw_record(meta_of(key))) for key in KEYS}
        self.tier, self.engine = Gated(inner), Engine()
        self.store = Store(Slab(8, PARTS, PART_BYTES), [self.tier])
        self.promotion = Promotion(self.store, self.engine)

    def begin(self, *keys: ChunkKey) -> None:
        for _ in range(2):  # They are skipped twice.
            self.promotion.begin(keys)

    def in_memory(self) -> list[bool]:
        return [place == "host" for place in self.store.lookup(KEYS)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    monkeypatch.setattr(promotion, "FIRST_WAIT", 0.0)
    one = Opened()
    yield one
    one.promotion.stop()
    one.tier.open_all()
    one.store.close()
    assert one.store.held() == 0
    assert one.store.check_integrity() == []


def test_chunks_are_loaded_and_nothing_is_held_afterwards(opened: Opened) -> None:
    opened.tier.open_all()
    opened.begin(*KEYS[:2])
    opened.promotion.wait()
    assert opened.in_memory() == [True, True, False, False, False, False]
    assert opened.store.held() == 0


def test_chunks_that_are_skipped_once_are_left_where_they_are(opened: Opened) -> None:
    """Chunks that are skipped once may never be requested again, and in memory they would take the place of others."""
    opened.tier.open_all()
    for key in KEYS:
        opened.promotion.begin([key])
        opened.promotion.wait()
    assert not any(opened.in_memory())
    opened.promotion.begin(KEYS[:1])
    opened.promotion.wait()
    assert opened.in_memory() == [True, False, False, False, False, False]


def test_a_request_that_loads_something_ends_a_promotion(opened: Opened) -> None:
    opened.begin(KEYS[0])
    eventually(lambda: opened.store.held() == 1)
    opened.promotion.cancel()
    opened.promotion.wait()
    opened.tier.open_all()
    eventually(lambda: opened.store.held() == 0)
    opened.begin(KEYS[1])
    opened.promotion.wait()
    assert opened.in_memory()[1] is True, "the next one begins"


def test_a_chunk_that_was_removed_meanwhile_does_not_come_back(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "LONGEST_WAIT", float("inf"))
    opened.tier.open_all()
    opened.engine.is_running = True
    opened.begin(KEYS[0])
    opened.store.forget(KEYS[0])
    opened.engine.is_running = False
    opened.promotion.wait()
    assert opened.store.lookup(KEYS[:1]) == [None]
    opened.store.flush()
    assert KEYS[0] not in opened.tier.inner.records


def test_one_batch_is_loaded_at_a_time(opened: Opened) -> None:
    opened.begin(KEYS[0])
    eventually(lambda: opened.store.held() == 1)
    opened.begin(KEYS[1])
    opened.tier.open_all()
    opened.promotion.wait()
    assert opened.in_memory()[:2] == [True, False]
    opened.begin(KEYS[1])
    opened.promotion.wait()
    assert opened.in_memory()[:2] == [True, True]


def test_a_load_takes_at_most_a_fourth_of_the_free_slots(opened: Opened) -> None:
    opened.tier.open_all()
    opened.begin(*KEYS)
    opened.promotion.wait()
    assert sum(opened.in_memory()) == 8 // promotion.SLOTS_SHARE


def test_a_load_begins_when_the_engine_rests(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "LONGEST_WAIT", float("inf"))
    opened.tier.open_all()
    opened.engine.is_running = True
    looked = Looked(opened.engine)
    opened.promotion = Promotion(opened.store, looked)
    opened.begin(KEYS[0])
    eventually(lambda: looked.times >= 3)
    assert opened.in_memory()[0] is False
    opened.engine.is_running = False
    opened.promotion.wait()
    assert opened.in_memory()[0] is True


class Looked(Engine):
    """An engine that counts how often it is asked whether it runs."""

    def __init__(self, engine: Engine) -> None:
        self.times, self._engine = 0, engine

    @property
    def is_running(self) -> bool:
        self.times += 1
        return self._engine.is_running


def test_the_request_that_skipped_chunks_is_computed_first(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it arrives, the engine has not begun to compute it, and seems to rest."""
    monkeypatch.setattr(promotion, "FIRST_WAIT", 3600.0)
    opened.tier.open_all()
    opened.begin(KEYS[0])
    assert opened.store.held() == 0
    opened.promotion.cancel()
    opened.promotion.wait()
    assert not any(opened.in_memory())


def test_an_engine_that_never_rests_is_not_waited_for_for_ever(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "LONGEST_WAIT", 0.1)
    opened.tier.open_all()
    opened.engine.is_running = True
    opened.begin(KEYS[0])
    opened.promotion.wait()
    assert opened.in_memory()[0] is True


def test_the_end_of_the_engine_does_not_wait_for_a_tier(opened: Opened) -> None:
    opened.begin(KEYS[0])
    eventually(lambda: opened.store.held() == 1)
    opened.promotion.stop()  # The tier hangs, and this returns.
    opened.begin(KEYS[1])
    opened.tier.open_all()
    eventually(lambda: opened.store.held() == 0)
    assert opened.in_memory()[1] is False


def test_a_tier_that_hangs_is_given_up(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "MAX_SECONDS", 0.1)
    opened.begin(KEYS[0])
    opened.promotion.wait()
    opened.tier.open_all()
    eventually(lambda: opened.store.held() == 0)


def test_chunks_that_are_gone_are_misses(opened: Opened) -> None:
    opened.tier.open_all()
    opened.begin(key_of("gone"), KEYS[0])
    opened.promotion.wait()
    assert opened.in_memory()[0] is True


def test_a_store_that_fails_is_logged_once_and_later_loads_go_on(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(opened.store, "pin", fails)
    opened.begin(KEYS[0])
    opened.promotion.wait()
    (record,) = caplog.records
    assert "loading chunks from a slow tier failed unexpectedly" in record.getMessage()
    monkeypatch.undo()
    opened.tier.open_all()
    opened.begin(KEYS[0])
    opened.promotion.wait()
    assert opened.in_memory()[0] is True


@pytest.mark.parametrize("key", [KEYS[0], key_of("gone")])
@pytest.mark.parametrize("has_room", [True, False])
def test_a_load_takes_the_place_of_a_trial(opened: Opened, monkeypatch: pytest.MonkeyPatch, key, has_room) -> None:
    """As long as skipped chunks are loaded in the background, no request waits to measure their tier."""
    monkeypatch.setattr(promotion, "SLOTS_SHARE", 4 if has_room else 9)
    cost, tier = opened.store.cost, opened.tier.name
    opened.tier.open_all()
    for _ in range(3):
        note_load(cost, tier, records=1, opening=0.0, bytes=1000, reading=1000.0)
        cost.computed(1000, 1.0, 1000)
    cost.clock = clock = Clock(100.0)
    offer = Offer(records=[(tier, 1000)], exact=100, reused=0, ratio=0.0, prompt=1000)
    choices = list[bool]()
    for at in range(3 * TRIAL_CHOICES):
        clock.now += TRIAL_SECONDS
        choices.append(cost.choose(offer, LoadPolicy.AUTO).load)
        if at == TRIAL_CHOICES - 1:
            opened.begin(key)  # It takes no time by this clock, so that nothing is measured.
            opened.promotion.wait()
    loaded = has_room and key == KEYS[0]
    assert choices.index(True) == (2 if loaded else 1) * TRIAL_CHOICES
