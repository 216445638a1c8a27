"""Prompts are cut at the separator, however the tokenizer writes it."""

import copy
import itertools
import random
import string
from array import array

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lmc.blend.locate import MAX_PLACES, find_texts, inner_tokens, why_missing
from lmc.blend.markers import Markers
from lmc.blend.segments import Span, document_tokens, join, split, without_separators
from lmc.blend.turn_headers import longest_first, occurrences
from lmc.commands.chat_template import with_documents
from lmc.demo import SHIPPED
from lmc.demo.pretrained import smollm2
from lmc.errors import InputError
from lmc.rag import messages

TEXT = [
    "the cat sat on the mat.",
    "a dog # barked # at night",
    "who sat where?",
    "\nAnd then they all went home\n",
    "# # #",
]


def byte_level(*, bos: bool = False, prefix_space: bool = False) -> Tokenizer:
    """A BPE tokenizer as GPT-2 and Llama 3 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def metaspace() -> Tokenizer:
    """A tokenizer as Llama 2 and Mistral have it: words carry the blank before them as ▁."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=list(string.printable), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


TOKENIZERS = {
    "bytes": lambda: wrapped(byte_level()),
    "bytes, BOS": lambda: wrapped(byte_level(bos=True)),
    "bytes, prefix space": lambda: wrapped(byte_level(prefix_space=True)),
    "metaspace, BOS": lambda: wrapped(metaspace()),
    "shipped": lambda: AutoTokenizer.from_pretrained(SHIPPED / "model"),
    "SmolLM2": lambda: AutoTokenizer.from_pretrained(smollm2()),
}


# The checkpoint of SmolLM2 is converted for half a minute in each run.
@pytest.fixture(params=[*list(TOKENIZERS)[:-1], pytest.param("SmolLM2", marks=pytest.mark.long)], scope="module")
def tokenizer(request: pytest.FixtureRequest):
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize(
    "prompt",
    [
        "the system # # the cat sat on the mat. # # a dog at night # # who sat where?",
        "the system\n # # the cat sat on the mat.\n # # \nAnd then # # who",
        "the system # # The cat # # A dog # # Who",
        "the system.# #The cat# #A dog# #Who",
    ],
)
def test_a_prompt_encoded_as_one_text_is_cut(tokenizer, prompt: str) -> None:
    tokens = tokenizer.encode(prompt)
    segments = split(tokens, Markers.of(tokenizer, " # # "))
    system, *documents, question = (part.split() for part in prompt.split("# #"))

    assert [text_of(tokenizer, tokens, span) for span in segments.documents] == documents
    assert text_of(tokenizer, tokens, segments.system) == system
    assert text_of(tokenizer, tokens, segments.question) == question


def text_of(tokenizer, tokens: list[int], span: Span) -> list[str]:
    """The words of a part of a prompt, without special tokens."""
    return tokenizer.decode(tokens[span.start : span.stop], skip_special_tokens=True).split()


def test_a_prompt_joined_from_pieces_gives_the_pieces_back(tokenizer) -> None:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    system, documents, question = encode("be brief"), [encode("the cat sat"), encode("a dog")], encode("who sat?")
    for separator in (encode(" # # "), encode("# #")):
        prompt = join(system, documents, question, separator)
        segments = split(prompt, Markers.of(tokenizer, " # # "))
        cut = [prompt[span.start : span.stop] for span in (segments.system, *segments.documents, segments.question)]
        assert cut == [system, *documents, question]


def test_one_number_sign_cuts_nothing(tokenizer) -> None:
    tokens = tokenizer.encode("a dog # barked at night")
    segments = split(tokens, Markers.of(tokenizer, " # # "))
    assert segments.documents == ()
    assert segments.question == Span(0, len(tokens))


def test_a_text_has_the_tokens_that_it_has_in_a_prompt(tokenizer) -> None:
    markers = Markers.of(tokenizer, " # # ")
    texts = ["The cat sat.", "A dog\n\nbarked", "  - 12 mats\n", "an # owl", "naïve café 東京", "\t# one", "b"]
    for order in itertools.permutations(texts, 3):
        chat = messages("be brief", order, "who sat?")
        for content in (chat[1]["content"], f"{chat[0]['content']}\n{chat[1]['content']}\n"):
            prompt = tokenizer.encode(content)
            found = [prompt[one.start : one.stop] for one in split(prompt, markers).documents]
            assert found == [one for text in order for one in ahead(tokenizer, markers, text)]


@pytest.mark.parametrize(
    ("before", "behind"), [("", ""), ("(", ")"), ('{"text": "', '"}'), ("so\n", "\nthen"), ("# # ", " # #")]
)
def test_texts_are_found_wherever_they_stand_in_any_order(tokenizer, before: str, behind: str) -> None:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    texts = ["The cat sat on the mat.", "A dog\n\nbarked at night", "# # it was one # # of them", "naive 12 cafe (one)"]
    texts.append("Barium.\nSymbol: Ba and more of it.")
    if "東" in tokenizer.decode(encode("東京")):
        texts.append("東京は大きい町である。大阪も大きい町である。")
    order = [3, 1, *range(5, len(texts)), 2, 4]
    prompt = encode("Who? " + " or ".join(f"{before}{texts[i]}{behind}" for i in order))
    found = find_texts(array("I", prompt), [inner_tokens(encode, text) for text in texts])
    assert [len(spans) for spans in found] == [0, *[1] * (len(texts) - 1)]
    starts = [found[i][0].start for i in order]
    assert starts == sorted(starts)
    for text, spans in zip(texts, found, strict=True):
        for span in spans:
            said = "".join(tokenizer.decode(prompt[span.start : span.stop]).strip("\ufffd").split())  # parts of letters
            assert said in "".join(text.split())
            assert len(said) > len("".join(text.split())) / 3


def test_a_text_that_is_there_twice_is_found_twice_and_spans_do_not_overlap() -> None:
    prompt = array("I", [1, 5, 6, 7, 8, 2, 5, 6, 7, 8, 9, 3])

    def places(*texts: tuple[int, ...]) -> list[list[Span]]:
        return find_texts(prompt, [array("I", text) for text in texts])

    assert places((5, 6, 7, 8)) == [[Span(1, 5), Span(6, 10)]]
    assert places((5, 6, 7, 8, 9), (5, 6, 7, 8), (7, 8, 9, 3)) == [[Span(6, 11)], [Span(1, 5)], []]
    assert places((), (5, 6, 7), (256, 0, 0, 0)) == [[], [], []]  # nor at bytes between two tokens
    assert len(find_texts(array("I", [5] * 9000), [array("I", [5] * 4)])[0]) <= MAX_PLACES


def test_why_a_text_is_missing() -> None:
    text = 'one "line"\n  and the next'
    assert why_missing("what? " + text.replace("\n ", ""), text) == "it has other white space in the prompt"
    assert why_missing('[{"text": "one \\"line\\"\\n  and the next"}]', text) == "it is escaped as JSON in the prompt"
    assert why_missing("b", "b") == "it is too short, or its tokens are different in the prompt"
    assert why_missing("something else", text) == "it is not in the prompt"


def test_what_the_model_has_said_is_found_among_many_answers() -> None:
    """Against the definition; each separator was compared with each answer."""
    dice = random.Random(0)
    markers = Markers(separators=((7, 7), (8,)), special=frozenset({1, 2}), answers=((1, 3),), messages=((1,), (2,)))
    for _ in range(300):
        tokens = [dice.choice([1, 2, 3, 4, 7, 7, 8]) for _ in range(dice.randrange(40))]
        answers, begun = [], None
        for at, header in occurrences(tokens, longest_first([*markers.answers, *markers.messages])):
            if header in markers.answers:
                begun = at + len(header) if begun is None else begun
            elif begun is not None:
                answers.append(range(begun, at))
                begun = None
        answers += [] if begun is None else [range(begun, len(tokens))]
        found = split(tokens, markers)
        separators = [Span(at, at + len(cut)) for at, cut in occurrences(tokens, markers.separators)]
        cuts = [one for one in separators if not any(one.start in answer for answer in answers)]
        assert found.question.start == (cuts[-1].stop if cuts else 0)
        assert all(not any(span.start in answer for answer in answers) for span in found.documents)


def ahead(tokenizer, markers: Markers, text: str) -> list[list[int]]:
    return document_tokens(tokenizer.encode, markers, " # # ", text)


@pytest.mark.parametrize("text", ["the cat # # a dog", "# # # the cat # # # # a dog # #", "the cat# #a dog"])
def test_a_separator_inside_of_a_document_that_is_given_apart_does_not_cut_it(tokenizer, text: str) -> None:
    markers = Markers.of(tokenizer, " # # ")
    (known,) = ahead(tokenizer, markers, text)
    (chat,) = messages("", [text, "another one"], "who sat?")
    prompt = tokenizer.encode(chat["content"])
    assert len(documents := split(prompt, markers).documents) == 2
    assert prompt[documents[0].start : documents[0].stop] == known


def test_a_separator_in_another_text_than_a_document_begins_no_document(tokenizer) -> None:
    """A part of the user's question would be learned as a document otherwise."""
    markers, hostile = Markers.of(tokenizer, " # # "), "what # # does # # it mean?"
    chat = messages(hostile, ["The cat sat.", "The dog ran."], hostile, intro=hostile)
    assert [one["role"] for one in chat] == ["system", "user"]
    prompt = tokenizer.encode("\n".join(one["content"] for one in chat))
    segments = split(prompt, markers)
    found = [text_of(tokenizer, prompt, one) for one in segments.documents]
    assert [" ".join(words) for words in found] == ["The cat sat.", "The dog ran."]
    assert " ".join(text_of(tokenizer, prompt, segments.question)) == "what ## does ## it mean?"


@pytest.mark.parametrize(
    ("separator", "text", "wanted"),
    [
        (" # # ", "a # # b", "a ## b"),
        (" # # ", "# # # # # #", "######"),
        ("<doc>", "a<doc>b", "a< doc>b"),
        ("|", "a|b", "ab"),
        ("\n\n===\n\n", "a\n===\nb", "a\n= ==\nb"),
    ],
)
def test_separators_are_written_apart_in_documents(separator: str, text: str, wanted: str) -> None:
    assert without_separators(text, separator) == wanted


SIGNS = ((7, 7, 9), (7, 7))


@pytest.mark.parametrize(
    ("tokens", "system", "documents", "question"),
    [
        ([1, 2], (0, 0), [], (0, 2)),  # absent
        ([1, 7, 7, 2, 7, 7, 3], (0, 1), [(3, 4)], (6, 7)),
        ([7, 7, 2, 7, 7, 3], (0, 0), [(2, 3)], (5, 6)),  # at the start
        ([1, 7, 7, 2, 7, 7], (0, 1), [(3, 4)], (6, 6)),  # at the end
        ([1, 7, 7, 7, 7, 2, 7, 7, 3], (0, 1), [(5, 6)], (8, 9)),  # repeated: no empty document
        ([1, 7, 7, 9, 2, 7, 7, 3], (0, 1), [(4, 5)], (7, 8)),  # the longest variant wins
        ([7, 7], (0, 0), [], (2, 2)),
        ([], (0, 0), [], (0, 0)),
        ([1, 7, 2], (0, 0), [], (0, 3)),  # half a separator
    ],
)
def test_cuts(tokens: list[int], system: tuple, documents: list[tuple], question: tuple) -> None:
    segments = split(tokens, Markers(separators=SIGNS))
    assert segments.system == Span(*system)
    assert segments.documents == tuple(Span(*d) for d in documents)
    assert segments.question == Span(*question)


@pytest.mark.parametrize("special", ["", "  ", "\n"])
def test_a_special_string_without_tokens_is_refused(tokenizer, special: str) -> None:
    with pytest.raises(InputError, match="blend_special_str"):
        Markers.of(tokenizer, special)


# In conversations 100 begins a role's header, 101 ends a message, and 20 is the role of the model.
CHAT = Markers(separators=((7, 7),), special=frozenset({0, 100, 101}), answers=((100, 20),), messages=((100,),))


@pytest.mark.parametrize(
    ("tokens", "opening", "documents"),
    [
        ([0, 5, 7, 7, 1, 7, 7, 2], (0, 2), [(4, 5)]),  # BOS may stand before a document
        ([100, 10, 5, 101, 100, 11, 7, 7, 1, 7, 7, 2, 101], None, [(8, 9)]),  # a separator directly behind a header
        ([100, 11, 5, 7, 7, 1, 7, 7, 2, 101, 100, 20], (0, 3), [(5, 6)]),  # text between the header and a separator
        # two messages with documents; what is between them is conversation
        ([100, 11, 7, 7, 1, 7, 7, 2, 101, 100, 11, 7, 7, 3, 7, 7, 4, 101, 100, 20], (0, 2), [(4, 5), (13, 14)]),
        # a document whose end is the end of a message
        ([100, 11, 7, 7, 1, 7, 7, 2, 101, 100, 11, 4, 101, 100, 20], (0, 2), [(4, 5)]),
        # the second turn: the model has answered, and has written separators
        (
            [100, 11, 7, 7, 1, 7, 7, 2, 101, 100, 20, 7, 7, 6, 7, 7, 6, 101, 100, 11, 7, 7, 3, 7, 7, 4, 101, 100, 20],
            (0, 2),
            [(4, 5), (22, 23)],
        ),
        # an answer that is not over
        ([100, 11, 7, 7, 1, 7, 7, 2, 101, 100, 20, 7, 7, 6, 7, 7, 6], (0, 2), [(4, 5)]),
    ],
)
def test_cuts_of_conversations(tokens: list[int], opening: tuple | None, documents: list[tuple]) -> None:
    segments = split(tokens, CHAT)
    assert segments.documents == tuple(Span(*d) for d in documents)
    assert segments.opening == (None if opening is None else Span(*opening))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "trimmed": CHATML.replace("m.content", "m.content | trim"),
    "white space": CHATML.replace("{{ m.content }}", "\n  {{ m.content }}  \n"),
    "one line": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}
ROLES = ["<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


@pytest.fixture(scope="module")
def with_roles(tokenizer):
    """A tokenizer whose role markers are special tokens."""
    made = copy.deepcopy(tokenizer)
    made.add_special_tokens({"additional_special_tokens": ROLES})
    return made


@pytest.fixture(params=TEMPLATES)
def chatty(request: pytest.FixtureRequest, with_roles):
    """A tokenizer with a chat template."""
    with_roles.chat_template = TEMPLATES[request.param]
    return with_roles


def test_a_template_that_writes_the_same_before_all_messages_does_not_hide_documents(tokenizer) -> None:
    """All behind the system text was taken for an answer, and no document was found."""
    plain = copy.deepcopy(tokenizer)
    plain.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    plain.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    markers = Markers.of(plain, " # # ")
    assert markers.answers == ()
    chat = messages("be brief", ["The cat sat.", "The dog ran."], "who sat?", intro="Read this.")
    chat += [
        {"role": "assistant", "content": "the cat"},
        *messages("", ["The owl flew."], "who flew?", intro="And this."),
    ]
    segments = split(plain.apply_chat_template(chat, return_dict=False), markers)
    assert len(segments.documents) == 3


def test_a_turn_between_two_separators_is_no_document_if_roles_are_plain_text(tokenizer) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    chat = messages("be brief", ["The cat sat."], "who sat?")
    chat += [{"role": "assistant", "content": "the cat"}, *messages("", ["The owl flew."], "who flew?", intro="Look.")]
    prompt = plain.apply_chat_template(chat, return_dict=False)
    found = [text_of(plain, prompt, one) for one in split(prompt, Markers.of(plain, " # # ")).documents]
    assert [" ".join(words) for words in found] == ["The cat sat.", "The owl flew."]


def test_a_conversation_has_the_documents_that_were_learned_ahead_and_no_others(chatty) -> None:
    texts = {f"The {animal} sat.\n\nIt was {i}." for i, animal in enumerate(["cat", "dog", "owl", "bee", "eel", "fox"])}
    markers = Markers.of(chatty, " # # ")
    known = {tuple(one) for text in texts for one in ahead(chatty, markers, text)}
    assert len(known) == len(texts)

    draw, answer = random.Random(0), "It sat # # on a mat # # at night # # "
    for _ in range(10):
        chat: list[dict[str, str]] = []
        for turn in range(3):
            chosen = draw.sample(sorted(texts), 3)
            asked = messages("" if turn else "be brief", chosen, "who sat?", intro=draw.choice(["", "Read this."]))
            chat += asked
            prompt = chatty.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            segments = split(prompt, markers)
            found = [tuple(prompt[one.start : one.stop]) for one in segments.documents]
            assert len(found) == 3 * (turn + 1)
            assert set(found) <= known
            assert segments.opening is None
            chat.append({"role": "assistant", "content": answer})


def test_documents_may_stand_in_messages_of_any_role_but_the_model_s(chatty) -> None:
    texts = [f"The {animal} sat." for animal in ("cat", "dog", "owl", "bee")]
    parts = {
        "system": ["be brief", texts[0], ""],
        "user": ["Read this.", texts[1], "who sat?"],
        "assistant": ["I ask", "It sat.", ""],
        "tool": ["found", *texts[2:], ""],
    }
    chat = [{"role": role, "content": " # # ".join(said)} for role, said in parts.items()]
    prompt = chatty.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    markers = Markers.of(chatty, " # # ")
    found = [prompt[one.start : one.stop] for one in split(prompt, markers).documents]
    assert found == [one for text in texts for one in ahead(chatty, markers, text)]


def test_the_template_puts_the_documents_of_a_request_between_separators(chatty) -> None:
    texts = ["The cat's mat.\n", "  A dog"]
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who sat?"}]
    more = [*chat, {"role": "assistant", "content": "it"}, {"role": "user", "content": "why?"}]
    plain = [messages("be brief", texts, "who sat?"), [*messages("be brief", texts, "who sat?"), *more[2:]]]
    wanted = [chatty.apply_chat_template(one, tokenize=False) for one in (*plain, chat)]
    chatty.chat_template = with_documents(chatty.chat_template, " # # ")
    documents = [{"title": "a", "text": texts[0]}, {"content": texts[1]}]
    found = [chatty.apply_chat_template(one, documents=documents, tokenize=False) for one in (chat, more)]
    assert [*found, chatty.apply_chat_template(chat, tokenize=False)] == wanted


PARTS = (
    "{% for m in messages %}{{ m.role }}{{ m.name }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}"
    "{% if documents %}{{ documents[0].text }}{% endif %}"
)


def test_the_template_takes_contents_in_parts_and_leaves_the_rest_of_a_message(chatty) -> None:
    """The parts were written as Python writes a list, and a template that knows documents wrote them twice."""
    chatty.chat_template = with_documents(PARTS, " # # ")
    documents = [{"text": "the cat # # sat"}, {"content": "a dog"}]
    for content in ("who?", [{"type": "text", "text": "who"}, {"type": "text", "text": "?"}]):
        chat = [{"role": "system", "content": "be brief"}, {"role": "user", "name": "al", "content": content}]
        found = chatty.apply_chat_template(chat, documents=documents, tokenize=False)
        assert found == "system:be brief;useral: # # the cat ## sat # # a dog # # who?;"


@pytest.mark.parametrize(
    ("chat", "documents", "why"),
    [
        ([{"role": "system", "content": "be brief"}], [{"text": "a"}], "needs a message of the user"),
        ([{"role": "user", "content": "who?"}], [{"text": "a"}, {"title": "b"}], "has no text"),
    ],
)
def test_the_template_refuses_documents_that_it_cannot_place(chatty, chat, documents, why: str) -> None:
    chatty.chat_template = with_documents(PARTS, " # # ")
    with pytest.raises(Exception, match=why):
        chatty.apply_chat_template(chat, documents=documents, tokenize=False)
