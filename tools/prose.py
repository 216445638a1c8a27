"""List prose that differs from the rules of CONTRIBUTING.md, as `file:line: what`.

    python tools/prose.py [--strict] [FILE ...]

It reads docstrings, comments, messages of errors and logs, and documents. It is a help and no law: with `--strict` it
exits with 1 if it lists something. Without files it reads all that git tracks, except tests, benchmarks and data.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = "lmc", "blend", "storage", "connectors", "docs", "tools"
DATA = "lmc/demo/real/", "lmc/demo/small_model/"
FIRST_WORDS = "Let", "Note", "Take", "Say", "Tell", "Look", "Make sure"
PHRASES = {
    r"\bis no\b": "say what it is",
    r"\b(?:is|are) wanted\b": "expected …",
    r"\bof which\b": "split the sentence",
    r"\bbehind\b": "after (in time)",
    r"\bbeside\b": "in addition to, next to",
    r"\bnobody\b": "name the subject",
    r"\bwhoever\b": "name the subject",
    r"\bso many\b": "give the number",
    r"\btime is over\b": "expired",
    r"\bwho asks\b": "caller",
    r"\blet go\b": "release",
    r"\bdocuments? (?:is|are) there\b": "stored",
}
MAX_WORDS = 25  # of a sentence in a document
LOGS = {"debug", "info", "warning", "error", "exception", "critical"}


def complaints(text: str, *, docstring: bool = False) -> Iterator[str]:
    """Yield what differs from the rules in a text."""
    if docstring and (first := re.match(rf"(?:{'|'.join(FIRST_WORDS)})\b", text)):
        yield f"a docstring begins with {first.group()!r}: begin with the effect"
    prose = re.sub(r"`[^`]*`", "", text)
    for pattern, better in PHRASES.items():
        if phrase := re.search(pattern, prose, re.IGNORECASE):
            yield f"{phrase.group()!r}: {better}"


def of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of docstrings, comments, and messages of errors and logs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node, clean=True):
                start = node.body[0].lineno
                for offset, line in enumerate(text.splitlines()):
                    yield from ((start + offset, what) for what in complaints(line, docstring=offset == 0))
        elif (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)) or is_log(node):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield from ((part.lineno, what) for what in complaints(part.value))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], what) for what in complaints(token.string))


def is_log(node: ast.AST) -> bool:
    """Return whether a node calls a logger."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGS


def of_document(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of a page in Markdown, without its code, tables and headings."""
    code, paragraph, start = False, "", 0
    for number, line in enumerate([*page.splitlines(), ""], 1):
        code ^= line.lstrip().startswith("```")
        skipped = code or not line.strip() or line.lstrip().startswith(("```", "|", "#")) or line.startswith("    ")
        if not skipped:
            yield from ((number, what) for what in complaints(re.sub(r'"[^"]*"', "", line)))
        if skipped or re.match(r"\s*(?:[-*]|\d+\.) ", line):
            yield from ((start, what) for what in long_sentences(paragraph))
            paragraph = ""
        if not skipped:
            start = start if paragraph else number
            paragraph += " " + line.strip()


def long_sentences(paragraph: str) -> Iterator[str]:
    """Yield a complaint for each sentence of more than `MAX_WORDS` words."""
    prose = re.sub(r"`[^`]*`|\([^()]*\)", "x", paragraph)
    for sentence in re.split(r"(?<=[.:;!?])\s", prose):
        if (count := len(sentence.split())) > MAX_WORDS:
            yield f"{count} words in a sentence: {' '.join(sentence.split()[:6])} …"


def tracked() -> list[Path]:
    """Return the files to read: documents, and modules of the package."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    wanted = (name for name in names if name.endswith((".py", ".md")) and not name.startswith(DATA))
    return [ROOT / name for name in wanted if "/" not in name or name.split("/")[0] in FOLDERS]


def main() -> int:
    """List what differs; return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--strict", action="store_true", help="exit with 1 if something is listed")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    given = parser.parse_args()
    count = 0
    for path in given.files or tracked():
        text = path.read_text()
        for line, what in sorted((of_python if path.suffix == ".py" else of_document)(text)):
            shown = path.relative_to(ROOT) if path.is_absolute() and path.is_relative_to(ROOT) else path
            sys.stdout.write(f"{shown}:{line}: {what}\n")
            count += 1
    sys.stderr.write(f"{count} places to reword\n")
    return int(given.strict and count > 0)


if __name__ == "__main__":
    raise SystemExit(main())
