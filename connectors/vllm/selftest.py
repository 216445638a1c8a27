"""Whether blending is right for the loaded model: tried once, in blocks that nobody uses yet."""

from typing import Any

import torch

from lmc.blend.rope import rotate, turn_between
from lmc.connectors.distance import far
from lmc.connectors.vllm.native import NativeLayers
from lmc.errors import UnsupportedModel

TOKENS, MOVED = 64, 37  # random tokens of the prompt, and where a document computed alone is moved to
# Relative to the largest value. Half precision loses its last bits in other places when rows go in other batches.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def prove(model: Any, layers: NativeLayers, config: Any, blocks: int) -> None:
    """Raise `UnsupportedModel` if lmc's loop over the layers leaves other keys and values in the pages than the model itself.

    The model's own forward fills one set of blocks; rows in scattered runs, in two goes, fill another: they must agree in every layer.
    Keys of a document computed alone and moved must be the model's in layer 0, where they depend on nothing else.
    """
    need = -(-TOKENS // layers.block_size)
    if blocks < 3 * need + 1:
        raise UnsupportedModel(f"the KV cache has only {blocks} blocks, too few to try it")
    device = layers.device
    whole, ours, alone = (
        torch.arange(1 + i * need, 1 + (i + 1) * need, device=device) for i in range(3)
    )  # 0 is the null block
    vocabulary = config.model_config.get_vocab_size()
    tokens = torch.randint(vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    everything = torch.arange(TOKENS, device=device)
    with torch.inference_mode():
        _forward(model, layers, tokens, everything, whole)
        # First the even runs of eight tokens over nothing, then all: what was wrong at first has to be overwritten.
        for positions in (everything[everything // 8 % 2 == 0], everything):
            _loop(layers, tokens, positions, ours)
        _loop(layers, tokens[MOVED:], torch.arange(TOKENS - MOVED, device=device), alone)
        worst = max(
            far(a, b) for layer in range(layers.depth) for a, b in _pairs(layers, layer, everything, whole, ours)
        )
        worst = max(worst, far(*_moved(layers, whole, alone)))
        for access in layers.access:
            slots = layers.slots(
                torch.cat((whole, ours, alone)), torch.arange(3 * need * layers.block_size, device=device)
            )
            empty = torch.zeros((len(slots), access.kv_heads, access.head_dim), dtype=_dtype(layers), device=device)
            access.scatter(slots, empty, empty)
    if not worst <= TOLERANCE[_dtype(layers)]:
        raise UnsupportedModel(
            f"on {TOKENS} random tokens lmc's loop differs from the model's own by {worst:.2g} (relative)"
        )


def _forward(
    model: Any, layers: NativeLayers, tokens: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor
) -> None:
    (batch,) = layers.batches(positions, blocks, len(positions))
    with layers.forward_context(batch):
        model(tokens, positions)


def _loop(layers: NativeLayers, tokens: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor) -> None:
    hidden = layers.embed(tokens, positions)
    (batch,) = layers.batches(positions, blocks, len(positions))
    for layer in range(layers.depth):
        layers.advance(layer, hidden, batch)


def _pairs(
    layers: NativeLayers, layer: int, positions: torch.Tensor, one: torch.Tensor, other: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = [layers.access[layer].gather(layers.slots(blocks, positions)) for blocks in (one, other)]
    return list(zip(*found, strict=True))


def _moved(layers: NativeLayers, whole: torch.Tensor, alone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = TOKENS - MOVED
    old = torch.arange(count, device=layers.device)
    stored, _ = layers.access[0].gather(layers.slots(alone, old))
    wanted, _ = layers.access[0].gather(layers.slots(whole, old + MOVED))
    turn = turn_between(*layers.rows_of(0, count), *layers.rows_of(MOVED, count))
    return rotate(stored.transpose(0, 1), *turn, interleaved=layers.interleaved).transpose(0, 1), wanted


def _dtype(layers: NativeLayers) -> torch.dtype:
    dtype: torch.dtype = layers.access[0].gather(torch.zeros(1, dtype=torch.long, device=layers.device))[0].dtype
    return dtype
