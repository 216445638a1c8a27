"""Tokenizes prompts as engines do, in processes of the router.

Each process has the tokenizers of all models, and tokenizes one prompt at a time. Prompts that only an engine can
tokenize correctly are refused, and the caller asks an engine.
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

MAX_QUEUED_PROMPTS = 16  # prompts in the queue per process; engines tokenize more
PROMPT_SECONDS = 5.0  # timeout for one prompt
RESTART_SECONDS = 1.0  # pause before failed processes are restarted
LOAD_SECONDS = 120.0  # timeout in seconds for reading the tokenizers
# Fields of a conversation that are passed on. Clients must not pass others to a template or a tokenizer.
LOCAL_CHAT_FIELDS = {"model", "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
LOCAL_TEMPLATE_FIELDS = {"documents", "enable_thinking"}
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # a name on a hub; other paths are directories

log = logging.getLogger(__name__)


class LocalTokenizers:
    """Tokenizers of models. Used in the thread of the event loop."""

    def __init__(self, paths: Mapping[str, str], processes: int) -> None:
        """`paths` has directories, or names on a hub, by model."""
        self._paths, self._processes = dict(paths), processes
        self._waiting, self._pool = 0, self._started()
        self._turns = asyncio.Semaphore(processes)
        self._ready: set[str] = set()  # models whose tokenizers have been read
        self._broken = asyncio.Event()

    async def run(self, special_string_of: Callable[[str], str], loaded: Callable[[str, Markers], None]) -> None:
        """Load the tokenizers, and again after each restart, until cancelled. `loaded` gets the markers of each model.

        A model whose tokenizer cannot be read is logged, and its engines tokenize its prompts.
        """
        while True:
            for model, path in self._paths.items():
                try:
                    loaded(model, await self._do(LOAD_SECONDS, _markers, model, special_string_of(model)))
                    self._ready.add(model)
                except InputError as error:
                    log.warning(
                        "lmc router: could not read --tokenizers %s=%s, engines tokenize instead: %s",
                        model,
                        path,
                        error,
                    )
            await self._broken.wait()
            self._broken.clear()
            await asyncio.sleep(RESTART_SECONDS)

    def __contains__(self, model: str) -> bool:
        return model in self._ready

    async def tokens(self, model: str, request: Mapping[str, Any]) -> list[int]:
        """Return the tokens for a body of /tokenize. Raises `InputError` if only an engine can tokenize it."""
        if self._waiting >= MAX_QUEUED_PROMPTS * self._processes:
            raise InputError("the router's tokenizers are busy")
        return await self._do(PROMPT_SECONDS, _tokens, model, request)

    def close(self) -> None:
        """Kill the processes."""
        for process in list((self._pool._processes or {}).values()):  # Python 3.14 has a method for this.
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _do(self, seconds: float, work: Callable[..., T], *arguments: object) -> T:
        """Run some work in a process, after waiting at most `seconds` for a free one."""
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await self._turns.acquire()
            return await self._result(seconds, work, *arguments)
        except TimeoutError:
            raise InputError("the router's tokenizers are busy") from None
        finally:
            self._waiting -= 1

    def _begun(self, work: Callable[..., T], *arguments: object) -> "Future[T]":
        """Start some work. Its slot is freed when it ends, because a process finishes cancelled work too."""
        loop = asyncio.get_running_loop()

        def end_turn(_: "Future[T]") -> None:
            with suppress(RuntimeError):  # The router is shutting down.
                loop.call_soon_threadsafe(self._turns.release)

        try:
            future = self._pool.submit(work, *arguments)
        except BaseException:
            self._turns.release()
            raise
        future.add_done_callback(end_turn)
        return future

    async def _result(self, seconds: float, work: Callable[..., T], *arguments: object) -> T:
        """Wait for the result of some work. After a timeout or a crash, all processes are restarted."""
        pool = self._pool
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(self._begun(work, *arguments))
        except (TimeoutError, BrokenProcessPool) as error:
            if pool is self._pool:  # Only the first waiter restarts the pool.
                outcome = "timed out" if isinstance(error, TimeoutError) else "ended"
                log.warning("lmc router: a tokenizer process %s; restarting all of them", outcome)
                self.close()
                self._ready, self._pool = set(), self._started()
                self._broken.set()
            raise InputError("the tokenizer process ended or timed out") from None
        except asyncio.CancelledError:  # `close` cancels queued work, which must not cancel the request.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise InputError("the tokenizer process ended") from None

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._processes, context, initializer=_begin, initargs=(self._paths,))


_tokenizers: dict[str, Any] = {}  # of this process, by model; an error if one cannot be read


def _begin(paths: Mapping[str, str]) -> None:
    """Load the tokenizers in a new process, which ends with the router."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the router handles Ctrl-C.
    threading.Thread(target=_end_with_the_router, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    for model, path in paths.items():
        try:
            _tokenizers[model] = AutoTokenizer.from_pretrained(_location(path))
        except Exception as error:  # noqa: BLE001 - a tokenizer's files can be invalid in many ways
            _tokenizers[model] = InputError(_reason(path, error))


def _location(path: str) -> str:
    """Return an existing directory, or the name of a model on a hub. Raises `InputError` for other paths."""
    folder = _folder(path)
    if folder is None and not HUB_NAME.fullmatch(path):
        raise InputError("the directory does not exist")
    return path if folder is None else str(folder)


def _folder(path: str) -> Path | None:
    """Return the directory of a path; None if it does not exist or is not readable."""
    try:
        folder = Path(path).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError):  # unknown user, name too long, no permission
        return None


def _reason(path: str, error: Exception) -> str:
    """Return why a tokenizer could not be read. For empty directories, transformers' own message is misleading."""
    folder, text = _folder(path), next(iter(str(error).splitlines()), type(error).__name__)[:200]
    if isinstance(error, InputError):
        return text
    if folder is None:
        return f"the directory does not exist, and the hub has no such model: {text}"
    try:
        has_files = any(folder.glob("tokenizer*"))
    except OSError as refused:
        return f"the directory cannot be read: {refused.strerror}"
    return text if has_files else "the directory has no tokenizer files, such as tokenizer.json"


def _end_with_the_router() -> None:
    router = multiprocessing.parent_process()
    assert router is not None
    router.join()
    os._exit(0)


def _tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a model. Raises `InputError` if it could not be read."""
    tokenizer = _tokenizers[model]
    if isinstance(tokenizer, InputError):
        raise tokenizer
    return tokenizer


def _markers(model: str, special_string: str) -> Markers:
    return Markers.of(_tokenizer_of(model), special_string)


def _tokens(model: str, request: Mapping[str, Any]) -> list[int]:
    """Return the tokens that an engine's /tokenize would. Raises `InputError` where the result may differ."""
    tokenizer = _tokenizer_of(model)
    try:
        if "messages" not in request:
            ids = tokenizer.encode(
                request["prompt"], add_special_tokens=request.get("add_special_tokens", True) is True
            )
        else:
            is_plain = all(
                isinstance(message["content"], str) and "tool_calls" not in message for message in request["messages"]
            )
            template_arguments = request.get("chat_template_kwargs") or {}
            if not is_plain or request.keys() - LOCAL_CHAT_FIELDS or template_arguments.keys() - LOCAL_TEMPLATE_FIELDS:
                raise InputError("only an engine can format this conversation")
            ids = tokenizer.apply_chat_template(
                request["messages"],
                tokenize=True,
                return_dict=False,
                add_generation_prompt=request.get("add_generation_prompt", True) is True,
                continue_final_message=request.get("continue_final_message", False) is True,
                **template_arguments,
            )
        return [int(token) for token in ids]
    except InputError:
        raise
    except Exception as error:  # templates may raise any exception, and clients send any input
        raise InputError(f"the tokenizer rejects this prompt ({type(error).__name__})") from error
