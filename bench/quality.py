"""How much of the gap to full prefill a blend closes: strategies × ratios × tasks, on real and on small models.

    python bench/quality.py [--tasks …] [--size medium] [--words held-out] [--inside] [--prompts 24] [--matrix] …
    python bench/quality.py --quick       # a minute or two; fails if the default closes less than 93 % of the gap

    python bench/quality.py --model gemma3 --default    # another pretrained model of `lmc/demo/pretrained.py`

Tasks are those of `bench/quality/tasks.py` with a pretrained model, by default SmolLM2-135M-Instruct, in its chat
template if it has one; `real`, the demo's questions over real documents; `python`, questions over pages of the
documentation of Python packages (`bench/texts/python`); and `small`, the questions of the small model that lmc ships.
`python` and `small` run only if `--tasks` names them. What is measured of each way, as a mean over the prompts of a
task:

    kl          KL(full ‖ way) in nats over the tokens of the right answer, which are given (teacher forcing); those
                of full prefill's own answer in tasks that are not made
    closed      1 − KL(full ‖ way) / KL(full ‖ blind reuse of documents learned alone), and the interval that holds
                90 % of 1000 resamplings of the prompts
    first       whether the first token of the greedy answer is full prefill's
    agreement   how many of the first 16 tokens of full prefill's greedy answer come before the first that differs
    right       whether the answer begins with an accepted one, both without case, punctuation and article
    charged     the share of the reused tokens that was computed anyway
    share       seconds, as a share of full prefill's TTFT: of the whole, of the question's pass and its scores, of
                the choice, and of the shift

`bfloat16` is full prefill in that precision, and shows how much a server's own rounding changes. A prompt that was
measured by the same code is not measured again. So a run can be stopped and continued, and several runs with different
tasks can share one file of rows.
"""

import json
import time
from pathlib import Path
from typing import Any

from common import closing_line, parser
from quality.cases import ASKED, FILLERS, JOINS, REAL_TASK, SEPARATED, SMALL_TASK, WORDS, cases, load
from quality.measure import Lab
from quality.page import write_page
from quality.rows import MEAN, Rows, summary
from quality.tasks import CONTROLS, MAIN, TASKS
from quality.ways import BLIND, FULL, ROUNDED, default, ways

from lmc.config.settings import Settings
from lmc.demo.pretrained import MODELS
from lmc.demo.random_model import machine

USUAL = "smollm2"
PICTURED = 1  # prompts of each task whose choice the page shows
QUICK_TASKS, QUICK_PROMPTS, QUICK_LEAST = ("scope", "update", "pronoun"), 2, 0.93


def main() -> int:
    arguments = parser(__doc__, "quality")
    arguments.add_argument("--model", choices=MODELS, default=USUAL, help="the pretrained model")
    arguments.add_argument("--tasks", default=",".join([*MAIN, *CONTROLS, REAL_TASK]), help=", ".join([*TASKS, *ASKED]))
    arguments.add_argument("--size", choices=FILLERS, default="medium", help="of the documents of made prompts")
    arguments.add_argument("--words", choices=WORDS, default="held-out", help="of made prompts")
    arguments.add_argument(
        "--inside", action="store_true", help="made facts stand inside of their documents, and not first"
    )
    arguments.add_argument(
        "--joined", choices=[SEPARATED, *JOINS], default=SEPARATED, help="how the documents are joined"
    )
    arguments.add_argument("--prompts", type=int, default=24, help="of each task")
    arguments.add_argument("--matrix", action="store_true", help="all ways, and not only the default and the presets")
    arguments.add_argument("--default", action="store_true", help="only the default and blind reuse")
    arguments.add_argument("--ratios", default="0.05,0.1,0.15,0.3")
    arguments.add_argument("--rows", type=Path, help="a file with a line for each prompt")
    arguments.add_argument("--page", type=Path, default=Path(".demo/quality.html"))
    arguments.add_argument(
        "--minutes", type=float, default=float("inf"), help="measure no longer, and show what is there"
    )
    arguments.add_argument("--name", help="end of the name of the kept result, if it is not of the usual prompts")
    arguments.add_argument("--quick", action="store_true", help="a few prompts of the default; fails if it got worse")
    options = arguments.parse_args()
    parts = ("quality", options.model if options.model != USUAL else None, options.name)
    result_name = "_".join(part for part in parts if part)
    options.rows = options.rows or Path(f".demo/{result_name}.jsonl")
    known = [*TASKS, *ASKED]
    if strange := set(options.tasks.split(",")).difference(known):
        arguments.error(f"no task {', '.join(sorted(strange))}: use {', '.join(known)}")
    settings = Settings(
        enable_blending=True,
        blend_min_tokens=0,
        max_local_cpu_size=0.5,
        load_policy="always",
    )
    if options.quick:
        options.tasks, options.prompts, options.rows = ",".join(QUICK_TASKS), QUICK_PROMPTS, Path("/dev/null")
        options.default, options.ratios = True, f"{default(settings).ratio:g}"
    print(machine())
    rows = Rows(options.rows)
    if rows.outdated:
        print(f"{rows.outdated} lines of {options.rows} are of other code, and are not used")
    measure(rows, options, settings)
    groups = rows.groups()
    found = summary(groups) | summary(rows.in_all_ways())
    show(found)
    write_page(options.page, found, groups, default(settings).name, machine())
    print(f"page: {options.page}")
    best = default(settings).name
    closed = {group: one["ways"][best]["closed"] for group, one in found.items() if best in one["ways"]}
    result: dict[str, Any] = {"bench": "quality", "model": options.model, "default": best, "closed": closed}
    closing_line(result, result_name if options.keep else None, {"groups": found})
    return int(options.quick and min(closed[group] for group in closed if group.startswith(MEAN)) < QUICK_LEAST)


def measure(rows: Rows, options: Any, settings: Settings) -> None:
    """Measure what is missing, a prompt of each task in turn."""
    until = time.monotonic() + options.minutes * 60
    ratios = [float(ratio) for ratio in options.ratios.split(",")]
    wanted = {way.name: way for way in ways(settings, ratios, options.matrix)}
    if options.default:
        wanted = {name: wanted[name] for name in (BLIND, *(default(settings, ratio).name for ratio in ratios))}
    names = options.tasks.split(",")
    for tasks in ([name for name in names if name != SMALL_TASK], [name for name in names if name == SMALL_TASK]):
        if not tasks:
            continue
        is_small = SMALL_TASK in tasks
        cached, tokenizer = load(tasks[0], options.model, settings)
        lab, seen = Lab(cached, tokenizer, settings), dict.fromkeys(tasks, 0)
        made, special = (options.size, options.words, options.prompts), settings.blend_special_str
        for case in cases(tasks, tokenizer, special, *made, inside=options.inside, joined=options.joined):
            seen[case.task] += 1
            rounded = not (is_small or options.default)
            missing = rows.missing(case.key, [*wanted, *([ROUNDED] if rounded else [])])
            if not missing or time.monotonic() > until:
                continue
            asked = [wanted[name] for name in missing if name in wanted]
            row = lab.measure(case, asked, rounded=ROUNDED in missing, pictured=seen[case.task] <= PICTURED)
            rows.add(row)
            best = row["ways"].get(default(settings).name, {})
            print(f"{case.key}: {json.dumps({key: best.get(key) for key in ('kl', 'agreement', 'right')})}", flush=True)
        lab.close()


def show(found: dict[str, Any]) -> None:
    """Print a table for each task."""
    for group, numbers in found.items():
        full = numbers["ways"][FULL]["right"]
        print(
            f"\n{group}: {numbers['prompts']} prompts of {numbers['tokens']} tokens, full prefill is right {full:.0%}"
        )
        for name, way in numbers["ways"].items():
            if name != FULL:
                low, high = way["interval"]
                print(
                    f"  {name:26s} KL {way['kl']:6.3f}  closed {way['closed']:6.1%} [{low:6.1%}, {high:6.1%}]  "
                    f"first {way['first']:4.0%}  agreement {way['agreement']:4.0%}  right {way['right']:4.0%}  "
                    f"charged {way['charged']:.3f}  time {way['share'].get('ttft', 0):.2f}"
                )


if __name__ == "__main__":
    raise SystemExit(main())
