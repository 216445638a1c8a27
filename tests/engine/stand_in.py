"""A connector that hands over handshake metadata of its own, as NIXL's does, and never has tokens."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


class Address(KVConnectorHandshakeMetadata):
    """What the stand-in's workers tell its scheduler."""


class StandIn(KVConnectorBase_V1, SupportsHMA):
    """Takes part in everything, and demands metadata of its own type."""

    def get_handshake_metadata(self) -> Address:
        return Address()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for given in metadata.values():
            if not isinstance(given, Address):
                raise ValueError(f"the stand-in got the metadata of another connector: {given!r}")
        self.introduced = sorted(metadata)

    def start_load_kv(self, forward_context: Any, **named: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **named: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
