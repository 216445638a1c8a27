"""The order in which locks are taken, and the table of places."""

import itertools
import threading

import pytest
from ranked_locks import RankedLock
from storage_fakes import state_of

from lmc.config.settings import Settings
from lmc.storage.locks import Rank
from lmc.storage.memory.slab import Slab
from lmc.storage.places import MEMORY, PLACES, Place, fastest_first, place_of
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.redis import RedisTier

PAIRS = list(itertools.product(Rank, Rank))


def elsewhere(function):
    """Run a function in another thread, and return what it returns, or the error that it raises."""
    results = []

    def run():
        try:
            results.append(function())
        except (AssertionError, RuntimeError) as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "hangs"
    return results[0]


def is_free(lock):
    """Whether another thread could take the lock now."""

    def take():
        taken = lock.acquire(blocking=False)
        if taken:
            lock.release()
        return taken

    return elsewhere(take)


def take_all():
    """Take a lock of every rank, which works only if this thread holds none."""
    with RankedLock(Rank.STATE), RankedLock(Rank.TIER), RankedLock(Rank.LEAF):
        pass


def test_the_store_s_state_comes_first_and_leaves_last():
    """Inside of the state's lock the change log is written; a tier writes it inside of its own."""
    assert Rank.STATE < Rank.TIER < Rank.LEAF


@pytest.mark.parametrize(("first", "second"), [pair for pair in PAIRS if pair[0] < pair[1]])
def test_a_lock_of_a_higher_rank_may_be_taken(first, second):
    with RankedLock(first), RankedLock(second):
        pass
    take_all()


@pytest.mark.parametrize(("first", "second"), [pair for pair in PAIRS if pair[0] >= pair[1]])
def test_a_lock_of_the_same_or_a_lower_rank_may_not_be_taken(first, second):
    """The refused lock is not taken, and the lock that was held is released as always."""
    outer, inner = RankedLock(first), RankedLock(second)
    with outer:
        with pytest.raises(AssertionError, match=f"rank {second.name} is taken while .*{first.name}"):
            inner.acquire()
        assert is_free(inner)
        assert not is_free(outer)
    assert is_free(outer)
    take_all()


def test_the_highest_rank_that_is_held_counts_whatever_was_taken_last():
    state = RankedLock(Rank.STATE)
    with RankedLock(Rank.LEAF):
        assert state.acquire(blocking=False)
        with pytest.raises(AssertionError), RankedLock(Rank.TIER):
            pass
        state.release()


def test_a_thread_that_takes_its_own_lock_again_is_told_so_and_does_not_hang():
    lock = RankedLock(Rank.STATE)
    with lock, pytest.raises(AssertionError):
        lock.acquire()
    with lock, pytest.raises(AssertionError):
        lock.acquire(timeout=0)


def test_only_one_thread_has_a_lock():
    lock = RankedLock(Rank.TIER)
    assert lock.acquire()
    assert not is_free(lock)
    assert elsewhere(lambda: lock.acquire(timeout=0)) is False
    lock.release()
    assert is_free(lock)


def test_what_another_thread_holds_does_not_count():
    leaf = RankedLock(Rank.LEAF)
    with leaf:
        assert elsewhere(take_all) is None
    assert elsewhere(leaf.acquire) is True
    take_all()


def test_asking_without_waiting_is_allowed_and_counts_only_if_it_succeeds():
    """Nobody can wait for each other for ever by asking; `threading.Condition` asks so who holds its lock."""
    leaf, state = RankedLock(Rank.LEAF), RankedLock(Rank.STATE)
    with leaf:
        assert leaf.acquire(blocking=False) is False
        assert state.acquire(blocking=False) is True
        state.release()
    take_all()
    assert state.acquire(blocking=False) is True
    with pytest.raises(AssertionError), RankedLock(Rank.STATE):
        pass
    state.release()


def test_locks_may_be_released_in_any_order():
    state, leaf = RankedLock(Rank.STATE), RankedLock(Rank.LEAF)
    state.acquire()
    leaf.acquire()
    state.release()
    with pytest.raises(AssertionError), RankedLock(Rank.TIER):
        pass
    leaf.release()
    take_all()


def test_an_exception_releases_a_lock():
    lock = RankedLock(Rank.TIER)
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert is_free(lock)
    take_all()


# -- under a condition ---------------------------------------------------------------------------------------------


def test_a_condition_releases_the_lock_while_it_waits_and_takes_it_again():
    """If the rank stayed noted while the thread waits, it could not take the lock again."""
    lock = RankedLock(Rank.STATE)
    condition = threading.Condition(lock)
    with condition:
        assert condition.wait(timeout=0) is False
        assert not is_free(lock)
        with RankedLock(Rank.TIER):
            pass
        with pytest.raises(AssertionError), RankedLock(Rank.STATE):
            pass
    assert is_free(lock)
    take_all()


def test_a_condition_wakes_the_threads_that_wait():
    condition, steps = threading.Condition(RankedLock(Rank.STATE)), []

    def wait():
        with condition:
            steps.append("waits")
            condition.notify_all()
            condition.wait_for(lambda: "done" in steps)
            steps.append("woken")
        take_all()
        return "right"

    results = []
    thread = threading.Thread(target=lambda: results.append(wait()), daemon=True)
    with condition:
        thread.start()
        assert condition.wait_for(lambda: steps, timeout=60)
        steps.append("done")
        condition.notify_all()
    thread.join(60)
    assert (steps, results) == (["waits", "done", "woken"], ["right"])


def test_a_condition_knows_whether_its_lock_is_held():
    condition = threading.Condition(RankedLock(Rank.STATE))
    with pytest.raises(RuntimeError, match="un-acquired"):
        condition.notify_all()
    with condition:
        condition.notify_all()
    take_all()


def test_the_locks_of_a_store_check_their_order(tmp_path):
    """A lock of another class would not check its order."""
    before = RankedLock.made.copy()
    Store(Slab(1, 1, 1), [DiskTier(tmp_path, 1 << 20)]).close()
    # Of the change log, the guard, the uses of the disk tier's records and its index; of the state; of the disk tier.
    assert RankedLock.made - before == {Rank.LEAF: 4, Rank.STATE: 1, Rank.TIER: 1}


# -- places --------------------------------------------------------------------------------------------------------


def test_no_two_places_have_one_name_or_one_medium():
    """A router would take a block on one for a block on the other."""
    for names in ([place.name for place in PLACES], [place.medium for place in PLACES if place.medium]):
        assert len(set(names)) == len(names)


def test_a_place_is_found_by_its_name():
    assert [place_of(place.name) for place in PLACES] == list(PLACES)


def test_a_tier_that_is_not_in_the_table_is_a_place_that_is_not_announced():
    place = place_of("tape")
    assert place == Place(name="tape", title="tape")
    assert (place.in_memory, place.medium, place.hit_source) == (False, "", "EXTERNAL_UNSPECIFIED")


def test_places_are_listed_fastest_first_and_unknown_ones_last():
    unknown = [f"tape{i}" for i in range(9)]
    assert fastest_first({"redis", "host", "disk", "device", *unknown}) == ["device", "host", "disk", "redis", *unknown]
    assert fastest_first({"disk", "host"}) == ["host", "disk"]
    assert fastest_first(set()) == []


def test_the_table_has_every_place_of_a_store(tmp_path):
    """Memory is what a store need not load from. A name that is changed in one place only would be unknown."""
    store = Store(Slab(1, 1, 1), [DiskTier(tmp_path, 1 << 20)], device=Slab(1, 1, 1))
    levels = set(state_of(store).pools)
    assert levels == MEMORY == {"device", "host"}
    urls = ("redis://host", "mooncake://host", "file:///pool", "s3://bucket/kv")
    remotes = Settings(remote_url=urls).remotes
    remote = [one.place for one in remotes]
    assert remote[0] == RedisTier.name
    assert fastest_first({*levels, DiskTier.name, *remote}) == [place.name for place in PLACES]
    store.close()
