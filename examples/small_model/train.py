"""Makes the tokenizer and the weights from nothing: `python train.py --out model`.

What decides whether the circuit forms in minutes:
- token embeddings with unit variance, an untied head, and one random vector shared by all embeddings. Without the
shared
  part no query is the same for all words, and the probe of a head that looks one token back had a loss of 1.6 after
  300 steps, with it 0.1;
- a fast rate for the embeddings (0.03; at 0.003 the same head was not there after 350 steps);
- probes, in training only: the subject at every value, the antecedent at every reference. They make the model bind a
  reference where it stands, while the document is read, and not when the question comes;
- a curriculum from two short documents to prompts longer than the shipped ones.
"""

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import CHAINED, FORMER, SEPARATOR, THEM
from curriculum import IGNORED, KINDS, PROBED, SUBJECT, Batch, Stage, Writer
from evaluate import report, scores
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vocabulary import save, train_tokenizer, word_ids

PROBED_LAYER = {SUBJECT: 1, THEM: 3, FORMER: 4}  # layers already passed; `former` needs one more look-up than `them`
PROBE_WEIGHT, TEXT_WEIGHT, TEXT_SHARE = 1.0, 0.1, 0.1
MATRIX_RATE, TABLE_RATE, OTHER_RATE = 0.02, 0.03, 3e-3
WARM_STEPS, DECAY_FROM = 30, 0.25

STAGES = (
    Stage(label="bare", steps=450, tokens=3500, documents=(2, 3), filler=(0, 0), questions=30, bare=True),
    Stage(label="two short", steps=350, tokens=3500, documents=(2, 3), filler=(2, 4), questions=16),
    Stage(label="few short", steps=500, tokens=4500, documents=(2, 5), filler=(2, 8), questions=20),
    Stage(label="more", steps=450, tokens=6000, documents=(2, 6), filler=(3, 12), questions=24),
    Stage(label="long", steps=500, tokens=7500, documents=(3, 8), filler=(6, 14), questions=30),
)

REFINING = (Stage(label="refine", steps=300, tokens=7000, documents=(5, 7), filler=(11, 14), questions=36),)
REFINING_SHARE, REFINING_CHAINED = 0.25, 4.0  # of the learning rates above; what a chained answer weighs


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.02 if "head" in name or "o_proj" in name or "down_proj" in name else 0.06)
    table = torch.randn(config.vocab_size, config.hidden_size)
    model.model.embed_tokens.weight.data = table + torch.randn(config.hidden_size)
    return model


class Probes(nn.Module):
    """Linear readings of the hidden state after a layer: at a value its subject, at a reference its antecedent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.ModuleDict({word: nn.Linear(width, len(classes)) for word, classes in PROBED.items()})

    def loss(self, hidden: tuple[Tensor, ...], targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cross entropy by probe, for those that have something to read in this batch."""
        found = {}
        for word, layer in PROBED_LAYER.items():
            at = targets[word] != IGNORED
            if at.any():
                seen = F.rms_norm(hidden[layer][at], hidden[layer].shape[-1:])
                found[word] = F.cross_entropy(self.read[word](seen), targets[word][at])
        return found


def losses(
    model: LlamaForCausalLM, probes: Probes | None, batch: Batch, chained: float
) -> tuple[Tensor, dict[str, float]]:
    """Answers count fully; a tenth of all other tokens keeps the head honest at a small price."""
    output = model.model(input_ids=batch.ids, use_cache=False, output_hidden_states=True)
    final = output.last_hidden_state  # [B, T, C]
    asked = batch.answers != IGNORED
    sampled = (batch.text != IGNORED) & ~asked & (torch.rand(batch.text.shape) < TEXT_SHARE)
    logits = model.lm_head(final[asked])  # [answers, V]
    weight = torch.where(batch.kinds[asked] == KINDS.index(CHAINED), chained, 1.0)
    answer = (weight * F.cross_entropy(logits, batch.answers[asked], reduction="none")).sum() / weight.sum()
    text = F.cross_entropy(model.lm_head(final[sampled]), batch.text[sampled])
    probed = probes.loss(output.hidden_states, batch.probes) if probes else {}
    total = answer + TEXT_WEIGHT * text + PROBE_WEIGHT * sum(probed.values())
    right = (logits.argmax(-1) == batch.answers[asked]).float()
    parts = {kind: right[batch.kinds[asked] == number].mean() for number, kind in enumerate(KINDS)}
    parts |= {"answer": answer, "text": text} | probed
    return total, {name: part.item() for name, part in parts.items() if not part.isnan()}


def optimizers(model: LlamaForCausalLM, probes: Probes | None) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings (fast, they start wide), head, norms and probes."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    table = [model.model.embed_tokens.weight]
    chosen = {id(weight) for weight in matrices + table}
    others = [
        weight for weight in [*model.parameters(), *(probes.parameters() if probes else [])] if id(weight) not in chosen
    ]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(table, lr=TABLE_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(step: int, steps: int) -> float:
    """Short warm-up, constant, then linear to zero; the descent to zero is worth the last per cents."""
    return min(1.0, (step + 1) / WARM_STEPS, (steps - step) / (steps * (1 - DECAY_FROM)))


def train(
    model: LlamaForCausalLM,
    probes: Probes | None,
    writer: Writer,
    stages: tuple[Stage, ...],
    share: float,
    rng: random.Random,
) -> int:
    """Runs the stages in turn and returns the number of tokens seen."""
    tools = optimizers(model, probes)
    peaks = [share * tool.param_groups[0]["lr"] for tool in tools]
    weights = [weight for tool in tools for weight in tool.param_groups[0]["params"]]
    steps, step, tokens, start = sum(stage.steps for stage in stages), 0, 0, time.monotonic()
    smooth: dict[str, float] = {}
    model.train()
    for stage in stages:
        for _ in range(stage.steps):
            for tool, peak in zip(tools, peaks, strict=True):
                tool.param_groups[0]["lr"] = peak * rate(step, steps)
                tool.zero_grad(set_to_none=True)
            batch = writer.batch(rng, stage)
            total, parts = losses(model, probes, batch, 1.0 if probes else REFINING_CHAINED)
            total.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            for tool in tools:
                tool.step()
            step, tokens = step + 1, tokens + batch.ids.numel()
            smooth |= {name: 0.9 * smooth.get(name, part) + 0.1 * part for name, part in parts.items()}
            if step % 50 == 0:
                shown = "  ".join(f"{name} {value:.3f}" for name, value in smooth.items())
                seconds = time.monotonic() - start
                print(
                    f"{stage.label:<10} {step}/{steps} {seconds:.0f} s {tokens / seconds:.0f} tokens/s  {shown}",
                    flush=True,
                )
    return tokens


def main(out: Path, start: Path | None, seed: int) -> None:
    """The whole curriculum, or, from the weights in `start`, the last stage without probes: fresh ones would
    disturb.
    """
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    save(tokenizer, out)
    separator = tokenizer.encode(SEPARATOR, add_special_tokens=False)
    writer = Writer(word_ids(tokenizer), separator, tokenizer.eos_token_id, tokenizer.pad_token_id)
    began = time.monotonic()
    if start is None:
        model = new_model(tokenizer)
        tokens = train(model, Probes(model.config.hidden_size), writer, STAGES, 1.0, random.Random(seed))
    else:
        model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
        tokens = train(model, None, writer, REFINING, REFINING_SHARE, random.Random(seed + 1))
    print(f"{tokens} tokens in {time.monotonic() - began:.0f} s")
    model.save_pretrained(out)
    result, lengths = scores(model, tokenizer, orders=60)
    print(report(result, lengths, 60 * 5))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train the small model from nothing")
    parser.add_argument("--out", type=Path, default=Path("model"))
    parser.add_argument("--start", type=Path, help="refine the weights in this folder instead of starting from nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    main(given.out, given.start, given.seed)
