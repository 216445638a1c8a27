"""Calibrations: what `lmc calibrate` has found for models, by their identity, in the user's cache directory.

Connectors call `calibration_objection` at start. A file that cannot be read counts as empty.
"""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lmc.config import Settings
from lmc.small_files import replace_text, sole_writer, user_cache

log = logging.getLogger(__name__)

FILE = "calibrations.json"
# The settings on which the quality of a blend depends, beside the ratio.
FUSION = ("blend_strategy", "blend_check_layers", "blend_thresholds", "blend_correction", "blend_learn_prefix")


class Calibration(BaseModel):
    """The result of one calibration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[2] = 2  # Increased when blending, or how it is judged, has changed too much for earlier results.
    date: str
    worth_it: bool
    reason: str  # in words
    ratio: float | None  # the smallest that was good enough; none if blending is not worth it
    target: float  # the agreement that was asked for
    agreement: float | None  # at this ratio, or else at the largest
    kl: float | None
    speed_up: float | None  # of TTFT
    prompts: int
    settings: dict[str, Any]  # those of `FUSION`


def fusion_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that a calibration holds for, as they are written into its file."""
    return settings.model_dump(mode="json", include=set(FUSION))


def calibrations_file() -> Path:
    """Return where the calibrations of this user are kept."""
    return user_cache() / FILE


def calibration_of(model: str) -> Calibration | None:
    """Return the last calibration of the model with this identity, if there is one that can be read."""
    with suppress(ValidationError):
        return Calibration.model_validate(_kept().get(model))
    return None


def keep_calibration(model: str, calibration: Calibration) -> None:
    """Write the calibration of a model in place of its last one; raise `OSError` if that is not possible."""
    with sole_writer(calibrations_file()):
        everything = {**_kept(), model: calibration.model_dump(mode="json")}
        replace_text(calibrations_file(), json.dumps(everything, indent=1) + "\n")


def calibration_objection(settings: Settings, model: str, checkpoint: str | Path | None) -> str:
    """Return why a model must not be blended, in words; nothing if it may be, or if blending is off in any case.

    `model` is its identity and `checkpoint` its directory or id. It logs a warning if the model was never calibrated,
    or otherwise than it is used now. A model without a checkpoint cannot be calibrated, so there is no warning for it.
    """
    if not settings.enable_blending or settings.blend_calibration == "ignore":
        return ""
    found, command = calibration_of(model), f"lmc calibrate {checkpoint} --documents DIR"
    if found is None:
        if checkpoint is not None:
            log.warning(
                "this model was never calibrated, so it is not known whether its blends are good: `%s` measures that "
                "(blend_calibration: ignore turns this line off)",
                command,
            )
        return ""
    used = fusion_settings(settings)
    changed = [name for name in FUSION if used[name] != found.settings.get(name)]
    if changed:
        log.warning("this model was calibrated with another %s: run `%s` again", " and ".join(changed), command)
        return ""
    if not found.worth_it:
        said = f"lmc calibrate found on {found.date} that it is not worth it for this model: {found.reason}"
        return f"{said} (blend_calibration: ignore blends all the same)"
    if found.ratio is not None and settings.blend_recompute_ratios[-1] < found.ratio:
        ratios = settings.blend_recompute_ratios[-1], found.ratio
        log.warning("blend_recompute_ratios is %g, and lmc calibrate found that this model needs %g", *ratios)
    return ""


def _kept() -> dict[str, Any]:
    with suppress(OSError, ValueError):
        kept = json.loads(calibrations_file().read_text())
        return kept if isinstance(kept, dict) else {}
    return {}
