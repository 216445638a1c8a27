"""The blender recomputes some reused tokens of a prompt, in one or two passes over the model's layers.

There are three kinds of tokens:

exact    The KV is what full prefill would compute: an exact prefix, or a document after the same tokens as when it was
         learned. It is never recomputed.
reused   The KV of a document that was computed alone. It is moved to its position. The policy selects the tokens to
         recompute.
fresh    Everything else is computed: unknown documents, separators, the question.

`deviation` finds the tokens to recompute in its only pass. It computes every token up to the check layer, where each
token keeps its fresh KV. Only the tokens whose fresh keys differ most from the stored keys go on to the next layers.
That is CacheBlend (Yao et al., EuroSys 2025, arXiv 2405.16444, section 4.3) with one check layer.

The strategies `query` and `union` use two passes (ProphetKV, arXiv 2602.02579). The first pass runs the question over
the stored KV to find the tokens to which it attends. The second pass recomputes these tokens.

The whole algorithm is in this module. The canvas accesses keys and values, and computes the layers.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Generic, NamedTuple

import torch

from lmc.blend.canvas import Attention, Canvas, R, only_writes, positions_of
from lmc.blend.layer_attention import score_weights
from lmc.blend.segments import Placement
from lmc.blend.shift import Shift, numbered, rows_by_document, shifts_of
from lmc.blend.strategies import CHECK_LAYER, NEEDS_QUESTION, STRATEGIES, Evidence, RecomputePolicy, budget

SCORING_ROWS = 64  # last tokens of the question that score the documents; more rows cost time and change little
# Last tokens of the question that run in the first pass, so that the scoring tokens attend to them. The tokens before
# them are computed only in the second pass.
QUESTION_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendInput:
    """A prompt as input of the blender. The exact KV of the positions before `start` is already in the canvas."""

    length: int  # number of known tokens of the prompt
    stop: int  # end of the KV that the blend computes; the engine computes the rest itself
    question: int  # first position of the question
    placements: Sequence[Placement]  # ascending, without overlap, none before `start`
    start: int = 0
    learned_after: int = 0  # number of tokens before each document when it was learned


class Slice(NamedTuple):
    """The work since the last slice. After each slice, the engine may serve other requests."""

    layer: int
    cost: int  # rows through a layer; 0 if the blend waits for stored parts to arrive
    coming: int | None = None  # cost of the next slice if it is known; 0 after the last slice


@dataclass(slots=True, kw_only=True)
class BlendResult:
    """Counts of the tokens that a blend has computed."""

    reused: int  # tokens whose KV is approximate unless they are recomputed; ratios refer to this number
    fresh: int
    computed: list[int]  # tokens computed in each layer, over all passes
    recomputed: list[torch.Tensor] = field(repr=False)  # per layer, positions of the reused tokens of the last pass
    charged: int = 0  # reused tokens that were computed, summed over layers and passes

    @property
    def charged_budget(self) -> float:
        """Σ over layers of reused tokens computed / (L × reused tokens)."""
        return self.charged / (len(self.computed) * self.reused) if self.reused else 0.0


class _Probe(NamedTuple):
    """A batch of the first pass, and the keys to which it attends. Its tensors are on the device."""

    batch: slice
    positions: torch.Tensor  # [T]
    scoring: int  # first row of the batch that scores the documents
    absent: torch.Tensor  # positions up to the batch's last one that have no keys and values yet
    present: torch.Tensor  # [N] bool, false at the absent positions


class Blender(Generic[R]):
    """The blend of one prompt. Exhaust `slices`, then read `result`."""

    def __init__(self, canvas: Canvas[R], blend_input: BlendInput, policy: RecomputePolicy) -> None:
        self._canvas, self._given, self._policy = canvas, blend_input, policy
        loose = [placement for placement in blend_input.placements if not placement.exact]
        self._computed_at, self._reused = positions_of(loose)
        self._present = torch.zeros(blend_input.length, dtype=torch.bool)
        self._present[: blend_input.start] = True
        self._present[positions_of(blend_input.placements)[1]] = True
        self._is_reused = torch.zeros_like(self._present)
        self._is_reused[self._reused] = True
        self._fresh = (~self._present).nonzero().flatten()
        self._documents = self._reused[:0]  # see `numbered`
        self._placed = 0  # number of layers whose stored parts have been placed
        reused, fresh, depth = self._reused, len(self._fresh), canvas.depth
        recomputed = [reused[:0]] * depth
        self.result = BlendResult(reused=len(reused), fresh=fresh, computed=[0] * depth, recomputed=recomputed)

    def slices(self) -> Iterator[Slice]:
        """Run the blend, a slice at a time. Call under `torch.inference_mode()`."""
        fresh, strategy = self._fresh[self._fresh < self._given.stop], self._policy.strategy
        if not len(self._reused):
            yield from self._pass(fresh)
        elif strategy in NEEDS_QUESTION:
            attentions = self._canvas.attentions[: self._canvas.depth]
            paid = torch.zeros(self._canvas.depth, self._given.length, device=self._canvas.device)
            weights = self._canvas.uploads.add(torch.tensor(score_weights(attentions))[:, None])  # [L, 1]
            yield from self._ask(paid)
            self._number_documents()  # A GPU is still busy with the first pass.
            joined = self._canvas.largest if NEEDS_QUESTION[strategy] == "max" else self._canvas.summed
            scores = self._on_host((weights * joined(paid)).sum(0))
            chosen = self._choose(self._evidence(attention=scores[self._reused]))
            # The first pass has finished the fresh tokens before all reused tokens.
            yield from self._pass(_merged(fresh[fresh > self._reused[0]], chosen))
        elif strategy == "deviation":
            yield from self._pass(_merged(fresh, self._reused), check=CHECK_LAYER)
        else:
            self._number_documents()
            yield from self._pass(_merged(fresh, self._choose(self._evidence())))

    def run(self) -> BlendResult:
        """Run the blend to its end."""
        with torch.inference_mode():
            for _ in self.slices():
                pass
        return self.result

    # -- passes ------------------------------------------------------------------------------------------------------

    def _pass(self, positions: torch.Tensor, check: int | None = None) -> Iterator[Slice]:
        """Compute the tokens at these positions in every layer. At the layer `check`, fewer tokens go on."""
        canvas, recomputed = self._canvas, self._recomputed(positions)
        # Stored parts arrive layer by layer. While some must still be placed, run layer by layer, too.
        placed = self._placed == canvas.depth + canvas.drafts or not self._given.placements
        through = canvas.compiled and check is None and placed
        together = rows_by_document(self._documents, positions)
        rows = canvas.begin(positions, through=through, together=together) if len(positions) else None
        shifts = self._shifts(rows)
        canvas.uploads.send()
        for shift in shifts:
            shift.begin()
        if through and rows is not None:
            yield from self._pass_through(rows, shifts, recomputed)
            return
        for layer in range(canvas.depth):
            yield from self._place(layer)
            if rows is None:
                continue
            self._charge(layer, len(rows.positions), recomputed)
            if layer == check:
                rows = yield from self._check(layer, rows)
                recomputed = self._recomputed(rows.positions)
            for batch, shift in zip_longest(canvas.batches(rows), shifts):
                canvas.run(layer, rows, batch, shift.attention(layer) if shift else None)
                is_last = layer == canvas.depth - 1 and batch.stop == len(rows.positions) and not canvas.drafts
                finished = self._slice_of(layer, batch, shift.cost if shift else 0)
                yield finished._replace(coming=0) if is_last else finished
        yield from self._draft(rows, shifts)

    def _pass_through(self, rows: R, shifts: Sequence[Shift], recomputed: torch.Tensor) -> Iterator[Slice]:
        """Compute these rows in all layers, batch after batch, since no row attends to a later batch."""
        depth = self._canvas.depth
        for layer in range(depth):
            self._charge(layer, len(rows.positions), recomputed)
        batches = list(zip_longest(self._canvas.batches(rows), shifts))
        costs = [depth * self._slice_of(0, batch, shift.cost if shift else 0).cost for batch, shift in batches]
        yield Slice(0, max(1, self._canvas.call_cost), coming=costs[0])
        for (batch, shift), cost, coming in zip(batches, costs, [*costs[1:], 0], strict=True):
            self._canvas.run_through(rows, batch, shift.attention if shift else lambda layer: None)
            self._canvas.draft(rows, batch, shift.attention if shift else None)
            yield Slice(depth - 1, cost, coming)

    def _draft(self, rows: R | None, shifts: Sequence[Shift] = ()) -> Iterator[Slice]:
        """Place the stored parts of the draft model, and run rows that have gone through all layers through it."""
        canvas = self._canvas
        for layer in range(canvas.depth, canvas.depth + canvas.drafts):
            yield from self._place(layer)
        if rows is None or not canvas.drafts:
            return
        for batch, shift in zip_longest(canvas.batches(rows), shifts):
            canvas.draft(rows, batch, shift.attention if shift else None)
            yield self._slice_of(canvas.depth, batch, shift.cost if shift else 0)

    def _number_documents(self) -> None:
        """Prepare the shift, unless the policy has none. `deviation` stays as published, without a shift."""
        if self._policy.correction != "none":
            self._documents = numbered(self._computed_at, self._reused)

    def _shifts(self, rows: R | None) -> list[Shift]:
        """Return the shift of the tokens that are not recomputed, for each batch of rows."""
        if rows is None or not len(self._documents):
            return []
        batches = [self._recomputed(rows.positions[batch]) for batch in self._canvas.batches(rows)]
        return shifts_of(self._canvas, self._documents, batches)

    def _ask(self, paid: torch.Tensor) -> Iterator[Slice]:
        """Run the question over the stored KV, and write its attention to each token into `paid [L, N]`.

        Fresh tokens before all reused tokens run with the question; afterwards their KV is exact and final. Separators,
        unknown documents, and the tokens before the last `QUESTION_ROWS` of a long question are absent. Computing them
        here, too, would cost as much as the question itself. In measurements, it changed no choice.
        """
        question = min(max(self._given.question, self._given.length - QUESTION_ROWS), self._given.length - 1)
        positions = self._fresh[(self._fresh < self._reused[0]) | (self._fresh >= question)]
        rows = self._canvas.begin(positions)
        probes = self._probes(positions, int((positions < question).sum()), self._canvas.batches(rows))
        self._canvas.uploads.send()
        for layer in range(self._canvas.depth):
            yield from self._place(layer)
            self._charge(layer, len(positions), self._reused[:0])
            for probe in probes:
                self._canvas.run(layer, rows, probe.batch, self._scoring(layer, probe, paid[layer]))
                yield self._slice_of(layer, probe.batch, self._canvas.context_cost(len(probe.present)))
        yield from self._draft(rows)

    def _probes(self, positions: torch.Tensor, question: int, batches: Sequence[slice]) -> list["_Probe"]:
        """Return the keys that each batch of the first pass sees. The question begins at row `question`."""
        present = self._present.clone()
        present[positions] = True
        absent, scoring = (~present).nonzero().flatten(), max(question, len(positions) - SCORING_ROWS)
        stops = [int(positions[batch.stop - 1]) + 1 for batch in batches]
        counts = torch.searchsorted(absent, torch.tensor(stops)).tolist()
        at, seen, hidden = map(self._canvas.uploads.add, (positions, present, absent))
        return [
            _Probe(batch, at[batch], max(scoring - batch.start, 0), hidden[:count], seen[:stop])
            for batch, stop, count in zip(batches, stops, counts, strict=True)
        ]

    def _scoring(self, layer: int, probe: "_Probe", paid: torch.Tensor) -> Attention:
        """Return attention over the present keys, which writes the question's attention to each into `paid [N]`."""

        def attention(query: torch.Tensor, write: Callable[[], None], _: object) -> torch.Tensor | None:
            write()
            at, present, first = probe.positions, probe.present, probe.scoring
            kernels, own = self._canvas.kernels, self._canvas.attentions[layer]
            # Only a draft model reads the output of the last layer in this pass.
            last = layer == self._canvas.depth - 1 and not self._canvas.drafts
            if last and first == len(at):
                return None
            kv = self._canvas.context(layer, len(present), probe.absent)
            attended = [] if last else [kernels.attend(query[:first], kv, at[:first], own, present)]
            if first < len(at):
                over_heads, so_far = NEEDS_QUESTION[self._policy.strategy], paid[: len(present)]
                out, scores = kernels.attend_and_score(query[first:], kv, at[first:], own, present, over_heads)
                torch.maximum(so_far, scores, out=so_far)
                attended.append(out)
            return None if last else torch.cat(attended)

        return attention

    def _place(self, layer: int) -> Iterator[Slice]:
        """Place the stored parts of a layer, unless they have been placed."""
        if layer < self._placed or not self._given.placements:
            return
        while not self._canvas.arrived(layer):
            yield Slice(layer, 0)
        cost = self._canvas.place(layer)
        self._placed = layer + 1
        if cost:
            yield Slice(layer, cost)

    # -- evidence and choice -----------------------------------------------------------------------------------------

    def _on_host(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return a copy of evidence on the host. Here, and nowhere else, a blend waits for the GPU."""
        return evidence.cpu()

    def _evidence(self, **scores: torch.Tensor) -> Evidence:
        """Return the evidence about the reused tokens, with these scores."""
        return Evidence(computed_at=self._computed_at, learned_after=self._given.learned_after, **scores)

    def _choose(self, evidence: Evidence) -> torch.Tensor:
        """Return the positions of the reused tokens to recompute."""
        count = budget(len(self._reused), self._policy.ratio)
        chosen = STRATEGIES[self._policy.strategy](evidence, count)
        return self._reused[self._canvas.agreed(chosen, len(self._reused))]

    def _check(self, layer: int, rows: R) -> Generator[Slice, None, R]:
        """Compute the check layer. Keeps the fresh keys and values of all rows, and returns the rows that go on."""
        slots = self._canvas.slots(self._reused)[layer]
        self._canvas.uploads.send()
        stored = self._canvas.read(layer, slots)[0]
        for batch in self._canvas.batches(rows):
            self._canvas.run(layer, rows, batch, only_writes)
            yield self._slice_of(layer, batch)
        deviation = self._canvas.summed(self._canvas.kernels.deviation(self._canvas, layer, slots, stored))
        chosen = self._choose(self._evidence(deviation=self._on_host(deviation)))
        goes_on = ~self._is_reused[rows.positions]
        goes_on[torch.searchsorted(rows.positions, chosen)] = True
        return self._canvas.keep(rows, goes_on.nonzero().flatten())

    # -- counting ----------------------------------------------------------------------------------------------------

    def _slice_of(self, layer: int, batch: slice, extra_cost: int = 0) -> Slice:
        return Slice(layer, max(batch.stop - batch.start, self._canvas.call_cost) + extra_cost)

    def _recomputed(self, positions: torch.Tensor) -> torch.Tensor:
        return positions[self._is_reused[positions]]

    def _charge(self, layer: int, computed: int, recomputed: torch.Tensor) -> None:
        """Count the rows computed in a layer, and the reused tokens `recomputed` among them."""
        self.result.computed[layer] += computed
        self.result.charged += len(recomputed)
        if len(recomputed):
            self.result.recomputed[layer] = recomputed


def _merged(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat((first, second)).sort().values
