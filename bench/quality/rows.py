"""Rows: what was measured of each prompt, in a file that can be continued, and what follows from them."""

import hashlib
import json
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import lmc
from quality.cases import REAL_TASKS
from quality.tasks import MAIN
from quality.ways import BLIND, FULL

Row = dict[str, Any]
Gap = tuple[float, float]  # KL of a way and of blind reuse to full prefill, on one prompt
RESAMPLED = 1000
LEAST_RIGHT, LEAST_LOSS, LEAST_KL = 0.85, 0.15, 0.5  # of a main task: full prefill, and what blind reuse loses
MEAN = "mean of main tasks"


def code_version() -> str:
    """Return a digest of the code that decides the numbers. Rows of other code are not mixed with its own."""
    package, bench = Path(lmc.__file__).parent, Path(__file__).parent
    paths = [path for part in ("blend", "connectors/transformers") for path in sorted((package / part).glob("*.py"))]
    paths += [bench / f"{name}.py" for name in ("tasks", "cases", "ways", "measure")]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:12]


class Rows:
    """A file with a line for each measured prompt. Several processes may append to it at the same time."""

    def __init__(self, path: Path) -> None:
        self._path, self._code = path, code_version()
        self._rows: dict[str, Row] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        read = [json.loads(line) for line in lines]
        self.outdated = sum(row["code"] != self._code for row in read)
        for row in read:
            if row["code"] == self._code:
                self._join(row)

    def _join(self, row: Row) -> None:
        """A prompt may be measured again in further ways."""
        known = self._rows.setdefault(row["key"], row)
        for part in ("ways", "chosen"):
            if part in row:
                known[part] = known.get(part, {}) | row[part]

    def ways(self, key: str) -> dict[str, Any]:
        """Return what was measured on a prompt, by way."""
        return self._rows[key]["ways"] if key in self._rows else {}

    def missing(self, key: str, names: Sequence[str]) -> list[str]:
        """Return which of these ways have not been measured on a prompt."""
        known = self.ways(key)
        return [name for name in names if name not in known]

    def add(self, row: Row) -> None:
        """Append what was measured."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, json.dumps(row | {"code": self._code}).encode() + b"\n")
        os.close(file)
        self._join(row)

    def groups(self) -> dict[str, list[Row]]:
        """Return the rows of each task and variant; those of real questions of all kinds together."""
        found = defaultdict(list)
        for row in self._rows.values():
            _, _, joined = row["variant"].partition(", ")
            variant = joined if row["task"] in REAL_TASKS else row["variant"]
            found[f"{row['task']} ({variant})" if variant else row["task"]].append(row)
        return dict(found)

    def in_all_ways(self) -> dict[str, list[Row]]:
        """Return the prompts that were measured in all modes, for each group with unmeasured prompts."""
        found = {}
        for name, rows in self.groups().items():
            most = max(len(row["ways"]) for row in rows)
            some = [row for row in rows if len(row["ways"]) == most]
            if len(some) < len(rows):
                found[f"{name}, all ways"] = [row | {"variant": f"{row['variant']}, all ways"} for row in some]
        return found


def summary(groups: dict[str, list[Row]]) -> dict[str, Any]:
    """Return the numbers of each group, and the means over main tasks for each size and words."""
    found: dict[str, Any] = {name: _numbers(rows) for name, rows in groups.items()}
    together = defaultdict(list)
    for rows in groups.values():
        if rows[0]["task"] in MAIN:
            together[rows[0]["variant"]].append(rows)
    for variant, tasks in together.items():
        found[f"{MEAN} ({variant})"] = _numbers_over(tasks)
    return found


def _numbers(rows: list[Row]) -> dict[str, Any]:
    right, blind = _of(rows, FULL, "right"), _of(rows, BLIND, "right")
    kl = fmean(_of(rows, BLIND, "kl"))
    hard = fmean(right) - fmean(blind) >= LEAST_LOSS or kl >= LEAST_KL
    return {
        "prompts": len(rows),
        "tokens": round(fmean(row["tokens"] for row in rows)),
        "qualifies": fmean(right) >= LEAST_RIGHT and hard,
        "ways": {name: _way([rows], name) for name in _measured(rows)},
    }


def _numbers_over(tasks: list[list[Row]]) -> dict[str, Any]:
    together = [row for rows in tasks for row in rows]
    names = _measured(together)
    compared = [name for name in names if name not in (FULL, BLIND)]
    return {
        "prompts": len(together),
        "tokens": round(fmean(row["tokens"] for row in together)),
        "lowest": {name: round(min(closed(_gaps(rows, name)) for rows in tasks), 3) for name in compared},
        "ways": {name: _way(tasks, name) for name in names},
    }


def _measured(rows: list[Row]) -> list[str]:
    """Return the ways that were measured on all of these prompts."""
    return [name for name in rows[0]["ways"] if all(name in row["ways"] for row in rows)]


def _way(tasks: list[list[Row]], name: str) -> dict[str, Any]:
    """Return the numbers of one way, as means over tasks of means over prompts."""

    def mean(field: str, places: int = 3) -> float:
        return round(fmean(fmean(_of(rows, name, field)) for rows in tasks), places)

    seconds = defaultdict(list)
    for row in (row for rows in tasks for row in rows):
        for part, spent in row["ways"][name].get("seconds", {}).items():
            seconds[part].append(spent / row["ways"][FULL]["seconds"]["ttft"])
    found: dict[str, Any] = {
        "right": mean("right"),
        "share": {part: round(fmean(of), 4) for part, of in seconds.items()},
    }
    if name != FULL:
        found |= {
            "kl": mean("kl", 4),
            "first": mean("first"),
            "agreement": mean("agreement"),
            "charged": mean("charged"),
        }
        found |= {
            "closed": round(fmean(closed(_gaps(rows, name)) for rows in tasks), 3),
            "interval": interval(tasks, name),
        }
    return found


def closed(gaps: Sequence[Gap]) -> float:
    """Return how much of the gap between blind reuse and full prefill a way closes."""
    return 1 - sum(way for way, _ in gaps) / max(sum(blind for _, blind in gaps), 1e-9)


def interval(tasks: list[list[Row]], name: str) -> tuple[float, float]:
    """Return the 5th and the 95th percentile of the gap closed, over resampled prompts of each task."""
    draw, gaps = random.Random(0), [_gaps(rows, name) for rows in tasks]
    found = sorted(fmean(closed(draw.choices(task, k=len(task))) for task in gaps) for _ in range(RESAMPLED))
    return round(found[RESAMPLED // 20], 3), round(found[-RESAMPLED // 20 - 1], 3)


def _gaps(rows: list[Row], name: str) -> list[Gap]:
    return list(zip(_of(rows, name, "kl"), _of(rows, BLIND, "kl"), strict=True))


def _of(rows: list[Row], name: str, field: str) -> list[float]:
    return [row["ways"][name][field] for row in rows]
