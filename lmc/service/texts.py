"""The texts of documents, for people. The server has tokens only, and reads the tokenizers that its clients name."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class Texts:
    """Turns the tokens of a model into text."""

    def __init__(self, tokenizers: Callable[[], Mapping[str, str]]) -> None:
        """`tokenizers` returns where the tokenizer of each model lies, by the model's name."""
        self._tokenizers = tokenizers
        self._read: dict[str, Any] = {}  # by place; None for those that cannot be read

    def of(self, tokens: list[int], model: str) -> str:
        """Return a text, or the numbers of the tokens if there is no tokenizer."""
        place = self._tokenizers().get(model, "")
        if place not in self._read:
            self._read[place] = _read(place)
        tokenizer = self._read[place]
        return str(tokenizer.decode(tokens)) if tokenizer is not None else " ".join(map(str, tokens))


def _read(place: str) -> Any:
    """Return the tokenizer of a model in a directory, or of the hub if this host has it; None if that is not so."""
    if not place:
        return None
    try:
        from tokenizers import Tokenizer

        file = Path(place) / "tokenizer.json"
        if not file.exists():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(place, "tokenizer.json", local_files_only=True))
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - libraries raise whatever they like
        log.info("documents of %s are shown as tokens, because its tokenizer cannot be read: %s", place, error)
        return None
