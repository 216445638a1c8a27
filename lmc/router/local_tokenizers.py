"""Tokenizers of the router's own: prompts are cut into tokens as engines do it, by processes beside the router.

Each process has the tokenizers of all models, and one prompt at a time. What they cannot do as an engine does it, an
engine is asked for.
"""

import asyncio
import logging
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from lmc.blend.markers import Markers
from lmc.errors import InputError

T = TypeVar("T")

WAITING = 16  # prompts for each process; engines are asked for others
SECONDS = 5.0  # for one prompt
AGAIN_SECONDS = 1.0  # before processes are started after one has ended
STARTED = 120.0  # seconds within which the processes have read their tokenizers
# What may be asked here for a conversation. A client must not give anything else to a template or a tokenizer.
OF_A_CHAT = {"model", "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
OF_A_TEMPLATE = {"documents", "enable_thinking"}
ON_A_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # Any other path is one of a directory.

log = logging.getLogger(__name__)


class LocalTokenizers:
    """Tokenizers of models. Used in one thread, that of the event loop."""

    def __init__(self, paths: Mapping[str, str], processes: int) -> None:
        """`paths` are directories, or names of a hub, by model."""
        self._paths, self._processes = dict(paths), processes
        self._waiting, self._pool = 0, self._started()
        self._turns = asyncio.Semaphore(processes)
        self._ready: set[str] = set()  # models whose tokenizers have been read
        self._broken = asyncio.Event()

    async def run(self, special_string_of: Callable[[str], str], found: Callable[[str, Markers], None]) -> None:
        """Have tokenizers read until cancelled, and tell the markers of their models.

        A model whose tokenizer cannot be read is left out, with a warning: its engines are asked.
        """
        while True:
            for model, path in self._paths.items():
                try:
                    found(model, await self._do(STARTED, _markers, model, special_string_of(model)))
                    self._ready.add(model)
                except InputError as error:
                    why = f"{model}={path} of --tokenizers cannot be read: {error}"
                    log.warning("lmc router: engines are asked for the tokens of prompts, because %s", why)
            await self._broken.wait()
            self._broken.clear()
            await asyncio.sleep(AGAIN_SECONDS)

    def __contains__(self, model: str) -> bool:
        return model in self._ready

    async def tokens(self, model: str, asked: Mapping[str, Any]) -> list[int]:
        """Return the tokens of what is asked under /tokenize; raise `InputError` if only an engine can say them."""
        if self._waiting >= WAITING * self._processes:
            raise InputError("the tokenizers of the router have too much to do")
        return await self._do(SECONDS, _tokens, model, asked)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in list((self._pool._processes or {}).values()):  # Python 3.14 has a method for this.
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _do(self, seconds: float, work: Callable[..., T], *arguments: object) -> T:
        """Have a process do some work within so many seconds, after no more of them in which others come first."""
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await self._turns.acquire()
            return await self._result(seconds, work, *arguments)
        except TimeoutError:
            raise InputError("the tokenizers of the router have too much to do") from None
        finally:
            self._waiting -= 1

    def _begun(self, work: Callable[..., T], *arguments: object) -> "Future[T]":
        """Begin some work, whose turn ends with it: a process goes on with what nobody waits for any more."""
        loop = asyncio.get_running_loop()

        def end_turn(_: "Future[T]") -> None:
            with suppress(RuntimeError):  # The router ends.
                loop.call_soon_threadsafe(self._turns.release)

        try:
            doing = self._pool.submit(work, *arguments)
        except BaseException:
            self._turns.release()
            raise
        doing.add_done_callback(end_turn)
        return doing

    async def _result(self, seconds: float, work: Callable[..., T], *arguments: object) -> T:
        """Wait for some work. If it does not end in time, or a process ends, all processes are started anew."""
        pool = self._pool
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(self._begun(work, *arguments))
        except (TimeoutError, BrokenProcessPool) as error:
            if pool is self._pool:  # The first one to see it
                why = "does not answer" if isinstance(error, TimeoutError) else "has ended"
                log.warning("lmc router: a process of --tokenizers %s; others are started", why)
                self.close()
                self._ready, self._pool = set(), self._started()
                self._broken.set()
            raise InputError("the process has ended, or does not answer") from None
        except asyncio.CancelledError:  # `close` cancels what waits in the pool, and no request has to end with that.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise InputError("the process has ended") from None

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._processes, context, initializer=_begin, initargs=(self._paths,))


_tokenizers: dict[str, Any] = {}  # of this process, by model; or why one cannot be read


def _begin(paths: Mapping[str, str]) -> None:
    """Prepare a process, which ends with the router. It takes prompts when it has read its tokenizers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router.
    threading.Thread(target=_end_with_the_router, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    for model, path in paths.items():
        try:
            _tokenizers[model] = AutoTokenizer.from_pretrained(_found(path))
        except Exception as error:  # noqa: BLE001 - files of others can be wrong in many ways
            _tokenizers[model] = InputError(_why(path, error))


def _found(path: str) -> str:
    """Return a directory that is there, or the name of a model on a hub; raise `InputError` for another path."""
    folder = _folder(path)
    if folder is None and not ON_A_HUB.fullmatch(path):
        raise InputError("there is no such directory")
    return path if folder is None else str(folder)


def _folder(path: str) -> Path | None:
    """Return the directory of a path; None if there is none, or if this process may not look."""
    try:
        folder = Path(path).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError):  # no such user, a name that is too long, no permission
        return None


def _why(path: str, error: Exception) -> str:
    """Return why nothing could be read. What transformers says of a directory without files helps nobody."""
    folder, said = _folder(path), next(iter(str(error).splitlines()), type(error).__name__)[:200]
    if isinstance(error, InputError):
        return said
    if folder is None:
        return f"there is no such directory, and as the name of a model on a hub: {said}"
    try:
        has_files = any(folder.glob("tokenizer*"))
    except OSError as refused:
        return f"the directory cannot be read: {refused.strerror}"
    return said if has_files else "the directory has no files of a tokenizer, such as tokenizer.json"


def _end_with_the_router() -> None:
    router = multiprocessing.parent_process()
    assert router is not None
    router.join()
    os._exit(0)


def _tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a model; raise `InputError` if it cannot be read."""
    found = _tokenizers[model]
    if isinstance(found, InputError):
        raise found
    return found


def _markers(model: str, special_string: str) -> Markers:
    return Markers.of(_tokenizer_of(model), special_string)


def _tokens(model: str, asked: Mapping[str, Any]) -> list[int]:
    """Return tokens as an engine's /tokenize does; raise `InputError` where it may do something else."""
    tokenizer = _tokenizer_of(model)
    try:
        if "messages" not in asked:
            found = tokenizer.encode(asked["prompt"], add_special_tokens=asked.get("add_special_tokens", True) is True)
        else:
            plain = all(isinstance(one["content"], str) and "tool_calls" not in one for one in asked["messages"])
            given = asked.get("chat_template_kwargs") or {}
            if not plain or asked.keys() - OF_A_CHAT or given.keys() - OF_A_TEMPLATE:
                raise InputError("an engine knows better how this conversation is written")
            found = tokenizer.apply_chat_template(
                asked["messages"],
                tokenize=True,
                return_dict=False,
                add_generation_prompt=asked.get("add_generation_prompt", True) is True,
                continue_final_message=asked.get("continue_final_message", False) is True,
                **given,
            )
        return [int(token) for token in found]
    except InputError:
        raise
    except Exception as error:  # templates raise whatever they like, and clients ask what they like
        raise InputError(f"the tokenizer does not take this prompt ({type(error).__name__})") from error
