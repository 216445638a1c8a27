"""TTFT of a blended prompt against the model's own full prefill: 8 known documents in a new order, one thread.

    python bench/blend_ttft.py [--layers 12] [--tokens 2048] [--strategy union] [--ratio 0.15]

The ceiling is 1/f, f = c/L + r·(1 − c/L) + q/N: what computing only this share of the tokens could give if everything
else were free (c: layers run in full for the evidence, 1.15 for a check at layer 1 and 0 for the question's; r: ratio;
q of N tokens are always fresh).
"""

import random
import statistics
from collections import Counter

from common import closing_line, parser, prompt_of

from lmc.blend.strategies import RecomputePolicy
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo.random_model import SEPARATOR, machine, random_llama, random_tokens

CHECK_COST = {"deviation": 1.15}


def main() -> None:
    arguments = parser(__doc__, "blend_ttft")
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--tokens", type=int, default=2048)
    arguments.add_argument("--documents", type=int, default=8)
    arguments.add_argument("--strategy", default="union")
    arguments.add_argument("--ratio", type=float, default=0.15)
    arguments.add_argument("--repeats", type=int, default=9)
    options = arguments.parse_args()
    settings = Settings(enable_blending=True, max_local_cpu_size=2.0)
    with CachedModel(random_llama(options.layers, 768), settings, SEPARATOR) as cached:
        size = options.tokens // options.documents - 4
        documents = [random_tokens(size, i) for i in range(options.documents)]
        for document in documents:
            cached.learn(document)
        order = random.Random(0)
        prompts = [
            prompt_of(documents, order.sample(range(options.documents), options.documents), seed=i) for i in range(16)
        ]
        results = {}
        cached.prefill(prompts[-1], "blend")  # learns the system text
        chosen = (options.strategy, options.ratio)
        ways = dict.fromkeys([chosen, ("query", 0.15), (options.strategy, 0.05), ("deviation", 0.15), ("none", 0.0)])
        fulls, reports = [], {way: [] for way in ways}
        # Side by side: a machine that is slower for a while is slower for all of them. The first round warms up.
        for i in range(options.repeats + 1):
            fulls.append(cached.prefill(prompts[i], "full").report.seconds)
            for strategy, ratio in ways:
                policy = RecomputePolicy(strategy=strategy, ratio=ratio)
                reports[strategy, ratio].append(cached.prefill(prompts[i], "blend", policy=policy).report)
        full = statistics.median(fulls[1:])
        print(f"{machine()}\n{options.layers} layers, {len(prompts[0])} tokens, one thread; full prefill {full:.3f} s")
        for (strategy, ratio), found in reports.items():
            seconds, report = statistics.median(report.seconds for report in found[1:]), found[-1]
            share = CHECK_COST.get(strategy, 0.0) / options.layers
            fresh = (report.tokens - report.exact - report.reused) / report.tokens
            f = share + ratio * (1 - share) + fresh
            ceiling = 1 / f
            results[strategy, ratio] = {"blend_s": seconds, "speedup": full / seconds, "ceiling": ceiling}
            computed = Counter(report.computed).most_common()
            print(
                f"{strategy:>10} {ratio:4.2f}  {seconds:.3f} s  {full / seconds:5.2f} of {ceiling:5.2f}"
                f" ({full / seconds / ceiling:.0%})"
                f"  charged {report.charged_budget:.3f}  tokens a layer {computed}"
            )
        best = results[options.strategy, options.ratio]
        line = {
            "bench": "blend_ttft", "layers": options.layers, "tokens": len(prompts[0]), "ratio": options.ratio,
            "strategy": options.strategy,
            "full_s": round(full, 4), "blend_s": round(best["blend_s"], 4), "speedup": round(best["speedup"], 2),
            "ceiling": round(best["ceiling"], 2), "fraction": round(best["speedup"] / best["ceiling"], 3),
        }  # fmt: skip
        kept = {f"{strategy} {ratio}": row for (strategy, ratio), row in results.items()}
        closing_line(line, "blend_ttft" if options.keep else None, also={"rows": kept})


if __name__ == "__main__":
    main()
