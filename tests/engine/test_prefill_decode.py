"""Prefill and decode apart: one engine computes prompts, and another one answers them, over one cache server."""

import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from http_engine import MODEL, ROOT, HttpEngine
from lab import BLOCK, DOCUMENTS, PLAIN, PROMPT, SIZES, Prompt, agree, engine, facts, words
from other_engine import OtherEngine

sys.path.append(str(Path(__file__).parent.parent))
from service_process import ServerProcess

from lmc.server.client.connection import status

pytestmark = pytest.mark.long

TOKENS = 16  # of an answer
DECODER = {"blend_learn": False, "save_decode_cache": False}
LATE, TURN = words(700, 8), words(300, 7)  # prompts without documents
NEW = Prompt([words(120, 21), words(200, 22), words(160, 23)], seed=2000)
(COMMANDS,) = re.findall(
    r"^## Prefill and decode apart\n.*?^```bash\n(.*?)^```", (ROOT / "docs/service.md").read_text(), re.S | re.M
)


@pytest.fixture(scope="module")
def alone(models):
    """What one engine alone answers: without any cache, and with a blend of documents that it has learned."""
    with engine(models("llama")) as lab:
        exact = {tuple(tokens): lab.vanilla(tokens, TOKENS) for tokens in (PLAIN, LATE, NEW.tokens, PROMPT.tokens)}
        lab.learn(DOCUMENTS)
        blended = lab.ask(PROMPT.tokens, PROMPT.blend(), TOKENS)
    return exact, blended


@pytest.fixture(scope="module")
def prefiller(alone, models, server):
    other = OtherEngine(models("llama"), server)
    yield other
    other.close()


@pytest.fixture(scope="module")
def decoder(prefiller, models, server):
    with engine(models("llama"), {"server": server.address, **DECODER}) as lab:
        yield lab


@pytest.fixture
def decode(decoder):
    """A function that lets the decoder answer, without anything in its own prefix cache."""

    def decode(tokens, lmc=None):
        decoder.forget_prefixes()
        return decoder.ask(tokens, lmc, TOKENS)

    return decode


def whole_blocks(count: int) -> int:
    return count // BLOCK * BLOCK


def test_the_decoder_loads_a_prompt_up_to_its_last_whole_block(prefiller, decode, alone):
    prefiller.ask(PLAIN, count=1)
    out = decode(PLAIN)
    assert facts(out) == {"exact_tokens": whole_blocks(700), "tokens_from": {"host": whole_blocks(700)}}
    assert agree(out, alone[0][tuple(PLAIN)])


def test_a_decoder_that_comes_before_the_last_pages_are_stored_computes_these_itself(prefiller, decode, alone):
    """The prefiller answers a step before it has stored the blocks after the last full chunk."""
    prefiller.ask(LATE, count=1, saves=False)
    early = decode(LATE)
    assert facts(early)["exact_tokens"] == 640
    assert agree(early, alone[0][tuple(LATE)])


def test_a_prompt_with_new_documents_is_loaded_exactly(prefiller, decode, alone):
    out = prefiller.ask(NEW.tokens, NEW.blend(), 1)
    assert out["facts"] == {"unknown_documents": 3}
    out = decode(NEW.tokens, NEW.blend())
    assert facts(out)["exact_tokens"] == whole_blocks(len(NEW.tokens))
    assert agree(out, alone[0][tuple(NEW.tokens)])


def test_documents_that_the_prefiller_blends_are_blended_by_the_decoder_again(prefiller, decoder, decode, alone):
    """Nothing approximate is stored as exact, so that the decoder cannot load what the prefiller has blended."""
    for document in DOCUMENTS:
        prefiller.ask(document, {"learn": True}, 1)
    before = decoder.store.known_keys()
    blended = prefiller.ask(PROMPT.tokens, PROMPT.blend(), 1)["facts"]
    assert blended["reused_tokens"] == sum(map(len, DOCUMENTS))
    assert len(decoder.store.known_keys() - before) == 1, "the first block, which is before all documents"
    counted = decoder.numbers.get("token_layers", 0)
    out = decode(PROMPT.tokens, PROMPT.blend())
    assert agree(out, alone[1])
    assert facts(out)["tokens_from"] == {"host": sum(map(len, DOCUMENTS)) + BLOCK}
    computed = decoder.numbers["token_layers"] - counted
    assert computed == facts(out)["token_layers"] < 0.25 * len(PROMPT.tokens) * SIZES["num_hidden_layers"]
    prefiller.ask(PROMPT.tokens, {"blend": False}, 1)
    exact = decode(PROMPT.tokens, PROMPT.blend())
    assert facts(exact)["exact_tokens"] == whole_blocks(len(PROMPT.tokens))
    assert agree(exact, alone[0][tuple(PROMPT.tokens)])


def test_the_decoder_stores_no_answer_and_learns_no_document(prefiller, decoder, decode):
    prefiller.ask(TURN, count=1)
    decoder.settle()
    before = decoder.store.known_keys()
    decode(TURN)
    decoder.settle()
    assert decoder.store.known_keys() == before
    document = words(200, 31)
    prompt = Prompt([document], seed=3000)
    assert facts(decode(prompt.tokens, prompt.blend()))["unknown_documents"] == 1
    decoder.settle()
    assert decoder.store.lookup(decoder.document_keys(document)) == [None, None]
    decoder.check_idle()


# -- the commands of docs/service.md ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def http_engines(tmp_path_factory):
    """A cache server, and an engine for prompts and one for answers, as the page starts them."""
    folder = tmp_path_factory.mktemp("http")
    server = ServerProcess(folder, max_local_cpu_size=0.25)
    engines = []
    try:
        page = COMMANDS.replace("/run/lmc/lmc.sock", str(server.path)).replace("\\\n", " ").splitlines()
        exports = "\n".join(line for line in page if line.startswith("export "))
        engines += [HttpEngine(folder, f"{exports}\n{line}") for line in page if "vllm serve" in line]
        for one in engines:
            one.wait()
        yield server, *engines
    finally:
        for one in engines:
            one.close()
        server.kill()


def run_example(prompt: str, prefill: HttpEngine, decode: HttpEngine) -> list[str]:
    command = [sys.executable, "examples/prefill_decode.py", prompt, "--prefill", prefill.url, "--decode", decode.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def stored_tokens(server: ServerProcess) -> int:
    return sum(arena.stats.present.get("host", (0, 0))[1] for arena in status(server.path).arenas)


def wait_for_tokens(server: ServerProcess, count: int) -> None:
    """Wait until a server has at least so many tokens."""
    deadline = time.monotonic() + 60
    while stored_tokens(server) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_commands_of_the_page_and_the_example_serve_a_prompt_from_the_other_engine_s_pages(http_engines):
    server, prefill, decode = http_engines
    text = " ".join(path.read_text().strip() for path in sorted((MODEL.parent / "documents").glob("*.txt"))[:6])
    asked = {"model": str(MODEL), "prompt": text, "max_tokens": 1, "temperature": 0}
    usage = httpx.post(f"{prefill.url}/v1/completions", json=asked, timeout=60).json()["usage"]
    whole = whole_blocks(usage["prompt_tokens"])
    wait_for_tokens(server, whole)
    answer, seconds, cached = run_example(text, prefill, decode)
    assert answer
    assert re.fullmatch(r"\d+ ms to the first token of the second server", seconds)
    assert cached == f"{whole} of {usage['prompt_tokens']} tokens came from the cache"
    wait_for_tokens(server, whole + 1)  # The answer is stored as well, after its last token was sent.
