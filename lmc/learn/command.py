"""The command line of `lmc learn`. What it needs is imported when it runs, so that `lmc --help` stays quick."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from lmc.errors import ConfigError, InputError
from lmc.terminal import AsJson, console, print_json

if TYPE_CHECKING:
    from lmc.config import Settings
    from lmc.learn.learners import Learner
    from lmc.learn.manifest import Manifest
    from lmc.learn.sources import Document

NOT_ALL = 1  # the exit code if a document was not learned
SHOWN = 10  # documents that failed, by name


@dataclass
class Learned:
    """What a run has done, in numbers of documents."""

    documents: int
    before: int = 0  # learned by an earlier run
    learned: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # why, by id
    dropped: float = 0.0  # chunks that the slowest tier has dropped meanwhile, for lack of room
    seconds: float = 0.0


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
    from lmc.config import Settings
    from lmc.learn.manifest import Manifest, manifest_path
    from lmc.learn.sources import read_documents

    if (url is None) == (model is None):
        raise InputError("say who computes the documents: --url of a vLLM server with lmc, or --model and --local-disk")
    documents = read_documents(source, id_field, text_field)
    own = {"local_disk": local_disk} if local_disk else {}
    settings = Settings.load({"enable_blending": True, **own})
    separator = settings.blend_special_str
    target = (url, salt, separator) if url else (str(model), str(settings.local_disk), salt, separator)
    if model and not (settings.local_disk or settings.remote_url):
        raise InputError("--model needs a place to learn into: --local-disk DIRECTORY, or local_disk of the settings")
    with ExitStack() as closing:
        kept = closing.enter_context(Manifest(manifest or manifest_path(*target), again=again and not dry_run))
        new = [document for document in documents if again or not kept.has(document)]
        result = Learned(len(documents), before=len(documents) - len(new))
        if result.before and not as_json:
            note = f"{result.before} of {len(documents)} documents were learned before, says {kept.path} (--again: all)"
            console().print(Text(note))
        if new and not dry_run:
            learner = _learner(url, model, settings, salt, closing)
            _learn_all(new, learner, kept, result, jobs if url else 1, again)
            result.dropped = learner.dropped()
    _report(result, new if dry_run else None, as_json)
    if result.failed:
        raise typer.Exit(NOT_ALL)


def _learner(url: str | None, model: str | None, settings: "Settings", salt: str, closing: ExitStack) -> "Learner":
    """Return who computes; a model is closed at the end."""
    if url:
        from lmc.learn.learners import ServerLearner

        return ServerLearner(url, settings.blend_special_str, salt)
    try:
        import lmc.connectors.transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--model needs {error.name}: pip install 'lmc[transformers]'") from error
    from lmc.learn.learners import ModelLearner

    own = ModelLearner(str(model), settings, salt)
    closing.callback(own.close)
    return own


def _learn_all(
    documents: "Sequence[Document]", learner: "Learner", kept: "Manifest", result: Learned, jobs: int, again: bool
) -> None:
    """Learn documents, and note each one that is stored."""
    started = time.monotonic()
    columns = TextColumn("learning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    screen = Console(stderr=True)
    bar = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    with ThreadPoolExecutor(jobs) as pool, bar:
        task = bar.add_task("learning", total=len(documents))
        asked: dict[Future[str], Document] = {pool.submit(learner.learn, one.text): one for one in documents}
        try:
            for future in as_completed(asked):
                document, failed = asked[future], future.result()
                if failed:
                    result.failed[document.id] = failed
                else:
                    result.learned += 1
                    kept.add(document)
                bar.advance(task)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            how = "again, without --again," if again else "again"
            done = f"{result.learned} of {len(documents)} documents were learned; run the same command {how} to go on"
            screen.print(Text(done))
            raise
    result.seconds = time.monotonic() - started


def _report(result: Learned, would: "Sequence[Document] | None", as_json: bool) -> None:
    if as_json:
        print_json(asdict(result) | ({"would_learn": len(would)} if would is not None else {}))
        return
    if would is not None:
        letters = sum(len(document.text) for document in would)
        console().print(Text(f"{len(would)} documents with {letters} letters would be learned"))
        return
    per_second = f" ({result.learned / result.seconds:.1f} a second)" if result.seconds else ""
    console().print(Text(f"{result.learned} documents learned in {result.seconds:.1f} s{per_second}"))
    for name in list(result.failed)[:SHOWN]:
        console().print(Text(f"{name} was not learned: {result.failed[name]}"))
    if len(result.failed) > SHOWN:
        console().print(Text(f"and {len(result.failed) - SHOWN} more (--json has all)"))
    if result.dropped:
        more = "raise max_local_disk_size or max_local_cpu_size, or learn fewer documents"
        console().print(Text(f"{result.dropped:.0f} chunks were dropped meanwhile, because the tiers are full: {more}"))
