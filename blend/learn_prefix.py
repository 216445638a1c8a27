"""The learn prefix: the tokens before a document when its keys and values are computed.

In a prompt, earlier documents change the keys and values of a document. A part of this change does not depend on their
contents. So each document is learned after the primer, a short neutral document. The primer is the same for all users,
so no user's text reaches another user. In a chat, documents are in a user's message. So the primer is after the header
that the chat template writes before such a message.
"""

from typing import Any, Literal

from lmc.blend.markers import Markers
from lmc.blend.turn_headers import Variants
from lmc.config.settings import Settings

PRIMER = (
    "The town library stands on the north side of the square, in a long brick building that was once a grain store. It "
    "opens at nine in the morning and closes at six, except on Thursdays, when it stays open until eight. On the "
    "ground floor there are newspapers, a reading room with twelve tables, and shelves of novels that are arranged by "
    "author. The second floor holds maps, local records and a small collection of letters."
)


LONGEST_HEADER = 16  # tokens; a chat template that writes more before the first message writes a system text, too
MESSAGE = "the text of a message"


def learn_prefix(
    tokenizer: Any, settings: Settings, markers: Markers, kind: Literal["primer", "sink", "none"] | None = None
) -> tuple[int, ...]:
    """Return the tokens after which documents are learned.

    `markers` are those of the tokenizer. The default of `kind` is that of the settings' method. The result is empty for
    the kind `none`, and if the tokenizer has no sink token.
    """
    kind = kind or ("none" if settings.blend_method == "cacheblend" else "primer")
    sink = () if kind == "none" else sink_of(tokenizer)
    if not sink or kind == "sink":
        return sink
    header = header_of_users(tokenizer, markers.messages)
    start = header if header[:1] == sink else sink + header
    return *start, *tokenizer.encode(settings.blend_special_str.join(("", PRIMER, "")), add_special_tokens=False)


def header_of_users(tokenizer: Any, messages: Variants) -> tuple[int, ...]:
    """Return the tokens that a chat template writes before a user's message, without those of a system text.

    They begin with the last of the headers `messages` (see `Markers`). Without one, they are all tokens before the
    first message, which may begin with BOS. The result is empty without a chat template.
    """
    chat = _chat(tokenizer)
    if MESSAGE not in chat:
        return ()
    before = tuple(tokenizer.encode(chat[: chat.index(MESSAGE)], add_special_tokens=False))
    starts = [at for at in range(len(before)) for one in messages if before[at : at + len(one)] == one]
    header = before[max(starts, default=0) :]
    return header if len(header) <= LONGEST_HEADER else ()


def sink_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the first token of all prompts, if there is one: BOS, or the special token that begins a chat.

    A BOS is returned even if the chat template never writes it. A model uses the first token of a text as an attention
    sink (StreamingLLM, arXiv 2309.17453). If a document is learned alone, its own first token becomes a sink, and
    remains one in the middle of a prompt.
    """
    if tokenizer.bos_token_id is not None:
        return (tokenizer.bos_token_id,)
    first = tuple(tokenizer.encode(_chat(tokenizer), add_special_tokens=False)[:1])
    return first if set(first) <= set(tokenizer.all_special_ids) else ()


def _chat(tokenizer: Any) -> str:
    """Return a chat of one user's `MESSAGE` as the chat template renders it; an empty text if it cannot."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": MESSAGE}], tokenize=False))
    except Exception:  # noqa: BLE001 - A template may raise any error, for example without a system text.
        return ""
