"""All routing policies before simulated engines, side by side: what is reused, and how long the first token takes.

    python bench/router.py [--requests 16000] [--keep]

The engines all blend, whatever the policy is, and learn what they meet. An engine's memory holds an eighth of the
documents. `pooled` is what one cache of all engines together would reuse, which no policy can exceed. `documents` knows
what it has sent and what answers say; `documents, told` also hears of each document that comes to an engine or leaves
it. Two real engines with a real router are in `bench/router_vllm.py`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from statistics import quantiles
from typing import Any, NamedTuple

from common import closing_line, parser
from router_sim import Clock, Death, Fleet, Outcome, simulate
from router_traces import Arrival, Traffic, chat, rag

from lmc.router.policies import POLICIES, make, policy_class
from lmc.router.policies.base import Policy
from lmc.router.policy_types import Candidate

PREFIX = ("prefix_hash_trie", "cache_aware", "chwbl", "block_hash", "approx_lru", "simhash")  # see prefixes only
LEFT_OUT = ("precise",)  # needs engines that publish events of blocks
POOLED, DOCUMENTS, TOLD = "pooled", "documents", "documents, told"
PER_ENGINE = 5.0  # requests a second
TOPICS = 100
SIZES = (2, 32, 64)  # numbers of engines in addition to 8
BURST = 3.0  # times as many requests as usual
DOWN = 30.0  # seconds until an engine that has died is back, where it is not back at once
DEATH, WARM = 0.7, 0.4  # shares of the trace: when an engine dies, and what is not counted before
WINDOW = 10.0  # seconds over which a hit rate is taken
DECISIONS = 2000  # requests whose choices are timed


class Trace(NamedTuple):
    """Requests, and the engines for them."""

    arrivals: Sequence[Arrival]
    fleet: Fleet


def traces(requests: int) -> dict[str, Trace]:
    """Return the traces by name."""
    usual, bursts = Traffic(per_second=8 * PER_ENGINE), Traffic(per_second=8 * PER_ENGINE, burst=BURST)
    independent, in_bursts = list(rag(requests, usual)), list(rag(requests, bursts, topics=TOPICS))
    disks = Fleet(disk=4 * Fleet().memory)
    found = {
        "independent documents": Trace(independent, Fleet()),
        "documents by topic": Trace(list(rag(requests, usual, topics=TOPICS)), Fleet()),
        "by topic, with bursts": Trace(in_bursts, Fleet()),
        "by topic, with bursts and disks": Trace(in_bursts, disks),
        "independent documents, with disks": Trace(independent, disks),
        "chat": Trace(list(chat(requests, usual)), Fleet()),
    }
    for engines in SIZES:
        traffic = Traffic(per_second=engines * PER_ENGINE)
        found[f"by topic, {engines} engines"] = Trace(
            list(rag(requests, traffic, topics=TOPICS)), Fleet(engines=engines)
        )
    return found


def run(name: str, trace: Trace, **more: Any) -> Outcome:
    """Return the outcome of a policy."""
    fleet = replace(trace.fleet, pooled=name == POOLED, events=name == TOLD)
    clock = Clock()
    return simulate(policy_of(name, fleet, clock), trace.arrivals, fleet, clock, **more)


def policy_of(name: str, fleet: Fleet, clock: Callable[[], float]) -> Policy:
    """Return a policy. One that asks how much an engine keeps, for the time or for a seed is given it."""
    kind = {POOLED: "least_loaded", TOLD: DOCUMENTS}.get(name, name)
    given = {"cache_tokens": max(fleet.memory, fleet.disk), "clock": clock, "seed": 0}
    wanted = signature(policy_class(kind)).parameters
    return make(kind, **{option: value for option, value in given.items() if option in wanted})


def compared(traced: Mapping[str, Trace], policies: Sequence[str]) -> dict[str, dict[str, Outcome]]:
    """Run all policies over all traces, and print a line for each."""
    found: dict[str, dict[str, Outcome]] = {}
    for name, trace in traced.items():
        print(f"\n{name}: {len(trace.arrivals)} requests, {trace.fleet.engines} engines")
        print(
            f"{'policy':18} {'documents reused':>16} {'tokens reused':>14} {'mean TTFT ms':>13} {'max/mean load':>14}"
        )
        found[name] = {}
        for policy in (POOLED, *policies):
            outcome = found[name][policy] = run(policy, trace)
            print(
                f"{policy:18} {outcome.document_share:16.3f} {outcome.reused:14.0f} {1e3 * outcome.ttft:13.1f} "
                f"{outcome.max_over_mean_load:14.2f}",
                flush=True,
            )
    return found


def line_of(outcomes: Mapping[str, Outcome], suffix: str = "", ours: str = DOCUMENTS) -> dict[str, float]:
    """Return how `documents` compares with one cache of all engines, and with the best policies by prefixes."""
    one = outcomes[ours]
    best_share = max(outcomes[name].document_share for name in PREFIX)
    best_ttft = min(outcomes[name].ttft for name in PREFIX)
    return {
        f"reused_vs_pooled{suffix}": round(one.document_share / outcomes[POOLED].document_share, 3),
        f"reused_vs_best_prefix{suffix}": round(one.document_share / best_share, 3),
        f"ttft_vs_best_prefix{suffix}": round(one.ttft / best_ttft, 3),
        f"max_over_mean_load{suffix}": round(one.max_over_mean_load, 3),
    }


def recovery(trace: Trace, down: float, suffix: str = "") -> dict[str, float]:
    """Return what becomes of the hit rate when one engine dies and is back, with nothing, after `down` seconds.

    `recovered_s` is when it is below 95 % of the former for the last time, in windows of ten seconds. Documents can be
    learned again only when they are asked for: `could_recover_s` is the same of a rate that has only the first requests
    for lost documents as misses.
    """
    at = trace.arrivals[int(DEATH * len(trace.arrivals))].at
    outcome = run(DOCUMENTS, trace, warm=WARM, death=Death(at, down))

    def between(begin: float, end: float) -> Outcome:
        return Outcome([one for one in outcome.answered if begin <= one.at < end])

    before = between(at - 5 * WINDOW, at)
    steps = [step / 5 for step in range(int(5 * (trace.arrivals[-1].at - WINDOW - at)))]
    windows = [between(at + step, at + step + WINDOW) for step in steps]
    rates = [one.document_share for one in windows]
    best = [before.document_share - one.lost_share for one in windows]

    def recovered(rates: Sequence[float]) -> float:
        low = [step + 0.2 for step, rate in zip(steps, rates, strict=True) if rate < 0.95 * before.document_share]
        return round(max(low, default=0.0), 1)

    return {
        f"hit_rate_before{suffix}": round(before.document_share, 3),
        f"hit_rate_lowest{suffix}": round(min(rates), 3),
        f"recovered_s{suffix}": recovered(rates),
        f"could_recover_s{suffix}": recovered(best),
        f"ttft_behind_vs_before{suffix}": round(between(at, at + DOWN).ttft / before.ttft, 3),
        f"answers_broken{suffix}": outcome.broken,
    }


def decision_times(trace: Trace, engines: int) -> dict[str, float]:
    """Return how long a choice takes, with all that the policy notes for it, when it has sent all requests before."""
    policy, times = policy_of(DOCUMENTS, trace.fleet, time.monotonic), []
    candidates = [Candidate(f"http://engine-{number}:8000") for number in range(engines)]
    for arrival in trace.arrivals:
        began = time.perf_counter()
        policy.sent(arrival.request, policy.choose(arrival.request, candidates).engine)
        times.append(1e3 * (time.perf_counter() - began))
    cuts = quantiles(times[-DECISIONS:], n=100)
    return {"decision_p50_ms": round(cuts[49], 3), "decision_p99_ms": round(cuts[98], 3)}


def main() -> None:
    asked = parser(__doc__, "router")
    asked.add_argument("--requests", type=int, default=16_000, help="of each trace")
    options = asked.parse_args()
    policies = [*(name for name in POLICIES if name not in LEFT_OUT), TOLD]
    traced = traces(options.requests)
    found = compared(traced, policies)
    topical, talk = found["documents by topic"], found["chat"]
    line = {"bench": "router", **line_of(topical), **line_of(found["independent documents"], "_independent")}
    line |= line_of(found["by topic, with bursts and disks"], "_bursts_disks_told", TOLD)
    line["chat_reused_vs_cache_aware"] = round(talk[DOCUMENTS].reused / talk["cache_aware"].reused, 3)
    line["chat_ttft_vs_cache_aware"] = round(talk[DOCUMENTS].ttft / talk["cache_aware"].ttft, 3)
    trace = traced["documents by topic"]
    line |= recovery(trace, 0.0) | recovery(trace, DOWN, "_away")
    line["learning_s"] = round(trace.fleet.memory / trace.fleet.rate, 1)  # of all that an engine has, by one engine
    fewer = Trace(trace.arrivals, replace(trace.fleet, engines=trace.fleet.engines - 1))
    line["hit_rate_of_the_others"] = round(run(DOCUMENTS, fewer).document_share, 3)
    line |= decision_times(trace, max(SIZES))
    also = {
        trace: {
            name: {
                "document_share": round(one.document_share, 3), "reused_tokens": round(one.reused),
                "ttft_ms": round(1e3 * one.ttft, 1), "max_over_mean_load": round(one.max_over_mean_load, 2),
            }
            for name, one in outcomes.items()
        }
        for trace, outcomes in found.items()
    }  # fmt: skip
    closing_line(line, "router" if options.keep else None, {"policies": also})


if __name__ == "__main__":
    main()
