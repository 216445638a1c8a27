"""The cost model estimates whether loading chunks from tiers or computing them is faster.

All estimates are running averages of what was measured. The loader reports its loads here; connectors report how long
their prefills took, and ask before they load.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum

ENOUGH = 3  # Nothing is estimated from fewer observations than this.
FADE = 0.7  # Each new observation multiplies the weight of the older ones by this.
LEAST_TOKENS = 32  # The time that fewer tokens take is mostly a fixed cost, and says little about a token.
# A load must be expected to take this many times as long as computing before it is left out. The estimates are rough,
# and a load also leaves the chunk in memory for the next request.
CLEARLY = 1.5
TRIAL_CHOICES = 8  # A tier is tried again after so many choices against it,
TRIAL_SECONDS = 10.0  # and not before so many seconds since the first of them.
# A blend that is expected to be slower than prefill is tried again after so many choices against it. Each trial that
# is slower again doubles the number.
BLEND_TRIAL_CHOICES = 64
MAX_BLEND_TRIAL_CHOICES = 4096
# Until blends of a size were measured, they have to compute at least this much less than prefill.
LESS_WORK = 0.9
# One of so many prompts is computed although a blend looks better, as long as prefill was not measured at its length.
SURVEY_EVERY = 8
MAX_SURVEYS = 8  # prompts of each length

# What threads have done, by tier: the numbers of "records" and "bytes", and the seconds of "opening" and "reading".
Spent = defaultdict[tuple[str, str], float]


class LoadPolicy(Enum):
    """When chunks are loaded from tiers below memory."""

    AUTO = "auto"  # unless computing is expected to be clearly faster
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Records on tiers that a request could load, and the computing that this would save."""

    records: Sequence[tuple[str, int]]  # the tier and the bytes of each
    exact: int  # tokens that would not have to be computed
    reused: int  # tokens of documents, of which a blend still computes a share
    ratio: float  # that share
    prompt: int  # tokens of the whole prompt

    @property
    def saved(self) -> float:
        """How many tokens would not be computed.

        This is an approximation: a blend's first layers, and the rows of the question in its first pass, are left out.
        """
        return self.exact + self.reused * (1 - self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendOffer:
    """A blend that could be made, and the prefill that it would replace."""

    rows: float  # tokens that the blend computes, in both of its passes
    tokens: int  # tokens that prefill would compute instead
    length: int  # of a prompt whose tokens cost as much on average, see `CostModel.computed`
    records: Sequence[tuple[str, int]] = ()  # on tiers, which the blend would load: the tier and the bytes of each

    @property
    def size(self) -> tuple[int, int]:
        """The class of blends and prefills that take about as long per token."""
        return self.length.bit_length(), int(self.rows).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Whether to load, and the seconds that loading and computing are expected to take, if they are known."""

    load: bool
    loading: float | None = None
    computing: float | None = None

    @property
    def why(self) -> str:
        """The reason why stored tokens are not loaded; empty if they are."""
        if self.load:
            return ""
        if self.loading is None or self.computing is None:
            return "stored tokens were not loaded: load_policy is never"
        computed = f"stored tokens were computed, in about {self.computing:.3g} s"
        return f"{computed}: loading them would take about {self.loading:.3g} s"


@dataclass(slots=True)
class Rate:
    """Seconds per unit: the quotient of two fading sums, so that large observations weigh more than small ones.

    Of the last three observations only the middle one is added, so that a single outlier has no influence.
    """

    newest: float = 0.0
    _last: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=ENOUGH))
    _seconds: float = 0.0
    _units: float = 0.0

    def add(self, seconds: float, units: float) -> None:
        """Add an observation: so many units took so many seconds."""
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


class CostModel:
    """Estimates for the tiers of one store and the model whose chunks it holds. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._opening: defaultdict[str, Rate] = defaultdict(Rate)  # by tier, for each record
        self._reading: defaultdict[str, Rate] = defaultdict(Rate)  # by tier, for each byte
        self._computing: defaultdict[int, Rate] = defaultdict(Rate)  # by bit length of the prompt's length, per token
        self._passed_over: dict[str, tuple[float, int]] = {}  # by tier: since when, and how many times in a row
        self._blending: defaultdict[tuple[int, int], Rate] = defaultdict(Rate)  # by `BlendOffer.size`, per row
        self._not_blended: dict[tuple[int, int], tuple[int, int]] = {}  # choices against a size, and until a trial
        self._trials: set[tuple[int, int]] = set()  # sizes of which a blend is made to measure it again
        self._surveys: dict[int, int] = {}  # by bit length of the prompt's length: blends before prefill was measured
        self._mutex = threading.Lock()

    def snapshot(self) -> "CostModel":
        """Return a copy. Its choices count in itself only, for example those that explain a prompt to an operator."""
        copied = CostModel(self.clock)
        with self._mutex:
            for name, value in vars(self).items():
                if name not in ("clock", "_mutex"):
                    setattr(copied, name, deepcopy(value))
        return copied

    def speeds(self) -> dict[str, tuple[float, float]]:
        """Return the seconds for each record and for each byte of the tiers for which both are known."""
        with self._mutex:
            found = {tier: (self._opening[tier].optimistic, rate.optimistic) for tier, rate in self._reading.items()}
        return {tier: (record, byte) for tier, (record, byte) in found.items() if record is not None and byte}

    def take_speeds(self, speeds: Mapping[str, tuple[float, float]]) -> None:
        """Take over what another cost model has measured of tiers."""
        with self._mutex:
            for tier, (record, byte) in speeds.items():
                self._opening[tier] = Rate(record, _seconds=record, _units=1)
                self._reading[tier] = Rate(byte, _seconds=byte, _units=1)

    def loaded(self, spent: Spent) -> None:
        """Add what a batch of loads took; the seconds are those of all its threads together."""
        with self._mutex:
            for tier in {tier for tier, _ in spent}:
                if records := spent[tier, "records"]:
                    self._opening[tier].add(spent[tier, "opening"], records)
                if size := spent[tier, "bytes"]:
                    self._reading[tier].add(spent[tier, "reading"], size)

    def computed(self, tokens: float, seconds: float, length: float) -> None:
        """Add a prefill of `tokens` tokens that cost as much, on average, as those of a whole prompt of `length`.

        The attention of a token costs as much as there are tokens before it. So tokens `[a, b)` cost on average what
        the tokens of a prompt of length a + b cost.
        """
        if tokens >= LEAST_TOKENS and seconds > 0:
            with self._mutex:
                self._computing[int(length).bit_length()].add(seconds, tokens)

    def blended(self, offer: BlendOffer, seconds: float) -> None:
        """Add a blend, from the begin of its load until the first token of the answer."""
        if offer.rows < 1 or seconds <= 0:
            return
        with self._mutex:
            prefill = self._computing[offer.length.bit_length()].value
            if offer.size in self._trials and prefill is not None and seconds <= prefill * offer.tokens:
                # A trial that was fast counts by itself: what made the earlier ones slow is over.
                pace = seconds / offer.rows
                self._blending[offer.size] = Rate(pace, _seconds=seconds, _units=offer.rows)
                self._not_blended.pop(offer.size, None)
            else:
                self._blending[offer.size].add(seconds, offer.rows)
            self._trials.discard(offer.size)

    def against_blend(self, offer: BlendOffer, policy: LoadPolicy) -> str:
        """Return why prefill is expected to be faster than a blend; empty if the blend should be made.

        Both are measured from the begin of the work until the first token of the answer, so that everything counts:
        both passes, placement, attention, launches, and the step of the engine that follows. Loading overlaps with
        the blend, so that the longer of both counts. Where blends of about this size were not measured yet, one is made
        if it computes clearly less. Where prefill at this length was not measured yet, one of `SURVEY_EVERY` prompts is
        computed: that takes no longer than without lmc.
        """
        if policy is LoadPolicy.ALWAYS:
            return ""
        if offer.rows > LESS_WORK * offer.tokens:
            return f"a blend would compute {offer.rows:.0f} tokens, and prefill computes {offer.tokens}"
        with self._mutex:
            prefill = self._computing[offer.length.bit_length()].value
            if prefill is None:
                return self._survey(offer.length.bit_length())
            rate = self._blending[offer.size].value
            if rate is None:
                return ""
            blending = max(rate * offer.rows, self._loading(offer.records) or 0.0)
            if blending <= prefill * offer.tokens or self._is_trial(offer.size):
                return ""
        return f"prefill takes about {prefill * offer.tokens:.3g} s, and a blend about {blending:.3g} s"

    def _is_trial(self, size: tuple[int, int]) -> bool:
        """Count a choice against blends of this size; return whether one is made all the same, to measure it again."""
        count, limit = self._not_blended.get(size, (0, BLEND_TRIAL_CHOICES))
        due = count >= limit
        if due:
            self._trials.add(size)
        self._not_blended[size] = (0, min(2 * limit, MAX_BLEND_TRIAL_CHOICES)) if due else (count + 1, limit)
        return due

    def _survey(self, length: int) -> str:
        """Return why prefill is measured now; empty if a blend is made."""
        self._surveys[length] = count = self._surveys.get(length, 0) + 1
        if count % SURVEY_EVERY or count > SURVEY_EVERY * MAX_SURVEYS:
            return ""
        return "prefill was measured, because its speed at this length was not known yet"

    def choose(self, offer: Offer, policy: LoadPolicy) -> Choice:
        """Decide whether a request loads what is offered.

        It does unless computing is clearly faster, and as long as too little is known of either.

        Loading takes a fixed time for each record and a time for each byte, added up over all tiers; a blend also
        computes while it loads, which is left out. Computing takes the tokens that loading would save, at the pace
        that was measured for prompts of this length or else of the next shorter length (by powers of two), or of the
        shortest one. A token costs more in a longer prompt, so the pace of a shorter prompt makes computing look
        cheaper than it is. That corrects itself, because the tokens are then computed and measured at the right
        length; an error in the other direction would never be noticed.

        A tier that was passed over for a while is tried again, in case it has become faster.
        """
        if policy is not LoadPolicy.AUTO:
            return Choice(load=policy is LoadPolicy.ALWAYS)
        with self._mutex:
            tiers = {tier for tier, _ in offer.records}
            loading, computing = self._loading(offer.records), self._computing_of(offer)
            slower = loading is not None and computing is not None and loading > CLEARLY * computing
            load = not slower or any(map(self._due, tiers))
            for tier in tiers:
                since, times = self._passed_over.pop(tier, (self.clock(), 0))
                if not load:
                    self._passed_over[tier] = since, times + 1
            return Choice(load=load, loading=loading, computing=computing)

    def _loading(self, records: Sequence[tuple[str, int]]) -> float | None:
        seconds = 0.0
        for tier, size in records:
            record, byte = self._opening[tier].optimistic, self._reading[tier].optimistic
            if record is None or byte is None:
                return None
            seconds += record + byte * size
        return seconds

    def _computing_of(self, offer: Offer) -> float | None:
        length = offer.prompt.bit_length()
        paces = {bits: rate.value for bits, rate in self._computing.items() if rate.value is not None}
        if not paces:
            return None
        return offer.saved * paces[max((bits for bits in paces if bits <= length), default=min(paces))]

    def _due(self, tier: str) -> bool:
        since, times = self._passed_over.get(tier, (0.0, 0))
        return times >= TRIAL_CHOICES and self.clock() - since >= TRIAL_SECONDS


class LoadTiming:
    """Measures a batch of loads that were started together.

    What counts is the time from when the first thread begins until the last thread ends, because that is how long a
    request waits; the time in the queue behind other batches does not count. This time is divided among the tiers, and
    between opening and reading, in proportion to what the threads have measured. A batch that was cancelled counts with
    what it has read.
    """

    def __init__(self, cost: CostModel, threads: int) -> None:
        self._cost, self._left = cost, threads
        self._begun = float("inf")
        self._spent: Spent = defaultdict(float)
        self._mutex = threading.Lock()

    def begin(self) -> Spent:
        """Note that a thread begins, and return what it counts in."""
        with self._mutex:
            self._begun = min(self._begun, self._cost.clock())
        return defaultdict(float)

    def end(self, spent: Spent) -> None:
        """Note that a thread has ended; the last one reports the batch to the cost model."""
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
