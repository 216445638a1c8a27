"""The command line of `lmc learn`. It imports its modules when it runs, so that `lmc --help` stays fast."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lmc.commands.administration import ADMIN_URL
from lmc.errors import InputError, needs_transformers
from lmc.storage.places import place_of
from lmc.terminal import AsJson, all_of, console, counted, print_json, printable, seconds_of

if TYPE_CHECKING:
    from lmc.commands.learn.learners import ModelLearner
    from lmc.commands.learn.run import Learned
    from lmc.config.settings import Settings
    from lmc.documents.sources import Document

NOT_ALL = 1  # exit code if a document was not learned
MAX_SHOWN_FAILURES = 10  # maximum number of failed documents that are named
SOURCE_HELP = "directory of text files, a text file, a JSON or JSONL file, or - for JSONL"
Patterns = Annotated[
    list[str] | None,
    typer.Option("--glob", help="read the files of the directory that match, such as '*.jsonl' or 'notes/*'"),
]
IdField = Annotated[
    str, typer.Option("--id", help="field of a JSON object with the document's id, such as metadata.source")
]
TextField = Annotated[str, typer.Option("--text", help="field of a JSON object with the text")]
Crlf = Annotated[
    bool,
    typer.Option(
        "--crlf",
        help="keep line ends of text files that are \\r\\n, for applications that send them so; by default they become "
        "\\n, as in programs in Python",
    ),
]
Split = Annotated[bool, typer.Option("--split", help="cut texts that are too long for the model into parts")]


def learn(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    url: Annotated[
        str | None, typer.Option(help="URL of a vLLM server with lmc, such as http://localhost:8000")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="directory or hub id of a model to run here, without a server; the settings define the tiers"
        ),
    ] = None,
    local_disk: Annotated[
        Path | None, typer.Option(help="directory of the disk tier to store into, with --model")
    ] = None,
    patterns: Patterns = None,
    id_field: IdField = "id",
    text_field: TextField = "text",
    crlf: Crlf = False,
    split: Split = False,
    escaped: Annotated[
        bool | None,
        typer.Option(
            "--escaped/--no-escaped",
            help="also learn each text as it is in a JSON string, such as a tool's result; doubles what is stored; "
            "default: if the chat template writes the results of tools so",
        ),
    ] = None,
    salt: Annotated[
        str,
        typer.Option(help="cache_salt of the tenant that may use the documents; default: requests without cache_salt"),
    ] = "",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="send documents as messages, for a server whose chat template changes texts; with --url"
        ),
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="protect the documents from eviction")] = False,
    ttl: Annotated[str | None, typer.Option(help="remove the documents after this time, such as 12h or 7d")] = None,
    admin: Annotated[
        str,
        typer.Option(
            envvar="LMC_ADMIN",
            help="LMC_ADMIN address of the server's engine, for --pin and --ttl; 0.0.0.0 stands for the host in --url",
        ),
    ] = ADMIN_URL,
    jobs: Annotated[int, typer.Option(min=1, help="number of documents that the server learns in parallel")] = 8,
    manifest: Annotated[
        Path | None,
        typer.Option(help="file that records the learned documents; default: in the user's cache directory"),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="also learn documents that the manifest records as learned")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only report what would be learned")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute documents ahead, so that the first prompt with them is fast. Exit code 1: not all could be learned.

    Learn the texts that your retriever returns, because they are found in prompts token by token. Files are read as
    they are (.txt .md .markdown .rst .html .csv, UTF-8), except for line ends: the tags of HTML are part of the text. A
    file or a line that cannot be read is named and skipped. Hidden files and folders, node_modules and linked folders
    are not read.

    An interrupted run continues where it stopped. A server must use the same separator between documents
    (blend_special_str of the settings).
    """
    from lmc.commands.learn.learners import Learner, Retention, ServerLearner
    from lmc.commands.learn.manifest import Manifest
    from lmc.commands.learn.run import LearnRun, cut
    from lmc.documents.escaped import escapes_tool_results, with_escaped
    from lmc.documents.sources import read_documents
    from lmc.http.client import Unreachable

    corpus = read_documents(source, id_field, text_field, patterns or (), keeps_crlf=crlf)
    retention = Retention(pinned=pin, ttl=seconds_of(ttl) if ttl is not None else None)
    settings = _settings(local_disk)
    _check_target(url, model, settings, chat)
    with ExitStack() as opened:
        notes = [*corpus.notes]
        learner: Learner | None = None  # A dry run loads no model.
        served = ""
        try:
            if url:
                learner = ServerLearner(
                    url, settings.blend_special_str, salt, admin, chat=chat, retains=bool(retention)
                )
                served = learner.served
            elif not dry_run:
                learner = opened.enter_context(closing(_model_learner(str(model), settings, salt)))
            if escaped is None and learner is not None and escapes_tool_results(learner.prompt_of):
                escaped, note = True, "the chat template writes the results of tools as JSON strings: each text is also"
                notes.append(f"{note} learned so; --no-escaped leaves that out")
            if escaped:
                corpus.documents = list(with_escaped(corpus.documents))
            if split and learner is not None:
                corpus.documents = cut(corpus.documents, learner)
        except Unreachable as error:
            if not dry_run:
                raise
            notes.append(f"could not check whether the documents fit: {error}")
        path = manifest or _manifest_path(url, model, served, settings, salt)
        run = LearnRun(corpus, opened.enter_context(Manifest(path)), retention, again)
        special, share = settings.blend_special_str, settings.document_share
        notes += run.notes(learner, special, share, settings.chunk_size, dry_run)
        for note in notes:
            console(error=as_json).print(Text(note))
        result = run.result if dry_run or learner is None else run.learn(learner, jobs if url else 1)
    _report(result, notes, run.new if dry_run else None, as_json, pin, ttl)
    if result.failed:
        raise typer.Exit(NOT_ALL)


def _settings(local_disk: Path | None) -> "Settings":
    from lmc.config.settings import Settings

    # The option replaces the tiers of the settings.
    overrides = {"local_disk": local_disk, "server": None} if local_disk else {}
    return Settings.load({"enable_blending": True, **overrides})


def _manifest_path(url: str | None, model: str | None, served: str, settings: "Settings", salt: str) -> Path:
    from lmc.commands.learn.manifest import manifest_path
    from lmc.http.client import vllm_client

    target = (vllm_client(url).url, served) if url else (str(model), str(settings.server or settings.local_disk))
    return manifest_path(*target, salt, settings.blend_special_str)


def _check_target(url: str | None, model: str | None, settings: "Settings", chat: bool) -> None:
    if bool(url) == bool(model):
        raise InputError("set either --url of a vLLM server with lmc, or --model and --local-disk, and not both")
    if model and not (settings.server or settings.local_disk or settings.remote_url):
        places = "--local-disk DIRECTORY, local_disk of the settings, or a cache server (LMC_SERVER)"
        raise InputError(f"--model needs a tier to store into: set {places}")
    if model and chat:
        raise InputError("--chat needs a server, which applies its chat template: set --url")


def _model_learner(model: str, settings: "Settings", salt: str) -> "ModelLearner":
    try:
        import lmc.connectors.transformers  # noqa: F401
    except ImportError as error:
        raise needs_transformers("--model", error) from error
    from lmc.commands.learn.learners import ModelLearner

    return ModelLearner(model, settings, salt)


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
        characters = sum(len(document.text) for document in would)
        console().print(
            Text(f"{counted(len(would), 'document')} with {counted(characters, 'character')} would be learned")
        )
    else:
        per_second = f" ({result.learned / result.seconds:.1f} a second)" if result.seconds else ""
        found = f"; {all_of(result.found, 'document')} already stored" if result.found else ""
        learned = f"{counted(result.learned, 'document')} learned in {result.seconds:.1f} s{per_second}{found}"
        console().print(Text(learned))
    after = f"{ttl} s" if ttl and ttl[-1].isdigit() else ttl
    retention = " and ".join(filter(None, ("pinned" if pin else "", f"set to expire after {after}" if ttl else "")))
    if retention and would is None:
        retained = result.documents - len(result.failed)
        console().print(Text(f"{all_of(retained, 'document')} {retention}"))
    for name in list(result.failed)[:MAX_SHOWN_FAILURES]:
        console().print(Text(printable(f"{name} was not learned: {result.failed[name]}")))
    if len(result.failed) > MAX_SHOWN_FAILURES:
        console().print(Text(f"and {len(result.failed) - MAX_SHOWN_FAILURES} more (--json has all)"))
    if result.held:
        by_place = ", ".join(f"{place_of(name).title} {tokens:.0f}" for name, tokens in result.held.items())
        console().print(Text(f"tokens stored now: {by_place}"))
    if result.dropped:
        hint = "raise max_local_disk_size or max_local_cpu_size, or learn fewer documents"
        console().print(
            Text(f"{result.dropped:.0f} chunks were evicted during the run, because the tiers are full: {hint}")
        )
