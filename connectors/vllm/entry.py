"""The class that vLLM loads as `LMCConnector`: lmc's connector, or an inert connector.

The inert connector is loaded if this vLLM lacks something that lmc needs. vLLM then starts and serves without lmc.
"""

import logging
from contextlib import suppress
from typing import Any

from lmc.connectors.vllm import vllm_api
from lmc.connectors.vllm.contract import INSTALL, facts_of_imported, objections
from lmc.connectors.vllm.plugin import join_log
from lmc.errors import ConfigError

log = logging.getLogger(__name__)


def inert_connector(missing: list[str]) -> type:
    """Return a connector class that does nothing, and logs at start what is missing.

    Raises `ConfigError` if this vLLM has no base class for connectors.
    """
    base = vllm_api.KVConnectorBase_V1
    bases: tuple[Any, ...] = (base,)
    with suppress(ConfigError):  # If vLLM has `SupportsHMA`, models with several kinds of caches need it to start.
        bases = (base, vllm_api.SupportsHMA)

    def nothing(self: Any, *_: Any, **__: Any) -> None:
        """Do nothing."""

    class InertConnector(*bases):  # type: ignore[misc]
        """A connector that does nothing."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any, **more: Any) -> None:
            super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config, **more)
            if getattr(role, "name", "SCHEDULER") == "SCHEDULER":  # Only one process logs the error.
                join_log()
                version, reasons = vllm_api.installed_version(), "; ".join(missing)
                log.error(
                    "lmc is disabled, because it does not work with vLLM %s: %s. To use lmc, %s",
                    version,
                    reasons,
                    INSTALL,
                )

        def get_num_new_matched_tokens(self, *_: Any, **__: Any) -> tuple[int, bool]:
            """Return that nothing will be loaded."""
            return 0, False

        def request_finished(self, *_: Any, **__: Any) -> tuple[bool, None]:
            """Return that the engine may free the blocks at once."""
            return False, None

        def request_finished_all_groups(self, *_: Any, **__: Any) -> tuple[bool, None]:
            """Return that the engine may free the blocks at once."""
            return False, None

        def build_connector_meta(self, *_: Any, **__: Any) -> Any:
            """Return an empty plan."""
            return vllm_api.KVConnectorMetadata()

    inert = dict.fromkeys(getattr(InertConnector, "__abstractmethods__", ()), nothing)
    return type(InertConnector.__name__, (InertConnector,), inert)


def __getattr__(name: str) -> Any:
    """Choose the connector class when vLLM first requests it."""
    if name != "LMCConnector":
        raise AttributeError(name)
    if "connector" not in _chosen:
        if missing := objections(facts_of_imported()):
            _chosen["connector"] = inert_connector(missing)
        else:
            from lmc.connectors.vllm.connector import LMCConnector

            _chosen["connector"] = LMCConnector
    return _chosen["connector"]


_chosen: dict[str, type] = {}
