"""Real questions over real documents on a pretrained model (SmolLM2-135M-Instruct), in every way.

    python bench/questions.py [--limit 40] [--resume FILE]

The documents and questions are the demo's: passages of a fixed size without overlap, the six that BM25 finds, in an
order of each prompt, in the chat template. What is measured of each way, as a mean over the questions:

    right       the answer begins with an accepted one, both without case, punctuation and article
    agreement   how many of the first 16 tokens of full prefill's greedy answer come before the first that differs
    first       whether the first token is full prefill's
    KL          KL(full ‖ way) over the tokens of full prefill's own answer, which are given (teacher forcing)
    charged     the share of the reused tokens that was computed anyway

Each question is a line in the file of `--resume`, and a question that has a line is not asked again.
"""

import json
import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from common import closing_line, parser

from lmc.blend.strategies import BLIND_REUSE, RecomputePolicy
from lmc.config import Settings
from lmc.connectors.transformers import CachedModel
from lmc.connectors.transformers.continuation import divergence, greedy_answer, log_probabilities
from lmc.demo import REAL
from lmc.demo.pretrained import smollm2
from lmc.demo.questions import Example, Prompts, read_collection
from lmc.demo.random_model import machine
from lmc.demo.run import begins, common

TOKENS = 16
SEED = 1


def policies(settings: Settings) -> dict[str, RecomputePolicy]:
    """Return the ways by name: blind reuse, and the settings' own policy and others at some ratios."""
    default = settings.blend_strategy
    return {
        "blind": BLIND_REUSE,
        **{f"{default} {ratio}": RecomputePolicy.of(settings, ratio=ratio) for ratio in (0.05, 0.15, 0.3)},
        "deviation 0.15": RecomputePolicy.of(settings, "deviation", 0.15),
    }


class Bench:
    """Asks one question in every way."""

    def __init__(self, cached: CachedModel, tokenizer: Any, ways: dict[str, RecomputePolicy]) -> None:
        self._cached, self._tokenizer, self._ways = cached, tokenizer, ways

    def measure(self, example: Example) -> dict[str, Any]:
        """Return what was measured, by way."""
        prompt = example.prompt
        done = self._cached.prefill(prompt, "full")
        full = greedy_answer(self._cached, prompt, done, TOKENS)
        wanted = log_probabilities(self._cached, prompt, done, full)
        row: dict[str, Any] = {"full": {"said": full, **self._judged(full, example)}}
        for name, policy in self._ways.items():
            done = self._cached.prefill(prompt, "blend", policy=policy)
            found = log_probabilities(self._cached, prompt, done, full)
            same = common(found.argmax(-1).tolist(), full)
            said = full if same == len(full) else greedy_answer(self._cached, prompt, done, TOKENS)
            row[name] = {
                "said": said,
                **self._judged(said, example),
                "agreement": same / len(full),
                "first": same > 0,
                "kl": divergence(wanted, found),
                "charged": done.report.charged_budget,
            }
        return row

    def _judged(self, said: list[int], example: Example) -> dict[str, Any]:
        text = self._tokenizer.decode(said, skip_special_tokens=True)
        return {"text": text, "right": begins(text, *example.accepted)}


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return means over questions by way; accuracies also for each kind of question."""
    found = {}
    for name in rows[0]["ways"]:
        ways = [row["ways"][name] for row in rows]
        kinds = defaultdict(list)
        for row, way in zip(rows, ways, strict=True):
            kinds[row["kind"]].append(way["right"])
        numbers = {key: round(fmean(way[key] for way in ways), 4) for key in ways[0] if key not in ("said", "text")}
        found[name] = numbers | {f"right, {kind}": round(fmean(hits), 4) for kind, hits in kinds.items()}
    return found


def main() -> None:
    arguments = parser(__doc__, "questions")
    arguments.add_argument("--limit", type=int, help="ask only so many of the questions, drawn at random")
    arguments.add_argument("--resume", type=Path, default=Path(".demo/questions.jsonl"), help="a line a question")
    options = arguments.parse_args()
    settings = Settings(enable_blending=True, blend_min_tokens=0, max_local_cpu_size=1.0, load_policy="always")
    collection = read_collection(REAL / "documents", REAL / "questions.json")
    asked = random.Random(SEED).sample(collection.questions, len(collection.questions))[: options.limit]
    options.resume.parent.mkdir(parents=True, exist_ok=True)
    lines = options.resume.read_text().splitlines() if options.resume.exists() else []
    rows = {row["question"]: row for row in map(json.loads, lines)}
    print(
        f"{machine()}\n{len(asked)} questions, {sum(q.question in rows for q in asked)} of them from {options.resume}"
    )
    cached, tokenizer = CachedModel.load(smollm2(), settings)
    with cached, options.resume.open("a") as file:
        prompts = Prompts(collection, tokenizer, settings.blend_special_str)
        bench = Bench(cached, tokenizer, policies(settings))
        for question in asked:
            if question.question in rows:
                continue
            example = prompts.example(question, f"{SEED} {question.question}")
            cached.learn_documents(example.prompt)
            row = {"question": question.question, "kind": question.kind, "tokens": len(example.prompt)}
            rows[question.question] = row | {"ways": bench.measure(example)}
            print(json.dumps(rows[question.question]), file=file, flush=True)
    kept = [rows[question.question] for question in asked]
    found = summary(kept)
    for name, numbers in found.items():
        print(f"{name:>15}  " + "  ".join(f"{key} {value:.3f}" for key, value in numbers.items()))
    result = {
        "bench": "questions",
        "questions": len(kept),
        "right": {name: way["right"] for name, way in found.items()},
    }
    closing_line(result, "questions" if options.keep else None, {"ways": found})


if __name__ == "__main__":
    main()
