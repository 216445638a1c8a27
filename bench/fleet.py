"""How many engines, how much memory, disk and pool do 10,000 or a million documents need? Simulated engines.

    python bench/fleet.py [--requests 4000] [--keep]

The engines are those of `bench/router_sim.py`: about a model of 8 billion weights on one H100, which computes 20,000
tokens a second, with KV of 128 KiB a token. The router's policy `documents` hears of all documents. Prompts have six
documents of 300 tokens of a topic; topics and documents are asked for by Zipf's law (0.6). The first 40 % of the
requests are not counted. Engines learn documents in idle time, which takes nothing from requests. An engine without a
cache serves `PLAIN` requests a second, and half of that is sent. For each fleet, corpus and provision:

    memory, disk, pool    share of the documents' tokens that came from there; the rest was computed
    ttft_ms               mean TTFT; `without`: the same traffic without a cache
    died_ms               mean TTFT in the 10 seconds after one engine has died, which is back after 30 seconds
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from common import closing_line, parser
from router_sim import DISK, MEMORY, POOL, Clock, Death, Fleet, Outcome, simulate
from router_traces import Arrival, Traffic, rag

from lmc.router.policies import make
from lmc.shapes import GIB, KIB

ENGINES, DOCUMENTS = (4, 16, 64), (10_000, 1_000_000)
TOKEN = 128 * KIB  # bytes of KV of a token
PROMPT = 6 * 300 + 50  # tokens, about
PLAIN = Fleet().rate / PROMPT  # requests a second that one engine computes
LOAD, WARM, DEATH = 0.5, 0.4, 0.7
AFTER, DOWN = 10.0, 30.0  # seconds
TOPICS = 100


def tokens(gib: float) -> float:
    """Return how many tokens' KV take this many GiB."""
    return gib * GIB / TOKEN


# What each engine has: GiB of memory and of disk, and GiB a second that it reads from a pool with all documents.
SMALL = Fleet(memory=tokens(16))
WITH_DISK = replace(SMALL, disk=tokens(1024), disk_rate=tokens(6))
PROVISIONS: Mapping[str, Fleet] = {
    "memory 16 GiB": SMALL,
    "memory 64 GiB": Fleet(memory=tokens(64)),
    "memory 16 GiB, disk 1 TiB": WITH_DISK,
    "memory 16 GiB, disk 1 TiB, pool 2 GiB/s": replace(WITH_DISK, pool_rate=tokens(2)),
    "memory 16 GiB, disk 1 TiB, pool 5 GiB/s": replace(WITH_DISK, pool_rate=tokens(5)),
    "memory 16 GiB, pool 20 GiB/s": replace(SMALL, pool_rate=tokens(20)),
}
NOTHING = Fleet(gpu=1.0, memory=1.0)


def run(arrivals: Sequence[Arrival], fleet: Fleet, death: Death | None = None) -> Outcome:
    """Return the outcome of a fleet whose engines report their documents."""
    clock = Clock()
    policy = make("documents", cache_tokens=max(fleet.memory, fleet.disk), clock=clock)
    return simulate(policy, arrivals, replace(fleet, events=True, idle_learning=True), clock, warm=WARM, death=death)


def row(arrivals: Sequence[Arrival], fleet: Fleet) -> dict[str, float]:
    """Return what is measured of a fleet."""
    usual, at = run(arrivals, fleet), arrivals[int(DEATH * len(arrivals))].at
    after = [one.ttft for one in run(arrivals, fleet, Death(at, DOWN)).answered if at <= one.at < at + AFTER]
    shares = {"memory": MEMORY, "disk": DISK, "pool": POOL}
    return {
        **{name: round(usual.share_of(place), 3) for name, place in shares.items()},
        "ttft_ms": round(1e3 * usual.ttft, 1),
        "died_ms": round(1e3 * mean(after), 1) if after else 0.0,
    }


def main() -> None:
    arguments = parser(__doc__, "fleet")
    arguments.add_argument("--requests", type=int, default=4000, help="for 16 engines; in proportion for others")
    options = arguments.parse_args()
    found: dict[str, Any] = {}
    for engines in ENGINES:
        for documents in DOCUMENTS:
            traffic = Traffic(per_second=LOAD * engines * PLAIN)
            count = options.requests * engines // 16
            arrivals = list(rag(count, traffic, documents=documents, topics=TOPICS))
            rows = {name: row(arrivals, replace(fleet, engines=engines)) for name, fleet in PROVISIONS.items()}
            without = run(arrivals, replace(NOTHING, engines=engines))
            found[f"{engines} engines, {documents} documents"] = rows | {"without": round(1e3 * without.ttft, 1)}
            print(f"{engines} engines, {documents} documents: {1e3 * without.ttft:.1f} ms without a cache", flush=True)
            for name, one in rows.items():
                print(f"    {name:40} {one}", flush=True)
    closing_line({"bench": "fleet", "by_fleet": found}, "fleet" if options.keep else None)


if __name__ == "__main__":
    main()
