"""The entry point `vllm.general_plugins`, which vLLM calls in every process before it builds anything.

Registers the connector's name, and remembers the worker of this process, which leads to the loaded model. Without it (a connector
named by `kv_connector_module_path`) the model is found on the stack of the call that hands over the KV caches.
"""

import functools
import logging
import sys
from typing import Any

NAME, MODULE, CLASS = "LMCConnector", "lmc.connectors.vllm.connector", "LMCConnector"

_workers: list[Any] = []  # of this process; at most one


def register() -> None:
    """Make `LMCConnector` known to vLLM; may be called more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, CLASS)
    join_log()
    original = WorkerWrapperBase.initialize_from_config
    if hasattr(original, "lmc"):
        return

    @functools.wraps(original)
    def remembering(self: Any, *arguments: Any, **named: Any) -> Any:
        _workers[:] = [self.worker]
        return original(self, *arguments, **named)

    remembering.lmc = True  # type: ignore[attr-defined]
    WorkerWrapperBase.initialize_from_config = remembering


def join_log() -> None:
    """Let lmc's log lines go where vLLM's go, at its level, unless the application has said where."""
    ours, theirs = logging.getLogger("lmc"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)


def loaded_model() -> Any | None:
    """The model of this process's worker; None if there is no way to it."""
    if _workers:
        return _workers[0].get_model()
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if callable(getattr(owner, "get_model", None)) and hasattr(owner, "attn_groups"):
            return owner.get_model()  # type: ignore[union-attr]
        frame = frame.f_back  # type: ignore[assignment]
    return None
