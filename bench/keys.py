"""Chunk keys of 50,000 tokens from a Python list.

python bench/keys.py
"""

import time

from common import closing_line, parser

from lmc.demo.random_model import machine
from lmc.keys import exact_keys

TOKENS, CHUNK, REPEATS = 50_000, 256, 200


def main() -> None:
    arguments = parser(__doc__, "keys")
    options = arguments.parse_args()
    tokens = [(i * 2_654_435_761) % 151_936 for i in range(TOKENS)]
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        keys = exact_keys(bytes(32), tokens, CHUNK)
        seconds.append(time.perf_counter() - started)
    seconds.sort()
    print(
        f"{machine()}\n{len(keys)} keys; median {seconds[REPEATS // 2] * 1e3:.3f} ms, "
        f"p95 {seconds[int(REPEATS * 0.95)] * 1e3:.3f} ms"
    )
    line = {"bench": "keys", "tokens": TOKENS, "ms": round(seconds[REPEATS // 2] * 1e3, 3)}
    closing_line(line, "keys" if options.keep else None)


if __name__ == "__main__":
    main()
