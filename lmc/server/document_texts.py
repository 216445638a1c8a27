"""The texts of documents, for administrators. The server stores only tokens, and reads its clients' tokenizers."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

TOKENIZER_RETRY_SECONDS = 60.0  # An unreadable tokenizer is tried again after this time.


class DocumentTexts:
    """Decodes the tokens of models into text."""

    def __init__(self, tokenizers: Callable[[], Mapping[str, str]]) -> None:
        """`tokenizers` returns the path or hub name of each model's tokenizer, by the model's name."""
        self._tokenizers = tokenizers
        self._read: dict[str, tuple[Any, float]] = {}  # tokenizer (None if unreadable) and time of reading, by path

    def of(self, tokens: list[int], model: str) -> str | None:
        """Return the text of tokens; None if the model's tokenizer is missing or unreadable."""
        path = self._tokenizers().get(model, "")
        tokenizer, at = self._read.get(path, (None, float("-inf")))
        if tokenizer is None and path and time.monotonic() - at > TOKENIZER_RETRY_SECONDS:
            tokenizer = _read(path)
            self._read[path] = tokenizer, time.monotonic()
        return str(tokenizer.decode(tokens)) if tokenizer is not None else None


def _read(path: str) -> Any:
    """Return the tokenizer from a model's directory or from this host's copy of the hub; None if neither works."""
    try:
        from tokenizers import Tokenizer

        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(path, "tokenizer.json", local_files_only=True))
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - libraries raise errors of any type
        log.info("could not read the tokenizer of %s, documents are shown as tokens: %s", path, error)
        return None
