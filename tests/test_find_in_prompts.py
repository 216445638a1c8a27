"""Documents are found in prompts as applications write them, with tokenizers that join texts at their seams."""

import functools
import json
import random
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
from test_turn_headers import WORDS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lmc.blend.markers import Markers, separator_variants
from lmc.blend.turn_headers import occurrences
from lmc.documents.escaped import as_json, unescaped, with_escaped
from lmc.documents.finder import DocumentFinder
from lmc.documents.sources import Document

BENCH = Path(__file__).parents[1] / "bench"
SERVED = ["qwen3", "llama3_1", "deepseek_v3", "gptoss", "gemma3"]  # `make tokenizers` downloads them


@pytest.fixture(scope="module")
def find() -> ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        import find

        return find
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def texts(find: ModuleType) -> dict[str, list[str]]:
    return {kind: passages[:8] for kind, passages in find.passages(random.Random(0)).items()}


@pytest.fixture(scope="module")
def trained(texts: dict[str, list[str]]) -> Tokenizer:
    return train(text for kind in texts.values() for text in kind)


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer that splits texts as those of served models do."""
    tokenizer = Tokenizer(models.BPE())
    split, spell = pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# Separators as people write them, around documents that begin and end with all kinds of characters.
FORMS = [
    "{a} # # {b}", "{a}\n# #\n{b}", "{a}\n\n# #\n\n{b}", "{a} # #\n{b}", "{a} # #\n\n{b}", "{a}\n # # {b}",
    "{a}\r\n# #\r\n{b}", "{a}# # {b}", "{a} # #{b}", "{a}# #{b}",
]  # fmt: skip
ENDS = [
    "The cat sat.", "def f(x):\n    return x", "東京は大きい。大阪も。", '"Quoted text"', "- item one\n- item two",
    "number 12", "<p>html</p>", "كلمة أخرى،", "(in brackets)", "`code`",
]  # fmt: skip


SPECIAL_STRINGS = [" # # ", "# #", "<|doc|>", "[SEP]"]


def lost(tokenizer: Tokenizer, find: ModuleType, special: str) -> list[str]:
    """Texts with a separator that is not found."""
    encode = functools.partial(find.tokens_of, tokenizer)
    variants = separator_variants(encode, tokenizer.decode, special)
    texts = [text for form in FORMS for text in texts_with(form, special)]
    return [text for text in texts if len(list(occurrences(encode(text), variants))) != 1]


def texts_with(form: str, special: str) -> list[str]:
    return [form.replace("# #", special.strip()).format(a=a, b=b) for a in ENDS for b in ENDS]


def served(find: ModuleType, name: str) -> Tokenizer:
    file = find.TOKENIZERS / name / "tokenizer.json"
    if not file.exists():
        pytest.skip("run `make tokenizers`")
    return Tokenizer.from_file(str(file))


@pytest.mark.parametrize("special", SPECIAL_STRINGS)
def test_separators_are_found_on_their_own_line_and_next_to_punctuation(find, trained, special) -> None:
    assert lost(trained, find, special) == []


@pytest.mark.long
@pytest.mark.parametrize("special", SPECIAL_STRINGS)
@pytest.mark.parametrize("name", SERVED)
def test_separators_are_found_with_the_tokenizers_of_served_models(find, name, special) -> None:
    assert lost(served(find, name), find, special) == []


def warned(tokenizer: Tokenizer, special: str, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the engine's start warns that a separator may not be found, and names one that is."""
    caplog.clear()
    Markers.of(PreTrainedTokenizerFast(tokenizer_object=tokenizer), special)
    return f"use ' {special} ', also in prompts" in caplog.text


def test_a_tag_that_a_tokenizer_joins_with_the_next_word_is_named_at_the_start(find, caplog) -> None:
    """`>The` is one token of many tokenizers, so that `<doc>` before `The` has no end of its own."""
    joining = train([*ENDS, *["<b>The</b> <i>The</i> "] * 100])
    texts = lost(joining, find, "<doc>")
    assert texts == [text for form in FORMS for text in texts_with(form, "<doc>") if "<doc>The" in text]
    assert warned(joining, "<doc>", caplog)
    assert not warned(joining, "# #", caplog)


@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_a_tag_that_is_lost_in_some_texts_is_named_at_the_start(find, name, caplog) -> None:
    tokenizer = served(find, name)
    texts = lost(tokenizer, find, "<doc>")
    assert bool(texts) == warned(tokenizer, "<doc>", caplog) == (name != "gemma3")
    assert all("<doc>The" in text for text in texts), "with a blank after it, it is found"


def test_a_special_string_that_texts_swallow_is_named_at_the_start(trained, caplog) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained)
    Markers.of(tokenizer, " # # ")
    assert caplog.text == ""
    Markers.of(tokenizer, "doc_")
    assert "blend_special_str 'doc_' is not found in 'adoc_" in caplog.text
    assert "use ' doc_ ', also in prompts" in caplog.text


def test_documents_are_found_in_every_template_and_kind_of_text(find, texts, trained) -> None:
    shares = find.share_found(trained, texts)
    poor = {(name, kind): share for name, of in shares.items() for kind, share in of.items() if share < 0.97}
    assert {name for name, _ in poor} == {"json"}  # Escaped text has other tokens.


@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_documents_are_found_with_the_tokenizers_of_served_models(find, texts, name) -> None:
    shares = find.share_found(served(find, name), texts)
    poor = {(name, kind): share for name, of in shares.items() for kind, share in of.items() if share < 0.975}
    assert {name for name, _ in poor} == {"json"}


def share_in_json(find: ModuleType, tokenizer: Tokenizer, texts: list[str], *, ascii_only: bool) -> float:
    """The share of the tokens of tools' results that is found, if the texts were learned with `--escaped`."""
    encode = functools.partial(find.tokens_of, tokenizer)
    markers = Markers(separators=separator_variants(encode, tokenizer.decode, " # # "))
    documents = with_escaped([Document(str(number), text) for number, text in enumerate(texts)])
    finder = DocumentFinder()
    finder.insert([find.Known(array("I", find.learned(tokenizer, document.text, markers))) for document in documents])
    found = there = 0
    for text in texts:
        result = json.dumps({"status": "ok", "content": text}, ensure_ascii=ascii_only)
        found += sum(run.tokens for run in finder.find(encode(f"Result: {result}\nAnswer: ")))
        there += len(encode(json.dumps(text, ensure_ascii=ascii_only)[1:-1]))
    return found / there


def test_texts_learned_as_json_strings_are_found_in_the_results_of_tools(find, texts, trained) -> None:
    shares = {kind: share_in_json(find, trained, of_kind, ascii_only=False) for kind, of_kind in texts.items()}
    assert {kind: share for kind, share in shares.items() if share < 0.97} == {}
    assert {"prose", "tables", "Japanese", "emoji"} < shares.keys()
    assert share_in_json(find, trained, texts["prose"], ascii_only=True) > 0.97


@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_json_strings_are_found_with_the_tokenizers_of_served_models(find, texts, name) -> None:
    tokenizer = served(find, name)
    shares = {kind: share_in_json(find, tokenizer, of_kind, ascii_only=False) for kind, of_kind in texts.items()}
    assert {kind: share for kind, share in shares.items() if share < 0.97} == {}
    assert share_in_json(find, tokenizer, texts["prose"], ascii_only=True) > 0.97
    assert (
        share_in_json(find, tokenizer, texts["Japanese"], ascii_only=True) < 0.1
    )  # It would take four times the room.


@pytest.mark.parametrize("text", ['a "quoted"\n\tline \\ and a\\nb', "規則七。\n窓 😀", "plain", "\x00\x1f\u2028/"])
def test_a_json_string_is_unescaped_to_its_text(text: str) -> None:
    assert unescaped(as_json(text)) == unescaped(json.dumps(text)[1:-1]) == text
    assert json.loads(f'"{as_json(text)}"') == text
    assert unescaped(r"a \ud83d lone \q") == r"a ? lone \q"


def test_random_prompts_beside_near_duplicates_find_nothing_wrong(find) -> None:
    runs, wrong = find.wrong_runs(1000)
    assert runs > 100
    assert wrong == 0
