"""The cost model estimates whether loading chunks from tiers or computing them is faster.

All estimates are running averages of measurements. The loader reports its loads here. Connectors report the duration of
their prefills, and ask the model before they load.
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

ENOUGH = 3  # An estimate needs at least this many observations.
FADE = 0.7  # Each new observation multiplies the weight of the older ones by this.
LEAST_TOKENS = 32  # Shorter prefills are not measured: they are mostly fixed cost, and say little about a token.
# A load is skipped if it is expected to take longer than computing. With fewer observations of a tier than `ENOUGH`,
# the estimate is a guess, and it must be this many times as long.
GUESSED = 1.5
# A tier is tried again after this number of choices against it in a row. Each trial that is slow doubles the number, up
# to the maximum.
TRIAL_CHOICES = 8
MAX_TRIAL_CHOICES = 256
TRIAL_SECONDS = 10.0  # A tier is tried again at the earliest this long after the first choice against it.
# A blend that is expected to be slower than prefill is tried again after this number of choices against it. Each trial
# that was slow doubles the number, up to the maximum; one that is faster than prefill resets it.
BLEND_TRIAL_CHOICES = 64
MAX_BLEND_TRIAL_CHOICES = 4096
# A blend must compute at most this share of the tokens that prefill would compute.
LESS_WORK = 0.9
# Above this share, blends of a size that was not measured yet are made only once in `SURVEY_EVERY` times. Their rows
# cost more than those of prefill, because they go through the layers twice: at 0.8, small models are slower
# (`bench/no_harm.py`, long_2).
CLEARLY_LESS_WORK = 0.75
# A blend must be expected to take at most this share of the time of prefill: it is approximate, and estimates err.
LESS_TIME = 0.9
# A row of a blend takes about as long as this many tokens of prefill, as long as that is not measured: rows go through
# the layers in small batches, and a blend also places and corrects stored tokens. Measured: 1.6 to 2.2 on CPUs.
ROW_TOKENS = 2
# As long as prefill is not measured at a prompt's length, one prompt in this number is computed instead of blended.
SURVEY_EVERY = 8
MAX_SURVEYS = 8  # the maximum number of such prompts for each length or size

# The work of loading threads, by tier: the numbers of "records" and "bytes", the seconds of "opening" and "reading".
Spent = defaultdict[tuple[str, str], float]


class LoadPolicy(Enum):
    """When chunks are loaded from tiers below memory, and blends are made."""

    AUTO = "auto"  # unless computing is expected to be clearly faster
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Records on tiers that a request could load, and the computing that this would save."""

    records: Sequence[tuple[str, int]]  # the tier and the bytes of each record
    exact: int  # tokens that need no computing after the load
    reused: int  # tokens of documents; a blend still computes the share `ratio` of them
    ratio: float  # the share of the reused tokens that a blend recomputes
    prompt: int  # tokens of the whole prompt

    @property
    def saved(self) -> float:
        """The number of tokens that a load saves from being computed.

        This is an approximation: it ignores a blend's first layers, and the question's rows in its first pass.
        """
        return self.exact + self.reused * (1 - self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendOffer:
    """A possible blend, and the prefill that it would replace."""

    rows: float  # tokens that the blend computes, in both of its passes
    tokens: int  # tokens that prefill would compute instead
    length: int  # the length of a prompt with the same average cost of a token, see `CostModel.computed`
    revises: bool = False  # The engine has the prompt's earlier turns from a blend.
    records: Sequence[tuple[str, int]] = ()  # the tier and the bytes of each record that the blend would load

    @property
    def size(self) -> tuple[int, int]:
        """The size class of this blend: blends of one class take about the same time per token."""
        return self.length.bit_length(), int(self.rows).bit_length()

    @property
    def continues(self) -> bool:
        """Whether prefill would compute less than half of the prompt, after a prefix that the engine has."""
        return 3 * self.tokens < self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The decision whether to load, with the expected seconds of loading and of computing, if known."""

    load: bool
    loading: float | None = None
    computing: float | None = None

    @property
    def why(self) -> str:
        """The reason why stored tokens are not loaded. Empty if they are loaded."""
        if self.load:
            return ""
        computed = f"stored tokens were computed, in about {self.computing:.3g} s"
        return f"{computed}: loading them would take about {self.loading:.3g} s"


@dataclass(slots=True)
class Rate:
    """Seconds per unit: the quotient of two fading sums, so that large observations weigh more than small ones.

    Each new observation adds the median of the last three to the sums, so that a single outlier has no influence.
    """

    newest: float = 0.0
    _last: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=ENOUGH))
    _seconds: float = 0.0
    _units: float = 0.0

    @classmethod
    def known(cls, seconds: float, units: float = 1.0) -> "Rate":
        """Return an estimate that was made elsewhere: `units` take `seconds`."""
        return cls(seconds / units, _seconds=seconds, _units=units)

    @property
    def sums(self) -> tuple[float, float]:
        """The seconds and the units of the estimate, as for `known`."""
        return self._seconds, self._units

    def add(self, seconds: float, units: float) -> None:
        """Add an observation: `units` took `seconds`."""
        self.newest = seconds / units
        self._last.append((seconds, units))
        if len(self._last) == ENOUGH:
            middle = sorted(self._last, key=lambda seen: seen[0] / seen[1])[ENOUGH // 2]
            self._seconds = FADE * self._seconds + middle[0]
            self._units = FADE * self._units + middle[1]

    @property
    def value(self) -> float | None:
        """The estimate, or None before there are enough observations."""
        return self._seconds / self._units if self._units else None

    @property
    def optimistic(self) -> float | None:
        """The lower of the estimate and the newest observation, or None before there are enough observations."""
        return None if self.value is None else min(self.value, self.newest)

    @property
    def guess(self) -> float | None:
        """The optimistic estimate; before there are enough observations, the lowest of them, or None without any."""
        return self.optimistic or min((seconds / units for seconds, units in self._last), default=None)


@dataclass(slots=True)
class _PassedOver:
    """Choices against a tier, or against blends of a size, in a row."""

    since: float  # the time of the first one
    limit: int  # number of choices before a trial
    times: int = 0

    def is_due(self, now: float, seconds: float = 0.0) -> bool:
        """Return whether a trial is due: after enough choices, and `seconds` after the first one."""
        return self.times >= self.limit and now - self.since >= seconds

    def begin_anew(self, now: float) -> None:
        """Count again until the next trial."""
        self.since, self.times = now, 0

    def was_slow(self, most: int) -> None:
        """Double the number of choices before the next trial, up to `most`."""
        self.limit = min(2 * self.limit, most)


class CostModel:
    """Estimates for the tiers of one store and the model whose chunks it holds. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._opening: defaultdict[str, Rate] = defaultdict(Rate)  # by tier, seconds per record
        self._reading: defaultdict[str, Rate] = defaultdict(Rate)  # by tier, seconds per byte
        self._computing: defaultdict[int, Rate] = defaultdict(Rate)  # by bit length of the prompt's length, per token
        self._lengths: defaultdict[int, Rate] = defaultdict(Rate)  # the lengths that `_computing` was measured at
        # Per token of a prefill after a cached prefix, by the bit lengths of the length and of the number of tokens
        self._continuing: defaultdict[tuple[int, int], Rate] = defaultdict(Rate)
        self._passed_over: dict[str, _PassedOver] = {}  # by tier
        self._blending: defaultdict[tuple[int, int], Rate] = defaultdict(Rate)  # by `BlendOffer.size`, per row
        self._not_blended: dict[tuple[int, int], _PassedOver] = {}  # by size
        self._trials: set[tuple[int, int]] = set()  # sizes whose next blend is a trial
        self._surveys: dict[tuple[object, ...], int] = {}  # number of choices before a prefill or a blend was measured
        self._mutex = threading.Lock()

    @property
    def _kept(self) -> dict[str, defaultdict[Any, Rate]]:
        """The estimates that outlive a process, by kind."""
        return {
            "opening": self._opening,
            "reading": self._reading,
            "computing": self._computing,
            "lengths": self._lengths,
            "continuing": self._continuing,
            "blending": self._blending,
        }

    def snapshot(self) -> "CostModel":
        """Return a copy. Choices of the copy, for example to explain a prompt to an operator, do not count here."""
        copied = CostModel(self.clock)
        with self._mutex:
            for name, value in vars(self).items():
                if name not in ("clock", "_mutex"):
                    setattr(copied, name, deepcopy(value))
        return copied

    def speeds(self) -> dict[str, tuple[float, float]]:
        """Return the seconds per record and per byte, for each tier where both are known."""
        with self._mutex:
            found = {tier: (self._opening[tier].optimistic, rate.optimistic) for tier, rate in self._reading.items()}
        return {tier: (record, byte) for tier, (record, byte) in found.items() if record is not None and byte}

    def take_speeds(self, speeds: Mapping[str, tuple[float, float]]) -> None:
        """Replace the estimates of tiers by those of another cost model."""
        with self._mutex:
            for tier, (record, byte) in speeds.items():
                self._opening[tier], self._reading[tier] = Rate.known(record), Rate.known(byte)

    def estimates(self) -> dict[str, list[list[Any]]]:
        """Return all estimates, for `restore` and as JSON: by kind, lists of a key, seconds and units."""
        with self._mutex:
            return {
                kind: [[list(key) if isinstance(key, tuple) else key, *rate.sums] for key, rate in rates.items()]
                for kind, kept in self._kept.items()
                if (rates := {key: rate for key, rate in kept.items() if rate.value})
            }

    def restore(self, estimates: Mapping[str, Any]) -> None:
        """Replace estimates by those that `estimates` has returned, perhaps in an earlier process.

        What is not an estimate is ignored.
        """
        with self._mutex:
            for kind, rates in self._kept.items():
                found = estimates.get(kind)
                for entry in found if isinstance(found, list) else ():
                    with suppress(TypeError, ValueError, OverflowError):
                        key, seconds, units = entry
                        key = tuple(key) if isinstance(key, list) else key
                        if _is_key(kind, key) and 0 < seconds < math.inf and 0 < units < math.inf:
                            rates[key] = Rate.known(seconds, units)

    def loaded(self, spent: Spent) -> None:
        """Add the measurement of a batch of loads: the work and seconds of all its threads together."""
        with self._mutex:
            for tier in {tier for tier, _ in spent}:
                if records := spent[tier, "records"]:
                    self._opening[tier].add(spent[tier, "opening"], records)
                if size := spent[tier, "bytes"]:
                    self._reading[tier].add(spent[tier, "reading"], size)

    def computed(self, tokens: float, seconds: float, length: float) -> None:
        """Add a prefill of `tokens` tokens whose average cost is that of a token in a whole prompt of `length`.

        The attention cost of a token is proportional to the number of tokens before it. So tokens `[a, b)` cost on
        average as much as the tokens of a prompt of length a + b.
        """
        if tokens >= LEAST_TOKENS and seconds > 0:
            with self._mutex:
                self._computing[int(length).bit_length()].add(seconds, tokens)
                self._lengths[int(length).bit_length()].add(length, 1)

    def prefilled(self, tokens: int, seconds: float, before: int) -> None:
        """Add a prefill of `tokens` tokens after `before` tokens that the engine had: `computed` or `continued`."""
        (self.computed if before <= tokens else self.continued)(tokens, seconds, 2 * before + tokens)

    def continued(self, tokens: int, seconds: float, length: int) -> None:
        """Add a prefill of less than half of a prompt, after a cached prefix. See `computed` for the arguments.

        Such prefills are compared only with blends that would replace about as many tokens at about this length: the
        fixed cost of a step, and attention to the whole prefix, are a large part of them.
        """
        if tokens >= LEAST_TOKENS and seconds > 0:
            with self._mutex:
                self._continuing[length.bit_length(), tokens.bit_length()].add(seconds, tokens)

    def prefill_pace(self) -> float | None:
        """Return the seconds that prefill takes per token of a short prompt; None if it was not measured yet."""
        with self._mutex:
            return min((rate.value for rate in self._computing.values() if rate.value is not None), default=None)

    def blended(self, offer: BlendOffer, seconds: float) -> None:
        """Add the duration of a blend, from the start of its load to the first token of the response."""
        if offer.rows < 1 or seconds <= 0:
            return
        with self._mutex:
            prefill, is_trial = self._prefill_of(offer), offer.size in self._trials
            if is_trial and prefill is not None and seconds <= prefill * offer.tokens:
                # A fast trial replaces the old estimate: whatever slowed the earlier blends is over.
                self._blending[offer.size] = Rate.known(seconds, offer.rows)
                self._not_blended.pop(offer.size, None)
            else:
                self._blending[offer.size].add(seconds, offer.rows)
                if is_trial and (passed_over := self._not_blended.get(offer.size)):
                    passed_over.was_slow(MAX_BLEND_TRIAL_CHOICES)
            self._trials.discard(offer.size)

    def in_prefill_tokens(self, offer: BlendOffer) -> float:
        """Return the number of tokens whose prefill takes about as long as a blend."""
        with self._mutex:
            prefill, blending = self._prefill_of(offer), self._blending[offer.size].value
        return offer.rows * (blending / prefill if prefill and blending else ROW_TOKENS)

    def against_blend(self, offer: BlendOffer, policy: LoadPolicy) -> str:
        """Return why prefill is expected to be faster than a blend. Empty if the blend should be made.

        Both are measured from the start of the work to the first token of the response, so that everything counts: both
        passes, placement, attention, launches, and the engine step that follows. Loading overlaps with the blend, so
        the longer of both counts. A blend has to save a tenth of the time. If no blend of about this size has been
        measured yet, a blend is made if it computes clearly less, and else now and then.

        If prefill at about this length has not been measured yet, its pace is estimated as in `choose`, and if a blend
        is made, one in `SURVEY_EVERY` prompts is computed instead: that takes no longer than without lmc. A later turn
        is computed for neither reason: without lmc, the engine would have the turns before.
        """
        if policy is LoadPolicy.ALWAYS:
            return ""
        if offer.rows > LESS_WORK * offer.tokens:
            return f"a blend would compute {offer.rows:.0f} tokens, and prefill computes {offer.tokens}"
        with self._mutex:
            rate = self._blending[offer.size].value
            measured = self._continuing_at(offer) or self._computing[offer.length.bit_length()].value
            pace = self._prefill_of(offer) if measured is not None or not offer.revises else None
            if rate is None and offer.rows > CLEARLY_LESS_WORK * offer.tokens:
                is_made = self._is_survey(("blend", *offer.size))
                why = f"a blend would compute {offer.rows:.0f} of {offer.tokens} tokens, which is probably not faster"
                return "" if is_made else why
            if rate is not None and pace is not None:
                blending = max(rate * offer.rows, self._loading(offer.records) or 0.0)
                if blending > LESS_TIME * pace * offer.tokens:
                    why = f"prefill takes about {pace * offer.tokens:.3g} s, and a blend about {blending:.3g} s"
                    return "" if self._is_trial(offer.size) else why
            if measured is None and not offer.revises and self._is_survey(("prefill", offer.length.bit_length())):
                return "prefill was measured, because its speed at this length was not known yet"
            return ""

    def _is_trial(self, size: tuple[int, int]) -> bool:
        """Count a choice against blends of this size. Returns whether a blend is made anyway, as a trial."""
        now = self.clock()
        passed_over = self._not_blended.setdefault(size, _PassedOver(now, BLEND_TRIAL_CHOICES))
        due = passed_over.is_due(now)
        if due:  # On a busy engine, it may never be measured.
            self._trials.add(size)
            passed_over.begin_anew(now)
        else:
            passed_over.times += 1
        return due

    def _is_survey(self, what: tuple[object, ...]) -> bool:
        """Count a choice about something that was not measured yet. Returns whether it is measured now."""
        self._surveys[what] = count = self._surveys.get(what, 0) + 1
        return count % SURVEY_EVERY == 0 and count <= SURVEY_EVERY * MAX_SURVEYS

    def choose(self, offer: Offer, policy: LoadPolicy) -> Choice:
        """Decide whether a request loads the offered records.

        A request loads unless computing is expected to be faster. It also loads while either estimate is missing.

        The estimate of loading is a fixed time per record plus a time per byte, summed over all tiers. A blend also
        computes while it loads; the estimate ignores that. The estimate of computing is the number of tokens that
        loading would save, times the pace of prefill at this length, interpolated between measured lengths. A token
        costs more in a longer prompt, so beyond the longest one computing looks too cheap. That error corrects itself:
        the tokens are computed, and measured at the right length. An error in the other direction would never be
        noticed.

        A tier that was passed over for a while is tried again, in case it has become faster, and less and less often.
        """
        if policy is LoadPolicy.ALWAYS:
            return Choice(load=True)
        with self._mutex:
            tiers = {tier for tier, _ in offer.records}
            loading, computing = self._loading(offer.records), self._computing_of(offer)
            margin = 1.0 if all(self._reading[tier].value for tier in tiers) else GUESSED
            load = loading is None or computing is None or loading <= margin * computing
            if load:
                for tier in tiers:
                    self._passed_over.pop(tier, None)
            else:
                load = self._is_tried_again(tiers)
            return Choice(load=load, loading=loading, computing=computing)

    def computing(self, offer: Offer) -> float | None:
        """Return the expected seconds of computing what a load saves; None while prefill was not measured."""
        with self._mutex:
            return self._computing_of(offer)

    def tried(self, tiers: Set[str]) -> None:
        """Count anew until the next trial of these tiers, which a load has just measured without a request."""
        with self._mutex:
            for tier in tiers & self._passed_over.keys():
                self._passed_over[tier].times = 0

    def _is_tried_again(self, tiers: Set[str]) -> bool:
        """Count a choice against tiers. Returns whether they are tried anyway."""
        now = self.clock()
        counts = [self._passed_over.setdefault(tier, _PassedOver(now, TRIAL_CHOICES)) for tier in tiers]
        due = any(passed_over.is_due(now, TRIAL_SECONDS) for passed_over in counts)
        for passed_over in counts:
            if due:
                passed_over.begin_anew(now)
                passed_over.was_slow(MAX_TRIAL_CHOICES)
            else:
                passed_over.times += 1
        return due

    def _loading(self, records: Sequence[tuple[str, int]]) -> float | None:
        seconds = 0.0
        for tier, size in records:
            record, byte = self._opening[tier].guess, self._reading[tier].guess
            if record is None or byte is None:
                return None
            seconds += record + byte * size
        return seconds

    def _computing_of(self, offer: Offer) -> float | None:
        pace = self._pace(offer.prompt)
        return None if pace is None else offer.saved * pace

    def _prefill_of(self, offer: BlendOffer) -> float | None:
        """Return the seconds per token of the prefill that a blend would replace."""
        return self._continuing_at(offer) or self._pace(offer.length)

    def _continuing_at(self, offer: BlendOffer) -> float | None:
        """Return the measured seconds per token after a cached prefix, if prefill would continue one."""
        size = offer.length.bit_length(), offer.tokens.bit_length()
        return self._continuing[size].value if offer.continues else None

    def _pace(self, length: int) -> float | None:
        """Return the seconds per token of prefill at this length, interpolated between the measured lengths.

        Beyond the longest of these, it is the pace there, and likewise below the shortest one.
        """
        measured = [bits for bits, rate in sorted(self._computing.items()) if rate.value is not None]
        if not measured:
            return None
        lengths = [self._lengths[bits].value or 0.0 for bits in measured]
        return float(np.interp(length, lengths, [self._computing[bits].value or 0.0 for bits in measured]))


def _is_key(kind: str, key: object) -> bool:
    """Return whether estimates of a kind may have this key: a tier, a length in bits, or two of them."""
    if kind in ("opening", "reading"):
        return isinstance(key, str)
    if kind in ("blending", "continuing"):
        return isinstance(key, tuple) and [type(bits) for bits in key] == [int, int]
    return type(key) is int


class LoadTiming:
    """Measures a batch of loads that were started together.

    The measured time is from the start of the first thread to the end of the last thread, because a request waits that
    long. Time in the queue after other batches does not count. This time is divided among the tiers, and between
    opening and reading, in proportion to the threads' own measurements. A cancelled batch counts with the bytes that it
    has read.
    """

    def __init__(self, cost: CostModel, threads: int) -> None:
        self._cost, self._left = cost, threads
        self._begun = float("inf")
        self._spent: Spent = defaultdict(float)
        self._mutex = threading.Lock()

    def begin(self) -> Spent:
        """Start the measurement of a thread, and return its empty counts."""
        with self._mutex:
            self._begun = min(self._begun, self._cost.clock())
        return defaultdict(float)

    def end(self, spent: Spent) -> None:
        """Add the counts of a thread that has ended. The last thread reports the batch to the cost model."""
        with self._mutex:
            for key, amount in spent.items():
                self._spent[key] += amount
            self._left -= 1
            if self._left:
                return
        wall = self._cost.clock() - self._begun
        seconds = [(tier, what) for tier, what in self._spent if what in ("opening", "reading")]
        busy = sum(self._spent[key] for key in seconds)
        if busy:
            self._spent.update({key: self._spent[key] * wall / busy for key in seconds})
            self._cost.loaded(self._spent)
