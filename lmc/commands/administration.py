"""`lmc explain` and `lmc documents`: send requests to the administration endpoint of a running engine."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.table import Table
from rich.text import Text

from lmc.documents.escaped import AS_JSON
from lmc.documents.sources import name_of
from lmc.errors import InputError
from lmc.http.prompts import CHAT, COMPLETION, FIELDS, HINT, RESPONSE, TOKENS, single_prompts
from lmc.storage.places import fastest_first, place_of
from lmc.terminal import AsJson, console, counted, print_json, printable, seconds_of, time_text

if TYPE_CHECKING:
    from lmc.http.client import HttpClient

ADMIN_URL = "http://127.0.0.1:9180"
SHOWN_ID_DIGITS, SHOWN_TENANT_DIGITS = 12, 6  # displayed digits of an id, and of a tenant's digest
COLUMNS = ("id", "name", "model", "tenant", "tokens", "places", "uses", "last used", "stays")
ALWAYS = ("id", "name", "tokens", "uses", "last used")  # columns of a table that are never left out
NAME_WIDTH, DATE_LENGTH = 20, 10  # characters of a name and of a date

RENDERING = {CHAT: "/v1/chat/completions/render", RESPONSE: "/v1/responses/render"}  # vLLM's paths, by a body's field
NOT_FOUND = 404

Address = Annotated[
    str, typer.Option("--url", envvar="LMC_ADMIN", help="LMC_ADMIN address of the engine or cache server")
]
Name = Annotated[str, typer.Argument(help="name of a document, or the first digits of its id")]
Names = Annotated[list[str], typer.Argument(help="names of documents, or the first digits of their ids")]
documents = typer.Typer(
    no_args_is_help=True, help="List, show, pin and remove the documents that a running engine knows."
)


def explain(
    prompt: Annotated[str, typer.Argument(help="file with a request as JSON, or with a text; - for standard input")],
    url: Address = ADMIN_URL,
    server: Annotated[
        str | None, typer.Option(help="URL of the vLLM server that tokenizes the prompt, with its chat template")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain which documents of a prompt a running engine would reuse, why not the others, and what to change.

    The file holds the body of a request to /v1/chat/completions (messages), /v1/completions (prompt: a text, token ids,
    or a list of either) or /v1/responses (input), or the text of a prompt. Nothing is computed. The engine has to run
    with LMC_ADMIN=127.0.0.1:9180.
    """
    body = _body(prompt)
    prompts = single_prompts(body)
    if server is not None:
        others = {name: value for name, value in body.items() if name not in FIELDS}
        body = others | {TOKENS: _rendered(server, body, prompts)}
    explanation = _ask(url, "/v1/explain", "documents" if len(prompts) == 1 else "prompts", body)
    if as_json:
        print_json(explanation)
        return
    for number, one in enumerate(explanation.get("prompts", [explanation]), 1):
        if len(prompts) > 1:
            console().print(Text(f"prompt {number} of {len(prompts)}"))
        _show_explanation(one, url)


def _show_explanation(explanation: dict[str, Any], url: str) -> None:
    out = console()
    fields = "tokens", "engine_tokens", "exact_tokens", "reused_tokens", "repaired_tokens"
    tokens, cached, exact, reused, recomputed = (explanation[name] for name in fields)
    stored = f"{cached} in the engine's own cache, {exact} in a stored prefix,"
    out.print(Text(f"{counted(tokens, 'token')}: {stored}"))
    out.print(Text(f"{reused} reused from documents, {recomputed} of them recomputed"))
    if explanation["why"]:
        out.print(Text(printable(f"note: {explanation['why']}")))
    for line in explanation["advice"]:
        out.print(Text(printable(f"  {line}")))
    for number, document in enumerate(explanation["documents"], 1):
        size = document["stop"] - document["start"]
        places = ", ".join(place_of(name).title for name in fastest_first(set(document["places"])))
        held_chunks, chunks = len(document["places"]), document["chunks"]
        part = "" if held_chunks in (0, chunks) else f", {held_chunks} of {chunks} chunks"
        state = f"stored ({places}{part}), not reused" if places else "not stored"
        outcome = f"reused from {places}{part}" if document["reused"] else state
        out.print(Text(f"\ndocument {number}, {counted(size, 'token')} from {document['start']} on: {outcome}"))
        out.print(Text(f"  {document['text']!r}"))
        if document["known"]:
            first, name = document["first"], document["name"] or document["known"][:SHOWN_ID_DIGITS]
            out.print(Text(printable(f"  equal to tokens {first} to {first + size} of {name}")))
        if document["why"]:
            out.print(Text(f"  why: {document['why']}"))
        if document["nearest"]:
            out.print(Text(f"  lmc documents show {document['nearest'][:SHOWN_ID_DIGITS]} --url {url}"))


@documents.command(name="list")
def list_documents(
    limit: Annotated[
        int, typer.Option(min=1, help="maximum number of documents; the most recently used come first")
    ] = 100,
    after: Annotated[str, typer.Option(help="continue after this position, which the previous list has printed")] = "",
    name: Annotated[str, typer.Option(help="only documents whose name contains this text")] = "",
    model: Annotated[str, typer.Option(help="only documents of models whose name contains this text")] = "",
    tenant: Annotated[str, typer.Option(help="only documents of tenants that begin with these digits")] = "",
    unused_for: Annotated[str, typer.Option(help="only documents not used for this time, such as 30d")] = "",
    url: Address = ADMIN_URL,
    as_json: AsJson = False,
) -> None:
    """List documents with their tokens, tiers, number of uses and last use.

    Documents without a name are shown by their first words. Those with the same digits of the tenant are of one tenant.
    """
    given = {"limit": str(limit), "after": after, "name": name, "model": model, "tenant": tenant}
    given |= {"unused_for": str(int(seconds_of(unused_for)))} if unused_for else {}
    query = urlencode({option: name_of(value) for option, value in given.items() if value})
    listing = _ask(url, f"/v1/documents?{query}", "documents")
    if as_json:
        print_json(listing)
        return
    if sys.stdout is not None and sys.stdout.isatty():  # None if the parent process has closed it
        console().print(document_table(listing["documents"]))
    else:  # A table of 10,000 rows takes seconds.
        for row in (COLUMNS, *map(_row, listing["documents"])):
            typer.echo("\t".join(row))
    console().print(Text(f"{len(listing['documents'])} of {counted(listing['total'], 'document')}"))
    if listing.get("next"):
        console().print(Text(f"for more: --after {listing['next']}"))


@documents.command()
def show(name: Name, url: Address = ADMIN_URL, as_json: AsJson = False) -> None:
    """Show a document with its text, or all documents of a name."""
    listing = _ask(url, _path(name), "documents")
    if as_json:
        print_json(listing)
        return
    for document in listing["documents"]:
        facts = (
            counted(document["tokens"], "token"),
            _places(document),
            f"used {counted(document['uses'], 'time')}",
            _stays(document),
        )
        names = ", ".join(printable(one) for one in document["names"])
        console().print(
            Text(f"{document['id']} {names}\n{', '.join(filter(None, facts))}\n\n{printable(document['text'])}\n")
        )


@documents.command()
def pin(
    names: Names,
    ttl: Annotated[str | None, typer.Option(help="remove the documents after this time, such as 12h or 7d")] = None,
    url: Address = ADMIN_URL,
) -> None:
    """Pin documents: they are not evicted, and are written again to a Redis that has dropped them.

    A time limit that they have stays, unless --ttl gives another one.
    """
    _change(url, names, {"pinned": True} | ({"ttl": seconds_of(ttl)} if ttl is not None else {}))


@documents.command()
def unpin(names: Names, url: Address = ADMIN_URL) -> None:
    """Undo a pin, and remove the time limit."""
    _change(url, names, {"pinned": False, "ttl": None})


@documents.command()
def remove(names: Names, url: Address = ADMIN_URL) -> None:
    """Remove documents from memory and all tiers. They are learned again when a prompt has them."""
    for name in names:
        for document_id in _ask(url, _path(name), "removed", method="DELETE")["removed"]:
            hint = "it is learned again when a prompt has it, or by lmc learn --again"
            console().print(Text(f"removed {document_id}; {hint}"))


def document_table(documents: Sequence[dict[str, Any]]) -> Table:
    """Return a table that fits into 80 columns. It lacks empty columns, and the model if there is only one.

    Of a long name, the beginning and the end are shown, and of a time its date in UTC.
    """
    rows = [_row(document) for document in documents]
    for row, document in zip(rows, documents, strict=True):
        name = row[COLUMNS.index("name")]
        if len(name) > NAME_WIDTH:
            row[COLUMNS.index("name")] = f"{name[: NAME_WIDTH - len(AS_JSON) - 1]}…{name[-len(AS_JSON) :]}"
        until = f"until {time_text(document['expires'])[:DATE_LENGTH]}" if document["expires"] else ""
        row[-1] = ", ".join(filter(None, ("pinned" if document["pinned"] else "", until)))
        row[-2] = time_text(document["used"])[:DATE_LENGTH]
    values = [{row[at] for row in rows} for at in range(len(COLUMNS))]
    shown = [
        at
        for at, column in enumerate(COLUMNS)
        if column in ALWAYS or len(values[at]) > 1 or (column != "model" and values[at] != {""})
    ]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in (COLUMNS[at] for at in shown):
        is_name = column == "name"
        table.add_column(
            column,
            no_wrap=column in ALWAYS,
            overflow="ellipsis" if column in ALWAYS else "fold",
            max_width=NAME_WIDTH if is_name else None,
        )
    for row in rows:
        table.add_row(*(Text(row[at]) for at in shown))
    return table


def _row(document: dict[str, Any]) -> list[str]:
    name, names = " ".join((document["name"] or document["begins"]).split()), len(document["names"])
    return [
        document["id"][:SHOWN_ID_DIGITS],
        printable(f"{name} ({names} names)" if names > 1 else name),
        document["model"],
        document["tenant"][:SHOWN_TENANT_DIGITS],
        str(document["tokens"]),
        _places(document),
        str(document["uses"]),
        time_text(document["used"]),
        _stays(document),
    ]


def _change(url: str, names: Sequence[str], changes: dict[str, Any]) -> None:
    for path in [_path(name) for name in names]:
        _ask(url, path, "documents")  # Check all names first: a wrong name changes nothing.
    for name in names:
        for document in _ask(url, _path(name), "documents", changes, "PATCH")["documents"]:
            state = _stays(document) or "unpinned, without a time limit"
            title = f"{document['id'][:SHOWN_ID_DIGITS]} {printable(document['name'] or document['begins'])}"
            console().print(Text(f"{title}: {state} ({_places(document)})"))


def _places(document: dict[str, Any]) -> str:
    return ", ".join(document["places"]) or "evicted"


def _stays(document: dict[str, Any]) -> str:
    """Return the pin and the time limit of a document as text."""
    until = f"removed at {time_text(document['expires'])}" if document["expires"] else ""
    return ", ".join(filter(None, ("pinned" if document["pinned"] else "", until)))


def _ask(url: str, path: str, field: str, body: Any = None, method: str | None = None) -> Any:
    """Return the response of an administration endpoint. Raises `InputError` if it lacks the field `field`."""
    from lmc.http.client import admin_client

    return _with_field(field, url, admin_client(url).ask(path, body, method), "an lmc endpoint")


def _with_field(field: str, url: str, response: Any, server: str) -> Any:
    if not isinstance(response, dict) or field not in response:
        raise InputError(f"{url} is not {server}: its response has no field {field!r}; check the address")
    return response


def _path(name: str) -> str:
    if not name.strip():
        raise InputError("document name is empty: use a name, or the first digits of an id, from `lmc documents list`")
    return f"/v1/documents/{quote(name_of(name), safe='')}"


def _rendered(server: str, body: dict[str, Any], prompts: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens that a vLLM server makes of each prompt of a request.

    A server with --enable-scale-out renders chats and responses as it does when it answers them.
    """
    from lmc.http.client import Refused, Unreachable, vllm_client

    client = vllm_client(server)
    model = body.get("model") or client.model()
    for path in (RENDERING[field] for field in RENDERING if field in body):
        try:
            rendered = client.ask(path, body | {"model": model})
            return [_with_field("token_ids", server, rendered, "a vLLM server")["token_ids"]]
        except Refused as error:
            if error.status != NOT_FOUND:
                raise
        except Unreachable:  # Then `/tokenize` is also unreachable, or the server has no such path.
            pass
    return [one[TOKENS] if TOKENS in one else _tokenized(client, model, one) for one in prompts]


def _tokenized(client: "HttpClient", model: str, request: dict[str, Any]) -> list[int]:
    from lmc.router.requests import tokenize_body

    answer = client.ask("/tokenize", tokenize_body(request | {"model": model}))
    return list(_with_field("tokens", client.url, answer, "a vLLM server")["tokens"])


def _body(source: str) -> dict[str, Any]:
    from lmc.documents.sources import STANDARD_INPUT, read_standard_input, read_text

    if source != STANDARD_INPUT and not os.path.exists(source):  # accepts a name of any length
        raise InputError(f"file {source} does not exist: use a file with a request or a text, or - for standard input")
    text = read_standard_input() if source == STANDARD_INPUT else read_text(Path(source))
    if not text.strip():
        raise InputError(f"{source} is empty: it must contain a request as JSON, or the text of a prompt")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip()[0] in "{[":
            hint = f'a text that begins with {text.lstrip()[0]} must be given as {{"prompt": "TEXT"}}'
            raise InputError(f"{source} is not valid JSON: {error}; {hint}") from None
        return {COMPLETION: text}
    if isinstance(body, list):
        return {_field_of(body): body}
    if not isinstance(body, dict):
        raise InputError(f"{source} is neither a request nor a text: {HINT}")
    if not isinstance(body.get("kv_transfer_params") or {}, dict):
        raise InputError(f'{source}: kv_transfer_params must be an object, such as {{"lmc": {{…}}}}')
    return body


def _field_of(prompt: list[Any]) -> str:
    """Return the field of a request that a list alone stands for."""
    if prompt and all(isinstance(item, dict) for item in prompt):
        return CHAT if all("role" in item for item in prompt) else RESPONSE
    return COMPLETION
