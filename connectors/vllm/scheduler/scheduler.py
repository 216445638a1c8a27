"""The scheduler's side of the connector: it decides what requests load, and what the workers load, compute and save.

vLLM calls these methods in each engine step, in this order:

1. `arrive`: a new request is classified. Its stored chunks are looked up, and slow tiers begin to load them.
2. `claim`: the engine asks how many tokens of a waiting request will be loaded after the tokens in its own cache.
   Chunks are pinned. While a chunk is still loading, the engine is told to ask again in the next step.
3. `allocated`: the claim becomes a load or a blend into the blocks that the engine has allocated.
4. `plan`: the engine has decided what it computes. Chunks that this step fills will be saved in the next step, and a
   document may be learned. The step's plan goes to the workers (`worker/`), which load, blend, learn and save.
5. `reported`: the workers report ended jobs. Saved chunks become visible, and loaded requests can run.
6. `finished`: a request has ended. Its last blocks are saved, and its unknown documents are queued.
7. `busy`: whether lmc needs another step although no request runs.

Nothing here blocks. The engine's requests and block pool are passed as arguments; this module does not import vLLM.
"""

import logging
import math
import os
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from lmc.connectors.vllm.messages import BLEND_SHARE, StepPlan, StepReport
from lmc.connectors.vllm.scheduler.admission import Admission
from lmc.connectors.vllm.scheduler.backfill import Backfill
from lmc.connectors.vllm.scheduler.claims import Claims, fewest_tokens
from lmc.connectors.vllm.scheduler.classifier import RequestClassifier
from lmc.connectors.vllm.scheduler.follow_ups import REPEATED, FollowUps
from lmc.connectors.vllm.scheduler.idle import REST_SECONDS
from lmc.connectors.vllm.scheduler.isolation import set_hashes
from lmc.connectors.vllm.scheduler.jobs import end_of_pages, is_blend, job_of, own_pieces, sources_of
from lmc.connectors.vllm.scheduler.kv_events import BlocksMoved, KVEvents
from lmc.connectors.vllm.scheduler.pending import PendingTransfers
from lmc.connectors.vllm.scheduler.prefill_pace import PrefillPace
from lmc.connectors.vllm.scheduler.repeated import RepeatedTexts
from lmc.connectors.vllm.scheduler.request_state import RequestState, Role
from lmc.connectors.vllm.scheduler.save_queue import SaveQueue
from lmc.connectors.vllm.scheduler.watched import WatchedRequests
from lmc.connectors.vllm.start import Setup
from lmc.documents.repeats import LineEnds
from lmc.engine import Match, Plan
from lmc.engine.identity import adapter_stamp
from lmc.metrics import flat, key
from lmc.storage.contract import PinState
from lmc.storage.memory.slab import SlabAddress

log = logging.getLogger(__name__)

BlockTables = Callable[[str], Sequence[Sequence[int]]]  # returns the block tables of a scheduled request

LACKS_BLOCKS = "stored documents were computed, because the engine has too few free blocks for a blend"
RECENT = 1000  # requests whose facts are kept
MAX_LEARN_SECONDS = 600.0  # A request to learn waits no longer than this for the engine's blocks.
SPARE = 0.5  # share of an engine's blocks that must be free before it learns documents of other engines
AWAKE_SECONDS = 1.0  # An engine that computed something within this time makes steps, and can learn in them.
LEARN_SECONDS = 10.0  # An idle engine continues learning for this time; a shutdown or a pause may have to wait for it.


class Scheduler:
    """The requests of one vLLM engine."""

    def __init__(self, setup: Setup) -> None:
        self._layers = sum(setup.stages)
        self._setup, self.engine, self._groups = setup, setup.engine, setup.groups
        self._pool, self._block_size = setup.groups.pool, setup.groups.block_size
        self.counts: Counter[str] = Counter()
        # Observations for histograms, by the keys of `lmc.metrics`.
        self._observed: defaultdict[str, list[float]] = defaultdict(list)
        self._classifier = RequestClassifier(setup, self.counts)
        self._line_ends = LineEnds(setup.tokenizer.decode) if setup.tokenizer else None
        self._repeated = RepeatedTexts(setup, self._classifier, self.counts, self._line_ends)
        self._claims = Claims(setup, self.counts)
        self._pace = PrefillPace(self.engine.store.cost)
        self.pending = PendingTransfers(setup.ranks, self.engine.store)
        changes = self.engine.store.changes
        self.events = KVEvents(changes, self._block_size, setup.extra_keys) if setup.announces else None
        self._saves = SaveQueue(setup, self.pending, self.events)
        self._states: dict[str, RequestState] = {}
        self._watched = WatchedRequests(setup.decode_tokens)
        self.recent: OrderedDict[str, Mapping[str, Any]] = OrderedDict()  # facts of requests that have ended
        self._next = StepPlan()  # the plan of the next step, as far as it is known
        self._introduced: SlabAddress | None = None  # the slab that the workers know
        self._ran = setup.clock()  # when the engine last computed something
        # Something was counted, and possibly no request runs whose further steps would report it.
        self.has_news = True
        self.off = False  # lmc is switched off: nothing is loaded, saved or learned for new requests.
        if setup.blends and self.engine.settings.blend_learn:
            self.engine.share_learning(self._has_time)
        self._backfill = Backfill(setup, self.pending)
        self._follow_ups = FollowUps(setup, self._claims, self._backfill, self._states, self._line_ends)
        self._admission = Admission(setup, self._claims, self._states)
        self._adapters: dict[tuple[int, str], bytes] = {}
        self._process = os.urandom(32)
        self._few = fewest_tokens(setup)  # If the engine lacks no more, lmc does not look for stored chunks.

    # -- requests come and go ----------------------------------------------------------------------------------------

    def arrive(self, request: Any) -> None:
        """Find the stored chunks of a new request, and begin to load chunks from slower tiers."""
        if self.off:
            return
        state = self._classifier.begin(request)
        if request.lora_request is not None:
            state.stamp.content = self._adapter(request.lora_request)
        if self._setup.counts_images:
            state.stamp.of_images = self._process  # The same number stands for a different image in another process.
        self._states[state.id] = state
        self.counts["requests"] += 1
        self._repeated.arrived(state)  # before its block hashes are salted
        if self._is_short(state) or self._is_cached(state):
            state.cached = True
            return
        self._classifier.find_role(state)
        if request.skip_reading_prefix_cache:
            return
        match = self._claims.look(state)
        if not self._claims.asks(state, match):
            self._find_stored(state, match)

    def _find_stored(self, state: RequestState, match: Match) -> None:
        """Decide what a request does with its stored chunks, and begin to load those on slower tiers."""
        request = state.request
        if state.role is Role.BLEND:
            state.exact_hashes = list(request.block_hashes)
            state.follow_up.stored_exactly = match.exact[-1].stop if match.exact else 0
            exact = max(state.follow_up.stored_exactly, self._groups.cached_tokens(request.block_hashes))
            if not self._follow_ups.continue_blend(state, exact):
                state.refused = self._follow_ups.why_computed(state, match, exact)
            elif state.revision is not None:
                match = self._claims.look(state)
        self._claims.prefetch(state, match, self._groups.cached_tokens(request.block_hashes))
        if state.chunks.memory_only and state.chunks.skipped:
            self.counts["loads_skipped"] += 1

    def claim(self, request: Any, local: int) -> int | None:
        """Return how many tokens after the first `local` tokens will be loaded; None if that is not known yet."""
        state = self._states.get(request.request_id)
        if state is None:
            return 0
        promised = self._promise(state, local)
        state.awaits_blocks = promised is not None
        if promised is not None:  # The engine may compute or load the request in this step.
            state.decodes = False  # A request that decoded before was preempted.
            self._watched.add(state)
        return promised

    def _promise(self, state: RequestState, local: int) -> int | None:
        """See `claim`."""
        request = state.request
        if state.given_up or self.off or request.skip_reading_prefix_cache:
            return 0
        if self._awaits_answers(state) or (state.role is Role.LEARN and not self._has_learned(state)):
            return None
        # The engine computes the last token of a prompt. If no other token is loaded, it asks again, without end.
        if request.num_tokens == 1:
            return 0
        if request.num_preemptions:  # It is computed or loaded exactly from now on.
            state.is_blend = state.waiting.is_long = False
        if state.revision is not None and self._follow_ups.was_blended_meanwhile(state):
            self._claims.release(state)
            state.revision = None
        if state.revision is not None and (
            self._admission.waits(state, local) or not self._follow_ups.still_revises(state, state.revision, local)
        ):
            return None
        if state.cached and state.revision is None:
            if local > request.num_tokens - self._few:
                self._note_cached(state, local)
                return 0
            state.cached, state.role = False, Role.EXACT  # The engine has evicted blocks since the request arrived.
            self._classifier.find_role(state)
        plan = self._claim(state, local)
        self._note_cached(state, local)
        return None if plan is None else self._load_stop(state, plan) - local

    def _claim(self, state: RequestState, local: int) -> Plan | None:
        """Return a request's plan, whose chunks are pinned; None if the engine has to ask again in its next step."""
        if self._admission.waits(state, local):
            return None
        if state.chunks.waiting_since is None:
            self._claims.wait_from_now(state)
        self._claims.note_progress(state)
        if state.claim is None and (self._claims.waits(state, local) or self._follow_ups.waits_for_blend(state, local)):
            return None
        if state.claim is None or state.claim.match.local != local:
            state.claim = self._claims.make(state, local)
        plan, request = state.claim, state.request
        if plan is not None:
            if state.revision is not None and not own_pieces(plan):  # Computing exactly is expected to be faster.
                state.follow_up.shared, state.revision = state.revision.stop, None
            state.is_blend = is_blend(plan)
            if self._admission.waits_for_blends(state, local) or self._admission.waits_for_same_load(state, plan):
                return None
            tokens = request.num_tokens - plan.stop
            state.waiting.is_long = tokens * BLEND_SHARE >= self._setup.batch_tokens and not request.num_preemptions
            if state.waiting.is_long and self._admission.waits_its_turn(state, local):
                return None
            if self._admission.lacks_blocks(state, plan):
                if self._admission.may_wait(state):
                    self._claims.release(state)
                    return None
                state.refused = LACKS_BLOCKS
                state.add_note(LACKS_BLOCKS)
                plan = state.claim = self._claims.make(state, local)
        return plan

    def _load_stop(self, state: RequestState, plan: Plan) -> int:
        """Return the end of the tokens that the engine takes as loaded: it keeps what the token after them sees."""
        return self._groups.loadable(plan.stop) if plan.stop == state.request.num_tokens else plan.stop

    def _awaits_answers(self, state: RequestState) -> bool:
        """Return whether a request waits for slow tiers to say what they have. If not, it uses what they have said.

        If it then continues an earlier blend, the engine asks again, and finds the blocks of that blend.
        """
        if not state.chunks.asked:
            return False
        if self._claims.awaits_answers(state):
            return True
        self._find_stored(state, self._claims.look(state))
        return bool(state.salts)

    def _note_cached(self, state: RequestState, local: int) -> None:
        """Record how many tokens of a request the engine has, and how many of these belong to an earlier blend."""
        state.local = local
        if state.salts and not state.request.num_preemptions:  # Otherwise it continues its own blend.
            state.continued = max(0, local - state.salts[0][0] * self._block_size)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Create the job for a claim of `tokens` tokens; `tables` has the blocks that the engine has allocated."""
        state = self._states.get(request.request_id)
        if state is None or not tokens:
            return
        plan = state.claim
        assert plan is not None
        local = plan.match.local
        assert self._load_stop(state, plan) - local == tokens, "the engine loads another number of tokens than claimed"
        state.claim, state.awaits_blocks = None, False
        state.loading, state.loading_since = True, self._setup.clock()
        if self._groups.windowed and is_blend(plan):
            state.borrowed = self._groups.completed(tables, request.block_hashes, local, end_of_pages(plan), plan.stop)
            if state.borrowed is None:  # The engine has evicted blocks to allocate these.
                self.fail_load(state.id, tables)
                return
            tables = state.borrowed.tables
        if state.revision is not None:
            blocks = self._groups.cached_blocks(state.revision.blocks_after(end_of_pages(plan)))
            if not blocks:  # The engine has evicted blocks to allocate these.
                self.fail_load(state.id, tables)
                return
            self._pool.touch(blocks)
            state.copied, state.continued = blocks, sum(piece.tokens for piece in own_pieces(plan))
        self._claims.wait_from_now(state)
        state.sources = sources_of(plan.pieces, state.chunks.pins)
        if request.prefill_stats and not request.num_preemptions:
            # Correct `cached_tokens` in the response: the engine counted the whole claim, with tokens a blend computes.
            request.prefill_stats.set(request.num_prompt_tokens, local, plan.tokens)
        state.exact_tokens = plan.reach - local
        ready = all(self.engine.store.state(pin) is PinState.READY for pin in state.chunks.pins.values())
        offer = self.engine.blend_offer(plan)
        # A blend is measured only if all chunks are in memory: the speed of a tier says nothing about blends.
        state.timing.begun, state.timing.offer = self._setup.clock(), offer if ready else None
        if offer is not None:
            self._follow_ups.weigh(state, offer)
        if plan.approximate:
            self._follow_ups.isolate(state, plan)
            state.blended_now = True
            self._admission.begin_blend(state, request.num_prompt_tokens - local, ready=ready)
        else:
            self._admission.begin_exact_load(state, local)
        learned_after = len(self.engine.prefix)
        self._next.loads.append(job_of(state, plan, tables, self._block_size, ready=ready, learned_after=learned_after))
        state.revision = None
        if state.role is not Role.LEARN:
            self.counts["blends" if plan.approximate else "loads"] += 1
            self._repeated.reused(state, plan)
            for place, count in state.sources.items():
                self.counts[f"tokens_from_{place}"] += count

    def sources(self, request: Any, tokens: int) -> dict[str, int]:
        """Return how many of `tokens` loaded tokens come from each place; "computed" counts what a blend computes.

        The engine expects that the counts add up to `tokens`. What a revision copies comes from the device's memory.
        """
        state = self._states.get(request.request_id)
        found = dict(state.sources) if state else {}
        if state and state.copied:
            found["device"] = state.continued
        found["computed"] = tokens - sum(found.values())
        return {place: count for place, count in found.items() if count > 0}

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> dict[str, object] | None:
        """Save the last blocks of an ended request, queue its unknown documents, and return facts for the response."""
        state = self._states.get(request.request_id)
        if state is None:
            return None
        self.has_news = True
        self._note_answer(state)
        if request.num_computed_tokens:
            self._observed[key("reused_tokens", (state.mode,))].append(sum(state.sources.values()))
        if not state.loading:  # Otherwise a worker may still read the chunks, and reports when it has stopped.
            self._saves.save_tail(state, tables)
            aborted = request.status.name == "FINISHED_ABORTED"
            asks = state.role is not Role.LEARN  # No turn follows a request to learn.
            if asks and state.salts and request.num_computed_tokens and not (aborted or self.off):
                assert state.origin is not None
                self._backfill.add(request, state.salts, state.origin, follows=state.follow_up.follows)
            self._forget(state)
        if not state.scheduled:  # The engine does not cache the blocks of a blend before it computes the next token.
            self._follow_ups.forget(state)
        if state.is_searched and request.num_computed_tokens:
            stored = state.stored_documents
            self.counts["documents_known"] += len(stored)
            self.counts["documents_unknown"] += sum(one.learnable for one in state.documents) - len(stored)
            self.engine.note(request.prompt_token_ids, stored, state.salt, used=True)
        # Nothing is learned for a request that never ran, because the engine may be asleep without its weights.
        if self.engine.settings.blend_learn and state.learning.allowed and request.num_computed_tokens:
            fitting = [one for one in state.learning.unknown if not self._saves.never_fits(one.tokens)]
            if len(fitting) < len(state.learning.unknown) and state.role is not Role.LEARN:
                longest = max(one.tokens for one in state.learning.unknown)
                state.add_note(f"a document of {longest} tokens is too long to be learned by this engine")
            self.engine.learn_later(request.prompt_token_ids, fitting, state.salt)
            self._repeated.ended(state)
        if state.role is Role.BLEND:
            self.counts["blends_continued"] += state.continued > 0
            self.counts["blends_skipped"] += state.refused not in ("", REPEATED)
        facts = state.facts()
        self.recent[state.id] = facts or {}
        if len(self.recent) > RECENT:
            self.recent.popitem(last=False)
        log.debug("request %s of %d tokens: %s", state.id, request.num_prompt_tokens, facts or "nothing reused")
        return facts

    # -- a step ------------------------------------------------------------------------------------------------------

    def plan(self, scheduled: dict[str, int], tables: BlockTables) -> StepPlan:
        """Return the plan of this step for the workers."""
        if scheduled:
            self.engine.background.stepped()
            self._ran = self._setup.clock()
        elif not self._admission.blends:  # Otherwise a blended request will run.
            self.has_news = True
        self._next.saves = self._saves.take_saves()  # those of earlier steps: no first token waits for a copy
        watched = self._watched.begin_step(scheduled)
        prefills: dict[str, Any] = {}  # requests whose prompts may be computed in this step
        for state in watched:
            request, tokens = state.id, scheduled[state.id]
            computed = state.request.num_computed_tokens + tokens
            if not state.decodes:
                prefills[request] = state.request
                if state.blended_now and computed >= state.request.num_prompt_tokens:
                    self._next.answers.add(request)
                state.blended_now = False
                self._note_step(state)
            if computed >= state.saving.next_at:
                self._saves.save_due(state, computed, lambda request=request: tables(request))  # type: ignore[misc]
            if state.decodes and tokens <= self._setup.decode_tokens:
                self._watched.rest(state, state.saving.next_at - computed)
        self._next.saves += self._saves.take_urgent_saves()
        loading = [state for state in self._watched if state.loading]
        late = [state.id for state in loading if self._claims.give_up_late(state)]
        plan = self._next
        plan.slab = self._introduced = self._slab
        plan.scheduled, plan.late = sum(scheduled.values()), late
        if self._setup.ranks > 1:
            plan.arrived = {state.id: self._claims.arrived(state) for state in loading}
        plan.rested = not scheduled and self._setup.clock() - self._ran >= REST_SECONDS
        learning, backfill = self.engine.learning, self._backfill
        if learning or learning.under_way or backfill.waiting or backfill.under_way:
            self._plan_other_work(plan, idle=not (scheduled or loading or plan.loads))
        if len(loading) + len(scheduled) + len(plan.learn) + len(self.engine.learning.under_way) > 1:
            for state in (*loading, *watched):
                state.timing.alone = False
        blending = any(state.approximate is not None for state in loading)
        self._pace.planned(self._setup.clock(), scheduled, prefills, alone=not (blending or plan.learn))
        return self.take_plan()

    def _plan_other_work(self, plan: StepPlan, *, idle: bool) -> None:
        """Add documents to learn and prompts to compute exactly to a step's plan, and give up what is in the way."""
        blocked = (self._saves.has_idle_job or self._backfill.under_way) and self._waits_for_blocks
        plan.cancel = self._saves.to_cancel(idle=idle, blocked=blocked)
        learn = self._saves.learn_next(idle=idle and plan.rested) if self._runs and not self.off else None
        plan.learn += [learn] if learn else []
        blocked = blocked or (learn is None and self._could_learn(idle=idle and plan.rested))
        idle = idle and not self.engine.learning.under_way
        plan.cancel += self._backfill.to_cancel(idle=idle, blocked=blocked)
        if idle and plan.rested and not self.off and (backfill := self._backfill.next_job()) is not None:
            plan.backfill.append(backfill)

    def _note_step(self, state: RequestState) -> None:
        """Record that the engine computes prompt tokens of a request."""
        self._admission.end_exact_load(state)
        if not state.scheduled:
            self._follow_ups.note_begun(state)
        state.scheduled, state.awaits_blocks = True, False
        self._claims.release(state)  # The engine did not use this claim.
        self._note_answer(state)
        if state.timing.begun is None and not state.request.num_preemptions:
            state.timing.begun = self._setup.clock()
            state.timing.prefilled = state.request.num_prompt_tokens - state.request.num_computed_tokens
        state.decodes = state.answered

    @property
    def _waits_for_blocks(self) -> bool:
        """Whether a request waits for blocks of the engine."""
        return any(state.awaits_blocks for state in self._states.values())

    def _could_learn(self, *, idle: bool) -> bool:
        """Return whether a document would be learned in this step if enough blocks were free."""
        waiting = self.engine.learning
        return self._runs and not waiting.under_way and bool(waiting.has_wanted or (idle and len(waiting)))

    def take_plan(self) -> StepPlan:
        """Return the plan for the workers, as far as it is known. Workers can use it after an error in `plan`."""
        plan, self._next = self._next, StepPlan()
        plan.slab, plan.first = self._introduced, self._admission.end_step()
        return plan

    # -- after an error ----------------------------------------------------------------------------------------------

    def abandon(self, request: str) -> None:
        """Serve a request without lmc from now on, and release what is held for it.

        If workers are loading for it, they report a failure, because their chunks are no longer pinned.
        """
        state = self._states.get(request)
        if state is not None:
            state.role, state.given_up, state.learning.allowed = Role.EXACT, True, False
            state.approximate, state.documents, state.learning.unknown, state.learning.queued = 0, (), (), ()
            state.revision = None
            self._follow_ups.forget(state)
            self._claims.release(state)
            self._admission.end_exact_load(state)
            self._watched.add(state)

    def fail_load(self, request: str, tables: Sequence[Sequence[int]]) -> None:
        """Report to the engine that the load of a request has failed; `tables` are its block tables."""
        state, first = self._states[request], self._states[request].local // self._block_size
        self._next.loads = [job for job in self._next.loads if job.request != request]
        self._next.failed[request] = tuple(block for table in tables for block in table[first:])
        state.loading = True
        self.abandon(request)

    def drop(self, request: str) -> None:
        """Forget an ended request."""
        self.abandon(request)
        state = self._states.get(request)
        if state is not None and not state.loading:
            self._remove(state)

    def recover(self, report: StepReport, received: Iterable[str]) -> None:
        """Return the blocks of ended jobs and end the received loads, after an error in `reported`."""
        received = set(received)
        self._next.received |= received
        self._end_blends(received)
        self.pending.report(report.done, report.failed)
        for request in received:
            self.abandon(request)
            state = self._states.get(request)
            if state is not None:
                state.loading = False
                if state.request.is_finished():
                    self._remove(state)

    def _end_blends(self, received: Iterable[str], lost: Collection[str] | None = None) -> None:
        """End the blends of `received` requests, and return the blocks that they have borrowed.

        Without `lost`, the requests whose load has failed, it is unknown which blocks are valid.
        """
        for request in received:
            self._admission.end_blend(request)
            state = self._states.get(request)
            if state is not None and state.copied:
                held, state.copied = state.copied, ()
                self._groups.release(held)
            if state is None or state.borrowed is None:
                continue
            borrowed, state.borrowed = state.borrowed, None
            # If the request has ended, workers have stopped its blend without reporting a failure.
            invalid = lost is None or request in lost or state.given_up or state.request.is_finished() or self.off
            exact = 0 if invalid else state.approximate or 0
            try:
                if exact:  # For groups with a window, the engine does not keep these blocks.
                    self._saves.save_due(state, exact, lambda tables=borrowed.tables: tables)  # type: ignore[misc]
            finally:
                self._groups.give_back(borrowed, state.request, exact if self._setup.caches_prefixes else 0)

    def switch_off(self) -> None:
        """Serve the engine without lmc from now on. Jobs under way are finished."""
        self.off = True
        self.engine.learning.clear()
        self._backfill.cancel()
        for request, state in list(self._states.items()):
            if not state.given_up:  # Otherwise the engine may have looked for its blocks already.
                self._follow_ups.restore_hashes(state)
            if not state.loading:
                self.abandon(request)

    def reset(self) -> None:
        """Forget everything that was computed until now, for example because the weights have changed."""
        self.engine.begin_anew()
        self._ran = -math.inf  # Nothing is learned before the engine runs again: it may be about to sleep.
        self._saves.resets += 1
        self._follow_ups.clear()
        self._backfill.cancel()
        self.forget_all(wait=False)
        self.engine.learning.clear()
        for state in self._states.values():
            state.approximate = 0  # Tokens that the request still computes depend on old KV.
            state.revision = None
            self._follow_ups.restore_hashes(state)
            # The salts are of an earlier blend, unless its own blend has arrived and the engine is about to cache it.
            if state.salts and not (state.loading or state.scheduled or state.request.num_computed_tokens):
                set_hashes(state.request, state.exact_hashes)
                state.salts, state.follow_up.continues, state.continued = (), None, 0
            # The keys of its documents belong to the old weights.
            state.role, state.documents, state.learning.unknown = Role.EXACT, (), ()
            if not state.loading:
                self._claims.release(state)

    def forget_all(self, *, wait: bool = True) -> None:
        """Remove every chunk, and discard chunks that are being saved."""
        self.pending.fail_all()
        self.engine.forget_all(wait=wait)

    def close(self) -> None:
        """Write chunks that the tiers lack, and close everything."""
        self.pending.drop_all()
        self.engine.close()

    def reported(self, report: StepReport, received: set[str]) -> None:
        """Process the workers' report; `received` are requests whose load has ended on all ranks."""
        self._next.received |= received
        self._end_blends(received, report.lost)
        self.has_news = self.has_news or bool(report.done or report.failed)
        self.pending.report(report.done, report.failed)
        for request, facts in report.blended.items():
            self.counts["token_layers"] += int(facts["token_layers"])  # type: ignore[call-overload]
            asking = self._states.get(request)
            if asking is None:
                continue
            asking.blended = facts
            if asking.role is Role.BLEND:  # A request to learn uses blind reuse, which has a ratio of 0.
                self._observed["budget"].append(float(facts["charged_budget"]))  # type: ignore[arg-type]
        for request in report.lost & self._states.keys():
            state = self._states[request]
            state.given_up, state.exact_tokens, state.timing.alone = True, 0, False
            state.blended = {}  # The engine computes what the blend has filled.
            state.sources.clear()
            self._follow_ups.forget(state)
            stats = state.request.prefill_stats
            if stats and not state.request.num_preemptions:  # Lost tokens are computed: `cached_tokens` omits them.
                stats.set(state.request.num_prompt_tokens, state.local, 0)
            self.counts["failed_loads"] += not state.chunks.ended_early
        for request in received & self._states.keys():
            state = self._states[request]
            if not state.loading:  # Another connector has loaded this request.
                continue
            state.loading = False
            self._note_load(state)
            if state.request.is_finished():
                self._forget(state)
            else:
                self._claims.release(state)

    @property
    def busy(self) -> bool:
        """Whether lmc needs the engine to make steps. Workers also need a step to open or release a slab."""
        news = self._introduced != self._slab
        learns = self._runs and not self.off and bool(len(self.engine.learning))
        backfills = self._runs and not self.off and self._backfill.waiting
        return news or bool(self._next.failed) or self._saves.saving or learns or backfills

    @property
    def _slab(self) -> SlabAddress | None:
        """The address at which workers open the slab; None without a cache server."""
        slab = self.engine.store.slab
        return None if slab is None else slab.address

    def _has_time(self) -> bool:
        """Return whether the engine makes steps, and has enough free blocks to learn documents of other engines."""
        spare = self._pool.get_num_free_blocks() > len(self._pool.blocks) * SPARE
        return spare and self._setup.clock() - self._ran < AWAKE_SECONDS

    @property
    def _runs(self) -> bool:
        """Whether the engine has computed recently; otherwise it may be paused, or asleep without its weights."""
        return self._setup.clock() - self._ran < LEARN_SECONDS

    def numbers(self) -> dict[str, float]:
        """Return counts since the start and gauges, by the keys of `lmc.metrics`."""
        return {
            **self.counts,
            **flat(self.engine.store.stats()),
            "stored_chunks": self.pending.stored["chunks"],
            "stored_tokens": self.pending.stored["tokens"],
            "documents_learned": self.pending.stored["documents"],
            "layers": self._layers,
            "backfills": self._backfill.done,
            "switched_off": float(self.off),
            "attached": float(self.engine.server is not None),
            **{key("capacity_tokens", (place,)): tokens for place, tokens in self.engine.capacity().items()},
        }

    def take_events(self) -> list[BlocksMoved]:
        """Return the blocks that have appeared or left since the last call, if the engine announces them.

        Records of earlier processes are announced when all of them were read, which tells their blocks.
        """
        if self.events is None or not self.engine.recall.ended:
            return []
        self.events.recall(self.engine.recalled)
        return self.events.take()

    def take_observed(self) -> dict[str, list[float]]:
        """Return the observations for histograms since the last call, by the keys of `lmc.metrics`."""
        observed, self._observed = self._observed, defaultdict(list)
        return dict(observed)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _note_load(self, state: RequestState) -> None:
        seconds = self._setup.clock() - state.loading_since
        self._observed[key("load_seconds", (state.mode,))].append(seconds)
        if self._setup.trace is not None:
            plain: dict[str, object] = {}
            for name, fact in (state.facts() or {}).items():
                counts = fact if isinstance(fact, dict) else {"": fact}
                kinds = {f"lmc.{name}.{kind}".rstrip("."): count for kind, count in counts.items()}
                plain |= {kind: count for kind, count in kinds.items() if isinstance(count, str | int | float)}
            now = time.time()
            self._setup.trace(state.request, f"lmc.{state.mode}", now - seconds, now, plain)

    def _note_answer(self, state: RequestState) -> None:
        """Record the time to first token, once. The token came in the previous step, or while this step was planned."""
        if not state.answered and state.request.num_output_tokens:
            state.answered = True
            seconds = time.time() - state.request.arrival_time
            self._observed[key("ttft_seconds", (state.mode,))].append(seconds)
            self._measure(state)

    def _measure(self, state: RequestState) -> None:
        """Report the prefill time of a prompt to the cost model, if nothing else was computed during it."""
        timing = state.timing
        if timing.begun is None or not timing.alone or state.role is Role.LEARN or state.request.num_preemptions:
            return
        seconds, cost = self._setup.clock() - timing.begun, self.engine.store.cost
        if timing.offer is not None:
            cost.blended(timing.offer, seconds)
        else:
            cost.prefilled(timing.prefilled, seconds, state.request.num_prompt_tokens - timing.prefilled)

    def _has_learned(self, state: RequestState) -> bool:
        """Return whether all documents of a request to learn are stored that can be stored; queue missing documents.

        The request is then served from the learned documents, so no token is computed twice.
        """
        learning = state.learning
        if learning.unknown or learning.queued:
            self._ran = self._setup.clock()  # The engine called this method: it is awake and can learn.
            if not self._admission.has_time_to_wait(state, MAX_LEARN_SECONDS):
                learning.unknown, learning.queued = (), ()
                state.note = "the engine had no blocks to learn all documents"
                return True
            fitting = [document for document in learning.unknown if self.engine.fits(document.tokens)]
            learning.unknown = ()
            for number, document in enumerate(fitting):
                queued = self.engine.learn_later(
                    state.request.prompt_token_ids, [document], state.salt, learning.name, wanted=True
                )
                if not queued:  # The queue is full.
                    learning.unknown = tuple(fitting[number:])
                    break
                learning.queued += queued
                learning.computed += len(queued)
            if learning.unknown or any(map(self._saves.learns, learning.queued)):
                return False
            learning.queued = ()
        keys = [piece.key for document in state.documents for piece in document.pieces]
        learning.is_done = all(self.engine.lookup(keys, state.chunks.elsewhere or {}))
        if not learning.is_done:
            state.note = state.note or "not all documents could be learned; the log may say why"
            return True
        stored = self.engine.note(state.request.prompt_token_ids, state.documents, state.salt, name=learning.name)
        learning.stored = tuple(document.id for document in stored)
        return True

    def _adapter(self, lora: Any) -> bytes:
        """Return the stamp of an adapter's files at the time when a request first used it and the engine loaded it."""
        named = (lora.lora_int_id, lora.lora_path)
        if named not in self._adapters or lora.load_inplace:
            self._adapters[named] = adapter_stamp(lora.lora_path)
        return self._adapters[named]

    def _is_short(self, state: RequestState) -> bool:
        """Return whether a prompt is so short that loading it takes as long as computing it, and has no documents."""
        request = state.request
        if request.num_prompt_tokens >= self._few or request.skip_reading_prefix_cache:
            return False
        return self._has_no_documents(state) or (
            self._classifier.may_go_on(state) and self._classifier.separators_after(state, 0) <= 1
        )

    def _has_no_documents(self, state: RequestState) -> bool:
        """Return whether a request neither blends nor learns, whatever its prompt is."""
        options = state.options
        return options is not None and not options.learn and not (self._setup.blends and options.blend)

    def _is_cached(self, state: RequestState) -> bool:
        """Return whether the engine's cache lacks so few prompt tokens that lmc has nothing to add.

        Loading these tokens takes one engine step, and so does computing them. A request that continues an earlier
        blend gets the salts of that blend. Returns false if new documents follow the cached tokens, because these
        may be stored, or have to be learned.
        """
        request = state.request
        known = request.num_prompt_tokens - self._few
        block = known // self._block_size
        if known <= 0 or request.skip_reading_prefix_cache or block >= len(request.block_hashes):
            return False
        # All blocks before a cached block are cached, too, as long as the engine evicts the last ones first.
        more = self._groups.cached(request.block_hashes[block:])
        exact = (block + more) * self._block_size if more else 0
        if self._has_no_documents(state):
            return exact > 0
        if not self._classifier.may_go_on(state):
            return False
        state.role, state.exact_hashes = Role.BLEND, list(request.block_hashes)
        cached = exact
        if exact:
            self._follow_ups.repeats_blend(state)
        elif self._follow_ups.continue_blend(state, 0, by_separators=True):
            cached = state.revision.stop if state.revision else self._groups.cached_tokens(request.block_hashes)
        # A document lies between two separators, so one separator after the cached tokens ends a cached document.
        before = state.follow_up.blended_before or cached
        if cached > known and self._classifier.separators_after(state, before) <= 1:
            return True
        if state.salts:
            set_hashes(request, state.exact_hashes)
        self._follow_ups.restore_hashes(state)
        state.role, state.salts, state.exact_hashes = Role.EXACT, (), ()
        state.approximate, state.follow_up.searched, state.follow_up.blended_before = None, -1, 0
        state.origin = state.revision = state.follow_up.continues = None
        return False

    def _forget(self, state: RequestState) -> None:
        self._claims.release(state)
        self._admission.end_exact_load(state)
        self._remove(state)

    def _remove(self, state: RequestState) -> None:
        del self._states[state.id]
        self._watched.remove(state)
