"""The description of one layer's attention, which lmc reads from the loaded model at start.

With it, lmc moves a layer's keys, and computes the layer's attention itself where the engine's own kernels cannot:
queries at scattered positions, hidden keys, and scores.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmc.blend.rope import UNROTATED, KeyRotation, Rotation


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerAttention:
    """What a query of a layer sees, and how the layer rotates its queries and keys."""

    scale: float  # factor of the logits
    rotation: Rotation = UNROTATED
    window: int = 0  # A query sees this many keys, the last of which is at its own position; 0 for all keys.
    chunk: int = 0  # A query sees only keys of its own chunk of this many positions (Llama 4); 0 for all keys.
    sinks: torch.Tensor | None = None  # [Q] logits that each query head adds to its softmax, without a value (gpt-oss)
    soft_cap: float = 0.0  # Logits stay below it, as soft_cap · tanh(logit / soft_cap) (Gemma 2); 0 for no such limit.
    # Whether values are at the same time the rest of the keys, which is not rotated (MLA). Then a query has the
    # dimensions of a key, followed by those of a value.
    latent: bool = False

    @property
    def sees_all(self) -> bool:
        """Whether a query sees all keys before it."""
        return not (self.window or self.chunk)

    @property
    def reach(self) -> int:
        """The maximal number of keys that a query sees; 0 if it sees all."""
        return self.window or self.chunk

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return scaled logits below the soft cap, if the layer has one (Gemma 2, arXiv 2408.00118, 2)."""
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first positions `[T]` that queries at `positions [T]` see."""
        if self.window:
            return (positions - (self.window - 1)).clamp_min_(0)
        return positions - positions % self.chunk if self.chunk else torch.zeros_like(positions)


def absorbed(query: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Return the queries of a latent layer in the form of its keys: rotated dimensions, then those of latent vectors.

    In `query [T, Q, D]`, the dimensions that are not rotated come first. `projection [Q, D, L]` makes keys of latent
    vectors; here it is applied to queries instead (DeepSeek-V2, arXiv 2405.04434, 2.1.2).
    """
    plain, rotated = query.tensor_split((projection.shape[1],), dim=-1)
    latent = torch.bmm(plain.transpose(0, 1), projection).transpose(0, 1)
    return torch.cat((rotated, latent), dim=-1)


def key_rotations(attentions: Sequence[LayerAttention], old: torch.Tensor, new: torch.Tensor) -> list[KeyRotation]:
    """Return, by layer, the rotation that moves keys from the positions `old [T]` to the positions `new [T]`.

    Layers with the same RoPE share it.
    """
    rotations = {rotation: rotation.between(old, new) for rotation in {attention.rotation for attention in attentions}}
    return [rotations[attention.rotation] for attention in attentions]


def score_weights(attentions: Sequence[LayerAttention]) -> list[float]:
    """Return the weight of each layer in a sum of scores: layers that see all keys count as much as all others.

    A windowed layer sees only the end of a prompt. With 15 such layers of 18 (Gemma 3 270M), a plain sum over all
    layers spends 86 % of the budget on the last 512 tokens.
    """
    kinds = [attention.sees_all for attention in attentions]
    layers = Counter(kinds)
    return [len(kinds) / (len(layers) * layers[kind]) for kind in kinds]
