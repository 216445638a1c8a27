"""What the codec saves of KV, what it costs, and on which tiers that pays: ratio, encode and decode on one thread.

    python bench/codec.py [--tokens 256] [--repeats 5]

Reading a record of R raw bytes takes R/B from a tier of B bytes/s; encoded it takes ratio·R/B + R/decode, one after the
other in one thread. So it pays below B = (1 − ratio)·decode; a record that does not get smaller is kept raw, and
pays nowhere. The entropy of the planes' bytes is shown next to the ratio: what a coder of single bytes could reach.

The KV is that of the shipped model for its documents, that of a model with random weights, and normally distributed
numbers with a scale for each channel. As in a store, a chunk has a part for each layer. Parts are read from memory that
is in no cache of the processor, and written to such memory.
"""

import mmap
import time
from collections.abc import Callable, Iterator

import torch
from common import closing_line, parser

from lmc.config.settings import Settings
from lmc.connectors.transformers.hf import load, prefilled, rows_of
from lmc.demo import SHIPPED
from lmc.demo.questions import Prompts, read_collection
from lmc.demo.random_model import machine, random_llama, random_tokens
from lmc.shapes import aligned
from lmc.storage.tiers.codec import decode_part, encode_part

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TIERS = (0.5, 1.0, 2.0)  # GB/s
COLD = 1 << 28  # bytes, more than a processor's caches hold
Part = torch.Tensor  # [K, T, H, D] of one layer


def parts_of(model: object, tokens: list[int]) -> list[Part]:
    return [torch.stack(rows).clone() for rows in rows_of(prefilled(model, tokens))]


def shipped(tokens: int) -> list[Part]:
    """Return the documents one after the other, as in a prompt, in chunks of the same size as the other sources'."""
    model, tokenizer = load(SHIPPED / "model")
    collection = read_collection(SHIPPED / "documents", SHIPPED / "questions.json")
    documents = Prompts(collection, tokenizer, Settings().blend_special_str).tokens.values()
    ids = [token for document in documents for token in document]
    return [part for start in range(0, 4 * tokens, tokens) for part in parts_of(model, ids[start : start + tokens])]


def random_weights(tokens: int) -> list[Part]:
    return parts_of(random_llama(12, 768), random_tokens(tokens, 0))


def normals(tokens: int) -> list[Part]:
    """[K, T, 8, 128]: every channel has its own scale, spread over e^±1."""
    torch.manual_seed(0)
    return [torch.randn(2, tokens, 8, 128) * torch.exp(torch.randn(2, 1, 8, 128)) for _ in range(4)]


SOURCES = {"shipped model": shipped, "random weights": random_weights, "scaled normals": normals}


def memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def as_stored(part: Part, dtype: torch.dtype) -> memoryview:
    raw = part.to(dtype).contiguous().view(torch.uint8).flatten()
    view = memory(aligned(len(raw)))
    torch.frombuffer(view, dtype=torch.uint8)[: len(raw)] = raw
    return view


def side_by_side(pieces: list[memoryview | bytes]) -> memoryview:
    size = sum(map(len, pieces))
    view = memory(aligned(size))
    view[:size] = b"".join(pieces)
    return view


def copies(views: list[memoryview], times: int) -> list[memoryview]:
    """Return `times` copies of all views, one after the other as in a slab."""
    whole, found = memory(times * sum(map(len, views))), []
    for view in times * views:
        found.append(whole[: len(view)])
        found[-1][:] = view
        whole = whole[len(view) :]
    return found


def best(repeats: int, run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs: the machine may be busy with something else."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def entropy(views: list[memoryview], planes: int) -> float:
    """Bits per bit that a coder of single bytes needs, each plane of each part with its own table."""
    bits = total = 0.0
    for view in views:
        for plane in torch.frombuffer(view, dtype=torch.uint8).view(-1, planes).T:
            counts = torch.bincount(plane.long(), minlength=256).double()
            share = counts[counts > 0] / len(plane)
            bits += float(-(share * share.log2()).sum()) * len(plane)
            total += 8 * len(plane)
    return bits / total


def measured(views: list[memoryview], planes: int, repeats: int) -> dict[str, float]:
    raw = sum(map(len, views))
    encoded = [side_by_side(encode_part(view, planes)) for view in views]
    ratio, times = sum(map(len, encoded)) / raw, -(-COLD // raw)
    empty = [memory(len(view)) for view in views]
    sources, parts, targets = (copies(some, times) for some in (views, encoded, empty))

    def encode() -> None:
        for source in sources:
            encode_part(source, planes)

    def decode() -> None:
        for part, target in zip(parts, targets, strict=True):
            decode_part(part, target, planes)

    decode()
    assert all(target == source for target, source in zip(targets, sources, strict=True))
    decode_rate = times * raw / best(repeats, decode)
    row = {
        "ratio": min(1.0, ratio),
        "entropy": entropy(views, planes),
        "encode_mb_s": times * raw / best(repeats, encode) / 1e6,
        "decode_mb_s": decode_rate / 1e6,
        "pays_below_gb_s": max(0.0, 1 - ratio) * decode_rate / 1e9,
    }
    # Raw bytes per second that a reader gets from a tier, by the tier's stored bytes per second.
    row |= {f"from_{tier}_gb_s": 1 / (ratio / tier + 1e9 / decode_rate) if ratio < 1 else tier for tier in TIERS}
    return {name: round(value, 3 if value < 100 else 0) for name, value in row.items()}


def rows(tokens: int, repeats: int) -> Iterator[dict[str, object]]:
    for source, make in SOURCES.items():
        parts = make(tokens)
        for name, dtype in DTYPES.items():
            views = [as_stored(part, dtype) for part in parts]
            found = measured(views, dtype.itemsize, repeats)
            yield {"source": source, "dtype": name, "codec": "planes", "part_bytes": len(views[0]), **found}


def main() -> None:
    arguments = parser(__doc__, "codec")
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    print(f"{machine()}\nencode and decode in MB/s of raw bytes; the last three: raw GB/s out of a tier of so many")
    print("source           type  ratio  entropy  encode  decode  pays below    " + "  ".join(f"{t:4}" for t in TIERS))
    table = []
    for row in rows(options.tokens, options.repeats):
        table.append(row)
        gained = "  ".join(f"{row[f'from_{tier}_gb_s']:4.2f}" for tier in TIERS)
        print(
            f"{row['source']:15}  {row['dtype']:4}  {row['ratio']:5.3f}  {row['entropy']:7.3f}"
            f"  {row['encode_mb_s']:6.0f}  {row['decode_mb_s']:6.0f}  {row['pays_below_gb_s']:5.2f} GB/s    {gained}"
        )
    line: dict[str, object] = {"bench": "codec"}
    for row in table:
        if row["source"] == "shipped model" and row["dtype"] == "bf16":
            for name in ("ratio", "encode_mb_s", "decode_mb_s", "pays_below_gb_s"):
                line[f"{row['codec']}_bf16_{name}"] = row[name]
    closing_line(line, "codec" if options.keep else None, {"tokens": options.tokens, "rows": table})


if __name__ == "__main__":
    main()
