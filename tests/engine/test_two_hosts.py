"""The commands of docs/two-hosts.md, run with two addresses of this machine as the hosts, and a moto server as S3."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from http_engine import MODEL, ROOT, HttpEngine
from ports import free_port

sys.path.append(str(Path(__file__).parent.parent))
from mooncake_servers import MooncakeStore
from s3_servers import BUCKET, ENVIRONMENT, s3_server
from storage_fakes import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("mooncake") is None, reason="no Mooncake in this environment"),
]

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/two-hosts.md").read_text(), re.S)
INSTALL, MASTER, ENGINE, LEARN, ASK = ([*block.replace("\\\n", " ").splitlines()] for block in BLOCKS)
HOSTS = {"10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.2"}
DOCUMENTS = MODEL.parent / "documents"
MOTO = str(ROOT / ".venv/bin/python") if find_spec("moto") is None else sys.executable
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  # The small model has none of its own.


class TwoHosts:
    """What the page starts, at ports of this test."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        (folder / "template.jinja").write_text(TEMPLATE)
        self._store = MooncakeStore()
        running.callback(self._store.stop)
        self._store.start_master()
        assert [shlex.split(command)[0] for command in MASTER] == ["mooncake_master"]
        ports = {"9180": free_port(), "5558": free_port(), "8080": free_port()}
        self.router = f"http://127.0.0.1:{ports['8080']}"
        self._changes = {
            "10.0.0.1:50051": f"127.0.0.1:{self._store.port}", **HOSTS,
            "global_segment_size=32gb": f"global_segment_size=64mb&admin_port={self._store.admin_port}",
            "LMC_REMOTE_DEADLINE=2": "LMC_REMOTE_DEADLINE=60",  # beside other tests
            "LMC_MAX_LOCAL_CPU_SIZE=40": "LMC_MAX_LOCAL_CPU_SIZE=0.25",
            "BUCKET": BUCKET, "=…": "=test", "DIRECTORY": str(DOCUMENTS), "Who …?": "at the mill , owner of duck",
            **{f":{port}": f":{own}" for port, own in ports.items()}, "--port 8080": f"--port {ports['8080']}",
        }  # fmt: skip
        self.export, serve = map(self.here, ENGINE)
        serve = serve.replace("vllm serve MODEL", f"vllm serve MODEL --chat-template {folder}/template.jinja")
        self.admins = {host: f"http://{host}:{ports['9180']}" for host in HOSTS.values()}
        self.engines = []
        for host in HOSTS.values():
            at_host = self.export.replace("0.0.0.0", host).replace("tcp://*", f"tcp://{host}")
            self.engines.append(running.enter_context(closing(HttpEngine(folder, f"{at_host}\n{serve}"))))
        for host, engine in zip(HOSTS.values(), self.engines, strict=True):
            engine.wait()
            self._changes[f"http://{host}:8000"] = engine.url.replace("localhost", host)
        self.folder = folder

    def here(self, command: str) -> str:
        """Return a command of the page as it is run here."""
        for text, own in self._changes.items():
            command = command.replace(text, own)
        return command

    def run(self, command: str) -> str:
        """Run a command of the page with the page's export, and return what it prints."""
        script = f"{self.export}\n{self.here(command)}"
        done = subprocess.run(
            ["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def numbers(self, host: str) -> dict[str, float]:
        """Return the numbers of the store of a host."""
        headers = {"Authorization": "Bearer SECRET"}
        return httpx.get(f"{self.admins[host]}/v1/stat", headers=headers).json()

    def start_router(self, command: str) -> subprocess.Popen:
        """Start the router, and wait until it answers."""
        script = f"{self.export}\nexec {self.here(command)}"
        with (self.folder / "router.log").open("w") as log:
            process = subprocess.Popen(["bash", "-ec", script], cwd=ROOT, stdout=log, stderr=log)
        eventually(self._is_ready, 120)
        return process

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.router}/ready").is_success
        except httpx.TransportError:
            return False


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path), "LMC_LOAD_POLICY": "always",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    with ExitStack() as running:
        endpoint = f"http://127.0.0.1:{running.enter_context(s3_server(MOTO))}"
        for name, value in {**variables, **ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        yield TwoHosts(tmp_path, running)


def test_the_commands_of_the_page_let_the_second_host_reuse_what_the_first_has_learned(hosts: TwoHosts) -> None:
    first, second, router = LEARN
    learned = hosts.run(first)
    assert "24 documents learned" in learned
    assert "already stored" not in learned
    eventually(lambda: not hosts.numbers("127.0.0.1")["write_queue_depth"])
    assert "24 documents were already stored" in hosts.run(second)
    numbers = hosts.numbers("127.0.0.2")
    assert (numbers["hits|mooncake"], numbers["documents"]) == (24, 24)

    process = hosts.start_router(router)
    try:
        ask, check = ASK
        assert "'reused_tokens': " in hosts.run(ask)
        tiers = hosts.run(check).splitlines()
        assert [line.rpartition(", ")[2] for line in tiers] == ["0 problems"] * 2
    finally:
        process.terminate()
        process.wait(60)
