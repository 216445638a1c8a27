"""Reads multipart forms (RFC 7578), which carry audio or files with a request, in time linear in their size."""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import xxhash

FORM_TYPE = "multipart/form-data"
BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s";]{1,200}))', re.IGNORECASE)
PARAMETER = re.compile(rb';\s*(\w+)=(?:"([^"]*)"|([^";]*))')
MAX_FORM_PARTS = 1000  # parts of a form that are read, as in vLLM
MAX_PART_HEADER_BYTES, MAX_FIELD_BYTES = 4096, 1024
HEADERS_END = b"\r\n\r\n"


class Form(NamedTuple):
    """What a form says."""

    fields: dict[str, str]  # the short ones of the requested names
    digest: str  # of all parts; equal files with equal fields have equal digests


def read_form(body: bytes, content_type: str, names: Collection[str]) -> Form:
    """Return the fields of a form that have these names, the first ones of each name."""
    fields, digest, view = dict[str, str](), xxhash.xxh3_128(), memoryview(body)
    for start, stop in _parts(body, content_type):
        digest.update(view[start:stop])
        headers_stop = body.find(HEADERS_END, start, min(stop, start + MAX_PART_HEADER_BYTES))
        value_start = headers_stop + len(HEADERS_END)
        if headers_stop < 0 or stop - value_start > MAX_FIELD_BYTES:
            continue
        name = _name(body[start:headers_stop])
        if name in names and name not in fields:
            fields[name] = body[value_start:stop].decode("utf-8", "replace").strip()
    return Form(fields, digest.hexdigest())


def _parts(body: bytes, content_type: str) -> Iterator[tuple[int, int]]:
    """Yield where each part begins and ends, without the line breaks around it."""
    match = BOUNDARY.search(content_type)
    if match is None:
        return
    delimiter = b"--" + (match[1] or match[2]).encode("utf-8", "surrogateescape")
    if body.startswith(delimiter):
        start = len(delimiter)
    else:  # A text before the first part is ignored.
        start = body.find(delimiter := b"\r\n" + delimiter) + len(delimiter)
        if start < len(delimiter):
            return
    delimiter = b"\r\n" + delimiter.removeprefix(b"\r\n")
    for _ in range(MAX_FORM_PARTS):
        stop = body.find(delimiter, start)
        if stop < 0:  # the end of the form, or a form that is cut off
            return
        yield start + len(b"\r\n"), stop
        start = stop + len(delimiter)


def _name(headers: bytes) -> str:
    """Return the name of a part from its headers; empty if they have none."""
    for header in headers.split(b"\r\n"):
        kind, _, value = header.partition(b":")
        if kind.strip().lower() == b"content-disposition":
            parameters = {match[1].lower(): match[2] or match[3] for match in PARAMETER.finditer(value)}
            return (parameters.get(b"name") or b"").decode("utf-8", "replace").strip()
    return ""
