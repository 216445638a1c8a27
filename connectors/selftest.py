"""Whether blending is right for a model: tried once at start, on the model itself."""

import logging
from typing import Any

import torch
from transformers import DynamicCache

from lmc.blend.blender import Blend, Placed
from lmc.blend.layers import DecoderLayers
from lmc.blend.segments import Span
from lmc.blend.select import Policy
from lmc.connectors.distance import far
from lmc.connectors.hf import forward, rows_of

log = logging.getLogger(__name__)

SYSTEM, FIRST, SECOND, QUESTION = 7, 20, 25, 12  # tokens of the prompt that is tried
TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}  # relative to the largest value


def proves_itself(model: Any, layers: DecoderLayers) -> bool:
    """Whether our layers compute what the model computes; if not, one log line says so, and blending has to stay off.

    On a small prompt of random tokens: keys of two documents, moved to their places, must be the model's own in layer 0, where
    they depend on nothing else; and the blend at ratio 1 must end in the model's logits.
    """
    count = SYSTEM + FIRST + SECOND + QUESTION
    tokens = torch.randint(layers.vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    if count > layers.positions:
        log.error("blending is off: the model takes %d tokens only", layers.positions)
        return False
    cache = DynamicCache()
    wanted = forward(model, tokens, cache).logits[0, -1]
    pieces = [Placed(at=SYSTEM, tokens=FIRST, first=0), Placed(at=SYSTEM + FIRST, tokens=SECOND, first=0)]
    alone = []
    for piece in pieces:
        document = DynamicCache()
        forward(model, tokens[piece.at : piece.at + piece.tokens], document)
        alone.append([torch.stack(kv) for kv in rows_of(document)])
    parts = [[kv[layer] for kv in alone] for layer in range(layers.shape.layers)]
    question = Span(count - QUESTION, count)
    blind, whole = (
        Blend(layers, tokens, pieces, question, Policy(strategy="query", ratios=(ratio,))).run(enumerate(parts))
        for ratio in (0.0, 1.0)
    )
    assert whole.logits is not None
    worst = max(far(blind.keys[0], cache.layers[0].keys[0]), far(whole.logits, wanted))
    good = worst <= TOLERANCE[layers.shape.dtype]
    if not good:
        log.error(
            "blending is off: on %d random tokens lmc's layers differ from the model's by %.2g (relative)", count, worst
        )
    return good
