"""The texts of documents, for people. The server has tokens only, and reads the tokenizers that its clients name."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0  # after which a tokenizer that could not be read is tried again


class Texts:
    """Turns the tokens of a model into text."""

    def __init__(self, tokenizers: Callable[[], Mapping[str, str]]) -> None:
        """`tokenizers` returns where the tokenizer of each model lies, by the model's name."""
        self._tokenizers = tokenizers
        self._read: dict[str, tuple[Any, float]] = {}  # by place, and when; None for those that could not be read

    def of(self, tokens: list[int], model: str) -> str | None:
        """Return a text; None if there is no tokenizer, or none that can be read."""
        place = self._tokenizers().get(model, "")
        tokenizer, at = self._read.get(place, (None, float("-inf")))
        if tokenizer is None and place and time.monotonic() - at > AGAIN_SECONDS:
            tokenizer = _read(place)
            self._read[place] = tokenizer, time.monotonic()
        return str(tokenizer.decode(tokens)) if tokenizer is not None else None


def _read(place: str) -> Any:
    """Return the tokenizer of a model in a directory, or of the hub if this host has it; None if that is not so."""
    try:
        from tokenizers import Tokenizer

        file = Path(place) / "tokenizer.json"
        if not file.is_file():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(place, "tokenizer.json", local_files_only=True))
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - libraries raise whatever they like
        log.info("documents of %s are shown as tokens, because its tokenizer cannot be read: %s", place, error)
        return None
