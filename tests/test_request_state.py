"""The state of a request in the vLLM connector."""

import hashlib
from collections import Counter
from types import SimpleNamespace

import pytest
from vllm_fakes import Lab, Request

from lmc.connectors.vllm.scheduler import request_state
from lmc.connectors.vllm.scheduler.classifier import RequestClassifier
from lmc.connectors.vllm.scheduler.request_state import RequestState, Role, Stamp


def test_the_blocks_of_a_request_with_lora_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole prompt was hashed again for every chunk that was saved."""
    hashed: list[bytes] = []

    def sha256(data: bytes):
        hashed.append(data)
        return hashlib.sha256(data)

    monkeypatch.setattr(request_state, "hashlib", SimpleNamespace(sha256=sha256))
    request = SimpleNamespace(block_hashes=[b"%d" % i for i in range(100)])
    state = RequestState(request=request, role=Role.EXACT, stamp=Stamp(b"adapter"))
    first = list(state.hashes)
    for _ in range(10):
        assert state.hashes == first
    request.block_hashes += [b"new"]
    assert state.hashes[:100] == first
    assert hashed == [b"adapter%d" % i for i in range(100)] + [b"adapternew"]
    assert len(set(state.hashes)) == 101


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_the_hash_of_a_block_that_gets_another_last_token_is_stamped_again(kept: int) -> None:
    """A session that gets more input drops its last token, which has no KV, and the hashes from its block on."""
    request = SimpleNamespace(block_hashes=[b"a", b"b", b"c"])
    state = RequestState(request=request, role=Role.EXACT, stamp=Stamp(b"adapter"))
    first = list(state.hashes)
    del request.block_hashes[kept:]
    assert list(state.hashes) == first[:kept]
    request.block_hashes += [b"other", b"c"]
    fresh = RequestState(request=request, role=Role.EXACT, stamp=Stamp(b"adapter"))
    assert state.hashes == fresh.hashes
    del request.block_hashes[kept:]
    request.block_hashes += [b"third"]
    assert state.hashes == [*first[:kept], hashlib.sha256(b"adapterthird").digest()]


def test_images_are_stamped_from_the_moment_on_at_which_a_request_has_some() -> None:
    request = SimpleNamespace(block_hashes=[b"a", b"b"], mm_features=[])
    state = RequestState(request=request, role=Role.EXACT, stamp=Stamp(b"adapter", of_images=b"process"))
    assert state.hashes == [hashlib.sha256(b"adapter" + block).digest() for block in (b"a", b"b")]
    request.mm_features.append("image")
    request.block_hashes.append(b"c")
    assert state.hashes == [hashlib.sha256(b"adapterprocess" + block).digest() for block in (b"a", b"b", b"c")]


def test_a_request_without_a_stamp_has_the_engine_s_hashes() -> None:
    request = SimpleNamespace(block_hashes=[b"a", b"b"])
    assert RequestState(request=request, role=Role.EXACT).hashes is request.block_hashes


@pytest.mark.parametrize(
    ("wish", "note"),
    [(None, ""), ({"ratio": 0.5}, ""), ({"learn": True}, "requests with prompt embeddings are not blended")],
)
def test_a_request_of_embeddings_alone_gets_a_note_if_it_asks_for_more(wish: object, note: str) -> None:
    request = SimpleNamespace(
        request_id="one", prompt_token_ids=None, prompt_embeds=object(), num_prompt_tokens=20, num_tokens=20,
        kv_transfer_params={"lmc": wish} if wish else None, cache_salt=None, lora_request=None, mm_features=[],
        skip_reading_prefix_cache=False, block_hashes=[], num_preemptions=0,
    )  # fmt: skip
    state = RequestClassifier(Lab().setup, Counter(), quiet=True).classify(request)
    assert (state.role, state.note) == (Role.EXACT, note)


def test_texts_that_are_much_longer_than_the_prompt_are_not_encoded() -> None:
    """Megabytes of text took seconds of the engine's steps, for each request anew."""
    encoded: list[str] = []

    def encode(text: str, **_: object) -> list[int]:
        encoded.append(text)
        return [5] * 30

    tokenizer = SimpleNamespace(encode=encode, decode=lambda tokens: "word " * len(tokens))
    classifier = RequestClassifier(Lab(tokenizer=tokenizer).setup, counts := Counter(), quiet=True)
    for size, refused in ((64 * 40, False), (64 * 40 + 1, True)):
        given = {"documents": ["a" * (size - 10), "b" * 10]}
        state = classifier.classify(Request("one", [1] * 40, given))
        assert ("the texts have 2561 characters, and the prompt 40 tokens" in state.note) == refused
        assert bool(encoded) != refused
        encoded.clear()
    assert counts["refused"] == 1
