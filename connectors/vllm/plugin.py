"""The entry point `vllm.general_plugins`, which vLLM calls in every process before it builds anything.

It registers the connector's name. It also remembers the worker of this process, from which lmc gets the loaded model.
The plugin does not run if `kv_connector_module_path` names the connector. Then lmc finds the model on the call stack
when vLLM passes the KV caches.
"""

import copy
import functools
import logging
import sys
from typing import Any

from lmc.config.sources import log_level
from lmc.connectors.vllm import vllm_api
from lmc.errors import ConfigError

log = logging.getLogger(__name__)

NAME, MODULE, CLASS = "LMCConnector", "lmc.connectors.vllm.entry", "LMCConnector"

_workers: list[Any] = []  # the worker of this process; empty if the process has no worker


def register() -> None:
    """Register `LMCConnector` at vLLM. May be called more than once."""
    join_log()
    try:  # vLLM must start even if lmc cannot work.
        factory = vllm_api.KVConnectorFactory
        if NAME not in factory._registry:
            factory.register_connector(NAME, MODULE, CLASS)
        wrapper = vllm_api.WorkerWrapperBase
    except ConfigError as error:
        log.warning("%s", error)
        return
    original = getattr(wrapper, "initialize_from_config", None)
    if original is None or hasattr(original, "lmc"):
        return

    @functools.wraps(original)
    def remembering(self: Any, *arguments: Any, **named: Any) -> Any:
        _workers[:] = [self.worker]
        return original(self, *arguments, **named)

    remembering.lmc = True  # type: ignore[attr-defined]
    wrapper.initialize_from_config = remembering


def join_log() -> None:
    """Send lmc's log lines where vLLM's go, at vLLM's level, unless the application has configured lmc's logging."""
    ours, theirs = logging.getLogger("lmc"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        for handler in theirs.handlers:
            own = copy.copy(handler)
            own.setLevel(logging.NOTSET)  # The handlers of vLLM have its level, and LMC_LOG_LEVEL may be lower.
            ours.addHandler(own)
        ours.setLevel(log_level(theirs.level))


def loaded_model() -> Any | None:
    """Return the model of this process's worker, or None if it cannot be found."""
    runner = loaded_runner()
    return None if runner is None else runner.get_model()


def loaded_draft_model() -> Any | None:
    """Return the draft model of this process's worker, or None if there is none, or if it cannot be found."""
    runner = loaded_runner()
    for name in ("drafter", "speculator"):  # the names of vLLM's two model runners
        if (model := getattr(getattr(runner, name, None), "model", None)) is not None:
            return model.unwrap() if hasattr(model, "unwrap") else model
    return None


def loaded_runner() -> Any | None:
    """Return the model runner of this process's worker, or None if it cannot be found."""
    if _workers:
        return _workers[0].model_runner
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if callable(getattr(owner, "get_model", None)) and hasattr(owner, "attn_groups"):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def bytes_of_steps() -> int:
    """Return how many bytes of a GPU the engine's own steps need, as this process's worker has measured; 0 if unknown.

    vLLM leaves them free, in addition to the memory of the weights and of the KV cache.
    """
    return int(getattr(_workers[0], "peak_activation_memory", 0)) if _workers else 0
