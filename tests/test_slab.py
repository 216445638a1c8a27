"""The slab: equal, aligned slots, and nothing of an older chunk in a newer record."""

import gc
import logging
import multiprocessing
import os
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from forked import Forked

from lmc.errors import NoMemory, StorageError
from lmc.keys import ChunkKey
from lmc.shapes import GIB
from lmc.storage.memory import host_memory
from lmc.storage.memory import slab as slab_module
from lmc.storage.memory.slab import LOST, Slab, SlabAddress, Slot, tag_of
from lmc.storage.worker_parts import Parallelism

S0, S1 = Slot(0), Slot(1)
KEY = ChunkKey(bytes(range(32)))


@pytest.mark.parametrize(
    ("part_bytes", "stride"), [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (3 * 4096, 3 * 4096)]
)
def test_every_part_starts_on_a_page_whatever_its_size(part_bytes, stride):
    slab = Slab(3, 2, part_bytes)
    assert (slab.stride, slab.bytes) == (stride, 3 * 2 * stride)
    first = slab.part(S0, 0).data_ptr()
    assert first % 4096 == 0
    places = [slab.part(Slot(slot), part).data_ptr() - first for slot in range(3) for part in range(2)]
    assert places == [i * stride for i in range(6)]
    assert slab.slot(S1).shape == (2, stride)


def test_a_new_slab_is_zero():
    slab = Slab(2, 2, 5000)
    assert not any(slab.slot(slot).any() for slot in (S0, S1))


def test_memory_is_one_view_over_adjoining_parts_and_shows_the_same_bytes():
    slab = Slab(2, 3, 4096)
    for part in range(3):
        slab.part(S1, part).fill_(part + 1)
    [view] = slab.memory(S1, 1, 2, 4096)
    assert bytes(view) == bytes([2]) * 4096 + bytes([3]) * 4096
    view[:] = bytes(8192)
    assert [int(slab.part(S1, part).sum()) for part in range(3)] == [4096, 0, 0]


def test_memory_is_a_view_per_part_where_less_than_a_part_is_asked_for():
    slab = Slab(2, 3, 8192)
    for part in range(3):
        slab.part(S1, part).fill_(part + 1)
    views = slab.memory(S1, 0, 3, 4096)
    assert [bytes(view) for view in views] == [bytes([part + 1]) * 4096 for part in range(3)]


def test_sealing_zeroes_the_tail_of_the_last_block_and_nothing_else():
    """A short chunk in a slot that held a full one would carry the full one's last bytes into its record."""
    slab = Slab(2, 2, 3 * 4096)
    for slot in (S0, S1):
        slab.slot(slot).fill_(7)
    slab.seal(S1, 4100)
    for part in slab.slot(S1):
        assert bool((part[:4100] == 7).all())
        assert not part[4100:8192].any()
        assert bool((part[8192:] == 7).all())
    assert bool((slab.slot(S0) == 7).all())


def test_sealing_whole_blocks_changes_nothing():
    slab = Slab(1, 2, 8192)
    slab.slot(S0).fill_(7)
    slab.seal(S0, 4096)
    assert bool((slab.slot(S0) == 7).all())


def test_a_slot_is_copied_whole_from_another_slab_and_nothing_else():
    one, other = Slab(2, 2, 5000), Slab(3, 2, 5000)
    one.slot(S1).fill_(7)
    other.copy_from(Slot(2), one, S1)
    assert bool((other.slot(Slot(2)) == 7).all())
    assert not other.slot(S0).any()
    assert not other.slot(S1).any()


def keep_busy() -> None:
    """The model works on its stream for about a second."""
    torch.cuda._sleep(1 << 30)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
def test_a_copy_from_or_to_a_gpu_waits_for_what_was_issued_into_its_slots():
    one, host = Slab(2, 2, 1 << 20, "cuda"), Slab(1, 2, 1 << 20)
    keep_busy()
    one.slot(S1).fill_(7)
    one.seal(S1, 1 << 20)
    host.copy_from(S0, one, S1)
    assert bool((host.slot(S0) == 7).all())
    keep_busy()
    one.slot(S0).fill_(1)
    one.written(S0)  # and given up
    one.copy_from(S0, host, S0)
    assert bytes(one.snapshot(S0, 2, 4096)) == bytes([7]) * 8192


def test_a_snapshot_is_a_copy_of_the_parts_side_by_side():
    slab = Slab(2, 3, 8192)
    for part in range(3):
        slab.part(S1, part).fill_(part + 1)
    copy = slab.snapshot(S1, 3, 4096)
    slab.slot(S1).zero_()
    assert bytes(copy) == b"".join(bytes([part + 1]) * 4096 for part in range(3))
    assert torch.frombuffer(copy, dtype=torch.uint8).data_ptr() % 4096 == 0


def test_a_slab_that_does_not_fit_says_what_was_asked_and_what_is_there(monkeypatch):
    monkeypatch.setattr(slab_module, "room_on", lambda device: 3 * GIB)
    with pytest.raises(
        NoMemory, match=r"5\.00 GiB does not fit on cpu: 3\.00 GiB are available; lower max_local_cpu_size"
    ):
        Slab(5, 1, GIB)


def test_a_slab_that_the_system_cannot_map_is_no_memory(monkeypatch):
    """Under a limit on address space the mapping itself fails; that was a bare OSError."""
    monkeypatch.setattr(slab_module, "room_on", lambda device: 1 << 80)
    with pytest.raises(NoMemory, match="GiB"):
        Slab(2, 2, 1 << 60)


def test_a_budget_that_holds_no_chunk_says_both_sizes():
    with pytest.raises(NoMemory, match=r"512\.000 MiB holds no chunk: one takes 2048\.000 MiB"):
        Slab.of_size(GIB / 2, 2, GIB)


def test_a_budget_buys_whole_slots():
    assert Slab.of_size(5 * 2 * 4096 + 8191, 2, 4000).slots == 5


def test_a_container_s_limit_counts_and_idle_page_cache_is_room(monkeypatch, tmp_path):
    """Weights that were read from disk fill a container's page cache, which counts as its memory: nothing seemed to
    fit.
    """
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    monkeypatch.setattr(host_memory, "CONTAINER", tmp_path)
    available = host_memory.memory_available
    assert available() > 1000, "half of the facts is none"
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 700\nactive_file 3\n")
    assert available() == 800
    (tmp_path / "memory.max").write_text("max\n")
    assert available() > 1000


# -- shared with other processes -------------------------------------------------------------------------------------


def own(told: Connection) -> None:
    slab = Slab(3, 2, 5000, shared=True)
    slab.part(S1, 1)[:3] = 7
    slab.label(S1, KEY, 2)
    told.send(slab.address)
    told.recv()


def look(address: SlabAddress, told: Connection) -> None:
    slab = Slab.attach(address)
    ready = [slab.ready(slot, tag) for slot, tag in ((S1, tag_of(KEY)), (S1, 5), (Slot(2), 5))]
    told.send((ready, slab.part(S1, 1)[:4].tolist()))
    slab.part(Slot(2), 0)[4999] = 9


def mapped(inode: int) -> bool:
    """Whether this process maps that slab."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any("memfd:lmc-slab" in line and line.split()[4] == str(inode) for line in lines)


def opened(inode: int) -> bool:
    """Whether this process has that slab's file open."""
    files = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return any("memfd:lmc-slab" in os.readlink(file) and file.stat().st_ino == inode for file in files)


def test_another_process_sees_labels_and_bytes_and_writes_what_the_owner_sees():
    slab = Slab(3, 2, 5000, shared=True)
    slab.part(S1, 1)[:3] = 7
    slab.label(S1, KEY, 2)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        assert Forked(look, slab.address, theirs).wait() == 0
        assert ours.recv() == ([2, -1, -1], [7, 7, 7, 0])
    assert int(slab.part(Slot(2), 0)[4999]) == 9


def test_what_was_mapped_outlives_its_owner_and_nothing_else_is_left_of_it():
    """An owner that is killed leaves no name behind: the memory goes with the last process that maps it."""
    ours, theirs = multiprocessing.Pipe()
    owner = Forked(own, theirs)
    try:
        at = ours.recv()
        slab = Slab.attach(at)
        assert os.readlink(at.path) == "/memfd:lmc-slab (deleted)", "it never had a name"
        inode = os.stat(at.path).st_ino
    finally:
        owner.kill()
        owner.wait()
        ours.close()
        theirs.close()
    assert slab.ready(S1, tag_of(KEY)) == 2
    assert slab.part(S1, 1)[:4].tolist() == [7, 7, 7, 0]
    slab.part(S1, 1)[:] = 3
    assert bool((slab.slot(S1)[1] == 3).all())
    with pytest.raises(StorageError, match=r"cannot open the slab at .*on the scheduler's host"):
        Slab.attach(at)
    assert mapped(inode)
    del slab
    gc.collect()
    assert not mapped(inode)


def test_a_shared_slab_that_is_dropped_closes_its_file():
    slab = Slab(2, 2, 4096, shared=True)
    inode = os.stat(slab.address.path).st_ino
    assert mapped(inode)
    assert opened(inode)
    del slab
    gc.collect()
    assert not mapped(inode)
    assert not opened(inode)


@pytest.mark.parametrize(
    "path", ["/proc/0/fd/3", "/proc/self/fd/9999", "/nowhere", "/proc", "/dev/null", "/proc/self/maps"]
)
def test_a_place_that_is_no_slab_is_a_storage_error(path):
    with pytest.raises(StorageError, match="cannot open the slab"):
        Slab.attach(SlabAddress(path=path, slots=3, parallelism=Parallelism((2,)), part_bytes=5000))


def test_a_smaller_slab_than_was_said_is_a_storage_error():
    """A process id that was used again leads to somebody else's file: mapping it was a bare ValueError."""
    slab = Slab(2, 2, 4096, shared=True)
    with pytest.raises(StorageError, match="cannot open the slab"):
        Slab.attach(replace(slab.address, slots=200))


def test_a_shared_slab_that_the_system_cannot_map_is_no_memory(monkeypatch):
    monkeypatch.setattr(slab_module, "room_on", lambda device: 1 << 80)
    with pytest.raises(NoMemory, match="GiB"):
        Slab(2, 2, 1 << 60, shared=True)


def test_a_label_counts_parts_until_the_chunk_is_lost():
    slab = Slab(2, 3, 4096, shared=True)
    assert slab.ready(S1, tag_of(KEY)) == LOST
    for ready in (0, 2, 3):
        slab.label(S1, KEY, ready)
        assert slab.ready(S1, tag_of(KEY)) == ready
        assert slab.ready(S1, tag_of(KEY) + 1) == LOST
    slab.lose(S1)
    assert slab.ready(S1, tag_of(KEY)) == LOST


def test_a_private_slab_takes_labels_and_keeps_none():
    slab = Slab(2, 3, 4096)
    slab.label(S1, KEY, 3)
    slab.lose(S1)
    assert slab.labels is None


def test_a_tag_fits_a_label_whatever_the_key():
    assert tag_of(ChunkKey(b"\xff" * 32)) == (1 << 63) - 1
    assert tag_of(ChunkKey(bytes(32))) == 0


STAGES, RANKS = (3, 2), 2  # of an engine with four workers
WORKERS = [(stage, rank) for stage in range(2) for rank in range(RANKS)]


def numbered(slab: Slab) -> None:
    """Write into each part the number of its slot and its own, through the views that tiers read into."""
    for slot in range(slab.slots):
        for part, view in enumerate(views(slab, slot)):
            view[:] = bytes([10 * slot + part]) * len(view)


def views(slab: Slab, slot: int) -> list[memoryview]:
    return [view for part in range(slab.parts) for view in slab.memory(slot, part, 1, slab.part_bytes)]


def test_each_worker_maps_its_own_parts_of_every_slot():
    slab = Slab(4, Parallelism(STAGES, RANKS), 100, shared=True)
    numbered(slab)
    for stage, rank in WORKERS:
        attached = Slab.attach(slab.address, slab.address.parallelism.worker(stage, rank))
        for slot in range(4):
            for layer in range(STAGES[stage]):
                part = sum(STAGES[:stage]) * RANKS + layer * RANKS + rank
                assert attached.part(slot, part)[:100].tolist() == [10 * slot + part] * 100


def test_the_parts_of_a_worker_lie_side_by_side():
    slab = Slab(4, Parallelism(STAGES, RANKS), 5000, shared=True)
    for stage, rank in WORKERS:
        share = slab.address.parallelism.worker(stage, rank)
        mine = [slab.part(slot, part).data_ptr() for slot in range(4) for part in range(slab.parts)[share.numbers]]
        assert mine == list(range(mine[0], mine[0] + len(mine) * slab.stride, slab.stride))


def test_a_slot_of_several_workers_is_read_whole_in_the_order_of_its_parts():
    slab = Slab(3, Parallelism(STAGES, RANKS), 4096, shared=True)
    numbered(slab)
    wanted = b"".join(bytes([20 + part]) * 4096 for part in range(10))
    assert bytes(slab.snapshot(2, 10, 4096)) == wanted
    assert b"".join(slab.memory(2, 0, 10, 4096)) == wanted
    assert b"".join(slab.memory(2, 3, 4, 4096)) == wanted[3 * 4096 : 7 * 4096]


def test_what_an_older_chunk_left_is_zeroed_for_all_workers():
    slab = Slab(2, Parallelism(STAGES, RANKS), 4096, shared=True)
    numbered(slab)
    slab.seal(1, 1000)
    assert all(slab.part(1, part)[1000:].sum() == 0 for part in range(10))
    assert all(slab.part(0, part)[1000:].min() == part for part in range(10)), "the control"


class Registered:
    """Notes what is page-locked, and may refuse some of it."""

    def __init__(self, monkeypatch, *, refused: int = 0) -> None:
        self.locked, self.released, self._refused = [], [], refused
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        self.devices = []
        monkeypatch.setattr(torch.cuda, "set_device", self.devices.append)

    def cudaHostRegister(self, address, size, flags):
        if self._refused and not self.locked:
            self._refused -= 1
            return 2
        self.locked.append((address, size))
        return 0

    def cudaHostUnregister(self, address):
        self.released.append(address)


def test_a_worker_page_locks_its_own_share_in_stretches_of_whole_slots(monkeypatch):
    owner = Slab(20, Parallelism(STAGES, RANKS), 4096, shared=True)
    found = Registered(monkeypatch)
    monkeypatch.setattr("lmc.storage.memory.page_lock.LOCKED_AT_ONCE", 4 * 4096)
    share = owner.address.parallelism.worker(0, 1)
    attached = Slab.attach(owner.address, share)
    first = attached.part(0, share.first).data_ptr()
    slots = 2 * 3 * 4096  # four parts do not end with a slot of three, so a stretch has two slots
    assert sorted(found.locked) == [(first + i * slots, slots) for i in range(10)]
    assert set(found.devices) == {3}, "a thread locks for the device that its worker uses"
    assert (attached.locked_whole, owner.locked_whole) == (True, False)
    del attached
    gc.collect()
    assert sorted(found.released) == sorted(address for address, _ in found.locked)


def test_stretches_that_are_locked_are_released_and_others_are_not(monkeypatch, caplog):
    found = Registered(monkeypatch, refused=1)
    monkeypatch.setattr("lmc.storage.memory.page_lock.LOCKED_AT_ONCE", 4096)
    monkeypatch.setattr("lmc.storage.memory.page_lock.THREADS", 1)
    with caplog.at_level(logging.WARNING):
        slab = Slab(4, 1, 4096)
    (line,) = caplog.messages
    assert "0.00 GiB of memory cannot be page-locked (CUDA error 2)" in line
    assert (len(found.locked), slab.locked_whole) == (3, False)
    del slab
    gc.collect()
    assert sorted(found.released) == sorted(address for address, _ in found.locked)


def test_memory_that_cannot_be_page_locked_is_used_as_it_is_and_that_is_said_once(monkeypatch, caplog):
    """Earlier, a refused page lock ended the engine: containers often allow only a few MiB of locked memory."""
    Registered(monkeypatch, refused=1)
    with caplog.at_level(logging.WARNING):
        slab = Slab(2, 3, 4096)
    slab.part(1, 2).fill_(7)
    assert bool((slab.slot(1)[2] == 7).all())
    (line,) = caplog.messages
    assert "cannot be page-locked (CUDA error 2)" in line
    assert "ulimit -l" in line


def test_memory_is_never_page_locked_while_a_graph_is_captured(monkeypatch):
    """CUDA would break off the capture, and vLLM its start."""
    owner, share, found = sparse_slab_of_a_server(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for lock in (lambda: Slab(2, 1, 4096), lambda: Slab.attach(owner.address, share)):
        with pytest.raises(AssertionError, match="while a CUDA graph is captured"):
            lock()
    assert not found.locked


def sparse_slab_of_a_server(monkeypatch, **refused):
    """A slab whose workers lock it, the share of one of them, and what is locked from then on."""
    owner = Slab(20, Parallelism(STAGES, RANKS), 4096, shared=True, sparse=True, page_locked=True)
    found = Registered(monkeypatch, **refused)
    monkeypatch.setattr("lmc.storage.memory.page_lock.LOCKED_BESIDE", 4 * 4096)
    return owner, owner.address.parallelism.worker(0, 1), found


def locking():
    return [thread for thread in threading.enumerate() if thread.name == "lmc-lock"]


def test_a_worker_page_locks_its_share_of_a_servers_memory_beside_its_steps(monkeypatch):
    owner, share, found = sparse_slab_of_a_server(monkeypatch)
    Slab.attach(owner.address)
    assert not locking(), "a scheduler copies nothing to a GPU"
    worker = Slab.attach(owner.address, share)
    for thread in locking():
        thread.join()
    first, slots = worker.part(0, share.first).data_ptr(), 2 * 3 * 4096
    assert found.locked == [(first + i * slots, slots) for i in range(10)]
    assert found.devices == [3]
    assert worker.locked_whole
    del worker
    gc.collect()
    assert sorted(found.released) == sorted(address for address, _ in found.locked)


def test_a_worker_whose_slab_has_gone_locks_no_more_of_it(monkeypatch):
    owner, share, found = sparse_slab_of_a_server(monkeypatch)
    reached, go_on, register = threading.Event(), threading.Event(), found.cudaHostRegister

    def slowly(*asked):
        if found.locked:
            reached.set()
            assert go_on.wait(60)
        return register(*asked)

    found.cudaHostRegister = slowly
    worker = Slab.attach(owner.address, share)
    (thread,) = locking()
    assert reached.wait(60)
    del worker
    gc.collect()
    assert not found.released, "its memory stays while some of it is being locked"
    go_on.set()
    thread.join()
    gc.collect()
    assert len(found.locked) == 2
    assert sorted(found.released) == sorted(address for address, _ in found.locked)


def test_a_servers_memory_that_cannot_be_page_locked_is_used_as_it_is(monkeypatch, caplog):
    owner, share, found = sparse_slab_of_a_server(monkeypatch, refused=1)
    with caplog.at_level(logging.WARNING):
        worker = Slab.attach(owner.address, share)
        for thread in locking():
            thread.join()
    (line,) = caplog.messages
    assert "cannot be page-locked (CUDA error 2)" in line
    assert not found.locked, "what comes behind it is not tried"
    assert not worker.locked_whole
    worker.part(1, share.first).fill_(7)
    assert bool((owner.part(1, share.first) == 7).all())


def test_memory_that_workers_lock_is_not_given_back_to_the_system():
    taken = {}
    for page_locked in (False, True):
        slab = Slab(4, 2, 4096, shared=True, sparse=True, page_locked=page_locked)
        assert all(slab.take(Slot(slot)) for slot in range(4))
        slab.part(S1, 1).fill_(7)
        slab.give_back(S1)
        taken[page_locked] = os.fstat(slab.file).st_blocks
        assert bool((slab.part(S1, 1) == 7).all()) is page_locked
    assert taken[True] > taken[False]


@pytest.fixture
def huge_pages():
    """Eight huge pages, which only root can reserve."""
    reserved = Path("/proc/sys/vm/nr_hugepages")
    before = reserved.read_text() if reserved.exists() else ""
    try:
        reserved.write_text("8")
    except OSError:
        pytest.skip("huge pages cannot be reserved here")
    if int(reserved.read_text()) < 8:
        reserved.write_text(before)
        pytest.skip("the system has no eight huge pages to spare")
    yield
    reserved.write_text(before)


def test_a_shared_slab_is_in_huge_pages_where_there_are_some(huge_pages) -> None:
    huge = 2 << 20
    slab = Slab(6, 3, huge // 3, shared=True, sparse=True)
    assert os.fstatvfs(slab.file).f_bsize == huge
    assert all(slab.take(Slot(slot)) for slot in range(6))
    other = Slab.attach(slab.address)
    slab.slot(Slot(3)).fill_(7)
    assert bool((other.slot(Slot(3)) == 7).all())
    slab.give_back(Slot(2))  # Only whole pages can be given back, and its neighbours stay as they are.
    assert bool((slab.slot(Slot(3)) == 7).all())
    assert slab.take(Slot(2))
    with pytest.raises(PermissionError):
        os.ftruncate(slab.file, 0)
    assert os.fstatvfs(Slab(9, 3, huge // 3, shared=True).file).f_bsize < huge, "nine slots are more than there are"
    del other, slab
