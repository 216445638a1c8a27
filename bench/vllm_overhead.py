"""What the connector costs when there is nothing to hit: throughput and TTFT with lmc, storing included, over vLLM
alone.

    python bench/vllm_overhead.py [--memory] [--known 10000]

Batches of new prompts, prefill and decode, go to four engines in turn. Two have lmc, which stores everything into
memory and onto disk, searches each prompt for `--known` documents, and with `repeated` also for what earlier prompts
had. Two have no connector, as one engine is up to 5 % faster than the next of its kind from one start to another:
ratios are over the mean of the two, their own ratio is shown next to them, and all are started several times. The
threads that compute share a core, as only one of them has something to do; lmc's threads have the others.
"""

import os
import random
import statistics
import tempfile

from common import closing_line, parser
from engine import Engine, Host, in_folder, make_model, middle_of_starts, words

from lmc.demo import SHIPPED
from lmc.demo.random_model import machine
from lmc.keys import RecordKind

PROMPTS, TOKENS, NEW = 8, 512, 32
DOCUMENT = 400  # tokens of a known document
SETTINGS = {"max_local_cpu_size": 0.5}  # so that old chunks have to go
FINDS = "known", "repeated"  # the engines with lmc, by `blend_find`
TOKENIZER = {"skip_tokenizer_init": False, "tokenizer": str(SHIPPED / "model")}  # Without one, nothing is `repeated`.
# The C library gives large tensors back to the kernel after every operation and has them zeroed again, a sixth of a
# prefill and most of its noise; vLLM asks its users for another allocator.
os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class Knows(Host):
    """An engine that knows documents, none of which is in a prompt."""

    def know(self, count: int) -> dict[str, float]:
        scheduler = self.core.scheduler.connector._scheduler
        engine = scheduler.engine
        assert scheduler._repeated.on == (engine.settings.blend_find == "repeated"), "the model is not blended"
        namespace = engine.namespace(RecordKind.DOCUMENT)
        for number in range(count):
            tokens = words(DOCUMENT, -1 - number)
            engine.known.note(namespace, tokens, engine.document_keys(tokens, namespace))
        engine.known.prepare()
        return {}


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
    arguments.add_argument("--known", type=int, default=10_000, help=f"known documents of {DOCUMENT} tokens")
    options = arguments.parse_args()
    draw = random.Random(0)
    with in_folder() as folder:
        model = make_model(folder)

        def start(find: str, disk: str) -> Engine:
            on_disk = {} if options.memory else {"local_disk": f"{disk}/{find}", "max_local_disk_size": 4.0}
            engine = Engine(model, lmc=SETTINGS | on_disk | {"blend_find": find}, host=Knows, **TOKENIZER)
            engine.do("know", options.known)
            return engine

        def measure() -> dict[str, float]:
            with tempfile.TemporaryDirectory(prefix="lmc-bench-") as disk:
                plain = [Engine(model, lmc=None, **TOKENIZER) for _ in range(2)]
                ours = [start(find, disk) for find in FINDS]
                found = rounds([*plain, *ours], options.repeats, draw)
                counted = [engine.numbers() for engine in ours]
                for engine in (*plain, *ours):
                    engine.close()
            for numbers in counted:
                assert numbers["stored_tokens"] >= (options.repeats + 1) * PROMPTS * TOKENS, "not all was stored"
                assert not numbers.get("blends"), "something was found"
            ratios = {}
            for name in ("throughput", "ttft"):
                for at, find in enumerate(FINDS, start=2):
                    each = [statistics.mean([one[name] for one in row[:2]]) / row[at][name] for row in found]
                    ratios[f"{name}_ratio" if find == "known" else f"{name}_ratio_{find}"] = statistics.median(each)
                ratios[f"{name}_of_vllm_twice"] = statistics.median(row[0][name] / row[1][name] for row in found)
            return ratios

        ratios = middle_of_starts(options.starts, measure)
    print(
        f"{machine()}\n{PROMPTS} prompts of {TOKENS} tokens a round, {NEW} tokens each, all stored, "
        f"{options.known} documents known; one thread"
    )
    line = {
        "bench": "vllm_overhead",
        "known": options.known,
        **{name: round(value, 3) for name, value in ratios.items()},
    }
    closing_line(line, "vllm_overhead" if options.keep else None)


if __name__ == "__main__":
    main()
