"""The namespaces of tenants that an engine remembers."""

import threading

import pytest

from lmc.engine import names as module
from lmc.engine.names import UNKNOWN, Names
from lmc.keys import Namespace, RecordKind, tenant_of

DOCUMENT, PAGES = RecordKind.DOCUMENT, RecordKind.PAGES


FIELDS = Namespace(model="m", dtype="float32", layers=2, kv_heads=1, head_dim=8, rope="r", chunk_size=16)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    monkeypatch.setattr(module, "SALTS", 10)
    return Names(FIELDS, (), "model")


def test_a_new_tenant_is_known_however_many_there_were(names: Names) -> None:
    """Behind so many, every other one was called unknown, and routers did not find its documents."""
    first = names.of(DOCUMENT, "session 0")
    for number in range(100):
        namespace = names.of(DOCUMENT, f"session {number}")
        names.of(PAGES, f"session {number}")
        assert names.tenant_of(namespace) == tenant_of(f"session {number}")
    assert len(names.namespaces_of_documents()) <= 10 * len(RecordKind)
    assert names.tenant_of(first) == UNKNOWN


def test_a_tenant_that_asks_again_and_again_is_not_forgotten(names: Names) -> None:
    usual = names.of(DOCUMENT, "usual")
    for number in range(100):
        names.of(DOCUMENT, f"session {number}")
        assert names.of(DOCUMENT, "usual") == usual
    assert names.salt_of(usual) == "usual"


def test_several_threads_ask(names: Names) -> None:
    alone, wrong = Names(FIELDS, (), "model"), list[str]()
    right = {str(number): alone.of(DOCUMENT, str(number)) for number in range(50)}

    def ask(first: int) -> None:
        salts = [str(number % 50) for number in range(first, first + 2000)]
        wrong.extend(salt for salt in salts if names.of(DOCUMENT, salt) != right[salt])

    threads = [threading.Thread(target=ask, args=(7 * first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
