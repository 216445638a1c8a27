"""Known documents are found anywhere in prompts: by tokens or by words, of one tenant, in whole or in part."""

import asyncio
import json
import random
import timeit
from array import array

import pytest
from echo_engine import respond
from router_house import house, served
from storage_fakes import eventually
from test_router_events import AdminEndpoint, event, listed, publisher, until

from lmc.blend.markers import Markers
from lmc.errors import InputError
from lmc.keys import tenant_of, tokens_digest
from lmc.router import document_search, prefills
from lmc.router.cut import SEPARATED, Cutter, content_of, with_found
from lmc.router.document_index import DocumentIndex, ReportedDocument
from lmc.router.document_reader import DocumentReader
from lmc.router.document_search import ENTRY_BYTES, DocumentSearch, KnownText, KnownTexts
from lmc.router.engines import Engine, Engines, address
from lmc.router.follow import Follower
from lmc.router.policies.documents import Documents
from lmc.router.policy_types import Candidate, FoundDocument, PromptRequest

ASK, CHAT, EXPLAIN = "/v1/completions", "/v1/chat/completions", "/lmc/explain"
MODEL = {"model": "echo"}
NAMES = ("alpha", "beta", "gamma")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Searches of tests take as long as they need."""
    monkeypatch.setattr(document_search, "SEARCH_SECONDS", 30.0)


def text(name: str, words: int = 120) -> str:
    """Return a document of some words, which no other document has."""
    dice = random.Random(name)
    return " ".join(f"{name}{dice.randrange(1000)}" + "," * (dice.random() < 0.1) for _ in range(words))


TEXTS = {name: text(name) for name in NAMES}
# How applications write documents into prompts.
TEMPLATES = {
    "blank_lines": "\n\n".join,
    "numbers": lambda texts: "\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1)),
    "xml": lambda texts: "".join(f'<document index="{i}">\n{text}\n</document>\n' for i, text in enumerate(texts)),
    "lines": lambda texts: "\n".join(f"- {text.replace(' ', chr(10), 3)}" for text in texts),
}
BODIES = {
    ASK: lambda prompt: {**MODEL, "prompt": prompt},
    CHAT: lambda prompt: {
        **MODEL,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": prompt}],
    },
}


def rag_prompt(template: str, names=NAMES, question: str = "why?") -> str:
    documents = TEMPLATES[template]([TEXTS[name] for name in names])
    return f"Use the following context to answer.\n\n{documents}\n\nQuestion: {question}\nAnswer:"


def separated(*names: str) -> str:
    return " # # ".join(["system", *(TEXTS[name] for name in names), "question"])


@pytest.fixture(scope="module")
def two():
    """A router whose engines were each sent other documents between separators, of tenant t and of none.

    It measures no rates, which would decide between the engines on a machine that is busy with something else.
    """
    with pytest.MonkeyPatch.context() as patch, house(2) as built:
        patch.setattr(prefills, "MIN_MEASUREMENTS", float("inf"))
        for salt in ("", "t"):
            for name in NAMES:
                built.send(ASK, {**MODEL, "prompt": separated(name), **({"cache_salt": salt} if salt else {})}).read()
        yield built


# -- in prompts of applications ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_documents_are_found_as_applications_write_them(two, path, template):
    body = BODIES[path](rag_prompt(template))
    two.rest()
    status, found = two.ask(EXPLAIN, body)
    assert (status, found["documents"]) == (200, {"separators": 0, "tokens": 0, "words": 3})
    assert sum(one["documents"] for one in found["engines"]) == 3
    best = max(found["engines"], key=lambda one: one["expected_tokens"])
    assert two.send(path, body).headers["x-lmc-engine"] == found["engine"] == best["engine"]


def test_a_prompt_goes_to_the_engine_that_has_its_document(two):
    for name in NAMES:
        two.rest()
        home = two.ask(EXPLAIN, {**MODEL, "prompt": separated(name)})[1]["engine"]
        prompt = f"A prompt with another beginning. {rag_prompt('numbers', (name,))}"
        answer = two.send(ASK, {**MODEL, "prompt": prompt})
        assert answer.headers["x-lmc-engine"] == home
        assert int(answer.headers["x-lmc-expected-tokens"]) == pytest.approx(len(TEXTS[name]) / 4, rel=0.1)


def test_a_tenant_finds_only_documents_of_its_own(two):
    body = {**MODEL, "prompt": rag_prompt("xml")}
    assert two.ask(EXPLAIN, {**body, "cache_salt": "t"})[1]["documents"]["words"] == 3
    assert two.ask(EXPLAIN, {**body, "cache_salt": "u"})[1]["documents"]["words"] == 0


def test_documents_are_found_by_tokens_where_they_are_known():
    """Each character is a token of the echo engine."""
    with house(2, exact_tokens=True) as built:
        cutter = built.router.application.policy.needs.cutter
        cutter.markers["echo"] = Markers(separators=(tuple(map(ord, " # # ")),))
        home = built.send(ASK, {**MODEL, "prompt": separated("alpha", "beta")}).headers["x-lmc-engine"]
        answer = built.send(ASK, {**MODEL, "prompt": rag_prompt("xml", ("beta", "alpha"))})
        assert answer.headers["x-lmc-engine"] == home
        expected = int(answer.headers["x-lmc-expected-tokens"])
        assert expected == pytest.approx(len(TEXTS["alpha"] + TEXTS["beta"]), abs=8)
        prompt = {**MODEL, "prompt": list(map(ord, rag_prompt("numbers")))}
        assert built.ask(EXPLAIN, prompt)[1]["documents"] == {"separators": 0, "tokens": 2, "words": 0}
        assert built.numbers('documents{how="tokens"}') == 2
        assert built.numbers('documents{how="separators"}') == 2


def test_a_search_that_takes_too_long_delays_no_request(two, monkeypatch):
    monkeypatch.setattr(document_search, "SEARCH_SECONDS", 0.0)
    before = two.numbers("unsearched")
    assert two.ask(ASK, {**MODEL, "prompt": rag_prompt("xml")})[0] == 200
    assert two.numbers("unsearched") == before + 1
    monkeypatch.setattr(document_search, "SEARCH_SECONDS", 30.0)
    assert two.ask(EXPLAIN, {**MODEL, "prompt": rag_prompt("xml")})[1]["documents"]["words"] == 3


def test_too_many_prompts_do_not_wait_for_a_search(two, monkeypatch):
    monkeypatch.setattr(document_search, "MAX_QUEUED_SEARCHES", 0)
    assert two.ask(EXPLAIN, {**MODEL, "prompt": rag_prompt("xml")})[1]["documents"]["words"] == 0


# -- what is found ----------------------------------------------------------------------------------------------------


def searched(texts, prompt, **fields):
    """Return what is found of some documents of one tenant in a prompt; a list of texts or of tokens."""

    async def find():
        search = DocumentSearch()
        for document in texts:
            digest = "" if isinstance(document, str) else tokens_digest(document)
            search.note("", content_of(digest or document), digest, len(document), document)
        by_tokens = not isinstance(prompt, str)
        request = PromptRequest(text="" if by_tokens else prompt, tokens=prompt if by_tokens else None, **fields)
        found = await search.find(request, by_tokens=by_tokens)
        search.close()
        return found

    return asyncio.run(find())


def test_a_text_with_another_word_is_found_only_outside_of_the_word():
    words = text("one", 300).split()
    prompt = "before " + " ".join([*words[:150], "changed", *words[151:]]) + " after"
    before, after = searched([" ".join(words)], prompt)
    assert prompt[before.start : before.stop].split() == words[:150]
    assert prompt[after.start : after.stop].split() == words[151:]
    assert not before.whole
    assert not after.whole


def test_tokens_with_another_token_are_found_only_outside_of_it():
    tokens = random.Random(0).choices(range(1000), k=300)
    prompt = [5000, *tokens[:150], 5001, *tokens[151:], 5002]
    found = searched([tokens], prompt)
    assert [(one.start, one.stop) for one in found] == [(1, 151), (152, 301)]
    assert [one.digest for one in found] == [tokens_digest(tokens)] * 2


@pytest.mark.parametrize("words", [32, 63, 64, 500])
def test_a_whole_document_is_found_from_32_words_on(words):
    document = text("one", words).replace(",", "")
    (found,) = searched([document], f"({document})")
    assert (found.whole, found.content) == (True, content_of(document))
    assert searched([document.rpartition(" ")[0]], document) == [] if words == 32 else True


def test_white_space_does_not_count_and_scripts_without_blanks_are_compared_by_character():
    chinese = "".join(map(chr, random.Random(0).choices(range(0x4E00, 0x9FA5), k=100)))
    spread = "".join(f"{character}{' ' * (number % 3 == 0)}\n" for number, character in enumerate(chinese))
    assert [one.whole for one in searched([chinese], f"question: {spread}")] == [True]
    prose = text("one")
    assert [one.whole for one in searched([prose], prose.replace(" ", "\r\n\t"))] == [True]
    assert searched([prose], prose.replace(" ", "_")) == []


@pytest.mark.parametrize("blank", [" ", "\n", "\u3000"])
def test_the_time_to_search_a_prompt_is_linear_in_its_white_space(blank):
    """20,000 line breaks at the end of a prompt held up all requests for some seconds."""
    prose = text("one")

    def seconds(count: int) -> float:
        prompt = f"{blank * count} {prose}{blank * count}"
        return min(timeit.repeat(lambda: searched([prose], prompt), number=1, repeat=3))

    assert seconds(20_000) < 20 * seconds(1000) + 0.5, "four hundred times as long if it is quadratic"
    (found,) = searched([prose], f"{blank * 100}{prose}{blank * 100}")
    assert (found.start, found.stop) == (0, 100 + len(prose))


def test_a_document_does_not_reach_into_another_message():
    prose = text("one", 100)
    first, last = prose[: len(prose) // 2], prose[len(prose) // 2 :]
    assert searched([prose], f"{first}\0user\0{last}") == []


def test_documents_that_a_request_names_are_the_only_ones():
    assert searched([TEXTS["alpha"]], TEXTS["alpha"], documents=("x",)) == ()


def test_old_documents_are_forgotten_and_a_tenant_forgets_only_its_own():
    known, size = KnownTexts(5 * (400 + ENTRY_BYTES)), 100  # four bytes each

    def put(owner: str, number: int) -> list[int]:
        tokens = random.Random(f"{owner}{number}").choices(range(1 << 30), k=size)
        known.put(owner, KnownText(number.to_bytes(8, "big"), array("I", tokens)))
        return tokens

    quiet = put("quiet", 0)
    busy = [put("busy", number) for number in range(10)]
    assert len(known) == 5
    assert [len(known.find("busy", tokens)) for tokens in busy] == [0] * 6 + [1] * 4
    assert len(known.find("quiet", quiet)) == 1
    assert not known.find("busy", quiet)
    for number in range(10, 20):
        put("busy", number)
    assert not known.find("busy", busy[-1])


def test_short_texts_count_with_their_entries():
    """A few words between separators counted as some bytes: 300,000 of them took 182 MB, counted as two."""
    known = KnownTexts(100 * ENTRY_BYTES)
    for number in range(1000):
        known.put("one", KnownText(number.to_bytes(8, "big"), array("I"), f"word {number}"))
    assert len(known) < 100


def test_a_document_has_names_of_a_few_models_only():
    """A client may name models that do not exist."""
    document = KnownText(b"", array("I"))
    for number in range(100):
        document.set_name(f"model {number}", f"digest {number}", 1.0)
    assert len(document.names) == 8
    assert document.name("model 99") == ("digest 99", 1.0)


def test_a_tenant_without_documents_has_no_finder():
    known = KnownTexts(400 + ENTRY_BYTES)
    for number in range(100):
        tokens = array("I", random.Random(number).choices(range(1 << 30), k=100))
        known.put(f"tenant {number:02}", KnownText(b"", tokens))
        assert len(known.find(f"tenant {number:02}", tokens)) == 1
    assert not known.has_documents("tenant 98")
    assert known.has_documents("tenant 99")


def test_short_texts_may_be_evicted_after_the_last_document_that_can_be_found():
    """The finder was gone by then, and the request that made room was answered with an error."""
    known, tokens = KnownTexts(5 * ENTRY_BYTES), array("I", range(100))
    known.put("one", KnownText(b"long", tokens))
    for number in range(3):
        known.put("one", KnownText(number.to_bytes(8, "big"), array("I", range(5))))
    for other, found in (("two", 1), ("three", 0)):
        assert len(known.find("one", tokens)) == found
        known.put(other, KnownText(b"long", tokens))
        assert len(known.find(other, tokens)) == 1


# -- what the policy makes of it --------------------------------------------------------------------------------------


def cut_with(found, text: str = "x" * 400, **fields):
    return Cutter(**fields).cut(PromptRequest(text=text, found=found))


def test_a_part_counts_with_its_tokens_and_a_whole_document_with_those_that_are_known():
    part, whole = FoundDocument(100, 200, b"a"), FoundDocument(200, 300, b"b", "digest", 31.0, whole=True)
    cut = cut_with([part, whole])
    assert [(one.tokens, one.stop, one.digest, one.how) for one in cut.documents] == [
        (25, 50, "", "words"),
        (31, 75, "digest", "words"),
    ]


def test_a_document_between_separators_is_not_counted_twice():
    prompt = f"system # # {TEXTS['alpha']} # # question"
    at = prompt.index(TEXTS["alpha"])
    near = FoundDocument(at + 9, at + len(TEXTS["alpha"]), b"a", "of the known one", 9.0, whole=True)
    (document,) = cut_with([near], prompt).documents
    assert (document.how, document.digest) == (SEPARATED, "of the known one")
    (document,) = cut_with([near._replace(start=at + 99)], prompt).documents
    assert (document.how, document.digest) == (SEPARATED, "")
    outside = FoundDocument(0, at - 5, b"a")
    assert [one.how for one in cut_with([outside], prompt).documents] == [SEPARATED, "words"]
    assert with_found([], [outside], 0, 0.0)[0][1].stop == at - 5, "places are tokens"


def test_a_document_that_was_found_is_known_where_it_was_sent_between_separators():
    policy, engines = Documents(), [Candidate("http://a"), Candidate("http://b")]
    policy.sent(PromptRequest(text=separated("alpha")), "http://b")
    found = FoundDocument(20, 20 + len(TEXTS["alpha"]), content_of(TEXTS["alpha"]))
    request = PromptRequest(text=rag_prompt("blank_lines"), found=[found])
    assert policy.choose(request, engines)[:2] == ("http://b", "documents")
    policy.sent(request, "http://a")
    assert policy.explain(request, engines)["http://a"]["documents"] == 0, "an engine learns only between separators"
    assert policy.index.noted == {"separators": 1, "words": 1}
    engines[1].finds = False
    assert policy.explain(request, engines)["http://b"]["documents"] == 0


def test_a_document_that_events_report_is_found_by_its_digest():
    policy, engines = Documents(), [Candidate("http://a"), Candidate("http://b")]
    for engine in engines:
        policy.index.listed(engine.name, [])
    policy.index.moved("http://b", ReportedDocument("", "d"), "CPU", stored=True)
    found = FoundDocument(0, 400, b"a", "d", 100.0, whole=True)
    choice = policy.choose(PromptRequest(text="x" * 800, found=[found]), engines)
    assert (choice.engine, choice.expected_tokens) == ("http://b", 100)


def test_a_found_document_stays_longer_in_the_index():
    index, cutter = DocumentIndex(600), Cutter()
    alpha, beta, gamma = (cutter.cut(PromptRequest(text=separated(name))) for name in NAMES)
    index.note("a", alpha)
    index.note("a", beta)
    index.note("a", cut_with([FoundDocument(0, 100, content_of(TEXTS["alpha"]))]))
    index.note("a", gamma)
    states = [index.find("a", cut.documents)[0].is_stored for cut in (alpha, beta, gamma)]
    assert states == [True, False, True]


# -- documents that engines report ------------------------------------------------------------------------------------


class AdminOfDocuments:
    """What an engine's administration endpoint returns of its documents."""

    def __init__(self, *, ids: bool = True) -> None:
        self.ids, self.asked = ids, []
        self.documents = {name: list(map(ord, text)) for name, text in TEXTS.items()}

    async def __call__(self, scope, receive, send):
        name = scope["path"].rpartition("/")[2]
        self.asked.append(name)
        if name not in self.documents:
            await respond(send, 404, b'{"error": "unknown document"}')
            return
        tokens = self.documents[name]
        described = {"text": "".join(map(chr, tokens)), **({"token_ids": tokens} if self.ids else {})}
        await respond(send, 200, json.dumps({"documents": [described]}).encode())


def read_from(admin, names, tenant: str = "") -> DocumentSearch:
    """Return a search after a reader has read these documents."""

    async def read() -> DocumentSearch:
        import aiohttp

        async with aiohttp.ClientSession() as session:

            async def ask(path: str):
                async with session.get(admin.url + path) as answer:
                    if answer.status != 200:
                        raise InputError("unknown document")
                    return await answer.json()

            search = DocumentSearch()
            reader = DocumentReader(search, ask)
            for name in names:
                tokens = admin.application.documents.get(name, [])
                reader.add(name, tenant, tokens_digest(tokens))
            reading = asyncio.create_task(reader.run())
            while not reading.done() and len(admin.application.asked) < len(dict.fromkeys(names)):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return search

    return asyncio.run(read())


def test_documents_of_engines_are_read_once_and_found_by_tokens_and_by_words():
    with served(AdminOfDocuments()) as admin:
        search = read_from(admin, ["alpha", "gone", "beta", "alpha"], tenant_of("t"))
        assert admin.application.asked == ["alpha", "gone", "beta"]
        request = PromptRequest(text=rag_prompt("numbers"), tokens=list(map(ord, rag_prompt("xml"))), salt="t")
        digests = [tokens_digest(admin.application.documents[name]) for name in ("alpha", "beta")]
        for by_tokens in (False, True):
            found = asyncio.run(search.find(request, by_tokens=by_tokens))
            assert [one.digest for one in found] == digests
            assert [one.size for one in found] == [len(TEXTS[name]) for name in ("alpha", "beta")]
        assert not asyncio.run(search.find(PromptRequest(text=request.text), by_tokens=False))
        search.close()


@pytest.mark.parametrize("finds", [True, False])
def test_the_documents_of_a_listing_and_of_events_are_read_if_the_engine_finds_them(finds):
    search = DocumentSearch()

    async def follow(admin, sender):
        import aiohttp

        one = address("http://127.0.0.1:1", ["m"], admin=admin.url)
        policy, engine = Documents(), Engine(one, Candidate(one.url), one.models)
        async with aiohttp.ClientSession() as session:
            follower = Follower(policy, session, "", lambda *_: None, search)
            following = asyncio.create_task(follower.follow(engine))
            await until(lambda: len(policy.index.reports(one.url)) == 1, sender)
            admin.application.documents.append(described("beta"))
            while len(policy.index.reports(one.url)) < 2:  # The subscriber joins somewhere.
                sender.publish([event("Stored", described("beta")["digest"]) | {"document": "beta"}])
                await asyncio.sleep(0.01)
            if finds:
                await until(lambda: len(search.by_words) == 2, sender)
            assert engine.candidate.finds == finds
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def described(name: str) -> dict[str, object]:
        tokens = list(map(ord, TEXTS[name]))
        return listed(tokens_digest(tokens), "host") | {"id": name, "token_ids": tokens, "text": TEXTS[name]}

    with publisher() as sender, served(AdminEndpoint(f"tcp://*:{sender.port}", finds=finds)) as admin:
        admin.application.documents = [described("alpha")]
        asyncio.run(follow(admin, sender))
        assert [f"/v1/documents/{name}" in admin.application.asked for name in ("alpha", "beta")] == [finds] * 2
    search.close()


def test_an_engine_that_returns_no_tokens_is_not_asked_again():
    with served(AdminOfDocuments(ids=False)) as admin:
        search = read_from(admin, NAMES)
        assert len(admin.application.asked) == 1
        assert not len(search.by_words)
        search.close()


def test_token_ids_instead_of_a_text_are_not_searched_as_words():
    search = DocumentSearch()
    search.note_reported("", "digest", [1, 2, 3], "1 2 3")
    assert (len(search.by_tokens), len(search.by_words)) == (1, 0)
    search.close()


def test_the_digest_of_a_text_may_become_known_later():
    document = TEXTS["alpha"]

    async def find() -> list[str]:
        search, digests = DocumentSearch(), []
        for digest in ("", "d", ""):
            search.note("", content_of(document), digest, 7.0, document)
            found = await search.find(PromptRequest(text=f"q {document}"), by_tokens=False)
            digests += [one.digest for one in found]
        search.close()
        return digests

    assert asyncio.run(find()) == ["", "d", "d"]


def test_each_model_has_its_own_digest_of_a_text():
    """The digest of the model that was read last replaced that of the other one, whose documents counted as missing."""
    engines = Engines()
    cards = {"large": ("large", "adapter"), "small": ("small",)}
    for number, (base, names) in enumerate(cards.items()):
        engine = engines.add(address(f"http://{number}", names))
        engine.cards = {name: {"id": name, "parent": None if name == base else base} for name in names}
    search, document = DocumentSearch(base_of=engines.base_of), TEXTS["alpha"]
    tokens = {"large": range(800), "small": range(600)}

    def digests() -> dict[str, tuple[str, float]]:
        requests = [PromptRequest(text=f"q {document}", model=model) for model in ("large", "adapter", "small", "new")]
        found = {one.model: asyncio.run(search.find(one, by_tokens=False)) for one in requests}
        return {model: (place.digest, place.size) for model, (place,) in found.items()}

    search.note_reported("", "of large", tokens["large"], document, cards["large"])
    assert digests() == dict.fromkeys(("large", "adapter", "small", "new"), ("of large", 800))
    search.note("", content_of(document), "of small", 600, document, "small")
    assert digests() == {
        "large": ("of large", 800), "adapter": ("of large", 800), "small": ("of small", 600), "new": ("", 0),
    }  # fmt: skip
    search.close()


def test_threads_of_searches_end_with_the_router():
    import threading

    before = set(threading.enumerate())  # Threads of other tests may be about to end.
    with house(1) as built:
        built.send(ASK, {**MODEL, "prompt": separated("alpha")}).read()
        (started,) = (one for one in set(threading.enumerate()) - before if one.name.startswith("lmc-search"))
    eventually(lambda: not started.is_alive())
