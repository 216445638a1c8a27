"""What the router takes engines to compute still, and how fast: by the first tokens and the ends of their answers."""

import json
from typing import Any

import pytest
from echo_engine import EchoEngine
from router_house import house
from storage_fakes import eventually

from lmc.router.engines import DEFAULT_RATE, MAX_RATE_FACTOR, Engines, address
from lmc.router.policies import make
from lmc.router.policy_types import PromptRequest
from lmc.router.prefills import MEASUREMENT_SECONDS, MIN_MEASUREMENTS, PrefillQueue
from lmc.router.requests import COMPUTING, PREFILLING
from lmc.router.visit import FirstToken, usage

ASK = "/v1/completions"


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> PrefillQueue:
    return PrefillQueue(clock)


# -- backlogs ---------------------------------------------------------------------------------------------------------


def test_prompts_of_answers_that_are_not_streamed_leave_the_backlog_one_after_the_other(queue, clock):
    """Earlier, all of these prompts left the backlog at once, after the time of one."""
    for _ in range(3):
        queue.add(1000.0, streamed=False)
    counts = []
    for clock.now in (0.0, 0.5, 1.0, 2.5, 3.0, 9.0):
        counts.append(queue.backlog(1000.0))
    assert counts == [3000.0, 2500.0, 2000.0, 500.0, 0.0, 0.0]
    clock.now = 20.0
    queue.add(1000.0, streamed=False)
    assert queue.backlog(1000.0) == 1000.0, "the engine was idle"


def test_without_a_measured_rate_a_prompt_counts_until_its_answer_comes(queue, clock):
    first, second = (queue.add(1000.0, streamed=False) for _ in range(2))
    clock.now = 1000.0
    assert queue.backlog(0.0) == 2000.0
    queue.begin(first)
    assert queue.backlog(0.0) == 1000.0
    queue.end(second)
    assert queue.backlog(0.0) == 0.0


def test_a_stream_counts_until_its_first_token_and_holds_up_those_after_it(queue, clock):
    stream, later = queue.add(1000.0, streamed=True), queue.add(1000.0, streamed=False)
    clock.now = 60.0
    assert queue.backlog(1000.0) == 2000.0
    queue.begin(stream)
    assert queue.backlog(1000.0) == 1000.0
    clock.now = 60.5
    assert queue.backlog(1000.0) == 500.0
    queue.end(later)
    assert queue.backlog(1000.0) == 0.0


def test_a_first_token_shows_that_the_prompts_before_it_are_computed(queue):
    queue.add(1000.0, streamed=False)
    overtaken, last = queue.add(2000.0, streamed=True), queue.add(4000.0, streamed=True)
    queue.begin(last)
    assert queue.backlog(0.0) == 2000.0, "a stream shows itself when it begins"
    queue.begin(overtaken)
    assert queue.backlog(0.0) == 0.0


# -- rates ------------------------------------------------------------------------------------------------------------


def measure(queue, clock, seconds: float, *, streamed: bool = True, computed=None, generated=None) -> None:
    """Send a prompt of 1,000 tokens to an engine, and record its answer."""
    prefill = queue.add(1000.0, streamed=streamed)
    clock.now += seconds
    queue.begin(prefill)
    queue.end(prefill)
    queue.measure(prefill, computed, generated)


def test_one_slow_answer_does_not_make_an_engine_slow(queue, clock):
    """The first answer of an engine that was warming up took 15 s, and the engine got nothing more for good."""
    measure(queue, clock, 15.0)
    assert queue.rate == 0.0
    for _ in range(MIN_MEASUREMENTS):
        measure(queue, clock, 1.0)
    assert queue.rate == pytest.approx(1000.0)
    clock.now += MEASUREMENT_SECONDS
    assert queue.rate == 0.0, "measurements expire, so an engine without requests is tried again"


def test_the_rate_is_measured_while_requests_queue(queue, clock):
    """Only requests that were alone were measured, so an engine with a queue kept a wrong rate."""
    waiting = [queue.add(1000.0, streamed=streamed) for streamed in (True, False, True, False, True)]
    for number, prefill in enumerate(waiting):
        clock.now = number + 1.0
        queue.begin(prefill)
        queue.measure(prefill, None, None if prefill.streamed else 1)
    assert queue.rate == pytest.approx(1000.0)
    clock.now = 100.0
    measure(queue, clock, 0.1)
    measure(queue, clock, 0.1)
    assert queue.rate == pytest.approx(1000.0), "the idle time does not count"
    for _ in range(4):
        measure(queue, clock, 0.1)
    assert queue.rate == pytest.approx(10_000.0)


def test_what_an_engine_had_cached_counts_as_not_computed(queue, clock):
    """After a restart of the router, an engine with cached prompts was taken to be much faster than the others."""
    for _ in range(9):
        measure(queue, clock, 0.01, computed=16.0)
    assert queue.rate == 0.0
    for _ in range(9):
        measure(queue, clock, 0.5, computed=500.0)
    assert queue.rate == pytest.approx(1000.0)


@pytest.mark.parametrize(("generated", "rate"), [(None, 1000.0), (0, 1000.0), (1, 1000.0), (100, 2000.0)])
def test_answers_that_are_not_streamed_show_the_rate_too(queue, clock, generated, rate):
    """Of the time of a long answer, at most half is taken for the time to generate it."""
    for _ in range(MIN_MEASUREMENTS):
        assert queue.rate == 0.0
        measure(queue, clock, 1.0, streamed=False, generated=generated)
    assert queue.rate == pytest.approx(rate)


def test_the_time_to_generate_an_answer_does_not_count_as_the_time_of_its_prompt(queue, clock):
    """An engine computes 1,000 tokens a second, and takes 2 s for each answer of 100 tokens."""
    for _ in range(3):
        answer_all(queue, clock, [1000.0] * 10)
        clock.now += 60.0
    assert 1000.0 <= queue.rate < 1400.0, "not 10,000 tokens in 12 s"
    for _ in range(MIN_MEASUREMENTS):
        measure(queue, clock, 0.5)
    assert queue.rate == pytest.approx(2000.0), "a stream shows it exactly"


def answer_all(queue, clock, prompts: list[float]) -> None:
    waiting, at = [queue.add(tokens, streamed=False) for tokens in prompts], clock.now
    for prefill in waiting:
        at += prefill.tokens / 1000.0
        clock.now = at + 2.0
        queue.begin(prefill)
        queue.end(prefill)
        queue.measure(prefill, None, 100)


def with_rates(clock: Clock, **rates: float) -> Engines:
    engines = Engines(clock=clock)
    for name, rate in rates.items():
        engine = engines.add(address(f"http://{name}", ["m"]))
        for _ in range(MIN_MEASUREMENTS if rate else 0):
            measure(engine.prefills, clock, 1000.0 / rate)
    return engines


def rates_of(engines: Engines) -> list[float]:
    return [round(candidate.rate) for candidate in engines.candidates("m")]


def test_rates_are_those_of_the_engines_of_a_model_within_bounds(clock):
    assert rates_of(with_rates(clock, a=0.0, b=0.0)) == [DEFAULT_RATE, DEFAULT_RATE]
    assert rates_of(with_rates(clock, a=1000.0, b=0.0)) == [1000, 1000], "an engine without a rate has the usual one"
    assert rates_of(with_rates(clock, a=1000.0, b=1200.0, c=3000.0)) == [1200, 1200, 3000]
    assert rates_of(with_rates(clock, a=50.0, b=1000.0, c=1e6)) == [
        1000 / MAX_RATE_FACTOR,
        1000,
        1000 * MAX_RATE_FACTOR,
    ]
    engines = with_rates(clock, a=1000.0)
    other = engines.add(address("http://other", ["another model"]))
    for _ in range(MIN_MEASUREMENTS):
        measure(other.prefills, clock, 0.01)
    engines.add(address("http://new", ["m"]))
    assert rates_of(engines) == [1000, 1000]


@pytest.mark.parametrize("generated", [None, 1, 200])
def test_a_popular_document_is_learned_by_a_second_engine_before_the_queue_of_the_first_is_long(clock, generated):
    """91 of 91 requests went to the engine with the document, whose queue grew without end.

    Two engines compute 1,000 tokens a second and generate 50. Three requests a second, which are not streamed, have one
    document of 4,000 tokens, of which 600 are computed where it is stored.
    """
    engines, policy = Engines(clock=clock), make("documents", clock=clock)
    free_at = {engines.add(address(f"http://{name}", ["m"])).url: 0.0 for name in "ab"}
    answers, counts, longest = list[Any](), dict.fromkeys(free_at, 0), 0.0
    for number in range(300):
        for answer in sorted(answer for answer in answers if answer[0] <= number / 3):
            answers.remove(answer)
            clock.now, _, engine, prefill = answer
            engine.begun(prefill)
            engine.ended(prefill)
            engine.prefills.measure(prefill, None, generated)
        clock.now = number / 3
        request = PromptRequest(text=f"{number} # # {'once upon a time ' * 940} # # q", model="m")
        choice = policy.choose(request, engines.candidates("m"))
        policy.sent(request, choice.engine)
        engine = engines[choice.engine]
        free_at[engine.url] = max(free_at[engine.url], clock.now) + choice.cost / 1000.0
        answered = free_at[engine.url] + (generated or 0) / 50.0
        answers.append((answered, number, engine, engine.sent(choice.cost, streamed=False)))
        counts[engine.url] += 1
        longest = max(longest, free_at[engine.url] - clock.now)
    assert min(counts.values()) > 100
    assert longest < 10.0


# -- first tokens -----------------------------------------------------------------------------------------------------

CREATED = b'event: response.created\ndata: {"response": {"id": "resp_1", "instructions": "%s"}}\n\n'
PROGRESS = b"event: response.in_progress\ndata: {}\n\n"
TOKEN = b'event: response.output_text.delta\ndata: {"delta": "x"}\n\n'


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("token", [TOKEN, b'data: {"choices": []}\n\n'])
def test_events_that_an_engine_sends_before_it_computes_are_not_the_first_token(size, end, token):
    early = (CREATED % (b"x data: " * 100) + b": keep-alive\n\n" + PROGRESS).replace(b"\n", end)
    stream, first = early + token.replace(b"\n", end), FirstToken()
    parts = [stream[start : start + size] for start in range(0, len(stream), size)]
    at = next(number for number, part in enumerate(parts) if first.is_in(part))
    assert sum(map(len, parts[: at + 1])) > len(early)


class Responding(EchoEngine):
    """Sends the first events of a response at once, as vLLM, and the token when the test allows it."""

    computed = False

    async def stream(self, wish, usage, send, leaving):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": CREATED % b"" + PROGRESS, "more_body": True})
        while not self.computed and not await self._sleeps(0.005, leaving):
            pass
        await send({"type": "http.response.body", "body": TOKEN})


def test_a_response_counts_as_waiting_until_its_first_token():
    """`response.created` was taken for the first token: the engine was measured as a hundred times as fast."""
    with house(1) as built:
        (served,), (engine,) = built.engines, built.router.application.engines
        served.application.__class__ = Responding
        answer = built.send("/v1/responses", {"model": "echo", "input": "x" * 4000, "stream": True})
        assert answer.readline() == b"event: response.created\n", "it is sent on at once"
        assert engine.candidate.backlog == pytest.approx(1000.0)
        served.application.computed = True
        eventually(lambda: engine.candidate.backlog == 0.0)
        answer.read()


# -- what answers say -------------------------------------------------------------------------------------------------


def test_the_tokens_of_answers_are_read():
    assert usage(b'{"usage": {"prompt_tokens": 5, "completion_tokens": 7}}').generated_tokens == 7
    assert usage(b'{"usage": {"input_tokens": 5, "output_tokens": 8}}').generated_tokens == 8
    assert usage(b'{"text": "\\"completion_tokens\\": 9"}').generated_tokens is None


@pytest.mark.parametrize("status", [200, 400])
def test_the_rate_of_an_engine_is_measured_by_its_answers(status):
    said = {"prompt_tokens": 2000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1000}}
    with house(1) as built:
        for number in range(MIN_MEASUREMENTS):
            wish = {"usage": said} if status == 200 else {"status": status}
            built.ask(ASK, {"model": "echo", "prompt": f"{number} " * 2000, "echo": wish})
        (engine,) = built.ask("/engines")[1]["engines"]
        assert (engine["tokens_a_second"] is not None) == (status == 200)
        assert engine["backlog_tokens"] == 0


def test_paths_without_a_prefill_leave_no_backlog():
    assert PREFILLING < COMPUTING
    with house(1) as built:
        (engine,) = built.router.application.engines
        waiting = built.send("/v1/chat/completions/render", {"model": "echo", "prompt": "x" * 4000, "stream": True})
        assert engine.candidate.backlog == 0.0
        waiting.read()
        assert built.ask("/tokenize", json.dumps({"model": "echo", "prompt": "x" * 4000}).encode())[0] == 200
        assert engine.prefills.rate == 0.0
