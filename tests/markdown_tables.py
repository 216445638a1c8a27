"""The rows of the tables of a page in Markdown."""

from markdown_it import MarkdownIt


def table_rows(page: str) -> list[str]:
    """Return each row of each table, its cells joined by " | "."""
    rows: list[str] = []
    cells: list[str] | None = None
    for token in MarkdownIt("commonmark").enable("table").parse(page):
        if token.type == "tr_open":
            cells = []
        elif token.type == "tr_close":
            rows.append(" | ".join(filter(None, cells or [])))
            cells = None
        elif token.type == "inline" and cells is not None:
            cells.append(" ".join(token.content.split()))
    return rows
