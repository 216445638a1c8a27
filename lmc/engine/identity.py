"""The identity of a model, for the keys of its chunks.

The identity is equal wherever the model is loaded. It differs if one bit of the weights or the config differs.

A checkpoint is identified by the contents of its files: the config and every byte of the weights. The parameters in
memory would not do: vLLM fuses matrices in memory and its CPU build repacks them, so they differ from transformers'.
Digests of files are remembered by path, size and times, so only the first start reads the files. A model without files
(made in memory, or with dummy weights) is identified by the bytes of its parameters.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
import xxhash

from lmc.errors import InputError
from lmc.small_files import replace_text, sole_writer, user_cache

ADAPTER = ("adapter_config.json", "adapter_model.*")  # the files of a LoRA adapter
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")  # Only the first pattern that matches files is used.
DIGESTS = "checkpoints.json"  # name of the file that remembers digests
READ_BYTES = 8 << 20  # bytes per read
READERS = 4
FRESH_SECONDS = 2.0  # A file that changed this recently may change again without new times: do not remember it.
# Entries of a config that do not change the KV. The dtype is a field of the namespace.
NOT_KV = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})


def rope_name(parameters: Mapping[str, object] | None, *, interleaved: bool = False) -> str:
    """Return a canonical string for a model's RoPE parameters, and for which dimensions of its keys rotate together.

    It does not depend on how a library writes defaults and numbers. Libraries may keep the keys of the same checkpoint
    in different orders of dimensions (DeepSeek V3 in transformers and in vLLM).
    """
    given = {name: _as_floats(value) for name, value in (parameters or {}).items() if value is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    if interleaved:
        given["interleaved"] = True
    return json.dumps({**given, "rope_type": kind}, sort_keys=True, default=str)


def _as_floats(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_as_floats(item) for item in value]
    return float(value) if isinstance(value, int | float) else value


def checkpoint_files(name: str | Path, revision: str | None = None) -> list[Path]:
    """Return the local files that determine a checkpoint's KV; empty if its weights are not on this host."""
    path = Path(name)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else _snapshot(str(name), revision)
    if folder and (folder / "adapter_config.json").exists():  # An adapter: the weights of its base model are elsewhere.
        return []
    weights = next((found for pattern in WEIGHTS if (found := sorted(folder.glob(pattern)))), []) if folder else []
    return [*weights, *sorted(folder.glob("*.py")), *folder.glob("config.json")] if folder and weights else []


def identity_of_files(files: Sequence[Path], also: Sequence[str] = ()) -> str:
    """Return the identity of a checkpoint. `also` names the loader's options that change the KV."""
    digest, remembered = hashlib.sha256(repr(tuple(also)).encode()), _remembered()
    with ThreadPoolExecutor(READERS, thread_name_prefix="lmc-identity") as pool:
        found = list(pool.map(lambda file: _entry(file, remembered), files))
    changed = {path: entry for path, entry in found if path and remembered.get(path) != entry}
    if changed:
        _remember(changed)
    for file, (_, entry) in zip(files, found, strict=True):
        digest.update(f"{file.name} {entry[-1]}\n".encode())
    return digest.hexdigest()


def identity_of_parameters(
    config: Mapping[str, object], parameters: Iterable[tuple[str, torch.Tensor]], also: Sequence[str] = ()
) -> str:
    """Return the identity of a model in memory, from its config and every byte of every parameter."""
    digest = hashlib.sha256(repr(tuple(also)).encode() + _plain(config))
    for name, weight in parameters:
        raw = weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        # xxh3 hashes 0.5 GB in 0.1 s, sha256 in 0.3 s. A weaker hash is enough: the weights are the operator's own.
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + xxhash.xxh3_128_digest(raw))
    return digest.hexdigest()


def adapter_stamp(path: str) -> bytes:
    """Return a digest of a LoRA adapter's path, and of every byte of the files that vLLM loads.

    An engine's block hashes contain only the path. After a restart, another adapter may be at that path while the disk
    tier still holds the chunks of the old one, and its files may have the same sizes and times, as in images.
    """
    try:
        files = sorted(file for pattern in ADAPTER for file in Path(path).iterdir() if file.match(pattern))
        return _stamp_of(path, tuple((str(file), *_stamp(file.stat())) for file in files))
    except OSError:  # The id of an adapter on a hub: no later process finds its chunks.
        return os.urandom(32)


@lru_cache(maxsize=1024)
def _stamp_of(path: str, files: tuple[tuple[str, int, int, int], ...]) -> bytes:
    """Return the stamp of an adapter. Some versions of vLLM want it for each request, and reading it takes a second."""
    return bytes.fromhex(identity_of_files([Path(name) for name, *_ in files], (path,)))


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _remembered() -> dict[str, list[object]]:
    with suppress(OSError, ValueError):
        known = json.loads((user_cache() / DIGESTS).read_text())
        return known if isinstance(known, dict) else {}
    return {}


def _remember(changed: Mapping[str, list[object]]) -> None:
    """Add digests to the remembered ones, and drop those of removed files."""
    # If the home is read-only or unknown, the next start reads the files again.
    with suppress(OSError, InputError):
        file = user_cache() / DIGESTS
        with sole_writer(file):  # Engines of other checkpoints start at the same time.
            there = {path: entry for path, entry in _remembered().items() if os.path.exists(path)}
            replace_text(file, json.dumps(there | dict(changed)))


def _entry(file: Path, remembered: Mapping[str, list[object]]) -> tuple[str, list[object]]:
    """Return a file's path, and its size, times and digest. The path is empty if the digest must not be remembered."""
    path = str(file.resolve())
    status = os.stat(path)
    stamp = list(_stamp(status))
    known = remembered.get(path)
    if isinstance(known, list) and known[:-1] == stamp:
        return path, known
    is_config = file.name == "config.json"
    digest = hashlib.sha256(_plain(json.loads(file.read_bytes()))).hexdigest() if is_config else _read(path)
    fresh = time.time() - max(status.st_mtime, status.st_ctime) < FRESH_SECONDS
    return ("" if fresh else path), [*stamp, digest]


def _read(path: str) -> str:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _plain(config: Mapping[str, object]) -> bytes:
    """Return the entries of a config that change the KV, as JSON."""
    kept = {name: value for name, value in config.items() if name not in NOT_KV}
    return json.dumps(kept, sort_keys=True, default=str).encode()


def _snapshot(name: str, revision: str | None) -> Path | None:
    """Return the local folder of a checkpoint from the hub; None if it has not been downloaded."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError):
        return None
