"""The demo's page: the table, the answers, and pictures of some prompts, in one self-contained HTML file."""

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
        "WAYS": "".join(f"<th>{mode}</th>" for mode in (outcome.asked[0].ways if outcome.asked else ())),
        "ANSWERS": "".join(map(_answers, outcome.asked)),
        "DATA": script_data([picture.data() for picture in outcome.pictures]),
    }
    write_filled(path, TEMPLATE, contents)


def script_data(data: object) -> str:
    """Return data as JSON for a script of a page; no content can end the script."""
    return json.dumps(data).replace("<", "\\u003c")


def write_filled(path: Path, template: Path, contents: Mapping[str, str]) -> None:
    """Write a template with its placeholders {{NAME}} filled. Placeholders inside contents stay as they are."""
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: contents[match[1]], template.read_text(encoding="utf-8"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _answers(result: Asked) -> str:
    """Return a row of the table of answers; wrong ones have the class `wrong`."""
    question = result.example.question
    heading = f"<b>{html.escape(question.question)}</b><br>{html.escape(result.example.answer)}"
    lead = f"<i>{html.escape(question.lead)}</i> " if question.lead else ""
    cells = []
    for answer in result.ways.values():
        cost = f"{answer.seconds * 1e3:.0f} ms, {answer.computed:.0f} tokens computed, {answer.agreement:.0%} as full"
        mark = "" if answer.right else " class='wrong'"
        cells.append(f"<td{mark}>{lead}{html.escape(answer.sentence())}<small>{cost}</small></td>")
    return f"<tr><td>{heading}</td>{''.join(cells)}</tr>"
