"""Documents that an engine knows."""

import itertools
import random
from array import array
from collections.abc import Iterable

import pytest

from lmc.documents.finder import DocumentFinder
from lmc.documents.known import FINDER_BYTES, KnownDocument, KnownDocuments, known_bytes, pack_tokens, unpack_tokens
from lmc.documents.table import DocumentTable, Filter, Use
from lmc.keys import document_keys

NAMESPACE = b"n" * 32


def note(known: KnownDocuments, tokens: list[int], *, used: bool = False, namespace: bytes = NAMESPACE) -> None:
    known.note(namespace, tokens, document_keys(namespace, tokens, 4), used=used)


def known_as(known: KnownDocuments, tokens: list[int]) -> KnownDocument:
    document = known.get(document_keys(NAMESPACE, tokens, 4)[-1].hex())
    assert document is not None
    return document


def found(known: KnownDocuments, prompt: list[int]) -> list[list[int]]:
    return [run.document.tokens.tolist() for run in known.find(NAMESPACE, [5, *prompt, 6], 64)]


def first_tokens(documents: Iterable[KnownDocument]) -> list[int]:
    return [document.tokens[0] for document in documents]


def test_what_was_used_last_comes_first_and_uses_are_counted() -> None:
    known = KnownDocuments()
    for tokens in ([1, 2, 3], [4, 5, 6, 7, 8], [9]):
        note(known, tokens)
    note(known, [1, 2, 3], used=True)
    total, documents = known.latest(10)
    assert [(one.tokens.tolist(), one.uses) for one in documents] == [([1, 2, 3], 1), ([9], 0), ([4, 5, 6, 7, 8], 0)]
    known.remove(documents[:1], "by somebody")
    assert (known.nearest([1, 2, 3], NAMESPACE), known.count(), known.latest(10)[0]) == (None, 2, 2)
    note(known, [1, 2, 3])
    assert known.nearest([1, 2, 3], NAMESPACE) is not None
    assert total == known.count() == 3


def test_what_was_used_longest_ago_is_forgotten_beyond_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    known = KnownDocuments(max_bytes=2.5 * known_bytes(4, 1))
    for start in range(0, 40, 4):
        note(known, list(range(start, start + 4)))
    assert first_tokens(known.latest(10)[1]) == [36, 32]
    known.use(document_keys(NAMESPACE, [32, 33, 34, 35], 4))
    note(known, [40, 41, 42, 43])
    assert first_tokens(known.latest(10)[1]) == [40, 32]
    note(known, list(range(1000)))
    assert [len(one.tokens) for one in known.latest(10)[1]] == [1000]
    assert len(caplog.messages) == 1
    assert "max_document_index_size" in caplog.text


def test_documents_that_are_kept_are_not_forgotten_nor_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    oldest = DocumentTable.oldest
    monkeypatch.setattr(DocumentTable, "oldest", lambda self, limit: looked.append(limit) or oldest(self, limit))
    known = KnownDocuments(max_bytes=100 * known_bytes(4, 1))
    for start in range(200):
        known.note(NAMESPACE, [start] * 4, document_keys(NAMESPACE, [start] * 4, 4)).pinned = True
    assert known.count() == 200
    assert len(looked) < 150
    known.latest(1, Use.of(known.latest(150)[1][-1]))[1][0].pinned = False
    for start in range(200, 210):
        note(known, [start] * 4)
    assert known.count() < 205


def test_pages_have_each_document_once_although_some_are_used_meanwhile() -> None:
    known, listed, after = KnownDocuments(), list[int](), None
    for start in range(50):
        note(known, [start] * 4)
    tied = known.latest(20)[1][5:15]
    for document in tied:  # Documents that are read at the start have the times of their files, which may be equal.
        document.used = tied[0].used
        known.rename(document, "tied")
    while page := known.latest(7, after)[1]:
        listed += first_tokens(page)
        after = Use.parse(str(Use.of(page[-1])))
        known.use([page[0].keys[-1]])
    assert sorted(listed) == list(range(50))


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_the_times_whatever_happens(seed: int) -> None:
    draw, table, documents = random.Random(seed), DocumentTable[KnownDocument](), list[KnownDocument]()
    for number in range(300):
        if documents and draw.random() < 0.4:
            document = draw.choice(documents)
            document.used, document.removed = float(draw.randrange(50)), draw.choice(["", "", "by somebody"])
            table.update(document)
        elif documents and draw.random() < 0.3:
            table.discard(documents.pop(draw.randrange(len(documents))))
        else:
            documents.append(KnownDocument(b"", array("I"), document_keys(b"", [number], 1), used=draw.randrange(50)))
            table.add(documents[-1])
        listed = sorted((one for one in documents if not one.removed), key=Use.of, reverse=True)
        after, limit = Use(float(draw.randrange(50)), draw.choice("08f")), draw.randrange(1, 20)
        assert table.count() == len(listed)
        assert table.latest(limit) == (len(listed), listed[:limit])
        assert table.latest(limit, after)[1] == [one for one in listed if Use.of(one) < after][:limit]
        oldest = [float("-inf") if one.removed else one.used for one in table.oldest(limit)]
        assert oldest == sorted(float("-inf") if one.removed else one.used for one in documents)[:limit]


def test_a_list_has_what_passes_all_conditions() -> None:
    known = KnownDocuments()
    for number, (name, model, tenant) in enumerate(itertools.product("ab", ("m-8b", "n-8b"), ("t1", "t2"))):
        keys = document_keys(NAMESPACE, [number], 4)
        known.note(NAMESPACE, [number], keys, name=f"{name}.md", model=model, tenant=tenant)
    old = known.latest(10)[1][2:5]
    for document in old:
        document.used -= 100
        known.rename(document, document.name)
    assert first_tokens(known.latest(10, only=Filter(name="a.", model="n"))[1]) == [2, 3]
    assert known.latest(1, only=Filter(tenant="t2"))[0] == 4
    assert known.latest(10, only=Filter(unused_for=50)) == (3, old)
    assert first_tokens(known.latest(2, tenant="t1")[1]) == [6, 2]
    assert known.latest(10, only=Filter(unused_for=50, tenant="t1", model="8b")) == (1, old[1:2])
    everything = known.list()
    for only in (Filter(model="n"), Filter(tenant="t"), Filter(tenant="t2", unused_for=50), Filter(model="x")):
        passing = sorted(filter(only.passes, everything), key=Use.of, reverse=True)
        assert known.latest(3, only=only) == (len(passing), passing[:3])
    page = known.latest(2, only=Filter(name="b"))[1]
    assert first_tokens(known.latest(2, Use.of(page[-1]), Filter(name="b"))[1]) == [5, 4]


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


@pytest.mark.parametrize("tenant", [None, "t"])
def test_documents_are_found_by_their_name_and_by_the_first_digits_of_their_id(tenant: str | None) -> None:
    known = KnownDocuments()
    documents = [
        known.note(NAMESPACE, [number], document_keys(NAMESPACE, [number], 4), name=f"{number % 7}", tenant="t")
        for number in range(300)
    ]
    mine = documents[100]
    known.remove(documents[107:108], "by a user")
    for digits in (0, 1, 2, 15, 16, 17, 64):
        begin = mine.id[:digits]
        there = [one for one in documents if one.id.startswith(begin) and not one.removed]
        assert known.with_digits(begin, tenant) == there
    assert (known.with_digits("0" * 65, tenant), known.with_digits("file", tenant)) == ([], [])
    assert known.named("2", tenant) == [one for one in documents if one.name == "2" and one is not documents[107]]
    known.rename(mine, "another")
    assert known.named("another", tenant) == [mine]
    assert mine not in known.named("2", tenant)
    known.rename(mine, "first\nsecond\nthird")
    known.rename(mine, "first\nthird")
    found = {name: known.named(name, tenant) for name in ("another", "first", "second", "third", "first\nthird")}
    assert [name for name, documents in found.items() if documents] == ["first", "third"]
    known.remove([mine], "by a user")
    assert known.named("third", tenant) == []


@pytest.mark.parametrize("finds", [True, False])
def test_the_nearest_document_has_most_tokens_in_common_also_if_it_has_no_run(finds: bool) -> None:
    known = KnownDocuments(finds=finds)
    for start in range(0, 4000, 400):
        note(known, list(range(start, start + 400)))
    longer = [*range(300), *range(5000, 5050)]
    scattered = [one for at in range(800, 1100, 3) for one in (at, at + 1, 7000 + at)]
    for tokens, first in ((longer, 0), (scattered, None), (list(range(790, 1200)), 800), (list(range(9000)), None)):
        nearest = known.nearest(tokens, NAMESPACE)
        assert (nearest.tokens[0] if nearest is not None else None) == first
    scattered = [one for at in range(800, 1200, 8) for one in (*range(at, at + 7), 7000 + at)]
    nearest = known.nearest(scattered, NAMESPACE)
    assert nearest is not None
    assert nearest.tokens[0] == 800


def test_a_version_whose_blocks_others_had_is_found_once_they_are_removed_and_it_is_learned_again() -> None:
    """A block is kept for four documents, and the last version had no block of its own."""
    known, body = KnownDocuments(finds=True), list(range(1000, 1500))
    versions = [[*body, 9000 + number] for number in range(6)]
    for tokens in versions:
        note(known, tokens)
    known.prepare()
    for tokens in versions[:5]:
        known.remove([known_as(known, tokens)], "by somebody")
    assert found(known, versions[5]) == []
    note(known, versions[5])
    assert found(known, versions[5]) == [versions[5]]
    known.remove([known_as(known, versions[5])], "by somebody")
    assert found(known, versions[5]) == []


def test_a_part_whose_block_others_had_is_found_once_they_are_removed_and_its_document_is_learned_again() -> None:
    """Each document has blocks of its own, too."""
    known, part = KnownDocuments(finds=True), list(range(1000, 1200))
    documents = [[*part, *range(start, start + 200)] for start in range(2000, 8000, 1000)]
    for tokens in documents:
        note(known, tokens)
    known.prepare()
    for tokens in documents[:5]:
        known.remove([known_as(known, tokens)], "by somebody")
    assert found(known, part) == []
    note(known, documents[5])
    assert found(known, part) == [documents[5]]
    assert found(known, documents[5][150:]) == [documents[5]]


def test_the_finders_of_many_tenants_count_against_the_limit() -> None:
    """With one document each, tenants took twice the memory that `max_document_index_size` allows."""
    known = KnownDocuments(finds=True, max_bytes=10 * (known_bytes(40, 1) + FINDER_BYTES))
    for number in range(40):
        namespace = number.to_bytes(32, "big")
        tokens = list(range(40 * number, 40 * number + 40))
        known.note(namespace, tokens, document_keys(namespace, tokens, 64))
        known.prepare()
    assert 5 <= known.count() <= 10


def test_the_finder_is_not_searched_for_a_document_that_was_removed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    removed, remove = list[list[int]](), DocumentFinder.remove
    monkeypatch.setattr(
        DocumentFinder, "remove", lambda self, one: removed.append(one.tokens.tolist()) or remove(self, one)
    )
    known = KnownDocuments(finds=True, max_bytes=2.5 * known_bytes(400, 100) + FINDER_BYTES)
    documents = [list(range(start, start + 400)) for start in range(0, 1600, 400)]
    note(known, documents[0])
    known.remove(known.list(), "by somebody")
    for tokens in documents[1:4]:
        note(known, tokens)
    assert {one.tokens[0] for one in known.list()} == {800, 1200}
    assert removed == documents[:2], "each once: the first when it was removed, the second when it was forgotten"


def test_chunks_are_unused_if_no_document_has_them_that_was_not_removed() -> None:
    known = KnownDocuments()
    short, long, other = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9]
    for tokens in (short, long, other, [7, 8, 9]):
        note(known, tokens)
    note(known, long, namespace=b"m" * 32)
    gone = [known_as(known, tokens) for tokens in (long, other)]
    assert known.unused(gone) == set()
    known.remove(gone, "by somebody")
    assert known.unused(gone) == {gone[0].keys[1], gone[1].keys[1]}
    known.remove([known_as(known, short)], "by somebody")
    assert known.unused(gone) == {*gone[0].keys, *gone[1].keys}
    note(known, other)
    assert known.unused(gone) == {gone[0].keys[1]}


def test_only_documents_that_share_chunks_are_looked_at_to_find_which_are_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the time of a removal would tell a tenant how many documents others have."""
    known, looked = KnownDocuments(max_bytes=20 * known_bytes(8, 2)), list[int]()

    def removed(document: KnownDocument) -> str:
        looked.append(document.tokens[0])
        return "by somebody"

    for start in range(0, 400, 10):
        note(known, list(range(start, start + 8)))
    (one,) = (document for document in known.list() if document.tokens[0] == 390)
    monkeypatch.setattr(KnownDocument, "removed", property(removed))
    assert known.unused([one]) == set(one.keys)
    assert looked == [390]
