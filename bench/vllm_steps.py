"""What a connector costs where it can gain nothing: one engine with and without it, request by request.

    python bench/vllm_steps.py [--model small|smollm2|both] [--rounds 40]

Two engines are never equally fast, even if both are vLLM alone (`vllm_overhead.py` shows by how much). So here is one
engine, from which the connector is taken away between requests. Each round serves the same kind of request three
times, in a random order: without a connector (`none`), with a connector whose hooks do nothing (`idle`), which shows
what vLLM itself does for any connector, and with lmc. Ratios are those of a round: seconds without a connector over
seconds with it, so 1 is equally fast. The range in brackets holds 95 % of the medians of rounds that are drawn again
(bootstrap).

    cached    one request whose prompt is in the engine's own cache
    new       one request with a new text, which lmc stores
    burst     16 requests at once with short new texts, which lmc stores
    crowd     128 requests at once with shorter new texts: most of the time goes to steps with all of them

lmc knows documents, and no new text has one. What is left to do after a request is done before the next one, so this
shows the cost in the engine's own thread. `no_harm.py` compares whole engines.
"""

import os
import random
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from chat_tokens import SMALL, SMOLLM2, ChatTokens
from common import closing_line, parser
from engine import Engine, Host
from no_harm import DEFAULTS, RATIOS, ROOM, SECONDS, TTFT, Traffic

from lmc.demo.random_model import machine

NONE, IDLE, LMC = "none", "idle", "lmc"
COUNT = 16  # tokens of an answer
AT_ONCE, SHORT = 16, 200  # requests of a burst, and tokens of each prompt
CROWD, SHORTER = 128, 32  # requests of a crowd, and tokens of each prompt
RESAMPLED = 1000
# The C library gives large tensors back to the kernel after every operation; see `vllm_overhead.py`.
os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}

WORKLOADS: dict[str, Callable[[Traffic, list[int]], list[list[int]]]] = {
    "cached": lambda _, asked: [asked],
    "new": lambda traffic, _: [traffic.nothing()],
    "burst": lambda traffic, _: [traffic.nothing()[:SHORT] for _ in range(AT_ONCE)],
    "crowd": lambda traffic, _: [traffic.nothing()[:SHORTER] for _ in range(CROWD)],
}


class Changing(Host):
    """An engine that can be served by another connector, or by none."""

    clocked = False

    def __init__(self, model: str, lmc: dict[str, Any] | None, options: dict[str, Any]) -> None:
        super().__init__(model, lmc, options)
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        self._workers = kv_transfer_state
        make, scheduler = _idle_connector(), self.core.scheduler
        idle = [make(self.engine.vllm_config, role, scheduler.kv_cache_config) for role in KVConnectorRole]
        self._connectors = {  # of the scheduler, and of the worker
            NONE: (None, None),
            IDLE: (idle[0], idle[1]),
            LMC: (scheduler.connector, kv_transfer_state.get_kv_transfer_group()),
        }

    def change(self, name: str) -> dict[str, Any]:
        """Wait until lmc has no work left, then serve with this connector."""
        self._use(LMC)
        self.settle()
        self._use(name)
        return {}

    def _use(self, name: str) -> None:
        self.core.scheduler.connector, self._workers._KV_CONNECTOR_AGENT = self._connectors[name]


def _idle_connector() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    class Nothing(base.KVConnectorMetadata):
        """No plan."""

    class Idle(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
        """A connector whose hooks do nothing."""

        def start_load_kv(self, forward_context: Any, **named: Any) -> None: ...
        def wait_for_layer_load(self, layer_name: str) -> None: ...
        def save_kv_layer(self, *arguments: Any, **named: Any) -> None: ...
        def wait_for_save(self) -> None: ...
        def update_state_after_alloc(self, *arguments: Any) -> None: ...

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            return 0, False

        def build_connector_meta(self, scheduler_output: Any) -> Nothing:
            return Nothing()

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            return False, None

    return Idle


def median_range(ratios: list[float]) -> list[float]:
    """Return the range of 95 % of the medians of as many ratios, drawn from these with replacement."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return [round(medians[RESAMPLED // 40], 3), round(medians[-RESAMPLED // 40], 3)]


def measure(engine: Engine, traffic: Traffic, rounds: int) -> dict[str, dict[str, Any]]:
    """Return ratios and seconds by workload."""
    asked = traffic.known()
    engine.do("change", NONE)
    engine.serve([asked], 1)  # lmc would blend it.
    engine.do("change", LMC)
    return {
        name: _ratios(_seconds(engine, traffic, rounds, lambda make=make: make(traffic, asked)))  # type: ignore[misc]
        for name, make in WORKLOADS.items()
    }


def _seconds(
    engine: Engine, traffic: Traffic, rounds: int, prompts: Callable[[], list[list[int]]]
) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {NONE: [], IDLE: [], LMC: []}
    counted, served = engine.numbers()["requests"], 0
    for number in range(rounds + 1):
        for name in traffic.draw.sample(list(found), len(found)):
            wanted = prompts()
            engine.do("change", name)
            said = engine.serve(wanted, COUNT)
            engine.do("change", LMC)
            served += len(wanted) if name == LMC else 0
            if number:  # The first round warms up.
                found[name].append({TTFT: fmean(one[TTFT] for one in said["answers"]), SECONDS: said["seconds"]})
    numbers = engine.numbers()
    assert numbers["requests"] - counted == served, "lmc has served requests of other connectors, or not all of its own"
    assert not numbers.get("blends"), "lmc has found documents"
    return found


def _ratios(seconds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {"seconds": {name: round(median(s[SECONDS] for s in seconds[name]), 4) for name in seconds}}
    for name in (IDLE, LMC):
        for what, called in RATIOS.items():
            pairs = zip(seconds[NONE], seconds[name], strict=True)
            ratios = [without[what] / with_it[what] for without, with_it in pairs]
            found[f"{name}_{called}"] = round(median(ratios), 3)
            found[f"{name}_{called}_range"] = median_range(ratios)
    return found


def main() -> None:
    arguments = parser(__doc__, "vllm_steps")
    arguments.add_argument("--model", choices=(SMALL, SMOLLM2, "both"), default=SMALL)
    arguments.add_argument("--rounds", type=int, default=40)
    options = arguments.parse_args()
    by_workload: dict[str, dict[str, Any]] = {}
    for model in (SMALL, SMOLLM2) if options.model == "both" else (options.model,):
        chats = ChatTokens.of(model)
        traffic = Traffic(chats, 0)
        with Engine(chats.path, lmc=DEFAULTS, host=Changing, **ROOM) as engine:
            for document in traffic.documents():
                assert engine.ask(document, {"learn": True})["facts"]["learned"]
            found = measure(engine, traffic, options.rounds)
        by_workload |= {f"{model} {name}": numbers for name, numbers in found.items()}
    print(f"{machine()}\n{options.rounds} rounds; one thread")
    names = [f"{name}_{called}" for name in (IDLE, LMC) for called in RATIOS.values()]
    for workload, numbers in by_workload.items():
        parts = [f"{name} {numbers[name]:.3f} {numbers[f'{name}_range']}" for name in names]
        print(f"{workload:16} {numbers['seconds'][NONE]:.3f} s   {'   '.join(parts)}")
    worst, what = min(
        (numbers[name], f"{name} of {work}") for work, numbers in by_workload.items() for name in names[2:]
    )
    line = {
        "bench": "vllm_steps",
        "worst": worst,
        "worst_of": what,
        "rounds": options.rounds,
        "by_workload": by_workload,
    }
    closing_line(line, "vllm_steps" if options.keep else None)


if __name__ == "__main__":
    main()
