"""The demo's page: the table, the answers, and pictures of some prompts, in one HTML file that needs nothing else."""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path

from lmc.demo.outcome import Asked, Outcome

TEMPLATE = Path(__file__).with_name("page.html")


def write_page(path: Path, outcome: Outcome) -> None:
    """Write the page; every text in it is escaped."""
    columns, rows = outcome.table()
    contents = {
        "HEADING": html.escape(outcome.heading()),
        "HEAD": "".join(f"<th>{html.escape(column)}</th>" for column in columns),
        "BODY": "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows),
        "WAYS": "".join(f"<th>{how}</th>" for how in (outcome.asked[0].ways if outcome.asked else ())),
        "ANSWERS": "".join(map(_answers, outcome.asked)),
        "DATA": script_data([picture.data() for picture in outcome.pictures]),
    }
    write_filled(path, TEMPLATE, contents)


def script_data(data: object) -> str:
    """Return data as a script of a page may have them: nothing in them ends the script."""
    return json.dumps(data).replace("<", "\\u003c")


def write_filled(path: Path, template: Path, contents: Mapping[str, str]) -> None:
    """Write a template with contents in its places, {{NAME}} each. What looks like a place in a content is none."""
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: contents[found[1]], template.read_text(encoding="utf-8"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _answers(asked: Asked) -> str:
    """Return a row of the table of answers; wrong ones have a class of their own."""
    question = asked.example.question
    asks = f"<b>{html.escape(question.question)}</b><br>{html.escape(asked.example.answer)}"
    lead = f"<i>{html.escape(question.lead)}</i> " if question.lead else ""
    cells = []
    for way in asked.ways.values():
        cost = f"{way.seconds * 1e3:.0f} ms, {way.computed:.0f} tokens computed, {way.agreement:.0%} as full"
        mark = "" if way.right else " class='wrong'"
        cells.append(f"<td{mark}>{lead}{html.escape(way.sentence())}<small>{cost}</small></td>")
    return f"<tr><td>{asks}</td>{''.join(cells)}</tr>"
