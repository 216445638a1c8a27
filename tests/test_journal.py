"""The journal of memory that outlives its server: bounded, private, in the order of uses, and no harm when it fails."""

import errno
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from storage_fakes import PART_BYTES, PARTS, content, eventually, key_of, meta_of

from lmc.server import journal as journals
from lmc.server.journal import Journal
from lmc.storage.memory.slab import Slab, Slot

SLOTS = 4


@pytest.fixture
def slab() -> Slab:
    return Slab(SLOTS, PARTS, PART_BYTES, shared=True)


def opened(path: Path, slab: Slab) -> Journal:
    journal = Journal(path, slab)
    journal.restore()
    return journal


def fill(journal: Journal, slab: Slab, slot: int, key: bytes, label: str = "") -> None:
    """Put a chunk into a slot, and note it."""
    for part in range(PARTS):
        slab.memory(Slot(slot), part, 1, PART_BYTES)[0][:] = content(key, part)
    slab.label(Slot(slot), key, PARTS)
    journal.filled(Slot(slot), replace(meta_of(key), label=label))


def kept(path: Path, slab: Slab) -> list[tuple[int, bytes]]:
    journal = Journal(path, slab)
    found = [(slot, meta.key) for slot, meta in journal.restore()]
    journal.close()
    return found


def test_the_file_does_not_grow_with_the_chunks_that_were_stored(tmp_path: Path, slab: Slab, monkeypatch) -> None:
    monkeypatch.setattr(journals, "MIN_FILE_BYTES", 1000)
    journal, path = opened(tmp_path / "j", slab), tmp_path / "j"
    largest = 0
    for number in range(300):
        fill(journal, slab, number % SLOTS, key_of(number))
        largest = max(largest, path.stat().st_size)
    journal.close()
    assert largest < 4000
    assert sorted(kept(path, slab)) == [(number % SLOTS, key_of(number)) for number in range(296, 300)]


def test_nobody_else_may_read_it(tmp_path: Path, slab: Slab) -> None:
    """Labels of documents have the tokens of their tenants."""
    journal = opened(tmp_path / "j", slab)
    fill(journal, slab, 0, key_of(0), "tokens")
    journal.close()
    assert stat.S_IMODE(os.stat(tmp_path / "j").st_mode) == 0o600


def test_chunks_come_back_in_the_order_in_which_they_were_used(tmp_path: Path, slab: Slab) -> None:
    journal, keys = opened(tmp_path / "j", slab), [key_of(i) for i in range(SLOTS + 1)]
    for slot in (2, 0, 1, 3):
        fill(journal, slab, slot, keys[slot])
    fill(journal, slab, 2, keys[4])  # The slot was used anew, so its chunk is the newest.
    eventually(lambda: keys[4] in (tmp_path / "j").read_bytes())
    shutil.copy(tmp_path / "j", tmp_path / "killed")
    assert [slot for slot, _ in kept(tmp_path / "killed", slab)] == [0, 1, 3, 2]
    journal.close(last_used=[Slot(3), Slot(2), Slot(0), Slot(1)])
    assert [slot for slot, _ in kept(tmp_path / "j", slab)] == [3, 2, 0, 1]


def test_a_full_file_system_costs_what_is_stored_then_and_nothing_else(
    tmp_path: Path, slab: Slab, monkeypatch, caplog
) -> None:
    journal = opened(tmp_path / "j", slab)
    fill(journal, slab, 0, key_of(0))
    eventually(lambda: (tmp_path / "j").stat().st_size)

    refused = []

    def no_room(*_, **__):
        refused.append(True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def write(self, frame):
            return len(frame) // 2

    with monkeypatch.context() as full:
        full.setattr(Journal, "_opened", lambda *_: Full())
        full.setattr(journals, "replace_bytes", no_room)
        for number in (1, 2):
            fill(journal, slab, number, key_of(number))
        eventually(lambda: refused)
    fill(journal, slab, 3, key_of(3))
    journal.close()
    assert caplog.text.count("the next server will not find") == 1
    assert sorted(kept(tmp_path / "j", slab)) == [(slot, key_of(slot)) for slot in range(SLOTS)]
