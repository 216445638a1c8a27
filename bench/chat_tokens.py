"""Chats over documents as tokens, in a model's chat template, for benchmarks that ask an engine without a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_server import SMALL_TEMPLATE

from lmc.blend.markers import Markers, special_tokens
from lmc.blend.segments import document_tokens
from lmc.demo import REAL, SHIPPED
from lmc.demo.pretrained import smollm2
from lmc.demo.questions import Collection, read_collection
from lmc.rag import SEPARATOR, messages

INTRO = "Here are the documents."
SMALL, SMOLLM2 = "small", "smollm2"
PLACE = "\0"  # where an answer stands in a chat


@dataclass(frozen=True)
class ChatTokens:
    """One model's tokenizer, and the documents and questions that fit the model."""

    path: str
    collection: Collection
    tokenizer: Any
    markers: Markers

    @classmethod
    def of(cls, model: str) -> "ChatTokens":
        """Return the chats of `small`, the model that lmc ships, or of `smollm2`."""
        from transformers import AutoTokenizer

        small = model == SMALL
        source = SHIPPED if small else REAL
        path = str(SHIPPED / "model" if small else smollm2())
        tokenizer = AutoTokenizer.from_pretrained(path)
        if small:
            tokenizer.chat_template = SMALL_TEMPLATE
        collection = read_collection(source / "documents", source / "questions.json")
        return cls(path, collection, tokenizer, Markers.of(tokenizer, SEPARATOR))

    def first(self, documents: Sequence[str], question: str, lead: str = "") -> list[int]:
        """Return a chat's first prompt, with the documents between separators; the answer begins with `lead`."""
        return self._encode(self._text(messages(self.collection.system, documents, question, intro=INTRO)) + lead)

    def plain(self, text: str) -> list[int]:
        """Return the prompt of a chat with one text and without separators."""
        system = {"role": "system", "content": self.collection.system}
        return self._encode(self._text([system, {"role": "user", "content": text}]))

    def next(self, question: str, lead: str = "") -> list[int]:
        """Return what follows an answer if the user asks another question, up to the next answer."""
        chat = [("user", ""), ("assistant", PLACE), ("user", question)]
        text = self._text([{"role": role, "content": content} for role, content in chat])
        return self._encode(text.split(PLACE)[1] + lead)

    def document(self, text: str) -> list[int]:
        """Return the tokens that a document has in a prompt."""
        (tokens,) = document_tokens(self.tokenizer.encode, self.markers, SEPARATOR, text)
        return list(tokens)

    @property
    def special(self) -> frozenset[int]:
        """Tokens that end an answer, or that no text has."""
        return special_tokens(self.tokenizer)

    def _text(self, chat: list[dict[str, str]]) -> str:
        text: str = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return text

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens
