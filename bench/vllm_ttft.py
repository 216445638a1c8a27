"""TTFT inside vLLM: 8 known documents in a new order, blended, against an engine without lmc. One thread, float32.

    python bench/vllm_ttft.py [--layers 12] [--hidden 1024]
    python bench/vllm_ttft.py --model gemma3 --tokens 480 --starts 1      a pretrained model; nothing is kept

Both engines run side by side, on one core, and are asked in turn, so that a machine that is slower for a while is
slower for both. Every prompt has an order and a question of its own: nothing but documents can be reused.
"""

import random
import statistics
from collections import defaultdict
from typing import Any

from common import closing_line, parser
from engine import Engine, in_folder, make_model, middle_of_starts, prompt_of, words

from lmc.demo.pretrained import checkpoint
from lmc.demo.random_model import machine

WAYS = (
    ("query", 0.15),
    ("query", 0.05),
    ("union", 0.15),
    ("union", 0.05),
    ("deviation", 0.15),
    ("head", 0.15),
    ("none", 0.0),
)
DOCUMENTS, TOKENS = 8, 250
FULL = "full prefill"


def main() -> None:
    arguments = parser(__doc__, "vllm_ttft")
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--hidden", type=int, default=1024)
    arguments.add_argument("--starts", type=int, default=3)
    arguments.add_argument("--repeats", type=int, default=5, help="rounds of each start")
    arguments.add_argument("--dtype", default="float32")
    arguments.add_argument("--model", help="key of a pretrained model (lmc/demo/pretrained.py)")
    arguments.add_argument("--tokens", type=int, default=TOKENS, help="of each of the 8 documents")
    options = arguments.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = defaultdict(list)  # by way, of all starts

    def measure() -> dict[str, float]:
        found = one_start(model, options.repeats, options.dtype, options.tokens)
        for way, here in found.items():
            rounds[way] += here
        full = middle(found[FULL])
        return {FULL: full, **{way: full / middle(here) for way, here in found.items() if way != FULL}}

    with in_folder() as folder:
        model = str(checkpoint(options.model)) if options.model else make_model(folder, options.layers, options.hidden)
        speed = middle_of_starts(options.starts, measure)
    name = options.model or f"{options.layers} layers of {options.hidden}"
    what = f"{name}, {options.dtype}, {rounds[FULL][0]['length']} tokens, one thread"
    print(f"{machine()}\n{what}; vLLM alone {middle(rounds[FULL]):.3f} s")
    rows = {}
    for way, found in rounds.items():
        if way == FULL:
            continue
        seconds = middle(found)
        rows[way] = {"seconds": round(seconds, 4), "speedup": round(speed[way], 2)}
        parts = {part: statistics.median(one["parts"].get(part, 0.0) for one in found) for part in found[-1]["parts"]}
        spent = ", ".join(f"{part} {value:.3f}" for part, value in sorted(parts.items(), key=lambda item: -item[1]))
        rest = seconds - sum(parts.values())
        print(f"{way:>14}  {seconds:.3f} s  {speed[way]:5.2f}x   {spent}, engine and rest {rest:.3f}")
    line = {
        "bench": "vllm_ttft",
        "full_s": round(middle(rounds[FULL]), 4),
        "query15": round(speed["query 0.15"], 2),
        "query05": round(speed["query 0.05"], 2),
        "deviation15": round(speed["deviation 0.15"], 2),
    }
    usual = not options.model and options.tokens == TOKENS
    closing_line(line, "vllm_ttft" if options.keep and usual else None, also={"rows": rows})


def one_start(model: str, repeats: int, dtype: str, tokens: int) -> dict[str, list[dict[str, Any]]]:
    """What the answers to `repeats` prompts said and took, by way, with engines that are started for it."""
    plain, ours = Engine(model, lmc=None, dtype=dtype), Engine(model, lmc={}, dtype=dtype)
    documents = [words(tokens, i) for i in range(DOCUMENTS)]
    for document in documents:
        ours.ask(document, {"learn": True})
    order, found = random.Random(0), defaultdict(list)
    for seed in range(repeats + 1):
        prompt, spans = prompt_of(order.sample(documents, DOCUMENTS), seed)
        plain.forget_prefixes()
        found[FULL].append(plain.ask(prompt) | {"length": len(prompt)})
        for strategy, ratio in WAYS:
            ours.forget_prefixes()
            answer = ours.ask(prompt, {"documents": spans, "strategy": strategy, "ratio": ratio})
            assert answer["facts"]["reused_tokens"] == DOCUMENTS * tokens
            found[f"{strategy} {ratio}"].append(answer)
        for engine in (plain, ours):
            engine.pin(0)
    plain.close()
    ours.close()
    return {way: rounds[1:] for way, rounds in found.items()}  # the first round warms up


def middle(found: list[dict[str, Any]]) -> float:
    """Median seconds."""
    return statistics.median(one["seconds"] for one in found)


if __name__ == "__main__":
    main()
