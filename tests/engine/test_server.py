"""A server as `examples/serve_vllm.md` starts it: every command of that page, real clients, many users, a restart.

LMC_SOAK_REQUESTS (240 with --long, else 80) is how often eight users ask.
"""

import json
import logging
import os
import random
import re
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import transformers
import yaml
from amount import some
from ports import free_port

from lmc import metrics
from lmc.blend.strategies import STRATEGIES
from lmc.config.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples/serve_vllm.md").read_text()
DOCUMENTS = {path.stem: path.read_text().strip() for path in (ROOT / "lmc/demo/small_model/documents").glob("*.txt")}
QUESTIONS = json.loads((ROOT / "lmc/demo/small_model/questions.json").read_text())
SYSTEM, SPECIAL = QUESTIONS["system"], " # # "
START_SECONDS, STOP_SECONDS = 600, 120  # after which it hangs; a busy machine takes long
# Taken away: it is no setting of lmc, which ends the start of an engine over it.
SOAK_REQUESTS, USERS = int(os.environ.pop("LMC_SOAK_REQUESTS", some(240, share=1 / 3))), 8
WARM = 0.6  # share of the requests after which the worker's kernels have met the numbers of rows that there are
BLOCKS = 512  # of 32 tokens: all of them are in use soon, so that memory can be flat
INTERVAL = 9  # seconds, at least, between vLLM's lines of numbers


def blocks(section: int, language: str) -> list[str]:
    """Fenced blocks of a section of the page."""
    (text,) = re.findall(rf"^## {section}\. .*?(?=^## |\Z)", PAGE, re.S | re.M)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


# How many of them there are. All of them are run, or read, by the tests of the page.
THERE_ARE = {
    "1": {"sh": 2}, "2": {"sh": 2}, "3": {"sh": 2, "python": 5}, "4": {"sh": 1, "python": 2}, "5": {"sh": 3},
    "6": {"sh": 1}, "7": {"sh": 1, "yaml": 1, "json": 1},
}  # fmt: skip


@dataclass
class Server:
    """The page's server on a port and a directory of its own."""

    folder: Path
    port: int = 0
    admin: int = 0
    process: subprocess.Popen | None = None
    server: psutil.Process | None = None
    tree: list[psutil.Process] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, beside the page's

    def run(self, command: list[str], **options) -> subprocess.Popen:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("LMC_", "VLLM_"))}
        environment |= {"PATH": f"{Path(os.sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        environment |= {"VLLM_CACHE_ROOT": f"{os.environ['XDG_CACHE_HOME']}/vllm"}  # what it knows of classes of models
        # On a busy machine, a client may use a connection again at the moment when the server closes it.
        environment |= {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60"}
        # Prefill of a model so small is faster than a blend.
        environment |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "LMC_LOAD_POLICY": "always", **self.variables}
        return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **options)

    def here(self, text: str) -> str:
        """A block of the page with this server's port and directory."""
        text = text.replace("8000", str(self.port)).replace("9180", str(self.admin))
        return text.replace("/var/tmp/lmc", str(self.folder / "disk"))

    def execute(self, *command: str) -> str:
        """Run a block to its end; return what it prints, without the notes beside JSON."""
        notes = subprocess.DEVNULL if "--json" in command else subprocess.STDOUT
        process = self.run([self.here(part) for part in command], stdout=subprocess.PIPE, stderr=notes)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return said

    def start(self) -> None:
        if not self.port:
            self.port, self.admin = free_port(), free_port()
        script = self.here("\n".join(blocks(1, "sh"))).replace("--port", f"--num-gpu-blocks-override {BLOCKS} --port")
        with self.log.open("a") as log:
            self.process = self.run(["bash", "-ec", script], stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.3)
        # Some shells let the last command take their place.
        shell = psutil.Process(self.process.pid)
        self.server = shell.children()[0] if "sh" in shell.name() else shell
        self.tree = [self.server, *self.server.children(recursive=True)]

    def answers(self) -> bool:
        try:
            return httpx.get(f"http://localhost:{self.port}/health").status_code == 200
        except httpx.TransportError:
            return False

    def stored(self) -> float:
        """Return how many chunks and documents the administration endpoint says are there."""
        numbers = httpx.get(f"http://localhost:{self.admin}/v1/stat").json()
        return sum(count for name, count in numbers.items() if name.startswith("chunks|")) + numbers["documents"]

    def stop(self) -> None:
        """As a person would: SIGTERM to the server; nothing of it may stay."""
        if self.process is None:
            return
        self.server.terminate()
        _, alive = psutil.wait_procs(self.tree, STOP_SECONDS)
        for process in alive:
            process.kill()
        self.process.wait(STOP_SECONDS)
        self.process = None
        assert not alive

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def said(self) -> str:
        return self.log.read_text()

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://localhost:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    def counters(self) -> Counter[str]:
        text = httpx.get(f"http://localhost:{self.port}/metrics").text
        found: Counter[str] = Counter()  # over all tiers and places
        for name, count in re.findall(r"^lmc:(\w+)_total\{.*\} (\S+)$", text, re.M):
            found[name] += float(count)
        return found

    def memory(self) -> dict[str, float]:
        """MB that are a process's own, by its name: without the slab, which is shared and of a fixed size."""
        found: Counter[str] = Counter()
        for process in self.tree:
            info = process.memory_info()
            found[process.name().removeprefix("VLLM::")] += (info.rss - info.shared) / 1e6
        return dict(found)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("server"))
    try:
        found.start()
        yield found
    finally:
        found.stop()


def prompt(names, question: str) -> str:
    return SPECIAL.join([SYSTEM, *(DOCUMENTS[name] for name in names), question])


def ask(server, text, **lmc):
    """A completion; its first word, and what lmc says of it."""
    options = {"extra_body": {"kv_transfer_params": {"lmc": lmc}}} if lmc else {}
    done = server.client.completions.create(model="small", prompt=text, max_tokens=2, temperature=0, **options)
    return done.choices[0].text.strip(), (done.kv_transfer_params or {}).get("lmc", {})


NAMES = ["inn-01", "mill-01", "forge-01", "abbey-01", "farm-01", "harbour-01"]
ASKED = "at the abbey , owner of goose"  # Kai


def learned(server, names=NAMES) -> None:
    """Ask once, and wait until the documents are learned.

    All prompts begin with the first document. Idle steps compute them exactly, so the engine's own cache has prompts
    that begin with it, and no others.
    """
    first, *others = names
    ask(server, prompt(names, ASKED))
    deadline = time.monotonic() + 60
    while ask(server, prompt([first, *random.sample(others, len(others))], ASKED))[1].get("unknown_documents"):
        assert time.monotonic() < deadline
        time.sleep(0.5)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_asks_and_gets_what_it_says(server):
    first, second = (server.execute("bash", "-c", block) for block in blocks(2, "sh"))
    assert '"text":" Mara"' in first
    assert '"kv_transfer_params":{"lmc":{"unknown_documents":2}}' in first
    assert '"text":" Kai"' in second
    assert '"reused_tokens":54' in second


def test_no_block_of_the_page_is_left_out():
    found: dict[str, Counter[str]] = {}
    for section, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", PAGE, re.S | re.M):
        if languages := re.findall(r"^```(\w+)\n.*?^```", text, re.S | re.M):
            found[section] = Counter(languages)
    assert found == THERE_ARE


def test_the_page_s_documents_are_learned_ahead_and_reused_by_every_way_in(server):
    command, size = blocks(3, "sh")
    assert "24 documents of" in server.execute("bash", "-c", size)
    assert "24 documents learned in" in server.execute("bash", "-c", command)
    programs = [*blocks(3, "python"), *blocks(4, "python")]
    said = server.execute("python", "-c", "\n".join(programs)).splitlines()
    assert len(said) == len(programs)
    for line in said:
        answer, facts = line.split("{", 1)
        assert answer.split()[0] == "Kai"
        assert "unknown_documents" not in facts
        # After idle steps, the engine has the first document of an earlier request exactly.
        assert int(re.search(r"'reused_tokens': (\d+)", facts)[1]) > 5 / 6 * 1000
    assert "24 of 24 documents were learned before" in server.execute("bash", "-c", command)


def test_the_rag_program_for_chats_reuses_what_was_learned(server):
    documents = "lmc/demo/small_model/documents"
    server.execute("lmc", "learn", documents, "--url", "http://localhost:8000")
    command = "python", "examples/rag_chat.py", documents, "who is the owner of goose ?", "http://localhost:8000/v1/"
    answer, facts = server.execute(*command).splitlines()[-2:]
    assert answer
    assert "unknown_documents" not in facts
    assert "'reused_tokens':" in facts


def test_the_program_with_langchain_reuses_what_was_learned(server):
    documents = "lmc/demo/small_model/documents"
    server.execute("lmc", "learn", documents, "--url", "http://localhost:8000")
    before = server.counters()
    words = "examples/langchain_lmc.py", documents, "who is the owner of horse ?", "http://localhost:8000/v1"
    answer, usage = server.execute("python", *words).splitlines()[-2:]
    assert answer
    cached, whole = re.fullmatch(r"(\d+) of (\d+) prompt tokens came from the cache", usage).groups()
    assert int(cached) > 0.9 * int(whole)
    assert (server.counters() - before)["documents_known"] == 6


def test_documents_of_a_chat_request_are_reused_through_the_chat_template(server):
    learned(server)
    documents = [{"text": DOCUMENTS[name]} for name in NAMES[3:] + NAMES[:3]]
    asked = [{"role": "user", "content": "at the farm , owner of a chat with documents"}]
    more = {"documents": documents}
    done = server.client.chat.completions.create(
        model="small", messages=asked, max_tokens=2, temperature=0, extra_body=more
    )
    facts = done.kv_transfer_params["lmc"]
    assert facts["reused_tokens"] > 5 / 6 * 1000, "the engine may have the first document of an earlier request"
    assert not facts.get("unknown_documents")


def test_documents_are_named_pinned_and_removed_by_name(server):
    command = "lmc", "learn", "lmc/demo/small_model/documents", "--url", "http://localhost:8000"
    said = server.execute(*command, "--pin", "--ttl", "1d", "--admin", "127.0.0.1:9180", "--json")
    assert json.loads(said)["failed"] == {}
    url = "--url", "127.0.0.1:9180"
    found = json.loads(server.execute("lmc", "documents", "list", *url, "--json"))["documents"]
    assert {one["name"] for one in found if one["pinned"]} == {f"{name}.txt" for name in DOCUMENTS}
    assert "inn-01.txt: unpinned" in server.execute("lmc", "documents", "unpin", "inn-01.txt", *url)
    assert "removed " in server.execute("lmc", "documents", "remove", "inn-01.txt", *url)
    assert json.loads(server.execute(*command, "--again", "--json"))["learned"] == len(DOCUMENTS)


def test_the_page_s_misspelt_option_is_answered_with_a_note(server):
    (block,) = blocks(4, "sh")
    said = json.loads(server.execute("bash", "-c", block))
    assert said["choices"][0]["text"] == " Tara"
    assert said["kv_transfer_params"] == {"lmc": {"note": "lmc.ratio must be between 0 and 1, not 15"}}


def test_the_page_s_options_are_all_there_are():
    from lmc.connectors.vllm.scheduler.request_options import Options

    (table,) = re.findall(r"^## 4\..*?(?=^## )", PAGE, re.S | re.M)
    assert set(re.findall(r"^\| `(\w+):", table, re.M)) == set(Options.model_fields)
    (row,) = re.findall(r"^\| `strategy: .*", table, re.M)
    strategies = re.findall(r"`(\w+)`( \(default\))?", row)
    assert {name for name, _ in strategies} == set(STRATEGIES)
    assert [name for name, default in strategies if default] == [Settings().blend_method]


def test_the_page_s_metrics_are_all_metrics_of_the_kind_that_it_says():
    (counted,) = re.findall(r"`lmc:requests_total`.*?histograms", PAGE, re.S)
    (observed,) = re.findall(r"the histograms (.*?)\. vLLM's", PAGE, re.S)
    (of_tiers,) = re.findall(r"By tier there are (.*?);", PAGE, re.S)
    named = {name.removeprefix("lmc:").removesuffix("_total") for name in re.findall(r"`([a-z_:]+)`", counted)}
    assert {"requests", "documents_learned"} < named
    assert named | set(re.findall(r"`(\w+)`", of_tiers)) <= metrics.NAMES.keys()
    histograms = {name for name, metric in metrics.NAMES.items() if metric.buckets}
    assert set(re.findall(r"`([a-z_]+)`", observed)) == histograms


def test_the_page_s_metrics_are_there(server):
    block, *_ = blocks(5, "sh")
    assert "lmc:requests_total{" in server.execute("bash", "-c", block)


def test_the_page_explains_and_lists(server):
    for block in blocks(2, "sh"):
        server.execute("bash", "-c", block)
    _, block, _ = blocks(5, "sh")
    said = server.execute("bash", "-c", block)
    (page,) = re.findall(r"\n(    \d+ tokens: \d+ in the engine's.*?)…", PAGE, re.S)
    for line in filter(None, (line.strip() for line in page.splitlines())):
        assert line in said
    assert re.search(r"\d+ of \d+ documents", said)
    server.execute("lmc", "learn", "lmc/demo/small_model/documents", "--url", "http://localhost:8000", "--again")
    said = server.execute("bash", "-c", blocks(5, "sh")[2])
    assert "inn-01.txt: unpinned, without a time limit" in said
    assert "mill-01.txt: pinned, removed at 20" in said


def test_responses_reuse_documents_and_have_facts(server):
    learned(server)
    text = prompt(NAMES[1:] + NAMES[:1], "at the mill , owner of a response")
    asked = [{"role": "user", "content": text}]
    done = server.client.responses.create(model="small", input=asked, max_output_tokens=2, temperature=0)
    facts = httpx.get(f"http://127.0.0.1:{server.admin}/v1/requests/{done.id}").json()
    assert sum(facts["tokens_from"].values()) > 500  # vLLM itself may have the first documents in this order


def test_a_chat_is_explained_with_the_template_of_the_server(server, tmp_path):
    learned(server)
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": prompt(NAMES[4:] + NAMES[:4], ASKED)}]}]}
    (tmp_path / "chat.json").write_text(json.dumps(body))
    words = "lmc", "explain", str(tmp_path / "chat.json"), "--url", "127.0.0.1:9180"
    said = json.loads(server.execute(*words, "--server", "http://localhost:8000", "--json"))
    assert said["reused_tokens"] > 1000
    assert [one["reused"] for one in said["documents"]] == [True] * 6
    process = server.run([server.here(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, "with lmc explain --server URL" in error) == (2, True)


def test_facts_of_a_stream_are_found_by_its_id(server):
    learned(server)
    options = {"model": "small", "temperature": 0, "max_tokens": 2, "stream": True}
    text = prompt(NAMES[::-1], "at the mill , owner of a stream")
    parts = list(server.client.completions.create(prompt=text, **options))
    facts = httpx.get(f"http://127.0.0.1:{server.admin}/v1/requests/{parts[0].id}").json()
    assert sum(facts["tokens_from"].values()) > 500


def test_the_page_s_settings_are_settings(server):
    (shell,), (text,), (flag,) = blocks(7, "sh"), blocks(7, "yaml"), blocks(7, "json")
    assert "512" in server.execute("bash", "-c", shell)
    assert Settings.load(yaml.safe_load(text), environ={}).chunk_size == 512
    assert Settings.load(json.loads(flag)["kv_connector_extra_config"], environ={}).max_local_cpu_size == 40


def test_documents_may_be_given_as_texts(server):
    texts = [DOCUMENTS[name] for name in NAMES]
    asked = ["\n".join([SYSTEM, *order, ASKED]) for order in (texts, texts[::-1])]
    first = ask(server, asked[0], documents=texts)[1]
    assert not first.get("note")
    deadline = time.monotonic() + 60
    while ask(server, asked[0], documents=texts)[1].get("unknown_documents"):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    facts = ask(server, asked[1], documents=[*texts, "it is not there at all"])[1]
    assert facts["reused_tokens"] > 900
    reason = "'it is not there at all': it is not in the prompt"
    assert facts["note"] == f"lmc.documents: 1 of {len(texts) + 1} texts were not found: {reason}"


# -- clients ----------------------------------------------------------------------------------------------------------


def test_completions_chat_and_streams_answer_the_same(server):
    learned(server)
    text, other = prompt(NAMES[2:] + NAMES[:2], ASKED), prompt(NAMES[3:] + NAMES[:3], ASKED)
    options = {"model": "small", "temperature": 0, "max_tokens": 2}
    message = [{"role": "user", "content": other}]
    done = server.client.completions.create(prompt=text, **options)
    chat = server.client.chat.completions.create(messages=message, **options)
    stream = server.client.completions.create(prompt=text, stream=True, **options)
    streamed = "".join(part.choices[0].text for part in stream)
    chats = server.client.chat.completions.create(messages=message, stream=True, **options)
    chatted = "".join(part.choices[0].delta.content or "" for part in chats)
    assert [done.choices[0].text, chat.choices[0].message.content, streamed, chatted] == [" Kai"] * 4
    for found in (done, chat):
        assert sum(found.kv_transfer_params["lmc"]["tokens_from"].values()) > 1000


def test_options_are_read_in_chats_and_responses_too(server):
    asked = [{"role": "user", "content": prompt(NAMES[:2], ASKED)}]
    wrong = {"kv_transfer_params": {"lmc": {"ratio": 15}}}
    chat = server.client.chat.completions.create(model="small", messages=asked, max_tokens=2, extra_body=wrong)
    done = server.client.responses.create(model="small", input=asked, max_output_tokens=2, extra_body=wrong)
    note = {"lmc": {"note": "lmc.ratio must be between 0 and 1, not 15"}}
    assert [chat.kv_transfer_params, done.kv_transfer_params] == [note] * 2


def test_vllm_takes_what_a_blend_computes_for_hits(server):
    def hits() -> float:
        text = httpx.get(f"http://localhost:{server.port}/metrics").text
        (count,) = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", text, re.M)
        return float(count)

    learned(server)
    before = hits()
    _, facts = ask(server, prompt([NAMES[i] for i in (4, 1, 5, 0, 3, 2)], "at the farm , owner of a blend's hits"))
    deadline = time.monotonic() + 60
    while hits() == before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert hits() - before == facts["reused_tokens"] + facts["fresh_tokens"]


def test_metrics_are_the_sum_of_what_the_responses_say(server):
    learned(server)
    before = server.counters()
    orders = [random.Random(seed).sample(NAMES, 5) for seed in range(6)]
    found = [ask(server, prompt(order, ASKED)) for order in orders]
    ask(server, prompt(NAMES, ASKED), blend=False)
    ask(server, prompt(NAMES, ASKED), strategy="no such one")
    deadline = time.monotonic() + 60
    while (counted := server.counters() - before)["requests"] < 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    facts = [said for _, said in found]
    assert counted["requests"] == 8
    assert counted["refused"] == 1
    assert counted["blends"] == sum("reused_tokens" in said for said in facts) == 6
    assert counted["token_layers"] == sum(said["token_layers"] for said in facts)
    assert counted["tokens_from_host"] >= sum(said["tokens_from"]["host"] for said in facts)
    assert counted["failed_loads"] == counted["failures"] == 0


# -- many users -------------------------------------------------------------------------------------------------------


class Soak:
    """Eight users who ask about the shipped documents in all ways, so many times altogether."""

    def __init__(self, server: Server, requests: int) -> None:
        self._server, self._requests = server, requests
        tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "lmc/demo/small_model/model")
        # As the model was trained: every part encoded by itself.
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self.right: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.wrong: list[
            tuple[str, str, str, str | list[int]]
        ] = []  # way, what is right, what was said, what was asked
        self.memory: list[tuple[int, dict[str, float]]] = []  # requests, MB by process

    def run(self) -> None:
        draw = random.Random(0)
        self._chats = []  # of text in one piece the model makes what it can: full prefill says what is right
        for names, question, _ in (self._draw(draw) for _ in range(16)):
            text = prompt(names, question)
            self._chats.append((text, ask(self._server, text, blend=False)[0]))
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(ended,))
        watch.start()
        try:
            with ThreadPoolExecutor(USERS) as pool:
                for user in [pool.submit(self._user, seed) for seed in range(USERS)]:
                    user.result()  # raises what a user has met
        finally:
            ended.set()
            watch.join()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            self.memory.append((self.asked.total(), self._server.memory()))
        self.memory.append((self.asked.total(), self._server.memory()))

    def _draw(self, draw: random.Random) -> tuple[list[str], str, str]:
        """Documents in an order, a question that one of them answers, and what is right."""
        fact = draw.choice([q for q in QUESTIONS["questions"] if q["kind"] == "self"])
        names = draw.sample([name for name in DOCUMENTS if name != fact["document"]], 5)
        names.insert(draw.randrange(6), fact["document"])
        return names, fact["question"], fact["answer"]

    def _user(self, seed: int) -> None:
        draw = random.Random(seed)
        ways = {"blend": 8, "plain": 1, "chat": 2, "stream": 2, "deviation": 1, "leave": 1}
        for _ in range(self._requests // USERS):
            (way,) = draw.choices(list(ways), list(ways.values()))
            if way == "chat":
                asked, wanted = draw.choice(self._chats)
            else:
                names, question, wanted = self._draw(draw)
                parts = [SYSTEM, *(DOCUMENTS[name] for name in names), question]
                asked = list(chain.from_iterable([*self._encode(SPECIAL), *self._encode(part)] for part in parts))
                asked = asked[len(self._encode(SPECIAL)) :]
            said = self._ask(way, asked)
            self.asked[way] += 1
            if said is None or said.strip().startswith(wanted):
                self.right[way] += 1
            else:
                self.wrong.append((way, wanted, said, asked))

    def _ask(self, way: str, asked: str | list[int]) -> str | None:
        """What is answered; None from who leaves before."""
        client, options = self._server.client, {"model": "small", "temperature": 0, "max_tokens": 2}
        if way == "chat":
            message = {"role": "user", "content": asked}
            return client.chat.completions.create(messages=[message], **options).choices[0].message.content
        if way == "stream":
            stream = client.completions.create(prompt=asked, stream=True, **options)
            return "".join(part.choices[0].text for part in stream)
        if way == "leave":
            with client.completions.create(prompt=asked, stream=True, **{**options, "max_tokens": 200}):
                return None
        lmc = {"plain": {"blend": False}, "deviation": {"strategy": "deviation"}}.get(way, {})
        return ask(self._server, asked, **lmc)[0]


@pytest.fixture(scope="module")
def soak(server):
    found = Soak(server, SOAK_REQUESTS)
    found.run()
    counts = f"asked {dict(found.asked)}, right {dict(found.right)}, {dict(server.counters())}"
    logging.getLogger("soak").info("%s; %s", counts, found.memory[:: max(1, len(found.memory) // 12)])
    logging.getLogger("soak").info("wrong: %s", found.wrong)
    return found


def test_eight_users_get_right_answers(soak):
    """Nobody met an error (that would have ended the fixture); the shipped model itself errs in one question of 80."""
    assert soak.asked.total() == SOAK_REQUESTS
    assert soak.right.total() >= 0.97 * soak.asked.total() - 1


@pytest.mark.long
def test_memory_is_flat_after_the_warm_up(soak):
    """The engine's core has our index and store. In the worker vLLM's own CPU kernels keep something for every number
    of rows they meet: without lmc it grows by 0.2 MB a request over the first 2000. A leaked prompt would be 6.7 MB.
    """
    first, before = next(found for found in soak.memory if found[0] >= WARM * SOAK_REQUESTS)
    last, after = soak.memory[-1]
    assert all(after[name] - before[name] <= 10 for name in before if name != "Worker")
    assert after["Worker"] - before["Worker"] <= 0.6 * (last - first)


def test_the_log_is_quiet(server, soak):
    """No traceback; vLLM's line of numbers once an interval; each warning of ours once."""
    assert "Traceback" not in server.said
    assert " ERROR " not in server.said
    deadline = time.monotonic() + 2 * INTERVAL + 60
    while not re.search(r"KV Transfer metrics: .*lmc requests=[1-9]", server.said):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    numbers = re.findall(r"INFO (\d\d-\d\d \d\d:\d\d:\d\d) .*KV Transfer metrics: .*lmc", server.said)
    times = [datetime.strptime(f"2000-{at}", "%Y-%m-%d %H:%M:%S") for at in numbers]
    assert all((b - a).total_seconds() >= INTERVAL for a, b in pairwise(times))
    others = re.findall(r"\] (.*lmc.*)$", server.said, re.M)
    again = [text for text, count in Counter(others).items() if count > 1 and "KV Transfer metrics" not in text]
    assert not again
    counted = server.counters()
    assert counted["failed_loads"] == counted["failures"] == 0


# -- a restart --------------------------------------------------------------------------------------------------------


def test_after_a_restart_documents_come_from_disk(server):
    """This test restarts the server with vLLM's routes for developers, so it comes after all other tests but one."""
    learned(server)
    server.stop()
    server.variables["VLLM_SERVER_DEV_MODE"] = "1"
    before = server.said
    assert "lmc: closed the store, and all chunks are written" in before
    stat, check = (server.execute("bash", "-c", line) for line in blocks(6, "sh")[0].splitlines())
    assert re.search(r"[1-9]\d* +│", stat), stat
    assert re.fullmatch(r"disk tier \S+: [1-9]\d* records, 0 problems\s*", check), check
    server.start()
    (found,) = re.findall(r"(\d+) chunks found", server.said.rpartition("lmc: blending")[2])
    assert int(found) > 0
    answer, facts = ask(server, prompt(NAMES[::-1], ASKED))
    assert answer == "Kai"
    assert facts["tokens_from"].keys() == {"disk"}
    assert facts["tokens_from"]["disk"] >= facts["reused_tokens"] > 500
    assert "Traceback" not in server.said[len(before) :]  # vLLM may leave one when it is stopped


def test_the_routes_that_reset_the_engine_forget_every_chunk(server):
    for routes in (["/reset_prefix_cache?reset_external=true"], ["/sleep", "/wake_up"]):
        learned(server)
        assert server.stored()
        for route in routes:
            assert httpx.post(f"http://localhost:{server.port}{route}", timeout=30).status_code == 200
        deadline = time.monotonic() + 60
        while server.stored():  # files are removed in the background
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert "Traceback" not in server.said.rpartition("lmc: blending")[2]
