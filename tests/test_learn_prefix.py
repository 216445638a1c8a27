"""The tokens after which documents are learned."""

import pytest

from lmc.blend.learn_prefix import LONGEST_HEADER, PRIMER, learn_prefix, sink_of
from lmc.blend.markers import Markers
from lmc.config.settings import Settings


class _Tokenizer:
    """Words are tokens; `<s>` and `<|user|>` are special. `chat` is what the chat template writes before a message."""

    all_special_ids = (0, 1)

    def __init__(self, bos: int | None, chat: str | None) -> None:
        self.bos_token_id, self.chat_template = bos, chat
        self.words = ["<s>", "<|user|>", "a", "#", "user", "the", "text", "of", "message", *PRIMER.split()]

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


SEPARATORS = Markers(separators=((3, 3),), messages=((1, 4), (1,)))


def test_the_primer_is_a_document_after_the_sink_and_between_separators() -> None:
    tokenizer = _Tokenizer(0, None)
    primer = tokenizer.encode(PRIMER, add_special_tokens=False)
    assert learn_prefix(tokenizer, Settings(), SEPARATORS) == (0, 3, 3, *primer, 3, 3)
    assert learn_prefix(tokenizer, Settings(), SEPARATORS, "sink") == (0,)
    assert learn_prefix(tokenizer, Settings(blend_method="cacheblend"), SEPARATORS) == ()


@pytest.mark.parametrize(
    ("bos", "chat", "start"),
    [
        (0, "<|user|> user", (0, 1, 4)),
        (0, "<s> <|user|>", (0, 1)),
        (None, "<|user|> user", (1, 4)),
        (None, "<|user|> a # <|user|> user", (1, 4)),  # with a system text
        (0, "<s> a", (0, 2)),  # without a header that is known
        (0, f"<s> {'a ' * LONGEST_HEADER}", (0,)),  # with a system text and without a header that is known
    ],
)
def test_the_primer_is_in_a_message_of_a_user(bos: int | None, chat: str, start: tuple[int, ...]) -> None:
    """In a chat, no text follows the first token directly. The KV of documents learned so were far from those of chats:
    blends of Qwen2.5 were worse than blind reuse of documents that were learned alone."""
    tokenizer = _Tokenizer(bos, chat)
    primer = tokenizer.encode(PRIMER, add_special_tokens=False)
    assert learn_prefix(tokenizer, Settings(), SEPARATORS) == (*start, 3, 3, *primer, 3, 3)


def test_without_a_sink_documents_are_learned_alone() -> None:
    """The primer's first token would be a sink of another kind than that of the prompts."""
    assert learn_prefix(_Tokenizer(None, None), Settings(), SEPARATORS) == ()
