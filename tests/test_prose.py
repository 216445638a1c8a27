"""`tools/prose.py` lists what differs from the rules of CONTRIBUTING.md, and decides nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools/prose.py"
MODULE = '''"""Let chunks go."""

SLOTS = 3  # nobody reads them

def read(log, path):
    """Return the bytes of a file."""
    log.warning("the body is no JSON")
    raise ValueError("a number is wanted")
'''
PAGE = (
    """# A page behind another one

A slot that is taken again
after its lease has ended.

```sh
lmc behind
```

The word "behind" and `nobody` are quoted. So many are not.
"""
    + "This sentence has word"
    + " after word" * 12
    + "."
)


def listed(path: Path, *options: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, TOOL, *options, path], capture_output=True, text=True, check=False)
    return done.returncode, [line.removeprefix(f"{path}:").rsplit(": ", 1)[0] for line in done.stdout.splitlines()]


def test_it_reads_docstrings_comments_and_messages(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    assert listed(tmp_path / "module.py")[1] == [
        "1: a docstring begins with 'Let'",
        "3: 'nobody'",
        "7: 'is no'",
        "8: 'is wanted'",
    ]


def test_it_reads_sentences_of_documents_and_no_code(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    places = listed(tmp_path / "page.md")[1]
    assert places == ["10: 'So many'", "10: 28 words in a sentence"]


@pytest.mark.parametrize(("options", "status"), [((), 0), (("--strict",), 1)])
def test_only_strict_fails(tmp_path: Path, options: tuple[str, ...], status: int) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    assert listed(tmp_path / "module.py", *options)[0] == status
