"""`lmc explain` and `lmc documents`: ask the administration endpoint of an engine that is running."""

import json
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
DIGITS, TENANT_DIGITS = 12, 6  # of an id, and of the namespace of a model and a tenant, that are shown

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
    found = _ask(url, "/v1/explain", body if server is None else _tokenized(server, body))
    if as_json:
        print_json(found)
        return
    out = console()
    names = "tokens", "engine_tokens", "exact_tokens", "reused_tokens", "repaired_tokens"
    whole, engine, exact, reused, again = (found[name] for name in names)
    out.print(
        Text(f"{whole} tokens: {engine} in the engine's own cache, {exact} of the same beginning in lmc's store,")
    )
    out.print(Text(f"{reused} of documents reused, {again} of them computed again"))
    if found["why"]:
        out.print(Text(f"note: {found['why']}"))
    for number, one in enumerate(found["documents"], 1):
        size, places = one["stop"] - one["start"], ", ".join(sorted(set(one["places"])))
        held = f"stored ({places}), not reused" if places else "not stored"
        what = f"reused from {places}" if one["reused"] else held
        out.print(Text(f"\ndocument {number}, {size} tokens from {one['start']} on: {what}"))
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
    found = _ask(url, f"/v1/documents?limit={limit}")
    if as_json:
        print_json(found)
        return
    table = Table("id", "name", "tenant", "tokens", "places", "uses", "last used", "stays")
    for column in table.columns[:2]:
        column.no_wrap, column.overflow = column is table.columns[0], "fold"
    for one in found["documents"]:
        table.add_row(
            one["id"][:DIGITS],
            Text(one["name"] or one["begins"]),
            one["tenant"][:TENANT_DIGITS],
            str(one["tokens"]),
            _places(one),
            str(one["uses"]),
            time_text(one["used"]),
            _stays(one),
        )
    console().print(table, Text(f"{len(found['documents'])} of {counted(found['total'], 'document')}"))


@documents.command()
def show(name: Name, url: Address = URL, as_json: AsJson = False) -> None:
    """Show a document with its text, or all documents of a name."""
    found = _ask(url, _path(name))
    if as_json:
        print_json(found)
        return
    for one in found["documents"]:
        facts = f"{one['tokens']} tokens", _places(one), f"used {one['uses']} times", _stays(one)
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
        for found in _ask(url, _path(name), method="DELETE")["removed"]:
            again = "It is learned again when a prompt has it, or by lmc learn --again"
            console().print(Text(f"{found} is removed. {again}"))


def _change(url: str, names: Sequence[str], wanted: dict[str, Any]) -> None:
    for path in [_path(name) for name in names]:
        _ask(url, path)  # Nothing is changed if one of the names is wrong.
    for name in names:
        for one in _ask(url, _path(name), wanted, "PATCH")["documents"]:
            said = _stays(one) or "may be evicted, and has no time limit"
            console().print(Text(f"{one['id'][:DIGITS]} {one['name'] or one['begins']}: {said} ({_places(one)})"))


def _places(document: dict[str, Any]) -> str:
    return ", ".join(document["places"]) or "evicted"


def _stays(document: dict[str, Any]) -> str:
    """Return what people want for a document."""
    until = f"removed at {time_text(document['expires'])}" if document["expires"] else ""
    return ", ".join(filter(None, ("pinned" if document["pinned"] else "", until)))


def _ask(url: str, path: str, body: Any = None, method: str | None = None) -> Any:
    from lmc.http_client import admin_client

    return admin_client(url).ask(path, body, method)


def _path(name: str) -> str:
    if not name.strip():
        raise InputError("give a document's name, or a digit or more of its id; lmc documents list shows them")
    return f"/v1/documents/{quote(name, safe='')}"


def _tokenized(server: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request with its prompt as the tokens that a server makes of it."""
    from lmc.http_client import vllm_client

    client = vllm_client(server)
    model = body.get("model") or client.ask("/v1/models")["data"][0]["id"]
    names = "messages", "prompt", "chat_template", "chat_template_kwargs", "tools"
    asked: dict[str, Any] = {name: body[name] for name in names if name in body}
    if "messages" in asked:
        asked["add_generation_prompt"] = True
    if "documents" in body:  # which a request for tokens does not have of its own
        asked["chat_template_kwargs"] = {**asked.get("chat_template_kwargs", {}), "documents": body["documents"]}
    done = client.ask("/tokenize", {"model": model, **asked})
    return body | {"prompt_token_ids": done["tokens"]}


def _body(source: str) -> dict[str, Any]:
    from lmc.learn.sources import STANDARD_INPUT, read_text

    text = sys.stdin.read() if source == STANDARD_INPUT else read_text(Path(source))
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
    given = (body.get("kv_transfer_params") or {}).get("lmc")
    return body | ({"lmc": given} if given else {})
