"""TTFT inside vLLM with a cache server, against a store in the engine: exact hits, and blends of 8 known documents.

    python bench/vllm_serve.py [--starts 5] [--repeats 5] [--keep]

Both engines run side by side, on one core, and are asked the same prompts in turn. The server has the other core, which
the engines' client leaves to it.
"""

import random
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from common import closing_line, parser
from engine import Engine, in_folder, make_model, middle_of_starts, prompt_of, words

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from service_process import ServerProcess

DOCUMENTS, TOKENS = 8, 250
MEMORY = 2.0  # GB, of the server and of the engine with a store of its own


def one_start(model: str, repeats: int) -> dict[str, float]:
    """Return what the engine with a store of its own takes of the time of the other one, for each way."""
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder), max_local_cpu_size=MEMORY)
        own, served = Engine(model, lmc={}), Engine(model, lmc={"server": server.address})
        try:
            documents = [words(TOKENS, i) for i in range(DOCUMENTS)]
            plain = words(2000, 99)
            for engine in (own, served):
                for document in documents:
                    engine.ask(document, {"learn": True})
                engine.ask(plain)
            order, found = random.Random(0), defaultdict(list)
            for seed in range(repeats + 1):
                prompt, spans = prompt_of(order.sample(documents, DOCUMENTS), seed)
                for name, engine in (("own", own), ("served", served)):
                    engine.forget_prefixes()
                    answer = engine.ask(prompt, {"documents": spans})
                    assert answer["facts"]["reused_tokens"] == DOCUMENTS * TOKENS
                    engine.forget_prefixes()
                    exact = engine.ask(plain)
                    assert exact["facts"]["exact_tokens"] > 0.9 * len(plain)
                    if seed:  # The first round warms up.
                        found["blend", name].append(answer["seconds"])
                        found["exact", name].append(exact["seconds"])
                    engine.pin(0)
            own.close()
            served.close()
        finally:
            server.kill()
    times = {key: statistics.median(all_of) for key, all_of in found.items()}
    return {
        **{f"{way} own s": times[way, "own"] for way in ("exact", "blend")},
        **{way: times[way, "own"] / times[way, "served"] for way in ("exact", "blend")},
    }


def main() -> None:
    arguments = parser(__doc__, "vllm_serve")
    arguments.add_argument("--starts", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=5, help="rounds of each start")
    options = arguments.parse_args()
    with in_folder() as folder:
        model = make_model(folder)
        found = middle_of_starts(options.starts, lambda: one_start(model, options.repeats))
    line = {
        "bench": "vllm_serve",
        "ttft_exact": round(found["exact"], 3),
        "ttft_blend": round(found["blend"], 3),
        "own_exact_s": round(found["exact own s"], 4),
        "own_blend_s": round(found["blend own s"], 4),
    }
    print("TTFT with a cache server, as a share of the speed with a store in the engine")
    closing_line(line, "vllm_serve" if options.keep else None)


if __name__ == "__main__":
    main()
