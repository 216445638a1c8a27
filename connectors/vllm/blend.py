"""CacheBlend inside the engine: documents' KV moved into a request's pages, the tokens that need it computed anew over them.

Generators that yield what a slice has cost, in token-layers (a token through one layer), so that a worker can do as much per step
as the engine's own chunked prefill would; 0 stands for "nothing to do before more has arrived". All ranks of a tensor-parallel group
take the same slices. Algorithm and strategies are `lmc.blend`'s; here the KV lies in pages, and attention is the engine's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lmc.blend.attention import attention_paid
from lmc.blend.blender import QUESTION_ROWS
from lmc.blend.rope import rotate, turn_between
from lmc.blend.select import NEEDS_QUESTION, STRATEGIES, Evidence, budget, by_deviation
from lmc.connectors.vllm.messages import BlendJob, DocumentPart
from lmc.connectors.vllm.native import Batch, Hidden, NativeLayers
from lmc.connectors.vllm.ranks import agreed, summed
from lmc.shapes import KVShape

COPY_COST = 32  # tokens that are moved in the time in which one is computed: about 10 on GPUs, 100 on CPUs

Part = Callable[[DocumentPart, int], torch.Tensor]  # a chunk's part for a layer of this rank, uint8 [n]
# Whether that layer of all parts is there (agreed among ranks); raises if it never will be.
Arrived = Callable[[int], bool]
Cost = int


class PagedBlend:
    """One request's blend. `result` says what it took, after the last step."""

    def __init__(
        self, layers: NativeLayers, job: BlendJob, shape: KVShape, rows: int, part: Part, arrived: Arrived
    ) -> None:
        self._layers, self._job, self._shape, self._part, self._arrived = layers, job, shape, part, arrived
        self._batch_rows = rows
        device = layers.device
        self._tokens = torch.tensor(job.tokens, device=device)
        self._blocks = torch.tensor(job.blocks, device=device)
        self._stop = len(job.tokens)
        positions = [torch.arange(p.at, p.at + p.tokens, device=device) for p in job.documents]
        self._reused = torch.cat(positions)
        self._offset = torch.cat([torch.arange(p.first, p.first + p.tokens, device=device) for p in job.documents])
        self._slots = layers.slots(self._blocks, self._reused)
        self._is_reused = torch.zeros(self._stop, dtype=torch.bool, device=device)
        self._is_reused[self._reused] = True
        rest = ~self._is_reused
        rest[: job.exact] = False
        self._fresh = rest.nonzero().flatten()  # what nobody has computed
        self._turns = [self._turn_of(p) for p in job.documents]
        self._computed = 0  # token-layers
        self._charged = torch.zeros((), dtype=torch.long, device=device)  # of these, of reused tokens
        self._placed = -1  # layers whose documents are in the pages

    @property
    def result(self) -> dict[str, object]:
        """What it took, for the response."""
        depth = self._layers.depth
        return {
            "strategy": self._job.policy.strategy,
            "reused_tokens": len(self._reused),
            "fresh_tokens": len(self._fresh),
            "token_layers": self._computed,
            "charged_budget": round(int(self._charged) / (depth * len(self._reused)), 4),
        }

    def steps(self) -> Iterator[Cost]:
        """Run it."""
        strategy, fresh = self._job.policy.strategy, self._fresh
        if strategy in NEEDS_QUESTION:
            attention = torch.zeros(self._stop, device=self._layers.device)
            yield from self._ask(attention)
            # What comes before all reused tokens is exact by now. The last token is the engine's: it wants its logits.
            fresh = fresh[(fresh > self._reused[0]) & (fresh < self._stop - 1)]
            paid = summed(attention)[self._reused]
            chosen = self._choose(Evidence(offset=self._offset, attention=paid))
            yield from self._through(torch.cat((fresh, chosen)).sort().values)
        elif strategy == "deviation":
            yield from self._by_deviation()
        else:
            chosen = self._choose(Evidence(offset=self._offset))
            yield from self._through(torch.cat((fresh, chosen)).sort().values)

    # -- passes ------------------------------------------------------------------------------------------------------

    def _through(self, positions: torch.Tensor) -> Iterator[Cost]:
        """Rows through all layers."""
        if not len(positions):
            yield from self._place_to(self._layers.depth - 1)
            return
        hidden = self._layers.embed(self._tokens, positions)
        batches = self._batches(positions)
        for layer in range(self._layers.depth):
            yield from self._place_to(layer)
            for batch in batches:
                self._layers.advance(layer, hidden, batch)
                yield self._count(positions[batch.rows])

    def _ask(self, attention: torch.Tensor) -> Iterator[Cost]:
        """All rows that are not reused, over the unrepaired KV, adding to `attention [T]` what the question's last rows pay."""
        positions, last = self._fresh, self._layers.depth - 1
        hidden = self._layers.embed(self._tokens, positions)
        batches = self._batches(positions)
        asking = positions[positions >= self._job.question][-QUESTION_ROWS:]
        blocks = self._layers.kernel_blocks(self._blocks)
        for layer in range(last + 1):
            yield from self._place_to(layer)
            queries: list[torch.Tensor] = []
            for batch in batches:
                if layer < last:
                    with self._layers.watching(layer, queries.append):
                        self._layers.run(layer, hidden, batch)
                else:
                    queries.append(self._layers.project(layer, hidden, batch))
                yield self._count(positions[batch.rows])
            access = self._layers.access[layer]
            scale: float = self._layers.attention[layer].impl.scale
            keys = access.keys_of(blocks, self._stop)
            attention += attention_paid(torch.cat(queries)[-len(asking) :], keys, asking, scale)

    def _by_deviation(self) -> Iterator[Cost]:
        """Everything to the first check layer; there and at later ones only the fresh tokens and the most deviating go on."""
        job, checks = self._job, self._job.policy.check_layers
        positions = torch.arange(job.exact, self._stop, device=self._layers.device)
        hidden, batches = self._layers.embed(self._tokens, positions), self._batches(positions)
        self._placed = 0  # every row of layer 0 is computed: what is stored would be the same
        for layer in range(self._layers.depth):
            yield from self._place_to(layer)
            if layer in checks:
                # Keys alone tell; the rest of the layer is for those who go on, whose projections are made twice.
                loaded, _ = self._layers.access[layer].gather(self._slots)
                for batch in batches:
                    self._layers.project(layer, hidden, batch)
                    yield self._count(hidden.positions[batch.rows])
                keep = self._deviating(layer, hidden, loaded.float())
                self._place(layer)  # the others are themselves again
                hidden = hidden.keep(keep)
                batches = self._batches(hidden.positions)
            for batch in batches:
                self._layers.advance(layer, hidden, batch)
                rows = hidden.positions[batch.rows]
                yield len(rows) if layer in checks else self._count(rows)

    # -- evidence and choice -----------------------------------------------------------------------------------------

    def _choose(self, evidence: Evidence) -> torch.Tensor:
        policy = self._job.policy
        count = budget(len(self._reused), policy.ratios[0])
        return self._reused[agreed(STRATEGIES[policy.strategy](evidence, count), len(self._reused))]

    def _deviating(self, layer: int, hidden: Hidden, loaded: torch.Tensor) -> torch.Tensor:
        """Indices into the rows that go on. The pages hold fresh keys; `loaded [T, H, D]` are the ones they replaced."""
        policy = self._job.policy
        check = policy.check_layers.index(layer)
        there = self._is_reused[hidden.positions]
        candidates = torch.searchsorted(self._reused, hidden.positions[there])  # into the reused tokens
        fresh, _ = self._layers.access[layer].gather(self._slots[candidates])
        before = loaded[candidates]
        deviation, magnitude = (summed((x * x).sum((1, 2))) for x in (fresh.float() - before, before))
        evidence = Evidence(offset=self._offset[candidates], deviation=deviation, magnitude=magnitude)
        thresholds = policy.thresholds
        count = budget(len(self._reused), policy.ratios[check])
        chosen = agreed(by_deviation(evidence, count, thresholds[check] if thresholds else None), len(candidates))
        goes_on = ~there
        goes_on[there.nonzero().flatten()[chosen]] = True
        return goes_on.nonzero().flatten()

    # -- KV ----------------------------------------------------------------------------------------------------------

    def _place_to(self, layer: int) -> Iterator[Cost]:
        """Documents' KV of all layers up to this one, keys moved to their new positions, in the pages."""
        while self._placed < layer:
            while not self._arrived(self._placed + 1):
                yield 0
            self._placed += 1
            self._place(self._placed)
            yield len(self._reused) // COPY_COST + 1

    def _place(self, layer: int) -> None:
        size = (len(self._reused), self._shape.kv_heads, self._shape.head_dim)
        keys = torch.empty(size, dtype=self._shape.dtype, device=self._layers.device)
        values = torch.empty_like(keys)
        at = 0
        for piece, (cos, sin) in zip(self._job.documents, self._turns, strict=True):
            stored = self._shape.part(self._part(piece, layer), piece.stored)[:, piece.skip : piece.skip + piece.tokens]
            stored = stored.to(self._layers.device, non_blocking=True)
            rows = slice(at, at + piece.tokens)
            out = keys[rows].transpose(0, 1)
            rotate(stored[0].transpose(0, 1), cos, sin, interleaved=self._layers.interleaved, out=out)
            values[rows] = stored[1]
            at += piece.tokens
        self._layers.access[layer].scatter(self._slots, keys, values)

    def _turn_of(self, piece: DocumentPart) -> tuple[torch.Tensor, torch.Tensor]:
        old = self._layers.rows_of(piece.first, piece.tokens)
        return turn_between(*old, *self._layers.rows_of(piece.at, piece.tokens))

    def _batches(self, positions: torch.Tensor) -> list[Batch]:
        return self._layers.batches(positions, self._blocks, self._batch_rows)

    def _count(self, positions: torch.Tensor) -> Cost:
        self._computed += len(positions)
        self._charged += self._is_reused[positions].sum()  # on the device: nobody waits for it before the end
        return len(positions)


def prefill(layers: NativeLayers, tokens: torch.Tensor, blocks: torch.Tensor, rows: int) -> Iterator[Cost]:
    """A document alone, from position 0 on, into its blocks: chunk by chunk through all layers, as the engine would do it."""
    for start in range(0, len(tokens), rows):
        positions = torch.arange(start, min(start + rows, len(tokens)), device=layers.device)
        hidden = layers.embed(tokens, positions)
        (batch,) = layers.batches(positions, blocks, rows)
        for layer in range(layers.depth):
            layers.advance(layer, hidden, batch)
            yield len(positions)


def read_tokens(layers: NativeLayers, layer: int, blocks: torch.Tensor, start: int, stop: int, into: Any) -> None:
    """Keys and values of positions `[start, stop)` into `into [K, T, H, D]`."""
    positions = torch.arange(start, stop, device=layers.device)
    keys, values = layers.access[layer].gather(layers.slots(blocks, positions))
    into[0].copy_(keys, non_blocking=True)
    into[1].copy_(values, non_blocking=True)
