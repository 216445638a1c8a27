"""What loads from tiers take, and what computing instead would: running estimates, and the choice between the two.

Arithmetic and a clock. Loads measure themselves here (`loads.py`); connectors say what their prefills took, and ask before they load.
"""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

ENOUGH = 3  # observations before which nothing is estimated
FADE = 0.7  # of an observation's weight, what is left when the next one comes
LEAST_TOKENS = 32  # computing fewer says what it costs to begin, and little else
CLEARLY = 1.5  # times as long as computing: short of that both may be the other way round, and a load leaves the chunk in memory
TRIAL_CHOICES = 8  # against loading from a tier, and
TRIAL_SECONDS = 10.0  # that have passed since the first of them, before one load is tried again


class LoadPolicy(Enum):
    """When chunks are loaded from tiers below memory."""

    AUTO = "auto"  # what is faster loaded than computed
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Records on tiers that a request could load, and what that would spare it."""

    records: Mapping[str, int]  # by tier
    bytes: Mapping[str, int]  # by tier
    exact: int  # tokens that need not be computed then
    reused: int  # tokens of which a blend computes a share all the same
    ratio: float  # that share
    prompt: int  # tokens of the whole prompt

    @classmethod
    def of(cls, wanted: Iterable[tuple[str, int]], *, exact: int, reused: int, ratio: float, prompt: int) -> "Offer":
        """`wanted`: for each record its tier, and its bytes."""
        records: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for tier, size in wanted:
            records[tier] += 1
            sizes[tier] += size
        return cls(records=records, bytes=sizes, exact=exact, reused=reused, ratio=ratio, prompt=prompt)

    @property
    def spared(self) -> float:
        """Tokens' worth of computing. Roughly: a blend's first layers, and the rows that its question asks with, are left out."""
        return self.exact + self.reused * (1 - self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Whether to load, and the seconds that both ways were expected to take, if that is known."""

    load: bool
    loading: float | None = None
    computing: float | None = None

    @property
    def why(self) -> str:
        """For whoever wonders that stored tokens were computed."""
        if self.load:
            return ""
        if self.loading is None or self.computing is None:
            return "stored tokens were not loaded: load_policy is never"
        return f"stored tokens were computed, in about {self.computing:.3g} s: loading them would take about {self.loading:.3g} s"


@dataclass(slots=True)
class Rate:
    """Seconds per unit of something: the quotient of two sums that fade, so that large observations count for more than small ones.

    With each new observation the middle one of the last three is taken in: a single outlier never is.
    """

    newest: float = 0.0
    _last: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=ENOUGH))
    _seconds: float = 0.0
    _units: float = 0.0

    def add(self, seconds: float, units: float) -> None:
        """So many units took so long."""
        self.newest = seconds / units
        self._last.append((seconds, units))
        if len(self._last) == ENOUGH:
            middle = sorted(self._last, key=lambda seen: seen[0] / seen[1])[ENOUGH // 2]
            self._seconds = FADE * self._seconds + middle[0]
            self._units = FADE * self._units + middle[1]

    @property
    def value(self) -> float | None:
        """The estimate; None before enough was seen."""
        return self._seconds / self._units if self._units else None

    @property
    def hopeful(self) -> float | None:
        """The estimate or the newest observation, whichever is less: slow is only what is slow by both."""
        return None if self.value is None else min(self.value, self.newest)


@dataclass(slots=True)
class _Passed:
    """Choices against a tier, one after the other."""

    since: float
    times: int = 0


class Speeds:
    """Of all tiers of a store, and of the model that its chunks belong to. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._opening: defaultdict[str, Rate] = defaultdict(Rate)  # by tier, of a record
        self._reading: defaultdict[str, Rate] = defaultdict(Rate)  # by tier, of a byte
        self._computing: defaultdict[int, Rate] = defaultdict(Rate)  # by the power of two below a length, of a token
        self._passed: dict[str, _Passed] = {}
        self._mutex = threading.Lock()

    def loaded(self, tier: str, *, records: int, opening: float, bytes: int, reading: float) -> None:
        """A batch of records came from a tier: what that took all its threads together."""
        with self._mutex:
            if records:
                self._opening[tier].add(opening, records)
            if bytes:
                self._reading[tier].add(reading, bytes)

    def computed(self, tokens: float, seconds: float, length: float) -> None:
        """So many tokens were computed, at the pace of a whole prompt of `length`.

        A token's attention costs what stands before it, so tokens `[a, b)` cost on average as much as those of a prompt of a + b.
        """
        if tokens >= LEAST_TOKENS and seconds > 0:
            with self._mutex:
                self._computing[int(length).bit_length()].add(seconds, tokens)

    def choose(self, offer: Offer, policy: LoadPolicy) -> Choice:
        """Whether a request loads what is offered: unless computing is clearly faster, as far as enough is known of both ways.

        Loading: of each tier, a fixed time per record and one per byte, added up. That a blend computes while it loads is left out.
        Computing: the tokens spared, at the pace measured at the prompt's length or at the next shorter one (a power of two) that was;
        if only longer prompts were measured, at that of the shortest. A token costs more in a longer prompt (unless both are so short
        that to begin is most of it), so where a shorter one stands in computing looks cheaper than it is. That mends itself: what is
        computed for this reason is measured at the right length, whereas what is loaded because computing looked dear never would be.

        A tier that was passed over for a while is tried again, and found again if it is fast: then the newest observation says so.
        """
        if policy is not LoadPolicy.AUTO:
            return Choice(load=policy is LoadPolicy.ALWAYS)
        with self._mutex:
            loading, computing = self._loading(offer), self._pace(offer.prompt)
            if computing is not None:
                computing *= offer.spared
            slower = loading is not None and computing is not None and loading > CLEARLY * computing
            if not slower or self._due(offer):
                for tier in offer.records:
                    self._passed.pop(tier, None)
                return Choice(load=True, loading=loading, computing=computing)
            for tier in offer.records:
                self._passed.setdefault(tier, _Passed(self.clock())).times += 1
            return Choice(load=False, loading=loading, computing=computing)

    def _loading(self, offer: Offer) -> float | None:
        seconds = 0.0
        for tier in offer.records:
            record, byte = self._opening[tier].hopeful, self._reading[tier].hopeful
            if record is None or byte is None:
                return None
            seconds += record * offer.records[tier] + byte * offer.bytes[tier]
        return seconds

    def _pace(self, length: int) -> float | None:
        paces = {power: rate.value for power, rate in self._computing.items() if rate.value is not None}
        if not paces:
            return None
        return paces[max((power for power in paces if power <= length.bit_length()), default=min(paces))]

    def _due(self, offer: Offer) -> bool:
        passed = [self._passed[tier] for tier in offer.records if tier in self._passed]
        now = self.clock()
        return any(p.times >= TRIAL_CHOICES and now - p.since >= TRIAL_SECONDS for p in passed)


@dataclass(slots=True)
class Spent:
    """What one thread of a batch did in one tier."""

    records: int = 0
    opening: float = 0.0
    bytes: int = 0
    reading: float = 0.0

    def opened(self, seconds: float) -> None:
        """One record, whether it was there or not."""
        self.records += 1
        self.opening += seconds

    def read(self, seconds: float, bytes: int) -> None:
        """So many bytes; none if the tier failed."""
        self.bytes += bytes
        self.reading += seconds

    def add(self, other: "Spent") -> None:
        """Both."""
        self.records += other.records
        self.opening += other.opening
        self.bytes += other.bytes
        self.reading += other.reading


class Batch:
    """Loads that were started together: how long all threads take together, which is what a request waits.

    From the first thread's begin to the last one's end, without the time in the queue behind other batches. It is shared out to
    tiers, and to opening and reading, as the threads' own times are. A batch that was cancelled counts with what it had read.
    """

    def __init__(self, speeds: Speeds, threads: int) -> None:
        self._speeds, self._left = speeds, threads
        self._begun: float | None = None
        self._spent: defaultdict[str, Spent] = defaultdict(Spent)
        self._mutex = threading.Lock()

    def begin(self) -> defaultdict[str, Spent]:
        """A thread has begun: its own account, by tier."""
        with self._mutex:
            if self._begun is None:
                self._begun = self._speeds.clock()
        return defaultdict(Spent)

    def end(self, spent: Mapping[str, Spent]) -> None:
        """A thread has ended; the last one's word makes the observation."""
        with self._mutex:
            for tier, own in spent.items():
                self._spent[tier].add(own)
            self._left -= 1
            if self._left:
                return
        assert self._begun is not None
        wall = self._speeds.clock() - self._begun
        busy = sum(s.opening + s.reading for s in self._spent.values())
        if not busy:
            return
        share = wall / busy
        for tier, s in self._spent.items():
            self._speeds.loaded(
                tier, records=s.records, opening=s.opening * share, bytes=s.bytes, reading=s.reading * share
            )
