"""TTFT inside vLLM: 8 known documents in a new order, blended, against an engine without lmc. One thread, float32.

    python bench/vllm_ttft.py [--layers 12] [--hidden 1024]

Both engines run side by side and are asked in turn, so that a machine that is slower for a while is slower for both. Every
prompt has an order and a question of its own: nothing but documents can be reused.
"""

import random
import statistics

from common import closing_line, parser
from engine import Engine, in_folder, make_model, prompt_of, words

from lmc.demo import machine

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


def main() -> None:
    arguments = parser(__doc__, "vllm_ttft")
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--hidden", type=int, default=1024)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--dtype", default="float32")
    options = arguments.parse_args()
    with in_folder() as folder:
        model = make_model(folder, options.layers, options.hidden)
        plain = Engine(model, lmc=None, dtype=options.dtype)
        ours = Engine(model, lmc={}, dtype=options.dtype)
    documents = [words(TOKENS, i) for i in range(DOCUMENTS)]
    for document in documents:
        ours.ask(document, {"learn": True})
    order, fulls = random.Random(0), []
    blends = {way: [] for way in WAYS}
    length = 0
    for seed in range(options.repeats + 1):  # the first round warms up
        prompt, spans = prompt_of(order.sample(documents, DOCUMENTS), seed)
        length = len(prompt)
        plain.forget_prefixes()
        fulls.append(plain.ask(prompt)["seconds"])
        for (strategy, ratio), found in blends.items():
            ours.forget_prefixes()
            found.append(ours.ask(prompt, {"documents": spans, "strategy": strategy, "ratio": ratio}))
            assert found[-1]["facts"]["reused_tokens"] == DOCUMENTS * TOKENS
    plain.close()
    ours.close()
    full = statistics.median(fulls[1:])
    print(
        f"{machine()}\n{options.layers} layers of {options.hidden}, {options.dtype}, {length} tokens, one thread; vLLM alone {full:.3f} s"
    )
    speed, rows = {}, {}
    for (strategy, ratio), found in blends.items():
        seconds = statistics.median(one["seconds"] for one in found[1:])
        parts = {
            part: statistics.median(one["parts"].get(part, 0.0) for one in found[1:]) for part in found[-1]["parts"]
        }
        speed[strategy, ratio] = full / seconds
        rows[f"{strategy} {ratio}"] = {"seconds": round(seconds, 4), "speedup": round(full / seconds, 2)}
        spent = ", ".join(f"{part} {value:.3f}" for part, value in sorted(parts.items(), key=lambda item: -item[1]))
        rest = seconds - sum(parts.values())
        print(
            f"{strategy:>10} {ratio:4.2f}  {seconds:.3f} s  {full / seconds:5.2f}x   {spent}, engine and rest {rest:.3f}"
        )
    line = {
        "bench": "vllm_ttft",
        "full_s": round(full, 4),
        "query15": round(speed["query", 0.15], 2),
        "query05": round(speed["query", 0.05], 2),
        "deviation15": round(speed["deviation", 0.15], 2),
    }
    closing_line(line, "vllm_ttft" if options.keep else None, also={"rows": rows})


if __name__ == "__main__":
    main()
