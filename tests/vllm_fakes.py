"""An engine without vLLM: requests, a block pool, pages and workers, for the tests of the connector's scheduler side.

A page's bytes follow from the prompt up to its end, so that a wrong page is seen; what a blend computes is marked.
"""

import hashlib
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from storage_fakes import open_gates

from lmc.blend.markers import Markers
from lmc.config.settings import Settings
from lmc.connectors.vllm.messages import BlendJob, LoadJob, SaveJob, StepPlan, StepReport, WorkerFacts
from lmc.connectors.vllm.scheduler import scheduler
from lmc.connectors.vllm.scheduler.kv_groups import KVGroups
from lmc.connectors.vllm.scheduler.scheduler import Scheduler
from lmc.connectors.vllm.start import Setup, layers_of_stages, open_engine
from lmc.shapes import GIB
from lmc.storage import cost_model
from lmc.storage.memory.slab import LOST, Slab

BLOCK, CHUNK, LAYERS, HEADS, DIM = 4, 8, 2, 1, 8
PAGE = 2 * HEADS * DIM * 4 * BLOCK  # bytes
SEPARATOR = (90, 91)
APPROXIMATE = 0xEE


class Block:
    def __init__(self, number):
        self.block_id, self.ref_cnt, self.is_null, self.block_hash = number, 0, number == 0, None


class Pool:
    """As vLLM's block pool: block 0 is null, free blocks keep their hash until they are taken.

    `cached` has the blocks of group 0 by their hash, and those of other groups by their hash and group.
    """

    def __init__(self, count):
        self.blocks = [Block(i) for i in range(count)]
        self.free = deque(self.blocks[1:])
        self.cached = {}

    def get_num_free_blocks(self):
        return len(self.free)

    def get_cached_block(self, block_hash, groups):
        found = [self.cached.get(self.key(block_hash, group)) for group in groups]
        return found if all(found) else None

    @staticmethod
    def key(block_hash, group):
        return (block_hash, group) if group else block_hash

    def get_new_blocks(self, count):
        if count > len(self.free):
            raise ValueError("not so many free blocks")
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            if block.block_hash is not None:
                del self.cached[block.block_hash]
                block.block_hash = None
            block.ref_cnt = 1
        return taken

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                self.free.append(block)

    def enter(self, block, block_hash):
        if block.block_hash is None and block_hash not in self.cached:
            block.block_hash, self.cached[block_hash] = block_hash, block

    def cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id):
        assert block_size == BLOCK
        for i in range(num_cached_blocks, num_full_blocks):
            self.enter(blocks[i], self.key(request.block_hashes[i], kv_cache_group_id))

    def forget(self):
        """As `reset_prefix_cache`."""
        self.cached.clear()
        for block in self.blocks:
            block.block_hash = None


@dataclass
class Adapter:
    """As vLLM's LoRARequest."""

    lora_path: str
    name: str = "adapter"
    lora_int_id: int = 1
    load_inplace: bool = False

    @property
    def adapter_id(self):
        return self.lora_int_id


@dataclass(eq=False)
class Request:
    """As vLLM's request, as far as the connector looks at it."""

    request_id: str
    prompt_token_ids: list
    lmc: object = None
    cache_salt: str | None = None
    lora_request: object = None
    mm_features: list = field(default_factory=list)
    prompt_embeds: object = None
    skip_reading_prefix_cache: bool = False
    prefill_stats: object = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    finished: bool = False
    aborted: bool = False
    running: bool = False  # The engine has scheduled it, and has the blocks of its load in its cache.
    priority: int = 0
    max_tokens: int = 16
    arrival_time: float = field(default_factory=time.time)

    def __post_init__(self):
        self.kv_transfer_params = None if self.lmc is None else {"lmc": self.lmc}
        self.all_token_ids = list(self.prompt_token_ids)
        self.block_hashes = []
        self.hashed = 0  # number of hashes that were computed
        self.update_block_hashes()

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self):
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self):
        return len(self.prompt_token_ids)

    @property
    def status(self):
        return SimpleNamespace(name="FINISHED_ABORTED" if self.aborted else "RUNNING" if self.running else "WAITING")

    def is_finished(self):
        return self.finished

    def append(self, tokens):
        self.all_token_ids += tokens
        self.update_block_hashes()

    def update_block_hashes(self):
        new = hashes_of(self.all_token_ids, self.block_hashes, self.cache_salt)
        self.block_hashes.extend(new)
        self.hashed += len(new)


def hashes_of(tokens, known=(), salt=None):
    """Hashes of the full blocks behind the known ones."""
    found = list(known)
    for start in range(len(found) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        extra = salt if start == 0 else None
        said = repr((found[-1] if found else None, list(tokens[start : start + BLOCK]), extra))
        found.append(hashlib.sha256(said.encode()).digest())
    return found[len(known) :]


def page(tokens, block, layer):
    """What exact pages hold."""
    said = repr((list(tokens[: (block + 1) * BLOCK]), layer)).encode()
    return torch.frombuffer(bytearray(hashlib.shake_128(said).digest(PAGE)), dtype=torch.uint8)


def token_bytes(tokens, start, stop, layer):
    """What a document's chunk holds."""
    said = repr((list(tokens[:stop]), start, layer)).encode()
    size = (stop - start) * PAGE // BLOCK
    return torch.frombuffer(bytearray(hashlib.shake_128(said).digest(size)), dtype=torch.uint8)


class Workers:
    """All ranks as one: copies at once what has arrived.

    With several block tables, each is that of one layer.
    """

    def __init__(self, blocks, groups):
        self.groups = groups
        self.pages = torch.zeros((LAYERS, blocks, PAGE), dtype=torch.uint8)
        self.loading, self.documents, self.backfills, self.paused = {}, {}, [], []
        self.slow = False  # Jobs for idle steps are not ended.
        self.held_back, self.failing = False, False
        self.slab = None

    def step(self, plan: StepPlan, cancelled: set[str]):
        """Report, received requests, blocks that are wrong."""
        self.slab = self.slab or Slab.attach(plan.slab)
        report, received, bad = StepReport(), set(), set()
        self.run_loads(plan, cancelled, report, received, bad)
        for save in plan.saves:
            self.save(save)
        backfilled, learned = self.backfill(plan), self.learn(plan)
        report.failed |= {job.job for job in (*backfilled, *learned) if job.job in plan.cancel}
        for work in (*plan.saves, *learned, *backfilled):
            report.done[work.job] = 1
            if self.failing:
                report.failed.add(work.job)
        for learn in learned:
            for index, slot in enumerate(learn.slots):
                start = learn.document + index * CHUNK
                stop = min(start + CHUNK, len(learn.tokens))
                for layer in range(LAYERS) if slot >= 0 else ():
                    part = token_bytes(learn.tokens, start, stop, layer)
                    self.slab.part(slot, layer)[: len(part)] = part
        return report, received, bad

    def run_loads(self, plan, cancelled, report, received, bad):
        """Load and blend as far as chunks have arrived."""
        for request, blocks in plan.failed.items():
            report.lost.add(request)
            received.add(request)
            bad.update(blocks)
        for job in plan.loads:
            self.loading[job.request] = job
        for job in list(self.loading.values()):
            done = job.request in cancelled
            if not done and not self.held_back:
                state = self.load(job)
                if state == LOST:
                    report.lost.add(job.request)
                    bad.update(b for copy in job.copies for b in copy.blocks)
                    tables = job.tables if isinstance(job, BlendJob) else ()
                    bad.update(b for table in tables for b in table[job.start // BLOCK :])
                done = state != 0
            if done:
                received.add(job.request)
                del self.loading[job.request]

    def learn(self, plan: StepPlan):
        """The documents whose learning ends in this step."""
        busy = plan.scheduled or self.loading or self.slow
        waiting = [*self.paused, *plan.learn]
        self.paused = [job for job in waiting if job.idle and busy and job.job not in plan.cancel]
        return [job for job in waiting if job not in self.paused]

    def backfill(self, plan: StepPlan):
        """The backfill jobs that end in this step."""
        self.backfills += plan.backfill
        ended = [job for job in self.backfills if not self.slow or job.job in plan.cancel]
        self.backfills = [job for job in self.backfills if job not in ended]
        for job in ended:
            for layer in range(LAYERS):
                table = self.table(job, layer)
                for i in range(job.known // BLOCK, len(table)):
                    self.pages[layer, table[i]] = page(job.tokens, i, layer)
        return ended

    def table(self, job, layer):
        """The block table of a job that a layer uses."""
        return job.tables[layer if self.groups > 1 else 0]

    def load(self, job: LoadJob | BlendJob):
        wanted = [*job.copies, *(job.documents if isinstance(job, BlendJob) else ())]
        ready = [self.slab.ready(part.slot, part.tag) for part in wanted]
        if LOST in ready:
            return LOST
        if any(count < self.slab.parts for count in ready):
            assert not job.ready
            return 0
        for copy in job.copies:
            for i, block in enumerate(copy.blocks, copy.first):
                for layer in range(LAYERS) if self.groups == 1 else [copy.group]:
                    self.pages[layer, block] = self.slab.part(copy.slot, layer)[i * PAGE : (i + 1) * PAGE]
        if isinstance(job, BlendJob):
            for source, target in job.copied:
                self.pages[:, target] = self.pages[:, source]
            reused = [piece.at for piece in (*job.documents, *job.own) if not piece.exact]
            approximate = min(reused, default=len(job.tokens))
            for layer in range(LAYERS):
                table = self.table(job, layer)
                for i in range(job.exact // BLOCK, len(table)):
                    assert table[i], "a blend writes to the null block"
                    exact = (i + 1) * BLOCK <= approximate
                    self.pages[layer, table[i]] = page(job.tokens, i, layer) if exact else APPROXIMATE
            self.documents[job.request] = {
                piece.at: self.slab.part(piece.slot, 0)[: piece.stored * PAGE // BLOCK].clone()
                for piece in job.documents
            }
        return 1

    def save(self, job: SaveJob):
        for layer in range(LAYERS):
            part = self.slab.part(job.slot, layer)
            for i, block in enumerate(self.table(job, layer)):
                part[i * PAGE : (i + 1) * PAGE] = self.pages[layer, block]


def states_of(scheduler):
    """What a scheduler knows of each request that has not ended."""
    return scheduler._states


def drop_backfills(scheduler):
    """The engine has no idle step for what waits to be computed exactly."""
    scheduler._backfill.cancel()


class Lab:
    """A scheduler with everything around it, driven as vLLM does."""

    def __init__(
        self,
        tiers=(),
        *,
        slots=16,
        blocks=64,
        ranks=1,
        batch_tokens=16,
        by_priority=False,
        longest=512,
        blends=True,
        model="model",
        settings=None,
        prefix=(),
        special=frozenset({1}),
        answers=(),
        messages=(),
        results=(),
        trace=None,
        tokenizer=None,
        windows=(0,),
        dtypes="",
        promotes=False,
    ):
        self.now = 0.0
        memory = slots * LAYERS * 4096 * ranks / GIB
        given = {"chunk_size": CHUNK, "max_local_cpu_size": memory, "enable_blending": True, "blend_min_tokens": 4}
        self.settings = Settings(**given | (settings or {}))
        facts = [
            WorkerFacts(
                rank=(0, rank),
                page_bytes=(PAGE,) * LAYERS,
                layout="test",
                kv_heads=HEADS,
                head_dim=DIM,
                dtype="torch.float32",
                dtypes=dtypes,
                rope="none",
            )
            for rank in range(ranks)
        ]
        self.pool, self.workers = Pool(blocks), Workers(blocks, len(windows))
        self.groups = KVGroups(self.pool, BLOCK, windows)
        self.engine = open_engine(self.settings, facts, self.groups, model, "sha256", tiers=tiers, prefix=prefix)
        self.store = self.engine.store
        if not promotes:
            self.engine.promotion.stop()
        self.setup = Setup(
            engine=self.engine,
            groups=self.groups,
            stages=layers_of_stages(facts),
            ranks=ranks,
            markers=Markers(
                separators=(SEPARATOR,), special=special, answers=answers, messages=messages, results=results
            ),
            blends=blends,
            tokenizer=tokenizer,
            trace=trace,
            batch_tokens=batch_tokens,
            by_priority=by_priority,
            longest=longest,
            clock=lambda: self.now,
        )
        self.scheduler = Scheduler(self.setup)
        self.tables, self.requests, self.cancelled = {}, {}, set()
        self.windowed = {}  # the block tables of a request in the groups after the first
        self.loading = set()  # requests whose blocks are not theirs to free

    @property
    def states(self):
        """What the scheduler knows of each request that has not ended."""
        return states_of(self.scheduler)

    # -- one verb of the engine each

    def arrive(self, name, tokens, lmc=None, **more):
        request = Request(name, list(tokens), lmc, **more)
        self.requests[name] = request
        self.scheduler.arrive(request)
        return request

    def look(self, request):
        """Tokens the engine's own prefix cache has."""
        most = (request.num_tokens - 1) // BLOCK
        found = self.groups.cached(request.block_hashes[:most])
        return 0 if request.skip_reading_prefix_cache else found * BLOCK

    def admit(self, request):
        """Ask for a claim and allocate; None if it is to be asked again, else the tokens that are loaded."""
        local = self.look(request)
        tokens = self.scheduler.claim(request, local)
        if tokens is None:
            return None
        tables = self.allocate(request, local, tokens)
        request.num_computed_tokens = local + tokens
        request.running = not tokens
        if tokens:
            self.loading.add(request.request_id)
            self.scheduler.allocated(request, tables, tokens)
        return tokens

    def allocate(self, request, local, tokens):
        """The block tables of a request, as vLLM makes them: blocks that a window has passed are null."""
        tables = []
        for group in range(self.groups.count):  # before new blocks take the place of cached ones
            passed = self.groups.first_seen(group, local + tokens)
            hashes = request.block_hashes[passed : local // BLOCK]
            cached = [block for one in hashes for block in self.pool.get_cached_block(one, [group])]
            self.pool.touch(cached)
            tables.append([0] * passed + [block.block_id for block in cached])
        for table in tables:
            fresh = self.pool.get_new_blocks(-(-request.num_tokens // BLOCK) - len(table))
            table += [block.block_id for block in fresh]
        self.tables[request.request_id], *self.windowed[request.request_id] = tables
        return tables

    def tables_of(self, name):
        """The block tables of a request, by group."""
        return [self.tables[name], *self.windowed.get(name, ())]

    def pass_blocks(self, request):
        """Free the blocks that windows have passed, as vLLM does before each step."""
        for group, table in enumerate(self.tables_of(request.request_id)):
            for i in range(self.groups.first_seen(group, request.num_computed_tokens)):
                if table[i]:
                    self.pool.free_blocks([self.pool.blocks[table[i]]])
                    table[i] = 0

    def free(self, name):
        """Free the blocks of a request."""
        for table in self.tables_of(name) if name in self.tables else ():
            self.pool.free_blocks([self.pool.blocks[b] for b in reversed(table) if b])

    def step(self, scheduled=None):
        """A step of everything but the computing; returns the plan."""
        plan = self.scheduler.plan(scheduled or {}, self.tables_of)
        cancelled, self.cancelled = self.cancelled, set()
        report, received, bad = self.workers.step(plan, cancelled)
        for name in received:
            self.arrived(self.requests[name], bad)
        self.scheduler.reported(report, received)
        return plan

    def arrived(self, request, bad=frozenset()):
        table = self.tables[request.request_id]
        self.loading.remove(request.request_id)
        if request.finished:
            self.free(request.request_id)
            return
        if bad and self.groups.count > 1:  # The engine computes everything, later if it has too few free blocks.
            self.free(request.request_id)
            if self.groups.count * -(-request.num_tokens // BLOCK) <= self.pool.get_num_free_blocks():
                self.allocate(request, 0, 0)
            else:
                del self.tables[request.request_id]
                request.num_preemptions += 1
            request.num_computed_tokens = 0
            return
        wrong = next((i for i, block in enumerate(table) if block in bad), None)
        if wrong is not None:
            request.num_computed_tokens = wrong * BLOCK
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.running = True
        self.enter(request)

    def enter(self, request):
        for group, table in enumerate(self.tables_of(request.request_id)):
            for i in range(request.num_computed_tokens // BLOCK):
                if table[i]:
                    self.pool.enter(self.pool.blocks[table[i]], self.pool.key(request.block_hashes[i], group))

    def compute(self, request, tokens):
        """A step in which the engine computes tokens of one request."""
        start, stop = request.num_computed_tokens, request.num_computed_tokens + tokens
        self.pass_blocks(request)
        for layer in range(LAYERS):
            table = self.table(request.request_id, layer)
            for i in range(start // BLOCK, stop // BLOCK):
                self.workers.pages[layer, table[i]] = page(request.all_token_ids, i, layer)
        plan = self.step({request.request_id: tokens})
        request.num_computed_tokens = stop
        self.enter(request)
        return plan

    def table(self, name, layer):
        """The block table of a request that a layer uses."""
        return self.tables_of(name)[layer if self.groups.count > 1 else 0]

    def decode(self, request, tokens):
        for token in tokens:
            self.compute(request, request.num_tokens - request.num_computed_tokens)
            request.append([token])
            for table in self.tables_of(request.request_id):
                while len(table) * BLOCK < request.num_tokens:
                    table += [b.block_id for b in self.pool.get_new_blocks(1)]

    def preempt(self, request):
        self.free(request.request_id)
        del self.tables[request.request_id]
        request.running = False
        request.num_computed_tokens, request.num_preemptions = 0, request.num_preemptions + 1

    def finish(self, request):
        """Ended or aborted; the facts for the response."""
        request.finished = True
        name = request.request_id
        full = -(-request.num_computed_tokens // BLOCK)
        tables = self.tables_of(name) if name in self.tables else [[]] * self.groups.count
        facts = self.scheduler.finished(request, [table[:full] for table in tables])
        self.cancelled.add(name)
        if name not in self.loading:
            self.free(name)
        return facts

    # -- several of them

    def serve(self, name, tokens, lmc=None, *, output=(), **more):
        """A whole request, alone; its request."""
        request = self.arrive(name, tokens, lmc, **more)
        loaded = self.wait(lambda: self.admit(request))
        request.loaded = loaded
        self.load(request)
        if output:
            self.decode(request, output)
        elif request.num_computed_tokens < request.num_tokens:
            self.compute(request, request.num_tokens - request.num_computed_tokens)
        request.facts = self.finish(request)
        return request

    def load(self, request):
        """Step until what was claimed is there, or failed."""
        while state_of(self, request.request_id).loading:
            self.step()

    def lose(self, request, event):
        """End a request whose load is held back: by an abort, or by a failure, after which it is computed."""
        if event == "abort":
            request.aborted = True
            self.finish(request)
            self.workers.held_back = False
            self.step()
            return
        self.workers.held_back = False
        load, self.workers.load = self.workers.load, lambda job: -1
        self.step()
        self.workers.load = load
        self.compute(request, request.num_tokens - request.num_computed_tokens)
        self.finish(request)

    def wait(self, ask):
        """Ask as often as the engine would."""
        for _ in range(100_000):
            answer = ask()
            if answer is not None:
                return answer
            self.step()
        raise AssertionError("never answered")

    def settle(self):
        for _ in range(1000):
            if not self.scheduler.busy:
                break
            self.step()
        assert not self.scheduler.busy
        self.step()
        self.store.flush()

    def drop_backfills(self):
        """The engine has no idle step for what waits to be computed exactly."""
        drop_backfills(self.scheduler)

    def forget_prefixes(self):
        self.settle()
        self.pool.forget()

    def right(self, request, tokens, start=0):
        """Whether pages of `[start, tokens)` are what an exact prefill leaves."""
        return all(
            torch.equal(self.workers.pages[layer, block], page(request.all_token_ids, i, layer))
            for layer in range(LAYERS)
            for i, block in enumerate(self.table(request.request_id, layer)[: tokens // BLOCK])
            if block and i >= start // BLOCK
        )

    def check(self):
        """Nothing is held by anybody."""
        self.settle()
        due = time.monotonic() + 10
        while self.store.held() and time.monotonic() < due:  # threads that were told to stop
            time.sleep(0.001)
        assert not self.states
        assert not self.scheduler.pending.under_way
        assert [block.block_id for block in self.pool.blocks if block.ref_cnt] == []
        assert self.store.held() == 0
        assert self.store.check_integrity() == []


def state_of(lab, name) -> SimpleNamespace:
    return lab.states[name]


SYSTEM, QUESTION = [50, 51, 52, 53, 54], [70, 71, 72, 73, 74]
DOC_A, DOC_B = [100 + i for i in range(12)], [200 + i for i in range(20)]
PLAIN = [300 + i for i in range(40)]


def prompt(*documents, system=SYSTEM, question=QUESTION):
    tokens = list(system)
    for document in documents:
        tokens += [*SEPARATOR, *document]
    return [*tokens, *SEPARATOR, *question]


@pytest.fixture
def make(monkeypatch):
    """Makes labs; at the end of the test nothing may be held by anybody.

    No time passes in a lab by itself, so that its engine rests at once. Its prompts are short, so that blends of them
    compute a large share.
    """
    monkeypatch.setattr(scheduler, "REST_SECONDS", 0.0)
    monkeypatch.setattr(cost_model, "CLEARLY_LESS_WORK", 0.9)
    made = []

    def make_lab(*tiers, **options):
        lab = Lab(tiers, **options)
        made.append((lab, tiers))
        return lab

    yield make_lab
    for lab, tiers in made:
        open_gates(tiers)
        lab.check()
        lab.scheduler.close()


def learn(lab, *documents, **more):
    for i, document in enumerate(documents):
        lab.serve(f"learn {i} {len(document)} {more}", document, {"learn": True}, **more)
    lab.forget_prefixes()
