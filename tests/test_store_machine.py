"""The whole store against a dict: whatever a pin delivers is what was stored under its key, or it is a miss."""

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from amount import some
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from storage_fakes import PART_BYTES, PARTS, DictTier, content, get, key_of, meta_of, pin_bytes, put, writing
from test_disk import path_of
from tier_wrappers import Faulty

from lmc.errors import ChunkLost
from lmc.storage import loader
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier

KEYS = [key_of(i) for i in range(8)]
BELOW = [("dict",), ("disk",), ("disk", "remote")]  # tiers, fastest first
CAPACITY = 6 * (4096 + PARTS * PART_BYTES)
keys = st.sampled_from(KEYS)
VERBS = ("open", "read", "write")


class Unsteady(Faulty):
    """A tier that fails at some verbs for a while, or is away."""

    usable = True

    def __init__(self, inner):
        super().__init__(inner, lambda verb, key: OSError("due") if verb in self.failing else None)
        self.failing: set[str] = set()


class StoreAgainstDict(RuleBasedStateMachine):
    """Bytes under a key change only after the key was forgotten: then the older ones are never seen again."""

    @initialize(
        device=st.sampled_from([0, 2]),
        slots=st.integers(1, 5),
        below=st.sampled_from(BELOW),
    )
    def begin(self, device, slots, below):
        self.read_ahead, loader.READ_AHEAD_BYTES = loader.READ_AHEAD_BYTES, 1
        self.shape, self.below = (device, slots), below
        self.folder = Path(tempfile.mkdtemp())
        self.dicts = {name: DictTier() for name in below if name != "disk"}  # these outlive a restart, as servers do
        for name, tier in self.dicts.items():
            tier.name = name
        self.version = dict.fromkeys(KEYS, 0)
        self.holds: list = []  # (exit stack, [(key, version, pin)])
        self.open()

    def open(self):
        device, slots = self.shape
        disk = lambda: DiskTier(self.folder, CAPACITY, document_share=0.5)  # noqa: E731
        self.tiers = [Unsteady(self.dicts.get(name) or disk()) for name in self.below]
        slab = Slab(device, PARTS, PART_BYTES) if device else None
        host = Slab(slots, PARTS, PART_BYTES)
        self.store = Store(host, self.tiers, device=slab, document_share=0.5)

    @rule(key=keys)
    def write(self, key):
        put(self.store, key, self.version[key])

    @rule(key=keys)
    def write_and_fail(self, key):
        try:
            with writing(self.store, meta_of(key)) as slot:
                if slot is not None:
                    slot.fill_(255)
                raise KeyError
        except KeyError:
            pass

    @rule(key=keys)
    def read(self, key):
        try:
            found = get(self.store, key)
        except ChunkLost:
            return
        assert found is None or found == self.expected(key, self.version[key])

    @rule(wanted=st.lists(keys, max_size=4), parts=st.integers(0, PARTS))
    def read_some_layers_of_several(self, wanted, parts):
        with self.store.pinned(wanted) as pins:
            for part in range(parts):
                for key, pin in zip(wanted, pins, strict=True):
                    self.read_part(key, self.version[key], pin, part)

    @precondition(lambda self: len(self.holds) < 3)
    @rule(wanted=st.lists(keys, min_size=1, max_size=2))
    def hold(self, wanted):
        stack = ExitStack()
        pins = stack.enter_context(self.store.pinned(wanted))
        self.holds.append((stack, [(key, self.version[key], pin) for key, pin in zip(wanted, pins, strict=True)]))

    @precondition(lambda self: self.holds)
    @rule(pick=st.integers(0, 2), parts=st.lists(st.integers(0, PARTS - 1), max_size=3))
    def read_what_is_held(self, pick, parts):
        for key, version, pin in self.holds[pick % len(self.holds)][1]:
            for part in parts:
                self.read_part(key, version, pin, part)

    @precondition(lambda self: self.holds)
    @rule(pick=st.integers(0, 2))
    def let_go(self, pick):
        self.holds.pop(pick % len(self.holds))[0].close()

    @rule(key=keys)
    def forget(self, key):
        self.store.forget(key)
        assert self.store.lookup([key]) == [None]
        self.version[key] += 1

    @rule(wanted=st.sets(keys, max_size=2), pinned=st.booleans())
    def pin_or_unpin(self, wanted, pinned):
        self.store.protect(wanted, pinned=pinned)

    @rule(wanted=st.lists(keys, max_size=3, unique=True))
    def spread(self, wanted):
        nowhere = self.store.spread(wanted)
        assert set(nowhere) <= set(wanted)

    @rule(pick=st.integers(0, 1), verbs=st.sets(st.sampled_from(VERBS), max_size=2))
    def let_a_tier_fail_at(self, pick, verbs):
        self.tiers[pick % len(self.tiers)].failing = verbs

    @rule(pick=st.integers(0, 1))
    def let_a_tier_go_away_or_return(self, pick):
        tier = self.tiers[pick % len(self.tiers)]
        tier.usable = not tier.usable

    @rule(pick=st.integers(0, 1), key=keys, at=st.integers(0, 4096 + PARTS * PART_BYTES - 1))
    def damage_a_record(self, pick, key, at):
        self.store.flush()
        name = self.below[pick % len(self.below)]
        if name != "disk":
            record = self.dicts[name].records.get(key)
            if record is not None:
                changed = bytearray(record)
                changed[at] ^= 16
                self.dicts[name].records[key] = changed
            return
        path = path_of(self.folder, key)
        if path.exists():
            blob = bytearray(path.read_bytes())
            blob[at] ^= 16
            path.write_bytes(blob)

    @rule()
    def restart(self):
        self.let_all_go()
        self.store.close()
        assert self.store.held() == 0
        self.open()

    @rule()
    def flush(self):
        self.store.flush()
        assert self.store.stats().queued == 0

    @invariant()
    def the_bookkeeping_is_right(self):
        assert self.store.check_integrity() == []
        for tier in self.tiers:
            if tier.name == "disk":
                assert tier.inner.bytes <= CAPACITY
                assert tier.inner.faults() == []

    def teardown(self):
        if not hasattr(self, "store"):
            return
        loader.READ_AHEAD_BYTES = self.read_ahead
        self.let_all_go()
        self.store.flush()
        assert self.store.held() == 0
        self.store.close()
        assert self.store.held() == 0
        assert self.store.check_integrity() == []
        for tier in self.tiers:
            tier.inner.check(fix=True)
            assert tier.inner.check() == []
        shutil.rmtree(self.folder)

    def let_all_go(self):
        while self.holds:
            self.holds.pop()[0].close()

    def read_part(self, key, version, pin, part):
        if pin is None:
            return
        try:
            found = pin_bytes(self.store, pin, part)
        except ChunkLost:
            return
        assert found == content(key, part, PART_BYTES, version)

    def expected(self, key, version):
        return [content(key, part, PART_BYTES, version) for part in range(PARTS)]


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestStoreAgainstDict.settings = settings(
    max_examples=some(600), stateful_step_count=40, deadline=None, derandomize=True, database=None
)
