"""Follow-ups: requests that begin with the documents of an earlier blend of this engine.

A follow-up continues from the engine's own blocks of the blend, as a later turn or a step of a beam search does; it
revises copies of these blocks if it asks something else (`revision.py`); or its documents are computed exactly, so that
further follow-ups find them in the engine's own cache. New blends are isolated and recorded here (`isolation.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lmc.blend.segments import Placement, Span, ends_with_result, last_question
from lmc.blend.strategies import NEEDS_QUESTION
from lmc.blend.turn_headers import occurrences
from lmc.connectors.vllm.scheduler.backfill import Backfill
from lmc.connectors.vllm.scheduler.balance import Balances
from lmc.connectors.vllm.scheduler.claims import Claims
from lmc.connectors.vllm.scheduler.isolation import OwnBlend, OwnBlends, add_salt, salt_of, set_hashes
from lmc.connectors.vllm.scheduler.jobs import own_pieces
from lmc.connectors.vllm.scheduler.request_state import RequestState, Role
from lmc.connectors.vllm.scheduler.revision import Revision, depends_on_question
from lmc.connectors.vllm.start import Setup
from lmc.documents.repeats import LineEnds
from lmc.engine import Match, Plan
from lmc.storage.cost_model import BlendOffer, LoadPolicy

# The note of a prompt that repeats the documents of an earlier blend in the same order. It is computed exactly, so that
# later prompts find its blocks in the engine's own cache.
REPEATED = "its documents are computed, so that the engine's own cache has them for further prompts with this prefix"
UNPROFITABLE = (
    "stored documents were computed: recent blends cost later requests more than they saved, because the engine was "
    "not idle between them"
)
BEGUN = 16  # maximal number of tokens that a chat template writes after the header of the next answer
REVISED_SHARE = 0.5  # When revisions of a blend have computed this share of its tokens, the next prompt is computed.


class FollowUps:
    """The blends of one engine, and the requests that follow them."""

    def __init__(
        self,
        setup: Setup,
        claims: Claims,
        backfill: Backfill,
        states: Mapping[str, RequestState],
        line_ends: LineEnds | None,
    ) -> None:
        """Follow no blend yet. `states` are the requests of the engine, by id."""
        self._setup, self._groups, self._cost = setup, setup.groups, setup.engine.store.cost
        self._pool, self._block_size = setup.groups.pool, setup.groups.block_size
        self._claims, self._backfill, self._states, self._line_ends = claims, backfill, states, line_ends
        self._own_blends = OwnBlends(self._block_size, len(self._pool.blocks))
        # Of requests that are alone in the engine, and of those among others, which are followed by fewer idle steps.
        self._balances = Balances(), Balances()
        self._weighs_blends = setup.engine.settings.load_policy != LoadPolicy.ALWAYS.value and setup.caches_prefixes

    def repeats_blend(self, state: RequestState) -> bool:
        """Return whether a prompt begins with all documents of an earlier blend in the same order; count it once."""
        state.follow_up.shared = max(state.follow_up.shared, self._own_blends.repeats(state.exact_hashes))
        if state.follow_up.shared:
            self._note_follow_up(state)
        return state.follow_up.shared > 0

    def continue_blend(self, state: RequestState, exact: int, *, by_separators: bool = False) -> bool:
        """Continue an earlier blend of the engine, or revise it if the request asks another question.

        Of several blends, the engine continues the one that has the most tokens in its cache. To continue, the hashes
        of the request are salted as those of the blend. Both are done only if these tokens are more than the `exact`
        tokens that are cached or stored otherwise. Once revisions have computed a share of the tokens that prefill
        would, a prompt is computed instead, and further ones find its blocks in the engine's cache. Returns true if the
        request continues or revises a blend, or must wait for one that is under way.
        """
        request, policy = state.request, state.policy
        assert policy is not None
        self.restore_hashes(state)
        state.follow_up.searched = self._own_blends.added
        documents = None if by_separators else [document.span for document in state.documents]
        best, most, salted = None, exact, state.exact_hashes
        for blend in self._own_blends.find(
            tenant=state.salt,
            prompt=request.prompt_token_ids,
            hashes=state.exact_hashes,
            documents=documents,
            policy=policy,
        ):
            if request.num_prompt_tokens > blend.end + BEGUN:
                self._note_follow_up(state)
            if self._waits_for(blend, state):
                asks = self._asks_another_question(state, blend)
                state.follow_up.awaited_hashes = () if asks else blend.hashes.whole()
                return True
            hashes = blend.hashes.whole()
            reach = self._reach(hashes, blend.first // self._block_size)
            whole = reach == len(hashes)  # The engine may also have tokens after the blend, as those of the answer.
            if whole or reach * self._block_size > max(most, blend.first):
                set_hashes(request, hashes)
                if (cached := self._groups.cached_tokens(request.block_hashes)) > max(most, blend.first):
                    best, most, salted = blend, cached, list(request.block_hashes)
            if whole and not self._groups.windowed:  # Shorter blends have no more of the prompt.
                break
        set_hashes(request, state.exact_hashes)
        if best is None:
            return self._asks_about_same_documents(state, exact, documents)
        asks = self._asks_another_question(state, best)
        if asks and not self._may_revise(best):
            state.follow_up.shared = most  # So it is computed.
            return self._asks_about_same_documents(state, exact, documents)
        set_hashes(request, salted)
        state.origin, state.follow_up.blended_before = best.origin, best.end
        if asks:
            self._revise(state, best, most, continues=True)
            state.question = max(state.question, self._last_question(state, best))
        else:
            self._continue_unchanged(state, best)
        return True

    def why_computed(self, state: RequestState, match: Match, exact: int) -> str:
        """Return why the documents after the first `exact` tokens of a new prompt are computed although stored.

        Returns an empty text if the prompt may be blended.
        """
        repeats = self.repeats_blend(state)
        if not self._weighs_blends:
            return ""
        if repeats and state.follow_up.shared > exact:
            return REPEATED
        stored = any(piece.stop > exact and piece.place for document in match.documents for piece in document.pieces)
        return UNPROFITABLE if stored and not self._balance.allows_blend(state.salt) else ""

    def waits_for_blend(self, state: RequestState, local: int) -> bool:
        """Return whether a request waits for a blend that is under way, or has just found a blend to continue.

        In both cases the engine asks again in its next step, and then finds the blocks of that blend. A request that
        waits has the hashes of the blend meanwhile, so that the engine finds them in the step in which it has them, and
        need not ask again. A request that was preempted goes on as it began.
        """
        if state.role is not Role.BLEND or state.salts or state.revision or state.request.num_preemptions:
            return False
        if not self._awaits_blend(state):
            added, hashes = self._own_blends.added_since(state.follow_up.searched), state.exact_hashes
            if added is not None and not any(one.begins(hashes) or one.has_documents_of(hashes) for one in added):
                state.follow_up.searched = self._own_blends.added
                return False
            stored = state.follow_up.stored_exactly
            looked = state.follow_up.has_awaited_hashes  # The engine has looked for `local` with the blend's hashes.
            if not self.continue_blend(state, stored if looked else max(stored, local)):
                if not looked:
                    return False
            elif looked and state.follow_up.continues is not None and local == self._cached_for(state):
                return False
        mine = state.follow_up
        if mine.awaited is not None and mine.awaited_hashes and not mine.has_awaited_hashes:
            set_hashes(state.request, mine.awaited_hashes)
            mine.has_awaited_hashes = True
        self._claims.wait_from_now(state)
        return True

    def restore_hashes(self, state: RequestState) -> None:
        """Give a request its own hashes again, if it has those of a blend that it has waited for."""
        if state.follow_up.has_awaited_hashes:
            set_hashes(state.request, state.exact_hashes)
            state.follow_up.has_awaited_hashes = False

    def was_blended_meanwhile(self, state: RequestState) -> bool:
        """Return whether a request plans a revision, and another one with the same prompt has begun it, or more.

        Samples of a prompt and retries arrive together. One of them revises the blend, and the others continue.
        """
        added = self._own_blends.added_since(state.follow_up.searched)
        return added is None or any(one.begins(state.exact_hashes) for one in added)

    def still_revises(self, state: RequestState, revision: Revision, local: int) -> bool:
        """Return whether a revision is made that was planned when its request arrived. If not, plan something else."""
        if not self._may_revise(revision.blend):  # Requests before it have revised the blend, too.
            self._compute_instead(state, revision)
            return False
        if not self._can_revise(state, revision, local):
            self._revise_nothing(state, revision)
            return False
        return True

    def weigh(self, state: RequestState, offer: BlendOffer) -> None:
        """Count the tokens that a blend saves, or those that a revision computes again."""
        work = self._cost.in_prefill_tokens(offer)
        if state.revision is None:
            self._balance.blended(state.salt, offer.tokens - work)
        else:
            cost = work - (state.request.num_prompt_tokens - state.revision.stop)
            self._balance.followed(state.salt, cost)
            state.revision.blend.revisions.tokens += max(0.0, cost)

    def isolate(self, state: RequestState, plan: Plan) -> None:
        """Salt the hashes of a blended request, and record the blend for requests that continue it."""
        reused, request, policy = plan.approximate, state.request, state.policy
        assert policy is not None
        # Text between and after the documents of an earlier blend is not recomputed, and not exact either.
        first = min(piece.at for piece in (reused[0], *own_pieces(plan)))
        state.approximate = first if state.approximate is None else min(first, state.approximate)
        # Blocks of an earlier blend that the engine still has keep their salts; later blocks are blended again.
        kept = tuple(one for one in state.salts if one[0] * self._block_size < plan.match.local)
        salts = (*kept, (first // self._block_size, salt_of(request.prompt_token_ids, reused, policy)))
        if lost := state.salts[len(kept) :]:
            set_hashes(request, request.block_hashes[: lost[0][0]])
        add_salt(request, salts[-1])
        earlier = state.follow_up.continues if kept else None
        known = earlier.pieces if earlier is not None else ()
        pieces = [replace(one, tokens=min(one.tokens, first - one.at)) for one in known if one.at < first]
        pieces += [Placement(at=piece.at, tokens=piece.tokens, first=piece.first) for piece in reused]
        state.salts, state.origin = salts, state.origin or salts[0]
        self._own_blends.add(
            request=state.id,
            tenant=state.salt,
            prompt=request.prompt_token_ids,
            hashes=state.exact_hashes,
            salted=request.block_hashes,
            end=self._end_of_question(state) if policy.strategy in NEEDS_QUESTION else reused[-1].stop,
            pieces=pieces,
            policy=policy,
            salts=salts,
            origin=state.origin,
            by_separators=state.options is not None and state.options.documents is None,
            earlier=state.revision.blend if state.revision is not None else earlier,
        )

    def note_begun(self, state: RequestState) -> None:
        """Count the tokens that the engine computes for a request, and would have without its earlier blends."""
        if not state.request.num_preemptions:
            computed = state.request.num_computed_tokens
            self._balance.followed(state.salt, max(0, state.follow_up.shared - computed))

    def forget(self, state: RequestState) -> None:
        """Forget the blend of a request, whose blocks the engine does not have, or not as recorded."""
        self._own_blends.forget(state.id, state.salt)

    def clear(self) -> None:
        """Forget all blends."""
        self._own_blends.clear()

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _balance(self) -> Balances:
        return self._balances[len(self._states) > 1]

    def _note_follow_up(self, state: RequestState) -> None:
        """Count a request, once, that follows an earlier blend."""
        if not state.follow_up.follows:
            state.follow_up.follows = True
            self._backfill.followed()

    def _reach(self, hashes: Sequence[bytes], first: int) -> int:
        """Return how many blocks of a blend the engine has, from the first one on, apart from layers with a window.

        Returns 0 without the `first` approximate block, which is checked first: most old blends lack it.
        """
        found = self._groups.cached_in(self._groups.without_window, hashes[first : first + 1])
        return self._groups.cached_in(self._groups.without_window, hashes) if found else 0

    def _continue_unchanged(self, state: RequestState, blend: OwnBlend) -> None:
        """Serve a request from the blocks of an earlier blend, whose salts its hashes have."""
        state.follow_up.continues, state.salts, state.approximate = blend, blend.salts, blend.first

    def _asks_about_same_documents(self, state: RequestState, exact: int, documents: Sequence[Span] | None) -> bool:
        """Revise an earlier blend for a new prompt that begins with the same documents and asks something else.

        Returns true if the request revises a blend, or must wait for one.
        """
        request, policy = state.request, state.policy
        if self._groups.windows != (0,) or policy is None or not depends_on_question(policy):
            return False
        blend = self._own_blends.find_same_documents(hashes=state.exact_hashes, documents=documents, policy=policy)
        if blend is None or not self._may_revise(blend):
            return False
        if self._waits_for(blend, state):
            state.follow_up.awaited_hashes = ()
            return True
        set_hashes(request, blend.hashes.whole()[: blend.last])
        if (cached := self._groups.cached_tokens(request.block_hashes)) <= max(exact, blend.first):
            set_hashes(request, state.exact_hashes)
            return False
        self._revise(state, blend, cached, continues=False)
        self._note_follow_up(state)
        return True

    def _waits_for(self, blend: OwnBlend, state: RequestState) -> bool:
        """Return whether a request must wait for another one's blend, which the engine has yet to cache; record it.

        The engine caches the blocks of a load when it schedules the request for the first time.
        """
        first = self._states.get(blend.request)
        if first is None or first.has_begun or first is state:
            return False
        state.follow_up.searched, state.follow_up.awaited = -1, first
        return True

    def _awaits_blend(self, state: RequestState) -> bool:
        """Return whether a request still waits for the blend that its last search found. If not, forget the blend."""
        first = state.follow_up.awaited
        if first is None or first.has_begun or first.given_up or self._states.get(first.id) is not first:
            state.follow_up.awaited = None
        return state.follow_up.awaited is not None

    def _cached_for(self, state: RequestState) -> int:
        """Return how many tokens of a prompt the engine finds in its cache. It always computes the last one."""
        most = (state.request.num_tokens - 1) // self._block_size * self._block_size
        return int(min(self._groups.cached_tokens(state.request.block_hashes), most))

    def _may_revise(self, blend: OwnBlend) -> bool:
        """Return whether the revisions of a blend have cost less than a share of computing its documents exactly."""
        return not self._weighs_blends or blend.revisions.tokens < REVISED_SHARE * (blend.stop - blend.first)

    def _revise(self, state: RequestState, blend: OwnBlend, cached: int, *, continues: bool) -> None:
        """Plan a revision of a blend, whose salts the request's hashes have. The engine has `cached` tokens of it."""
        hashes = state.request.block_hashes[: cached // self._block_size]
        set_hashes(state.request, state.exact_hashes)
        state.revision = Revision(blend=blend, hashes=hashes, block_size=self._block_size, continues=continues)
        state.question = max(state.question, cached)

    def _asks_another_question(self, state: RequestState, blend: OwnBlend) -> bool:
        """Return whether a request continues a blend with another question, which the blend is revised for.

        A retry or a step of a beam search continues the same answer, without the header of another one. The next turn
        of an agent ends with the result of a tool, and continues the task for which the blend was made.
        """
        markers, ends = self._setup.markers, self._line_ends
        if markers is None or self._groups.windows != (0,) or not depends_on_question(blend.policy):
            return False
        new = state.request.prompt_token_ids[blend.end :]
        if not any(occurrences(new, markers.answers)):
            return False
        return ends is None or not ends_with_result(new, markers, ends.is_blank)

    def _last_question(self, state: RequestState, blend: OwnBlend) -> int:
        """Return where the question begins with which a request continues a blend; 0 if it is unknown.

        Earlier questions must not score tokens, because the blend has recomputed those to which they attend.
        """
        if self._setup.markers is None:
            return 0
        start = max(0, blend.end - max(map(len, self._setup.markers.answers), default=0))
        found = last_question(state.request.prompt_token_ids[start:], self._setup.markers)
        return start + found if found else 0

    def _can_revise(self, state: RequestState, revision: Revision, local: int) -> bool:
        """Return whether the engine still has the blocks to copy, and enough free blocks for the copies."""
        blocks, known = self._groups.cached_blocks(revision.blocks_after(local)), local // self._block_size
        prefix = self._groups.cached_blocks(state.request.block_hashes[:known])  # The engine takes them, too.
        unused = [block.ref_cnt for block in (*prefix, *blocks)].count(0)
        need = self._groups.kept(state.request.num_tokens) - known
        return bool(blocks) and need + unused <= int(self._pool.get_num_free_blocks())

    def _revise_nothing(self, state: RequestState, revision: Revision) -> None:
        """Serve a request without the revision that was planned for it.

        A later turn continues from the blocks of the earlier blend themselves. A prompt that only has the same
        documents is computed.
        """
        if not revision.continues and self.repeats_blend(state) and self._weighs_blends:
            self._compute_instead(state, revision)
            return
        self._claims.release(state)
        state.revision = None
        if revision.continues:
            set_hashes(state.request, revision.blend.hashes.whole())
            self._continue_unchanged(state, revision.blend)

    def _compute_instead(self, state: RequestState, revision: Revision) -> None:
        """Compute a prompt for which a revision was planned. Further ones find its blocks in the engine's own cache."""
        self._claims.release(state)
        state.revision, state.follow_up.shared = None, revision.stop
        state.follow_up.searched = self._own_blends.added
        state.refused = REPEATED
        state.add_note(REPEATED)

    def _end_of_question(self, state: RequestState) -> int:
        """Return where the question of a prompt ends: before what a chat template writes after an answer's header.

        A template may write other tokens at that position once the answer is part of the history. For example, it may
        then omit an empty block of thoughts.
        """
        prompt, markers = state.request.prompt_token_ids, self._setup.markers
        headers = markers.answers if markers else ()
        first = len(prompt) - max(map(len, headers), default=0) - BEGUN
        for at in range(len(prompt) - 1, max(state.question, first) - 1, -1):
            if match := [header for header in headers if tuple(prompt[at : at + len(header)]) == header]:
                return at + min(map(len, match))
        return len(prompt)
