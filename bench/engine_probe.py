"""An engine that also tells whether lmc is right: answers with their logprobs, aborts and preemptions in the middle of
a load, what is still held afterwards, and how fast pages are loaded.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine import Engine, Host, parameters, told

LIKELIEST = 8  # tokens whose logprobs are told
SECONDS = 120.0  # Whatever takes longer hangs.
Request = tuple[Sequence[int], dict[str, Any] | None]  # a prompt, and what it asks of lmc


class Probe(Engine):
    """A child process with such an engine."""

    def __init__(self, model: str, *, lmc: dict[str, Any] | None, **options: Any) -> None:
        super().__init__(model, lmc=lmc, host=ProbeHost, **options)

    def setup(self) -> dict[str, Any]:
        """With lmc: attention `backends`, why prompts are not blended (`refused`), whether kernels are in `triton`, and
        how many rows go `through` the compiled model at once, and how many `calls` of it blends have made.
        """
        return self._call("setup")

    def answer(self, tokens: Sequence[int], lmc: dict[str, Any] | None = None, count: int = 1) -> dict[str, Any]:
        """One request alone: `tokens`, for each of them the `logprobs` of the likeliest ones, `facts` of lmc."""
        return self._call("answer", list(tokens), lmc, count)

    def poison(self) -> None:
        """Forget the engine's own prefixes and fill its pages, so that stale bytes are not right by chance."""
        self._call("poison")

    def aborts(self, requests: Sequence[Request], times: int, count: int) -> dict[str, Any]:
        """Requests in turn, each aborted while it is loaded and then asked again.

        Returns how many were `caught` while they were loaded, and the `answers` to those that followed.
        """
        return self._call("aborts", list(requests), times, count)

    def press(self, requests: Sequence[Request], count: int) -> dict[str, Any]:
        """Several requests at once: their `answers`, and how often one of them was `preempted`."""
        return self._call("press", list(requests), count)

    def preempt(self, running: Request, loaded: Request, count: int) -> dict[str, Any]:
        """Preempt one request while another is loaded: their `answers`, and whether it was `loading` then."""
        return self._call("preempt", running, loaded, count)

    def left(self) -> dict[str, int]:
        """What is held when everything has ended: `requests`, `blocks` of the engine, `chunks` of the store."""
        return self._call("left")

    def load(self, tokens: Sequence[int]) -> dict[str, Any]:
        """A prompt that is stored: `tokens` and `bytes` that were loaded, `seconds` until they were there, `ttft`."""
        return self._call("load", list(tokens))

    def copy_speed(self, size: int) -> float:
        """Bytes per second of one copy of `size` bytes from page-locked memory to the device."""
        return self._call("copy_speed", size)["speed"]


# -- in the child ----------------------------------------------------------------------------------------------------


class ProbeHost(Host):
    """The engine itself, whose scheduler and worker are in this process."""

    clocked = False

    def __init__(self, model: str, lmc: dict[str, Any] | None, options: dict[str, Any]) -> None:
        super().__init__(model, lmc, options)
        import torch

        self._torch, self._names, self._outputs = torch, 0, {}
        self._scheduler = self.core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._free = self._pool.get_num_free_blocks()
        if lmc is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self._worker = get_kv_transfer_group()._worker
            self._count_calls()

    @property
    def _lmc(self) -> Any:
        return self._scheduler.connector._scheduler

    def setup(self) -> dict[str, Any]:
        config, layers = self._worker._config.compilation_config.static_forward_context, self._worker._layers
        backends = {layer.attn_backend.get_name() for layer in config.values() if hasattr(layer, "attn_backend")}
        return {
            "backends": sorted(backends),
            "refused": self._lmc._setup.refused,
            "triton": layers is not None and layers.kernels.in_pages,
            "through": self._worker._rows.through,
            "calls": self._calls,
        }

    def answer(self, tokens: list[int], lmc: dict[str, Any] | None, count: int) -> dict[str, Any]:
        name = self._add((tokens, lmc), count)
        self._run()
        return self._told(name)

    def poison(self) -> dict[str, Any]:
        self.forget_prefixes()
        for view in self._worker._pages.views:
            view.fill_(3.0)
        return {}

    def aborts(self, requests: list[Request], times: int, count: int) -> dict[str, Any]:
        caught, answers, draw = 0, [], random.Random(0)
        for number in range(times):
            self.poison()
            request = requests[number % len(requests)]
            name = self._add(request, count)
            self._until(lambda name=name: self._loading(name) or name in self._outputs)
            for _ in range(draw.randrange(3)):
                if self._loading(name):
                    self._step()
            caught += self._loading(name)
            self.engine.abort_request([name], internal=False)
            following = self._add(request, count)
            self._run()
            answers.append(self._told(following))
        return {"caught": caught, "answers": answers}

    def press(self, requests: list[Request], count: int) -> dict[str, Any]:
        preempted, original = 0, self._scheduler._preempt_request

        def preempt(*arguments: Any, **named: Any) -> Any:
            nonlocal preempted
            preempted += 1
            return original(*arguments, **named)

        self._scheduler._preempt_request = preempt
        names = [self._add(request, count) for request in requests]
        self._run()
        self._scheduler._preempt_request = original
        return {"answers": [self._told(name) for name in names], "preempted": preempted}

    def preempt(self, running: Request, loaded: Request, count: int) -> dict[str, Any]:
        first = self._add(running, count)
        self._until(lambda: first in self._outputs)
        second = self._add(loaded, count)
        self._until(lambda: self._loading(second) or second in self._outputs)
        loading, request = self._loading(second), self._request(first)
        running = request in self._scheduler.running
        if running:  # What follows is what vLLM's `Scheduler.reset_prefix_cache` does.
            self._scheduler.running.remove(request)
            self._scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self._scheduler.prev_step_scheduled_req_ids.clear()
        self._run()
        return {"answers": [self._told(first), self._told(second)], "preempted": loading and running}

    def left(self) -> dict[str, Any]:
        self._settle()
        self._lmc.engine.store.flush()
        return {
            "requests": len(self._scheduler.requests) + len(self._lmc._states),
            "blocks": self._free - self._pool.get_num_free_blocks(),
            "chunks": self._lmc.engine.store.held(),
        }

    def load(self, tokens: list[int]) -> dict[str, Any]:
        spans: list[float] = []
        self._lmc._setup.trace = lambda request, name, start, stop, facts: spans.append(stop - start)
        asked = self.ask(tokens, {"blend": False}, 1)
        self._lmc._setup.trace = None
        loaded = asked["facts"].get("exact_tokens", 0)
        block_bytes = sum(self._worker._pages.page_bytes)
        size = loaded // self._scheduler.block_size * block_bytes
        return {"tokens": loaded, "bytes": size, "seconds": sum(spans), "ttft": asked["seconds"]}

    def copy_speed(self, size: int) -> dict[str, Any]:
        torch = self._torch
        gpu = torch.cuda.is_available()
        source = torch.ones(min(size, 1 << 28), dtype=torch.uint8, pin_memory=gpu)
        target = source.cuda() if gpu else torch.empty_like(source)
        times = max(1, size // source.numel())
        seconds = 0.0
        for _ in range(2):  # the first round warms up
            started = time.perf_counter()
            for _ in range(times):
                target.copy_(source, non_blocking=True)
            if gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        return {"speed": times * source.numel() / seconds}

    # -- inside ------------------------------------------------------------------------------------------------------

    def _count_calls(self) -> None:
        """Count how often blends call the compiled model; the self-test has done that already."""
        from lmc.connectors.vllm.worker.canvas import PagedCanvas

        self._calls, call = 0, PagedCanvas.run_through

        def counted(*arguments: Any) -> None:
            self._calls += 1
            call(*arguments)

        PagedCanvas.run_through = counted  # type: ignore[method-assign]

    def _add(self, request: Request, count: int) -> str:
        self._names += 1
        name, (tokens, lmc) = f"probe{self._names}", request
        asked = parameters(lmc, count, LIKELIEST)
        self.engine.add_request(name, {"prompt_token_ids": list(tokens)}, asked)
        return name

    def _step(self) -> None:
        for out in self.engine.step():
            self._outputs[out.request_id] = out

    def _until(self, reached: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS
        while not reached():
            if time.monotonic() > end:
                raise TimeoutError(f"a request hangs: it has not gone on for {SECONDS:g} seconds")
            self._step()

    def _run(self) -> None:
        self._until(lambda: not self.engine.has_unfinished_requests())

    def _settle(self) -> None:
        self._run()
        end = time.monotonic() + SECONDS
        while (self._scheduler.has_requests() or self.core.batch_queue) and time.monotonic() < end:
            self.core.step_fn()

    def _request(self, name: str) -> Any:
        return next((one for key, one in self._scheduler.requests.items() if key.rsplit("-", 1)[0] == name), None)

    def _loading(self, name: str) -> bool:
        request = self._request(name)
        state = self._lmc._states.get(request.request_id) if request else None
        return bool(state and state.loading)

    def _told(self, name: str) -> dict[str, Any]:
        return told(self._outputs.pop(name))
