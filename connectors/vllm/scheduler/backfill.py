"""Backfill: while the engine is idle, the tokens of a blended conversation are computed exactly.

A blend is made for one question. A later turn may ask about something that the first question did not choose, and then
the KV of the blend is worse than that of a fresh blend (`bench/conversation.py`). Between two turns there is mostly
time. So the prompt and its answer are prefilled exactly in steps in which the engine computes nothing else, one layer a
step, and entered into vLLM's own prefix cache under the exact hashes. The next turn then finds exact blocks, as it
would without lmc. A turn that comes earlier goes on from the blocks of the blend.

It is done only for prompts that end where a chat template begins an answer, and only as long as a share of such prompts
is really followed by another turn.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmc.connectors.vllm.messages import BackfillJob
from lmc.connectors.vllm.scheduler.idle import IdleJob
from lmc.connectors.vllm.scheduler.isolation import Salt, Salts, cached_blocks, set_salts
from lmc.connectors.vllm.scheduler.pending import PendingTransfers
from lmc.connectors.vllm.start import Setup

MAX_WAITING = 64  # conversations; the one that has waited longest is dropped
TRIALS = 16  # blends after which follow-ups have to be seen
WORTHWHILE = 1 / 8  # follow-ups for each blend
REMEMBERED = 256  # blends after which older ones count half


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and its answer, of which some KV is approximate."""

    request: Any  # the engine's request
    tokens: tuple[int, ...]  # of full blocks
    hashes: tuple[bytes, ...]  # the exact hashes of these blocks


class ExactRequest:
    """A request as vLLM's block pool sees it, with the exact hashes of its blocks."""

    def __init__(self, request: Any, hashes: Sequence[bytes]) -> None:
        self._request, self.block_hashes = request, list(hashes)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine's request, such as its tokens."""
        return getattr(self._request, name)


class Backfill:
    """The conversations of one engine that wait to be computed exactly, at most one of them under way."""

    def __init__(self, setup: Setup, pending: PendingTransfers) -> None:
        self._pool, self._block_size, self._clock = setup.pool, setup.block_size, setup.clock
        self._spare = -(-setup.batch_tokens // setup.block_size)  # blocks that are left free for a prompt
        self._pending = pending
        self._waiting: OrderedDict[Salt, tuple[Any, Salts]] = OrderedDict()  # requests by their first salt
        self._under_way: IdleJob | None = None
        self._blends = self._follow_ups = 0.0
        self.done = 0  # conversations that were computed exactly

    @property
    def waiting(self) -> bool:
        """Whether a conversation waits for an idle step."""
        return bool(self._waiting)

    @property
    def under_way(self) -> bool:
        """Whether a conversation is being computed."""
        return self._under_way is not None

    def followed(self) -> None:
        """Count a prompt that goes on from an earlier blend."""
        self._follow_ups += 1

    def add(self, request: Any, salts: Salts) -> None:
        """Queue a request that has ended, whose block hashes depend on `salts`.

        It takes the place of an earlier turn of the same conversation, which depends on the same first salt.
        """
        self._blends += 1
        if self._blends >= REMEMBERED:
            self._blends, self._follow_ups = self._blends / 2, self._follow_ups / 2
        if self._blends > TRIALS and self._follow_ups < self._blends * WORTHWHILE:
            return
        self._waiting.pop(salts[0], None)
        self._waiting[salts[0]] = request, salts
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def next_job(self) -> BackfillJob | None:
        """Return the next job for an idle step; None if one is under way.

        A conversation for which there are too few free blocks is dropped, so that the engine does not wait for them.
        """
        if self._under_way is not None:
            return None
        while self._waiting:
            _, (request, salts) = self._waiting.popitem(last=False)
            one = self._conversation(request, salts)
            known = [self._pool.get_cached_block(block, [0])[0] for block in one.hashes[: self._known(one)]]
            need = len(one.hashes) - len(known)
            taken = need + sum(block.ref_cnt == 0 for block in known)
            if need and taken + self._spare <= self._pool.get_num_free_blocks():
                return self._begin(one, known)
        return None

    def to_cancel(self, *, idle: bool, blocked: bool) -> list[int]:
        """Return the job to give up: a request is `blocked` for want of blocks, or others have run for a while."""
        job = self._under_way
        if job is None:
            return []
        short = not idle and self._pool.get_num_free_blocks() < self._spare
        return [job.number] if job.gives_up(idle=idle, blocked=blocked or short) else []

    def cancel(self) -> None:
        """Give up the job that is under way in the next step, and forget the conversations that wait."""
        if self._under_way is not None:
            self._under_way.given_up = True
        self._waiting.clear()

    def _known(self, one: Conversation) -> int:
        """Return how many leading blocks of a conversation are in vLLM's prefix cache."""
        return cached_blocks(self._pool, one.hashes)

    def _conversation(self, request: Any, salts: Salts) -> Conversation:
        """Return the full blocks of a request with their exact hashes."""
        set_salts(request, (), replacing=salts)
        full = min(len(request.block_hashes), len(request.all_token_ids) // self._block_size)
        hashes = tuple(request.block_hashes[:full])
        set_salts(request, salts)
        return Conversation(request, tuple(request.all_token_ids[: full * self._block_size]), hashes)

    def _begin(self, one: Conversation, held: list[Any]) -> BackfillJob:
        """Return the job for a conversation whose first blocks, `held`, are in vLLM's prefix cache."""
        known = len(held)
        self._pool.touch(held)
        try:
            blocks = [*held, *self._pool.get_new_blocks(len(one.hashes) - known)]
        except Exception:
            self._pool.free_blocks(reversed(held))
            raise

        def done(*, failed: bool) -> None:
            self._under_way = None
            try:  # A request may have computed and cached the same blocks meanwhile.
                if not failed and self._known(one) == known:
                    request = ExactRequest(one.request, one.hashes)
                    self._pool.cache_full_blocks(request, blocks, known, len(blocks), self._block_size, 0)
                    self.done += 1
            finally:
                self._pool.free_blocks(reversed(blocks))

        job = self._pending.begin([], done)
        self._under_way = IdleJob(job, self._clock)
        return BackfillJob(
            job=job,
            tokens=one.tokens,
            known=known * self._block_size,
            blocks=tuple(block.block_id for block in blocks),
        )
