"""The sentences of a page in Markdown."""

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt

END = re.compile(r"(?<=[.!?])[)*]*\s+(?=[A-Z`*(\[]|lmc |vLLM )")  # of a sentence, behind which another one begins


def sentences(page: str) -> list[str]:
    """Return every sentence of a page, and every row of its tables, without headings and code."""
    return [sentence for text in _texts(page) for sentence in END.split(text)]


def _texts(page: str) -> Iterator[str]:
    """Return paragraphs, items and rows, each as one line."""
    cells: list[str] | None = None  # of the row in which we are
    heading = False
    for token in MarkdownIt("commonmark").enable("table").parse(page):
        text = " ".join(token.content.split())
        if token.type == "tr_open":
            cells = []
        elif token.type == "tr_close":
            yield " | ".join(filter(None, cells or []))
            cells = None
        elif token.type in ("heading_open", "heading_close"):
            heading = token.type == "heading_open"
        elif token.type == "inline" and cells is not None:
            cells.append(text)
        elif token.type == "inline" and not heading:
            yield text
