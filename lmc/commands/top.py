"""`lmc top`: shows the activity of a store, from any Prometheus endpoint with lmc's metrics.

The endpoint belongs to a vLLM server or to `lmc.metrics.serve_metrics`. Each round fetches a sample, subtracts the
previous sample, and prints the difference as a table.
"""

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lmc.errors import InputError
from lmc.http.address import TOKEN, admin_token
from lmc.http.client import authorization, opener, with_scheme
from lmc.metrics import NAMES, Labels, key
from lmc.router.router_metrics import ROUTER_METRICS
from lmc.shapes import GIB, MIB
from lmc.storage.places import fastest_first

METRICS_URL = "http://127.0.0.1:8000/metrics"
FETCH_SECONDS = 5.0  # seconds for a response
METRICS = NAMES | {name.name: name for name in ROUTER_METRICS if not name.buckets}
LOWEST = {"tier_usable", "layers"}  # gauges that show the lowest value of several engines, not the sum

Series = tuple[str, tuple[tuple[str, str], ...]]  # a metric and all its labels
Numbers = dict[tuple[str, Labels], float]  # by metric and lmc's own labels
Rates = defaultdict[str, dict[str, float]]  # by metric, or metric|direction, and tier; totals if no time is given
Line = tuple[str, str, dict[str, str]]  # a title, the number over all tiers, and the numbers by tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The values of all of lmc's metrics at one moment."""

    at: float
    series: dict[Series, float]

    def since(self, before: "Sample | None") -> Numbers:
        """Return the increase of counters since an earlier sample, or since the start. Gauges are returned unchanged.

        A counter that became smaller was reset by a restart of its server.
        """
        numbers: Numbers = {}
        for (name, labels), value in self.series.items():
            metric = METRICS[name]
            series_key = (name, tuple(dict(labels).get(label, "") for label in metric.labels))
            if name in LOWEST:
                numbers[series_key] = min(value, numbers.get(series_key, value))
                continue
            earlier = 0.0 if metric.gauge or before is None else before.series.get((name, labels), 0.0)
            numbers[series_key] = numbers.get(series_key, 0.0) + (value - earlier if value >= earlier else value)
        return numbers


def top(url: str, interval: float, once: bool, console: Console | None = None) -> None:
    """Show rates every `interval` seconds until Ctrl-C, or the totals `once`.

    Raises `InputError` if the first fetch fails.
    """
    console = console or Console()
    if interval <= 0:
        raise InputError(f"invalid interval of {interval:g} s: use a number above 0")
    with _ended_by_ctrl_c() as interrupted:
        before = fetch(url)
        live = Live(console=console, auto_refresh=False) if console.is_terminal and not once else None
        show = partial(live.update, refresh=True) if live else console.print
        with live or nullcontext():
            show(table(url, before.since(None)))
            while not once and not interrupted():
                time.sleep(interval)
                try:
                    now = fetch(url)
                except InputError as error:  # The server may be restarting.
                    show(Text(f"{error}\nRetrying; press Ctrl-C to stop."))
                else:
                    show(table(url, now.since(before), now.at - before.at))
                    before = now


@contextmanager
def _ended_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Leave the block when SIGINT arrives. The yielded function returns whether it has arrived.

    Python's own handler is not enough. It is not installed if the parent process ignores SIGINT, as a shell script does
    for a command with `&`. Also, an interrupt during a finalizer is printed and dropped.
    """
    arrived: list[int] = []

    def interrupt(number: int, _: object) -> None:
        arrived.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with suppress(KeyboardInterrupt):
            yield lambda: bool(arrived)
    finally:
        signal.signal(signal.SIGINT, previous)


def complete(address: str) -> str:
    """Return the full URL of an endpoint that may be given as `host:port`, or without a path."""
    url = with_scheme(address)
    try:
        path = urlsplit(url).path
    except ValueError:
        raise InputError(f"{address} is not a metrics URL: use one such as {METRICS_URL}") from None
    return url if path.strip("/") else f"{url.rstrip('/')}/metrics"


def fetch(url: str) -> Sample:
    """Fetch a sample from an endpoint. Raises `InputError` (one line) if it does not return lmc's metrics."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url} is not a metrics URL: use one such as {METRICS_URL}")
    try:
        with opener().open(
            Request(url, headers=authorization(admin_token(), TOKEN)), timeout=FETCH_SECONDS
        ) as response:
            text = response.read().decode()
    except HTTPError as error:
        error.close()
        reason = f"{url} answered {error.code} {error.reason}"
        if error.code in (401, 403):
            raise InputError(f"{reason}: set {TOKEN} to the server's token") from None
        raise InputError(f"{reason}: use a metrics URL such as {METRICS_URL}") from None
    except (OSError, HTTPException, ValueError) as error:
        failed = f"no metrics at {url} ({error.reason if isinstance(error, URLError) else error})"
        raise InputError(f"{failed}: start the server, or use another URL: lmc top {METRICS_URL}") from None
    try:
        series = read(text)
    except ValueError as error:
        raise InputError(f"{url} did not return Prometheus metrics: {error}") from None
    if not series:
        raise InputError(
            f"{url} has no metrics of lmc: start the vLLM server with LMCConnector and without --disable-log-stats"
        )
    return Sample(at=time.monotonic(), series=series)


def read(text: str) -> dict[Series, float]:
    """Return the values of lmc's metrics in an endpoint's response."""
    series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            prefix, name = sample.name[:4], sample.name[4:].removesuffix("_total")
            if prefix in ("lmc_", "lmc:") and name in METRICS:
                series[name, tuple(sorted(sample.labels.items()))] = sample.value
    return series


# -- the table --------------------------------------------------------------------------------------------------------

# Titles of lines with a single metric. The table has CHUNKS before the bytes, WORK after them, and STORED at its end.
CHUNK_LINES = {"hits": "hits", "misses": "misses"}
WORK_LINES = {
    "chunks written": "written_chunks", "evictions": "evictions", "failures": "failures",
    "corrupt records": "corrupt_records", "usable (now)": "tier_usable", "chunks (now)": "chunks",
    "tokens (now)": "chunk_tokens", "write queue (now)": "write_queue_depth", "dropped writes": "dropped_writes",
    "no room": "no_room", "requests": "requests", "blends": "blends", "loads": "loads",
    "loads skipped": "loads_skipped", "loads failed": "failed_loads", "refused": "refused", "errors": "errors",
}  # fmt: skip
ROUTED_LINES = {
    "requests": "router_requests", "requests (now)": "router_engine_requests", "usable (now)": "router_engine_usable",
    "prompt tokens": "router_prompt_tokens", "tokens expected reused": "router_expected_tokens",
    "tokens reported reused": "router_reported_tokens", "retries": "router_retries",
    "responses broken off": "router_broken_answers", "clients disconnected": "router_clients_left",
    "refused": "router_refused", "index (now)": "router_index_entries",
}  # fmt: skip
ROUTED = set(ROUTED_LINES.values())
STORED_LINES = {"chunks stored": "stored_chunks", "tokens stored": "stored_tokens"}


def table(url: str, numbers: Numbers, seconds: float | None = None) -> Group:
    """Return the table of rates for numbers counted in `seconds`, and the URL. Without `seconds`, it has totals.

    It has a column per tier, or per engine of a router. The URL may be wider than the table.
    """
    title = "lmc: totals since the start" if seconds is None else f"lmc: per second, over the last {seconds:.1f} s"
    is_router = any(name in ROUTED for name, _ in numbers)
    rates: Rates = defaultdict(lambda: defaultdict(float))
    columns = set[str]()
    for (name, labels), n in numbers.items():
        metric, column = METRICS[name], ""
        if labels and metric.labels[0] in (("engine",) if is_router else ("place", "tier")):
            column = labels[0]
            columns.add(column)
        unit = 1.0 if seconds is None or metric.gauge else seconds
        others = labels[1:] if column and not is_router else ()
        rates[key(name, others)][column] += n / unit
    shown = Table("", "all", title=title, box=box.SIMPLE_HEAD)
    shown.columns[1].justify = "right"
    names = sorted(columns) if is_router else fastest_first(columns)
    for column in names:
        shown.add_column(Text(column), justify="right")
    for line, over_all, by_column in _router_lines(rates) if is_router else _lines(rates):
        shown.add_row(*map(Text, (line, over_all, *(by_column.get(column, "") for column in names))))
    return Group(shown, Text(url))


def _router_lines(rates: Rates) -> Iterator[Line]:
    for title, name in ROUTED_LINES.items():
        if name == "router_engine_usable":
            yield title, "", {engine: "yes" if n else "NO" for engine, n in rates[name].items()}
        else:
            yield title, number(sum(rates[name].values())), {engine: number(n) for engine, n in rates[name].items()}


def _lines(rates: Rates) -> Iterator[Line]:
    hits, misses = (sum(rates[name].values()) for name in CHUNK_LINES)
    yield "hit rate", f"{hits / (hits + misses):.1%}" if hits + misses else "-", {}
    yield from _counts(rates, CHUNK_LINES)
    yield from _moved(rates, "read", "read")
    yield from _moved(rates, "written", "write")
    yield "seconds of lookups", "", {place: f"{n:.3f}" for place, n in rates["seconds|lookup"].items()}
    yield from _counts(rates, WORK_LINES)
    yield from _tokens(rates)
    yield from _counts(rates, STORED_LINES)


def _counts(rates: Rates, titles: Mapping[str, str]) -> Iterator[Line]:
    for title, name in titles.items():
        metric, by_place = NAMES[name], rates[name]
        if name == "tier_usable":
            yield title, "", {place: "yes" if n else "NO" for place, n in by_place.items()}
        elif by_place:
            over_all = "" if metric.gauge and metric.labels else number(sum(by_place.values()))
            yield title, over_all, {place: number(n) for place, n in by_place.items()}


def _moved(rates: Rates, title: str, direction: str) -> Iterator[Line]:
    """Yield the lines of bytes moved in one direction, and of the seconds per GiB."""
    moved_bytes, spent_seconds = rates[f"bytes|{direction}"], rates[f"seconds|{direction}"]
    if moved_bytes:
        yield title, size(sum(moved_bytes.values())), {place: size(n) for place, n in moved_bytes.items()}
        costs = {
            place: spent_seconds[place] / n * GIB for place, n in moved_bytes.items() if n and place in spent_seconds
        }
        yield f"  {direction}: seconds per GiB", "", {place: f"{cost:.3f}" for place, cost in costs.items()}


def _tokens(rates: Rates) -> Iterator[Line]:
    """Yield the lines of reused tokens by tier, and of tokens recomputed by blends."""
    named = {name.removeprefix("tokens_from_"): rates[name] for name in NAMES if name.startswith("tokens_from_")}
    by_place = {place: sum(counts.values()) for place, counts in named.items() if counts}
    if by_place:
        yield "tokens reused", number(sum(by_place.values())), {place: number(n) for place, n in by_place.items()}
    layers = sum(rates["layers"].values())
    if layers:
        yield "tokens recomputed by blends", number(sum(rates["token_layers"].values()) / layers), {}


def number(count: float) -> str:
    """Return a count or a rate as text."""
    return f"{count:,.0f}" if count == round(count) else f"{count:,.2f}"


def size(count: float) -> str:
    """Return a number of bytes as text."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / MIB:,.2f} MiB"
