"""An agent's conversations whose context is dropped twice, with `blend_find: repeated`: what is reused of what moves.

    python bench/agent.py [--model small|smollm2|both] [--load-policy always] [--rows FILE]

An agent reads files of this repository and runs commands, one in each turn, through messages in the model's chat
template: 30 turns of SmolLM2, 20 of the small model, which has half the context. Twice it replaces its oldest turns by
a summary, as agents do, so that everything after them moves, and the engine's own prefix cache loses it. Nothing is
learned ahead, and no separators are used. Two sessions of one tenant read the same files, and then half a session of
another tenant. Answers are given (teacher forcing), so that all engines get the same prompts. Between two turns the
agent runs its tool for `--think` seconds: by default, as long as the prefill of about 1,000 tokens of SmolLM2 takes on
a CPU. A GPU needs a hundredth of that. What is measured:

    moved       tokens of messages that are in an earlier prompt of the tenant, and that the prefix cache does not have
    again       of these, tokens that have moved before: they are in two earlier prompts after different beginnings
    reused      of `again`, the share whose KV came from the store; the rest are answers, short messages, and headers
    crossed     tokens that the other tenant reused before they were repeated in its own prompts
    ttft        of prompts with `again` tokens: TTFT of vLLM alone over TTFT with lmc, median
    kl          KL(full prefill ‖ lmc) in nats over the answers to these prompts; `blind`: the same of blind reuse
    closed      1 − kl / blind
    first_as_full
                share of these prompts whose likeliest first token is that of full prefill
    by_kind     `moved`, `again` and `reused` of code (files that it read) and of tool output (of commands). The rest is
                answers, the task and summaries. Here `reused` counts tokens of blends, by their positions.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from chat_tokens import SMALL, SMOLLM2, ChatTokens
from common import closing_line, parser
from conversation import LIKELIEST, compared
from engine import Engine, Host

from lmc.demo.random_model import machine
from lmc.keys import tokens_digest

ROOT = Path(__file__).parent.parent
SOURCES = "storage", "lmc/engine", "lmc/server", "lmc/router"
FILES = 24  # that a session reads
READ_AGAIN, RAN = 0.2, 0.3  # shares of turns that read a file again, or run a command
DROPS = (0.4, 0.65)  # when the context is dropped, as shares of the turns
DROPPED = 0.25  # share of the turns in the context that is dropped
SIZES = {SMALL: (110, 220), SMOLLM2: (180, 380)}  # tokens of a tool's result
ANSWER = 8  # most tokens of an answer that is compared
ROOM = {"skip_tokenizer_init": False, "max_logprobs": LIKELIEST, "logits_processors": ["forced:Forced"]}
LENGTHS = {SMALL: 4096, SMOLLM2: 8192}
TURNS = {SMALL: 20, SMOLLM2: 30}  # that fit
# Results of tools often have fewer tokens than the default.
SETTINGS: Mapping[str, dict[str, Any]] = {SMALL: {"blend_min_tokens": 64}, SMOLLM2: {"blend_min_tokens": 128}}
SYSTEM = """You are a coding agent. You work in a repository, and answer with one call of a tool in each turn.
read_file(path) returns a part of a file. run(command) returns the output of a command. Look before you change
anything."""
PLAIN, LMC, BLIND = "vLLM", "lmc", "blind"
# The tenants, the seeds of their sessions, and the share of the turns.
SESSIONS = ("one", 1, 1.0), ("one", 2, 1.0), ("other", 1, 0.5)
WAYS: Mapping[str, dict[str, Any] | None] = {PLAIN: None, LMC: {}, BLIND: {"strategy": "none"}}
CODE, OUTPUT, OTHER = "code", "tool output", "other"  # kinds of messages
COMMAND = "run("  # begins the call of a tool that runs a command

Message = dict[str, str]


class Part(NamedTuple):
    """A message in a prompt."""

    start: int
    stop: int
    kind: str
    again: bool = False  # It has moved before.


@dataclass
class Turn:
    """A prompt, the answer that is given to it, and where each message is in the prompt."""

    prompt: list[int]
    answer: list[int]
    messages: list[Part]


@dataclass
class Known:
    """After which beginnings the messages of a tenant's prompts were, by their tokens."""

    beginnings: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def moved(self, turn: Turn) -> list[Part]:
        """Return the messages of a prompt that have moved. Remembers the prompt."""
        moved = list[Part]()
        for part in turn.messages:
            before = self.beginnings[tokens_digest(turn.prompt[part.start : part.stop])]
            beginning = tokens_digest(turn.prompt[: part.start])
            if before and beginning not in before:
                moved.append(part._replace(again=len(before) > 1))
            before.add(beginning)
        return moved


class PlacingHost(Host):
    """An engine that tells at which positions it has reused documents."""

    def __init__(self, *arguments: Any) -> None:
        from lmc.connectors.vllm.scheduler.scheduler import Scheduler

        self._placed = list[tuple[int, int]]()
        plan = Scheduler.plan

        def watched(scheduler: Scheduler, *of_step: Any) -> Any:
            step = plan(scheduler, *of_step)
            pieces = [piece for job in step.loads for piece in getattr(job, "documents", ())]
            self._placed += [(piece.at, piece.stop) for piece in pieces]
            return step

        Scheduler.plan = watched  # type: ignore[method-assign]
        super().__init__(*arguments)

    def take_placed(self) -> list[tuple[int, int]]:
        """Return the positions since the last call."""
        placed, self._placed = self._placed, []
        return placed


class Agent:
    """Writes the conversations of one model's agent."""

    def __init__(self, model: str) -> None:
        self.chats, self._turns, self._sizes = ChatTokens.of(model), TURNS[model], SIZES[model]
        self._files = dict(_files(self.chats, self._sizes))

    def session(self, seed: int, share: float) -> Iterator[Turn]:
        """Yield a share of a session's turns. Sessions of the same seed are equal; others read the same files."""
        draw, read = random.Random(seed), list[str]()
        names = draw.sample(sorted(self._files), FILES)
        task = f"Task {seed}: find out why chunk {draw.randrange(10**6)} is never evicted, and which test shows it."
        head = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
        steps = list[tuple[Message, Message]]()
        drops = [round(share * self._turns) for share in DROPS]
        for number in range(round(share * self._turns)):
            if number in drops:
                gone, steps = steps[: int(DROPPED * len(steps))], steps[int(DROPPED * len(steps)) :]
                summary = f"Summary of {len(gone)} earlier steps: " + " ".join(said["content"] for said, _ in gone)
                head = [*head[:2], {"role": "user", "content": summary[:400]}]
            call, result = self._step(draw, names, read)
            said = {"role": "assistant", "content": call}
            chat = [*head, *(message for step in steps for message in step)]
            yield self._turn(chat, call)
            steps.append((said, {"role": "tool", "content": result}))

    def _step(self, draw: random.Random, names: list[str], read: list[str]) -> tuple[str, str]:
        kind = draw.random()
        if kind < RAN:
            test = f"tests/test_{draw.choice(names).split('/')[-1]}"
            lines = [f"{test}::test_{draw.randrange(10**4)} PASSED in {draw.random():.4f} s" for _ in range(60)]
            return f"{COMMAND}pytest {test})", _begin(self.chats, lines, draw.randint(*self._sizes))
        if read and kind < RAN + READ_AGAIN:
            name = draw.choice(read)
        else:
            name = names.pop() if names else draw.choice(read)
            read.append(name)
        return f"read_file({name})", self._files[name]

    def _turn(self, chat: list[Message], call: str) -> Turn:
        ends = [len(self._encode(chat[: count + 1])) for count in range(len(chat))]
        starts = [0, *ends[:-1]]
        answer = self.chats.tokenizer.encode(call, add_special_tokens=False)[:ANSWER]
        kinds = [_kind(chat, number) for number in range(len(chat))]
        return Turn(self._encode(chat, prompts=True), answer, list(map(Part, starts, ends, kinds)))

    def _encode(self, chat: Sequence[Message], *, prompts: bool = False) -> list[int]:
        text = self.chats.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompts)
        return list(self.chats.tokenizer.encode(text, add_special_tokens=False))


def _kind(chat: Sequence[Message], number: int) -> str:
    """Return the kind of a message. The result of a tool comes after its call."""
    if chat[number]["role"] != "tool":
        return OTHER
    return OUTPUT if chat[number - 1]["content"].startswith(COMMAND) else CODE


def _files(chats: ChatTokens, sizes: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """Yield parts of files of this repository, each of a tool result's length."""
    draw = random.Random(0)
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        lines = path.read_text().splitlines()
        if len(lines) >= sizes[1] // 4:
            name = str(path.relative_to(ROOT))
            yield name, f"{name}:\n{_begin(chats, lines, draw.randint(*sizes))}"


def _begin(chats: ChatTokens, lines: Sequence[str], tokens: int) -> str:
    """Return the first lines, up to a number of tokens."""
    sizes = accumulate(len(chats.tokenizer.encode(line, add_special_tokens=False)) for line in lines)
    return "\n".join(lines[: sum(size <= tokens for size in sizes)]) + "\n"


def run(
    agent: Agent, model: str, way: str, sessions: Sequence[Sequence[Turn]], think: float, policy: str
) -> list[dict[str, Any]]:
    """Return what was measured of each turn with one way of serving."""
    settings = None if way == PLAIN else {"blend_find": "repeated", "load_policy": policy, **SETTINGS[model]}
    length = LENGTHS[model]
    rows: list[dict[str, Any]] = []
    sizes = {"max_model_len": length, "max_num_batched_tokens": length}
    with Engine(agent.chats.path, lmc=settings, host=PlacingHost, **sizes, **ROOM) as engine:
        for session, (tenant, _, _) in enumerate(SESSIONS):
            for number, turn in enumerate(sessions[session]):
                extra = {"forced": turn.answer}
                served = engine.serve(
                    [turn.prompt], len(turn.answer), WAYS[way] or None,
                    logprobs=LIKELIEST, extra_args=extra, cache_salt=tenant,
                )  # fmt: skip
                said = served["answers"][0]
                assert said["tokens"] == turn.answer, "the engine did not answer what it was told to"
                facts = said["facts"]
                loaded = sum(facts.get("tokens_from", {}).values()) - facts.get("exact_tokens", 0)
                rows.append({
                    "session": session, "tenant": tenant, "turn": number, "tokens": len(turn.prompt),
                    "reused": loaded, "ttft": said["ttft"], "logprobs": said["logprobs"], "cached": said["cached"],
                    "note": facts.get("note", ""), "placed": engine.do("take_placed"),
                })  # fmt: skip
                if settings is not None:
                    engine.settle(think)
        if settings is not None:
            counted = {name: engine.numbers().get(name, 0) for name in ("repeated_documents", "documents_learned")}
            print(f"{model}, {way}: {counted}", flush=True)
    return rows


def measured(sessions: Sequence[Sequence[Turn]], ways: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row for each turn: what moved, and what each way did with it."""
    known, rows = defaultdict[str, Known](Known), list[dict[str, Any]]()
    for at, turn in enumerate(turn for session in sessions for turn in session):
        ours, full = ways[LMC][at], ways[PLAIN][at]
        parts = known[ours["tenant"]].moved(turn)
        row = {name: ours[name] for name in ("session", "tenant", "turn", "tokens", "reused", "cached", "note")}
        row |= counts(parts, ours["placed"]) | {"ttft": {way: found[at]["ttft"] for way, found in ways.items()}}
        row["by_kind"] = {
            kind: counts([part for part in parts if part.kind == kind], ours["placed"]) for kind in (CODE, OUTPUT)
        }
        for way in ways.keys() - {PLAIN}:
            predictions = ways[way][at]["logprobs"]
            row[way] = compared(full["logprobs"], predictions, turn.answer)
            row[way]["first_as_full"] = float(likeliest(full["logprobs"][0]) == likeliest(predictions[0]))
        rows.append(row)
    return rows


def counts(parts: Sequence[Part], placed: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return how many tokens of messages have moved, how many of them again, and how many of these were reused."""
    again = [part for part in parts if part.again]
    common = (min(part.stop, stop) - max(part.start, at) for part in again for at, stop in placed)
    return {
        "moved": sum(part.stop - part.start for part in parts),
        "again": sum(part.stop - part.start for part in again),
        "reused_again": sum(max(0, tokens) for tokens in common),
    }


def likeliest(predictions: Mapping[int, float]) -> int:
    """Return the likeliest token."""
    return max(predictions, key=lambda token: predictions[token])


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums and means over the turns."""
    again = [row for row in rows if row["again"]]
    # Blind reuse without any error has found nothing to reuse: its engine had not learned it in time.
    blended = [row for row in again if row["reused"] and row[BLIND]["kl"] > 0]
    found: dict[str, Any] = {
        "prompts": len(rows),
        "prompts_again": len(again),
        "moved": sum(row["moved"] for row in rows),
        "again": sum(row["again"] for row in again),
        "reused": round(sum(min(row["reused"], row["again"]) for row in again) / sum(row["again"] for row in again), 3),
        "crossed": sum(row["reused"] for row in rows if not row["again"]),
        "ttft": round(median(row["ttft"][PLAIN] / row["ttft"][LMC] for row in again), 3),
        "by_kind": {kind: shares([row["by_kind"][kind] for row in rows]) for kind in (CODE, OUTPUT)},
    }
    if blended:
        kl, blind = (fmean(row[way]["kl"] for row in blended) for way in (LMC, BLIND))
        found |= {
            "ttft_of_blends": round(median(row["ttft"][PLAIN] / row["ttft"][LMC] for row in blended), 3),
            "kl": round(kl, 4),
            "blind": round(blind, 4),
            "closed": round(1 - kl / blind, 3),
            "first_as_full": round(fmean(row[LMC]["first_as_full"] for row in blended), 3),
        }
    return found


def shares(of_kind: Sequence[Mapping[str, int]]) -> dict[str, float | None]:
    """Return the sums of the counts of one kind, and the share that was reused of what moved again."""
    moved, again, reused = (sum(one[name] for one in of_kind) for name in ("moved", "again", "reused_again"))
    return {"moved": moved, "again": again, "reused": round(reused / again, 3) if again else None}


def main() -> None:
    arguments = parser(__doc__, "agent")
    arguments.add_argument("--model", choices=(SMALL, SMOLLM2, "both"), default="both")
    arguments.add_argument("--think", type=float, default=4.0, help="seconds between two turns")
    arguments.add_argument("--load-policy", choices=("auto", "always"), default="auto")
    arguments.add_argument("--rows", type=Path, help="write what was measured of each turn, as lines of JSON")
    options: argparse.Namespace = arguments.parse_args()
    print(machine())
    by_model: dict[str, Any] = {}
    for model in (SMALL, SMOLLM2) if options.model == "both" else (options.model,):
        agent = Agent(model)
        sessions = [list(agent.session(seed, share)) for _, seed, share in SESSIONS]
        ways = {way: run(agent, model, way, sessions, options.think, options.load_policy) for way in WAYS}
        rows = measured(sessions, ways)
        for row in rows:
            times = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in row["ttft"].items())
            print(
                f"{model} {row['session']}.{row['turn']}: {row['tokens']} tokens, moved {row['moved']}, again "
                f"{row['again']}, reused {row['reused']}; TTFT {times} {row['note']}"
            )
        by_model[model] = summary(rows)
        if options.rows:
            with options.rows.open("a") as kept:
                kept.writelines(json.dumps({"model": model, **row}) + "\n" for row in rows)
    result = {"bench": "agent", "reused": min(found["reused"] for found in by_model.values()), "by_model": by_model}
    closing_line(result, "agent" if options.keep else None)


if __name__ == "__main__":
    main()
