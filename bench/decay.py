"""1000 prompts of known documents in novel orders: whether speed lasts, and whether the store grows.

python bench/decay.py
"""

import random
import statistics

from common import closing_line, parser, prompt_of

from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo.random_model import SEPARATOR, machine, random_llama, random_tokens

PROMPTS, DOCUMENTS, TOKENS = 1000, 12, 128


def main() -> None:
    arguments = parser(__doc__, "decay")
    options = arguments.parse_args()
    settings = Settings(enable_blending=True, max_local_cpu_size=0.25, chunk_size=64)
    with CachedModel(random_llama(6, 256), settings, SEPARATOR) as cached:
        documents = [random_tokens(TOKENS, i) for i in range(DOCUMENTS)]
        for document in documents:
            cached.learn(document)
        cached.prefill(prompt_of(documents, range(6)))
        before = cached.engine.store.known_keys()
        order, seconds = random.Random(0), []
        for number in range(PROMPTS):
            prompt = prompt_of(documents, order.sample(range(DOCUMENTS), 6), seed=number)
            seconds.append(cached.prefill(prompt).report.seconds)
        new = len(cached.engine.store.known_keys() - before)
    first, last = statistics.median(seconds[:100]), statistics.median(seconds[-100:])
    hundreds = [statistics.median(seconds[i : i + 100]) * 1e3 for i in range(0, PROMPTS, 100)]
    print(f"{machine()}\nmedian ms of each hundred: {', '.join(f'{ms:.1f}' for ms in hundreds)}")
    line = {"bench": "decay", "prompts": PROMPTS, "first_over_last": round(first / last, 3), "new_chunks": new}
    closing_line(line, "decay" if options.keep else None)


if __name__ == "__main__":
    main()
