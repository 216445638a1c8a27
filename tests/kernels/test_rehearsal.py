"""At the start, the self-test runs every kernel, so that none is compiled while a request waits."""

import pytest
import torch
from amount import mostly_long
from models import random_model, random_tokens
from watching import KERNELS, watch_kernels

from lmc.blend import selftest
from lmc.blend.kernels import attention_triton
from lmc.blend.kernels.tuning import HOPPER
from lmc.blend.segments import Placement
from lmc.blend.selftest import DOCUMENT_TOKENS, PROMPT_TOKENS, QUESTION_SIZE, rehearse
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.layers import DecoderLayers


@pytest.mark.parametrize("layers", mostly_long([1, 3], 3))
def test_a_rehearsal_runs_every_kernel(monkeypatch, layers):
    """Also those of rows that share their keys, and of scores whose tokens are shared; contexts are short here."""
    monkeypatch.setattr(selftest, "LONG", 96)
    monkeypatch.setattr(selftest, "LONGEST", 120)
    monkeypatch.setattr(attention_triton, "tuning_of", lambda device: HOPPER._replace(fewest_keys=16))
    watch, model = watch_kernels(monkeypatch), DecoderLayers(random_model(layers=layers))
    document = Placement(at=PROMPT_TOKENS - DOCUMENT_TOKENS, tokens=DOCUMENT_TOKENS - QUESTION_SIZE, first=0)
    part = torch.randn(2, document.tokens, model.shape.kv_heads, model.shape.head_dim)

    def canvas():
        reader = ((layer, [part]) for layer in range(layers))
        return DenseCanvas(model, random_tokens(PROMPT_TOKENS, 0), [document], reader)

    with torch.inference_mode():
        rehearse(canvas, document, PROMPT_TOKENS)
    # What programs of the kernel of scores are compiled for.
    scored = {(constants["SHARED"], constants["OVER_ALL"]) for name, constants in watch.named if name == "_paid"}
    assert scored == {(False, False), (False, True), (True, False), (True, True)}
    launched, names = set(watch.launched), {name for _, name in KERNELS}
    of_later_layers = {"_deviation", "_rotated", "_mean", "_alike", "_invert", "_changes", "_correct"}
    elsewhere = {"_gather"}  # A canvas over pages reads with it.
    assert launched & names == names - elsewhere - (of_later_layers if layers == 1 else set())
