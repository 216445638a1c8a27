"""Tokenizers of the router's own: prompts are cut into tokens as engines do it, by processes beside the router.

Each process has the tokenizers of all models, and one prompt at a time. What they cannot do as an engine does it, an
engine is asked for.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from lmc.blend.markers import Markers
from lmc.errors import InputError

T = TypeVar("T")

WAITING = 16  # prompts for each process; others are cut by their text
SECONDS = 5.0  # for one prompt
AGAIN_SECONDS = 1.0  # before processes are started after one has ended
STARTED = 120.0  # seconds within which the processes have read their tokenizers
# Of what is asked under /tokenize, what a tokenizer of transformers takes for a conversation.
OF_A_CHAT = ("tools", "add_generation_prompt", "continue_final_message")

log = logging.getLogger(__name__)


class LocalTokenizers:
    """Tokenizers of models. Used in one thread, that of the event loop."""

    def __init__(self, paths: Mapping[str, str], processes: int) -> None:
        """`paths` are directories, or names of a hub, by model."""
        self._paths, self._processes = dict(paths), processes
        self._waiting, self._pool = 0, self._started()
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
                    log.warning("lmc router: engines are asked for tokens, not %s of --tokenizers: %s", path, error)
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
        """End the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _do(self, seconds: float, work: Callable[..., T], *arguments: object) -> T:
        pool = self._pool
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
        except TimeoutError:
            raise InputError(f"no answer within {seconds:g} seconds") from None
        except BrokenProcessPool:
            if pool is self._pool:  # The first one to see it
                log.warning("lmc router: a process of --tokenizers has ended; others are started")
                self.close()
                self._ready, self._pool = set(), self._started()
                self._broken.set()
            raise InputError("the process has ended") from None
        finally:
            self._waiting -= 1

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
            _tokenizers[model] = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # noqa: BLE001 - files of others can be wrong in many ways
            _tokenizers[model] = InputError(next(iter(str(error).splitlines()), type(error).__name__)[:200])


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
    if "messages" not in asked:
        return list(tokenizer.encode(asked["prompt"], add_special_tokens=asked.get("add_special_tokens", True)))
    plain = all(isinstance(one.get("content"), str) and "tool_calls" not in one for one in asked["messages"])
    if not plain or asked.get("chat_template") or asked.get("add_special_tokens"):
        raise InputError("an engine knows better how this conversation is written")
    options = {"add_generation_prompt": True, **(asked.get("chat_template_kwargs") or {})}
    options |= {name: asked[name] for name in OF_A_CHAT if name in asked}
    try:
        return list(tokenizer.apply_chat_template(asked["messages"], tokenize=True, return_dict=False, **options))
    except Exception as error:  # templates raise whatever they like
        raise InputError(f"the chat template does not take this conversation ({type(error).__name__})") from error
