"""Times, host clocks and traces of blends, exact hits and full prefill: 8 documents of 1,024 tokens, an 8B Llama.

    cd bench && python -m gpu.traces transformers --out FOLDER [--layers 32]
    cd bench && python -m gpu.traces vllm --out FOLDER [--eager]            # --smoke: tiny sizes on a CPU

Weights are made up. First come times without anything that slows them, then the host's clocks by part, then a trace of
each kind. FOLDER gets `traces_*.json`, which is written after each item, and the traces for Perfetto.
"""

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import parser, prompt_of

from gpu.phases import Phases
from lmc import copies
from lmc.blend import shift, staging
from lmc.blend.blender import Blender
from lmc.blend.kernels import operations

Watched = tuple[Any, str, str]  # an owner, its function, and the name of the part
ROUNDS = 6
OF_BLENDS: list[Watched] = [
    (operations, "_on", "kernel"),  # on GPUs
    (staging.Staging, "begin", "issue copies of a layer"),
    (shift.Shift, "__init__", "correction: begin"),
    (shift.Shift, "begin", "correction: rotations"),
    (shift.Shift, "_apply", "correction: apply"),
    (copies.Uploads, "send", "upload of a pass"),
    (Blender, "__init__", "blender: begin"),
    (Blender, "_choose", "choose tokens"),
    (Blender, "_shifts", "corrections: begin"),
    (Blender, "_probes", "scores: begin"),
]


class Found:
    """What was measured, which is written after each item."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._name = folder, name
        self._items: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, item: Any) -> None:
        """Add an item, and write all."""
        self._items[name] = item
        (self.folder / f"traces_{self._name}.json").write_text(json.dumps(self._items, indent=1) + "\n")

    def add_times(self, times: dict[str, list[float]]) -> None:
        """Add milliseconds of each kind; the first of each warms up."""
        for how, each in times.items():
            median = statistics.median(each[1:] or each)
            print(f"{how:24} {median:9.2f} ms   {[round(one, 2) for one in each]}", flush=True)
        self.add("times", times)


def watching(watched: Iterable[Watched]) -> Phases:
    """Return phases that watch some functions."""
    phases = Phases()
    for owner, name, part in [*OF_BLENDS, *watched]:
        phases.watch(owner, name, part)
    return phases


def milliseconds(work: Callable[[], Any]) -> float:
    """Return how long some work takes."""
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


# -- transformers ------------------------------------------------------------------------------------------------------


def in_transformers(found: Found, *, smoke: bool, layers: int) -> None:
    """Measure the transformers connector."""
    from lmc.config.settings import Settings
    from lmc.connectors.transformers import CachedModel, canvas
    from lmc.connectors.transformers import layers as decoder
    from lmc.demo.random_model import SEPARATOR, random_llama, random_tokens

    phases = watching(
        [
            (canvas.DenseCanvas, "__init__", "canvas: begin"),
            (canvas.DenseCanvas, "place", "place a layer"),
            (canvas.DenseCanvas, "_parts", "find the parts of a layer"),
            (canvas.DenseCanvas, "context", "context"),
            (canvas.DenseCanvas, "write", "write keys and values"),
            (canvas.DenseCanvas, "read", "read keys and values"),
            (decoder.DecoderLayers, "run", "a layer"),
            (CachedModel, "_plan", "plan"),
            (CachedModel, "_store_exact", "store the exact beginning"),
        ]
    )
    device, dtype = (torch.device("cpu"), torch.float32) if smoke else (torch.device("cuda"), torch.bfloat16)
    documents, tokens, hidden, heads = (2, 40, 256, 4) if smoke else (8, 1024, 4096, 32)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # so that no copy of the weights in float32 is made
    with device:
        model = random_llama(2 if smoke else layers, hidden, heads, heads // 4)
    torch.set_default_dtype(torch.float32)
    settings = Settings(
        enable_blending=True, max_local_cpu_size=0.1 if smoke else 6.0, blend_min_tokens=min(256, tokens)
    )
    with CachedModel(model, settings, SEPARATOR) as cached:
        found.add("blends", cached.blends)
        texts = [random_tokens(tokens - 16, number) for number in range(documents)]
        for text in texts:
            cached.learn(text)
        order, rounds = random.Random(0), 2 if smoke else ROUNDS
        orders = [order.sample(range(documents), documents) for _ in range(rounds + 3)]
        prompts = [prompt_of(texts, one, seed=number) for number, one in enumerate(orders)]

        def prefill(how: Any, number: int) -> Callable[[], Any]:
            return lambda: cached.prefill(prompts[number], how).logits.cpu()  # noqa: PLW0108 - not computed yet

        found.add_times(
            {
                how: [milliseconds(prefill(how, number)) for number in range(rounds)]
                for how in ("full", "blend", "reuse")
            }
        )
        found.add("clocked blend", phases.clocked("blend", prefill("blend", rounds)))
        found.add("traced blend", phases.traced("blend", prefill("blend", rounds + 1), found.folder))
        found.add("traced full", phases.traced("full prefill", prefill("full", rounds + 2), found.folder))


# -- vLLM --------------------------------------------------------------------------------------------------------------


def in_vllm(found: Found, *, smoke: bool, eager: bool) -> None:
    """Measure lmc inside vLLM, whose engine runs in this process."""
    from dataclasses import replace

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    from engine import ENVIRONMENT, words
    from engine import prompt_of as spans_of
    from engine_probe import ProbeHost

    from gpu.vllm_times import TINY, Times, options, settings, shaped

    os.environ |= ENVIRONMENT
    sizes = TINY if smoke else Times(largest_graph=8)
    sizes = replace(sizes, compiled=False) if eager else sizes
    phases = watching(_of_vllm())
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        host = ProbeHost(shaped(folder, sizes), settings(sizes), options(sizes, sizes.batch))
        found.add("seconds to start", time.perf_counter() - started)
    found.add("setup", host.setup())
    count, rounds = sizes.counts[0], 1 if smoke else ROUNDS
    documents = [words(sizes.document, number) for number in range(count)]
    prompts = [spans_of(random.Random(seed).sample(documents, count), seed) for seed in range(rounds + 3)]
    length, exact = len(prompts[0][0]), words(len(prompts[0][0]), 900)

    def full(seed: int) -> Callable[[], Any]:
        return lambda: host.ask(words(length, 500 + seed), {"blend": False}, 1)

    def blend(seed: int, **wishes: Any) -> Callable[[], Any]:
        tokens, spans = prompts[seed]
        return lambda: host.ask(tokens, {"documents": spans, "ratio": sizes.ratio, **wishes}, 1)

    def hit() -> Any:
        return host.ask(exact, {"blend": False}, 1)

    def timed(work: Callable[[], Any]) -> float:
        host.forget_prefixes()
        return milliseconds(work)

    times = {"full": [timed(full(seed)) for seed in range(rounds)]}
    for document in documents:
        host.ask(document, {"learn": True}, 1)
    times["blend"] = [timed(blend(seed)) for seed in range(rounds)]
    times["blend, none recomputed"] = [timed(blend(seed, strategy="none")) for seed in range(rounds)]
    hit()
    times["exact hit"] = [timed(hit) for _ in range(rounds)]
    found.add_times(times)
    for name, work in (("blend", blend), ("exact hit", lambda _: hit), ("full prefill", full)):
        host.forget_prefixes()
        found.add(f"clocked {name}", phases.clocked(f"vLLM: {name}", work(rounds + 1), 1))
        host.forget_prefixes()
        found.add(f"traced {name}", phases.traced(f"vLLM {name}", work(rounds + 2), found.folder))


def _of_vllm() -> list[Watched]:
    """Return the functions of the worker that are watched."""
    from lmc.connectors.vllm.worker import canvas, native, paged, stored_parts, worker

    return [
        (canvas.PagedCanvas, "__init__", "canvas: begin"),
        (canvas.PagedCanvas, "place", "place a layer"),
        (stored_parts.StoredParts, "stage", "addresses and copies of stored parts"),
        (native.NativeLayers, "run", "a layer"),
        (native.NativeLayers, "run_model", "the compiled model"),
        (native.NativeLayers, "begin", "rows of a pass"),
        (native.NativeLayers, "_metadata", "metadata of the backend"),
        (native.NativeLayers, "_context", "forward context"),
        (paged.TokenAccess, "scatter", "write keys and values"),
        (paged.Pages, "load_all", "issue loads of pages"),
        (paged.Pages, "save_all", "issue saves of pages"),
        (worker.Worker, "work", "worker: a step"),
        (worker.Worker, "save", "worker: saves"),
    ]


def main() -> None:
    """Measure one of both."""
    arguments = parser(__doc__, "gpu_traces")
    arguments.add_argument("where", choices=("transformers", "vllm"))
    arguments.add_argument("--out", type=Path, required=True, help="the folder for results and traces")
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--eager", action="store_true", help="vLLM compiles nothing")
    arguments.add_argument("--smoke", action="store_true")
    options = arguments.parse_args()
    if options.where == "transformers":
        in_transformers(Found(options.out, options.where), smoke=options.smoke, layers=options.layers)
    else:
        in_vllm(Found(options.out, options.where), smoke=options.smoke, eager=options.eager)


if __name__ == "__main__":
    main()
