"""Metrics: what a scrape says of a store, what `lmc top` makes of it, and that the board asks for what there is."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import prometheus_client
import pytest
from models import SEPARATOR, random_model, random_tokens
from ports import free_port
from prometheus_client import CollectorRegistry
from rich.console import Console
from storage_fakes import PART_BYTES, PARTS, DictTier, get, key_of, put
from typer.testing import CliRunner

from lmc.commands.cli import app
from lmc.commands.top import Sample, complete, fetch, read, table, top
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.connectors.transformers.metrics import Prefills
from lmc.errors import InputError
from lmc.metrics import (
    HISTOGRAMS,
    NAMES,
    OF_REQUESTS,
    OF_STORES,
    StoreCollector,
    flat,
    key,
    parted,
    register,
    serve_metrics,
    values,
)
from lmc.router.router_metrics import REFUSED, ROUTER_METRICS
from lmc.shapes import GIB
from lmc.storage.memory.slab import Slab
from lmc.storage.stats import StoreStats
from lmc.storage.store import Store

K0, K1, K2 = map(key_of, range(3))
BOARD = Path(__file__).parent.parent / "docs/grafana.json"

NOTHING = StoreStats(
    hits={},
    misses=0,
    bytes={},
    seconds={},
    writes={},
    dropped_writes=0,
    failed={},
    corrupt={},
    no_room=0,
    evictions={"host": 0},
    document_evictions={"host": 0},
    queued=0,
    usable={"disk": True, "redis": False},
)
SOME = replace(
    NOTHING,
    hits={"host": 5, "disk": 2},
    misses=1,
    bytes={("disk", "read"): 3 * GIB, ("redis", "write"): 512},
    seconds={("disk", "read"): 1.5, ("disk", "lookup"): 0.25},
    writes={"disk": 4},
    dropped_writes=6,
    failed={"redis": 7},
    corrupt={"disk": 8},
    no_room=9,
    evictions={"host": 10},
    queued=11,
)


@contextmanager
def store_over(tier=None):
    with closing(Store(Slab(4, PARTS, PART_BYTES), [tier] if tier else [])) as store:
        yield store


@contextmanager
def served(registry, port=0):
    """The address of a registry's metrics."""
    server, thread = prometheus_client.start_http_server(port, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def registry_of(stats: StoreStats) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StoreCollector(lambda: stats))
    return registry


def shown(url: str, **options) -> dict[str, list[str]]:
    """What `lmc top --once` prints: the words of each line by its title."""
    console = Console(file=io.StringIO(), width=200)
    top(url, 1.0, True, console)
    return cells(console.file.getvalue())


def cells(text: str) -> dict[str, list[str]]:
    """The columns of a printed table, by the title of the line; of the header under ""."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]
    return {line[0]: line[1:] for line in lines if len(line) > 1}


# -- a scrape ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("lmc_hits_total", {"place": "host"}, 5),
        ("lmc_hits_total", {"place": "disk"}, 2),
        ("lmc_misses_total", {}, 1),
        ("lmc_bytes_total", {"tier": "disk", "direction": "read"}, 3 * GIB),
        ("lmc_bytes_total", {"tier": "redis", "direction": "write"}, 512),
        ("lmc_seconds_total", {"tier": "disk", "direction": "read"}, 1.5),
        ("lmc_seconds_total", {"tier": "disk", "direction": "lookup"}, 0.25),
        ("lmc_written_chunks_total", {"tier": "disk"}, 4),
        ("lmc_dropped_writes_total", {}, 6),
        ("lmc_failures_total", {"tier": "redis"}, 7),
        ("lmc_corrupt_records_total", {"tier": "disk"}, 8),
        ("lmc_no_room_total", {}, 9),
        ("lmc_evictions_total", {"place": "host"}, 10),
        ("lmc_write_queue_depth", {}, 11),
        ("lmc_tier_usable", {"tier": "disk"}, 1),
        ("lmc_tier_usable", {"tier": "redis"}, 0),
    ],
)
def test_a_scrape_has_every_count_of_the_store(name, labels, value):
    assert registry_of(SOME).get_sample_value(name, labels) == value


def test_what_may_still_happen_is_there_as_zero():
    """Without it a rate would not see the first corrupt record: it needs a value before."""
    registry = registry_of(NOTHING)
    for tier in ("disk", "redis"):
        assert registry.get_sample_value("lmc_corrupt_records_total", {"tier": tier}) == 0
        assert registry.get_sample_value("lmc_hits_total", {"place": tier}) == 0
        for way in ("read", "write"):
            assert registry.get_sample_value("lmc_bytes_total", {"tier": tier, "direction": way}) == 0


def test_plain_data_survives_a_process_border():
    numbers = flat(SOME)
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers["bytes|disk|read"] == 3 * GIB
    assert numbers["misses"] == 1
    assert {parted(k)[0] for k in numbers} == {name.name for name in OF_STORES}
    assert all(key(*parted(k)) == k and len(parted(k)[1]) == len(NAMES[parted(k)[0]].labels) for k in numbers)


def test_no_name_is_there_twice():
    assert len(NAMES) == len(OF_STORES) + len(OF_REQUESTS) + len(HISTOGRAMS)


def test_a_scrape_asks_the_store_itself():
    tier, registry = DictTier(), CollectorRegistry()
    with store_over(tier) as store:
        register(store, registry)
        put(store, K0)
        store.flush()
        assert get(store, K0)
        assert get(store, K1) is None
        assert registry.get_sample_value("lmc_written_chunks_total", {"tier": "dict"}) == 1
        assert registry.get_sample_value("lmc_hits_total", {"place": "host"}) == 1
        assert registry.get_sample_value("lmc_misses_total") == 1
        assert registry.get_sample_value("lmc_bytes_total", {"tier": "dict", "direction": "write"}) > 0
        assert get(store, K2) is None
        assert registry.get_sample_value("lmc_misses_total") == 2


def test_a_registry_shows_one_store():
    registry = CollectorRegistry()
    with store_over() as first, store_over() as second:
        collector = register(first, registry)
        with pytest.raises(InputError, match="already exports a store"):
            register(second, registry)
        registry.unregister(collector)
        register(second, registry)


def test_the_engine_of_a_model_is_registered_and_served_as_the_page_says(tmp_path):
    port = free_port()
    with CachedModel(random_model(), Settings(max_local_cpu_size=0.02, local_disk=tmp_path), SEPARATOR) as cached:
        collector = register(cached.engine)
        stop = serve_metrics(port)
        try:
            cached.learn(random_tokens(40, 1))
            found = fetch(f"http://127.0.0.1:{port}/metrics").since(None)
        finally:
            stop()
            prometheus_client.REGISTRY.unregister(collector)
    assert {name for name, _ in found} == {name.name for name in OF_STORES}
    assert found["chunks", ("host",)] > 0
    assert found["chunk_tokens", ("host",)] >= 40


def test_what_is_present_in_a_tier_that_hosts_share_is_not_counted():
    """`lmc learn` said that Mooncake had 0 tokens, right after all documents were written there."""
    found = values(replace(SOME, usable={"disk": True, "mooncake": True}, evictions={"host": 0}, present={}))
    assert found["chunks"].keys() == found["chunk_tokens"].keys() == {("host",), ("disk",)}
    assert ("mooncake",) in found["written_chunks"]


def test_metrics_are_served_to_this_machine_until_stopped():
    port = free_port()
    stop = serve_metrics(port, registry=registry_of(SOME))
    url = f"http://127.0.0.1:{port}/metrics"
    assert fetch(url).since(None)["hits", ("host",)] == 5
    with pytest.raises(InputError, match=f"127.0.0.1:{port}: Address already in use; choose another port"):
        serve_metrics(port)
    stop()
    with pytest.raises(InputError, match="Connection refused"):
        fetch(url)


@dataclass
class Reported:
    how: str
    computed: tuple[int, ...]
    skipped: int


def test_prefills_are_added_up():
    registry = CollectorRegistry()
    prefills = Prefills(registry)
    prefills.add(Reported("blend", (100, 20, 20), 1))
    prefills.add(Reported("full", (100, 100, 100), 2))
    found = {name: registry.get_sample_value(f"lmc_{name}_total") for name in ("requests", "blends", "loads_skipped")}
    assert found == {"requests": 2, "blends": 1, "loads_skipped": 2}
    assert registry.get_sample_value("lmc_token_layers_total") == 140
    assert registry.get_sample_value("lmc_layers") == 3


# -- lmc top ----------------------------------------------------------------------------------------------------------


def test_once_prints_the_totals():
    with served(registry_of(SOME)) as url:
        found = shown(url)
    assert found["hit rate"] == ["87.5%"]
    assert found["hits"] == ["7", "5", "2", "0"]
    assert found["misses"] == ["1"]
    assert found["read"] == ["3.00 GiB", "3.00 GiB", "0.00 MiB"]
    assert found["read: seconds per GiB"] == ["0.500"]
    assert found["failures"] == ["7", "0", "7"]
    assert found["corrupt records"] == ["8", "8", "0"]
    assert found["usable (now)"] == ["yes", "NO"]
    assert found["write queue (now)"] == ["11"]
    assert found["dropped writes"] == ["6"]
    assert "requests" not in found  # this endpoint is no server's


def test_programs_get_the_totals_as_json_from_an_address_without_a_scheme():
    with served(registry_of(SOME)) as url:
        result = CliRunner().invoke(app, ["top", url.removeprefix("http://").removesuffix("/metrics"), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found = {(one["name"], *one["labels"]): one["value"] for one in json.loads(result.stdout)}
    assert found["hits", "host"] == 5
    assert found["bytes", "disk", "read"] == 3 * GIB
    assert found["tier_usable", "redis"] == 0
    assert found["misses",] == 1
    assert {name for name, *_ in found} <= set(NAMES)


def test_a_url_that_is_wider_than_the_table_stays_on_its_line():
    console, url = (
        Console(file=io.StringIO(), width=80),
        "http://a-host-with-a-long-name.of-its-company.example:9180/metrics",
    )
    console.print(table(url, {("misses", ()): 1.0}))
    assert console.file.getvalue().splitlines()[-1] == url


def test_rates_are_of_the_time_between_two_samples():
    before = Sample(at=10.0, series=read(prometheus_client.generate_latest(registry_of(SOME)).decode()))
    later = replace(SOME, hits={"host": 25, "disk": 2}, misses=6, bytes={("disk", "read"): 5 * GIB}, queued=3)
    later = replace(later, seconds={("disk", "read"): 2.5})
    now = Sample(at=14.0, series=read(prometheus_client.generate_latest(registry_of(later)).decode()))
    console = Console(file=io.StringIO(), width=200)
    console.print(table("here", now.since(before), now.at - before.at))
    found = cells(console.file.getvalue())
    assert found["hit rate"] == ["80.0%"]
    assert found["hits"] == ["5", "5", "0", "0"]
    assert found["misses"] == ["1.25"]
    assert found["read"] == ["512.00 MiB", "512.00 MiB", "0.00 MiB"]
    assert found["read: seconds per GiB"] == ["0.500"]
    assert found["write queue (now)"] == ["3"]


def test_only_places_have_columns():
    """Errors are counted by hook, and each hook had a column without numbers."""
    console, hooks = Console(file=io.StringIO(), width=80), ("take_events", "build_connector_meta")
    counts = {("errors", (hook,)): 1.0 for hook in hooks} | {("hits", ("host",)): 2.0, ("written_chunks", ("disk",)): 3}
    console.print(table("here", counts))
    shown = console.file.getvalue()
    assert not any(hook in shown for hook in hooks)
    assert cells(shown)["errors"] == ["2"]
    assert cells(shown)["hits"] == ["2", "2"]


def test_a_counter_that_became_smaller_began_anew():
    labels = (("engine", "0"),)
    before = Sample(at=0.0, series={("misses", labels): 100.0, ("write_queue_depth", labels): 9.0})
    now = Sample(at=1.0, series={("misses", labels): 4.0, ("write_queue_depth", labels): 2.0})
    assert now.since(before) == {("misses", ()): 4.0, ("write_queue_depth", ()): 2.0}


def test_engines_are_added_up_each_from_its_own_start():
    def sample(at, first, second, usable):
        text = f"""
lmc:hits_total{{engine="0",model_name="m",place="host"}} {first}
lmc:hits_total{{engine="1",model_name="m",place="host"}} {second}
lmc:tier_usable{{engine="0",model_name="m",tier="disk"}} 1
lmc:tier_usable{{engine="1",model_name="m",tier="disk"}} {usable}
lmc:hits_created{{engine="1",model_name="m",place="host"}} 1.7e9
vllm:prompt_tokens_total{{engine="0"}} 5
"""
        return Sample(at=at, series=read(text))

    before, now = sample(0.0, 10, 50, 1), sample(1.0, 12, 3, 0)
    assert now.since(before) == {("hits", ("host",)): 2 + 3, ("tier_usable", ("disk",)): 0}


def test_tokens_of_a_vllm_server_are_shown_by_place():
    labels = (("engine", "0"), ("model_name", "m"))
    counts = {"tokens_from_host": 300, "tokens_from_disk": 100, "token_layers": 400, "layers": 4, "requests": 5}
    sample = Sample(at=0.0, series={(name, labels): float(n) for name, n in counts.items()})
    sample.series["hits", (*labels, ("place", "host"))] = 1.0
    sample.series["hits", (*labels, ("place", "disk"))] = 1.0
    console = Console(file=io.StringIO(), width=200)
    console.print(table("here", sample.since(None)))
    found = cells(console.file.getvalue())
    assert found["tokens reused"] == ["400", "300", "100"]
    assert found["tokens recomputed by blends"] == ["100"]
    assert found["requests"] == ["5"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "http://127.0.0.1:1/metrics",
            "no metrics at http://127.0.0.1:1/metrics .*Connection refused.*: lmc top http://",
        ),
        ("file:///etc/hostname", "is not a metrics URL: use one such as http://127.0.0.1:8000/metrics"),
        ("localhost:8000", "is not a metrics URL"),
        ("http://[", "no metrics at"),
    ],
)
def test_an_address_that_cannot_be_asked_is_an_error_in_one_line(url, said):
    with pytest.raises(InputError, match=said) as error:
        top(url, 1.0, True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host:8000", "http://host:8000/metrics"),
        ("https://host/", "https://host/metrics"),
        ("http://host/own", "http://host/own"),
    ],
)
def test_an_address_without_scheme_or_path_is_completed(address, url):
    assert complete(address) == url
    with pytest.raises(InputError, match=r"http://\[ is not a metrics URL"):
        complete("http://[")


def test_an_endpoint_without_lmc_is_an_error():
    with (
        served(CollectorRegistry()) as url,
        pytest.raises(InputError, match="has no metrics of lmc: start the vLLM server"),
    ):
        top(url, 1.0, True)


def test_an_interval_of_nothing_is_an_error():
    with pytest.raises(InputError, match="use a number above 0"):
        top("http://127.0.0.1:1/metrics", 0.0, False)


@contextmanager
def watching(url: str, *, ignores_interrupts: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `lmc top`; one line that never comes ends it. Its parent may ignore SIGINT, as a script
    does.
    """
    program = f"from lmc.commands.top import top; top({url!r}, 0.2, False)"
    ignoring = "trap '' INT;" if ignores_interrupts else ""
    with subprocess.Popen(
        ["sh", "-c", f'{ignoring} exec "$@"', "", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    ) as child:
        watch = threading.Timer(60, child.kill)
        watch.start()
        try:
            yield child
        finally:
            watch.cancel()
            child.kill()


@pytest.mark.parametrize("ignores_interrupts", [False, True])
def test_top_survives_a_restart_of_the_server_and_ends_quietly_with_ctrl_c(ignores_interrupts):
    later = replace(SOME, misses=3)
    with ExitStack() as stack:
        first_server = stack.enter_context(ExitStack())
        url = first_server.enter_context(served(registry_of(SOME)))
        child = stack.enter_context(watching(url, ignores_interrupts=ignores_interrupts))
        assert child.stdout is not None
        said = iter(child.stdout.readline, "")
        assert any("totals since the start" in line for line in said)
        assert any("per second, over the last 0." in line for line in said)
        first_server.close()
        assert any("Retrying; press Ctrl-C to stop." in line for line in said)
        with served(registry_of(later), int(url.split(":")[2].split("/")[0])):
            assert any(re.search(r"misses +\d+\.\d\d", line) for line in said)  # 2 in the time without answers
            child.send_signal(signal.SIGINT)
            rest, _ = child.communicate(timeout=30)
        assert child.returncode == 0
        assert "Traceback" not in rest


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finaliser_has_swallowed_ends_top_all_the_same(monkeypatch):
    class Interrupted:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def fetch_once_more(_):
        rounds.append(Interrupted() and None)
        assert len(rounds) < 3, "the interrupt was lost"
        return Sample(at=float(len(rounds)), series={})

    rounds = []
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("lmc.commands.top.fetch", fetch_once_more)
    top("http://nowhere", 0.01, False, Console(file=io.StringIO()))
    assert len(rounds) == 1
    assert signal.getsignal(signal.SIGINT) is before


# -- the board --------------------------------------------------------------------------------------------------------

board = json.loads(BOARD.read_text())
PANELS = [panel for panel in board["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
DATASOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def test_engines_programs_and_routers_can_be_chosen():
    (variable,) = (one for one in board["templating"]["list"] if one["name"] == "instance")
    for text in (variable["definition"], variable["query"]["query"]):
        (names,) = re.findall(r'^label_values\(\{__name__=~"(.+)"\}, instance\)$', text)
        shown = "lmc:misses_total", "lmc_misses_total", f"lmc_{REFUSED.name}_total"
        assert all(re.fullmatch(names, name) for name in shown)


def test_the_panels_of_the_router_are_in_a_row_of_their_own():
    (row,) = (at for at, panel in enumerate(board["panels"]) if panel["type"] == "row")
    assert board["panels"][row]["title"] == "Router"
    for at, panel in enumerate(board["panels"]):
        of_router = ["lmc_router_" in target["expr"] for target in panel.get("targets", ())]
        assert set(of_router) <= {at > row}
        assert panel["gridPos"]["y"] > board["panels"][row]["gridPos"]["y"] or at <= row


def test_panels_are_whole_and_have_ids_of_their_own():
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len(PANELS) == len({panel["title"] for panel in PANELS})
    for panel in PANELS:
        assert {"type", "title", "description", "fieldConfig", "options"} <= panel.keys()
        assert panel["datasource"] == DATASOURCE
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        assert all(target["datasource"] == DATASOURCE and target["expr"] for target in panel["targets"])


def asked(expression: str) -> set[str]:
    """Metrics of lmc that an expression reads."""
    by_regex = re.findall(r'__name__=~"lmc\[:_\](\w+)"', expression)
    return {*by_regex, *re.findall(r"\blmc[:_](\w+)", expression)}


def test_the_board_asks_for_all_metrics_and_for_no_others():
    names = (*NAMES.values(), *ROUTER_METRICS)
    known = {f"{name.name}{'_bucket' if name.buckets else '' if name.gauge else '_total'}" for name in names}
    assert set().union(*map(asked, EXPRESSIONS)) == known | {"server_clients"}  # which only cache servers have


ATTACHED, SERVERS = '(lmc:attached{instance=~"$instance"} == 1)', 'lmc_server_clients{instance=~"$instance"}'


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_board_counts_the_chunks_of_a_cache_server_once(expression):
    """The server and its engines export the same numbers of one store. Hits and misses of a client are its own."""
    if "by (instance" in expression:  # shown for each instance, and not added up
        return
    both = (
        rf'\{{__name__=~"lmc\[:_\](?:{"|".join(name.name for name in OF_STORES)})(?:_total)?",[^}}]*\}}(?:\[\S+\]\))?'
    )
    for match in re.finditer(both, expression):
        own = re.search(r"\](hits|misses)_total", match[0])
        others = f"{SERVERS} and on () {ATTACHED}" if own else f"{ATTACHED} and on () {SERVERS}"
        assert expression[match.end() :].startswith(f" unless on (instance) ({others})"), match[0]


def test_the_board_asks_for_what_programs_without_a_server_have_under_both_names():
    registry = registry_of(NOTHING)
    Prefills(registry)
    theirs = {family.name.removeprefix("lmc_") for family in registry.collect()}
    assert {"hits", "requests"} < theirs
    for expression in EXPRESSIONS:
        under_one_name = re.findall(r"\blmc[:_](\w+)", expression)
        assert theirs.isdisjoint(name.removesuffix("_total") for name in under_one_name), expression


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_balanced_and_picks_by_label(expression):
    bare = re.sub(r'"[^"]*"', '""', expression)
    closing_of, open_ones = {")": "(", "}": "{", "]": "["}, []
    for sign in bare:
        if sign in "({[":
            open_ones.append(sign)
        elif sign in closing_of:
            assert open_ones.pop() == closing_of[sign]
    assert not open_ones
    assert re.findall(r"\{[^}]*\}", bare)
    assert expression.count('instance=~"$instance"') == len(re.findall(r"\{[^}]*\}", bare))
    for name, labels in re.findall(r'__name__=~"lmc\[:_\](\w+?)(?:_total)?",instance=~"\$instance"([^}]*)', expression):
        assert set(re.findall(r",(\w+)[=!]", labels)) <= set(NAMES[name].labels)
