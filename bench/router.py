"""All routing policies before simulated engines, side by side: what is reused, and how long the first token takes.

    python bench/router.py [--requests 16000] [--keep]

The engines all blend, whatever the policy is, and learn what they meet. An engine's memory holds an eighth of the
documents. `pooled` is what one memory of all engines together would reuse, which no policy can exceed.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import mean, quantiles

from common import closing_line, parser
from router_sim import Arrival, Fleet, Outcome, chat, rag, simulate

from lmc.router.policies import POLICIES, make
from lmc.router.policy import Candidate, Policy

PREFIX = ("prefix_hash_trie", "cache_aware", "chwbl", "block_hash", "approx_lru", "simhash")  # see beginnings only
LEFT_OUT = ("precise",)  # needs engines that publish events
PER_SECOND = 40.0  # requests
DEATH, WARM = 0.7, 0.4  # shares of the trace: when an engine loses its memory, and what is not counted before
WINDOW = 400  # requests over which a hit rate is taken: ten seconds
DECISIONS = 2000  # requests whose choices are timed


def run(name: str, arrivals: Sequence[Arrival], fleet: Fleet, **more: float) -> Outcome:
    """Return the outcome of a policy."""
    return simulate(policy_of(name, fleet), arrivals, fleet, **more)


def policy_of(name: str, fleet: Fleet) -> Policy:
    """Return a policy that knows how much an engine keeps, if it asks for that."""
    return make(name, **({"cache_tokens": fleet.memory} if name == "documents" else {}))


def recovery(arrivals: Sequence[Arrival], fleet: Fleet) -> dict[str, float]:
    """Return after how many seconds 95 % of the hit rate are back when one engine has lost its memory.

    It cannot be faster than the engine learns again: what it had takes the engine memory / rate seconds to compute.
    """
    shares = run("documents", arrivals, fleet, warm=WARM, dies=DEATH).shares
    at = int((DEATH - WARM) * len(arrivals))
    before = mean(shares[at - 5 * WINDOW : at])
    after = next(n for n in range(at, len(shares) - WINDOW) if mean(shares[n : n + WINDOW]) >= 0.95 * before)
    lowest = min(mean(shares[n : n + WINDOW]) for n in range(at, at + 3 * WINDOW))
    return {
        "hit_rate_before": round(before, 3),
        "hit_rate_lowest": round(lowest, 3),
        "recovered_s": round((after - at) / PER_SECOND, 1),
        "learning_s": round(fleet.memory / fleet.rate, 1),
    }


def decision_times(arrivals: Sequence[Arrival], fleet: Fleet) -> dict[str, float]:
    """Return how long a choice takes, with all that the policy notes for it, among engines that are warm."""
    policy, times = policy_of("documents", fleet), []
    candidates = [Candidate(f"http://engine-{number}:8000") for number in range(fleet.engines)]
    for arrival in arrivals[-DECISIONS:]:
        began = time.perf_counter()
        policy.sent(arrival.request, policy.choose(arrival.request, candidates).engine)
        times.append(1e3 * (time.perf_counter() - began))
    cuts = quantiles(times, n=100)
    return {"decision_p50_ms": round(cuts[49], 3), "decision_p99_ms": round(cuts[98], 3)}


def traces(requests: int) -> dict[str, tuple[list[Arrival], Fleet]]:
    """Return the traces by name, and the engines for each."""
    return {
        "independent documents": (list(rag(requests=requests, per_second=PER_SECOND)), Fleet()),
        "documents by topic": (list(rag(requests=requests, per_second=PER_SECOND, topics=100)), Fleet()),
        "chat": (list(chat(requests=requests, per_second=PER_SECOND)), Fleet()),
    }


def compared(
    traced: Mapping[str, tuple[list[Arrival], Fleet]], policies: Sequence[str]
) -> dict[str, dict[str, Outcome]]:
    """Run all policies over all traces, and print a line for each."""
    found: dict[str, dict[str, Outcome]] = {}
    for trace, (arrivals, fleet) in traced.items():
        print(f"\n{trace}: {len(arrivals)} requests, {fleet.engines} engines")
        print(
            f"{'policy':18} {'documents reused':>16} {'tokens reused':>14} {'mean TTFT ms':>13} {'max/mean load':>14}"
        )
        found[trace] = {}
        for name in ("pooled", *policies):
            pooled = name == "pooled"
            chosen = Fleet(pooled=True) if pooled else fleet
            outcome = run("least_loaded" if pooled else name, arrivals, chosen)
            found[trace][name] = outcome
            print(
                f"{name:18} {outcome.document_share:16.3f} {mean(outcome.reused):14.0f} "
                f"{1e3 * mean(outcome.ttft):13.1f} {outcome.max_over_mean_load:14.2f}",
                flush=True,
            )
    return found


def main() -> None:
    asked = parser(__doc__, "router")
    asked.add_argument("--requests", type=int, default=16_000, help="of each trace")
    options = asked.parse_args()
    policies = [name for name in POLICIES if name not in LEFT_OUT]
    traced = traces(options.requests)
    found = compared(traced, policies)
    topical, single, talk = (found[name] for name in ("documents by topic", "independent documents", "chat"))

    def of_prefixes(outcomes: dict[str, Outcome]) -> tuple[float, float]:
        return max(outcomes[name].document_share for name in PREFIX), min(mean(outcomes[name].ttft) for name in PREFIX)

    line = {"bench": "router"}
    for suffix, outcomes in (("", topical), ("_independent", single)):
        ours, (shares, ttft) = outcomes["documents"], of_prefixes(outcomes)
        line |= {
            f"reused_vs_pooled{suffix}": round(ours.document_share / outcomes["pooled"].document_share, 3),
            f"reused_vs_best_prefix{suffix}": round(ours.document_share / shares, 3),
            f"ttft_vs_best_prefix{suffix}": round(mean(ours.ttft) / ttft, 3),
            f"max_over_mean_load{suffix}": round(ours.max_over_mean_load, 3),
        }
    line["chat_reused_vs_cache_aware"] = round(mean(talk["documents"].reused) / mean(talk["cache_aware"].reused), 3)
    line["chat_ttft_vs_cache_aware"] = round(mean(talk["documents"].ttft) / mean(talk["cache_aware"].ttft), 3)
    arrivals, fleet = traced["documents by topic"]
    line |= recovery(arrivals, fleet) | decision_times(arrivals, Fleet(engines=64))
    also = {
        trace: {
            name: {
                "document_share": round(one.document_share, 3), "reused_tokens": round(mean(one.reused)),
                "ttft_ms": round(1e3 * mean(one.ttft), 1), "max_over_mean_load": round(one.max_over_mean_load, 2),
            }
            for name, one in outcomes.items()
        }
        for trace, outcomes in found.items()
    }  # fmt: skip
    closing_line(line, "router" if options.keep else None, {"policies": also})


if __name__ == "__main__":
    main()
