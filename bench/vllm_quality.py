"""Real questions through vLLM: answers of vLLM alone, blind reuse and a blend, next to those with transformers; and
TTFT at about 2000 and 4000 tokens on the same pretrained weights (SmolLM2-135M-Instruct, float32, one thread).

    python bench/vllm_quality.py MODEL [--limit 20] [--rounds 3] [--beside FILE]

MODEL is the checkpoint's directory, as `lmc.demo.pretrained.smollm2` makes it. The prompts are those of the task `real`
of `bench/quality.py`, whose lines in the file of `--beside` are the answers through transformers. What is measured:

    right       share of answers that begin with an accepted one
    agreement   share of the first 16 tokens of vLLM's own full answer before the first that differs

For TTFT a prompt has more passages, in a new order every time. `exact` is lmc without blending, which finds only the
prefix that prompts share. Both engines run side by side and are asked in turn.
"""

import random
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import closing_line, parser
from engine import Engine
from quality.cases import REAL_TASK, SEED, collection_of, key_of, shuffled
from quality.measure import TOKENS
from quality.rows import Rows
from quality.ways import FULL, default

from lmc.config.settings import Settings
from lmc.demo.questions import Prompts, Question
from lmc.demo.random_model import machine
from lmc.demo.run import begins
from lmc.keys import common_prefix

WAYS: dict[str, dict[str, Any]] = {"blend": {}, "blind": {"strategy": "none"}, "exact": {"blend": False}}
THEIRS = {"full": FULL, "blend": default(Settings()).name, "blind": "none+primer 0"}  # ways of bench/quality.py
LENGTHS = 2000, 4000
ROOM = {"max_model_len": 5120, "max_num_batched_tokens": 5120, "skip_tokenizer_init": False}


class Bench:
    """Two engines, without lmc and with it, and the documents that the latter has learned."""

    def __init__(self, model: str, prompts: Prompts) -> None:
        self.plain = Engine(model, lmc=None, **ROOM)
        self.ours = Engine(model, lmc={"blend_min_tokens": 0}, **ROOM)
        self._prompts, self._learned = prompts, set[str]()

    def ask(self, prompt: list[int], names: tuple[str, ...], count: int, ways: list[str]) -> dict[str, dict[str, Any]]:
        """Ask in all ways, with nothing in the engines' own prefix caches."""
        for name in names:
            if name not in self._learned:
                self.ours.ask(self._prompts.tokens[name], {"learn": True})
                self._learned.add(name)
        self.plain.forget_prefixes()
        found = {"full": self.plain.ask(prompt, count=count)}
        for way in ways:
            self.ours.forget_prefixes()
            found[way] = self.ours.ask(prompt, WAYS[way], count=count)
        return found

    def close(self) -> None:
        """End both processes."""
        self.plain.close()
        self.ours.close()


def quality(bench: Bench, prompts: Prompts, asked: list[Question], tokenizer: Any, rows: Rows) -> dict[str, Any]:
    """Return accuracy and agreement by way, and for how many questions transformers' full answer is vLLM's."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    end = tokenizer.eos_token_id
    for question in asked:
        example = prompts.example(question, f"{SEED} {question.question}")
        answers = bench.ask(example.prompt, example.order, TOKENS, ["blend", "blind"])
        said = {way: one["tokens"] for way, one in answers.items()}  # vLLM continues after the end here
        said = {way: one[: one.index(end) + 1] if end in one else one for way, one in said.items()}
        for way, tokens in said.items():
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            found[way]["right"].append(begins(text, *example.accepted))
            found[way]["agreement"].append(common_prefix(tokens, said["full"]) / len(said["full"]))
        if theirs := rows.ways(key_of(REAL_TASK, question.kind, question.question)):
            for way, name in THEIRS.items():
                found[f"{way}, transformers"]["right"].append(theirs[name]["right"])
                found[f"{way}, transformers"]["agreement"].append(theirs[name].get("agreement", 1.0))
                found[f"{way}, vLLM = transformers"]["same"].append(said[way] == theirs[name]["said"])
        print(
            f"{question.question}  { ({way: tokenizer.decode(one).strip() for way, one in said.items()}) }", flush=True
        )
    return {way: {key: round(fmean(numbers), 4) for key, numbers in one.items()} for way, one in found.items()}


def ttft(bench: Bench, prompts: Prompts, asked: list[Question], names: list[str], rounds: int) -> dict[str, Any]:
    """Return the median seconds to the first token by length and way, and the speed-up over vLLM alone."""
    draw, found = random.Random(SEED), {}
    for length in LENGTHS:
        shuffled = draw.sample(names, len(names))
        ends = accumulate(len(prompts.tokens[name]) for name in shuffled)
        documents = shuffled[: sum(end < length for end in ends)]
        seconds: dict[str, list[float]] = defaultdict(list)
        tokens = 0
        for number in range(rounds + 1):
            order = tuple(draw.sample(documents, len(documents)))
            prompt = prompts.build(asked[number % len(asked)], order)
            answers = bench.ask(prompt, order, 1, ["blend", "exact"])
            tokens = len(prompt)
            for way, one in answers.items():
                if number:  # the first round warms up
                    seconds[way].append(one["seconds"])
        middle = {way: median(one) for way, one in seconds.items()}
        speed = {f"{way}, times": round(middle["full"] / middle[way], 2) for way in ("exact", "blend")}
        found[str(length)] = {"tokens": tokens, **{way: round(one, 3) for way, one in middle.items()}, **speed}
        print(f"about {length} tokens: {found[str(length)]}", flush=True)
    return found


def main() -> None:
    arguments = parser(__doc__, "vllm_quality")
    arguments.add_argument("model")
    arguments.add_argument("--limit", type=int, default=20, help="questions")
    arguments.add_argument("--rounds", type=int, default=3, help="prompts of each length whose TTFT is measured")
    arguments.add_argument("--beside", type=Path, default=Path(".demo/quality.jsonl"), help="from bench/quality.py")
    options = arguments.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    collection = collection_of(REAL_TASK)
    prompts = Prompts(collection, tokenizer, Settings().blend_special_str)
    asked = shuffled(collection)[: options.limit]
    print(machine())
    bench = Bench(options.model, prompts)
    speed = ttft(bench, prompts, asked, list(collection.documents), options.rounds)
    found = quality(bench, prompts, asked, tokenizer, Rows(options.beside))
    bench.close()
    for way, numbers in found.items():
        print(f"{way:>28}  " + "  ".join(f"{key} {value:.3f}" for key, value in numbers.items()))
    right = {way: one["right"] for way, one in found.items() if "right" in one}
    result = {"bench": "vllm_quality", "questions": len(asked), "right": right, "ttft": speed}
    closing_line(result, "vllm_quality" if options.keep else None, {"ways": found})


if __name__ == "__main__":
    main()
