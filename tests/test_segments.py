"""Prompts are cut at the special string, however the tokenizer writes it."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from lmc.blend.segments import Span, join, separator_variants, split
from lmc.errors import InputError

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
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


TOKENIZERS = {
    "bytes": byte_level(),
    "bytes, BOS": byte_level(bos=True),
    "bytes, prefix space": byte_level(prefix_space=True),
    "metaspace, BOS": metaspace(),
}


@pytest.fixture(params=TOKENIZERS)
def encode(request: pytest.FixtureRequest):
    tokenizer = TOKENIZERS[request.param]
    return lambda text: tokenizer.encode(text).ids


@pytest.mark.parametrize(
    "prompt",
    [
        "the system # # the cat sat on the mat. # # a dog at night # # who sat where?",
        "the system\n # # the cat sat on the mat.\n # # \nAnd then # # who",
        "the system # # The cat # # A dog # # Who",
    ],
)
def test_a_prompt_encoded_as_one_text_is_cut(encode, prompt: str) -> None:
    segments = split(encode(prompt), separator_variants(encode, " # # "))

    assert len(segments.documents) == prompt.count("# #") - 1
    assert len(segments.system) > 0
    assert len(segments.question) > 0


def test_a_prompt_joined_from_pieces_gives_the_pieces_back(encode) -> None:
    variants = separator_variants(encode, " # # ")
    system, documents, question = encode("be brief"), [encode("the cat sat"), encode("a dog")], encode("who sat?")
    for separator in (encode(" # # "), encode("# #")):
        prompt = join(system, documents, question, separator)
        segments = split(prompt, variants)
        cut = [prompt[span.start : span.stop] for span in (segments.system, *segments.documents, segments.question)]
        # A BOS that an encoder puts before each piece belongs to the separator or the piece; the text is all there.
        without_bos = [[token for token in part if token != 0] for part in (system, *documents, question)]
        assert [[token for token in part if token != 0] for part in cut] == without_bos


def test_one_number_sign_cuts_nothing(encode) -> None:
    tokens = encode("a dog # barked at night")
    segments = split(tokens, separator_variants(encode, " # # "))
    assert segments.documents == ()
    assert segments.question == Span(0, len(tokens))


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
    segments = split(tokens, SIGNS)
    assert segments.system == Span(*system)
    assert segments.documents == tuple(Span(*d) for d in documents)
    assert segments.question == Span(*question)


def test_a_special_string_without_tokens_is_refused(encode) -> None:
    with pytest.raises(InputError, match="blend_special_str"):
        separator_variants(encode, "  ")
