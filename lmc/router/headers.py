"""The headers that go on to engines, and those that come back. What is meant for one connection alone is left out."""

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set

from multidict import CIMultiDict

# Of one connection, or written anew for each.
NOT_SENT_ON = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "expect",
})  # fmt: skip
NOT_SENT_BACK = NOT_SENT_ON - {"content-length"}
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
ENGINE, EXPECTED, REQUEST = "x-lmc-engine", "x-lmc-expected-tokens", "x-request-id"


def read_headers(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return headers as texts, which are sent on as UTF-8: byte for byte, unless they are no UTF-8."""
    return [(name.decode("latin-1").lower(), _text(value)) for name, value in raw]


def sent_on(
    headers: Sequence[tuple[str, str]], login: Mapping[str, str], without: Set[str] = frozenset()
) -> CIMultiDict[str]:
    """Return the headers for an engine. They have one request id, which is made here if the client's is none."""
    dropped = NOT_SENT_ON | _nominated(headers) | without
    sent = CIMultiDict((name, value) for name, value in headers if name not in dropped)
    sent.update(login)
    given = sent.get(REQUEST, "")
    sent[REQUEST] = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return sent


def sent_back(
    raw: Sequence[tuple[bytes, bytes]], request_id: str, engine: str, expected_tokens: float
) -> list[tuple[bytes, bytes]]:
    """Return the headers for a client."""
    ours = {REQUEST: request_id, ENGINE: engine, EXPECTED: str(round(expected_tokens))}
    dropped = NOT_SENT_BACK | _nominated(read_headers(raw)) | ours.keys()
    kept = [(name.lower(), value) for name, value in raw if name.decode("latin-1").lower() not in dropped]
    return [*kept, *((name.encode(), value.encode()) for name, value in ours.items())]


def _nominated(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names of headers that `Connection` says are meant for one connection."""
    return {one.strip().lower() for name, value in headers if name == "connection" for one in value.split(",")}


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
