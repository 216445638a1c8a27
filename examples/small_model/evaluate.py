"""Scores of a model on the shipped documents: a full forward, and blind reuse of documents computed alone.

RoPE depends on distances only, so blind reuse (keys of a document computed alone, rotated to their new place) equals
one forward at the normal positions whose mask lets the tokens of a document see earlier tokens of the same document
only.
"""

import argparse
import random
from collections import Counter
from pathlib import Path

import corpus
import torch
from corpus import CHAINED, REFERRING, SELF, Document
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from vocabulary import prompt_ids, word_ids

from lmc.demo import SHIPPED

KINDS = (SELF, REFERRING, CHAINED)


def blind_mask(owners: list[int], documents: int) -> Tensor:
    """[1, 1, T, T], true where a row may look; pieces 1..documents see only themselves."""
    owner = torch.tensor(owners)
    inside = (owner >= 1) & (owner <= documents)
    may = torch.ones(len(owners), len(owners), dtype=torch.bool).tril()
    may &= ~inside[:, None] | (owner[:, None] == owner[None, :])
    return may[None, None]


def last_tokens(model: LlamaForCausalLM, prefix: Tensor, questions: Tensor, mask: Tensor | None) -> Tensor:
    """The id that follows each question, all questions of one prompt in one forward.

    prefix [T], questions [Q, n]. Each question follows its own copy of the prefix; rows are [T + n].
    """
    rows = torch.cat([prefix.expand(len(questions), -1), questions], dim=1)  # [Q, T + n]
    hidden = model.model(input_ids=rows, attention_mask=mask, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, -1]).argmax(-1)  # [Q]


def one_order(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: list[Document],
    rng: random.Random,
    per_kind: int,
) -> tuple[Counter[tuple[str, str]], int]:
    """Right answers and totals by (way, kind) for one order of documents, and the tokens of a prompt."""
    table = word_ids(tokenizer)
    asked = corpus.answers(documents)
    chosen = [row for kind in KINDS for row in rng.sample([row for row in asked if row[1] == kind], per_kind)]
    pieces = [corpus.SYSTEM, *(document.text for document in documents)]
    ids, owners = prompt_ids(tokenizer, [*pieces, chosen[0][0]])
    length = len(chosen[0][0].split())
    prefix = torch.tensor(ids[:-length])
    questions = torch.tensor([[table[word] for word in text.split()] for text, _, _ in chosen])
    wanted = torch.tensor([table[answer] for _, _, answer in chosen])
    counts: Counter[tuple[str, str]] = Counter()
    for way, mask in (("full", None), ("blind", blind_mask(owners, len(documents)))):
        right = last_tokens(model, prefix, questions, mask) == wanted
        for (_, kind, _), good in zip(chosen, right.tolist(), strict=True):
            counts[way, kind] += good
    return counts, len(ids)


@torch.no_grad()
def scores(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    orders: int,
    per_kind: int = 5,
    documents: int = 6,
    seed: int = 1,
) -> tuple[dict[str, float], list[int]]:
    """Per cent right by `way/kind` over random draws and orders of the shipped documents, and the prompt lengths."""
    rng = random.Random(seed)
    collection = corpus.shipped_documents()
    total: Counter[tuple[str, str]] = Counter()
    lengths = []
    model.eval()
    for _ in range(orders):
        counts, length = one_order(model, tokenizer, rng.sample(collection, documents), rng, per_kind)
        total += counts
        lengths.append(length)
    asked = orders * per_kind
    share = {f"{way}/{kind}": 100 * total[way, kind] / asked for way in ("full", "blind") for kind in KINDS}
    return share, sorted(lengths)


def report(result: dict[str, float], lengths: list[int], asked: int) -> str:
    low, middle, high = lengths[0], lengths[len(lengths) // 2], lengths[-1]
    lines = [f"{asked} questions a class; tokens of a prompt: {low} / {middle} / {high} (min/median/max)"]
    lines += [
        f"{kind:<10} full {result[f'full/{kind}']:6.1f} %   blind {result[f'blind/{kind}']:6.1f} %" for kind in KINDS
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED / "model")
    parser.add_argument("--orders", type=int, default=60)
    given = parser.parse_args()
    loaded = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    result, lengths = scores(loaded, AutoTokenizer.from_pretrained(given.model), orders=given.orders)
    print(report(result, lengths, given.orders * 5))
