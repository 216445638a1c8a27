"""LoRA: the rows of lmc go through the model without an adapter.

Before it calls the connector, the engine tells the model's layers which adapters the tokens of a step have. lmc tells
them that its own rows have none, and afterwards repeats what the engine has told them. Requests with an adapter are not
blended, and nothing is learned from them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmc.connectors.vllm import vllm_api
from lmc.errors import UnsupportedModel

NONE = 0  # the number that stands for no adapter


class WithoutAdapters:
    """What lmc's calls of the model need in an engine with LoRA."""

    def __init__(self, runner: Any) -> None:
        """Find the adapters of a model runner. Raises `UnsupportedModel` if this vLLM keeps them in another way."""
        self._manager: Any = getattr(getattr(runner, "lora_manager", None), "_adapter_manager", None)
        self._rows, self._own = 0, None  # the number of rows in lmc's last call, and what the layers were told then
        if not hasattr(self._manager, "_last_mapping"):
            raise UnsupportedModel("LoRA is enabled (--enable-lora), and this vLLM applies adapters in an unknown way")

    def set(self, rows: int) -> None:
        """Apply no adapter in the next call of layers, which has this number of rows."""
        if rows != self._rows or self._manager._last_mapping is not self._own:
            self._rows = rows
            self._own = vllm_api.LoRAMapping(index_mapping=(NONE,) * rows, prompt_mapping=(NONE,), is_prefill=True)
            self._manager.set_adapter_mapping(self._own)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """At the end of this context, apply the adapters that the engine had set before it."""
        before = self._manager._last_mapping
        try:
            yield
        finally:
            if before is not None:
                self._manager.set_adapter_mapping(before)
