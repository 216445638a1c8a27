"""Claims of requests on stored chunks.

The planner decides which chunks are used. This module pins them and waits, up to a deadline, for chunks that are being
loaded from slower tiers. It gives up chunks that are too late, or that arrive more slowly than they are computed.
"""

from collections import Counter
from dataclasses import replace

from lmc.blend.blender import QUESTION_ROWS
from lmc.blend.strategies import NEEDS_QUESTION
from lmc.connectors.vllm.scheduler.request_state import RequestState, Role
from lmc.connectors.vllm.start import Setup
from lmc.engine import Match, Plan
from lmc.engine.pieces import AT_HAND
from lmc.engine.planner import make_plan
from lmc.keys import ChunkKey
from lmc.storage.contract import PinState
from lmc.storage.memory.slab import LOST

FEW_TOKENS = 128  # Fewer tokens than this are computed as fast as they are loaded: either takes a step of the engine.
ANSWER_SECONDS = 0.2  # longest wait of a request for the answers of slow tiers to lookups
DEADLINES = 10  # A load may take this many deadlines if a part arrives within each of them.
# A load is compared with computing when a request has waited for this share of the expected time of computing: by then,
# its progress shows how long the rest takes. It ends if the rest is expected to take this many times as long.
JUDGED_AFTER = 0.25
CLEARLY_SLOWER = 1.25


def fewest_tokens(setup: Setup) -> int:
    """Return how many tokens are worth a load."""
    return max(1, min(setup.engine.settings.blend_min_tokens, FEW_TOKENS))


class Claims:
    """The claims of requests on one cache engine."""

    def __init__(self, setup: Setup, counts: "Counter[str]") -> None:
        self._setup, self._engine, self._settings = setup, setup.engine, setup.engine.settings
        self._counts = counts
        self._fewest = fewest_tokens(setup)

    def look(self, state: RequestState, local: int = 0) -> Match:
        """Find the stored chunks of a request. Tiers that processes share are searched only the first time."""
        hashes, size = state.hashes, self._setup.groups.block_size
        if self._setup.groups.states:  # The engine computes the last token again, from the state before that token.
            hashes = hashes[: (state.request.num_tokens - 1) // size]
        chain = self._engine.block_chain(hashes, size)
        match = self._engine.look(self.usable(state, local), chain, state.chunks.elsewhere)
        if state.revision is not None:
            match = state.revision.match(match)
        if state.chunks.elsewhere is None:
            shared = self._engine.store.shared_places
            state.chunks.elsewhere = {piece.key: str(piece.place) for piece in match.pieces if piece.place in shared}
        return match

    def asks(self, state: RequestState, match: Match) -> bool:
        """Return whether a request waits for slow tiers to say which known documents they have; record until when.

        It waits no longer than it would take to compute their tokens. A request to learn waits for answers about all
        documents, up to `remote_deadline`: another host may have learned them into a pool.
        """
        store, known = self._engine.store, self._engine.known
        if not store.shared_places:
            return False
        learns = state.role is Role.LEARN
        missing = [
            piece
            for document in match.documents
            if learns or document.known or (document.pieces and known.get(document.pieces[-1].key.hex()))
            for piece in document.pieces
            if piece.place is None
        ]
        keys = tuple(piece.key for piece in missing)
        if not keys or not store.unanswered(keys):
            return False
        seconds = self._settings.remote_deadline if learns else ANSWER_SECONDS
        if not learns and (pace := store.cost.prefill_pace()):
            seconds = min(seconds, pace * sum(piece.tokens for piece in missing))
        state.chunks.asked, state.chunks.answers_due = keys, self._setup.clock() + seconds
        return True

    def awaits_answers(self, state: RequestState) -> bool:
        """Return whether a request goes on waiting for answers. If not, prepare another search of the tiers."""
        chunks = state.chunks
        if self._setup.clock() < chunks.answers_due and self._engine.store.unanswered(chunks.asked):
            return True
        chunks.asked, chunks.elsewhere = (), None
        return False

    def usable(self, state: RequestState, local: int) -> Match:
        """Return what a request can use after the `local` tokens in the engine's own cache, not looked up yet."""
        prompt, policy = state.request.num_prompt_tokens, state.policy
        asks = policy is not None and policy.strategy in NEEDS_QUESTION
        blends = state.role is not Role.EXACT and not state.request.num_preemptions
        question_rows = min(prompt - state.question, QUESTION_ROWS) if asks else 0
        return Match(
            prompt=prompt,
            documents=state.documents if blends else (),
            local=local,
            exact_stop=state.request.num_tokens,
            min_tokens=self._settings.blend_min_tokens if state.role is Role.BLEND else 0,
            fewest=self._fewest,
            ratio=policy.share(sum(self._setup.stages)) if policy else 0.0,
            whole_prompt=asks,
            question_rows=question_rows if state.role is Role.BLEND else None,
            block_size=self._setup.groups.block_size,
            refused=state.refused,
            memory_only=state.chunks.memory_only,
            lost=frozenset(state.chunks.lost),
            positions=self._setup.longest,
        )

    def prefetch(self, state: RequestState, match: Match, local: int) -> None:
        """Begin to load chunks from slower tiers, if loading is expected to be faster than computing.

        Waiting requests hold at most half of the slots.
        """
        plan = self._engine.plan(replace(match, local=local, refused=state.refused))
        state.learning.unknown, state.refused = plan.unknown, plan.match.refused
        chunks = state.chunks
        chunks.skipped, chunks.memory_only = plan.skipped, plan.match.memory_only
        chunks.planned_after, chunks.weighed = local, (local, plan.tokens)
        state.add_note(plan.note)
        self._engine.promotion.begin([piece.key for piece in plan.slow])
        away = list(dict.fromkeys(piece.key for piece in plan.pieces if piece.place not in AT_HAND))
        if away:
            self._engine.promotion.cancel()
        room = self._engine.store.slots // 2 - self._engine.store.held()
        self._pin(state, away[: max(0, room)])
        chunks.loads, chunks.begun_at = tuple(chunks.pins), self._setup.clock()
        chunks.computing = self._engine.computing(plan) if away else None

    def make(self, state: RequestState, local: int) -> Plan | None:
        """Return the best plan after `local` tokens, and pin its chunks.

        Returns None if a chunk is still loading before the deadline.
        """
        if self.is_late(state):
            self._give_up(state, PinState.COMING)
        elif self.is_slow(state):
            self._compute_instead(state)
        match, late, missing = self.look(state, local), self.is_late(state), frozenset[ChunkKey]()
        chunks = state.chunks
        while True:
            plan = make_plan(replace(match, memory_only=chunks.memory_only or late, lost=missing.union(chunks.lost)))
            wanted = plan.keys
            missing |= self._pin(state, [key for key in wanted if key not in chunks.pins])
            if not self._give_up(state, PinState.LOST) and missing.isdisjoint(wanted):
                break
        chunks.planned_after = local
        self._release(state, chunks.pins.keys() - set(wanted))
        if self.waits(state, local):
            return None
        # The engine's cache or the stored chunks have changed since the blend was compared with prefill.
        if chunks.weighed != (local, plan.tokens):
            chunks.weighed = local, plan.tokens
            weighed = self._engine.without_slow_blend(plan)
            if weighed is not plan:
                state.refused, chunks.skipped = weighed.match.refused, chunks.skipped + weighed.skipped
                state.add_note(state.refused)
                plan, wanted = weighed, weighed.keys
        state.learning.unknown = plan.unknown
        self._release(state, chunks.pins.keys() - set(wanted))
        return plan

    def is_late(self, state: RequestState) -> bool:
        """Return whether no part arrived within one deadline, or not all parts within `DEADLINES` deadlines."""
        chunks, deadline = state.chunks, self._settings.load_deadline
        if chunks.waiting_since is None:
            return False
        now = self._setup.clock()
        return now - chunks.progress_at > deadline or now - chunks.waiting_since > DEADLINES * deadline

    def is_slow(self, state: RequestState) -> bool:
        """Return whether the rest of a load is expected to take clearly longer than computing its tokens.

        The rest is estimated from the parts that have arrived since the load began. Before the first part, it is taken
        to be as long as the wait so far.
        """
        chunks, store = state.chunks, self._engine.store
        if chunks.computing is None or chunks.waiting_since is None:
            return False
        now = self._setup.clock()
        waited = now - chunks.waiting_since
        if waited < JUDGED_AFTER * chunks.computing:
            return False
        pins = [chunks.pins[key] for key in chunks.loads if key in chunks.pins]
        arrived, parts = sum(map(store.arrived, pins)), len(pins) * self._engine.layout.parts
        rest = (now - chunks.begun_at) * (parts - arrived) / arrived if arrived else waited
        return bool(pins) and rest > CLEARLY_SLOWER * chunks.computing

    def waits(self, state: RequestState, local: int) -> bool:
        """Return whether no part of a pinned chunk has arrived yet, and the request should go on waiting for it.

        If the engine's cache has changed since the chunks were chosen, it may have their tokens. Then the request does
        not wait.
        """
        store = self._engine.store
        if local != state.chunks.planned_after or self.is_late(state) or self.is_slow(state):
            return False
        return any(store.state(pin) is PinState.COMING and not store.arrived(pin) for pin in state.chunks.pins.values())

    def wait_from_now(self, state: RequestState) -> None:
        """Start the deadline now."""
        state.chunks.waiting_since = state.chunks.progress_at = self._setup.clock()

    def note_progress(self, state: RequestState) -> None:
        """Record the time if the number of arrived parts has changed since the last call."""
        arrived = sum(self._engine.store.arrived(pin) for pin in state.chunks.pins.values())
        if arrived != state.chunks.parts_arrived:
            state.chunks.parts_arrived, state.chunks.progress_at = arrived, self._setup.clock()

    def arrived(self, state: RequestState) -> int:
        """Return the smallest number of arrived parts of the pinned chunks; `LOST` if a chunk is lost."""
        store = self._engine.store
        if any(store.state(pin) is PinState.LOST for pin in state.chunks.pins.values()):
            return LOST
        return min((store.arrived(pin) for pin in state.chunks.pins.values()), default=LOST)

    def give_up_late(self, state: RequestState) -> bool:
        """Release lost chunks and, if the load is late or slow, incomplete ones. Returns whether any was released."""
        self.note_progress(state)
        lost = self._give_up(state, PinState.LOST)
        if self.is_late(state):
            return self._give_up(state, PinState.COMING) or lost
        return (self.is_slow(state) and self._compute_instead(state)) or lost

    def release(self, state: RequestState) -> None:
        """Release everything that is pinned for a request."""
        self._release(state, set(state.chunks.pins))
        state.claim = state.chunks.waiting_since = None

    def _pin(self, state: RequestState, keys: list[ChunkKey]) -> frozenset[ChunkKey]:
        """Pin chunks, and return those that could not be pinned."""
        unique = list(dict.fromkeys(keys))
        found = self._engine.store.pin(unique, self._engine.lookup(unique, state.chunks.elsewhere or {}))
        state.chunks.pins.update({pin.key: pin for pin in found if pin is not None})
        return frozenset(unique) - state.chunks.pins.keys()

    def _release(self, state: RequestState, keys: set[ChunkKey]) -> None:
        """Release chunks without waiting for their loads, because workers check the tags of the slots they read."""
        if keys:
            self._engine.store.release([state.chunks.pins.pop(key) for key in keys], wait=False)

    def _compute_instead(self, state: RequestState) -> bool:
        """Load nothing more from slower tiers for a request; return whether anything was still being loaded.

        The request keeps the chunks that have arrived.
        """
        chunks = state.chunks
        if not self._give_up(state, PinState.COMING):
            return False
        chunks.memory_only = chunks.ended_early = True
        self._counts["loads_skipped"] += 1
        state.add_note(f"a load ended early, because computing takes about {chunks.computing:.3g} s")
        return True

    def _give_up(self, state: RequestState, what: PinState) -> bool:
        """Release chunks in the state `what`, and never try them again. Returns whether any chunk was released."""
        useless = {key for key, pin in state.chunks.pins.items() if self._engine.store.state(pin) is what}
        self._release(state, useless)
        state.chunks.lost |= useless
        return bool(useless)
