"""The command line of `lmc learn`. It imports its modules when it runs, so that `lmc --help` stays fast."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lmc.commands.administration import URL
from lmc.errors import InputError, needs_transformers
from lmc.storage.places import place_of
from lmc.terminal import AsJson, console, counted, print_json, seconds_of

if TYPE_CHECKING:
    from lmc.commands.learn.learners import Learner
    from lmc.commands.learn.run import Learned
    from lmc.config.settings import Settings
    from lmc.documents.sources import Document

NOT_ALL = 1  # exit code if a document was not learned
SHOWN = 10  # maximum number of failed documents that are named


def learn(
    source: Annotated[str, typer.Argument(help="directory of .txt and .md files, a JSONL file, or - for JSONL")],
    url: Annotated[str | None, typer.Option(help="a vLLM server with lmc, as http://localhost:8000")] = None,
    model: Annotated[
        str | None, typer.Option(help="without a server: directory or hub id; the settings name the tiers")
    ] = None,
    local_disk: Annotated[Path | None, typer.Option(help="with --model: the directory to learn into")] = None,
    id_field: Annotated[str, typer.Option("--id", help="field of a JSONL line that names the document")] = "id",
    text_field: Annotated[str, typer.Option("--text", help="field of a JSONL line with the text")] = "text",
    salt: Annotated[
        str, typer.Option(help="the tenant (cache_salt) who may use the documents; default: all without")
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="with --url: as messages, if the server's chat template changes texts")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="do not let the documents be evicted")] = False,
    ttl: Annotated[str | None, typer.Option(help="remove the documents after this time, such as 12h or 7d")] = None,
    admin: Annotated[
        str, typer.Option(envvar="LMC_ADMIN", help="the engine's LMC_ADMIN, for --pin and --ttl with a server")
    ] = URL,
    jobs: Annotated[int, typer.Option(min=1, help="documents that a server is asked for at once")] = 8,
    manifest: Annotated[
        Path | None, typer.Option(help="file of what was learned; default: in the user's cache")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="also what the manifest says was learned before")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be learned")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute documents ahead, so that the first prompt with them is quick. Exit code 1: not all could be learned.

    A run that was interrupted goes on where it ended. A server must use the same special string between documents
    (blend_special_str of the settings).
    """
    from lmc.commands.learn.learners import Retention
    from lmc.commands.learn.manifest import Manifest
    from lmc.commands.learn.run import LearnRun
    from lmc.documents.sources import read_documents
    from lmc.http.client import Unreachable

    documents = read_documents(source, id_field, text_field)
    retention = Retention(pinned=pin, ttl=seconds_of(ttl) if ttl is not None else None)
    settings = _settings(local_disk)
    _check_target(url, model, settings, chat)
    with ExitStack() as closing:
        path = manifest or _manifest_path(url, model, settings, salt)
        kept = closing.enter_context(Manifest(path, again=again and not dry_run))
        run = LearnRun(documents, kept, retention, again)
        try:
            given = url, model, settings, salt, admin, chat, bool(retention), closing
            learner = _learner(*given) if url or not dry_run else None  # A dry run loads no model.
            notes = run.notes(learner, settings.document_share, settings.chunk_size, dry_run)
        except Unreachable as error:
            if not dry_run:
                raise
            notes = [f"whether the documents fit was not checked: {error}"]
        for note in notes:
            console(error=as_json).print(Text(note))
        result = run.result if dry_run or learner is None else run.learn(learner, jobs if url else 1)
    _report(result, notes, run.new if dry_run else None, as_json, pin, ttl)
    if result.failed:
        raise typer.Exit(NOT_ALL)


def _settings(local_disk: Path | None) -> "Settings":
    from lmc.config.settings import Settings

    own = {"local_disk": local_disk, "server": None} if local_disk else {}  # The option replaces the settings' tiers.
    return Settings.load({"enable_blending": True, **own})


def _manifest_path(url: str | None, model: str | None, settings: "Settings", salt: str) -> Path:
    from lmc.commands.learn.manifest import manifest_path
    from lmc.http.client import vllm_client

    target = (vllm_client(url).url,) if url else (str(model), str(settings.server or settings.local_disk))
    return manifest_path(*target, salt, settings.blend_special_str)


def _check_target(url: str | None, model: str | None, settings: "Settings", chat: bool) -> None:
    if bool(url) == bool(model):
        who = "either --url of a vLLM server with lmc, or --model and --local-disk, and not both"
        raise InputError(f"say who computes the documents: {who}")
    if model and not (settings.server or settings.local_disk or settings.remote_url):
        places = "--local-disk DIRECTORY, local_disk of the settings, or a cache server (LMC_SERVER)"
        raise InputError(f"--model needs a place to learn into: {places}")
    if model and chat:
        raise InputError("--chat is for a server, which applies its chat template: give --url")


def _learner(
    url: str | None,
    model: str | None,
    settings: "Settings",
    salt: str,
    admin: str,
    chat: bool,
    retains: bool,
    closing: ExitStack,
) -> "Learner":
    """Return the learner. `closing` closes a model at the end."""
    if url:
        from lmc.commands.learn.learners import ServerLearner

        return ServerLearner(url, settings.blend_special_str, salt, admin, chat=chat, retains=retains)
    try:
        import lmc.connectors.transformers  # noqa: F401
    except ImportError as error:
        raise needs_transformers("--model", error) from error
    from lmc.commands.learn.learners import ModelLearner

    own = ModelLearner(str(model), settings, salt)
    closing.callback(own.close)
    return own


def _report(
    result: "Learned",
    notes: Sequence[str],
    would: "Sequence[Document] | None",
    as_json: bool,
    pin: bool,
    ttl: str | None,
) -> None:
    if as_json:
        print_json(asdict(result) | {"notes": notes} | ({"would_learn": len(would)} if would is not None else {}))
        return
    if would is not None:
        letters = sum(len(document.text) for document in would)
        console().print(Text(f"{counted(len(would), 'document')} with {counted(letters, 'letter')} would be learned"))
        return
    per_second = f" ({result.learned / result.seconds:.1f} a second)" if result.seconds else ""
    console().print(Text(f"{counted(result.learned, 'document')} learned in {result.seconds:.1f} s{per_second}"))
    if how := " and ".join(filter(None, ("pinned" if pin else "", f"removed after {ttl}" if ttl else ""))):
        kept = result.documents - len(result.failed)
        console().print(Text(f"{counted(kept, 'document')} {'is' if kept == 1 else 'are'} {how}"))
    for name in list(result.failed)[:SHOWN]:
        console().print(Text(f"{name} was not learned: {result.failed[name]}"))
    if len(result.failed) > SHOWN:
        console().print(Text(f"and {len(result.failed) - SHOWN} more (--json has all)"))
    if result.held:
        held = ", ".join(f"{place_of(name).title} {tokens:.0f}" for name, tokens in result.held.items())
        console().print(Text(f"tokens stored there now: {held}"))
    if result.dropped:
        more = "raise max_local_disk_size or max_local_cpu_size, or learn fewer documents"
        console().print(Text(f"{result.dropped:.0f} chunks were dropped meanwhile, because the tiers are full: {more}"))
