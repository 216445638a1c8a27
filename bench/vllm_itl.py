"""What a running request feels while a prompt is blended: its worst gap between two tokens, against vLLM's own chunked
prefill.

    python bench/vllm_itl.py

The same prompt (8 known documents in a new order, 2064 tokens) arrives while another request decodes, at 256 tokens a
step. Two numbers count: the worst gap during the blend over the worst gap during chunked prefill, and the blend's TTFT
over that of the same blend in one piece (an engine whose steps take the whole prompt), alone.
"""

import random
import statistics
from typing import Any

from common import closing_line, parser
from engine import Engine, in_folder, make_model, middle_of_starts, prompt_of, words

from lmc.demo.random_model import machine

DOCUMENTS, TOKENS, STEP = 8, 250, 256
RATIOS = ("gap_ratio", "ttft_over_unsliced", "ttft_over_prefill")


def main() -> None:
    arguments = parser(__doc__, "vllm_itl")
    arguments.add_argument("--starts", type=int, default=3)
    arguments.add_argument("--repeats", type=int, default=5, help="rounds of each start")
    arguments.add_argument("--strategy", default="union")
    arguments.add_argument("--ratio", type=float, default=0.15)
    options = arguments.parse_args()
    wishes = {"strategy": options.strategy, "ratio": options.ratio}
    with in_folder() as folder:
        model = make_model(folder)
        ratios = middle_of_starts(options.starts, lambda: measure(model, options.repeats, wishes))
    print(
        f"{machine()}\na prompt beside a running request, {STEP} tokens a step, "
        f"{options.strategy} {options.ratio}, one thread"
    )
    line = {"bench": "vllm_itl", **{name: round(ratios[name], 3) for name in RATIOS}}
    closing_line(line, "vllm_itl" if options.keep else None)


def measure(model: str, repeats: int, wishes: dict[str, Any]) -> dict[str, float]:
    """Seconds and their ratios, with engines that are started for it."""
    sliced, whole = Engine(model, lmc={}, max_num_batched_tokens=STEP), Engine(model, lmc={})
    documents = [words(TOKENS, i) for i in range(DOCUMENTS)]
    for document in documents:
        whole.ask(document, {"learn": True})
    order, running = random.Random(0), words(40, 99)
    plain, blend, at_once = [], [], []
    for seed in range(repeats + 1):  # the first round warms up
        prompt, spans = prompt_of(order.sample(documents, DOCUMENTS), seed)
        asked = {"documents": spans, **wishes}
        sliced.forget_prefixes()
        plain.append(sliced.beside(running, prompt, {"blend": False}))
        sliced.forget_everything()
        for document in documents:
            sliced.ask(document, {"learn": True})
        sliced.forget_prefixes()
        blend.append(sliced.beside(running, prompt, asked))
        whole.forget_prefixes()
        at_once.append(whole.beside(running, prompt, asked))
        for engine in (sliced, whole):
            engine.pin(0)
    sliced.close()
    whole.close()

    def middle(found: list[dict[str, float]], name: str) -> float:
        return statistics.median(one[name] for one in found[1:])

    seconds = {
        f"{name} of {way}": middle(found, name)
        for way, found in (("prefill", plain), ("blend", blend), ("blend in one piece", at_once))
        for name in ("gap", "ttft")
    }
    ratios = (
        seconds["gap of blend"] / seconds["gap of prefill"],
        seconds["ttft of blend"] / seconds["ttft of blend in one piece"],
        seconds["ttft of blend"] / seconds["ttft of prefill"],
    )
    return seconds | dict(zip(RATIOS, ratios, strict=True))


if __name__ == "__main__":
    main()
