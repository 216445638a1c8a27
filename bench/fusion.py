"""How much of the gap to full prefill a blend closes on a pretrained model (SmolLM2-135M-Instruct).

    python bench/fusion.py [--prompts 12] [--documents 6] [--fillers 7] [--held-out] [--tasks …] [--ratios …]

Prompts are those of `tasks.py` in the model's chat template. KL(full ‖ way) is averaged over the tokens of the right
answer, which are given (teacher forcing), and over the prompts of a task:

    gap closed = 1 − KL(full ‖ way) / KL(full ‖ blind reuse)

Blind reuse is that of documents learned alone. A way is written as its strategy, +sink or +primer if documents are
learned behind that, +shift with the correction, and its ratio. agreement is the share of prompts whose next token is
full prefill's, and right the share whose answer is. The interval holds 90 % of 1000 resamplings of the prompts.
"""

import random
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean

from common import closing_line, parser
from tasks import DEVELOPMENT, HELD_OUT, MAIN, TASKS, Draw, Item

from lmc.blend.learn_prefix import learn_prefix
from lmc.blend.strategies import BLIND_REUSE, RecomputePolicy
from lmc.config import Settings
from lmc.connectors.transformers import CachedModel
from lmc.connectors.transformers.continuation import divergence, log_probabilities
from lmc.demo.pretrained import smollm2
from lmc.demo.questions import PromptBuilder
from lmc.demo.random_model import machine

BLIND, RATIOS = "blind", "0.05,0.1,0.15,0.3"
# Strategy, what documents are learned behind, and the correction. The last one is the default.
WAYS = (
    ("query", "none", "none"), ("head", "none", "none"), ("deviation", "none", "none"), ("union", "none", "none"),
    ("none", "sink", "none"), ("none", "primer", "none"),
    ("union", "sink", "shift"), ("union", "primer", "none"), ("union", "primer", "shift"),
)  # fmt: skip
SYSTEM = "You answer questions from the documents that you are given."


@dataclass(slots=True)
class Seen:
    """What was measured of one way, a number for each prompt."""

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    charged: list[float] = field(default_factory=list)


class Fusion:
    """Measures ways on prompts of one model."""

    def __init__(self, models: dict[str, CachedModel], builder: PromptBuilder, ratios: list[float]) -> None:
        """`models` is one model by what its documents are learned behind."""
        self._models, self._builder = models, builder
        self._ways = {BLIND: (models["none"], BLIND_REUSE)}
        for strategy, behind, correction in WAYS:
            for ratio in ratios if strategy != "none" else [0.0]:
                added = "".join(f"+{name}" for name in (behind, correction) if name != "none")
                policy = RecomputePolicy(strategy=strategy, ratios=(ratio,), correction=correction)
                self._ways[f"{strategy}{added} {ratio:g}"] = (models[behind], policy)

    def measure(self, item: Item, seen: dict[str, Seen]) -> int:
        """Ask one prompt in every way, and note the results; return its length."""
        encode = self._builder.encode
        prompt = self._builder.prompt([encode(document) for document in item.documents], item.question, item.lead)
        answer = encode(" " + item.answer)
        for cached in self._models.values():
            cached.learn_documents(prompt)
        alone = self._models["none"]
        full = log_probabilities(alone, prompt, alone.prefill(prompt, "full"), answer)
        seen["full"].right.append(full.argmax(-1).tolist() == answer)
        for name, (cached, policy) in self._ways.items():
            done = cached.prefill(prompt, "blend", policy=policy)
            found = log_probabilities(cached, prompt, done, answer)
            seen[name].kl.append(divergence(full, found))
            seen[name].agrees.append(bool(found[0].argmax() == full[0].argmax()))
            seen[name].right.append(found.argmax(-1).tolist() == answer)
            seen[name].charged.append(done.report.charged_budget)
        for cached in self._models.values():
            cached.engine.forget_all()
        return len(prompt)


def closed(way: list[float], blind: list[float]) -> float:
    """Return how much of the gap is closed, from the KL of each prompt."""
    return 1 - sum(way) / sum(blind)


def interval(way: list[float], blind: list[float]) -> tuple[float, float]:
    """Return the 5th and the 95th percentile of the gap closed, over resampled prompts."""
    draw, numbers = random.Random(0), range(len(way))
    samples = [draw.choices(numbers, k=len(way)) for _ in range(1000)]
    found = sorted(closed([way[i] for i in sample], [blind[i] for i in sample]) for sample in samples)
    return found[50], found[949]


def main() -> None:
    arguments = parser(__doc__, "fusion")
    arguments.add_argument("--prompts", type=int, default=12, help="of each task")
    arguments.add_argument("--documents", type=int, default=6, help="of each prompt")
    arguments.add_argument("--fillers", type=int, default=7, help="sentences of each document that say nothing")
    arguments.add_argument("--held-out", action="store_true", help="other words than those of the development prompts")
    arguments.add_argument("--tasks", default=",".join(TASKS))
    arguments.add_argument("--ratios", default=RATIOS)
    options = arguments.parse_args()
    words, names = (HELD_OUT if options.held_out else DEVELOPMENT), options.tasks.split(",")
    print(machine())
    rows, means = [], defaultdict(list)
    settings = Settings(enable_blending=True, blend_calibration="ignore", blend_min_tokens=0, max_local_cpu_size=1.0)
    with ExitStack() as stack:
        cached, tokenizer = CachedModel.load(smollm2(), settings)
        models = {"primer": stack.enter_context(cached)}
        for behind in ("sink", "none"):
            prefix = learn_prefix(tokenizer, settings.model_copy(update={"blend_learn_prefix": behind}))
            model = CachedModel(cached.model, settings, cached.separators, learn_prefix=prefix)
            models[behind] = stack.enter_context(model)
        builder = PromptBuilder(tokenizer, SYSTEM, settings.blend_special_str)
        fusion = Fusion(models, builder, [float(ratio) for ratio in options.ratios.split(",")])
        for task in names:
            seen: dict[str, Seen] = defaultdict(Seen)
            lengths = []
            for number in range(options.prompts):
                draw = Draw(words, f"{task} {number}", options.documents, options.fillers)
                lengths.append(fusion.measure(TASKS[task](draw), seen))
            full, blind = seen.pop("full").right, seen[BLIND].kl
            print(f"{task}: {sum(lengths) / len(lengths):.0f} tokens, full prefill is right in {fmean(full):.0%}")
            for name, way in seen.items():
                low, high = interval(way.kl, blind)
                row = {
                    "task": task,
                    "way": name,
                    "kl": round(fmean(way.kl), 4),
                    "closed": round(closed(way.kl, blind), 3),
                    "low": round(low, 3),
                    "high": round(high, 3),
                    "agreement": round(fmean(way.agrees), 3),
                    "right": round(fmean(way.right), 3),
                    "charged": round(fmean(way.charged), 3),
                }
                rows.append(row)
                if task in MAIN:
                    means[name].append(row["closed"])
                print(
                    f"  {name:21s} KL {row['kl']:6.3f}  closed {row['closed']:6.1%} [{low:6.1%}, {high:6.1%}]  "
                    f"agreement {row['agreement']:4.0%}  right {row['right']:4.0%}  charged {row['charged']:.3f}"
                )
    result = {
        "bench": "fusion",
        "prompts": options.prompts,
        "held_out": options.held_out,
        "closed": {name: round(fmean(found), 3) for name, found in means.items()},  # mean over the main tasks
    }
    closing_line(result, "fusion" if options.keep else None, {"rows": rows})


if __name__ == "__main__":
    main()
