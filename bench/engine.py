"""A vLLM engine in a process of its own, for benchmarks that set two of them side by side. Needs the environment of
`make test-engine`.
"""

import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Self

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# Blends are made whatever they take, unless a benchmark asks for `auto`.
SETTINGS = {
    "enable_blending": True,
    "max_local_cpu_size": 2.0,
    "load_deadline": 60.0,
    "load_policy": "always",
}
BLOCK = 32
SYSTEM = 32  # tokens before the documents of a prompt
PATIENCE = 1800.0  # seconds in which an engine has to answer


def make_model(folder: str, layers: int = 12, hidden: int = 1024, head_dim: int = 64, group: int = 2) -> str:
    """A Llama with random weights (12 layers of 1024: 144M parameters), saved for vLLM.

    `group` attention heads share a KV head.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = f"{folder}/llama-{layers}-{hidden}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=hidden // head_dim // group,
        head_dim=head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def make_head(model: str, folder: str) -> str:
    """An EAGLE head with random weights for a model of `make_model`, saved for vLLM."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    path = f"{folder}/eagle"
    torch.manual_seed(5)
    config = LlamaConfig.from_pretrained(model, num_hidden_layers=1)
    layers = ((name.removeprefix("model."), one) for name, one in LlamaForCausalLM(config).state_dict().items())
    weights = {name: one for name, one in layers if name.startswith("layers.0.") and "input_layernorm" not in name}
    weights["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * 0.1
    config.save_pretrained(path)
    save_file(weights, f"{path}/model.safetensors")
    return path


def words(count: int, seed: int) -> list[int]:
    """Random tokens, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(4, 1020) for _ in range(count)]


def prompt_of(documents: Sequence[Sequence[int]], seed: int, question: int = 32) -> tuple[list[int], list[list[int]]]:
    """System text, documents in this order, an own question: tokens, and where the documents are."""
    tokens, spans = words(SYSTEM, 10**6), []
    for document in documents:
        spans.append([len(tokens), len(tokens) + len(document)])
        tokens = [*tokens, *document]
    return [*tokens, *words(question, 10**7 + seed)], spans


def middle_of_starts(starts: int, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Medians of what is measured with engines that are started for it: one is up to 5 % faster than the next of its
    kind.
    """
    found = []
    for number in range(starts):
        found.append(measure())
        print(
            f"start {number + 1}: " + ", ".join(f"{name} {value:.3f}" for name, value in found[-1].items()), flush=True
        )
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


class Engine:
    """A child process with an engine; every method asks it and waits. It ends with the block, or when it is closed."""

    def __init__(
        self, model: str, *, lmc: dict[str, Any] | None, host: "type[Host] | None" = None, **options: Any
    ) -> None:
        """Start the child. With `lmc` None, vLLM runs without a connector. `host` serves in the child."""
        os.environ.update(ENVIRONMENT)  # before the child imports torch, which reads it once
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, host or Host, model, lmc, options), daemon=True)
        self._process.start()
        other.close()  # Otherwise a child that dies would not be noticed.
        self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, tokens: Sequence[int], lmc: dict[str, Any] | None = None, count: int = 1) -> dict[str, Any]:
        """One request alone: `seconds` until its last token, `facts` of lmc, its `tokens`, `parts` of a blend in
        seconds.
        """
        return self._call("ask", list(tokens), lmc, count)

    def many(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        """Several requests at once: `seconds` for all, and the `ttft` of each."""
        return self._call("many", [list(tokens) for tokens in prompts], count)

    def beside(self, running: Sequence[int], tokens: Sequence[int], lmc: dict[str, Any] | None) -> dict[str, Any]:
        """A prompt that arrives while another request decodes: `ttft` of the one, worst `gap` between tokens of the
        other.
        """
        return self._call("beside", list(running), list(tokens), lmc)

    def steps(self, tokens: Sequence[int], count: int) -> list[float]:
        """Seconds of each step of a request that decodes `count` tokens alone."""
        return self._call("steps", list(tokens), count)["seconds"]

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        lmc: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Serve several requests of a tenant at once: `seconds` for all, and an answer for each.

        An answer has `ttft` and `seconds` since the start, `tokens`, `cached` (tokens of the prompt that were not
        computed, as vLLM counts them), `facts` of lmc and, if `sampling` has `logprobs`, these for each token.
        """
        return self._call("serve", [list(tokens) for tokens in prompts], count, lmc, cache_salt, sampling)

    def beam_search(self, tokens: Sequence[int], width: int, steps: int) -> float:
        """Seconds of a beam search. The engine needs a tokenizer for it."""
        return self._call("beam_search", list(tokens), width, steps)["seconds"]

    def settle(self, seconds: float = float("inf")) -> float:
        """Finish the work left after the last response, such as learning, for at most `seconds` seconds.

        Returns the seconds that it took.
        """
        return self._call("settle", seconds)["seconds"]

    def forget_prefixes(self) -> None:
        """Do what is left to do, then empty the engine's own prefix cache."""
        self._call("forget_prefixes")

    def forget_everything(self) -> None:
        """Empty our caches too."""
        self._call("forget_everything")

    def pin(self, core: int) -> None:
        """Pin the computing thread to this core. Other threads stay on their cores."""
        self._call("pin", core)

    def numbers(self) -> dict[str, Any]:
        """What lmc has counted."""
        return self._call("numbers")

    def do(self, name: str, *arguments: Any) -> Any:
        """Call a method that the `host` has besides."""
        return self._call(name, *arguments)

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):  # It may have died.
            self._pipe.send(("close", ()))
        self._process.join(20)
        self._process.kill()

    def _call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._receive()

    def _receive(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            self._process.kill()
            raise TimeoutError(f"an engine has not answered for {PATIENCE:g} seconds")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


# -- in the child ----------------------------------------------------------------------------------------------------


def _serve(
    pipe: Connection, kind: "type[Host]", model: str, lmc: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    try:
        host = kind(model, lmc, options)
    except Exception as error:
        pipe.send(f"the engine did not start: {type(error).__name__}: {error}")
        raise
    pipe.send({})
    while True:
        name, arguments = pipe.recv()
        if name == "close":
            os._exit(0)  # an engine's own ending takes seconds
        try:
            pipe.send(getattr(host, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
            pipe.send(f"{type(error).__name__}: {error}")


class Host:
    """The engine itself."""

    clocked = True  # The parts of a blend are timed.

    def __init__(self, model: str, lmc: dict[str, Any] | None, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if lmc is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="LMCConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={**SETTINGS, **lmc},
            )
        chosen = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "dtype": "float32",
            "disable_log_stats": True,
            "block_size": BLOCK,
            "max_num_batched_tokens": 4096,
        }
        self.llm = LLM(model, **{**chosen, **options})
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.parts = _Parts() if lmc is not None and self.clocked else None

    def ask(self, tokens: list[int], lmc: dict[str, Any] | None, count: int) -> dict[str, Any]:
        if self.parts:
            self.parts.clear()
        started = time.perf_counter()
        (out,) = self.llm.generate([{"prompt_token_ids": tokens}], parameters(lmc, count), use_tqdm=False)
        seconds = time.perf_counter() - started
        facts = (out.kv_transfer_params or {}).get("lmc", {})
        parts = dict(self.parts.seconds) if self.parts else {}
        return {"seconds": seconds, "facts": facts, "tokens": list(out.outputs[0].token_ids), "parts": parts}

    def many(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        started, first = time.perf_counter(), {}
        for i, tokens in enumerate(prompts):
            self.engine.add_request(str(i), {"prompt_token_ids": tokens}, parameters(None, count))
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                if out.outputs[0].token_ids:
                    first.setdefault(out.request_id, time.perf_counter() - started)
        return {"seconds": time.perf_counter() - started, "ttft": list(first.values())}

    def beside(self, running: list[int], tokens: list[int], lmc: dict[str, Any] | None) -> dict[str, Any]:
        self.engine.add_request("running", {"prompt_token_ids": running}, parameters(None, 400))
        for _ in range(8):
            self.engine.step()
        started = last = time.perf_counter()
        self.engine.add_request("new", {"prompt_token_ids": tokens}, parameters(lmc, 1))
        ttft, gaps = 0.0, []
        while not ttft:
            for out in self.engine.step():
                now = time.perf_counter()
                if out.request_id.startswith("running"):
                    gaps.append(now - last)
                    last = now
                elif out.outputs[0].token_ids:
                    ttft = now - started
        self.engine.abort_request(["running"], internal=False)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {"ttft": ttft, "gap": max(gaps), "gaps": gaps}

    def steps(self, tokens: list[int], count: int) -> dict[str, Any]:
        self.engine.add_request("decoding", {"prompt_token_ids": tokens}, parameters({"blend": False}, count))
        self.engine.step()
        seconds = []
        while self.engine.has_unfinished_requests():
            started = time.perf_counter()
            self.engine.step()
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds}

    def serve(
        self,
        prompts: list[list[int]],
        count: int,
        lmc: dict[str, Any] | None,
        cache_salt: str | None,
        sampling: dict[str, Any],
    ) -> dict[str, Any]:
        tenant = {} if cache_salt is None else {"cache_salt": cache_salt}
        started, answers = time.perf_counter(), [dict[str, Any]() for _ in prompts]
        for i, tokens in enumerate(prompts):
            asked = parameters(lmc, count, **sampling)
            self.engine.add_request(str(i), {"prompt_token_ids": tokens, **tenant}, asked)
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                answer, now = answers[int(out.request_id)], time.perf_counter() - started
                if any(said.token_ids for said in out.outputs):
                    answer.setdefault("ttft", now)
                if out.finished:
                    answer |= told(out) | {"seconds": now}
        return {"seconds": time.perf_counter() - started, "answers": answers}

    def beam_search(self, tokens: list[int], width: int, steps: int) -> dict[str, Any]:
        from vllm.sampling_params import BeamSearchParams

        chosen = BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=True)
        started = time.perf_counter()
        self.llm.beam_search([{"prompt_token_ids": tokens}], chosen)
        return {"seconds": time.perf_counter() - started}

    def settle(self, seconds: float = float("inf")) -> dict[str, Any]:
        started = time.perf_counter()
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.core.step_fn()
            if time.perf_counter() - started > seconds:
                break
        return {"seconds": time.perf_counter() - started}

    def forget_prefixes(self) -> dict[str, Any]:
        self.settle()
        assert self.llm.reset_prefix_cache()
        return {}

    def forget_everything(self) -> dict[str, Any]:
        self.forget_prefixes()
        scheduler = self.core.scheduler.connector._scheduler
        scheduler.engine.store.flush()
        scheduler.forget_all()
        return {}

    def pin(self, core: int) -> dict[str, Any]:
        os.sched_setaffinity(0, {core})
        return {}

    def numbers(self) -> dict[str, Any]:
        return dict(self.core.scheduler.connector._scheduler.numbers())


class _Parts:
    """Seconds of each part of a blend, by clocks around the functions that do them.

    A part that runs inside of another one is not counted there, so the parts add up to no more than the whole.
    """

    def __init__(self) -> None:
        from lmc.blend import shift
        from lmc.connectors.vllm.worker.canvas import PagedCanvas
        from lmc.connectors.vllm.worker.native import NativeLayers

        self.seconds: dict[str, float] = {}
        self._inside = 0.0  # seconds of the parts that have ended inside of the one that is running
        NativeLayers.run = self._clocked_run(NativeLayers.run)  # type: ignore[method-assign]
        for owner, name, part in (
            (NativeLayers, "run_through", "compiled layers"),
            (NativeLayers, "_batches", "metadata"),
            (PagedCanvas, "context", "context of the first pass"),
            (PagedCanvas, "place", "rotate and place"),
            (shift.Shift, "_apply", "shift"),
        ):
            setattr(owner, name, self._clocked(getattr(owner, name), part))
        PagedCanvas.__init__ = self._clocked_kernels(PagedCanvas.__init__)  # type: ignore[method-assign]

    def _clocked_kernels(self, begin: Any) -> Any:
        def begun(canvas: Any, *arguments: Any) -> None:
            begin(canvas, *arguments)
            kernels = canvas.kernels
            canvas.kernels = kernels._replace(
                attend=self._clocked(kernels.attend, "attention of the first pass"),
                attend_and_score=self._clocked(kernels.attend_and_score, "attention and scores of the question"),
            )

        return begun

    def clear(self) -> None:
        self.seconds.clear()

    def _clocked(self, function: Any, part: str) -> Any:
        def clocked(*arguments: Any, **named: Any) -> Any:
            with self._clock(lambda: part):
                return function(*arguments, **named)

        return clocked

    def _clocked_run(self, function: Any) -> Any:
        """Run `NativeLayers.run`, which often ends after the projections because only keys and values are needed."""

        def run(layers: Any, layer: int, rows: Any, batch: Any, attention: Any = None) -> None:
            whole = layer < layers.depth - 1

            def watched(query: Any, write: Any, own: Any) -> Any:
                nonlocal whole
                attended = attention(query, write, own)
                whole = attended is not None
                return attended

            with self._clock(lambda: "layers" if whole else "projections"):
                function(layers, layer, rows, batch, watched if attention else None)

        return run

    @contextmanager
    def _clock(self, part: Callable[[], str]) -> Iterator[None]:
        """Count the time inside of the block; `part` is asked at its end."""
        started, outside, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            took = time.perf_counter() - started
            self.seconds[part()] = self.seconds.get(part(), 0.0) + took - self._inside
            self._inside = outside + took


def parameters(lmc: dict[str, Any] | None, count: int, logprobs: int | None = None, **sampling: Any) -> Any:
    """Return sampling parameters: greedy unless `sampling` overrides this, with logprobs of each token."""
    from vllm import SamplingParams

    extra = dict(sampling.pop("extra_args", {}))
    if lmc is not None:
        extra["kv_transfer_params"] = {"lmc": lmc}
    chosen = {"temperature": 0, "detokenize": False, "ignore_eos": True, **sampling}
    return SamplingParams(max_tokens=count, extra_args=extra or None, logprobs=logprobs, **chosen)


def told(out: Any) -> dict[str, Any]:
    """Return what a finished request says, of the first of its answers if it has several."""
    said = out.outputs[0]
    return {
        "tokens": list(said.token_ids),
        "cached": out.num_cached_tokens or 0,
        "facts": (out.kv_transfer_params or {}).get("lmc", {}),
        "logprobs": [{token: one.logprob for token, one in found.items()} for found in said.logprobs or []],
    }


def in_folder() -> "tempfile.TemporaryDirectory[str]":
    """Where models are made."""
    return tempfile.TemporaryDirectory(prefix="lmc-bench-")
