"""Prompts for RAG through a chat API, with the documents where lmc finds them."""

from collections.abc import Sequence

from lmc.blend.segments import without_separators

SEPARATOR = " # # "  # the default of `blend_special_str`


def messages(
    system: str, documents: Sequence[str], question: str, *, intro: str = "", separator: str = SEPARATOR
) -> list[dict[str, str]]:
    """Return the messages of a chat that asks a question about documents.

    The user's message contains `intro`, the documents and the question in this order, with separators between them.
    White space around each document is removed, because it would change the document's tokens. A separator inside a
    text, such as a user's question, would begin a document there. So it is replaced as in `without_separators`, in all
    four arguments. `separator` must equal the server's `blend_special_str`.
    """
    if isinstance(documents, str):
        raise TypeError("documents must be a list of texts: a single text was given")
    system, *parts = (without_separators(text, separator) for text in (system, intro, *documents, question))
    chat = [{"role": "user", "content": separator.join(part.strip() for part in parts)}]
    return [{"role": "system", "content": system}, *chat] if system else chat
