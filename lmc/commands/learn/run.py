"""A run of `lmc learn`: learns documents in parallel, and records each stored document."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from lmc.blend.segments import bare_and_apart
from lmc.commands.learn.learners import Learner, Retention, Stored
from lmc.commands.learn.manifest import Manifest
from lmc.documents.sources import Corpus, Document
from lmc.errors import InputError
from lmc.http.client import Refused, Unreachable
from lmc.terminal import all_of, console, counted

INTERRUPTED = 130  # exit code of a command that Ctrl-C has ended
SAMPLED_DOCUMENTS = 16  # approximate number of documents whose tokens are counted before the run
PROBED_DOCUMENTS = 3  # documents of earlier runs that are sent again to see whether the server still has them
SILENT_SECONDS = 5.0  # If no document is learned for this time, `lmc learn` checks whether the server listens.
GONE = 2  # exit code if the server shuts down


@dataclass
class Learned:
    """The result of a run. Counts are numbers of documents unless stated otherwise."""

    documents: int
    before: int = 0  # learned by an earlier run
    learned: int = 0
    found: int = 0  # learned without computing, because they were stored, for example by another host in a shared tier
    failed: dict[str, str] = field(default_factory=dict)  # id -> reason
    dropped: float = 0.0  # chunks that the slowest tier evicted during the run, for lack of room
    held: dict[str, float] = field(default_factory=dict)  # tokens in each tier after the run
    seconds: float = 0.0


@dataclass
class LearnRun:
    """The documents of one command, and the manifest that records them."""

    corpus: Corpus
    manifest: Manifest
    retention: Retention
    again: bool = False

    def __post_init__(self) -> None:
        self.documents = self.corpus.documents
        if self.again:
            self.manifest.forget(self.documents)
        learned = [self.manifest.has(document) for document in self.documents]
        self.new = [document for document, is_learned in zip(self.documents, learned, strict=True) if not is_learned]
        self._old = [document for document, is_learned in zip(self.documents, learned, strict=True) if is_learned]

    @property
    def result(self) -> Learned:
        """The result before anything is learned."""
        failed, documents = dict(self.corpus.skipped), len(self.documents)
        return Learned(documents + len(failed), before=documents - len(self.new), failed=failed)

    @property
    def note(self) -> str:
        """The note about documents that were learned before; empty if there are none."""
        before = self.result.before
        of = all_of(len(self.documents), "document")
        text = f"{before} of {of} learned before, according to {self.manifest.path}"
        return f"{text}; use --again to learn all" if before else ""

    def notes(self, learner: Learner | None, special: str, share: float, chunk_size: int, dry_run: bool) -> list[str]:
        """Return the notes to print before the run. Unless `dry_run`, also checks documents of earlier runs."""
        notes, new = list[str](), len(self.new)
        if learner is not None and not dry_run:
            unknown = self.check_old(learner)
            lost = len(self.new) - new
            again = f"learning {counted(lost, 'document')} again that the server no longer has" if lost else ""
            notes = [self.note, again, unknown]
        notes.append(_with_separators(self.documents, special))
        if learner is not None:
            notes.append(self.too_many(learner, share, chunk_size))
        return list(filter(None, notes))

    def check_old(self, learner: Learner) -> str:
        """Apply `retention` to documents that were learned before, and queue missing documents to be learned again.

        Returns a note if the server cannot report which documents are missing, otherwise an empty string.
        """
        stored: set[str] | None = None
        unknown = ""
        try:
            stored = learner.stored() if self._old else set()
        except Unreachable:
            unknown = "LMC_ADMIN does not respond (--admin)"
        except Refused as error:
            unknown = f"LMC_ADMIN answered: {error}"
        if stored is None and self._is_lost(learner):
            stored = set()
        for document in self._old:
            ids = self.manifest.ids(document)
            if stored is not None and not (ids and stored.issuperset(ids)):
                self.new.append(document)
            elif self.retention:
                learner.retain(document, ids, self.retention)
        return f"could not check whether the server still has them all, because {unknown}" if stored is None else ""

    def _is_lost(self, learner: Learner) -> bool:
        """Return whether a server without administration has probably lost the documents of earlier runs.

        It may have restarted without a disk. Some documents are sent again, which takes a moment if it has them.
        """
        if (held_tokens := learner.held()) and not any(held_tokens.values()):
            return True  # Or it reports 0 until its first request.
        every = -(-len(self._old) // PROBED_DOCUMENTS)
        return any(learner.learn(document).computed for document in self._old[::every])

    def too_many(self, learner: Learner, share: float, chunk_size: int) -> str:
        """Return a warning if the new documents will not all fit, otherwise an empty string.

        The number of tokens is estimated from a sample. Pinned documents may take at most a `share` of the capacity.
        """
        capacity, part = learner.capacity(), share if self.retention.pinned else 1.0
        room = max(capacity.values(), default=0.0) * part
        sample = self.new[:: max(1, len(self.new) // SAMPLED_DOCUMENTS)]
        if not room or not sample:
            return ""
        with suppress(InputError):  # The server may not count tokens.
            mean = sum(learner.tokens(document.text) for document in sample) / sum(
                len(document.text) for document in sample
            )
            tokens = mean * sum(len(document.text) for document in self.new)
            if "disk" not in capacity:  # In memory, a document takes whole chunks.
                tokens = max(tokens, float(len(self.new) * chunk_size))
            if tokens > room:
                amount = f"these documents have about {tokens:.0f} tokens, and at most {room:.0f}"
                limit = "may be pinned" if self.retention.pinned else "fit: the first will be evicted"
                return f"{amount} {limit}. Raise max_local_disk_size, or learn fewer (lmc size)"
        return ""

    def learn(self, learner: Learner, jobs: int) -> Learned:
        """Learn the new documents, `jobs` at a time."""
        result, started = self.result, time.monotonic()
        columns = TextColumn("learning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        screen = console(error=True)
        bar = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
        with ThreadPoolExecutor(jobs) as pool, bar:
            task = bar.add_task("learning", total=len(self.new))
            futures: dict[Future[Stored], Document] = {
                pool.submit(learner.learn, document): document for document in self.new
            }
            try:
                for future in _completed(futures, learner):
                    self._note(learner, futures[future], future.result(), result)
                    bar.advance(task)
            except BaseException as error:
                repeat = "again, without --again," if self.again else "again"
                wrong = isinstance(error, InputError) and not isinstance(error, Unreachable)
                hint = "" if wrong else f"; run the same command {repeat} to continue"
                under_way = sum(future.running() for future in futures)
                waits = f"; waiting for {counted(under_way, 'document')} in flight, until Ctrl-C" if under_way else ""
                so_far = f"{result.learned} of {all_of(len(self.new), 'document')} learned{hint}"
                if isinstance(error, _ServerStopped):
                    screen.print(Text(f"{so_far}\nlmc: {error}"))
                    os._exit(GONE)  # The server may wait for our connections, and would wait for ten minutes.
                screen.print(Text(f"{so_far}{waits}"))
                try:
                    pool.shutdown(cancel_futures=True)  # This waits for documents in flight.
                except KeyboardInterrupt:
                    os._exit(INTERRUPTED)  # An ordinary exit would wait for the threads.
                raise
        result.seconds, result.dropped, result.held = time.monotonic() - started, learner.dropped(), learner.held()
        return result

    def _note(self, learner: Learner, document: Document, stored: Stored, result: Learned) -> None:
        if stored.failed:
            result.failed[document.id] = stored.failed + _too_long(learner, document.text)
            return
        result.learned += 1
        result.found += not stored.computed
        self.manifest.add(document, stored.ids)
        if self.retention:
            learner.retain(document, stored.ids, self.retention)


class _ServerStopped(Unreachable):
    """The server shuts down, and responds to no request."""


def _completed(futures: Iterable[Future[Stored]], learner: Learner) -> Iterator[Future[Stored]]:
    """Yield futures as they complete. Raises `_ServerStopped` if the server accepts no connections meanwhile."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, SILENT_SECONDS, FIRST_COMPLETED)
        if not done and learner.has_stopped():
            raise _ServerStopped("the server is shutting down, and answers no more")
        yield from done


def _too_long(learner: Learner, text: str) -> str:
    """Return a hint if a text that was not learned is too long for the model, otherwise an empty string."""
    with suppress(InputError):  # The server may not count tokens.
        longest = learner.longest()
        if longest and len(text.encode()) > longest and (tokens := learner.tokens(text)) > longest:
            return f"; it has {tokens} tokens, and --split cuts it into parts of at most {longest}"
    return ""


def cut(documents: Sequence[Document], learner: Learner) -> list[Document]:
    """Return documents with those that are too long for the model cut into parts. Raises `InputError`."""
    longest, parts = learner.longest(), list[Document]()
    for document in documents:
        texts = parts_of(document.text, longest, learner.tokens) if longest else [document.text]
        cut_texts = [document.changed(part, f", part {number}") for number, part in enumerate(texts, 1)]
        parts += cut_texts if len(texts) > 1 else [document]
    return parts


def parts_of(text: str, longest: int, tokens: Callable[[str], int]) -> list[str]:
    """Return a text in parts of at most `longest` tokens, cut between paragraphs, lines or words where possible."""
    if len(text.encode()) <= longest or len(text) < 2 or tokens(text) <= longest:  # A token has at least one byte.
        return [text]
    quarter, middle = len(text) // 4, len(text) // 2
    for end in ("\n\n", "\n", " "):
        places = [at for at in (text.rfind(end, quarter, middle), text.find(end, middle, -quarter)) if at > 0]
        if places:
            middle = min(places, key=lambda at: abs(at - len(text) // 2))
            break
    halves = (half for half in (text[:middle].strip(), text[middle:].strip()) if half)
    return [part for half in halves for part in parts_of(half, longest, tokens)]


def _with_separators(documents: Sequence[Document], special: str) -> str:
    """Return the note about documents that contain the separator; empty if there are none."""
    bare, apart = bare_and_apart(special)
    found = [document.id for document in documents if bare in document.text]
    if not found:
        return ""
    return (
        f"{counted(len(found), 'document')} with the separator {bare!r}, such as {found[0]}: it is learned as "
        f"{apart!r}, and the text around it is not found where a prompt has it unchanged; set LMC_BLEND_SPECIAL_STR, "
        "here and for the engine, to a text that no document has"
    )
