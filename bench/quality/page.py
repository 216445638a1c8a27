"""Pages in one HTML file each: of a run, with a plot and a table for each task and prompts with the tokens that were
chosen; and of several models, with a plot for each kind of prompts.
"""

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmc.demo.page import script_data, write_filled
from quality.rows import MEAN, Row
from quality.ways import BLIND, FULL, ROUNDED, family

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1060, 300, 52, 250, 10, 34
COLORS = ("#0f766e", "#c2410c", "#1d4ed8", "#7e22ce", "#a16207", "#be185d", "#4d7c0f", "#0e7490", "#57534e", "#b91c1c")
COLUMNS = ("kl", "closed", "first", "agreement", "right", "charged")
SHARES = ("ttft", "question", "scores", "choice", "shift")
LEAST_PLOTTED = -0.2  # A way that closes less is drawn at the plot's lower edge.
TEMPLATE = Path(__file__).with_name("page.html")


def write_page(path: Path, found: dict[str, Any], groups: dict[str, list[Row]], best: str, machine: str) -> None:
    """Write the page; `best` is the way of the default settings. Every text in it is escaped."""
    order = sorted(found, key=lambda group: not group.startswith(MEAN))
    pictured = [[row for row in rows if "chosen" in row] for rows in groups.values()]
    prompts = [_prompt(rows[0], best) for rows in pictured if rows]  # one of each task, so that the page stays small
    contents = {
        "MACHINE": html.escape(machine),
        "GROUPS": "".join(_group(group, found[group], best) for group in order),
        "PROMPTS": script_data(prompts),
    }
    write_filled(path, TEMPLATE, contents)


def write_models(path: Path, by_kind: Mapping[str, Mapping[str, dict[str, Any]]], best: str, machine: str) -> None:
    """Write the page of several models: `by_kind` has the numbers of each kind of prompts, by model.

    `best` is the way of the default settings. The table has its numbers, and the plots have other ratios, too.
    """
    models = list(dict.fromkeys(model for of in by_kind.values() for model in of))
    plots = []
    for kind, of in by_kind.items():
        ways = {
            f"{model} {way.rpartition(' ')[2]}": numbers
            for model, found in of.items()
            for way, numbers in found["ways"].items()
            if family(way) == family(best)
        }
        counts = (f"{model}: {found['prompts']} prompts of {found['tokens']} tokens" for model, found in of.items())
        plots.append(f"<h2>{html.escape(kind)}</h2><p class='note'>{html.escape('; '.join(counts))}</p>{_plot(ways)}")
    contents = {
        "MACHINE": html.escape(machine),
        "GROUPS": _table_of_models(by_kind, models, best) + "".join(plots),
        "PROMPTS": "[]",
    }
    write_filled(path, TEMPLATE, contents)


def _table_of_models(by_kind: Mapping[str, Mapping[str, dict[str, Any]]], models: Sequence[str], best: str) -> str:
    head = "".join(f"<th>{html.escape(model)}</th>" for model in models)
    rows = []
    for kind, of in by_kind.items():
        cells = []
        for model in models:
            way = of[model]["ways"].get(best) if model in of else None
            text = "{:.1%}, KL {:.3f}, first {:.0%}".format(way["closed"], way["kl"], way["first"]) if way else ""
            cells.append(f"<td>{text}</td>")
        rows.append(f"<tr><td>{html.escape(kind)}</td>{''.join(cells)}</tr>")
    note = f"<p class='note'>{html.escape(best)}: gap closed, KL divergence, first tokens as full prefill's.</p>"
    return f"{note}<table><thead><tr><th>prompts</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _group(name: str, numbers: dict[str, Any], best: str) -> str:
    ways = {way: of for way, of in numbers["ways"].items() if way != FULL}
    full = numbers["ways"][FULL]["right"]
    note = f"{numbers['prompts']} prompts of {numbers['tokens']} tokens; full prefill is right in {full:.0%}."
    if not numbers.get("qualifies", True):
        note += " Full prefill is right too rarely, or blind reuse too often, for a main task."
    return f"<h2>{html.escape(name)}</h2><p class='note'>{note}</p>{_plot(ways)}{_table(ways, best)}"


def _table(ways: dict[str, Any], best: str) -> str:
    head = "".join(f"<th>{column}</th>" for column in ("way", *COLUMNS, *(f"{part} / full" for part in SHARES)))
    rows = []
    for name, way in ways.items():
        cells = [f"{way[column]:.3f}" for column in COLUMNS]
        cells[1] += " [{:.2f}, {:.2f}]".format(*way["interval"])
        cells += [f"{way['share'][part]:.3f}" if part in way["share"] else "" for part in SHARES]
        mark = " class='default'" if name == best else ""
        rows.append(f"<tr{mark}><td>{html.escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _plot(ways: dict[str, Any]) -> str:
    """Return gap closed over the charged budget as SVG, with a line for each strategy."""
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, way in ways.items():
        if name not in (BLIND, ROUNDED):
            lines[family(name)].append(way)
    reach = max([way["charged"] for points in lines.values() for way in points], default=0.1) * 1.08 or 0.1

    def x(charged: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * charged / reach

    def y(closed: float) -> float:
        share = (max(closed, LEAST_PLOTTED) - LEAST_PLOTTED) / (1 - LEAST_PLOTTED)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = []
    for tick in range(-2, 11, 2):
        at = y(tick / 10)
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{at:.1f}' y2='{at:.1f}' stroke='#e5e5e5'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{at + 4:.1f}' text-anchor='end'>{tick * 10} %</text>")
    for step in range(int(reach / 0.05) + 1):
        at = f"x='{x(step * 0.05):.1f}' y='{HEIGHT - 18}'"
        parts.append(f"<text {at} text-anchor='middle'>{step * 0.05:.2f}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f"<text x='{middle}' y='{HEIGHT - 3}' text-anchor='middle'>charged budget</text>")
    for number, (name, points) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        points.sort(key=lambda way: way["charged"])
        joined = " ".join(f"{x(way['charged']):.1f},{y(way['closed']):.1f}" for way in points)
        parts.append(f"<polyline points='{joined}' fill='none' stroke='{color}' stroke-width='1.8'/>")
        for way in points:
            at, (low, high) = x(way["charged"]), way["interval"]
            bar = f"x1='{at:.1f}' x2='{at:.1f}' y1='{y(low):.1f}' y2='{y(high):.1f}'"
            parts.append(f"<line {bar} stroke='{color}' opacity='.4' stroke-width='3'/>")
            parts.append(f"<circle cx='{at:.1f}' cy='{y(way['closed']):.1f}' r='3.2' fill='{color}'/>")
        legend = TOP + 10 + 18 * number
        parts.append(f"<rect x='{WIDTH - RIGHT + 20}' y='{legend - 8}' width='12' height='8' fill='{color}'/>")
        parts.append(f"<text x='{WIDTH - RIGHT + 38}' y='{legend}'>{html.escape(name)}</text>")
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='100%' role='img'>{''.join(parts)}</svg>"


def _prompt(row: Row, best: str) -> dict[str, Any]:
    deepest = max(first for changes in row["chosen"].values() for first, _ in changes)
    known = {key: row[key] for key in ("key", "question", "pieces", "documents", "chosen")}
    return known | {"best": best, "layers": deepest + 1}
