"""How much of a step a worker takes for blends and for documents that it learns."""

import random
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmc.connectors.vllm.messages import BLEND_SHARE, StepPlan
from lmc.connectors.vllm.worker import tensor_parallel
from lmc.connectors.vllm.worker import worker as module
from lmc.connectors.vllm.worker.streams import Streams
from lmc.connectors.vllm.worker.worker import BUSY, ROWS_THAT_END, Cost, Work, Worker
from lmc.errors import ChunkLost

STEP, LAYERS = 1000, 32
WHOLE = STEP * LAYERS  # token-layers of a full step
LAYERWISE, COMPILED = range(1, 400), range(2000, WHOLE // BLEND_SHARE + 1)  # what slices of a blend cost
BLEND = 2000  # a slice of a blend
COPY = 401  # what the copy of a chunk costs


class OnlyTime(Worker):
    """A worker without an engine, which only divides its time."""

    def __init__(self, step: int = STEP, layers: int = LAYERS) -> None:
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=step))
        super().__init__(config, None, blends=False)
        self._pages, self._ranks, self._device = SimpleNamespace(layers=layers), 1, torch.device("cpu")
        self._streams = Streams(self._device)

    def add(self, work: Work) -> None:
        """Begin a job: of a request, or the learning of a document."""
        if work.request:
            self._loading[work.request] = work
        else:
            self._learning.append(work)

    def backfill(self, work: Work) -> None:
        self._backfills.append(work)

    def work_of(self, request: str) -> Work:
        return self._loading[request]

    @property
    def jobs(self) -> int:
        return len(self._loading) + len(self._learning) + len(self._backfills)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "get_tp_group", lambda: SimpleNamespace(world_size=1))


@pytest.fixture
def worker():
    return OnlyTime()


class Job:
    """A job whose slices cost what they are given to cost. Batches of the compiled model and copies are announced."""

    def __init__(self, worker: Worker, name: str, costs: list[int], **known: Any) -> None:
        self.done: list[int] = []
        worker.add(Work(self.steps(costs), name, **known))

    def steps(self, costs: list[int]):
        for cost, following in zip(costs, [*costs[1:], 0], strict=True):
            self.done.append(cost)
            yield Cost(cost, None if following in LAYERWISE else following)


def step(
    worker: Worker, jobs: list[Job], scheduled: int, first: Collection[str] = (), *, received: Collection[str] = (),
    answers: Collection[str] = (),
) -> list[int]:  # fmt: skip
    """Do a step, and return the costs of the slices that were done in it."""
    before = [len(job.done) for job in jobs]
    worker.work(StepPlan(scheduled=scheduled, first=set(first), received=set(received), answers=set(answers)))
    return [cost for job, count in zip(jobs, before, strict=True) for cost in job.done[count:]]


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("scheduled", [0, 500, 950, STEP])
def test_a_step_takes_a_tenth_longer_at_most_than_a_full_one_of_the_engine(worker, scheduled, seed):
    draw = random.Random(seed)
    left = max(WHOLE - scheduled * LAYERS, WHOLE // BLEND_SHARE)
    costs = [[draw.choice(kind) for kind in (LAYERWISE, COMPILED) for _ in range(10)] for _ in range(3)]
    jobs = [Job(worker, f"r{n}", some) for n, some in enumerate(costs)]
    for _ in range(100):
        cost = step(worker, jobs, scheduled)
        assert sum(cost) <= left + LAYERWISE.stop, "what is not announced may be larger than was known"
    assert [job.done for job in jobs] == costs


def test_a_slice_that_is_larger_than_what_is_left_waits_for_the_next_step(worker):
    job = Job(worker, "r", [1500, 1500, 1500])
    assert step(worker, [job], STEP) == [1500, 1500], "3200 are left, and one more would not fit"
    assert step(worker, [job], STEP) == [1500]


def test_a_job_ends_in_the_step_of_its_last_slice(worker):
    Job(worker, "r", [1500, WHOLE // BLEND_SHARE])
    worker.work(StepPlan(scheduled=STEP))
    assert worker.jobs == 1
    worker.work(StepPlan(scheduled=STEP))
    assert worker.jobs == 0


def test_a_document_beside_a_blend_does_not_make_a_step_longer(worker):
    blend, document = Job(worker, "r", [300] * 30), Job(worker, "", [2000] * 9, coming=2000)
    for _ in range(3):
        assert step(worker, [blend, document], STEP) == [300] * 10
    assert step(worker, [blend, document], STEP) == [2000]


def test_copies_of_a_document_do_not_wait_for_the_room_that_its_batches_took(worker):
    document = Job(worker, "", [WHOLE // BLEND_SHARE, *[COPY] * 9])
    assert step(worker, [document], STEP) == [WHOLE // BLEND_SHARE]
    assert step(worker, [document], STEP) == [COPY]
    assert step(worker, [document], 0) == [COPY] * 8


def test_a_step_ends_after_the_blends_that_a_prompt_waits_for(worker):
    """The prompt is computed in the next step, before blends of requests that came after it."""
    blends = [Job(worker, f"r{n}", [300 + n] * 3) for n in range(3)]
    document = Job(worker, "", [200] * 9, coming=200)
    assert step(worker, [*blends, document], 0, first=["r0", "r2"]) == [300] * 3 + [302] * 3
    assert step(worker, [*blends, document], 0, first=["r2"]) == [], "it has ended, and is not yet reported"
    assert step(worker, blends, STEP) == [301] * 3


def large(worker: Worker, name: str) -> Job:
    return Job(worker, name, [BLEND] * 3, computes="a blend", rows=ROWS_THAT_END)


def test_a_large_blend_that_ends_ends_the_step(worker):
    """The blend's request gets its first token before other blends are computed and before documents are learned."""
    blends, document = [large(worker, f"r{n}") for n in range(3)], Job(worker, "", [200] * 9, coming=200)
    assert step(worker, [*blends, document], 0) == [BLEND] * 3
    assert step(worker, [*blends, document], 0) == [], "on a GPU, the blend may still be running"
    assert step(worker, [*blends, document], 1, received=["r0"], answers=["r0"]) == [], "the token waits for nothing"
    assert step(worker, [*blends, document], 1, answers=["other"]) == [BLEND] * 3
    assert step(worker, [*blends, document], 1, received=["r1"]) == [BLEND] * 3, "the request has ended"


def test_blends_do_not_wait_for_ever_for_one_that_is_not_reported(worker, monkeypatch):
    monkeypatch.setattr(module, "MAX_STEPS_WAITED", 3)
    blends = [large(worker, f"r{n}") for n in range(2)]
    assert step(worker, blends, 0) == [BLEND] * 3
    assert [step(worker, blends, 0) for _ in range(4)] == [[], [], [], [BLEND] * 3]


def test_small_blends_share_a_step(worker):
    """The engine's pass for one token takes as long as they do."""
    blends = [Job(worker, f"r{n}", [BLEND] * 3, computes="a blend", rows=ROWS_THAT_END - 1) for n in range(5)]
    assert step(worker, blends, 0) == [BLEND] * 15


def test_blends_share_a_step_of_an_engine_that_is_busy(worker):
    blends = [large(worker, f"r{n}") for n in range(3)]
    assert step(worker, blends, round(BUSY * STEP) + 1) == [BLEND] * 9


def test_loads_go_on_after_a_blend_and_while_a_first_token_is_computed(worker):
    blends, load = [large(worker, f"r{n}") for n in range(2)], Job(worker, "load", [COPY] * 3)
    assert step(worker, [*blends, load], 0) == [BLEND] * 3 + [COPY] * 3
    load = Job(worker, "another", [COPY] * 3)
    assert step(worker, [*blends, load], 1, received=["r0"], answers=["r0"]) == [COPY] * 3
    assert step(worker, [*blends, load], 1) == [BLEND] * 3


def test_a_blend_that_fails_on_one_rank_ends_the_step_on_all():
    """Otherwise this rank would compute the next blend, and wait for the others for ever."""
    done = []
    for fails in (False, True):
        rank = OnlyTime()
        blends = [large(rank, f"r{n}") for n in range(2)]
        if fails:
            rank.work_of("r0").steps = failing(blends[0])
        done.append([step(rank, blends, 0), step(rank, blends, 0)])
    assert done[0] == done[1] == [[BLEND] * 3, []]


def failing(job: Job):
    yield from job.steps([BLEND] * 3)
    raise ChunkLost


def test_a_full_step_does_one_slice_however_large_it_is(worker):
    assert step(worker, [Job(worker, "r", [WHOLE, WHOLE])], STEP) == [WHOLE]


def test_a_job_goes_on_however_small_a_step_is():
    """A tenth of it is nothing."""
    worker = OnlyTime(step=1, layers=4)
    job = Job(worker, "r", [4, 4])
    assert [step(worker, [job], 1) for _ in range(2)] == [[4], [4]]


def test_learning_gets_a_slice_while_requests_run_and_all_of_an_idle_step(worker):
    """A running request hardly waits for a document that others may never ask for."""
    document = Job(worker, "", [200] * 500)
    assert step(worker, [document], STEP) == [200]
    assert step(worker, [document], 100) == [200]
    assert sum(step(worker, [document], 0)) == WHOLE
    blend = Job(worker, "r", [200] * 30)
    assert sum(step(worker, [blend, document], 0)) == WHOLE


def test_backfill_gets_one_slice_of_a_step_in_which_nothing_else_is_computed(worker):
    conversation = Job(OnlyTime(), "", [])
    worker.backfill(Work(conversation.steps([200] * 5), coming=200))
    document = Job(worker, "", [200])
    for scheduled, done in ((STEP, 0), (0, 1), (STEP, 1), (0, 2)):
        step(worker, [document], scheduled)
        assert len(conversation.done) == done


def test_a_document_that_came_once_is_learned_in_idle_steps_only(worker):
    document = Job(worker, "", [200] * 3, idle=True)
    assert step(worker, [document], STEP) == []
    blend = Job(worker, "r", [WHOLE, 200])
    assert step(worker, [blend, document], 0) == [WHOLE]
    assert step(worker, [blend], STEP) == [200]
    assert [step(worker, [document], 0) for _ in range(3)] == [[200]] * 3


def test_a_document_that_is_given_up_is_reported_as_failed(worker):
    Job(worker, "", [200] * 3, idle=True, job=7)
    step(worker, [], 0)
    worker.work(StepPlan(cancel=[7]))
    assert worker.jobs == 0
    report = worker.report()
    assert (report.failed, report.done) == ({7}, {7: 1})
