"""Decides from the measured numbers whether blending is worth it, and describes the result."""

from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean, median, stdev
from typing import Any

import yaml

from lmc.commands.calibrate.measure import BLIND, RATIOS, Measured, Numbers
from lmc.commands.calibrate.prompts import ANSWER
from lmc.config.settings import Settings

LEAST_GAIN = 0.1  # the mean gain must be above this many nats per token
SURE = 3.0  # the mean gain must be above this many standard errors
FASTER = 0.9  # TTFT must be at most this share of full prefill's


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
    return bool(fmean(gains) > max(LEAST_GAIN, SURE * error))


def judge(found: Measured, target: float) -> Verdict:
    """Return the smallest ratio that reaches the target, as all larger ratios must, if its TTFT is short enough."""
    if not reads_documents(found.gains):
        gain = f"documents raise the log-probability of right answers by {fmean(found.gains):.2f} a token"
        return Verdict(ratio=None, reason=f"the model does not read the documents ({gain})")
    good: list[float] = []
    for ratio in sorted(RATIOS, reverse=True):  # A small ratio may reach the target by chance.
        if found.ways[ratio].agreement < target:
            break
        good.append(ratio)
    if not good:
        most = f"at {max(RATIOS):g} {agreement_in_words(found.ways[max(RATIOS)])}"
        return Verdict(ratio=None, reason=f"no ratio reaches an agreement of {target:.1%}: {most}")
    wanted = good[-1]
    part = found.ways[wanted].ttft / found.full_ttft
    if part > FASTER:  # Larger ratios take longer.
        spent = f"its TTFT is {part:.0%} of full prefill's"
        return Verdict(ratio=None, reason=f"ratio {wanted:g} reaches {target:.1%}, and no time is gained: {spent}")
    reached = f"{agreement_in_words(found.ways[wanted])}, and TTFT is {part:.0%} of full prefill's"
    return Verdict(ratio=wanted, reason=reached)


def agreement_in_words(way: Numbers) -> str:
    """Return in words how well the answers of a ratio agree with full prefill's."""
    return f"{way.tokens_same:.1%} of the tokens and {way.first_same:.0%} of the first tokens are full prefill's"


def report_of(model: str, found: Measured, verdict: Verdict, target: float, settings: Settings) -> dict[str, Any]:
    """Return the verdict, and the numbers at its ratio, or at the largest ratio if blending is not worth it."""
    way = found.ways[max(RATIOS) if verdict.ratio is None else verdict.ratio]
    return {
        "model": model,
        "date": datetime.now(UTC).date().isoformat(),
        "worth_it": verdict.ratio is not None,
        "reason": verdict.reason,
        "ratio": verdict.ratio,
        "target": target,
        "agreement": round(way.agreement, 4),
        "kl": round(fmean(way.kl), 4),
        "speed_up": round(found.full_ttft / way.ttft, 2),
        "prompts": len(found.full),
        "settings": {"blend_method": settings.blend_method},
    }


def yaml_lines(settings: Settings, ratio: float) -> str:
    """Return the recommended settings as lines of a YAML file."""
    values = {"enable_blending": True, "blend_recompute_ratios": ratio, "blend_method": settings.blend_method}
    return yaml.safe_dump(values, sort_keys=False)


def heading(model: str, found: Measured, settings: Settings) -> str:
    """Return two sentences about the measurement."""
    way, count = settings.blend_method, len(found.full)
    prompts = f"{count} prompts of {median(found.tokens):.0f} tokens over documents that were learned before"
    gain = f"Documents raise the log-probability of right answers by {fmean(found.gains):.2f} a token"
    return f"{model}, {way}: {prompts}, and the first {ANSWER} tokens of full prefill's answers. {gain}."


def table(found: Measured) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the table, and a row for full prefill and for each ratio."""
    columns = ["way", "TTFT ms", "speed-up", "same tokens", "same first token", "KL", "gap closed"]
    rows = [["full prefill", f"{found.full_ttft * 1e3:.0f}", "1.0", "", "", "", ""]]
    blind = fmean(found.ways[BLIND].kl)
    for ratio, way in found.ways.items():
        kl = fmean(way.kl)
        rows.append(
            [
                "blind reuse" if ratio == BLIND else f"blend {ratio:g}",
                f"{way.ttft * 1e3:.0f}",
                f"{found.full_ttft / way.ttft:.1f}",
                f"{way.tokens_same:.1%}",
                f"{way.first_same:.0%}",
                f"{kl:.4f}",
                f"{1 - kl / blind:.0%}" if blind > 0 else "",
            ]
        )
    return columns, rows
