"""What the connector costs when there is nothing to hit: throughput and TTFT with lmc, storing included, over vLLM alone.

    python bench/vllm_overhead.py

Batches of new prompts, prefill and decode, go to two engines in turn: one without a connector, one with lmc that stores
everything into memory and onto disk. Medians over rounds side by side.
"""

import statistics
import tempfile

from common import closing_line, parser
from engine import Engine, in_folder, make_model, words

from lmc.demo import machine

PROMPTS, TOKENS, NEW = 8, 512, 32


def main() -> None:
    arguments = parser(__doc__, "vllm_overhead")
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--memory", action="store_true", help="no disk tier")
    options = arguments.parse_args()
    with in_folder() as folder, tempfile.TemporaryDirectory(prefix="lmc-bench-") as disk:
        model = make_model(folder)
        settings = {"max_local_cpu_size": 1.0}
        if not options.memory:
            settings |= {"local_disk": disk, "max_local_disk_size": 4.0}
        plain, ours = Engine(model, lmc=None), Engine(model, lmc=settings)
        ratios = {"throughput_ratio": [], "ttft_ratio": []}
        for number in range(options.repeats + 1):  # the first round warms up
            prompts = [words(TOKENS, 1000 * number + i) for i in range(PROMPTS)]
            engines = [plain, ours] if number % 2 else [ours, plain]
            found = {id(engine): engine.many(prompts, NEW) for engine in engines}
            alone, beside = found[id(plain)], found[id(ours)]
            if number:
                ratios["throughput_ratio"].append(alone["seconds"] / beside["seconds"])
                ratios["ttft_ratio"].append(statistics.mean(alone["ttft"]) / statistics.mean(beside["ttft"]))
                print(f"vLLM alone {alone['seconds']:.3f} s, with lmc {beside['seconds']:.3f} s")
        stored = ours.numbers()["stored_tokens"]
        plain.close()
        ours.close()
    print(
        f"{machine()}\n{PROMPTS} prompts of {TOKENS} tokens a round, {NEW} tokens each; {stored} tokens stored; one thread"
    )
    line = {"bench": "vllm_overhead", **{name: round(statistics.median(values), 3) for name, values in ratios.items()}}
    closing_line(line, "vllm_overhead" if options.keep else None)


if __name__ == "__main__":
    main()
