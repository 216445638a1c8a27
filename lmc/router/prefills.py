"""The prompts that an engine still has to compute, and how fast it computes prompts.

The first token of a stream shows that its prompt is computed. An answer that is not streamed shows this only at its
end, so its prompt leaves the backlog by the estimated rate, in the order of sending, as engines compute prompts.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from itertools import takewhile
from math import ceil
from statistics import median

MEASURED_TOKENS = 256  # smaller prompts are not measured, because every request has a fixed overhead
# An answer that is not streamed is measured if it took at least this many computed tokens for each generated one.
# Generating a token takes an engine as long as computing a few hundred tokens of a prompt, at most. Other answers give
# a lower bound of the rate.
COMPUTED_PER_GENERATED = 256
MAX_RECENT_PREFILLS = 256  # maximum number of prefills that one measurement may cover
MIN_MEASUREMENTS, MAX_MEASUREMENTS = 3, 7  # numbers of measurements whose median is an engine's rate
MAX_BOUNDS = 64  # lower bounds; the median of the highest quarter is an engine's rate until it is measured
MEASUREMENT_SECONDS = 300.0  # A measurement or a bound expires after this time.


@dataclass(slots=True, eq=False)
class Prefill:
    """The prompt of one request at an engine."""

    tokens: float  # tokens that the engine is expected to compute, or has computed according to its answer
    sent: float  # time
    streamed: bool
    begun: float | None = None  # time of the first token of a stream, or of the whole answer
    seconds: float = 0.0  # time in which it was computed, together with other prompts
    tokens_in_all: float = 0.0  # all tokens that were computed in these seconds


class PrefillQueue:
    """The prompts at an engine, in the order of sending."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[Prefill, None] = {}
        self._head_since = 0.0  # when the engine began to compute the first of the waiting prompts
        self._recent = deque[Prefill](maxlen=MAX_RECENT_PREFILLS)
        self._measurements = deque[tuple[float, float]](maxlen=MAX_MEASUREMENTS)  # times and rates
        # Times and lower bounds of the rate, and upper bounds of the seconds for a generated token.
        self._bounds = deque[tuple[float, float]](maxlen=MAX_BOUNDS)
        self._token_seconds = deque[float](maxlen=MAX_BOUNDS)
        self._rate, self._rate_until = 0.0, float("-inf")  # the rate, and when it has to be found again

    def add(self, tokens: float, *, streamed: bool) -> Prefill:
        """Add the prompt of a request that was sent, and return it."""
        prefill, head = Prefill(tokens, self._clock(), streamed), self._head()
        self._waiting[prefill] = None
        self._recent.append(prefill)
        self._note_head(head)
        return prefill

    def begin(self, prefill: Prefill) -> None:
        """Record the first token of a stream, or a whole answer: the prompt, and those sent before it, are computed.

        Streams that were sent before may have been overtaken, and show themselves when they begin.
        """
        if prefill.begun is not None:
            return
        head, prefill.begun = self._head(), self._clock()
        self._time(prefill)
        if prefill in self._waiting:
            for earlier in list(takewhile(lambda other: other is not prefill, self._waiting)):
                if not earlier.streamed:
                    del self._waiting[earlier]
            del self._waiting[prefill]
        self._note_head(head)

    def end(self, prefill: Prefill) -> None:
        """Record the end of a request. A prompt whose answer has not begun is dropped."""
        head = self._head()
        self._waiting.pop(prefill, None)
        if prefill.begun is None and prefill in self._recent:
            self._recent.remove(prefill)
        self._note_head(head)

    def backlog(self, rate: float) -> float:
        """Return the tokens that are not computed yet, at an engine that computes `rate` tokens per second.

        With a rate of 0, which stands for an unknown one, each prompt counts until its answer begins.
        """
        now = self._clock()
        computed = 0.0
        while rate > 0 and (head := self._head()) and not head.streamed:
            computed = max(now - self._head_since, 0.0) * rate
            if computed < head.tokens:
                break
            del self._waiting[head]
            self._head_since, computed = self._head_since + head.tokens / rate, 0.0
        return max(sum(prefill.tokens for prefill in self._waiting) - computed, 0.0)

    def measure(self, prefill: Prefill, computed: float | None, generated: int | None) -> None:
        """Measure the rate with an answer that has ended.

        `computed` and `generated` are the tokens that the engine reports for the prompt and the answer; None if it
        does not.
        """
        tokens, now = prefill.tokens if computed is None else computed, self._clock()
        in_all, prefill.tokens = prefill.tokens_in_all - prefill.tokens + tokens, tokens
        if tokens < MEASURED_TOKENS or prefill.seconds <= 0 or prefill.begun is None:
            return
        if prefill.streamed or (generated is not None and generated * COMPUTED_PER_GENERATED <= tokens):
            self._measurements.append((now, in_all / prefill.seconds))
            self._update_rate(now)
            return
        if generated:
            self._token_seconds.append((prefill.begun - prefill.sent) / generated)
            self._time(prefill, generated * min(self._token_seconds))
            in_all = prefill.tokens_in_all
        self._bounds.append((now, in_all / prefill.seconds))
        self._update_rate(now)

    @property
    def rate(self) -> float:
        """The tokens per second that the engine computes; 0 until there are enough measurements or bounds."""
        if (now := self._clock()) >= self._rate_until:
            self._update_rate(now)
        return self._rate

    def _update_rate(self, now: float) -> None:
        for rates in (self._measurements, self._bounds):
            while rates and rates[0][0] + MEASUREMENT_SECONDS <= now:
                rates.popleft()
        if len(self._measurements) >= MIN_MEASUREMENTS:
            self._rate = median(rate for _, rate in self._measurements)
        else:
            highest = nlargest(ceil(len(self._bounds) / 4), (rate for _, rate in self._bounds))
            self._rate = median(highest) if len(self._bounds) >= MIN_MEASUREMENTS else 0.0
        oldest = min((rates[0][0] for rates in (self._measurements, self._bounds) if rates), default=float("inf"))
        self._rate_until = oldest + MEASUREMENT_SECONDS

    def _time(self, last: Prefill, generating: float = 0.0) -> None:
        """Set in how many seconds the engine has computed a prompt, and the tokens that it has computed meanwhile.

        Of all times since a prompt was sent, the one with the highest rate is taken: times that began earlier have
        idle time in them, and times that began later have other prompts. `generating` is the time for the tokens of
        the answer. It is subtracted, but from no more than half of the time, because it is an estimate.
        """
        if last not in self._recent or last.begun is None:
            return
        tokens = last.seconds = last.tokens_in_all = 0.0
        for prefill in reversed([*takewhile(lambda other: other is not last, self._recent), last]):
            if not prefill.streamed or prefill.begun is not None:
                tokens += prefill.tokens
            seconds = last.begun - prefill.sent
            seconds = max(seconds - generating, seconds / 2)
            if seconds > 0 and tokens * last.seconds >= last.tokens_in_all * seconds:
                last.seconds, last.tokens_in_all = seconds, tokens

    def _head(self) -> Prefill | None:
        return next(iter(self._waiting), None)

    def _note_head(self, before: Prefill | None) -> None:
        """Record that the engine begins with the first waiting prompt, if the first prompt has changed."""
        if self._head() is not before:
            self._head_since = self._clock()
