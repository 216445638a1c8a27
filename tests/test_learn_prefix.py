"""What documents are learned behind."""

import pytest

from lmc.blend.learn_prefix import PRIMER, learn_prefix, sink_of
from lmc.config.settings import Settings


class _Tokenizer:
    """Words are tokens; `<s>` and `<|user|>` are special."""

    all_special_ids = (0, 1)

    def __init__(self, bos: int | None, chat: str | None) -> None:
        self.bos_token_id, self.chat_template = bos, chat
        self.words = ["<s>", "<|user|>", "a", "#", *PRIMER.split()]

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> str:
        return f"{self.chat_template} {messages[0]['content']}"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self.words.index(word) for word in text.split()]


@pytest.mark.parametrize(
    ("bos", "chat", "sink"), [(0, None, (0,)), (0, "<|user|>", (0,)), (None, "<|user|>", (1,)), (None, "a", ())]
)
def test_the_sink_is_bos_or_the_first_token_of_a_chat_if_it_is_special(
    bos: int | None, chat: str | None, sink: tuple[int, ...]
) -> None:
    assert sink_of(_Tokenizer(bos, chat)) == sink
    assert sink_of(_Tokenizer(None, None)) == ()


def test_the_primer_is_a_document_behind_the_sink_and_between_separators() -> None:
    tokenizer = _Tokenizer(0, None)
    primer = tokenizer.encode(PRIMER, add_special_tokens=False)
    assert learn_prefix(tokenizer, Settings()) == (0, 3, 3, *primer, 3, 3)
    assert learn_prefix(tokenizer, Settings(), "sink") == (0,)
    assert learn_prefix(tokenizer, Settings(blend_method="cacheblend")) == ()


def test_without_a_sink_documents_are_learned_alone() -> None:
    """The primer's first token would be a sink of another kind than that of the prompts."""
    assert learn_prefix(_Tokenizer(None, None), Settings()) == ()
