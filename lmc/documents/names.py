"""The names of a document. Files with the same text are one document, which has the name of each file.

Records, messages and the lists of pins keep the names as one text, with a name on each line.
"""

from collections.abc import Iterable

from lmc.keys import LONGEST_NAME


def joined_names(names: Iterable[str]) -> str:
    """Return names as one text, each once. Those that would make it longer than `LONGEST_NAME` are left out."""
    joined = ""
    for name in filter(None, dict.fromkeys(names)):
        longer = f"{joined}\n{name}" if joined else name[:LONGEST_NAME]
        joined = longer if len(longer) <= LONGEST_NAME else joined
    return joined


def names_in(name: str) -> list[str]:
    """Return the names in a text of `joined_names`."""
    return name.split("\n") if name else []
