"""What is kept of requests: exact chunks as they fill, the last blocks at the end, documents to be learned.

Pages are copied by workers behind the step that completes them; until every rank has said so the blocks are held, so that the
engine does not give them to another request.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lmc.config import Settings
from lmc.connectors.vllm.events import Events, told_of
from lmc.connectors.vllm.library import Library
from lmc.connectors.vllm.messages import LearnJob, SaveJob
from lmc.connectors.vllm.served import Role, Served
from lmc.keys import chunk_bounds

log = logging.getLogger(__name__)

# Documents that wait to be learned, and no more tokens than memory holds; what is dropped is met again.
TO_LEARN = 256

Table = Callable[[], Sequence[int]]  # a request's blocks, asked for only if needed


class Keeper:
    """Saves and learns for one engine."""

    def __init__(
        self, settings: Settings, library: Library, pool: Any, *, batch_tokens: int, events: Events | None = None
    ) -> None:
        self._events = events
        self._settings, self._library, self._pool = settings, library, pool
        self._spare = -(-batch_tokens // library.block_size)  # blocks that learning leaves for a prompt
        self._saves: list[SaveJob] = []
        self._to_learn: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._learning = 0  # the job under way

    @property
    def saving(self) -> bool:
        """Whether something is under way, or about to be."""
        return bool(self._saves or self._library.jobs.under_way)

    @property
    def learning(self) -> bool:
        """Whether a document waits to be learned."""
        return bool(self._to_learn)

    def take_saves(self) -> list[SaveJob]:
        """For the next step."""
        saves, self._saves = self._saves, []
        return saves

    def save_due(self, served: Served, computed: int, table: Table) -> None:
        """Chunks that are full once `computed` tokens are: full blocks with a hash, exact ones only."""
        chunk, n = self._library.chunk, self._library.prefixes.blocks
        if served.role is Role.LEARN:  # and no more: its pages would be the same bytes once more
            if not served.tried and computed >= served.request.num_prompt_tokens:
                served.tried = True
                self._save_document(served, table())
            return
        table = functools.cache(table)  # the engine makes a list of a long prompt's blocks each time
        for index in range(served.saved, self._storable(served, computed) // chunk):
            served.saved = index + 1
            self._save(served, table, index * n, n)

    def save_tail(self, served: Served, blocks: Sequence[int]) -> None:
        """At the end: the full blocks behind the last full chunk, as a chunk that is partly full."""
        if not self._settings.save_unfull_chunk or served.role is Role.LEARN:
            return
        # The last sampled token has no KV.
        tokens = self._storable(served, min(served.request.num_computed_tokens, served.request.num_tokens - 1))
        first = tokens // self._library.chunk * self._library.prefixes.blocks
        count = tokens // self._library.block_size - first
        if count > 0 and tokens // self._library.chunk >= served.saved:
            self._save(served, lambda: blocks, first, count)

    def queue(self, namespace: bytes, tokens: tuple[int, ...]) -> None:
        """A document that was met and not known: learned when there is time."""
        waiting = sum(len(others) for _, others in self._to_learn)
        room = len(self._to_learn) < TO_LEARN and waiting + len(tokens) <= self._library.slots * self._library.chunk
        if room and (namespace, tokens) not in self._to_learn:
            self._to_learn.append((namespace, tokens))

    def forget(self) -> None:
        """Nothing that waits to be learned is wanted any more."""
        self._to_learn.clear()

    def learn_next(self) -> LearnJob | None:
        """The next document, if none is under way and blocks can be lent for it."""
        if self._learning in self._library.jobs.under_way or not self._to_learn:
            return None
        namespace, tokens = self._to_learn[0]
        need = -(-len(tokens) // self._library.block_size)
        if need + self._spare >= len(self._pool.blocks):  # one of them is the null block, and never free
            self._to_learn.popleft()
            log.warning("a document of %d tokens is too long to be learned beside a prompt", len(tokens))
            return None
        if need + self._spare > self._pool.get_num_free_blocks():
            return None
        self._to_learn.popleft()
        writings = self._library.begin_document(namespace, tokens)
        if writings is None:
            return None
        blocks = self._pool.get_new_blocks(need)
        job = self._library.jobs.begin([w for w in writings if w], lambda: self._pool.free_blocks(blocks))
        self._learning = job
        slots = tuple(w.slot if w else -1 for w in writings)
        numbers = tuple(block.block_id for block in blocks)
        return LearnJob(job=job, tokens=tokens, blocks=numbers, chunk=self._library.chunk, slots=slots)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _storable(self, served: Served, computed: int) -> int:
        request = served.request
        tokens: int = min(computed, request.num_tokens, len(request.block_hashes) * self._library.block_size)
        if not self._settings.save_decode_cache:
            tokens = min(tokens, request.num_prompt_tokens)
        return tokens if served.approximate is None else min(tokens, served.approximate)

    def _save(self, served: Served, table: Table, first: int, count: int) -> None:
        writing = self._library.begin_pages(served.hashes[first : first + count])
        if writing is not None:
            blocks = tuple(table()[first : first + count])
            if len(blocks) < count or any(self._pool.blocks[block].is_null for block in blocks):
                self._library.store.abort(writing)  # a sliding window has passed there
                return
            job = self._library.jobs.begin([writing], self._hold(blocks))
            self._saves.append(SaveJob(job=job, slot=writing.slot, blocks=blocks))
            if self._events:
                self._events.expect(writing.meta.key, told_of(served.request, first, count, self._library.block_size))

    def _save_document(self, served: Served, blocks: Sequence[int]) -> None:
        """The prompt of a request that is a document: its keys and values, read from its pages."""
        tokens = served.request.prompt_token_ids
        writings = self._library.begin_document(served.namespace, tokens)
        if writings is None:
            served.learned = all(self._library.lookup(self._library.document_keys(served.namespace, tokens)))
            return
        served.learned = True
        table = tuple(blocks[: -(-len(tokens) // self._library.block_size)])
        for writing, bounds in zip(writings, chunk_bounds(len(tokens), self._library.chunk), strict=True):
            if writing is not None:
                job = self._library.jobs.begin([writing], self._hold(table))
                self._saves.append(SaveJob(job=job, slot=writing.slot, blocks=table, tokens=bounds))

    def _hold(self, blocks: Sequence[int]) -> Callable[[], None]:
        """Keep the engine from reusing blocks; returns what lets them go."""
        held = [self._pool.blocks[block] for block in blocks]
        self._pool.touch(held)
        return lambda: self._pool.free_blocks(reversed(held))
