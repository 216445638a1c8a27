"""Many copies in one call: what is in the list, executed one by one, is what page-by-page copies do."""

import ctypes
import math
import random
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_staging import Machine, Stream, Task
from test_vllm_paged import LAYOUTS, B, L, caches_of, part_of

from lmc import copies as copies_module
from lmc.connectors.vllm.worker import paged
from lmc.connectors.vllm.worker.paged import Move, Pages
from lmc.copies import ALIGNED, Copies, Uploads, can_submit, merged, stretches_of, submit_of


def execute(copies: Copies) -> None:
    for source, target, size in zip(*(one.tolist() for one in copies), strict=True):
        ctypes.memmove(target, source, size)


class Calls(list):
    """Executes copies as a GPU's driver does, and counts the calls."""

    def __call__(self, copies: Copies) -> None:
        self.append(len(copies.sizes))
        execute(copies)


class OneWay(Pages):
    """Pages for which one of the two ways to copy has been measured as the faster one."""

    def __init__(self, caches: dict, *, stages: bool) -> None:
        super().__init__(caches, B)
        self.choose_copy_mode(lambda work: [work(), 1.0 if self._stages == stages else 2.0][1])
        assert self._stages == stages


def in_one_call(monkeypatch, caches: dict, *, stages: bool = False) -> tuple[Pages, Calls]:
    """Pages whose copies are made as on a GPU, page by page or by way of other memory there."""
    calls = Calls()
    monkeypatch.setattr(paged, "submit_of", lambda device: calls)
    monkeypatch.setattr(paged, "can_submit", lambda memory: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    pages = OneWay(caches, stages=stages)
    calls.clear()
    return pages, calls


@pytest.mark.parametrize(
    ("shape", "skipped", "wide"),
    [
        ((6, 2, 4, 8), 0, True),  # 128 bytes a page
        ((6, 2, 4, 8), 8, True),
        ((6, 2, 4, 8), 4, False),  # Pages begin in the middle of 16 bytes,
        ((6, 1, 3, 5), 0, False),  # or have 30 bytes.
    ],
)
def test_pages_are_moved_by_16_bytes_where_they_lie_at_multiples_of_that(shape, skipped, wide):
    """A GPU cannot read 16 bytes at once that begin elsewhere."""
    count = math.prod(shape)
    raw = torch.arange(count + 64).to(torch.float16)
    raw = raw[raw.data_ptr() % 16 // 2 :]
    pages = raw[skipped : skipped + count].view(shape)
    wide_view = paged.widened
    found = wide_view(pages)
    assert found.dtype == (torch.complex128 if wide else torch.float16)
    order = torch.tensor([4, 1, 2])
    assert torch.equal(found.index_select(0, order).view(torch.float16).flatten(), pages[order].flatten())
    apart = raw[: count // 2 * 2].view(shape)[:, :, :, : shape[3] - 1]
    assert wide_view(apart) is apart, "a page is in several pieces"


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("blocks", [[0, 1, 2, 3], [5, 4, 3], [4, 1, 2], [2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_copied_as_one_by_one(monkeypatch, layout, ratio, dtype, blocks, stages):
    given_caches = caches_of(layout, ratio=ratio, dtype=dtype)
    one_by_one = Pages(given_caches, B)
    together, calls = in_one_call(monkeypatch, given_caches, stages=stages)
    half = len(blocks) // 2
    for layer in range(L):
        wanted, found = (part_of(one_by_one, layer, len(blocks) + 1) for _ in range(2))
        one_by_one.save(layer, blocks, wanted)
        together.save_all(layer, [Move(blocks, found)])
        assert torch.equal(found, wanted)

        moves = [Move([1], wanted, 1), Move(random.Random(0).sample(range(4, B), half), wanted)]
        target, other = (caches_of(layout, ratio=ratio, dtype=dtype, fill=False) for _ in range(2))
        singly = Pages(target, B)
        for move in moves:
            singly.load(layer, move.blocks, move.part, move.first)
        in_one_call(monkeypatch, other, stages=stages)[0].load_all(layer, moves)
        assert all(torch.equal(target[name], other[name]) for name in target)
    assert len(calls) == L, "one call for each layer"
    assert not stages or calls == [1] * L, "a part is one copy"


@pytest.mark.parametrize(("most", "calls"), [(1, 4), (2, 3), (3, 2), (100, 1)])
def test_many_pages_take_a_bounded_amount_of_memory_on_the_gpu(monkeypatch, most, calls):
    caches = caches_of(LAYOUTS[0])
    pages, made = in_one_call(monkeypatch, caches, stages=True)
    monkeypatch.setattr(paged, "STAGED_BYTES", most * pages.page_bytes[0] + 1)
    moves = [Move([4], 0), Move([1, 2], 0), Move([3], 0), Move([0], 0)]
    found, wanted = ([part_of(pages, 0, len(move.blocks)) for move in moves] for _ in range(2))
    for move, part in zip(moves, wanted, strict=True):
        Pages(caches, B).save(0, move.blocks, part)
    pages.save_all(0, [move._replace(part=part) for move, part in zip(moves, found, strict=True)])
    assert all(map(torch.equal, found, wanted))
    assert len(made) == calls


def test_without_memory_on_the_gpu_pages_are_copied_one_by_one(monkeypatch):
    caches = caches_of(LAYOUTS[0])
    pages, calls = in_one_call(monkeypatch, caches, stages=True)
    wanted, found = (part_of(pages, 0, 3) for _ in range(2))
    Pages(caches, B).save(0, [4, 1, 2], wanted)

    def full(self, *what, **more):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Pages, "_in_stages", full)
    pages.save_all(0, [Move([4, 1, 2], found)])
    assert torch.equal(found, wanted)
    assert len(calls) == 1


def test_a_call_that_fails_at_the_start_is_not_used(monkeypatch, caplog):
    def failing(copies) -> None:
        raise RuntimeError("cuMemcpyBatchAsync failed with error 1 of CUDA at copy 0")

    caches = caches_of(LAYOUTS[0])
    monkeypatch.setattr(paged, "submit_of", lambda device: failing)
    monkeypatch.setattr(paged, "can_submit", lambda memory: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    pages = Pages(caches, B)
    with pytest.raises(RuntimeError):
        pages.save_all(0, [Move([1, 2], part_of(pages, 0, 2))])
    pages.choose_copy_mode(lambda work: [work(), 1.0][1])
    assert "could not copy many pages in one call, one by one: cuMemcpyBatchAsync failed with error 1" in caplog.text
    found, wanted = (part_of(pages, 0, 2) for _ in range(2))
    pages.save_all(0, [Move([1, 2], found)])
    Pages(caches, B).save(0, [1, 2], wanted)
    assert torch.equal(found, wanted)


def test_a_long_prefix_whose_blocks_descend_is_one_call_for_each_layer(monkeypatch):
    """The engine frees blocks in reverse, so the next request gets them in descending order."""
    blocks = 1024
    caches = {f"layer {i}": torch.zeros(blocks, 1, 2, 4) for i in range(2)}
    calls = Calls()
    monkeypatch.setattr(paged, "submit_of", lambda device: calls)
    monkeypatch.setattr(paged, "can_submit", lambda memory: True)
    pages = Pages(caches, blocks)
    parts = [torch.zeros(16 * pages.page_bytes[0], dtype=torch.uint8) for _ in range(blocks // 16)]
    ids = list(range(blocks))[::-1]
    moves = [Move(ids[16 * i : 16 * i + 16], part) for i, part in enumerate(parts)]
    for layer in range(2):
        pages.load_all(layer, moves)
    assert calls == [blocks, blocks]
    moves = [Move(range(blocks), torch.zeros(blocks * pages.page_bytes[0], dtype=torch.uint8))]
    pages.load_all(0, moves)
    assert calls[-1] == 1, "neighbours are joined"


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=12))
def test_joined_copies_move_the_same_bytes(pieces):
    """Each piece may follow the one before it in the source, in the target, in both or in none."""
    memory = torch.arange(600, dtype=torch.uint8).view(3, 200)
    source, target, other = (row.data_ptr() for row in memory)
    copies, at, to = [], 0, 0
    for size, near, beside in pieces:
        at, to = at + (0 if near else 3), to + (0 if beside else 5)
        copies.append((source + at, target + to, size))
        at, to = at + size, to + size
    plain = Copies(*torch.tensor(copies, dtype=torch.long).view(-1, 3).T.contiguous().numpy())
    memory[2] = memory[1]
    execute(plain)
    shorter = merged(plain._replace(targets=plain.targets + (other - target)))
    execute(shorter)
    assert torch.equal(memory[1], memory[2])
    apart = sum(not (near and beside) for _, near, beside in pieces[1:]) + bool(pieces)
    assert len(shorter.sizes) == apart


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_stretches_are_in_the_order_of_the_tensor(dims):
    tensor = torch.arange(24).view(2, 3, 4).permute(dims)
    offsets, size = stretches_of(tensor)
    found = [ctypes.string_at(tensor.data_ptr() + int(offset), size) for offset in offsets]
    assert b"".join(found) == tensor.contiguous().numpy().tobytes()


def on_a_stream(monkeypatch, seed: int, number: int) -> tuple[list[int], int]:
    """Save what the model's stream writes, in a list of copies, and let it be overwritten behind that.

    Returns what was saved, and the number of the stream that the driver was given.
    """
    machine, numbers = Machine(seed), []
    machine.installed(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: machine.current)
    machine.model.cuda_stream, machine.copies.cuda_stream = number, 9
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(copies_module, "_stream_beside", lambda device: machine.copies)
    page, saved = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)

    def call(*given: Any) -> int:
        numbers.append(given[-1])
        list_ = Copies(*(np.array([ctypes.c_int64.from_address(given[i]).value]) for i in (1, 0, 2)))
        machine.issue(machine.current, Task(run=lambda: execute(list_)))
        return 0

    monkeypatch.setattr(copies_module, "_driver_call", lambda: call)
    submit = submit_of(torch.device("cuda"))
    addresses = page.data_ptr(), saved.data_ptr(), page.numel()
    for value in (3, 5):
        machine.issue(machine.model, Task(run=partial(page.fill_, value)))
        if value == 3:
            submit(Copies(*(np.array([one]) for one in addresses)))
        machine.some()
    submit(Copies(*(np.empty(0, np.int64) for _ in addresses)))
    machine.finish()
    (given,) = numbers
    return saved.tolist(), given


@pytest.mark.parametrize(("current", "wanted"), [(0, 9), (7, 7)])
def test_copies_are_made_in_the_order_of_the_current_stream_but_never_on_the_default_one(monkeypatch, current, wanted):
    """CUDA refuses lists of copies on its default stream, which is what a program has that asks for no other."""
    assert all(on_a_stream(monkeypatch, seed, current) == ([3] * 8, wanted) for seed in range(100))


@pytest.mark.parametrize("who", ["model", "copies"])
def test_the_control_a_stream_that_does_not_wait_saves_other_bytes(monkeypatch, who):
    wait = Stream.wait_event

    def careless(stream, event) -> None:
        if stream is not getattr(stream.machine, who):
            wait(stream, event)

    monkeypatch.setattr(Stream, "wait_event", careless)
    assert not all(on_a_stream(monkeypatch, seed, 0)[0] == [3] * 8 for seed in range(100))


def test_without_a_gpu_there_is_no_such_call():
    assert submit_of(torch.device("cpu")) is None
    assert not can_submit(torch.zeros(1))


def fresh(name: str) -> ModuleType:
    """A module that has remembered nothing yet."""
    spec = find_spec(name)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_driver_without_the_call_is_no_error(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert fresh("lmc.copies").submit_of(torch.device("cuda")) is None or hasattr(torch.ops, "_C_cache_ops")


NUMBERS = st.builds(
    lambda count, columns, dtype: torch.arange(count * columns).remainder(2).to(dtype).view(count, columns).squeeze(1),
    st.integers(0, 40), st.integers(1, 3), st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32]),
)  # fmt: skip


@given(st.lists(NUMBERS, max_size=12), st.integers(0, 600))
def test_numbers_are_uploaded_as_they_were_added(added: list[torch.Tensor], capacity: int) -> None:
    uploads = Uploads(torch.device("cpu"), capacity)
    wanted = [numbers.clone() for numbers in added]
    found = [uploads.add(numbers) for numbers in added]
    assert all(one.data_ptr() % ALIGNED == 0 for one in found if one.numel())
    for numbers in added:
        numbers.zero_()  # They may change before they are sent.
    uploads.send()
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(found, wanted, strict=True))
    uploads.add(torch.ones(200))
    uploads.send()
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), "the memory was used again"


@pytest.mark.parametrize(("capacity", "copies"), [(4096, 1), (1024, 2), (0, 3)])
def test_numbers_that_fit_are_sent_in_one_copy(monkeypatch: pytest.MonkeyPatch, capacity: int, copies: int) -> None:
    uploads, sent, copy = Uploads(torch.device("cpu"), capacity), [], torch.Tensor.copy_
    for count in (64, 32, 128):  # numbers of 8 bytes
        uploads.add(torch.arange(count))

    def noted(target: torch.Tensor, source: torch.Tensor, **how: bool) -> torch.Tensor:
        sent.append((len(source), how))
        return copy(target, source, **how)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    uploads.send()
    assert (len(sent), sum(size for size, _ in sent)) == (copies, 8 * (64 + 32 + 128))
    assert all(how == {"non_blocking": False} for _, how in sent), "only page-locked memory is copied without a wait"
    uploads.send()
    assert len(sent) == copies, "nothing is left"


def test_the_host_does_not_wait_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers go to a GPU from page-locked memory."""
    made, sent, empty, copy = list[tuple[bool, str]](), list[dict[str, bool]](), torch.empty, torch.Tensor.copy_

    def noted_empty(size: int, *, dtype: torch.dtype, pin_memory: bool = False, device: object = "cpu") -> torch.Tensor:
        made.append((pin_memory, str(device)))
        return empty(size, dtype=dtype)

    def noted_copy(target: torch.Tensor, source: torch.Tensor, **how: bool) -> torch.Tensor:
        sent.append(how)
        return copy(target, source)

    monkeypatch.setattr(torch, "empty", noted_empty)
    uploads = Uploads(torch.device("cuda"))
    made.clear()
    found = uploads.add(torch.arange(3))
    monkeypatch.setattr(torch.Tensor, "copy_", noted_copy)
    uploads.send()
    assert (found.tolist(), made, sent) == ([0, 1, 2], [(True, "cpu"), (False, "cuda")], [{"non_blocking": True}])
