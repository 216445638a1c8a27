"""The self-test for transformers, which runs once when a model is wrapped."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from lmc.blend.canvas import KV
from lmc.blend.segments import Placement
from lmc.blend.selftest import (
    DOCUMENT_TOKENS,
    QUESTION_SIZE,
    prove,
    random_prompt,
    rehearse,
)
from lmc.blend.tolerances import FLOOR, check, difference
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.hf import forward, rows_of
from lmc.connectors.transformers.layers import DecoderLayers


def prove_model(model: Any, layers: DecoderLayers) -> None:
    """Raise `UnsupportedModel` if lmc's layers compute different keys, values or logits than the model itself."""
    with torch.inference_mode():
        reach = max([layers.longest_window, *(one.reach for one in layers.attentions(layers.angles(1)))])
        tokens = random_prompt(layers.vocabulary, reach, layers.positions, layers.device)
        start = len(tokens) - DOCUMENT_TOKENS
        (whole, wanted), (in_two, again), (alone, _), (repeated, _) = (
            _prefill(model, chunks, latent=layers.latent)
            for chunks in ([tokens], [tokens[:start], tokens[start:]], [tokens[start:]], [tokens[:1] * len(tokens)])
        )
        placement = Placement(at=start, tokens=DOCUMENT_TOKENS, first=0)
        parts = ((layer, [kv]) for layer, kv in enumerate(alone))
        canvas = DenseCanvas(layers, tokens, [], iter(()))
        prove(canvas, DenseCanvas(layers, tokens, [placement], parts), whole, in_two, repeated)
        if layers.device.type == "cuda":  # Nothing is compiled for a CPU.
            moved = Placement(at=start, tokens=DOCUMENT_TOKENS - QUESTION_SIZE, first=0)
            stored = [(keys[: moved.tokens], values[: moved.tokens]) for keys, values in alone]
            rehearse(
                lambda: DenseCanvas(layers, tokens, [moved], ((layer, [kv]) for layer, kv in enumerate(stored))),
                moved,
                len(tokens),
            )
        check("logits", difference(canvas.logits, wanted), difference(again, wanted), FLOOR[wanted.dtype])


def _prefill(model: Any, chunks: Sequence[Sequence[int]], *, latent: bool) -> tuple[list[KV], torch.Tensor]:
    """Prefill a prompt with the model, chunk by chunk; return the KV by layer and the logits of the last token."""
    cache = DynamicCache()
    for chunk in chunks:
        logits = forward(model, chunk, cache).logits[0, -1]
    return rows_of(cache, latent=latent), logits
