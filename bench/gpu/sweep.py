"""Measures what only a GPU can tell: the fastest tiles, stages and shares, and what launches, waits and copies cost.

    cd bench && python -m gpu.sweep [--seconds 240] [--keep]     # at most that long; --smoke: on a CPU

The last lines are entries for `blend/kernels/tuning.py`. Times are medians in microseconds, with the GPU's cache
emptied and the GPU kept busy before (`Report.milliseconds`); host times are medians of issuing the work. The result is
written after each section, so that a run that is ended loses only its last one.
"""

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import keep, parser
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu.interpreter import mend_interpreter
from gpu.kernels import SMOKE, OneLayer, Sizes, pages_of, spans_of
from gpu.report import Report
from lmc.blend.kernels import attention_triton
from lmc.blend.kernels.choice import kernels_of
from lmc.blend.kernels.shift import MOST_EXAMPLES
from lmc.blend.kernels.tuning import Kind, Tile, Tuning, tuning_of
from lmc.blend.layer_attention import LayerAttention
from lmc.blend.rope import KeyRotation
from lmc.blend.tolerances import difference
from lmc.copies import Copies, submit_of
from lmc.storage.memory.slab import Slab

Row = dict[str, Any]
TILES = [Tile(rows, keys, warps) for rows, keys, warps in (
    (64, 64, 4), (128, 64, 8), (64, 128, 4), (128, 128, 8), (128, 64, 4), (64, 32, 4), (128, 32, 8), (32, 64, 4),
)]  # fmt: skip
STAGES = 3, 5, 4, 2
SHARED = 4, 1, 2, 8  # programs of a launch, at least, for each multiprocessor; 1 shares hardly ever
SECTIONS = 5  # before attention, of which each takes at most an eighth of the time


class Sweep:
    """Measures section by section."""

    def __init__(self, report: Report, seconds: float, *, kept: bool) -> None:
        self.report, self.sizes, self.kept = report, SMOKE if report.smoke else Sizes(), kept
        self.device, self.dtype, self.seconds = report.device, self.sizes.dtypes[0], seconds
        self.end = time.monotonic() + seconds
        self.found: dict[str, list[Row]] = {}
        self.until = self.end

    def run(self) -> None:
        """Measure all sections."""
        for number, work in enumerate(
            (self.machine, self.copies, self.launches, self.correction, self.scores, self.attention)
        ):
            now = time.monotonic()
            self.until = self.end if number == SECTIONS else min(self.end, now + self.seconds / 8)
            self.rows: list[Row] = []
            self.found[work.__name__] = self.rows
            print(f"\n== {work.__name__}", flush=True)
            try:
                with torch.inference_mode():
                    work()
            except Exception as error:  # noqa: BLE001 - it is in the result, and the other sections still run
                self.row(failed=f"{type(error).__name__}: {error}"[:300])
            if self.kept:
                keep({"bench": "gpu_sweep", "device": self.report.name, "found": self.found}, "gpu_sweep")

    def row(self, **found: Any) -> None:
        """Record a line."""
        self.rows.append(found)
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
        )
        print("  ", "  ".join(shown), flush=True)

    def us(self, work: Callable[[], Any]) -> float:
        """Return how many microseconds the GPU takes."""
        return 1000 * self.report.milliseconds(work)

    def host_us(self, work: Callable[[], Any]) -> float:
        """Return how many microseconds the host takes to issue some work."""
        return 1000 * self.report.host_milliseconds(work)

    @property
    def over(self) -> bool:
        """Whether the section has had its time."""
        return time.monotonic() > self.until

    # -- sections ----------------------------------------------------------------------------------------------------

    def machine(self) -> None:
        """Bandwidth, products, and what the projections and the MLP of a layer of an 8B Llama take for some rows."""
        if self.report.smoke:
            return
        properties = torch.cuda.get_device_properties(self.device)
        self.row(gpu=properties.name, multiprocessors=properties.multi_processor_count)
        side = 8192
        one, other = torch.randn(2, side, side, device=self.device, dtype=self.dtype)
        self.row(tflops=2 * side**3 / self.us(lambda: one @ other) / 1e6)
        large = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        self.row(memory_gbs=2 * large.numel() / self.us(large.clone) / 1e3)
        shapes = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
        weights = [torch.randn(shape, device=self.device, dtype=self.dtype) for shape in shapes]
        for rows in (64, 256, 512, 819, 1229, 2048):
            given = [torch.randn(rows, shape[1], device=self.device, dtype=self.dtype) for shape in shapes]
            took = self.us(lambda given=given: [a @ b.T for a, b in zip(given, weights, strict=True)])
            self.row(rows=rows, layer_us=took, tflops=2 * rows * sum(a * b for a, b in shapes) / took / 1e6)

    def copies(self) -> None:
        """Lists of copies, by the size of a copy and their number: the GPU's time and the host's."""
        slab = Slab(4, 32, (self.sizes.slab_bytes // 128) >> 3)
        whole = slab.slot(0).view(-1)
        there, submit = torch.empty_like(whole, device=self.device), submit_of(self.device)
        for name, target, source in (("in", there, whole), ("out", whole, there)):
            took = self.us(lambda target=target, source=source: target.copy_(source, non_blocking=True))
            self.row(large_copy=name, gbs=whole.numel() / took / 1e3)
        if submit is None:
            return
        for size, count in itertools.product((4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20), (16, 64, 512, 2048)):
            if size * count > whole.numel() or self.over:
                continue
            at = np.random.default_rng(0).permutation(whole.numel() // size)[:count] * size
            to = there.data_ptr() + np.arange(count) * size
            ours = Copies(whole.data_ptr() + at, to, np.full(count, size, np.int64))
            took = self.us(lambda ours=ours: submit(ours))
            host = self.host_us(lambda ours=ours: submit(ours))
            self.row(kib=size >> 10, count=count, us=took, gbs=size * count / took / 1e3, host_us=host)

    def launches(self) -> None:
        """The host's time for one call of each operation."""
        sizes, ours = self.sizes, kernels_of(self.device)
        pages = pages_of(self.report, sizes, 512, self.dtype)
        slots, half = torch.arange(64, device=self.device), torch.rand(64, sizes.dim // 2, device=self.device)
        rotation = KeyRotation(half.cos(), half.sin())
        stored = torch.randn(2, 64, sizes.heads, sizes.dim, device=self.device).to(self.dtype)
        query = torch.randn(64, sizes.heads * sizes.group, sizes.dim, device=self.device).to(self.dtype)
        layer, present = LayerAttention(scale=0.1), torch.ones(512, dtype=torch.bool, device=self.device)
        for name, work in (
            ("torch.add", lambda: torch.add(half, 1)),
            ("place", lambda: ours.place([stored], rotation, slots, pages)),
            ("gather", lambda: ours.gather(pages, slots)),
            ("attend", lambda: ours.attend(query, pages, slots, layer)),
            ("attend_and_score", lambda: ours.attend_and_score(query, pages, slots, layer, present, "max")),
        ):
            work()
            self.row(operation=name, host_us=self.host_us(work))

    def correction(self) -> None:
        """The operations of the correction of all documents in one layer."""
        sizes, ours = self.sizes, kernels_of(self.device)
        count, per = sizes.documents * sizes.tokens, min(MOST_EXAMPLES, sizes.tokens // 4)
        canvas, slots = (
            OneLayer(pages_of(self.report, sizes, count, self.dtype)),
            torch.randperm(count, device=self.device),
        )
        half = torch.rand(count, sizes.dim // 2, device=self.device)
        rotation = KeyRotation(half.cos(), half.sin())
        spans = spans_of(sizes, per, self.device)
        examples, others = slots[: per * sizes.documents], slots[per * sizes.documents :]
        weights = torch.rand(len(others), MOST_EXAMPLES, device=self.device) / per
        back, forth = (KeyRotation(rotation.cos[: len(some)], rotation.sin[: len(some)]) for some in (examples, others))
        old = canvas.read(0, examples)
        changes = ours.changes_of(canvas, 0, examples, old, back)
        for name, work in (
            ("changes_of", lambda: ours.changes_of(canvas, 0, examples, old, back)),
            ("correct", lambda: ours.correct(canvas, 0, others, weights, changes, spans, forth)),
            ("weights_of", lambda: ours.weights_of(canvas, 0, old[0], others, (back, forth), spans)),
        ):
            work()
            self.row(operation=name, us=self.us(work), host_us=self.host_us(work))

    def scores(self) -> None:
        """Scores of a question's rows, by tile."""
        sizes, kind = self.sizes, "scores"
        count = min(64, sizes.context // 2)
        at = torch.arange(sizes.context - count, sizes.context, device=self.device)
        query = torch.randn(count, sizes.heads * sizes.group, sizes.dim, device=self.device).to(self.dtype)
        context, layer = pages_of(self.report, sizes, sizes.context, self.dtype), LayerAttention(scale=sizes.dim**-0.5)
        present = torch.ones(sizes.context, dtype=torch.bool, device=self.device)

        def work() -> Any:
            return attention_triton.attend_and_score(query, context, at, layer, present, "max")

        for tile in self._tried(tuning_of(self.device).tiles[kind]):
            if self.over:
                break
            with self._tuned(kind, tile):
                self._timed(work, kind=kind, tile=tuple(tile))

    def attention(self) -> None:
        """Scattered rows by tile, stages and shares, and dense kernels with as many products."""
        sizes, now = self.sizes, tuning_of(self.device)
        context = pages_of(self.report, sizes, sizes.context, self.dtype)
        layer, heads = LayerAttention(scale=sizes.dim**-0.5), sizes.heads * sizes.group
        few = [(300, sizes.context), (819, sizes.context // 2), (300, sizes.context // 2)]
        many = [(3000, sizes.context), (1229, sizes.context // 2)]
        cases = [("few rows", *case) for case in few] + [("many rows", *case) for case in many]
        cases = [("few rows", 5, sizes.context), ("many rows", 9, sizes.context)] if self.report.smoke else cases
        total: defaultdict[tuple[str, Tile, int], float] = defaultdict(float)
        for number, (kind, rows, reach) in enumerate(cases):
            at = torch.randperm(reach, device=self.device)[:rows].sort().values
            query = torch.randn(rows, heads, sizes.dim, device=self.device).to(self.dtype)
            products = 4 * int((at + 1).sum()) * heads * sizes.dim
            wanted = attention_triton.attend(query, context, at, layer)
            self._dense(products, heads)
            until = time.monotonic() + (self.end - time.monotonic()) / (len(cases) - number)
            for share, tile in itertools.product(SHARED, self._tried(now.tiles[kind])):
                if time.monotonic() > until:
                    break
                programs = now.programs // 4 * share
                with self._tuned(kind, tile, programs=programs, many=0 if kind == "many rows" else 1 << 30):
                    took = self._timed(
                        lambda query=query, at=at: attention_triton.attend(query, context, at, layer),
                        wanted=wanted, kind=kind, rows=rows, reach=reach, tile=tuple(tile), programs=programs,
                    )  # fmt: skip
                total[kind, tile, programs] += took * 1e6 / products
        for kind in ("few rows", "many rows"):
            tried = {key: value for key, value in total.items() if key[0] == kind}
            if tried:  # Those that were not measured in all cases have a smaller sum, and do not count.
                cases_of = sum(case[0] == kind for case in cases)
                whole = {key: value for key, value in tried.items() if self._measured(key) == cases_of} or tried
                _, tile, programs = min(whole, key=lambda key: whole[key])
                self.row(fastest=f'"{kind}": {tile},  # with programs={programs}')

    # -- inside ------------------------------------------------------------------------------------------------------

    def _tried(self, now: Tile) -> list[Tile]:
        """Return the tiles to try, the present one first."""
        if self.report.smoke:
            return [now._replace(rows=16, keys=16)]
        others = [tile._replace(stages=stages) for stages, tile in itertools.product(STAGES, TILES)]
        return list(dict.fromkeys((now, *others)))

    @contextmanager
    def _tuned(self, kind: Kind, tile: Tile, **more: int) -> Iterator[Tuning]:
        now = tuning_of(self.device)
        tuned = now._replace(tiles={**now.tiles, kind: tile}, **more)
        with patch.object(attention_triton, "tuning_of", lambda device: tuned):
            yield tuned

    def _timed(self, work: Callable[[], Any], *, wanted: torch.Tensor | None = None, **what: Any) -> float:
        """Record the time of some work, and the difference of its result from the expected one.

        Work whose tiles do not fit into the GPU is recorded as failed.
        """
        try:
            found = work()
            took = self.us(work)
        except Exception as error:  # noqa: BLE001
            self.row(**what, failed=f"{type(error).__name__}"[:60])
            return float("inf")
        apart = {} if wanted is None else {"apart": float(difference(found, wanted))}
        self.row(**what, us=took, **apart)
        return took

    def _measured(self, key: tuple[str, Tile, int]) -> int:
        return sum(
            (row.get("kind"), row.get("tile"), row.get("programs")) == (key[0], tuple(key[1]), key[2])
            for row in self.rows
        )

    def _dense(self, products: int, heads: int) -> None:
        """A causal prompt with as many products, by each of torch's kernels that there is."""
        if self.report.smoke:
            return
        side = int((products / (2 * heads * self.sizes.dim)) ** 0.5)
        query, keys, values = torch.randn(3, 1, heads, side, self.sizes.dim, device=self.device).to(self.dtype)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                self._timed(
                    lambda: scaled_dot_product_attention(query, keys, values, is_causal=True), dense=backend.name
                )


def main() -> None:
    """Measure, and print the fastest tiles."""
    mend_interpreter()
    arguments = parser(__doc__, "gpu_sweep")
    arguments.add_argument("--seconds", type=float, default=240.0)
    arguments.add_argument("--smoke", action="store_true")
    options = arguments.parse_args()
    os.environ.setdefault("LMC_KERNELS", "triton")  # in Triton's interpreter on a CPU
    device = torch.device("cpu" if options.smoke else "cuda")
    name = "CPU" if options.smoke else torch.cuda.get_device_name()
    Sweep(Report(device, options.smoke, name), options.seconds, kept=options.keep).run()


if __name__ == "__main__":
    main()
