"""What the router adds to a request: requests through it and straight to an engine, side by side at the same rate.

    python bench/router_proxy.py [--rate 200] [--seconds 20] [--rounds 3] [--exact-rate 50] [--chaos 600] [--keep]

The router has a core for itself. Echo engines, which compute nothing, and the clients have the other one. With
`--exact-rate`, the same is measured once more at that rate with `--tokenizers`, the one of SmolLM2, whose process is on
the router's core. With `--chaos`, engines are killed, paused and started again at random for this many seconds, while
requests go on.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import quantiles

import aiohttp
from common import closing_line, parser

from lmc.demo.pretrained import smollm2

ECHO = Path(__file__).parent.parent / "tests" / "echo_engine.py"
FIRST_PORT = 9150
ENGINES = 4
ROUTER = f"http://127.0.0.1:{FIRST_PORT}"
URLS = [f"http://127.0.0.1:{FIRST_PORT + 1 + number}" for number in range(ENGINES)]
CHAOS_RATE = 100.0  # requests a second: a new engine takes much of the core that all of them share
HUNG = 60.0  # seconds
EXACT_WORDS = 155  # of a document, so that a prompt has 2,000 tokens of SmolLM2
PAUSE = 0.02  # seconds between the parts of an answer, in chaos
END = b"data: [DONE]\n\n"  # of a whole answer


class Process:
    """A program on one core, which can be started again."""

    def __init__(self, core: int, *command: str) -> None:
        self._core, self._command = core, command
        self.start()

    def start(self) -> None:
        nowhere = subprocess.DEVNULL
        self.process = subprocess.Popen([sys.executable, *self._command], stdout=nowhere, stderr=nowhere)
        os.sched_setaffinity(self.process.pid, {self._core})

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def memory(self) -> float:
        """Return how many MB are its own."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def prompts(count: int, documents: int = 200, tokens: int = 330) -> list[str]:
    """Return prompts with six documents, about 2,000 tokens of four characters each."""
    generator = random.Random(0)
    texts = ["".join(generator.choices("abcdefghij    ", k=4 * tokens)) for _ in range(documents)]
    return [" # # ".join(["Answer.", *generator.sample(texts, 6), f"question {one}"]) for one in range(count)]


async def ask(session: aiohttp.ClientSession, url: str, text: str, pause: float = 0.0) -> tuple[str, float, float]:
    """Ask for an answer with pauses between its parts. Return what became of it, and its times in seconds."""
    began, first = time.perf_counter(), 0.0
    body = {"model": "echo", "stream": True, "prompt": text, "echo": {"parts": 8, "pause": pause}}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return f"answered {answer.status}", 0.0, 0.0
            said = await answer.content.readany()
            first = time.perf_counter() - began
            said += await answer.content.read()
            what = "served" if said.endswith(END) else "cut short"
            return what, first, time.perf_counter() - began
    except TimeoutError:
        return "hung", 0.0, 0.0
    except aiohttp.ClientError:
        return "broken off" if first else "lost", 0.0, 0.0


async def load(
    session: aiohttp.ClientSession, urls: list[str], rate: float, texts: list[str], pause: float = 0.0
) -> list[tuple[str, float, float]]:
    """Send requests at a rate, one engine after the other, and return what became of them."""
    generator, sent, due = random.Random(1), [], time.perf_counter()
    for number, text in enumerate(texts):
        due += generator.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        sent.append(asyncio.create_task(ask(session, urls[number % len(urls)], text, pause)))
    return await asyncio.gather(*sent)


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    for _ in range(200):
        with suppress(aiohttp.ClientError):
            async with session.get(url) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"{url} does not come up")


def centiles(times: list[float]) -> tuple[float, float]:
    """Return the 50th and the 99th percentile in milliseconds."""
    cuts = quantiles([1e3 * one for one in times], n=100)
    return cuts[49], cuts[98]


async def overhead(session: aiohttp.ClientSession, texts: list[str], rate: float, rounds: int) -> dict[str, float]:
    """Print times to the first byte and to the end, and return by how much those of the router are longer."""
    found: dict[str, list[tuple[str, float, float]]] = {"direct": [], "router": []}
    ways = {"direct": URLS, "router": [ROUTER]}
    for urls in ways.values():  # Connections are made, and the router meets the documents.
        await load(session, urls, rate, texts[:200])
    for _ in range(rounds):
        for way, urls in ways.items():
            found[way] += await load(session, urls, rate, texts)
    rows = {}
    for way, outcomes in found.items():
        assert all(what == "served" for what, _, _ in outcomes), Counter(what for what, _, _ in outcomes)
        rows[way] = centiles([first for _, first, _ in outcomes]), centiles([end for _, _, end in outcomes])
        (p50, p99), (end50, end99) = rows[way]
        print(f"{way:7} first byte p50 {p50:5.2f} p99 {p99:5.2f} ms, end p50 {end50:5.2f} p99 {end99:5.2f} ms")
    added = [max(b[at] - a[at] for a, b in zip(rows["direct"], rows["router"], strict=True)) for at in (0, 1)]
    return {"p50_ms": round(added[0], 2), "p99_ms": round(added[1], 2)}


async def torment(engines: list[Process], until: float) -> Counter[str]:
    """Kill, pause and start engines again, one at a time."""
    generator, done = random.Random(2), Counter[str]()
    while time.monotonic() < until:
        await asyncio.sleep(generator.uniform(0.5, 3))
        engine = generator.choice(engines)
        what = generator.choice(("killed", "paused", "ended"))
        done[what] += 1
        if what == "paused":
            engine.send(signal.SIGSTOP)
            await asyncio.sleep(generator.uniform(0.1, 3))
            engine.send(signal.SIGCONT)
        else:
            engine.send(signal.SIGKILL if what == "killed" else signal.SIGTERM)
            await asyncio.to_thread(engine.process.wait)
            await asyncio.sleep(generator.uniform(0, 3))
            engine.start()
            await asyncio.sleep(2)
    return done


async def chaos(
    session: aiohttp.ClientSession, router: Process, engines: list[Process], seconds: float
) -> dict[str, float]:
    """Send requests while engines come and go, and return how many were lost."""
    texts, before = prompts(int(CHAOS_RATE * seconds)), router.memory()
    outcomes, done = await asyncio.gather(
        load(session, [ROUTER], CHAOS_RATE, texts, PAUSE), torment(engines, time.monotonic() + seconds)
    )
    counted = Counter(what for what, _, _ in outcomes)
    print(f"{seconds:.0f} s of chaos: {dict(done)}; {dict(counted)}; memory {before:.0f} to {router.memory():.0f} MB")
    lost = sum(count for what, count in counted.items() if what not in ("served", "broken off"))
    return {
        "lost": lost,
        "broken_off": counted["broken off"],
        "requests": len(texts),
        "memory_mb": round(router.memory()),
    }


async def measure(given: argparse.Namespace, router: Process, engines: list[Process]) -> dict[str, float]:
    timeout = aiohttp.ClientTimeout(total=HUNG)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for url in (*(f"{one}/health" for one in URLS), f"{ROUTER}/ready"):
            await ready(session, url)
        texts = prompts(int(given.rate * given.seconds))
        found = await overhead(session, texts, given.rate, given.rounds)
        return found | (await chaos(session, router, engines, given.chaos) if given.chaos else {})


async def measure_exact(given: argparse.Namespace) -> dict[str, float]:
    """Return what the router adds if it has a tokenizer of its own, and how many tokens prompts have."""
    timeout = aiohttp.ClientTimeout(total=HUNG)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await ready(session, f"{ROUTER}/ready")
        texts = prompts(int(given.exact_rate * given.seconds), tokens=EXACT_WORDS)
        question = {"model": "echo", "prompt": texts[0]}
        for _ in range(600):
            async with session.post(f"{ROUTER}/lmc/explain", json=question) as answer:
                prompt = (await answer.json())["prompt"]
            if prompt["exact"] and prompt["tokens"] < len(question["prompt"]):  # The echo engines have letters.
                break
            await asyncio.sleep(0.1)
        else:
            raise RuntimeError("the router's own tokenizer does not become ready")
        print(f"with a tokenizer of its own; prompts of about {prompt['tokens']} tokens")
        found = await overhead(session, texts, given.exact_rate, given.rounds)
    return {f"exact_{name}": value for name, value in found.items()} | {"exact_tokens": prompt["tokens"]}


def main() -> None:
    asked = parser(__doc__, "router_proxy")
    asked.add_argument("--rate", type=float, default=200.0, help="requests a second")
    asked.add_argument("--seconds", type=float, default=20.0)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--exact-rate", type=float, default=0.0, help="requests a second")
    asked.add_argument("--chaos", type=float, default=0.0, help="seconds")
    given = asked.parse_args()
    os.sched_setaffinity(0, {1})
    command = ("-m", "lmc", "router", "--static-backends", ",".join(URLS), "--option", "health_seconds=1")
    command += ("--port", str(FIRST_PORT))
    with ExitStack() as started:
        engines = [Process(1, str(ECHO), url.rpartition(":")[2]) for url in URLS]
        for one in engines:
            started.callback(one.kill)
        router = Process(0, *command)
        started.callback(router.kill)
        found = asyncio.run(measure(given, router, engines))
        if given.exact_rate:
            router.kill()
            router = Process(0, *command, "--tokenizers", f"echo={smollm2()}", "--option", "tokenizer_processes=1")
            started.callback(router.kill)
            found |= asyncio.run(measure_exact(given))
    closing_line({"bench": "router_proxy", **found}, "router_proxy" if given.keep else None)


if __name__ == "__main__":
    main()
