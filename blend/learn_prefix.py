"""The learn prefix: the tokens before a document when its keys and values are computed.

In a prompt, earlier documents change the keys and values of a document. A part of this change does not depend on their
contents. So each document is learned after the primer, a short neutral document. The primer is the same for all users,
so no user's text reaches another user.
"""

from typing import Any, Literal

from lmc.config.settings import Settings

PRIMER = (
    "The town library stands on the north side of the square, in a long brick building that was once a grain store. It "
    "opens at nine in the morning and closes at six, except on Thursdays, when it stays open until eight. On the "
    "ground floor there are newspapers, a reading room with twelve tables, and shelves of novels that are arranged by "
    "author. The second floor holds maps, local records and a small collection of letters."
)


def learn_prefix(
    tokenizer: Any, settings: Settings, kind: Literal["primer", "sink", "none"] | None = None
) -> tuple[int, ...]:
    """Return the tokens after which documents are learned.

    The default of `kind` is that of the settings' method. The result is empty for the kind `none`, and if the tokenizer
    has no sink token.
    """
    kind = kind or ("none" if settings.blend_method == "cacheblend" else "primer")
    sink = () if kind == "none" else sink_of(tokenizer)
    if not sink or kind == "sink":
        return sink
    return *sink, *tokenizer.encode(settings.blend_special_str.join(("", PRIMER, "")), add_special_tokens=False)


def sink_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the first token of all prompts, if there is one: BOS, or the special token that begins a chat.

    A BOS is returned even if the chat template never writes it. A model uses the first token of a text as an attention
    sink (StreamingLLM, arXiv 2309.17453). If a document is learned alone, its own first token becomes a sink, and
    remains one in the middle of a prompt.
    """
    if tokenizer.bos_token_id is not None:
        return (tokenizer.bos_token_id,)
    if not getattr(tokenizer, "chat_template", None):
        return ()
    try:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except Exception:  # noqa: BLE001 - A template may raise any error, for example without a system text.
        return ()
    first = tuple(tokenizer.encode(chat, add_special_tokens=False)[:1])
    return first if set(first) <= set(tokenizer.all_special_ids) else ()
