"""Two hosts of vLLM engines, one S3 bucket and the router: what is reused, what is lost while hosts and the pool fail.

    python bench/hosts.py [--requests 24] [--other FOLDER] [--keep]

A host is a cache server with memory and a disk, and two `vllm serve` of the small model that lmc ships. Both hosts have
the same bucket of a moto server, and `lmc router` is in front of all four engines. Everything runs on this machine, but
each host has an address (127.0.0.2, 127.0.0.3), folders and sockets of its own. Documents are learned at host A, and
then at host B, which finds them in the bucket. Then chats over six documents in random order are sent, four at a time,
with `load_policy: always`: everything stored is reused, whatever it takes. The phases follow each other:

    full            requests that must not blend (`"blend": false`)
    steady          nothing happens
    host killed     the cache server and both engines of host A are killed, with requests in flight
    host back       host A has started again with its disk
    pool dies       host B has started with an empty disk and knows no document; during the phase, the bucket stops to
                    answer, and answers again
    disk lost       host B has started in the same way once more; requests go to it alone until `upgrade`
    pool hangs      host B as before, and the bucket accepts connections and never answers
    pool fails      host B as before, and the bucket refuses every request
    pool back       the bucket answers again
    upgrade         both hosts restart, one after the other, with the lmc in the folder `--other`, with requests in
                    flight (left out without the option); `versions` are the commits of both

What is measured in each phase:

    failed      requests without a whole answer
    right       share of answers that begin with an accepted one
    reused      of the tokens of the documents in the prompts, the share that was not computed, for each host
    places      how many tokens came from memory (`host`), from the disk, and from the bucket (`objects`)
    p50, p99    seconds until the answer of eight tokens is there

Afterwards `lmc check` reads every record on both disks and in the bucket: `corrupt` is how many are invalid.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from common import closing_line, parser
from transformers import AutoTokenizer
from vllm_server import SMALL_TEMPLATE, Program, Server, free_port

from lmc.blend.markers import Markers
from lmc.blend.segments import document_tokens
from lmc.demo import SHIPPED
from lmc.demo.questions import TOP, Question, read_collection
from lmc.demo.run import begins
from lmc.rag import SEPARATOR, messages

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))

ADDRESSES = {"A": "127.0.0.2", "B": "127.0.0.3"}  # of the hosts; the router and the bucket are at 127.0.0.1
AT_ONCE, COUNT = 4, 8  # requests at a time, and tokens of an answer
INTRO = "Here are the documents."
PATIENCE = 120.0  # seconds for a request
MODEL = str(SHIPPED / "model")


class Host:
    """A cache server and its engines, which can be killed and started again."""

    def __init__(self, name: str, address: str, folder: Path, bucket: str, engines: int = 2) -> None:
        self.name, self._address, self._bucket = name, address, bucket
        self._folder, self.disk = folder / name, folder / name / "disk"
        self._folder.mkdir()
        self._ports = [(free_port(), free_port(), free_port(), free_port()) for _ in range(engines)]
        self.urls = [f"http://{address}:{port}" for port, *_ in self._ports]
        self.admins = [f"http://{address}:{admin}" for _, admin, *_ in self._ports]
        self._running: list[Program] = []

    def start(self, tree: Path | None = None) -> None:
        """Start everything, with the lmc of this repository or in another folder."""
        at = {"PYTHONPATH": str(tree or ROOT)}
        socket, http = self._folder / "lmc.sock", free_port()
        store = {"LMC_MAX_LOCAL_CPU_SIZE": "0.3", "LMC_LOCAL_DISK": str(self.disk), "LMC_MAX_LOCAL_DISK_SIZE": "2"}
        words = ["lmc", "serve", "--socket", str(socket), "--http", f"{self._address}:{http}"]
        variables = {**store, "LMC_REMOTE_URL": self._bucket, **at}
        cache = Program(words, http, self._folder / "cache.log", variables, host=self._address)
        self._running = [cache]
        cache.wait()
        for number, (port, admin, events, missed) in enumerate(self._ports):
            folder = self._folder / str(number)
            folder.mkdir(exist_ok=True)
            variables = {
                "LMC_SERVER": f"unix://{socket}", "LMC_ADMIN": f"{self._address}:{admin}",
                "LMC_DOCUMENT_EVENTS": f"tcp://{self._address}:{events},tcp://{self._address}:{missed}", **at,
            }  # fmt: skip
            engine = Server(
                MODEL, folder, SMALL_TEMPLATE, variables, port=port, host=self._address, load_policy="always"
            )
            self._running.append(engine)
        for engine in self._running[1:]:
            engine.wait()

    def kill(self) -> None:
        """Kill every process with SIGKILL."""
        for program in self._running:
            program.kill()
        self._running = []

    def stop(self) -> None:
        """Shut everything down, engines first."""
        for program in reversed(self._running):
            program.stop()
        self._running = []


@dataclass
class Asked:
    """A chat over documents, with the tokens that these have."""

    question: Question
    chat: list[dict[str, str]]
    document_tokens: int


class Traffic:
    """Chats over the documents of the small model, and the measurements of their answers."""

    def __init__(self, hosts: Sequence[Host], count: int) -> None:
        """`count` is the number of requests of a phase."""
        self._count, self._draw = count, random.Random(0)
        self._host_of = {url: host.name for host in hosts for url in host.urls}
        self._collection = read_collection(SHIPPED / "documents", SHIPPED / "questions.json")
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        markers = Markers.of(tokenizer, SEPARATOR)
        self._sizes = {
            name: len(document_tokens(tokenizer.encode, markers, SEPARATOR, text)[0])
            for name, text in self._collection.documents.items()
        }

    def phase(self, name: str, urls: Sequence[str], *happens: Callable[[], object], **options: Any) -> dict[str, Any]:
        """Send the requests of a phase to these servers in turn, and return what was measured.

        What `happens` is called when a third is answered, and another third.
        """
        asked = [self._next() for _ in range(self._count)]
        with ThreadPoolExecutor(AT_ONCE) as senders:
            waiting = [senders.submit(self._ask, one, url, options) for one, url in zip(asked, cycle(urls))]
            for third, event in enumerate(happens, 1):
                waiting[third * len(asked) // 3].result()
                event()
            done = [one.result() for one in waiting]
        reused, places = defaultdict[str, list[float]](list), Counter[str]()
        for one in done:
            if "reused" in one:
                reused[self._host_of.get(one["engine"], "?")].append(one["reused"])
                places.update(one["places"])
        seconds = sorted(one["seconds"] for one in done)
        found = {
            "requests": len(done),
            "failed": sum("right" not in one for one in done),
            "right": round(fmean(one.get("right", False) for one in done), 3),
            "reused": {host: round(fmean(shares), 3) for host, shares in sorted(reused.items())},
            "places": dict(places),
            "p50": round(seconds[len(seconds) // 2], 2),
            "p99": round(seconds[len(seconds) * 99 // 100], 2),
        }
        print(f"{name:12} {found} {[one['error'] for one in done if 'error' in one]}", flush=True)
        return found

    def _next(self) -> Asked:
        wanted = [one for one in self._collection.questions if one.answer is not None and one.document]
        question = self._draw.choice(wanted)
        others = [name for name in self._collection.documents if name != question.document]
        assert question.document is not None
        names = [question.document, *self._draw.sample(others, TOP - 1)]
        self._draw.shuffle(names)
        texts = [self._collection.documents[name] for name in names]
        chat = messages(self._collection.system, texts, f"Question: {question.question}", intro=INTRO)
        return Asked(question, chat, sum(self._sizes[name] for name in names))

    def _ask(self, asked: Asked, url: str, options: dict[str, Any]) -> dict[str, Any]:
        body = {"model": "bench", "messages": asked.chat, "temperature": 0, "max_tokens": COUNT, **options}
        began = time.monotonic()
        try:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
            said = answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            return {"seconds": time.monotonic() - began, "error": f"{type(error).__name__}: {error}"[:200]}
        details = said["usage"].get("prompt_tokens_details") or {}
        cached = min(asked.document_tokens, details.get("cached_tokens") or 0)
        text = said["choices"][0]["message"]["content"] or ""
        assert asked.question.answer is not None
        return {
            "seconds": time.monotonic() - began,
            "engine": answer.headers.get("x-lmc-engine", url),
            "reused": cached / asked.document_tokens,
            "places": ((said.get("kv_transfer_params") or {}).get("lmc") or {}).get("tokens_from", {}),
            "right": begins(text, asked.question.answer, *asked.question.accepted),
        }


def learn(host: Host, folder: Path) -> None:
    """Learn all documents at a host, as a user does."""
    manifest = str(folder / f"manifest-{host.name}.sqlite")
    words = ["learn", str(SHIPPED / "documents"), "--url", host.urls[0], "--json", "--manifest", manifest]
    said = subprocess.run([sys.executable, "-m", "lmc", *words], check=True, capture_output=True, text=True)
    print(said.stdout.strip()[-300:], flush=True)


def corrupt(place: dict[str, str]) -> int:
    """Return how many records of a place `lmc check` finds invalid."""
    words = [sys.executable, "-m", "lmc", "check", "--json"]
    said = subprocess.run(words, env={**os.environ, **place}, capture_output=True, text=True, check=False)
    print(said.stdout.strip()[-500:], said.stderr.strip()[-300:], flush=True)
    return sum(len(one["findings"]) for one in json.loads(said.stdout))


def commit_of(tree: Path) -> str:
    """Return the commit of a working tree, with its date."""
    words = ["git", "-C", str(tree), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def upgraded(traffic: Traffic, hosts: Sequence[Host], urls: Sequence[str], other: Path) -> dict[str, Any]:
    """Return what was measured while the hosts restart with another version, one after the other, and afterwards."""

    def upgrade() -> None:
        for host in hosts:
            host.stop()
            host.start(other)

    return {
        "upgrade": traffic.phase("upgrade", urls, upgrade),
        "upgraded": traffic.phase("upgraded", urls),
        "versions": [commit_of(ROOT), commit_of(other)],
    }


def measure(folder: Path, options: Any) -> dict[str, Any]:
    """Return what was measured in all phases."""
    from s3_servers import BUCKET, ENVIRONMENT, Proxy, s3_server

    os.environ.update(ENVIRONMENT)
    found: dict[str, Any] = {}
    with ExitStack() as opened:
        pool = Proxy(opened.enter_context(s3_server(str(ROOT / ".venv/bin/python"))))
        bucket = f"s3://{BUCKET}/kv?endpoint=http://127.0.0.1:{pool.port}"
        hosts = [Host(name, address, folder, bucket) for name, address in ADDRESSES.items()]
        first, second = hosts
        for host in hosts:
            opened.callback(host.kill)
            host.start()
        port, urls = free_port(), [url for host in hosts for url in host.urls]
        words = ["lmc", "router", "--port", str(port), "--option", "health_seconds=1"]
        words += ["--static-backends", ",".join(urls), "--static-caches", "A,A,B,B"]
        words += ["--static-admins", ",".join(admin for host in hosts for admin in host.admins)]
        router = opened.enter_context(Program(words, port, folder / "router.log", {"PYTHONPATH": str(ROOT)}))
        router.wait("/ready")
        learn(first, folder)
        learn(second, folder)
        traffic, through = Traffic(hosts, options.requests), [router.url]

        def set_mode(mode: str) -> None:
            pool.mode = mode

        def renewed() -> None:
            second.stop()
            shutil.rmtree(second.disk)
            second.start()

        found["full"] = traffic.phase("full", through, kv_transfer_params={"lmc": {"blend": False}})
        found["steady"] = traffic.phase("steady", through)
        found["host killed"] = traffic.phase("host killed", through, first.kill)
        first.start()
        found["host back"] = traffic.phase("host back", through)
        renewed()
        found["pool dies"] = traffic.phase("pool dies", through, partial(set_mode, "hang"), partial(set_mode, "pass"))
        renewed()
        found["disk lost"] = traffic.phase("disk lost", second.urls)
        renewed()
        set_mode("hang")
        found["pool hangs"] = traffic.phase("pool hangs", second.urls)
        set_mode("fail")
        pool.go_on.set()
        renewed()
        found["pool fails"] = traffic.phase("pool fails", second.urls)
        set_mode("pass")
        found["pool back"] = traffic.phase("pool back", second.urls)
        if options.other:
            found |= upgraded(traffic, hosts, through, Path(options.other).resolve())
        for host in hosts:
            host.stop()
        places = [{"LMC_LOCAL_DISK": str(host.disk)} for host in hosts] + [{"LMC_REMOTE_URL": bucket}]
        return found | {"corrupt": sum(map(corrupt, places))}


def main() -> None:
    arguments = parser(__doc__, "hosts")
    arguments.add_argument("--requests", type=int, default=24, help="in each phase")
    arguments.add_argument("--other", help="folder of another version of lmc")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmc-hosts-") as folder:
        found = measure(Path(folder), options)
    closing_line({"bench": "hosts", **found}, "hosts" if options.keep else None)


if __name__ == "__main__":
    main()
