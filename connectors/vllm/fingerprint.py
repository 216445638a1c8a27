"""What a model is, wherever it was loaded from: two engines share KV only if this is the same."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import xxhash

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
WINDOWS = 64  # places of a large file that are read
WINDOW = 1 << 20  # bytes of each; files up to WINDOWS × WINDOW are read whole


def fingerprint(model_config: Any, model: Any | None) -> str:
    """sha256 of the config, the quantisation, and the weights: of their files whole or, above 64 MiB, of windows spread over each.

    Without files (a hub's streamer, dummy weights) the loaded parameters are taken. The engine repacks weights for its kernels,
    so those of two machines may differ: then they do not share, which is safe.
    """
    config = {**model_config.hf_config.to_dict()}
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    said = [json.dumps(config, sort_keys=True, default=str), str(model_config.dtype), str(model_config.quantization)]
    if "longrope" in said[0]:  # which has two tables: the engine takes one or the other by how long a prompt may be
        said.append(str(model_config.max_model_len))
    digest = hashlib.sha256("|".join(said).encode())
    folder = _folder(model_config)
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)}) if folder else []
    for path in files:
        digest.update(path.name.encode() + _of_file(path))
    if not files and model is not None:
        for name, weight in sorted(model.named_parameters()):
            raw = weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(name.encode() + xxhash.xxh3_128_digest(raw))
    return digest.hexdigest()


def adapter_stamp(path: str) -> bytes:
    """What a LoRA adapter's files are now. The engine's hashes name its path only, and a disk outlives what lay there."""
    try:
        found = [(file.name, file.stat()) for file in sorted(Path(path).iterdir())]
    except OSError:  # a hub's id, or something that the engine will complain of: nothing of it outlives this process
        return os.urandom(32)
    said = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
    return hashlib.sha256(repr((path, said)).encode()).digest()


def _folder(model_config: Any) -> Path | None:
    """Where the weights lie on this host, if they do."""
    path = Path(model_config.model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    except (ImportError, OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError):
        return None


def _of_file(path: Path) -> bytes:
    size = path.stat().st_size
    h = xxhash.xxh3_128(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= WINDOWS * WINDOW:
            h.update(file.read())
        else:
            for i in range(WINDOWS):
                file.seek((size - WINDOW) * i // (WINDOWS - 1))
                h.update(file.read(WINDOW))
    return h.digest()
