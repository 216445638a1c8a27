"""Documents that an engine knows."""

import pytest

from lmc.documents import known as known_documents
from lmc.documents.known import KnownDocuments, pack_tokens, unpack_tokens
from lmc.keys import document_keys

NAMESPACE = b"n" * 32


def note(known: KnownDocuments, tokens: list[int], *, used: bool = False, namespace: bytes = NAMESPACE) -> None:
    known.note(namespace, tokens, document_keys(namespace, tokens, 4), used=used)


def test_what_was_used_last_comes_first_and_uses_are_counted() -> None:
    known = KnownDocuments()
    for tokens in ([1, 2, 3], [4, 5, 6, 7, 8], [9]):
        note(known, tokens)
    note(known, [1, 2, 3], used=True)
    assert [(one.tokens.tolist(), one.uses) for one in known.list()] == [([1, 2, 3], 1), ([9], 0), ([4, 5, 6, 7, 8], 0)]
    known.list()[0].removed = "by somebody"
    assert (known.nearest([1, 2, 3], NAMESPACE), known.count()) == (None, 2)
    note(known, [1, 2, 3])
    assert known.nearest([1, 2, 3], NAMESPACE) is not None
    assert known.count() == 3


def test_what_was_used_longest_ago_is_forgotten_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_documents, "MAX_KNOWN_TOKENS", 10)
    known = KnownDocuments()
    for start in range(0, 40, 4):
        note(known, list(range(start, start + 4)))
    assert [one.tokens[0] for one in known.list()] == [36, 32]
    note(known, list(range(100)))
    assert [len(one.tokens) for one in known.list()] == [100]


def test_the_nearest_document_is_one_of_the_same_tenant_that_is_much_like_it() -> None:
    known = KnownDocuments()
    note(known, [1, 2, 3, 4, 5, 6])
    note(known, [1, 2, 30, 40])
    note(known, [1, 2, 3, 4, 5, 7], namespace=b"m" * 32)
    found = known.nearest([9, 1, 2, 3, 4, 5, 6], NAMESPACE)
    assert found is not None
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert known.nearest([70, 80], NAMESPACE) is None


def test_tokens_survive_the_label_of_a_record() -> None:
    for tokens in ([], [0, 1, 2**32 - 1], list(range(5000))):
        assert unpack_tokens(pack_tokens(tokens)).tolist() == tokens
    for text in ("no such thing", "é", "0000"):
        with pytest.raises(ValueError):  # noqa: PT011 - of base64, zlib or array
            unpack_tokens(text)


def test_a_record_that_does_not_say_whose_it_is_gets_an_owner_when_somebody_knows() -> None:
    known = KnownDocuments()
    note(known, [1, 2, 3])
    known.note(NAMESPACE, [1, 2, 3], document_keys(NAMESPACE, [1, 2, 3], 4), model="m", tenant="t")
    assert [(one.model, one.tenant) for one in known.list()] == [("m", "t")]
    assert ([one.tenant for one in known.list("t")], known.list("")) == (["t"], [])
