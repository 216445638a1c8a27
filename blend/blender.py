"""The blender: a prompt's KV from reused, re-rotated and repaired pieces, one layer at a time.

Three kinds of tokens:      exact   KV that full prefill would give too (an exact prefix, a document at position 0): never recomputed
                            reused  KV of a document computed alone, moved to its place: repaired where the policy says so
                            fresh   everything else (unknown segments, separators, the question): computed

The evidence for repairing comes from comparing keys at check layers on the way (`deviation`, CacheBlend), or from a first
pass of the question over the unrepaired KV (`query`), which needs no layer in full but every layer's KV before the second
pass. Called by connectors; pulls layers from any iterator of `(layer, parts)`, and knows nothing of where they come from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lmc.blend.attention import attend, attention_paid
from lmc.blend.layers import DecoderLayers
from lmc.blend.rope import rotate, turn_between
from lmc.blend.segments import Span
from lmc.blend.select import NEEDS_QUESTION, STRATEGIES, Evidence, Policy, budget, by_deviation

Reader = Iterator[tuple[int, Sequence[torch.Tensor]]]  # (layer, a part [K, T, H, D] for each piece), in order of layers
QUESTION_ROWS = 64  # the last tokens of the question score the documents; more cost time and change little


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A stored piece and where it goes: `tokens` tokens computed from position `first` of their document on, used from `at` on."""

    at: int
    tokens: int
    first: int


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of one pass is done: a good moment to let others run."""

    layer: int
    rows: int  # tokens that went through it


@dataclass(slots=True, kw_only=True)
class Blended:
    """The result: KV of the whole prompt, and what it took."""

    keys: list[torch.Tensor]  # per layer [H, T, D]
    values: list[torch.Tensor]
    logits: torch.Tensor | None = None  # [V] at the last token
    reused: int = 0  # tokens whose KV could be approximate: what a ratio refers to
    computed: list[int] = field(default_factory=list)  # tokens computed in each layer, over all passes
    # per layer, positions of reused tokens whose KV was computed anew
    repaired: list[torch.Tensor] = field(default_factory=list)
    charged: int = 0  # token-layers of reusable tokens that were computed

    @property
    def charged_budget(self) -> float:
        """Σ over layers of reusable tokens computed / (L × reusable tokens)."""
        return self.charged / (len(self.keys) * self.reused) if self.reused else 0.0


class Blend:
    """One prompt on its way through the layers. Run `steps` to its end, then read `result`."""

    def __init__(
        self, layers: DecoderLayers, tokens: Sequence[int], pieces: Sequence[Placed], question: Span, policy: Policy
    ) -> None:
        """`pieces` ascend and do not overlap; the last token of the prompt is in none of them."""
        policy.check_depth(layers.shape.layers)
        self._layers, self._policy = layers, policy
        shape, device, length = layers.shape, layers.device, len(tokens)
        # A prompt that ends with a separator is asked by its last token.
        self._question = min(question.start, length - 1)
        self._tokens = torch.tensor(tokens, device=device)
        self._cos, self._sin = layers.rows(length)
        kept = [_positions(p.at, p.tokens, device) for p in pieces]
        self._stored = torch.cat(kept) if kept else torch.empty(0, dtype=torch.long, device=device)
        self._pieces, self._turns = pieces, [self._turn_of(piece) for piece in pieces]
        self._known = torch.zeros(length, dtype=torch.bool, device=device)  # KV is there, exact or not
        self._known[self._stored] = True
        exact = _exact_reach(pieces)
        loose = [p for p in pieces if p.at >= exact]
        self._reused = self._stored[self._stored >= exact]
        self._loose = torch.zeros_like(self._known)  # the same as a mask
        self._loose[self._reused] = True
        self._offset = torch.cat([_positions(p.first, p.tokens, device) for p in loose]) if loose else self._reused
        self._fresh = (~self._known).nonzero().flatten()
        empty = (shape.kv_heads, length, shape.head_dim)
        self.result = Blended(
            keys=[torch.empty(empty, dtype=shape.dtype, device=device) for _ in range(shape.layers)],
            values=[torch.empty(empty, dtype=shape.dtype, device=device) for _ in range(shape.layers)],
            reused=len(self._reused),
            computed=[0] * shape.layers,
            repaired=[self._reused[:0]] * shape.layers,
        )

    def steps(self, reader: Reader) -> Iterator[Step]:
        """Run; `reader` yields, per layer in order, one part `[K, T, H, D]` for each piece (nothing at all if there are no pieces)."""
        if not len(self._reused):
            yield from self._pass(reader, self._fresh)
        elif self._policy.strategy in NEEDS_QUESTION:
            attention = torch.zeros(len(self._tokens), device=self._layers.device)
            yield from self._ask(reader, attention)
            # What comes before all reused tokens is exact by now.
            self._fresh = self._fresh[self._fresh > self._reused[0]]
            chosen = self._choose(Evidence(offset=self._offset, attention=attention[self._reused]))
            yield from self._pass(iter(()), self._rows(chosen))
        elif self._policy.strategy == "deviation":
            yield from self._pass(reader, self._rows(self._reused), self._policy.check_layers)
        else:
            yield from self._pass(reader, self._rows(self._choose(Evidence(offset=self._offset))))

    def run(self, reader: Reader) -> Blended:
        """All steps at once."""
        with torch.inference_mode():
            for _ in self.steps(reader):
                pass
        return self.result

    # -- one pass through the layers ---------------------------------------------------------------------------------

    def _pass(self, reader: Reader, rows: torch.Tensor, checks: tuple[int, ...] = ()) -> Iterator[Step]:
        """Compute `rows` in every layer, patching their KV over what the reader brings; at check layers the set shrinks."""
        hidden = self._layers.embed(self._tokens[rows])
        last = self._layers.shape.layers - 1
        for layer in range(last + 1):
            query, key, value = self._enter(layer, hidden, rows, reader)
            keep = None
            if layer in checks:
                keep = self._shrink(checks.index(layer), layer, rows, key)
            elif layer == last:
                # Of the last layer only the last token's output is read.
                keep = torch.tensor([len(rows) - 1], device=rows.device)
            self._patch(layer, rows, key, value)
            if keep is not None:
                rows, hidden, query = rows[keep], hidden[keep], query[keep]
            keys, values = self.result.keys[layer], self.result.values[layer]
            attended = attend(query, keys, values, rows, self._layers.scale)
            hidden = self._layers.finish(layer, hidden, attended)
            yield Step(layer, len(rows))
        self.result.logits = self._layers.logits(hidden[-1])

    def _ask(self, reader: Reader, attention: torch.Tensor) -> Iterator[Step]:
        """The question alone over the unrepaired KV, adding to `attention [T]` what it pays in each layer.

        With it runs what comes before all reused tokens, which is exact and done by that. Separators and unknown documents are not
        there yet: running them here too would cost as much as the question itself, and changed no choice that we measured.
        """
        rows = self._fresh[(self._fresh < self._reused[0]) | (self._fresh >= self._question)]
        asking = (rows >= self._question).nonzero().flatten()[-QUESTION_ROWS:]
        visible = self._known.clone()
        visible[rows] = True
        hidden_rows = (~visible).nonzero().flatten()
        hidden = self._layers.embed(self._tokens[rows])
        last = self._layers.shape.layers - 1
        for layer in range(last + 1):
            query, key, value = self._enter(layer, hidden, rows, reader)
            self._patch(layer, rows, key, value)
            keys, values = self.result.keys[layer], self.result.values[layer]
            # Zeros, not whatever memory holds: a masked key still meets a zero weight, and 0 × NaN is NaN.
            keys[:, hidden_rows] = values[:, hidden_rows] = 0
            attention += attention_paid(query[asking], keys, rows[asking], self._layers.scale, visible)
            if layer < last:
                attended = attend(query, keys, values, rows, self._layers.scale, visible)
                hidden = self._layers.finish(layer, hidden, attended)
            yield Step(layer, len(rows))

    def _enter(
        self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, reader: Reader
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stored KV of a layer in its place, and query, key and value of the rows that are computed."""
        self._place(layer, reader)
        self._count(layer, rows)
        return self._layers.qkv(layer, hidden, self._cos[rows], self._sin[rows])

    # -- evidence and choice -----------------------------------------------------------------------------------------

    def _choose(self, evidence: Evidence) -> torch.Tensor:
        count = budget(len(self._reused), self._policy.ratios[0])
        return self._reused[STRATEGIES[self._policy.strategy](evidence, count)]

    def _shrink(self, check: int, layer: int, rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Indices into `rows` that go on: the fresh ones, and those that deviate most from what was loaded."""
        candidates = self._loose[rows].nonzero().flatten()
        loaded = self.result.keys[layer][:, rows[candidates]].transpose(0, 1).float()  # [T, H, D]
        deviation, magnitude = ((x * x).sum((1, 2)) for x in (key[candidates].float() - loaded, loaded))
        evidence = Evidence(
            offset=self._offset[torch.searchsorted(self._reused, rows[candidates])],
            deviation=deviation,
            magnitude=magnitude,
        )
        thresholds = self._policy.thresholds
        count = budget(len(self._reused), self._policy.ratios[check])
        chosen = by_deviation(evidence, count, thresholds[check] if thresholds else None)
        goes_on = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        goes_on[candidates] = False
        goes_on[candidates[chosen]] = True
        return goes_on.nonzero().flatten()

    def _rows(self, chosen: torch.Tensor) -> torch.Tensor:
        return torch.cat((self._fresh, chosen)).sort().values

    # -- KV ----------------------------------------------------------------------------------------------------------

    def _place(self, layer: int, reader: Reader) -> None:
        """The next layer's stored KV, keys moved to their new positions, into its place."""
        arrived = next(reader, None) if len(self._stored) else None
        if arrived is None:
            return
        assert arrived[0] == layer, "the reader is out of step"
        keys, values = self.result.keys[layer], self.result.values[layer]
        for piece, (cos, sin), part in zip(self._pieces, self._turns, arrived[1], strict=True):
            here = slice(piece.at, piece.at + piece.tokens)
            stored = part.to(self._layers.device).transpose(1, 2)  # [K, T, H, D] -> [K, H, T, D]
            rotate(stored[0], cos, sin, out=keys[:, here])
            values[:, here] = stored[1]

    def _patch(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.result.keys[layer].index_copy_(1, rows, key.transpose(0, 1))
        self.result.values[layer].index_copy_(1, rows, value.transpose(0, 1))

    def _count(self, layer: int, rows: torch.Tensor) -> None:
        repaired = rows[self._loose[rows]]
        self.result.computed[layer] += len(rows)
        self.result.charged += len(repaired)
        if len(repaired):
            self.result.repaired[layer] = repaired

    def _turn_of(self, piece: Placed) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[T, R/2]` that move a piece to its place; the same for all layers."""
        # a document stands at or behind the position it was computed at: its rows are in the table
        assert piece.first <= piece.at
        half, cos, sin = self._cos.shape[-1] // 2, self._cos, self._sin
        old, new = slice(piece.first, piece.first + piece.tokens), slice(piece.at, piece.at + piece.tokens)
        return turn_between(cos[old, :half], sin[old, :half], cos[new, :half], sin[new, :half])


def _positions(start: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, start + count, device=device)


def _exact_reach(pieces: Sequence[Placed]) -> int:
    """Where exactness ends: pieces that follow each other from position 0, each computed where it is used and after the one before it."""
    reach = 0
    for piece in pieces:
        if piece.at != reach or piece.first != reach:
            break
        reach += piece.tokens
    return reach
