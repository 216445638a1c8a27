"""TTFT inside vLLM with KV that comes from each tier, and that of full prefill without lmc. One thread, float32.

    python bench/pool.py [--model smollm2] [--rounds 4] [--only disk --only redis] [--load-policy auto] [--keep]

Two kinds of prompts of about 2,000 tokens: `exact`, which the engine has computed before, and `blend`, 8 known
documents in a new order. Before each request, the engine's prefix cache and lmc's memory are emptied, so that chunks
come from the tier: a disk, Redis, Mooncake Store (over TCP), S3 with 0, 5 and 30 ms of added latency, and S3 at 10
MB/s, which is slower than computing. The S3 server is moto, which is written in Python and slower than any network. All
servers run on this machine. In each round, vLLM computes a prompt, and lmc gets the same one. The first round is the
first in which the engine reads from the tier. It knows nothing of its speed then, so this round is shown apart. With
`--load-policy auto`, what takes longer to load than to compute is computed. What is measured, by tier and kind:

    speedup     TTFT of vLLM over TTFT with lmc, median of the rounds after the first; `first`: in the first round
    loaded      share of the prompt whose KV came from the tier, mean of the same rounds; the rest was computed
    mib_s       bytes of this KV for each second of TTFT, median of rounds that loaded something
    again       of blends: speedup of the third prompt of the same documents, in another order with another question,
                after a load in the background of what was not loaded twice; median of the rounds with such documents
"""

import argparse
import os
import socket
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import closing_line, parser
from engine import Engine, Host, in_folder, make_model, prompt_of, words

from lmc.demo.pretrained import checkpoint
from lmc.demo.random_model import machine
from lmc.shapes import GIB, MIB

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))

DOCUMENTS, TOKENS = 8, 250
ANSWER = 4  # tokens: what a request of one token has computed is saved before its answer
# S3 servers by name: added latency in seconds, and bytes a second that can be read (0: without a limit).
S3 = {"s3": (0.0, 0.0), "s3 +5 ms": (0.005, 0.0), "s3 +30 ms": (0.03, 0.0), "s3 10 MB/s": (0.0, 10e6)}
MEMORY = 1.0  # GB
POOL = 4 * GIB


class PoolHost(Host):
    """An engine whose chunks can be taken out of lmc's memory, while its tiers keep them."""

    clocked = False

    def only_in_tier(self) -> dict[str, Any]:
        from storage_fakes import lose, state_of

        self.forget_prefixes()
        store = self.core.scheduler.connector._scheduler.engine.store
        store.flush()
        lose(store, *list(state_of(store).host.keys()))
        return {}

    def promoted(self) -> dict[str, Any]:
        """Wait for the load in the background, and empty the prefix cache."""
        self.core.scheduler.connector._scheduler.engine.promotion.wait()
        self.forget_prefixes()
        return {}

    def token_bytes(self) -> dict[str, Any]:
        scheduler = self.core.scheduler.connector._scheduler
        layout = scheduler.engine.store.slab
        return {"bytes": layout.parts * layout.part_bytes / scheduler.engine.chunk_size}


def slower(port: int, latency: float, rate: float) -> int:
    """Start a relay to a port of this machine, and return its port.

    It keeps each request for `latency` seconds, and passes on `rate` bytes of answers a second, unless these are 0.
    """
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            client, _ = listening.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _in_background(_relay, client, server, latency, 0.0)
            _in_background(_relay, server, client, 0.0, rate)

    _in_background(accept)
    return int(listening.getsockname()[1])


def _in_background(work: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=work, args=given, daemon=True).start()


PACE, SHARED = threading.Lock(), 64 << 10  # All connections together have the rate, and take turns with these bytes.


def _relay(source: socket.socket, target: socket.socket, latency: float, rate: float) -> None:
    """Pass bytes on. What comes after a pause is a new request, and waits."""
    with suppress(OSError):
        last = 0.0
        while data := source.recv(SHARED if rate else MIB):
            if latency and time.monotonic() - last > latency:
                time.sleep(latency)
            last = time.monotonic()
            if rate:
                with PACE:
                    time.sleep(len(data) / rate)
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def tiers(wanted: list[str]) -> Iterator[dict[str, dict[str, Any]]]:
    """The settings of an engine for each tier, whose servers run."""
    found: dict[str, dict[str, Any]] = {"memory": {}}
    names = ["memory", "disk", "redis", "mooncake", *S3]
    wanted = [name for name in names if not wanted or not {name, name.partition(" ")[0]}.isdisjoint(wanted)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-pool-")))
        found["disk"] = {"local_disk": str(folder / "disk"), "max_local_disk_size": 8.0}
        if "redis" in wanted:
            from redis_servers import RedisServer

            found["redis"] = {"remote_url": stack.enter_context(RedisServer(folder)).tcp_url()}
        if "mooncake" in wanted:
            from mooncake_servers import mooncake_store

            port = stack.enter_context(mooncake_store(POOL)).port
            found["mooncake"] = {"remote_url": f"mooncake://127.0.0.1:{port}?protocol=tcp"}
        if not S3.keys().isdisjoint(wanted):
            from s3_servers import BUCKET, ENVIRONMENT, s3_server

            os.environ.update(ENVIRONMENT)
            port = stack.enter_context(s3_server(str(ROOT / ".venv/bin/python")))
            for number, (name, slow) in enumerate(S3.items()):
                endpoint = f"http://127.0.0.1:{slower(port, *slow) if any(slow) else port}"
                found[name] = {"remote_url": f"s3://{BUCKET}/pool{number}?endpoint={endpoint}"}
        yield {name: found[name] for name in wanted}


def measure(
    plain: Engine, model: str, settings: dict[str, Any], rounds: int, *, in_memory: bool
) -> dict[str, dict[str, float]]:
    """Return what was measured with one tier, by kind of prompt."""
    documents = [words(TOKENS, seed) for seed in range(DOCUMENTS)]
    known = [words(DOCUMENTS * TOKENS, 100 + seed) for seed in range(rounds)]
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with Engine(model, lmc=settings, host=PoolHost) as ours:
        size = ours.do("token_bytes")["bytes"]
        for document in documents:
            ours.ask(document, {"learn": True})
        for prompt in known:
            ours.ask(prompt)
        for seed in range(rounds):
            order = [documents[(at * 3 + seed) % DOCUMENTS] for at in range(DOCUMENTS)]
            blend, spans = prompt_of(order, seed)
            for kind, prompt, wish in (("exact", known[seed], None), ("blend", blend, {"documents": spans})):
                plain.forget_prefixes()
                ours.do("forget_prefixes" if in_memory else "only_in_tier")
                alone, found = (
                    engine.serve([prompt], ANSWER, asked)["answers"][0]
                    for engine, asked in ((plain, None), (ours, wish))
                )
                loaded = sum(found["facts"].get("tokens_from", {}).values())
                rows[kind].append({
                    "speedup": alone["ttft"] / found["ttft"], "loaded": loaded / len(prompt),
                    "mib_s": loaded * size / found["ttft"] / MIB,
                })  # fmt: skip
                if kind == "blend" and "skipped_tokens" in found["facts"]:
                    rows[kind][-1]["again"] = third(plain, ours, order, seed)
                print(f"    {kind} {alone['ttft']:.2f} s, {found['ttft']:.2f} s {found['facts']}", flush=True)
            plain.pin(0)
            ours.pin(0)
    return {kind: summary(found) for kind, found in rows.items()}


def third(plain: Engine, ours: Engine, order: list[list[int]], seed: int) -> float:
    """Return the speedup of the third of three prompts of the same documents, whose order and question differ.

    Exact chunks of an earlier prompt are of no use to it. Before it, the load in the background has ended.
    """
    second, last = (prompt_of([*order[turn:], *order[:turn]], 100 * turn + seed) for turn in (1, 2))
    ours.do("forget_prefixes")
    ours.serve([second[0]], ANSWER, {"documents": second[1]})
    ours.do("promoted")
    plain.forget_prefixes()
    alone = plain.serve([last[0]], ANSWER, None)["answers"][0]
    found = ours.serve([last[0]], ANSWER, {"documents": last[1]})["answers"][0]
    print(f"    third {alone['ttft']:.2f} s, {found['ttft']:.2f} s {found['facts']}", flush=True)
    return float(alone["ttft"] / found["ttft"])


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians and means over the rounds of one kind."""
    first, *later = rows
    found = {
        "speedup": round(median(row["speedup"] for row in later), 3),
        "first": round(first["speedup"], 3),
        "loaded": round(fmean(row["loaded"] for row in later), 3),
    }
    if fast := [row["mib_s"] for row in later if row["loaded"]]:
        found["mib_s"] = round(median(fast), 1)
    if again := [row["again"] for row in later if "again" in row]:
        found["again"] = round(median(again), 3)
    return found


def main() -> None:
    arguments = parser(__doc__, "pool")
    arguments.add_argument("--model", default="smollm2", help="key of a pretrained model, or `random`")
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--only", action="append", default=[], help="a place; `s3` is all of S3")
    arguments.add_argument("--load-policy", choices=("auto", "always"), default="auto")
    options: argparse.Namespace = arguments.parse_args()
    print(machine())
    by_tier: dict[str, dict[str, dict[str, float]]] = {}
    with in_folder() as folder, tiers(options.only) as wanted:
        model = make_model(folder) if options.model == "random" else str(checkpoint(options.model))
        with Engine(model, lmc=None) as plain:
            for name, more in wanted.items():
                settings = {"load_policy": options.load_policy, "max_local_cpu_size": MEMORY, **more}
                by_tier[name] = measure(plain, model, settings, options.rounds, in_memory=name == "memory")
                print(f"{name}: {by_tier[name]}", flush=True)
    worst = min(found["speedup"] for kinds in by_tier.values() for found in kinds.values())
    result = {"bench": "pool", "worst": worst, "load_policy": options.load_policy, "by_tier": by_tier}
    closing_line(result, "pool" if options.keep and not options.only else None)


if __name__ == "__main__":
    main()
