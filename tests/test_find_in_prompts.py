"""Documents are found in prompts as applications write them, with tokenizers that join texts at their seams."""

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BENCH = Path(__file__).parents[1] / "bench"
# As Llama 3, Qwen, DeepSeek and gpt-oss split texts: punctuation takes the newlines after it.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
    """A tokenizer that splits texts as those of served models do."""
    tokenizer = Tokenizer(models.BPE())
    split, spell = pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((text for kind in texts.values() for text in kind), trainer)
    return tokenizer


def test_documents_are_found_in_every_template_and_kind_of_text(find, texts, trained) -> None:
    shares = find.share_found(trained, texts)
    poor = {(name, kind): share for name, of in shares.items() for kind, share in of.items() if share < 0.97}
    assert {name for name, _ in poor} == {"json"}  # Escaped text has other tokens.


@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_documents_are_found_with_the_tokenizers_of_served_models(find, texts, name) -> None:
    file = find.TOKENIZERS / name / "tokenizer.json"
    if not file.exists():
        pytest.skip("run `make tokenizers`")
    shares = find.share_found(Tokenizer.from_file(str(file)), texts)
    poor = {(name, kind): share for name, of in shares.items() for kind, share in of.items() if share < 0.975}
    assert {name for name, _ in poor} == {"json"}


def test_random_prompts_beside_near_duplicates_find_nothing_wrong(find) -> None:
    runs, wrong = find.wrong_runs(1000)
    assert runs > 100
    assert wrong == 0
