"""The tokenizer (byte-level BPE, one token for every word of the grammar) and the piecewise ids of a prompt."""

import json
from collections.abc import Sequence
from pathlib import Path

import corpus
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
LARGEST_VOCABULARY = 1024


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Trains on the list of words, not on running text: rare subjects must become one token as surely as `the`.

    All bytes are in the alphabet, so no text is unknown. White space of any kind counts as one space: a document may
    then have one sentence a line and a word still has the same id at the start of a line as inside it.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus.every_word(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    word_ids(tokenizer)
    return tokenizer


def word_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The one id of every word; training builds its rows from this table instead of encoding text again and again."""
    table = {}
    for word in corpus.every_word():
        ids = tokenizer.encode(word, add_special_tokens=False)
        assert len(ids) == 1, f"{word!r} takes {len(ids)} tokens"
        table[word] = ids[0]
    return table


def prompt_ids(tokenizer: PreTrainedTokenizerFast, pieces: Sequence[str]) -> tuple[list[int], list[int]]:
    """Ids of `pieces` (system, documents, question), each encoded by itself, and for every id the number of its piece.

    A separator has the number -1.
    """
    separator = tokenizer.encode(corpus.SEPARATOR, add_special_tokens=False)
    ids: list[int] = []
    owners: list[int] = []
    for number, piece in enumerate(pieces):
        if number:
            ids += separator
            owners += [-1] * len(separator)
        own = tokenizer.encode(piece.strip(), add_special_tokens=False)
        ids += own
        owners += [number] * len(own)
    return ids, owners


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the tokenizer; the class gets the name that transformers 4 and 5 both know (5 writes one of its own)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    settings = folder / "tokenizer_config.json"
    known = json.loads(settings.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
