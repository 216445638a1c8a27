"""The save queue: which chunks are saved, and which documents are learned.

An exact chunk is saved when it is full, and the last blocks when the request ends. Workers copy pages in the step after
the one that fills them, so that the first token of a response does not wait for the copy. A request for one token is an
exception: if another engine decodes, it looks for the chunks as soon as that token is there. The blocks are held until
every rank has reported the copy, so that the engine does not give them to another request.

For layers with a window, only the pages that tokens after the chunk see are saved, because the engine may have freed
earlier ones. Requests then continue only at the end of a chunk. So the end of each prompt is saved, too, when it is
computed, as a partly full chunk.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from lmc.connectors.vllm.messages import NULL, LearnJob, SaveJob, Table
from lmc.connectors.vllm.scheduler.idle import IdleJob
from lmc.connectors.vllm.scheduler.kv_events import KVEvents
from lmc.connectors.vllm.scheduler.kv_groups import numbers_of
from lmc.connectors.vllm.scheduler.pending import Done, PendingTransfers
from lmc.connectors.vllm.scheduler.request_state import RequestState, Role
from lmc.connectors.vllm.start import Setup
from lmc.engine import NewChunk, Unlearned

log = logging.getLogger(__name__)

BlockTables = Callable[[], Sequence[Sequence[int]]]  # returns a request's block tables


class SaveQueue:
    """The saving and learning of one engine."""

    def __init__(self, setup: Setup, pending: PendingTransfers, events: KVEvents | None) -> None:
        self._settings, self._engine, self._groups = setup.engine.settings, setup.engine, setup.groups
        self._pool, self._block_size = setup.groups.pool, setup.groups.block_size
        self._pending, self._events, self._chunk = pending, events, setup.engine.chunk_size
        self._longest = setup.longest
        # Number of blocks that learning leaves free.
        self._spare = self._groups.count * self._groups.blocks(setup.batch_tokens)
        self._saves: list[SaveJob] = []  # for the next step
        self._urgent: list[SaveJob] = []  # for the step that fills their blocks
        self._clock = setup.clock
        self._idle: IdleJob | None = None  # the document that is being learned in idle steps
        self.resets = 0  # number of cache resets until now

    @property
    def saving(self) -> bool:
        """Whether something is being saved, or will be in the next step."""
        return bool(self._saves or self._pending.under_way)

    def take_saves(self) -> list[SaveJob]:
        """Return the saves of earlier steps."""
        saves, self._saves = self._saves, []
        return saves

    def take_urgent_saves(self) -> list[SaveJob]:
        """Return the saves of this step that cannot wait for the next one."""
        saves, self._urgent = self._urgent, []
        return saves

    def save_due(self, state: RequestState, computed: int, tables: BlockTables) -> None:
        """Save the exact chunks that are full after `computed` tokens."""
        if state.role is Role.LEARN:  # The documents of a request to learn are stored; its pages are not saved again.
            return
        self._save_full(state, computed, tables)
        following, last = (state.saving.chunks + 1) * self._chunk, self._last_storable(state)
        state.saving.next_at = following if following <= last else math.inf
        if self._groups.windowed and not state.saving.has_end:
            end = min(last, state.request.num_prompt_tokens)
            if computed < end:
                state.saving.next_at = min(state.saving.next_at, end)
            else:
                self._save_rest(state, int(end), tables)
                state.saving.has_end = True

    def save_tail(self, state: RequestState, tables: Sequence[Sequence[int]]) -> None:
        """Save the full blocks after an ended request's last full chunk, as a partly full chunk."""
        if state.role is Role.LEARN:
            return
        # The last sampled token has no KV.
        computed = min(state.request.num_computed_tokens, state.request.num_tokens - 1)
        self._save_full(state, computed, lambda: tables)  # The last step's tokens may have been unknown in its plan.
        self._save_rest(state, computed, lambda: tables)

    def _save_full(self, state: RequestState, computed: int, tables: BlockTables) -> None:
        """Save the full chunks of `computed` tokens that are not saved yet."""
        full = self._storable(state, computed) // self._chunk
        if full > state.saving.chunks:
            chunks, state.saving.chunks = range(state.saving.chunks, full), full
            self._save(state, tables, dict.fromkeys(chunks, self._chunk))

    def _save_rest(self, state: RequestState, computed: int, tables: BlockTables) -> None:
        """Save the full blocks after the last full chunk of `computed` tokens."""
        chunk, rest = divmod(self._storable(state, computed), self._chunk)
        rest -= rest % self._block_size
        if rest and chunk >= state.saving.chunks:
            self._save(state, tables, {chunk: rest})

    def learns(self, document: Unlearned) -> bool:
        """Return whether a document waits to be learned, or is being learned."""
        waiting = self._engine.learning
        return document in waiting or document in waiting.under_way

    def never_fits(self, tokens: int) -> bool:
        """Return whether a document of `tokens` tokens is too long to be learned in this engine."""
        too_long = len(self._engine.prefix) + tokens > self._longest
        return too_long or self._blocks_for(tokens) + self._spare >= len(self._pool.blocks)  # One block is null.

    def learn_next(self, *, idle: bool) -> LearnJob | None:
        """Return the job for the next document to learn, if none is being learned and enough engine blocks are free.

        Unless the engine is `idle`, only documents that a request waits for are learned.
        """
        waiting = self._engine.learning
        if waiting.under_way:
            return None
        wanted = waiting.has_wanted
        document = waiting.take(self._can_learn_now, wanted=wanted) if wanted or idle else None
        if document is None:
            return None
        tokens = (*self._engine.prefix, *document.tokens)
        if self.never_fits(len(document.tokens)):
            log.warning("a document of %d tokens is too long to be learned", len(document.tokens))
            return None
        slots = self._engine.begin_document(document.namespace, document.tokens, document.name)
        if slots is None:
            return None
        blocks, resets = self._groups.take(len(tokens)), self.resets

        def done(*, failed: bool) -> None:
            for of_group in blocks:
                self._pool.free_blocks(of_group)
            waiting.under_way.discard(document)
            if not failed:
                self._engine.known.prepare()  # Otherwise the next request would wait for it.
            given_up = self._idle is not None and self._idle.given_up
            self._idle = None
            if given_up and failed and resets == self.resets:
                key = self._engine.document_keys(document.tokens, document.namespace)[-1]
                known = self._engine.known.get(key.hex())
                if known is None or not known.removed:  # It may have been removed while it was being learned.
                    waiting.put_back(document)

        waiting.under_way.add(document)
        job = self._pending.begin([slot for slot in slots if slot], done)
        self._idle = None if wanted else IdleJob(job, self._clock, self._pool, self._spare)
        return LearnJob(
            job=job,
            tokens=tokens,
            document=len(self._engine.prefix),
            tables=numbers_of(blocks),
            chunk=self._chunk,
            slots=tuple(slot.slot if slot else -1 for slot in slots),
            resets=resets,
            idle=not wanted,
        )

    @property
    def has_idle_job(self) -> bool:
        """Whether a document is being learned in idle steps."""
        return self._idle is not None

    def to_cancel(self, *, idle: bool, blocked: bool) -> list[int]:
        """Return the job that learns a document in idle steps, if it has to be given up; the document is queued again.

        The job is given up for a request that is `blocked` by a lack of engine blocks, if few blocks are free while
        requests run, and for documents that a request waits for.
        """
        job = self._idle
        if job is None or not job.gives_up(idle=idle, blocked=blocked or self._engine.learning.has_wanted):
            return []
        return [job.number]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        """Return how many blocks learning a document of `tokens` tokens needs."""
        return self._groups.count * self._groups.blocks(len(self._engine.prefix) + tokens)

    def _can_learn_now(self, document: Unlearned) -> bool:
        """Return whether a document leaves the queue: it can be learned now, or never."""
        free: int = self._pool.get_num_free_blocks()
        tokens = len(document.tokens)
        return self.never_fits(tokens) or self._blocks_for(tokens) + self._spare <= free

    def _storable(self, state: RequestState, computed: int) -> int:
        """Return how many of the `computed` tokens can be saved as exact now."""
        request = state.request
        tokens: int = min(computed, request.num_tokens, len(request.block_hashes) * self._block_size)
        return int(min(tokens, self._last_storable(state)))

    def _last_storable(self, state: RequestState) -> float:
        """Return how many tokens of a request can ever be saved as exact."""
        last = math.inf if self._settings.save_decode_cache else float(state.request.num_prompt_tokens)
        return last if state.approximate is None else min(last, state.approximate)

    def _save(self, state: RequestState, tables: BlockTables, chunks: Mapping[int, int]) -> None:
        """Save exact chunks; `chunks` maps the index of each chunk to its number of tokens."""
        tables, hashes = cache(tables), state.request.block_hashes
        places = [
            (chunk * self._chunk // self._block_size, tokens // self._block_size) for chunk, tokens in chunks.items()
        ]
        details = [self._events.details(state.request, *place) if self._events else None for place in places]
        labels = [one.label() if one else "" for one in details]
        inner = [
            tokens == self._chunk and self._lacks_state(tables, hashes, *place)
            for tokens, place in zip(chunks.values(), places, strict=True)
        ]
        new = [
            NewChunk(chunk, tokens, lacks_state, label)
            for (chunk, tokens), lacks_state, label in zip(chunks.items(), inner, labels, strict=True)
        ]
        chain = self._engine.block_chain(state.hashes, self._block_size)
        slots = self._engine.begin_exact(chain, new, state.request.cache_salt or "")
        numbers = tables() if any(slots) else ()
        for slot, (first, count), one, known in zip(slots, places, new, details, strict=True):
            if slot is None:
                continue
            saved = [
                (NULL,) * count
                if one.inner and group in self._groups.states
                else self._in_chunk(group, table, hashes, first, count)
                for group, table in enumerate(numbers)
            ]
            if not all(saved):
                self._engine.store.abort(slot)
                continue
            if self._events and known:
                self._events.expect(slot.meta.key, known)
            job = self._pending.begin([slot], self._hold([block for table in saved for block in table if block]))
            saves = self._urgent if state.request.max_tokens == 1 else self._saves
            saves.append(SaveJob(job=job, slot=slot.slot, tables=tuple(saved)))

    def _lacks_state(self, tables: BlockTables, hashes: Sequence[bytes], first: int, count: int) -> bool:
        """Return whether the engine no longer has the state after a chunk, or never had it."""
        states = self._groups.states
        return not all(self._in_chunk(group, tables()[group], hashes, first, count) for group in states)

    def _in_chunk(self, group: int, table: Sequence[int], hashes: Sequence[bytes], first: int, count: int) -> Table:
        """Return the `count` blocks of a chunk in a group; the null block replaces those that no later token sees.

        Blocks that a window has passed may still be in the engine's prefix cache, under the request's `hashes`. Returns
        nothing if the engine no longer has a block that a later token sees.
        """
        stop = first + count
        begin = max(first, self._groups.first_seen(group, stop * self._block_size))
        if len(table) < stop:
            return ()
        blocks = [table[at] or self._groups.cached_block(group, hashes[at]) for at in range(begin, stop)]
        return (NULL,) * (begin - first) + tuple(blocks) if all(blocks) else ()

    def _hold(self, blocks: Sequence[int]) -> Done:
        """Hold blocks so that the engine does not reuse them, and return the function that releases them."""
        held = [self._pool.blocks[block] for block in blocks]
        self._pool.touch(held)

        def done(*, failed: bool) -> None:
            self._pool.free_blocks(reversed(held))

        return done
