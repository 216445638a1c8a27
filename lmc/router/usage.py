"""What an engine says of a prompt at the end of its answer: how many tokens it had, and which of them were reused."""

import re
from collections.abc import Mapping

import msgspec

from lmc.router.policy import Usage

# A quotation mark inside of a generated text has a backslash before it.
PROMPT_TOKENS = re.compile(rb'(?<!\\)"prompt_tokens":\s*(\d{1,9})')
CACHED_TOKENS = re.compile(rb'(?<!\\)"cached_tokens":\s*(\d{1,9})')
DOCUMENT_TOKENS = re.compile(rb'(?<!\\)"reused_tokens":\s*(\d{1,9})')
UNKNOWN = re.compile(rb'(?<!\\)"unknown_documents":\s*\d')  # If no token was reused, this alone is said.
PLACES = re.compile(rb'(?<!\\)"tokens_from":\s*(\{[^{}]{0,500}\})')


def usage(end: bytes) -> Usage:
    """Return what the end of an answer says of its prompt."""
    prompt, cached, documents = (_number(of.search(end)) for of in (PROMPT_TOKENS, CACHED_TOKENS, DOCUMENT_TOKENS))
    if documents is None and UNKNOWN.search(end):
        documents = 0
    places = PLACES.search(end)
    return Usage(prompt, cached, documents, _places(places[1]) if places else {})


def _number(found: re.Match[bytes] | None) -> int | None:
    return int(found[1]) if found else None


def _places(text: bytes) -> Mapping[str, int]:
    try:
        return msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError:
        return {}
