"""A logits processor for vLLM that makes a request answer with given tokens, so that logprobs are read along them.

vLLM's logprobs are those of the model, from before this. Engines load it by its name, `forced:Forced`; a request names
the tokens in `extra_args`, as `forced`.
"""

from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Forced(AdapterLogitsProcessor):
    """Chooses the tokens that a request names, one after the other."""

    def is_argmax_invariant(self) -> bool:
        """Whether greedy answers stay as they are."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """Return what changes the logits of one request, or None for a request that names no tokens."""
        wanted = (params.extra_args or {}).get("forced")
        if not wanted:
            return None

        def choose(said: list[int], logits: Any) -> Any:
            if len(said) < len(wanted):
                logits[:] = -float("inf")
                logits[wanted[len(said)]] = 0.0
            return logits

        return choose
