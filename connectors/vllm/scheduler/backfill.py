"""Backfill: while the engine is idle, the tokens of a blended request are computed exactly.

A blend recomputes tokens that matter for one question, and only prompts that begin with this question find its blocks.
The next prompt may ask something else: the next turn of the conversation, or a question of another user about the same
documents. Without lmc, the engine's prefix cache would have the documents for both.

Most engines are idle between two such requests. In these steps, the prompt and its answer are prefilled exactly, one
layer a step. The blocks are added to vLLM's own prefix cache under their exact hashes. The next request then finds
exact blocks, as it would without lmc. A later turn that comes before the backfill ends revises the blend
(`revision.py`).

The request that ended last comes first: its conversation is the most likely to go on. When too few blends are followed
by another turn or another question, only conversations that went on are backfilled.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmc.connectors.vllm.messages import BackfillJob
from lmc.connectors.vllm.scheduler.idle import IdleJob
from lmc.connectors.vllm.scheduler.isolation import Salt, Salts, set_hashes
from lmc.connectors.vllm.scheduler.kv_groups import numbers_of
from lmc.connectors.vllm.scheduler.pending import PendingTransfers
from lmc.connectors.vllm.start import Setup

MAX_WAITING = 64  # maximal number of queued requests; the request that has waited longest is dropped
TRIALS = 16  # number of blends that are backfilled before the share of follow-ups is checked
WORTHWHILE = 1 / 8  # minimal number of follow-ups per blend
REMEMBERED = 256  # number of blends at which the counts of blends and follow-ups are halved


@dataclass(frozen=True, slots=True)
class BlendedRequest:
    """A prompt and its answer, with partly approximate KV."""

    request: Any  # the engine's request
    tokens: tuple[int, ...]  # the tokens of full blocks
    hashes: tuple[bytes, ...]  # the exact hashes of these blocks


class ExactRequest:
    """A request as vLLM's block pool sees it, with the exact hashes of its blocks."""

    def __init__(self, request: Any, hashes: Sequence[bytes]) -> None:
        self._request, self.block_hashes = request, list(hashes)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine's request, such as its tokens."""
        return getattr(self._request, name)


class Backfill:
    """The blended requests of one engine that wait to be computed exactly; at most one is being computed."""

    def __init__(self, setup: Setup, pending: PendingTransfers) -> None:
        self._groups, self._clock = setup.groups, setup.clock
        self._pool, self._block_size = setup.groups.pool, setup.groups.block_size
        # Number of blocks that stay free for a prompt.
        self._spare = self._groups.count * self._groups.blocks(setup.batch_tokens)
        self._pending, self._caches_prefixes = pending, setup.caches_prefixes
        self._waiting: OrderedDict[Salt, tuple[Any, Salts]] = OrderedDict()  # requests by their conversation
        self._under_way: IdleJob | None = None
        self._blends = self._follow_ups = 0.0
        self.done = 0  # number of requests that were computed exactly

    @property
    def waiting(self) -> bool:
        """Whether a request waits for an idle step."""
        return bool(self._waiting)

    @property
    def under_way(self) -> bool:
        """Whether a request is being computed."""
        return self._under_way is not None

    def followed(self) -> None:
        """Count a prompt that continues an earlier blend, or asks something else about its documents."""
        self._follow_ups += 1

    def add(self, request: Any, salts: Salts, conversation: Salt, *, follows: bool = False) -> None:
        """Queue an ended request, whose block hashes depend on `salts`.

        It replaces an earlier turn of the same conversation. A conversation that `follows` an earlier blend is likely
        to go on, and is queued however few others do. Without the engine's prefix cache, nothing is queued, nor is a
        session that has got images since its blend: a backfill computes text.
        """
        if not self._caches_prefixes or request.mm_features:
            return
        self._blends += 1
        if self._blends >= REMEMBERED:
            self._blends, self._follow_ups = self._blends / 2, self._follow_ups / 2
        if not follows and self._blends > TRIALS and self._follow_ups < self._blends * WORTHWHILE:
            return
        self._waiting.pop(conversation, None)
        self._waiting[conversation] = request, salts
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def next_job(self) -> BackfillJob | None:
        """Return the next job for an idle step; None if one is under way.

        A request for which there are too few free blocks is dropped, so that the engine does not wait for them.
        """
        if self._under_way is not None:
            return None
        while self._waiting:
            _, (request, salts) = self._waiting.popitem()
            one = self._blended(request, salts)
            count = self._known(one)
            known = [self._pool.get_cached_block(block, self._groups.all) for block in one.hashes[:count]]
            need = (len(one.hashes) - count) * self._groups.count
            taken = need + sum(block.ref_cnt == 0 for blocks in known for block in blocks)
            if need and taken + self._spare <= self._pool.get_num_free_blocks():
                return self._begin(one, known)
        return None

    def to_cancel(self, *, idle: bool, blocked: bool) -> list[int]:
        """Return the job to give up: a request is `blocked` by a lack of blocks, or requests have run for too long."""
        job = self._under_way
        return [job.number] if job is not None and job.gives_up(idle=idle, blocked=blocked) else []

    def cancel(self) -> None:
        """Mark the job under way to be given up in the next step, and remove all queued requests."""
        if self._under_way is not None:
            self._under_way.given_up = True
        self._waiting.clear()

    def _known(self, one: BlendedRequest) -> int:
        """Return how many leading blocks of a request are in vLLM's prefix cache in all groups."""
        return self._groups.cached_in(self._groups.all, one.hashes)

    def _blended(self, request: Any, salts: Salts) -> BlendedRequest:
        """Return the full blocks of a request with their exact hashes."""
        salted = list(request.block_hashes)
        set_hashes(request, salted[: salts[0][0]])
        full = min(len(request.block_hashes), len(request.all_token_ids) // self._block_size)
        hashes = tuple(request.block_hashes[:full])
        set_hashes(request, salted)
        return BlendedRequest(request, tuple(request.all_token_ids[: full * self._block_size]), hashes)

    def _begin(self, one: BlendedRequest, cached: list[list[Any]]) -> BackfillJob:
        """Return the job for a request whose first blocks, `cached` in each group, are in vLLM's prefix cache."""
        known, size = len(cached), self._block_size
        held = [block for blocks in cached for block in blocks]
        self._pool.touch(held)
        try:
            taken = self._groups.take((len(one.hashes) - known) * size)
        except Exception:
            self._pool.free_blocks(reversed(held))
            raise
        of_groups = [[*held[group :: self._groups.count], *new] for group, new in enumerate(taken)]

        def done(*, failed: bool) -> None:
            self._under_way = None
            try:  # A request may have computed and cached the same blocks in the meantime.
                if not failed and self._known(one) == known:
                    request = ExactRequest(one.request, one.hashes)
                    for group, blocks in enumerate(of_groups):
                        self._pool.cache_full_blocks(request, blocks, known, len(blocks), size, group)
                    self.done += 1
            finally:
                for blocks in of_groups:
                    self._pool.free_blocks(reversed(blocks))

        job = self._pending.begin([], done)
        self._under_way = IdleJob(job, self._clock, self._pool, self._spare)
        return BackfillJob(
            job=job,
            tokens=one.tokens,
            known=known * size,
            tables=numbers_of(of_groups),
        )
