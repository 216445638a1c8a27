"""Estimates how fast the engine prefills, from the times at which its steps are planned.

The scheduler's side has no other times.
"""

from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from lmc.storage.cost_model import CostModel

PROMPTS = 0.9  # A step with this share of prompt tokens counts as a prefill.
LIKE = 0.1  # relative difference up to which two steps count as equal; size of a small step relative to a large step


@dataclass(slots=True, kw_only=True)
class EngineStep:
    """What the engine computes in one step."""

    at: float  # time at which the step was planned
    alone: bool  # lmc's workers compute nothing in this step.
    requests: Set[str]
    tokens: int
    prompts: int = 0  # number of prompt tokens
    reach: int = 0  # sum over prompt tokens of a length: a whole prompt of it costs the same per token

    @property
    def prefills(self) -> bool:
        """Whether lmc's workers compute nothing in the step, and nearly all of its tokens are prompt tokens."""
        return self.alone and self.prompts >= max(1, PROMPTS * self.tokens)

    @property
    def is_half(self) -> bool:
        """Whether the step computes at least half of its prompts. Few tokens after cached ones say little about many.

        The tokens [a, b) of a prompt are at least half of it if 3 (b - a) >= a + b.
        """
        return 3 * self.prompts**2 >= self.reach


class PrefillPace:
    """Tells the cost model how long prefills take.

    It compares three consecutive steps.

    If the first two are prefill steps of equal size, one prefill takes the time from the planning of the second step
    to the planning of the third. This holds whether the engine plans a step after the previous step has ended, or
    while it runs (asynchronous scheduling).

    If a prefill step of at least half a prompt comes before two small steps (its decoding), the prefill takes the time
    from its own planning to the planning of the third step. In an engine that does not plan ahead, this time is too
    long by one small step.

    Consecutive steps must have a request in common, because otherwise the engine may have been idle between them.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._steps: deque[EngineStep] = deque(maxlen=3)

    def planned(self, at: float, scheduled: Mapping[str, int], requests: Mapping[str, Any], *, alone: bool) -> None:
        """Record a step that is planned now, with `scheduled` tokens by request.

        `requests` are the requests whose prompts may be computed in the step; all others decode.
        """
        # The keys are compared only around a prefill: a step that decodes hundreds of requests would wait for a copy.
        step = EngineStep(at=at, alone=alone, requests=scheduled.keys(), tokens=sum(scheduled.values()))
        for name, request in requests.items():
            tokens = scheduled[name]
            if request.num_computed_tokens < request.num_prompt_tokens:
                step.prompts += tokens
                step.reach += tokens * (2 * request.num_computed_tokens + tokens)
        self.add(step)

    def add(self, step: EngineStep) -> None:
        """Record the next step, and report a prefill time if the last three steps show one."""
        self._steps.append(step)
        if len(self._steps) < 3:
            return
        one, two, now = self._steps
        if not one.prefills or one.requests.isdisjoint(two.requests) or two.requests.isdisjoint(now.requests):
            return
        if two.prefills and abs(one.prompts - two.prompts) <= LIKE * one.prompts:
            self._observe(two, now.at - two.at)
        elif one.is_half and two.alone and max(two.tokens, now.tokens) <= LIKE * one.tokens:
            self._observe(one, now.at - one.at)

    def _observe(self, step: EngineStep, seconds: float) -> None:
        self._cost.computed(step.prompts, seconds, length=step.reach / step.prompts)
