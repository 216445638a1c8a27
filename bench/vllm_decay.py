"""300 prompts of known documents in novel orders: whether speed lasts inside vLLM, and whether the store grows.

    python bench/vllm_decay.py

The slab holds the documents and the system text once, and nothing else.
"""

import random
import statistics

from common import closing_line, parser
from engine import Engine, in_folder, make_model, prompt_of, words

from lmc.demo.random_model import machine

PROMPTS, DOCUMENTS, USED, TOKENS, CHUNK = 300, 12, 6, 128, 128


def main() -> None:
    arguments = parser(__doc__, "vllm_decay")
    options = arguments.parse_args()
    with in_folder() as folder:
        model = make_model(folder, layers=6, hidden=512)
        size = (
            6 * CHUNK * 2 * 4 * 64 * 4
        )  # bytes of a chunk: layers, tokens, key and value, KV heads, head dim, float32
        slab = (DOCUMENTS + 1.5) * size / 2**30  # the documents, and the block of the system text
        engine = Engine(model, lmc={"chunk_size": CHUNK, "max_local_cpu_size": slab})
    documents = [words(TOKENS, i) for i in range(DOCUMENTS)]
    for document in documents:
        engine.ask(document, {"learn": True})
    prompt, spans = prompt_of(documents[:USED], PROMPTS)
    engine.ask(prompt, {"documents": spans})  # keeps the system text
    engine.forget_prefixes()
    before = engine.numbers()["stored_chunks"]
    order, seconds = random.Random(0), []
    for seed in range(PROMPTS):
        prompt, spans = prompt_of(order.sample(documents, USED), seed)
        found = engine.ask(prompt, {"documents": spans})
        assert found["facts"]["reused_tokens"] == USED * TOKENS, found["facts"]
        seconds.append(found["seconds"])
    numbers = engine.numbers()
    engine.close()
    first, last = statistics.median(seconds[:50]), statistics.median(seconds[-50:])
    fifties = [statistics.median(seconds[i : i + 50]) * 1e3 for i in range(0, PROMPTS, 50)]
    print(f"{machine()}\nmedian ms of each fifty: {', '.join(f'{ms:.1f}' for ms in fifties)}")
    line = {
        "bench": "vllm_decay",
        "first_over_last": round(first / last, 3),
        "new_chunks": numbers["stored_chunks"] - before,
    }
    closing_line(line, "vllm_decay" if options.keep else None)


if __name__ == "__main__":
    main()
