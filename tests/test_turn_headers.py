# ruff: noqa: RUF001 - the full-width bars of DeepSeek's markers
"""No turn of a conversation becomes a document, with the chat templates of the models that people serve."""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lmc.blend.markers import Markers
from lmc.blend.segments import document_tokens, ends_with_result, has_turns, split, texts
from lmc.rag import SEPARATOR

DATA = Path(__file__).parent / "data" / "chat_templates"
# As Llama 3, Qwen, DeepSeek and gpt-oss split texts: punctuation takes the newlines after it.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
    '{% endif %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('a role') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}"
    "<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
KIMI = (
    "{% for m in messages %}<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.role }}"
    "<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
# Written here, as the models write it: the roles of Llama 2 are plain text.
INST = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} </s>{% elif m.role == 'user' %}"
    "<s>[INST] {{ m.content }} [/INST]{% else %}{{ raise_exception('a role') }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# As Apertus writes the results of tools: within an answer, whose rest follows them without a marker.
RESULTS_IN_ANSWERS = (
    "{% set ns = namespace(answers=false) %}{% for m in messages %}{% if m.role in ('system', 'user') %}"
    "{% if ns.answers %}<|assistant_end|>{% set ns.answers = false %}{% endif %}<|user|>{{ m.content }}<|user_end|>"
    "{% else %}{% if not ns.answers %}<|assistant|>{% set ns.answers = true %}{% endif %}"
    "{% if m.role == 'tool' %}[{{ m.content }}]{% else %}{{ m.content }}{% if m.tool_calls %}<|tools|>"
    "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}<|tools_end|>{% endif %}"
    "{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt and not ns.answers %}<|assistant|>{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WRITTEN_HERE = {
    "Llama 3": (LLAMA_3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "Gemma 3": (GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n"]),
    "Kimi K2": (
        KIMI,
        [
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|tool_call_end|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            "<|tool_call_argument_begin|>",
        ],
    ),
    "Llama 2": (INST, ["<s>", "</s>"]),
    "plain text": (PLAIN, []),
    "contents in parts": (PARTS, ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]),
    "results in answers": (
        RESULTS_IN_ANSWERS,
        ["<|user|>", "<|user_end|>", "<|assistant|>", "<|assistant_end|>", "<|tools|>", "<|tools_end|>"],
    ),
}
ADDED: dict[str, dict[str, bool]] = json.loads((DATA / "added_tokens.json").read_text())
# Every template with the flags that its tokenizer has, and with none
FAMILIES = [
    (name, flags)
    for name in (*ADDED, *WRITTEN_HERE)
    for flags in ("flags", "no flags")
    if name != "results in answers"  # Nothing is learned of what follows the first call of a tool.
]
TEXTS = {animal: f"The {animal} sat on the mat. It slept for 12 hours." for animal in ("cat", "dog", "owl", "bee")}
SECRETS = "1234", "4321", "5678", "8888", "9999"  # what only the model says
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]


@functools.cache
def words() -> str:
    """A small tokenizer, before any added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    said = ["user", "assistant", "system", "tool", "model", " # # ", ".\n\n", "\n\n", " The cat sat on the mat. "]
    tokenizer.train_from_iterator([*TEXTS.values(), *said, LLAMA_3, KIMI] * 20, trainer)
    return str(tokenizer.to_str())


def tokenizer_of(family: str, flags: str = "flags") -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template of a model, and the added tokens that it needs."""
    if family in ADDED:
        template, added = (DATA / f"{family}.jinja").read_text(), ADDED[family]
    else:
        template, names = WRITTEN_HERE[family]
        added = {name: bool(name.strip()) for name in names}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(words()))
    tokenizer.add_tokens(
        [AddedToken(name, special=special and flags == "flags", normalized=False) for name, special in added.items()]
    )
    tokenizer.chat_template = template
    if flags == "flags" and added:
        tokenizer.bos_token = next(iter(added))
    return tokenizer


def said(*texts: str, before: str = "Read this.", after: str = "who sat?") -> str:
    return SEPARATOR.join([before, *(TEXTS[text] for text in texts), after])


def secret(text: str) -> str:
    """What the model says, with separators around a text that is no document."""
    return f"Well.{SEPARATOR}{text}{SEPARATOR}That is it.{SEPARATOR}"


def called(number: int, *, as_text: bool) -> dict[str, Any]:
    arguments = {"x": secret("Look for the 9999."), "y": secret("And for 8888.")}
    given = json.dumps(arguments) if as_text else arguments
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "look", "arguments": given}}


def conversations() -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Conversations with separators in all that is said, and the options of their templates."""
    thinking = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), secret("I think it is 5678."))
    for system, thought in itertools.product((True, False), ({}, thinking)):
        answer = {"role": "assistant", "content": secret("My PIN is 1234."), **thought}
        start = [{"role": "system", "content": said("cat", before="Be brief.", after="Yes.")}] if system else []
        chat = [*start, {"role": "user", "content": said("dog", "owl")}, answer]
        chat += [{"role": "user", "content": said("bee", before="My PIN is 7777.")}, answer]
        yield chat, {}
        for more in ({}, {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}):
            yield chat[:-1], {"add_generation_prompt": True, **more}
    for as_text, calls, silent, thought in itertools.product((True, False), (1, 2), (True, False), ({}, thinking)):
        answer = {"role": "assistant", "content": "" if silent else secret("My PIN is 1234."), **thought}
        asked = [called(i, as_text=as_text) for i in range(calls)]
        chat = [{"role": "user", "content": said("cat")}, {**answer, "tool_calls": asked}]
        for call, found in zip(asked, ("dog", "owl"), strict=False):
            content = said(found, before="Found.", after="No more.")
            chat.append({"role": "tool", "tool_call_id": call["id"], "name": "look", "content": content})
        yield chat, {"add_generation_prompt": True, "tools": TOOLS}
        chat += [{"role": "assistant", "content": secret("It is 4321."), **thought}]
        yield chat, {"tools": TOOLS}
        yield [*chat, {"role": "user", "content": said("bee")}], {"tools": TOOLS}


def rendered(tokenizer: Any, **variables: str) -> Iterator[tuple[str, list[int]]]:
    """The conversations that a template takes, as text and as tokens."""
    for chat, given_options in conversations():
        options = given_options | variables
        in_parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat]
        for given in (chat, in_parts):
            try:
                text = tokenizer.apply_chat_template(given, tokenize=False, **options)
            except Exception:  # noqa: BLE001 - templates raise whatever they like
                continue
            if TEXTS["bee"] in text or TEXTS["cat"] in text:
                yield text, list(tokenizer.apply_chat_template(given, return_dict=False, **options))
                break


def learned_of_conversations(
    tokenizer: Any, *, all_texts: bool = True, **variables: str
) -> Iterator[tuple[str, list[list[int]], list[list[int]]]]:
    """Yield conversations, the documents that are learned of each, and those that are in it.

    What repeats may be learned of all texts without separators around it, but not of the model's.
    """
    markers = Markers.of(tokenizer, SEPARATOR)
    known = {text: document_tokens(tokenizer.encode, markers, SEPARATOR, text)[0] for text in TEXTS.values()}
    for text, prompt in rendered(tokenizer, **variables):
        found = [prompt[one.start : one.stop] for one in split(prompt, markers).documents]
        others = " ".join(tokenizer.decode(prompt[one.start : one.stop]) for one in texts(prompt, markers))
        others = "".join((others + " ".join(map(tokenizer.decode, found))).split())  # It writes blanks between tokens.
        assert not [secret for secret in SECRETS if secret in others], text
        there = {document: tokens for document, tokens in known.items() if document in text}
        assert not all_texts or all("".join(document[:-1].split()) in others for document in there), text
        wanted = sorted((text.index(document), tokens) for document, tokens in there.items())
        yield text, found, [tokens for _, tokens in wanted]


@pytest.mark.parametrize(("family", "flags"), FAMILIES)
def test_only_documents_are_learned_of_conversations(family: str, flags: str) -> None:
    """Role markers without the special flag did not count, so that "My PIN is 1234" was stored as a document."""
    tokenizer, chats = tokenizer_of(family, flags), 0
    for text, found, wanted in learned_of_conversations(tokenizer):
        assert found == wanted, text
        chats += 1
    assert chats >= 8


def test_answers_that_follow_results_without_a_header_are_not_learned() -> None:
    """Nor are the results, because nothing tells them from such an answer."""
    chats = list(learned_of_conversations(tokenizer_of("results in answers"), all_texts=False))
    assert all(document in wanted for _, found, wanted in chats for document in found)
    assert any(found == wanted for _, found, wanted in chats)
    assert any(found != wanted for _, found, wanted in chats)


def test_a_template_may_need_the_variable_functions() -> None:
    tokenizer = tokenizer_of("Llama 3")
    tokenizer.chat_template = "{% set unused = functions + '' %}" + LLAMA_3
    with pytest.raises(Exception, match="undefined"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    headers = Markers.of(tokenizer_of("Llama 3"), SEPARATOR)
    assert Markers.of(tokenizer, SEPARATOR) == headers


# The templates that llama.cpp has in its repository: `make templates`
TEMPLATES = sorted((Path(__file__).parent.parent / "build" / "templates").glob("*.jinja"))
MARKS = re.compile(r"<[|｜][^<>\s{}'\"]+[|｜]>|</?[A-Za-z_|][A-Za-z0-9_|]*>|\[/?[A-Z_]{3,}\]")
# Texts of several messages, none of them the model's, follow each other without a marker.
JOINING = "NVIDIA-Nemotron-Nano-v2", "mistralai-Mistral-Nemo-Instruct-2407"
RESULTS_IN_AN_ANSWER = "Apertus-8B-Instruct"


@pytest.mark.long
@pytest.mark.skipif(not TEMPLATES, reason="make templates fetches them")
@pytest.mark.parametrize("flags", ["flags", "no flags"])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_no_answer_is_learned_with_any_published_template(template: Path, flags: str) -> None:
    text = template.read_text()
    names = sorted({*MARKS.findall(text), "<s>", "</s>"})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(words()))
    special = {name: flags == "flags" and name.startswith(("<|", "<｜", "<s", "</s")) for name in names}
    tokenizer.add_tokens([AddedToken(name, special=flag, normalized=False) for name, flag in special.items()])
    tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token = text, "<s>", "</s>"
    variables = {"functions": "[]", "datetime": "today"} if "functions" in text and "datetime" in text else {}
    chats = 0
    in_answers = template.stem == RESULTS_IN_AN_ANSWER
    for chat, found, wanted in learned_of_conversations(tokenizer, all_texts=not in_answers, **variables):
        assert found == wanted or template.stem in JOINING or in_answers, chat
        assert template.stem in JOINING or all(document in wanted for document in found), chat
        chats += 1
    assert chats


@pytest.mark.parametrize(
    ("family", "answers", "messages"),
    [
        (
            "deepseek-ai-DeepSeek-V3.1",
            ["<｜Assistant｜>", "<｜tool▁output▁end｜>"],  # no marker stands between a tool's result and an answer
            ["<｜end▁of▁sentence｜>", "<｜tool▁output▁begin｜>"],
        ),
        ("Qwen-Qwen3-0.6B", ["<|im_start|>assistant"], ["<|im_start|>"]),
        ("openai-gpt-oss-120b", ["<|start|>assistant"], ["<|start|>"]),
        ("microsoft-Phi-3.5-mini-instruct", ["<|assistant|>"], ["<|user|>"]),
        ("Llama 3", ["<|start_header_id|>assistant"], ["<|start_header_id|>"]),
        ("Gemma 3", ["<start_of_turn>model"], ["<start_of_turn>"]),
        ("Llama 2", ["[/INST]"], ["</s>"]),
    ],
)
def test_headers_are_as_short_as_they_can_be(family: str, answers: list[str], messages: list[str]) -> None:
    """So they are found before answers with thinking, without it, and with calls of tools."""
    tokenizer = tokenizer_of(family)
    markers = Markers.of(tokenizer, SEPARATOR)
    assert [joined(tokenizer, one) for one in markers.answers] == answers
    assert [joined(tokenizer, one) for one in markers.messages] == messages


def joined(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without the blanks that a small tokenizer decodes beside added tokens."""
    return str(tokenizer.decode(list(tokens))).replace(" ", "")


TELL_RESULTS = *ADDED.keys() - {"microsoft-Phi-3.5-mini-instruct"}, "Llama 3", "Kimi K2", "contents in parts"


@pytest.mark.parametrize("family", [*ADDED, *WRITTEN_HERE])
def test_results_of_tools_are_told_from_questions(family: str) -> None:
    """What an agent's tool returns asks nothing, although it is the last message."""
    tokenizer = tokenizer_of(family)
    markers = Markers.of(tokenizer, SEPARATOR)
    call = {"id": "call00009", "type": "function", "function": {"name": "look", "arguments": {"x": "mat"}}}
    result = {"role": "tool", "tool_call_id": "call00009", "name": "look", "content": TEXTS["cat"]}
    asks = [{"role": "user", "content": "tool"}]
    looks = [*asks, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    asks_again = [*looks, {"role": "assistant", "content": "It sat."}, *asks]
    told = []
    in_parts = family == "contents in parts"
    for messages in (asks, looks, asks_again):
        chat = [{**one, "content": [{"type": "text", "text": one["content"]}]} if in_parts else one for one in messages]
        try:
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, tools=TOOLS)
        except Exception:  # noqa: BLE001 - templates raise whatever they like
            assert not markers.results
            return
        told.append(ends_with_result(prompt, markers, lambda tokens: not joined(tokenizer, tokens).strip()))
    assert told == [False, family in TELL_RESULTS, False]


@pytest.mark.parametrize("mention", ["<think>", "</think>", "<tool_call>"])
def test_a_document_may_mention_what_is_only_written_inside_of_answers(mention: str) -> None:
    """Such texts are about language models. An answer is found by its header, so they cannot be a part of one."""
    tokenizer = tokenizer_of("Qwen-Qwen3-0.6B")
    markers = Markers.of(tokenizer, SEPARATOR)
    text = f"Models write {mention} before they think."
    assert tokenizer.convert_tokens_to_ids(mention) in tokenizer.encode(text)
    assert len(document_tokens(tokenizer.encode, markers, SEPARATOR, text)) == 1


@pytest.mark.parametrize(
    ("family", "mention"),
    [
        ("deepseek-ai-DeepSeek-V3.1", "<｜User｜>"),
        ("Qwen-Qwen3-0.6B", "</tool_response>"),  # nothing else stands between the results of two tools
        ("Llama 2", " [/INST]"),
        ("plain text", "\nassistant:"),
    ],
)
def test_a_text_with_the_marker_of_a_turn_is_no_document(family: str, mention: str) -> None:
    tokenizer = tokenizer_of(family)
    markers = Markers.of(tokenizer, SEPARATOR)
    assert document_tokens(tokenizer.encode, markers, SEPARATOR, f"The cat sat.{mention} It slept.") == []
    assert has_turns(tokenizer.encode(f"The cat sat.{mention} It slept."), markers)
    assert not has_turns(tokenizer.encode("The cat sat. It slept."), markers)


def test_added_tokens_of_white_space_are_text() -> None:
    tokenizer = tokenizer_of("Gemma 3", "no flags")
    markers = Markers.of(tokenizer, SEPARATOR)
    assert markers.special.isdisjoint(tokenizer.encode("\n") + tokenizer.encode("\n\n"))


def test_names_that_only_templates_write_count_without_a_template() -> None:
    """vLLM writes the chats of some models itself, and a server may be started with another template."""
    tokenizer = tokenizer_of("deepseek-ai-DeepSeek-V3.1")
    tokenizer.chat_template = None
    markers = Markers.of(tokenizer, SEPARATOR)
    assert {tokenizer.convert_tokens_to_ids(name) for name in ("<｜User｜>", "<｜Assistant｜>")} <= markers.special
    assert (markers.answers, markers.messages) == ((), ())


def test_an_unknown_role_ends_an_answer() -> None:
    tokenizer = tokenizer_of("Qwen-Qwen3-0.6B")
    markers = Markers.of(tokenizer, SEPARATOR)
    answer = f"<|im_start|>assistant\n{secret('My PIN is 1234.')}<|im_end|>\n"
    prompt = tokenizer.encode(f"{answer}<|im_start|>critic\n{said('cat')}<|im_end|>\n{answer}")
    (document,) = split(prompt, markers).documents
    assert joined(tokenizer, prompt[document.start : document.stop]) == TEXTS["cat"].replace(" ", "")
