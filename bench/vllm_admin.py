"""What questions to the administration endpoint cost a running request: the time of its steps, with and without them.

    python bench/vllm_admin.py [--documents 10000]

The shipped model decodes one request, whose steps are as short as they get, so what the endpoint takes shows most. The
disk holds documents of 200 to 500 tokens, which `lmc learn` has brought there. Each kind of question is asked again as
soon as it is answered, with a pause of as long as the answer took, but at least a tenth of a second:

    closed    the endpoint is not open, and the disk is empty
    none      the endpoint is open, without requests
    stat      `/v1/stat`, as a monitor asks
    list      a hundred documents
    list all  all documents, as `lmc learn` asks once at its start
    show      one document, by its name
    explain   a prompt of six unknown documents, which are compared with all known documents

Before that, and at the end, all documents are listed while no request runs.

The numbers are medians, 99th percentiles and maxima of the steps' milliseconds, the time of all steps against that of
an engine whose endpoint is closed, seconds of an answer, and how many answers there were. Both engines take turns.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common import closing_line, parser
from engine import Engine, words
from learn import MODEL, learn, write_documents
from transformers import AutoTokenizer

from lmc.background import RUNNING_SECONDS
from lmc.demo.random_model import machine
from lmc.http.client import admin_client
from lmc.rag import SEPARATOR

STEPS, ROUNDS, PAUSE = 300, 5, 0.1
EVERYTHING = f"/v1/documents?limit={1 << 30}"


def main() -> None:
    """Measure, and print a table and the closing line."""
    arguments = parser(__doc__, "vllm_admin")
    arguments.add_argument("--documents", type=int, default=10_000)
    options = arguments.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with tempfile.TemporaryDirectory(prefix="lmc-bench-") as name:
        folder = Path(name)
        write_documents(folder / "documents.jsonl", options.documents, tokenizer)
        learn(folder)
        found, idle = measure(folder, tokenizer)
    print(f"{machine()}\n{options.documents} documents on the disk; steps of the shipped model\n")
    print(f"{'':10}{'median ms':>12}{'p99 ms':>12}{'max ms':>12}{'of closed':>12}{'answer s':>12}{'answers':>10}")
    for kind, one in found.items():
        print(f"{kind:10}" + "".join(f"{value:12.3f}" for value in list(one.values())[:5]) + f"{one['answers']:10.0f}")
    print(f"\nall documents listed while no request runs: {idle[0]:.2f} s the first time, {idle[1]:.2f} s later")
    closing_line(
        {"bench": "vllm_admin", "documents": options.documents, **found, "idle_list_seconds": idle},
        "vllm_admin" if options.keep else None,
    )


def measure(folder: Path, tokenizer: Any) -> tuple[dict[str, dict[str, float]], list[float]]:
    """Return the numbers of each kind of question, and the seconds of lists while no request runs; see above."""
    plain = engine_over(folder / "empty")
    os.environ["LMC_ADMIN"] = f"unix://{folder}/admin.sock"
    served = engine_over(folder / "disk")
    client = admin_client(os.environ["LMC_ADMIN"])
    idle = [seconds_of(lambda: client.ask(EVERYTHING))]
    shown = quote(client.ask("/v1/documents?limit=1")["documents"][0]["name"])
    unknown = [tokenizer.decode(words(240, seed)) for seed in range(6)]
    prompt = SEPARATOR.join(["answer .", *unknown, "who ?"])
    questions: dict[str, tuple[Any, ...]] = {
        "closed": (),
        "none": (),
        "stat": ("/v1/stat",),
        "list": ("/v1/documents",),
        "list all": (EVERYTHING,),
        "show": (f"/v1/documents/{shown}",),
        "explain": ("/v1/explain", {"prompt": prompt}),
    }
    asking, asked_of = Pipe()
    asker = get_context("spawn").Process(target=ask, args=(asked_of, os.environ["LMC_ADMIN"]), daemon=True)
    asker.start()
    gaps: dict[str, list[float]] = {kind: [] for kind in questions}
    answers: dict[str, list[float]] = {kind: [] for kind in questions}
    for number in range(ROUNDS + 1):  # the first one warms up
        for kind in random.Random(number).sample(list(questions), len(questions)):
            engine = plain if kind == "closed" else served
            steps, asked = steps_while(engine, number, questions[kind], asking)
            if number:
                gaps[kind] += steps
                answers[kind] += asked
    asking.send(())
    time.sleep(2 * RUNNING_SECONDS)
    idle.append(seconds_of(lambda: client.ask(EVERYTHING)))
    plain.close()
    served.close()
    closed = sum(gaps["closed"])
    found = {
        kind: {
            "median_ms": round(1000 * statistics.median(steps), 3),
            "p99_ms": round(1000 * statistics.quantiles(steps, n=100)[98], 3),
            "max_ms": round(1000 * max(steps), 3),
            "of_closed": round(sum(steps) / closed, 3),
            "answer_seconds": round(statistics.median(answers[kind] or [0]), 4),
            "answers": len(answers[kind]),
        }
        for kind, steps in gaps.items()
    }
    return found, [round(seconds, 3) for seconds in idle]


def seconds_of(question: Callable[[], Any]) -> float:
    """Return how long an answer takes."""
    started = time.perf_counter()
    question()
    return time.perf_counter() - started


def engine_over(disk: Path) -> Engine:
    """Return an engine of the shipped model with a disk tier."""
    tier = {"local_disk": str(disk), "max_local_disk_size": 200}
    return Engine(str(MODEL), lmc=tier, max_model_len=2048, skip_tokenizer_init=False)


def steps_while(
    engine: Engine, seed: int, question: tuple[Any, ...], asking: Connection
) -> tuple[list[float], list[float]]:
    """Return the seconds of each step of a request, and of each answer to a question that is asked meanwhile."""
    if not question:
        return engine.steps(words(64, seed), STEPS), []
    asking.send(question)
    steps = engine.steps(words(64, seed), STEPS)
    asking.send("ended")
    return steps, asking.recv()


def ask(asked: Connection, address: str) -> None:
    """Ask each question that comes, again and again until another word comes, and send the seconds of the answers.

    This is a process of its own, as those who ask mostly are.
    """
    client = admin_client(address)
    while question := asked.recv():
        answers: list[float] = []
        while not asked.poll(max(PAUSE, answers[-1]) if answers else 0):
            answers.append(seconds_of(lambda question=question: client.ask(*question)))
        asked.recv()
        asked.send(answers)


if __name__ == "__main__":
    main()
