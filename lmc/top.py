"""`lmc top`: what a store does right now, from any Prometheus endpoint that has lmc's metrics: a vLLM server's, or `serve_metrics`.

`fetch` a sample, take the difference of two, show it as a table; `top` does it again and again.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lmc.errors import InputError
from lmc.metrics import NAMES, Labels
from lmc.shapes import GIB, MIB

URL = "http://127.0.0.1:8000/metrics"
TIMEOUT = 5.0  # seconds
ONE = {"tier_usable", "layers"}  # gauges of which several engines make the lowest, not the sum
FASTEST = ("device", "host", "disk")  # the order of columns; others behind them

Series = tuple[str, tuple[tuple[str, str], ...]]  # a metric, and all its labels
Numbers = dict[tuple[str, Labels], float]  # by metric and lmc's own labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All of lmc's numbers at one time."""

    at: float
    series: dict[Series, float]

    def since(self, before: "Sample | None") -> Numbers:
        """What has happened since an earlier sample, or the counters' start; gauges as they are.

        A counter that has become smaller began anew when its server did.
        """
        found: Numbers = {}
        for (name, labels), value in self.series.items():
            known = NAMES[name]
            own = (name, tuple(dict(labels).get(label, "") for label in known.labels))
            if name in ONE:
                found[own] = min(value, found.get(own, value))
                continue
            earlier = 0.0 if known.gauge or before is None else before.series.get((name, labels), 0.0)
            found[own] = found.get(own, 0.0) + (value - earlier if value >= earlier else value)
        return found


def top(url: str, interval: float, once: bool, console: Console | None = None) -> None:
    """Show rates every `interval` seconds until Ctrl-C, or the totals `once`; raise `InputError` if there is nothing to show."""
    console = console or Console()
    if interval <= 0:
        raise InputError(f"an interval of {interval:g} seconds: it must be more than 0")
    with suppress(KeyboardInterrupt):
        before = fetch(url)
        totals = table(url, before.since(None))
        if once:
            console.print(totals)
            return
        live = Live(console=console, auto_refresh=False)
        show = partial(live.update, refresh=True) if console.is_terminal else console.print
        with live if console.is_terminal else nullcontext():
            show(totals)
            while True:
                time.sleep(interval)
                try:
                    now = fetch(url)
                except InputError as error:  # a server that is started again comes back
                    show(Text(f"{error}\nTrying again; Ctrl-C ends."))
                else:
                    show(table(url, now.since(before), now.at - before.at))
                    before = now


def fetch(url: str) -> Sample:
    """Ask an endpoint; raise `InputError` in one line if it does not answer with lmc's metrics."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url} is no address of metrics: give one like {URL}")
    opener = build_opener(ProxyHandler({}))  # servers that are watched are near; a proxy would not find this machine
    try:
        with opener.open(url, timeout=TIMEOUT) as answer:
            text = answer.read().decode()
    except HTTPError as error:
        error.close()
        raise InputError(
            f"{url} answers {error.code} {error.reason}: give the address of the metrics, as {URL}"
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise InputError(
            f"no metrics at {url} ({reason}): start the server, or give another address: lmc top {URL}"
        ) from None
    try:
        series = read(text)
    except ValueError as error:
        raise InputError(f"{url} does not answer with Prometheus metrics: {error}") from None
    if not series:
        raise InputError(
            f"{url} has no metrics of lmc: a vLLM server has them if it runs with LMCConnector and without --disable-log-stats"
        )
    return Sample(at=time.monotonic(), series=series)


def read(text: str) -> dict[Series, float]:
    """Lmc's numbers in an endpoint's answer."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            prefix, name = sample.name[:4], sample.name[4:].removesuffix("_total")
            if prefix in ("lmc_", "lmc:") and name in NAMES:
                found[name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


# -- the table --------------------------------------------------------------------------------------------------------


class Rows:
    """The table's lines: a number over all, and by place."""

    def __init__(self, numbers: Numbers, seconds: float | None) -> None:
        self._numbers, self._seconds = numbers, seconds
        found = {labels[0] for (name, labels) in numbers if NAMES[name].labels}
        self.places = [*(place for place in FASTEST if place in found), *sorted(found - {*FASTEST})]
        self.lines: list[tuple[str, ...]] = []

    def by(self, name: str, *way: str) -> dict[str, float]:
        """A metric's numbers by place; of counters, per second if there is a time."""
        found = {labels[0]: n for (other, labels), n in self._numbers.items() if other == name and labels[1:] == way}
        return found if NAMES[name].gauge else {place: self._rate(n) for place, n in found.items()}

    def one(self, name: str) -> float | None:
        """A metric without places, in the same way; None if the endpoint has none."""
        found = self._numbers.get((name, ()))
        return found if found is None or NAMES[name].gauge else self._rate(found)

    def line(self, title: str, over_all: str, by: Mapping[str, str] | None = None) -> None:
        """Add one."""
        self.lines.append((title, over_all, *((by or {}).get(place, "") for place in self.places)))

    def counts(self, title: str, name: str) -> None:
        """A line of a counter by place, if the endpoint has it."""
        found = self.by(name)
        if found:
            self.line(title, number(sum(found.values())), {place: number(n) for place, n in found.items()})

    def moved(self, title: str, way: str) -> None:
        """Bytes in a direction, and what a GiB of them took."""
        moved, took = self.by("bytes", way), self.by("seconds", way)
        if moved:
            self.line(title, size(sum(moved.values())), {place: size(n) for place, n in moved.items()})
            costs = {place: took[place] / n * GIB for place, n in moved.items() if n and place in took}
            self.line(f"  {way}: seconds per GiB", "", {place: f"{cost:.3f}" for place, cost in costs.items()})

    def singles(self, titles: Iterable[tuple[str, str]]) -> None:
        """Lines of metrics without places, those that the endpoint has."""
        for title, name in titles:
            found = self.one(name)
            if found is not None:
                self.line(title, number(found))

    def _rate(self, count: float) -> float:
        return count if self._seconds is None else count / self._seconds


def table(url: str, numbers: Numbers, seconds: float | None = None) -> Table:
    """Numbers of `seconds`, as rates; or totals."""
    rows = Rows(numbers, seconds)
    wanted = sum(rows.by("hits").values()) + (rows.one("misses") or 0.0)
    rows.line("hit rate", f"{sum(rows.by('hits').values()) / wanted:.1%}" if wanted else "-")
    rows.counts("hits", "hits")
    rows.singles([("misses", "misses")])
    rows.moved("read", "read")
    rows.moved("written", "write")
    rows.counts("chunks written", "written_chunks")
    lookups = {place: f"{n:.3f}" for place, n in rows.by("seconds", "lookup").items()}
    rows.line("seconds of lookups", "", lookups)
    rows.counts("evictions", "evictions")
    rows.counts("failures", "failures")
    rows.counts("corrupt records", "corrupt_records")
    rows.line("usable (now)", "", {tier: "yes" if n else "NO" for tier, n in rows.by("tier_usable").items()})
    rows.singles([
        ("write queue (now)", "write_queue_depth"),
        ("dropped writes", "dropped_writes"),
        ("no room", "no_room"),
        ("requests", "requests"),
        ("blends", "blends"),
        ("loads", "loads"),
        ("loads skipped", "loads_skipped"),
        ("loads failed", "failed_loads"),
        ("refused", "refused"),
    ])  # fmt: skip
    tokens(rows)
    rows.singles([("chunks stored", "stored_chunks"), ("tokens stored", "stored_tokens")])
    title = "lmc: totals since the start" if seconds is None else f"lmc: per second, over the last {seconds:.1f} s"
    shown = Table("", "all", title=title, caption=Text(url), box=box.SIMPLE_HEAD)
    for column in rows.places:
        shown.add_column(Text(column), justify="right")
    shown.columns[1].justify = "right"
    for line in rows.lines:
        shown.add_row(*map(Text, line))
    return shown


def tokens(rows: Rows) -> None:
    """Lines of tokens: where they came from, and how many blends computed again."""
    found = {name.removeprefix("tokens_from_"): rows.one(name) for name in NAMES if name.startswith("tokens_from_")}
    known = {place: n for place, n in found.items() if n is not None}
    if known:
        rows.line("tokens reused", number(sum(known.values())), {place: number(n) for place, n in known.items()})
    computed, layers = rows.one("token_layers"), rows.one("layers")
    if computed is not None and layers:
        rows.line("tokens recomputed by blends", number(computed / layers))


def number(count: float) -> str:
    """A count, or a rate."""
    return f"{count:,.0f}" if count == round(count) else f"{count:,.2f}"


def size(count: float) -> str:
    """Bytes, for reading."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / MIB:,.2f} MiB"
