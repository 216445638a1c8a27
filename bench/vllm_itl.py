"""What a running request feels while a prompt is blended: its worst gap between two tokens, against vLLM's own chunked prefill.

    python bench/vllm_itl.py

The same prompt (8 known documents in a new order, 2064 tokens) arrives while another request decodes, at 256 tokens a step. Two
numbers count: the worst gap during the blend over the worst gap during chunked prefill, and the blend's TTFT over that of the
same blend in one piece (an engine whose steps take the whole prompt), alone.
"""

import random
import statistics

from common import closing_line, parser
from engine import Engine, in_folder, make_model, prompt_of, words

from lmc.demo import machine

DOCUMENTS, TOKENS, STEP = 8, 250, 256


def main() -> None:
    arguments = parser(__doc__, "vllm_itl")
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--strategy", default="union")
    arguments.add_argument("--ratio", type=float, default=0.15)
    options = arguments.parse_args()
    with in_folder() as folder:
        model = make_model(folder)
        sliced = Engine(model, lmc={}, max_num_batched_tokens=STEP)
        whole = Engine(model, lmc={})
    documents = [words(TOKENS, i) for i in range(DOCUMENTS)]
    for document in documents:
        sliced.ask(document, {"learn": True})
        whole.ask(document, {"learn": True})
    order, running = random.Random(0), words(40, 99)
    wishes = {"strategy": options.strategy, "ratio": options.ratio}
    plain, blend, at_once = [], [], []
    for seed in range(options.repeats + 1):  # the first round warms up
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
    sliced.close()
    whole.close()

    def middle(found: list[dict[str, float]], name: str) -> float:
        return statistics.median(one[name] for one in found[1:])

    gaps, ttfts = (middle(plain, "gap"), middle(blend, "gap")), (middle(plain, "ttft"), middle(blend, "ttft"))
    unsliced = middle(at_once, "ttft")
    print(
        f"{machine()}\n{len(prompt)} tokens beside a running request, {STEP} tokens a step, {options.strategy} {options.ratio}, one thread"
    )
    print(f"chunked prefill      worst gap {gaps[0]:.3f} s   TTFT {ttfts[0]:.3f} s")
    print(f"blend in slices      worst gap {gaps[1]:.3f} s   TTFT {ttfts[1]:.3f} s")
    print(f"blend in one piece   worst gap {middle(at_once, 'gap'):.3f} s   TTFT {unsliced:.3f} s")
    line = {
        "bench": "vllm_itl",
        "gap_ratio": round(gaps[1] / gaps[0], 3),
        "ttft_over_unsliced": round(ttfts[1] / unsliced, 3),
        "ttft_over_prefill": round(ttfts[1] / ttfts[0], 3),
    }
    closing_line(line, "vllm_itl" if options.keep else None)


if __name__ == "__main__":
    main()
