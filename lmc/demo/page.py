"""The demo's page: the table, and a picture of each example prompt, in one HTML file that needs nothing else."""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("page.html")
FULL_SCALE = 1.0  # relative deviation ‖Δk‖/‖k‖ at which the colour is darkest


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One prompt as a picture of layers × tokens."""

    title: str
    answered: str
    tokens: list[str]
    documents: list[tuple[str, int, int]]  # name and half-open token range
    deviation: list[list[float]]  # per layer, per token: ‖Δk‖/‖k‖ of blindly reused keys against full prefill's
    recomputed: list[list[int]]  # per layer, positions of reused tokens that were computed anew

    def data(self) -> dict[str, Any]:
        """Return the data for the page's script, with one byte for each cell."""
        cells = bytes(min(255, round(255 * value / FULL_SCALE)) for row in self.deviation for value in row)
        return {
            "title": self.title,
            "answered": self.answered,
            "tokens": self.tokens,
            "documents": self.documents,
            "layers": len(self.deviation),
            "cells": base64.b64encode(cells).decode(),
            "recomputed": self.recomputed,
        }


def write_page(
    path: Path, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]], pictures: Sequence[Picture]
) -> None:
    """Write the page; every text in it is escaped."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    data = json.dumps([picture.data() for picture in pictures]).replace("</", "<\\/")  # no text may end the script
    page = TEMPLATE.read_text()
    for name, content in (("HEADING", html.escape(heading)), ("HEAD", head), ("BODY", body), ("DATA", data)):
        page = page.replace("{{" + name + "}}", content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
