"""Learns text that prompts repeat (`blend_find: repeated`), without being told what a document is.

A text that a second prompt of a tenant has after another prefix is learned as a document when this request ends. A
third prompt reuses it. Learning may take `SHARE` of the time, so that it never delays requests noticeably.
"""

from bisect import bisect_left
from collections import Counter

from lmc.connectors.vllm.scheduler.classifier import RequestClassifier
from lmc.connectors.vllm.scheduler.request_state import RequestState
from lmc.connectors.vllm.start import Setup
from lmc.documents.repeats import MIN_LEARNED, NAME, LineEnds, Repeats, to_learn
from lmc.engine import DocumentMatch, Plan
from lmc.keys import RecordKind, check_tokens

SHARE = 0.1  # share of the time in which such documents may be learned
MAX_SECONDS = 30.0  # longest time of learning that may be saved up: the share of five minutes
SLOW = 1e-3  # seconds per token, as long as no prefill was measured


class RepeatedTexts:
    """The repeated texts of one engine's requests."""

    def __init__(
        self, setup: Setup, classifier: RequestClassifier, counts: "Counter[str]", ends: LineEnds | None
    ) -> None:
        """`ends` are those of the tokenizer; None without one."""
        self._setup, self._classifier, self._counts, self._engine = setup, classifier, counts, setup.engine
        self._repeats = Repeats()
        self._ends = ends
        self._allowed, self._at = MAX_SECONDS, setup.clock()  # seconds of learning that are allowed since a time
        settings = setup.engine.settings
        learns = settings.blend_learn and settings.blend_find == "repeated"
        self.on = setup.blends and learns and setup.markers is not None and ends is not None

    def arrived(self, state: RequestState) -> None:
        """Find what the prompt of a new request repeats, and remember the prompt."""
        if not (self.on and state.learning.allowed and state.blends and self._classifier.may_go_on(state)):
            return
        request, groups = state.request, self._setup.groups
        hashes, size = request.block_hashes, groups.block_size
        # The engine's own cache has these tokens, so they were remembered when they were computed.
        cached = bisect_left(hashes, True, key=lambda block: not groups.cached([block]))
        tenant = self._tenant(state)
        state.learning.repeats = tuple(
            self._repeats.find(tenant, request.prompt_token_ids, hashes, size, cached * size)
        )

    def ended(self, state: RequestState) -> None:
        """Remember the answer to a request, and queue what its prompt repeats."""
        request = state.request
        if not self.on or request.prompt_token_ids is None:
            return
        answer = request.all_token_ids[request.num_prompt_tokens :]
        self._repeats.note_answer(self._tenant(state), answer)
        if not state.learning.repeats or state.cached or self._affordable() < MIN_LEARNED:
            return
        assert self._setup.markers is not None
        assert self._ends is not None
        prompt, taken = check_tokens(request.prompt_token_ids), [document.span for document in state.documents]
        for span in to_learn(prompt, state.learning.repeats, taken, self._setup.markers, self._ends):
            if self._may_learn(len(span)):
                new = DocumentMatch(span=span, pieces=())
                self._counts["repeated_documents"] += len(self._engine.learn_later(prompt, [new], state.salt, NAME))

    def reused(self, state: RequestState, plan: Plan) -> None:
        """Count the tokens that a plan reuses because they were repeated."""
        spans = [one.span for one in state.documents if one.known is not None and one.known.name == NAME]
        pieces = [piece for piece in plan.documents if any(span.start <= piece.at < span.stop for span in spans)]
        self._counts["repeated_tokens"] += sum(piece.tokens for piece in pieces)

    def _may_learn(self, tokens: int) -> bool:
        """Return whether there is time to learn a document, and use this time up."""
        fits = tokens <= self._affordable()
        self._allowed -= tokens * self._pace if fits else 0.0
        return fits

    def _affordable(self) -> float:
        """Return the number of tokens that there is time to learn."""
        now = self._setup.clock()
        self._allowed, self._at = min(MAX_SECONDS, self._allowed + SHARE * (now - self._at)), now
        return self._allowed / self._pace

    @property
    def _pace(self) -> float:
        """Seconds per token of prefill."""
        return self._engine.store.cost.prefill_pace() or SLOW

    def _tenant(self, state: RequestState) -> bytes:
        return self._engine.namespace(RecordKind.DOCUMENT, state.salt)
