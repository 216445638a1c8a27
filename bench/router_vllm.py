"""Two real vLLM servers with the router: reused tokens and times of answers, by routing policy.

    python bench/router_vllm.py MODEL [--requests 120] [--share 0.5] [--policies round_robin,documents] [--keep]

It starts two servers of MODEL with lmc (the CPU build, one thread each) and `lmc router`. Questions of the demo are
asked again and again through chat completions of one token, each over the six passages that BM25 finds for it, in
random order. The memory of a server has room for a share of all passages that occur. Each policy has servers of its
own, which have nothing at first, and the first third of its requests is not counted. What is measured:

    reused      of the tokens of the passages in the prompts, the share that the servers reused, by their own metrics
    expected    the router's `x-lmc-expected-tokens` less what the server says in `cached_tokens`, as a share of the
                prompt: the mean, the mean without its sign, and in how many requests it is within 10 %
    seconds     until the answer of one token, the mean
"""

import random
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import httpx
from common import closing_line, parser
from transformers import AutoTokenizer
from vllm_server import Program, Server, free_port

from lmc.blend.markers import Markers
from lmc.blend.segments import document_tokens
from lmc.config.settings import Settings
from lmc.connectors.transformers.hf import model_facts
from lmc.demo import REAL
from lmc.demo.questions import TOP, Retriever, read_collection
from lmc.keys import chunk_bounds
from lmc.rag import SEPARATOR, messages
from lmc.shapes import GIB

SEED, WARM, WITHIN = 7, 1 / 3, 0.1
REUSED = re.compile(r"^lmc:reused_tokens_sum\{.*\} (\S+)$", re.MULTILINE)


class Asked(NamedTuple):
    """A prompt, and how many tokens its documents have."""

    chat: list[dict[str, str]]
    document_tokens: int


class Work(NamedTuple):
    """All that is asked, and how many chunks its documents take."""

    asked: list[Asked]
    chunks: int


def work(model: str, requests: int) -> Work:
    """Return questions in random order, and again and again, over passages in random order."""
    collection, draw = read_collection(REAL / "documents", REAL / "questions.json"), random.Random(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model)
    markers, retriever = Markers.of(tokenizer, SEPARATOR), Retriever(collection.documents)
    sizes: dict[str, int] = {}
    asked = []
    for _ in range(requests):
        question = draw.choice(collection.questions).question
        names = retriever.top(question, TOP)
        draw.shuffle(names)
        for name in names:
            (tokens,) = document_tokens(tokenizer.encode, markers, SEPARATOR, collection.documents[name])
            sizes[name] = len(tokens)
        texts = [collection.documents[name] for name in names]
        asked.append(Asked(messages(collection.system, texts, question), sum(sizes[name] for name in names)))
    size = Settings().chunk_size
    return Work(asked, sum(len(chunk_bounds(tokens, size)) for tokens in sizes.values()))


class Routed(Program):
    """`lmc router` before servers."""

    def __init__(self, policy: str, servers: Sequence[Server], folder: Path) -> None:
        port = free_port()
        words = ["router", "--policy", policy, "--port", str(port), "--option", "health_seconds=1"]
        words += ["--static-backends", ",".join(one.url for one in servers)]
        words += ["--static-admins", ",".join(one.admin.url for one in servers)] if policy == "documents" else []
        super().__init__(["lmc", *words], port, folder / f"router-{policy}.log")


def reused(servers: Sequence[Server]) -> float:
    """Return how many tokens the servers have taken from lmc so far, as their metrics say."""
    return sum(float(found) for one in servers for found in REUSED.findall(httpx.get(f"{one.url}/metrics").text))


def server(model: str, folder: Path, memory: float) -> Server:
    """Return a server that publishes which documents it has."""
    events = f"tcp://*:{free_port()},tcp://*:{free_port()}"
    variables = {"LMC_ADMIN": f"127.0.0.1:{free_port()}", "LMC_DOCUMENT_EVENTS": events}
    return Server(model, folder, variables=variables, max_local_cpu_size=memory)


def measure(policy: str, model: str, asked: Sequence[Asked], memory: float) -> dict[str, Any]:
    """Return the measurements of one policy, for servers with this memory in GiB."""
    errors, seconds, first, before = [], [], int(WARM * len(asked)), 0.0
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        servers = [opened.enter_context(server(model, folder, memory)) for _ in range(2)]
        for one in servers:
            one.wait()
        router = opened.enter_context(Routed(policy, servers, folder))
        router.wait("/ready")
        client = opened.enter_context(httpx.Client(timeout=300))
        counts = dict.fromkeys((one.url for one in servers), 0)
        for number, one in enumerate(asked):
            if number == first:
                before = reused(servers)
            body = {"model": "bench", "messages": one.chat, "max_tokens": 1, "temperature": 0}
            began = time.monotonic()
            answer = client.post(f"{router.url}/v1/chat/completions", json=body)
            took, usage = time.monotonic() - began, answer.raise_for_status().json()["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            counts[answer.headers["x-lmc-engine"]] += 1
            off = (int(answer.headers["x-lmc-expected-tokens"]) - cached) / usage["prompt_tokens"]
            print(f"{policy} {number}: {cached} of {usage['prompt_tokens']} reused, off by {off:.3f}", flush=True)
            if number >= first:
                errors.append(off)
                seconds.append(took)
        taken = reused(servers) - before
    found = {
        "reused": round(taken / sum(one.document_tokens for one in asked[first:]), 3),
        "seconds": round(mean(seconds), 3),
        "requests": sorted(counts.values()),
    }
    if policy == "documents":
        found["expected"] = {
            "mean": round(mean(errors), 4),
            "mean without sign": round(mean(map(abs, errors)), 4),
            "within 10 %": round(mean(abs(error) <= WITHIN for error in errors), 3),
        }
    return found


def main() -> None:
    arguments = parser(__doc__, "router_vllm")
    arguments.add_argument("model")
    arguments.add_argument("--requests", type=int, default=120)
    arguments.add_argument("--share", type=float, default=0.5, help="of the passages, what a server has room for")
    arguments.add_argument("--policies", default="round_robin,documents")
    options = arguments.parse_args()
    asked, chunks = work(options.model, options.requests)
    shape = model_facts(options.model, "float32").shape
    memory = options.share * chunks * shape.layers * shape.part_bytes(Settings().chunk_size) / GIB
    found: dict[str, Any] = {}
    for policy in options.policies.split(","):
        found[policy] = measure(policy, options.model, asked, memory)
        print(policy, found[policy], flush=True)
    line = {"bench": "router_vllm", "requests": options.requests, "chunks of passages": chunks, **found}
    closing_line(line, "router_vllm" if options.keep else None)


if __name__ == "__main__":
    main()
