"""Decides from the measured numbers whether blending is worth it, and describes the result."""

from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean, median, stdev
from typing import Any

import yaml

from lmc.commands.calibrate.measure import BLIND, RATIOS, Measured, Numbers
from lmc.commands.calibrate.prompts import ANSWER_TOKENS
from lmc.config.settings import Settings

MIN_GAIN = 0.1  # the mean gain must be above this many nats per token
MIN_STANDARD_ERRORS = 3.0  # the mean gain must be above this many standard errors
MAX_TTFT_SHARE = 0.9  # TTFT must be at most this share of full prefill's


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The smallest sufficient ratio, or None, and the reason in words."""

    ratio: float | None
    reason: str


def reads_documents(gains: list[float]) -> bool:
    """Return whether a model uses the documents.

    `gains` has for each prompt the increase of the right answer's log-probability by its documents. With random
    weights, documents also change predictions, even the most likely token, but not towards the right answer.
    """
    if len(gains) < 2:
        return False
    error = stdev(gains) / len(gains) ** 0.5
    return bool(fmean(gains) > max(MIN_GAIN, MIN_STANDARD_ERRORS * error))


def judge(measured: Measured, target: float) -> Verdict:
    """Return the smallest ratio that reaches the target, as all larger ratios must, if its TTFT is short enough."""
    if not reads_documents(measured.gains):
        gain = f"documents raise the log-probability of right answers by {fmean(measured.gains):.2f} a token"
        return Verdict(ratio=None, reason=f"the model does not use the documents ({gain})")
    good: list[float] = []
    for ratio in sorted(RATIOS, reverse=True):  # A small ratio may reach the target by chance.
        if measured.ways[ratio].agreement < target:
            break
        good.append(ratio)
    if not good:
        best = f"at {max(RATIOS):g} {agreement_in_words(measured.ways[max(RATIOS)])}"
        return Verdict(ratio=None, reason=f"no ratio reaches an agreement of {target:.1%}: {best}")
    smallest = good[-1]
    part = measured.ways[smallest].ttft / measured.full_ttft
    if part > MAX_TTFT_SHARE:  # Larger ratios take longer.
        spent = f"its TTFT is {part:.0%} of full prefill's"
        return Verdict(ratio=None, reason=f"ratio {smallest:g} reaches {target:.1%}, but saves no time: {spent}")
    reached = f"{agreement_in_words(measured.ways[smallest])}, and TTFT is {part:.0%} of full prefill's"
    return Verdict(ratio=smallest, reason=reached)


def agreement_in_words(numbers: Numbers) -> str:
    """Return in words how well the answers of a ratio agree with full prefill's."""
    return f"{numbers.tokens_same:.1%} of tokens and {numbers.first_same:.0%} of first tokens agree with full prefill"


def report_of(model: str, measured: Measured, verdict: Verdict, target: float, settings: Settings) -> dict[str, Any]:
    """Return the verdict, and the numbers at its ratio, or at the largest ratio if blending is not worth it."""
    numbers = measured.ways[max(RATIOS) if verdict.ratio is None else verdict.ratio]
    return {
        "model": model,
        "date": datetime.now(UTC).date().isoformat(),
        "worth_it": verdict.ratio is not None,
        "reason": verdict.reason,
        "ratio": verdict.ratio,
        "target": target,
        "agreement": round(numbers.agreement, 4),
        "kl": round(fmean(numbers.kl), 4),
        "speed_up": round(measured.full_ttft / numbers.ttft, 2),
        "prompts": len(measured.full),
        "settings": {"blend_method": settings.blend_method},
    }


def yaml_lines(settings: Settings, ratio: float) -> str:
    """Return the recommended settings as lines of a YAML file."""
    values = {"enable_blending": True, "blend_recompute_ratios": ratio, "blend_method": settings.blend_method}
    return yaml.safe_dump(values, sort_keys=False)


def heading(model: str, measured: Measured, settings: Settings) -> str:
    """Return two sentences about the measurement."""
    method, count = settings.blend_method, len(measured.full)
    prompts = f"{count} prompts of {median(measured.tokens):.0f} tokens over documents that were learned before"
    gain = f"Documents raise the log-probability of right answers by {fmean(measured.gains):.2f} a token"
    return f"{model}, {method}: {prompts}, and the first {ANSWER_TOKENS} tokens of full prefill's answers. {gain}."


def table(measured: Measured) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the table, and a row for full prefill and for each ratio."""
    columns = ["mode", "TTFT ms", "speed-up", "same tokens", "same first token", "KL", "gap closed"]
    rows = [["full prefill", f"{measured.full_ttft * 1e3:.0f}", "1.0", "", "", "", ""]]
    blind = fmean(measured.ways[BLIND].kl)
    for ratio, numbers in measured.ways.items():
        kl = fmean(numbers.kl)
        rows.append(
            [
                "blind reuse" if ratio == BLIND else f"blend {ratio:g}",
                f"{numbers.ttft * 1e3:.0f}",
                f"{measured.full_ttft / numbers.ttft:.1f}",
                f"{numbers.tokens_same:.1%}",
                f"{numbers.first_same:.0%}",
                f"{kl:.4f}",
                f"{1 - kl / blind:.0%}" if blind > 0 else "",
            ]
        )
    return columns, rows
