"""What the connector costs when there is nothing to hit: throughput and TTFT with lmc, storing included, over vLLM
alone.

    python bench/vllm_overhead.py [--memory]

Batches of new prompts, prefill and decode, go to three engines in turn: one with lmc that stores everything into memory
and onto disk, and two without a connector, as one engine is up to 5 % faster than the next of its kind from one start
to another: ratios are over the mean of the two, their own ratio is shown next to them, and all are started
several times. The threads that compute share a core, as only one of them has something to do; lmc's threads have the
others.
"""

import os
import random
import statistics
import tempfile

from common import closing_line, parser
from engine import Engine, in_folder, make_model, middle_of_starts, words

from lmc.demo.random_model import machine

PROMPTS, TOKENS, NEW = 8, 512, 32
SETTINGS = {"max_local_cpu_size": 0.5}  # so that old chunks have to go
# The C library gives large tensors back to the kernel after every operation and has them zeroed again, a sixth of a
# prefill and most of its noise; vLLM asks its users for another allocator.
os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def rounds(engines: list[Engine], repeats: int, draw: random.Random) -> list[list[dict[str, float]]]:
    """Seconds, and seconds to first tokens, of each engine in each round."""
    found = []
    for number in range(repeats + 1):
        prompts = [words(TOKENS, draw.randrange(10**9)) for _ in range(PROMPTS)]
        answers = {}
        for engine in draw.sample(engines, len(engines)):
            said = engine.many(prompts, NEW)
            answers[engine] = {"throughput": said["seconds"], "ttft": statistics.mean(said["ttft"])}
        if number:
            found.append([answers[engine] for engine in engines])
        else:  # the first one warms up; all threads of lmc are there then
            for engine in engines:
                engine.pin(0)
    return found


def main() -> None:
    arguments = parser(__doc__, "vllm_overhead")
    arguments.add_argument("--starts", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=3, help="rounds of each start")
    arguments.add_argument("--memory", action="store_true", help="no disk tier")
    options = arguments.parse_args()
    draw = random.Random(0)
    with in_folder() as folder:
        model = make_model(folder)

        def measure() -> dict[str, float]:
            with tempfile.TemporaryDirectory(prefix="lmc-bench-") as disk:
                on_disk = {} if options.memory else {"local_disk": disk, "max_local_disk_size": 4.0}
                engines = [Engine(model, lmc=lmc) for lmc in (None, SETTINGS | on_disk, None)]
                found = rounds(engines, options.repeats, draw)
                stored = engines[1].numbers()["stored_tokens"]
                for engine in engines:
                    engine.close()
            assert stored >= (options.repeats + 1) * PROMPTS * TOKENS, "not all was stored"
            ratios = {}
            for name in ("throughput", "ttft"):
                both = [(statistics.mean([one[name], other[name]]) / ours[name]) for one, ours, other in found]
                ratios[f"{name}_ratio"] = statistics.median(both)
                ratios[f"{name}_of_vllm_twice"] = statistics.median(one[name] / other[name] for one, _, other in found)
            return ratios

        ratios = middle_of_starts(options.starts, measure)
    print(f"{machine()}\n{PROMPTS} prompts of {TOKENS} tokens a round, {NEW} tokens each, all stored; one thread")
    line = {"bench": "vllm_overhead", **{name: round(value, 3) for name, value in ratios.items()}}
    closing_line(line, "vllm_overhead" if options.keep else None)


if __name__ == "__main__":
    main()
