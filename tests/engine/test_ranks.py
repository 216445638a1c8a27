"""What the ranks of an engine agree on: memory, and that all of them have ended the self-test."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import multiprocessing

from lmc.connectors.vllm.worker import memory, tensor_parallel
from lmc.errors import NoMemory

CPU = torch.device("cpu")
SHORT, LONG = 1.0, 60.0  # seconds that ranks wait for each other


def of_ranks(count, group=None):
    return lambda: SimpleNamespace(world_size=count, cpu_group=group)


@pytest.mark.parametrize(("free", "fits"), [(99, False), (100, True)])
def test_the_memory_of_the_engines_own_steps_stays_free(monkeypatch, free, fits):
    monkeypatch.setattr(tensor_parallel, "get_tp_group", of_ranks(1))
    monkeypatch.setattr(memory, "_free", lambda device: free)
    if fits:
        memory.make_room(60, CPU, "a blend", kept=40)
        return
    with pytest.raises(NoMemory, match="a blend needs 0 MiB, 0 MiB must stay free for the engine"):
        memory.make_room(60, CPU, "a blend", kept=40)


def test_one_rank_does_not_try_to_allocate(monkeypatch):
    """One rank fails alone if memory is scarce, and such a block would drive others out of the allocator's cache."""
    monkeypatch.setattr(tensor_parallel, "get_tp_group", of_ranks(1))
    monkeypatch.setattr(torch, "empty", None)
    memory.make_room(1 << 50, CPU, "a blend")


def _rank(rank, folder, goods, seconds):
    """Write what `meet_all_ranks` returns or raises. A rank whose vote is None does not come."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=len(goods))
    tensor_parallel.get_tp_group = of_ranks(len(goods), torch.distributed.group.WORLD)
    tensor_parallel.MEET_SECONDS = seconds
    said = "stayed away"
    if goods[rank] is not None:
        try:
            said = str(tensor_parallel.meet_all_ranks(good=goods[rank]))
        except RuntimeError as error:
            said = str(error)
    (folder / str(rank)).write_text(said)
    while goods[rank] is None and not all((folder / str(other)).exists() for other in range(len(goods))):
        pass
    os._exit(0)  # At a normal end, gloo's threads sometimes abort the process.


@pytest.mark.parametrize(
    ("goods", "seconds", "said"),
    [
        ((True, False), LONG, "False"),
        ((True, None), SHORT, "the self-test of lmc has ended on some ranks only: see the errors above"),
    ],
)
def test_a_rank_whose_self_test_fails_alone_does_not_let_the_others_wait_forever(tmp_path, goods, seconds, said):
    multiprocessing.spawn(_rank, (tmp_path, goods, seconds), len(goods))
    asked = [rank for rank, good in enumerate(goods) if good is not None]
    assert all((tmp_path / str(rank)).read_text().startswith(said) for rank in asked)
