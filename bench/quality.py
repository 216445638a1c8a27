"""Accuracy of every strategy at every ratio on the shipped model, by class of question, with the charged budget and the
gap that it closes.

    python bench/quality.py [--orders 2]

gap closed = (accuracy − blind reuse) / (full prefill − blind reuse). Every question is asked in several shuffled
orders.
"""

from collections import defaultdict

from common import closing_line, parser

from lmc.blend.strategies import RecomputePolicy
from lmc.config import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo import SHIPPED
from lmc.demo.questions import Example, Prompts, read_collection
from lmc.demo.random_model import machine
from lmc.demo.run import answers, learn_all

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
STRATEGIES = ("query", "deviation", "head", "union", "random")


def accuracy(
    cached: CachedModel, tokenizer, examples: list[Example], how: str, policy: RecomputePolicy | None
) -> tuple[dict[str, float], float]:  # type: ignore[no-untyped-def]
    """Share of right answers by kind, and the mean charged budget."""
    right, charged = defaultdict(list), 0.0
    for example in examples:
        done = cached.prefill(example.prompt, how, policy=policy)  # type: ignore[arg-type]
        right[example.question.kind].append(answers(cached, done, example.prompt, example.answer, tokenizer))
        charged += done.report.charged_budget / len(examples)
    return {kind: sum(hits) / len(hits) for kind, hits in right.items()}, charged


def main() -> None:
    arguments = parser(__doc__, "quality")
    arguments.add_argument("--orders", type=int, default=2)
    options = arguments.parse_args()
    settings = Settings(enable_blending=True, blend_calibration="ignore", max_local_cpu_size=0.5)
    collection = read_collection(SHIPPED / "documents", SHIPPED / "questions.json")
    cached, tokenizer = CachedModel.load(SHIPPED / "model", settings)
    rows = []
    with cached:
        prompts = Prompts(collection, tokenizer, settings.blend_special_str)
        learn_all(cached, list(prompts.tokens.values()))
        examples = [
            prompts.example(q, order * 7919 + i)
            for order in range(options.orders)
            for i, q in enumerate(collection.questions)
        ]
        count = defaultdict(int)
        for example in examples:
            count[example.question.kind] += 1
        full, _ = accuracy(cached, tokenizer, examples, "full", None)
        blind, _ = accuracy(cached, tokenizer, examples, "reuse", None)
        print(f"{machine()}\nquestions {dict(count)}, {options.orders} orders each")
        print(f"full  {shown(full)}\nblind {shown(blind)}")
        kinds = [kind for kind in full if full[kind] - blind[kind] > 0.1]
        for strategy in STRATEGIES:
            for ratio in RATIOS:
                found, charged = accuracy(
                    cached, tokenizer, examples, "blend", RecomputePolicy(strategy=strategy, ratios=(ratio,))
                )
                closed = {kind: (found[kind] - blind[kind]) / (full[kind] - blind[kind]) for kind in kinds}
                rows.append(
                    {
                        "strategy": strategy,
                        "ratio": ratio,
                        "charged": round(charged, 3),
                        "accuracy": found,
                        "gap_closed": closed,
                    }
                )
                print(
                    f"{strategy:>10} {ratio:4.2f}  charged {charged:.3f}  {shown(found)}   gap closed {shown(closed)}"
                )
    default = next(
        row
        for row in rows
        if row["strategy"] == settings.blend_strategy and row["ratio"] == settings.blend_recompute_ratios[0]
    )
    line = {
        "bench": "quality", "full": full, "blind": blind, "default": default["strategy"], "ratio": default["ratio"],
        "charged": default["charged"], "accuracy": default["accuracy"], "gap_closed": default["gap_closed"],
    }  # fmt: skip
    also = {"orders": options.orders, "questions": count, "rows": rows}
    closing_line(line, "quality" if options.keep else None, also)


def shown(shares: dict[str, float]) -> str:
    """`self 99.1 %  referring 97.0 %`."""
    return "  ".join(f"{kind} {share:6.1%}" for kind, share in sorted(shares.items(), reverse=True))


if __name__ == "__main__":
    main()
