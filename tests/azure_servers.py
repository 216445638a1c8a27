"""An Azure Blob Storage of `azurite` (`make azurite`) in a process of its own."""

import base64
import hashlib
import hmac
import http.client
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.utils import formatdate
from pathlib import Path

from ports import free_port
from s3_servers import first_status, running

CONTAINER, ACCOUNT = "chunks", "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # of every emulator
ENVIRONMENT = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
INSTALLED = Path(__file__).parent.parent / "build/azurite/node_modules/.bin/azurite-blob"
VERSION = "2021-08-06"  # of the protocol


def find_azurite() -> str | None:
    """The path of azurite, if it and Node.js are installed."""
    return shutil.which(INSTALLED) if shutil.which("node") else None


@contextmanager
def azurite_server() -> Iterator[int]:
    """The port of a storage with one container, in memory."""
    azurite, port = find_azurite(), free_port()
    assert azurite is not None
    command = [azurite, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    with running([*command, "--silent", "--disableTelemetry", "--skipApiVersionCheck"]):
        first_status(port, "GET", "/")  # an error, because the request is not signed
        make_container(port)
        yield port


def make_container(port: int) -> None:
    """Create the container by a request that is signed with the account's key."""
    path, date = f"/{ACCOUNT}/{CONTAINER}", formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": VERSION}
    signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed += f"/{ACCOUNT}{path}\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}", "Content-Length": "0"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        assert connection.getresponse().status == 201


def azure_url(port: int, folder: str, container: str = CONTAINER) -> str:
    """The URL of a folder of the storage on a port, as users write it. Credentials are in `ENVIRONMENT`."""
    return f"az://{container}/{folder}?endpoint=http://127.0.0.1:{port}/{ACCOUNT}"
