"""The state of a request in the vLLM connector."""

import hashlib
from types import SimpleNamespace

import pytest

from lmc.connectors.vllm import request_state
from lmc.connectors.vllm.request_state import RequestState, Role


def test_the_blocks_of_a_request_with_lora_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole prompt was hashed again for every chunk that was saved."""
    hashed: list[bytes] = []

    def sha256(data: bytes):
        hashed.append(data)
        return hashlib.sha256(data)

    monkeypatch.setattr(request_state, "hashlib", SimpleNamespace(sha256=sha256))
    request = SimpleNamespace(block_hashes=[b"%d" % i for i in range(100)])
    state = RequestState(request=request, role=Role.EXACT, stamp=b"adapter")
    first = list(state.hashes)
    for _ in range(10):
        assert state.hashes == first
    request.block_hashes += [b"new"]
    assert state.hashes[:100] == first
    assert hashed == [b"adapter%d" % i for i in range(100)] + [b"adapternew"]
    assert len(set(state.hashes)) == 101


def test_a_request_without_a_stamp_has_the_engine_s_hashes() -> None:
    request = SimpleNamespace(block_hashes=[b"a", b"b"])
    assert RequestState(request=request, role=Role.EXACT).hashes is request.block_hashes
