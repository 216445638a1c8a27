"""The speeds that a cost model has measured, in a file of the disk tier's directory, so that they outlive the process.

Without them, each start measures prefill, tiers and blends again before it can compare them. Speeds count for one
model, processor and set of tiers. A process replaces the speeds that it measures itself.
"""

import hashlib
import json
import logging
import platform
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lmc.background import repeat
from lmc.config.settings import Settings
from lmc.keys import Namespace
from lmc.small_files import replace_bytes
from lmc.storage.cost_model import CostModel

log = logging.getLogger(__name__)

FILE = "speeds.json"
SAVE_SECONDS = 60.0  # interval between two saves
MAX_SETUPS = 16  # whose speeds are kept, those saved last


def processor_of(device: torch.device) -> str:
    """Return the name of a GPU, or that of the CPU with the number of threads that compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def setup_of(settings: Settings, namespace: Namespace, processor: str) -> str:
    """Return a digest of what speeds depend on: the model, the processor, the tiers, and the version of torch."""
    tiers = [str(settings.local_disk), *map(str, settings.remotes)]
    parts = [namespace.digest().hex(), processor, tiers, torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class SpeedFile:
    """Restores the speeds of a setup into a cost model, and saves them regularly and at the end."""

    def __init__(self, directory: Path, setup: str, cost: CostModel) -> None:
        """Restore the speeds, and start to save them. A file that cannot be read has none."""
        self._path, self._setup, self._cost = directory / FILE, setup, cost
        self._saved = self._read().get(setup, {})
        cost.restore(self._saved)
        self._ended = threading.Event()
        self._thread = repeat(self.save, SAVE_SECONDS, self._ended, "lmc-speeds")

    def close(self) -> None:
        """Save the speeds a last time."""
        self._ended.set()
        self._thread.join()
        self.save()

    def save(self) -> None:
        """Save the speeds if they have changed. A directory that cannot be written loses them."""
        speeds = self._cost.estimates()
        if speeds == self._saved or not any(speeds.values()):
            return
        others = {setup: kept for setup, kept in self._read().items() if setup != self._setup}
        kept = dict([*others.items(), (self._setup, speeds)][-MAX_SETUPS:])
        try:
            replace_bytes(self._path, json.dumps(kept).encode(), durable=False)
            self._saved = speeds
        except OSError as error:
            log.debug("the speeds in %s were not saved: %s", self._path, error)

    def _read(self) -> Mapping[str, Mapping[str, Any]]:
        with suppress(OSError, ValueError):
            found = json.loads(self._path.read_bytes())
            if isinstance(found, dict) and all(isinstance(speeds, dict) for speeds in found.values()):
                return found
        return {}
