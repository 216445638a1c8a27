"""`lmc explain` and `lmc documents`: send requests to the administration endpoint of a running engine."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from lmc.errors import InputError
from lmc.terminal import AsJson, console, counted, print_json, seconds_of, time_text

URL = "http://127.0.0.1:9180"
DIGITS, TENANT_DIGITS = 12, 6  # displayed digits of an id, and of a tenant's digest
MODEL = 2  # column of a list that is left out if there is only one model

Address = Annotated[str, typer.Option("--url", envvar="LMC_ADMIN", help="the engine's LMC_ADMIN")]
Name = Annotated[str, typer.Argument(help="its name, or the first digits of its id")]
Names = Annotated[list[str], typer.Argument(help="their names, or the first digits of their ids")]
documents = typer.Typer(
    no_args_is_help=True, help="List, show, pin and remove the documents that a running engine knows."
)


def explain(
    prompt: Annotated[str, typer.Argument(help="file of a request as JSON, or of text; - for standard input")],
    url: Address = URL,
    server: Annotated[
        str | None, typer.Option(help="the vLLM server, to build the prompt as it would, with its own chat template")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which documents of a prompt a running engine would reuse, and why it would not reuse the others.

    The file holds the body of a chat or completions request (messages, or prompt), or the text of a prompt. Nothing is
    computed. The engine has to run with LMC_ADMIN=127.0.0.1:9180.
    """
    body = _body(prompt)
    found = _ask(url, "/v1/explain", "documents", body if server is None else _tokenized(server, body))
    if as_json:
        print_json(found)
        return
    out = console()
    names = "tokens", "engine_tokens", "exact_tokens", "reused_tokens", "repaired_tokens"
    whole, engine, exact, reused, again = (found[name] for name in names)
    found_there = f"{engine} in the engine's own cache, {exact} of the same beginning in lmc's store,"
    out.print(Text(f"{counted(whole, 'token')}: {found_there}"))
    out.print(Text(f"{reused} of documents reused, {again} of them computed again"))
    if found["why"]:
        out.print(Text(f"note: {found['why']}"))
    for number, one in enumerate(found["documents"], 1):
        size, places = one["stop"] - one["start"], ", ".join(sorted(set(one["places"])))
        held, chunks = len(one["places"]), one["chunks"]
        part = "" if held in (0, chunks) else f", {held} of {chunks} chunks"
        kept = f"stored ({places}{part}), not reused" if places else "not stored"
        what = f"reused from {places}{part}" if one["reused"] else kept
        out.print(Text(f"\ndocument {number}, {counted(size, 'token')} from {one['start']} on: {what}"))
        out.print(Text(f"  {one['text']!r}"))
        if one["why"]:
            out.print(Text(f"  why: {one['why']}"))
        if one["nearest"]:
            out.print(Text(f"  lmc documents show {one['nearest'][:DIGITS]} --url {url}"))


@documents.command(name="list")
def list_documents(
    limit: Annotated[int, typer.Option(min=1, help="how many; those that were used last come first")] = 100,
    url: Address = URL,
    as_json: AsJson = False,
) -> None:
    """List documents: tokens, where they are, how often they were used, and when last.

    Documents without a name are shown by their first words. Those with the same digits of the tenant are of one tenant.
    """
    found = _ask(url, f"/v1/documents?limit={limit}", "documents")
    if as_json:
        print_json(found)
        return
    heads = ["id", "name", "model", "tenant", "tokens", "places", "uses", "last used", "stays"]
    rows = [_row(one) for one in found["documents"]]
    if len({row[MODEL] for row in rows}) < 2:
        heads.pop(MODEL)
        for row in rows:
            row.pop(MODEL)
    if sys.stdout.isatty():
        table = Table(*heads)
        for column in table.columns[:2]:
            column.no_wrap, column.overflow = column is table.columns[0], "fold"
        for row in rows:
            table.add_row(*map(Text, row))
        console().print(table)
    else:  # A table of 10,000 rows takes seconds.
        for row in (heads, *rows):
            typer.echo("\t".join(row))
    console().print(Text(f"{len(rows)} of {counted(found['total'], 'document')}"))


@documents.command()
def show(name: Name, url: Address = URL, as_json: AsJson = False) -> None:
    """Show a document with its text, or all documents of a name."""
    found = _ask(url, _path(name), "documents")
    if as_json:
        print_json(found)
        return
    for one in found["documents"]:
        facts = counted(one["tokens"], "token"), _places(one), f"used {counted(one['uses'], 'time')}", _stays(one)
        console().print(Text(f"{one['id']} {one['name']}\n{', '.join(filter(None, facts))}\n\n{one['text']}\n"))


@documents.command()
def pin(
    names: Names,
    ttl: Annotated[str | None, typer.Option(help="remove them after this time, such as 12h or 7d")] = None,
    url: Address = URL,
) -> None:
    """Pin documents: they are not evicted, and are written again to a Redis that has dropped them.

    A time limit that they have stays, unless --ttl gives another one.
    """
    _change(url, names, {"pinned": True} | ({"ttl": seconds_of(ttl)} if ttl is not None else {}))


@documents.command()
def unpin(names: Names, url: Address = URL) -> None:
    """Undo a pin, and remove the time limit."""
    _change(url, names, {"pinned": False, "ttl": None})


@documents.command()
def remove(names: Names, url: Address = URL) -> None:
    """Remove documents from memory and all tiers. They are learned again when a prompt has them."""
    for name in names:
        for found in _ask(url, _path(name), "removed", method="DELETE")["removed"]:
            again = "It is learned again when a prompt has it, or by lmc learn --again"
            console().print(Text(f"{found} is removed. {again}"))


def _row(document: dict[str, Any]) -> list[str]:
    return [
        document["id"][:DIGITS],
        " ".join((document["name"] or document["begins"]).split()),
        document["model"],
        document["tenant"][:TENANT_DIGITS],
        str(document["tokens"]),
        _places(document),
        str(document["uses"]),
        time_text(document["used"]),
        _stays(document),
    ]


def _change(url: str, names: Sequence[str], wanted: dict[str, Any]) -> None:
    for path in [_path(name) for name in names]:
        _ask(url, path, "documents")  # Check all names first: a wrong name changes nothing.
    for name in names:
        for one in _ask(url, _path(name), "documents", wanted, "PATCH")["documents"]:
            said = _stays(one) or "may be evicted, and has no time limit"
            console().print(Text(f"{one['id'][:DIGITS]} {one['name'] or one['begins']}: {said} ({_places(one)})"))


def _places(document: dict[str, Any]) -> str:
    return ", ".join(document["places"]) or "evicted"


def _stays(document: dict[str, Any]) -> str:
    """Return the pin and the time limit of a document as text."""
    until = f"removed at {time_text(document['expires'])}" if document["expires"] else ""
    return ", ".join(filter(None, ("pinned" if document["pinned"] else "", until)))


def _ask(url: str, path: str, wanted: str, body: Any = None, method: str | None = None) -> Any:
    """Return the response of an administration endpoint. Raises `InputError` if it lacks the field `wanted`."""
    from lmc.http.client import admin_client

    return _with_field(wanted, url, admin_client(url).ask(path, body, method), "an administration endpoint of lmc")


def _with_field(wanted: str, url: str, answer: Any, who: str) -> Any:
    if not isinstance(answer, dict) or wanted not in answer:
        raise InputError(f"{url} does not answer like {who}: there is no {wanted!r} in its answer")
    return answer


def _path(name: str) -> str:
    if not name.strip():
        raise InputError("give a document's name, or a digit or more of its id; lmc documents list shows them")
    return f"/v1/documents/{quote(name, safe='')}"


def _tokenized(server: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request with the tokens that a server makes of its prompt."""
    from lmc.http.client import vllm_client

    client = vllm_client(server)
    model = body.get("model") or client.model()
    names = "messages", "prompt", "chat_template", "chat_template_kwargs", "tools"
    asked: dict[str, Any] = {name: body[name] for name in names if name in body}
    if "messages" in asked:
        asked["add_generation_prompt"] = True
    if "documents" in body:  # The tokenize request has no such field.
        asked["chat_template_kwargs"] = {**(asked.get("chat_template_kwargs") or {}), "documents": body["documents"]}
    done = _with_field("tokens", server, client.ask("/tokenize", {"model": model, **asked}), "a vLLM server")
    return body | {"prompt_token_ids": done["tokens"]}


def _body(source: str) -> dict[str, Any]:
    from lmc.documents.sources import STANDARD_INPUT, read_standard_input, read_text

    if source != STANDARD_INPUT and not os.path.exists(source):  # accepts a name of any length
        wanted = "give one with a request as JSON or a text, or - for standard input"
        raise InputError(f"there is no file {source}: {wanted}")
    text = read_standard_input() if source == STANDARD_INPUT else read_text(Path(source))
    if not text.strip():
        raise InputError(f"{source} is empty: it must hold a request as JSON, or the text of a prompt")
    try:
        body = json.loads(text)
    except ValueError as error:
        if text.lstrip()[0] in "{[":
            raise InputError(f"{source} is no JSON: {error}") from None
        return {"prompt": text}
    if isinstance(body, list):
        return {"messages": body} if body and isinstance(body[0], dict) else {"prompt_token_ids": body}
    if not isinstance(body, dict):
        raise InputError(f"{source} must hold a request with messages or a prompt, or a text")
    if not isinstance(body.get("kv_transfer_params") or {}, dict):
        raise InputError(f'{source}: kv_transfer_params must be an object, such as {{"lmc": {{…}}}}')
    return body
