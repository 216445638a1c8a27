"""The model that drafts tokens in speculative decoding: a separate model, an EAGLE head, or an MTP module.

Its keys and values are in the engine's pages, too. Answers do not depend on them: they only decide how many drafted
tokens are accepted. A blend places those of a document at their new positions, runs the rows that it computes through
the draft model as well, and corrects the others.

A head and a module get the hidden states of a token together with the next token, at the position of the first (EAGLE,
Li et al., arXiv 2401.15077; DeepSeek-V3, arXiv 2412.19437, 2.2). EAGLE-3 (arXiv 2503.01840) gets hidden states of
several layers.
"""

from collections.abc import Container
from typing import Any

import torch

from lmc.connectors.vllm.model_kinds import attentions_in, kv_source_of
from lmc.errors import UnsupportedModel

Output = torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]  # what a model returns; see `DraftModel.run`

ALONE = "draft_model"  # the method of a model that reads nothing of the other one
METHODS = (ALONE, "eagle", "eagle3", "mtp")


class DraftModel:
    """The draft model of an engine."""

    def __init__(self, model: Any, method: str, attention: list[Any]) -> None:
        """Keep what is known of the model: `attention` are its modules with a KV cache, in the order of its layers."""
        self._model, self._method, self.attention = model, method, attention

    @classmethod
    def of(cls, model: Any | None, speculative: Any, caches: Container[str]) -> "DraftModel":
        """Return the draft model `model`, or `NO_DRAFTS` if it is None or has no KV cache of its own.

        `speculative` is the engine's configuration for it, and `caches` contains the names of layers with a KV cache.
        Raises `UnsupportedModel` if lmc cannot compute its keys and values.
        """
        found = [] if model is None else attentions_in(model)
        attention = [one for one in found if one.layer_name in caches and not kv_source_of(one)]
        if not attention:
            return NO_DRAFTS
        if speculative.method not in METHODS:
            raise UnsupportedModel(f"lmc does not know how {speculative.method!r} drafts tokens")
        if getattr(speculative, "parallel_drafting", False):
            raise UnsupportedModel("the model's draft model drafts several tokens at once")
        if getattr(speculative, "use_heterogeneous_vocab", False):
            raise UnsupportedModel("the model's draft model has another vocabulary")
        return cls(model, speculative.method, attention)

    @property
    def reads_on(self) -> bool:
        """Whether a row has the next token instead of the token at its position."""
        return bool(self.attention) and self._method != ALONE

    def modules(self) -> list[Any]:
        """Return all modules of the draft model."""
        return list(self._model.modules())

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, output: Output | None) -> None:
        """Run rows `[T]` through the draft model.

        `tokens` are as `reads_on` says. If it is true, `output` is what the other model has returned for these rows:
        hidden states `[T, E]`, perhaps with those of some layers.
        """
        if output is None or not self.reads_on:
            self._model(input_ids=tokens, positions=positions)
            return
        hidden = output if isinstance(output, torch.Tensor) else torch.cat(output[1], dim=-1)
        if self._method == "eagle3":
            hidden = self._model.combine_hidden_states(hidden)
        self._model(input_ids=tokens, positions=positions, hidden_states=hidden)


NO_DRAFTS = DraftModel(None, "", [])
