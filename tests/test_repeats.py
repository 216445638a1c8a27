"""Text that prompts repeat after different beginnings is found, and its parts that may be learned."""

import hashlib
import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from lmc.blend.markers import Markers
from lmc.blend.segments import Span, texts
from lmc.documents.repeats import EVERY, MAX_LEARNED, MIN_LEARNED, NEAR, WINDOW, LineEnds, Repeats, to_learn
from lmc.storage.cost_model import ENOUGH

TENANT, OTHER, BLOCK = b"a" * 32, b"b" * 32, 16
LINE, BLANK = 7, 8  # tokens that end a line, and a paragraph
USER, MODEL, END = 1, 2, 3  # headers of a user's and of the model's turns, and the end of a turn
PLAIN = Markers(separators=())
MARKERS = Markers(separators=(), special=frozenset({END}), answers=((MODEL,),), messages=((USER,),))
ENDS = LineEnds(lambda tokens: {LINE: ".\n", BLANK: "\n\n"}.get(tokens[0], "word "))


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 50_000), k=count)


def hashed(prompt: Sequence[int]) -> list[bytes]:
    """The hashes of a prompt's full blocks, each of all tokens before its end."""
    found, digest = [], b""
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        digest = hashlib.sha256(digest + repr(prompt[start : start + BLOCK]).encode()).digest()
        found.append(digest)
    return found


def find(repeats: Repeats, prompt: list[int], tenant: bytes = TENANT, start: int = 0) -> list[Span]:
    return repeats.find(tenant, prompt, hashed(prompt), BLOCK, start)


@pytest.fixture(params=[1, 2, 3])
def repeats(request: pytest.FixtureRequest) -> Repeats:
    return Repeats(random.Random(request.param).getrandbits(64))


def test_a_text_after_another_beginning_is_found_up_to_a_few_tokens(repeats: Repeats) -> None:
    text = words(200, 1)
    assert find(repeats, [*words(50, 2), *text, *words(30, 3)]) == []
    (found,) = find(repeats, [*words(33, 4), *text, *words(40, 5)])
    assert 33 <= found.start < 33 + EVERY
    assert 233 - EVERY < found.stop <= 233


def test_the_turns_of_a_conversation_repeat_nothing(repeats: Repeats) -> None:
    prompt = words(100, 1)
    for turn in range(2, 12):
        assert find(repeats, prompt) == []
        prompt = prompt + words(60, turn)


def test_what_is_repeated_once_is_repeated_in_every_later_turn(repeats: Repeats) -> None:
    """So it is learned in a later turn if it could not be learned in the first one."""
    text = words(200, 1)
    find(repeats, [*words(50, 2), *text])
    prompt = [*words(70, 3), *text]
    for turn in range(4, 7):
        (found,) = find(repeats, prompt)
        assert 70 <= found.start < 70 + EVERY
        assert 270 - EVERY < found.stop <= 270
        prompt = prompt + words(40, turn)


def test_only_what_follows_the_start_is_searched(repeats: Repeats) -> None:
    text, after = words(200, 1), words(150, 2)
    find(repeats, [*text, *words(50, 3), *after])
    prompt = [*words(64, 4), *text, *words(20, 5), *after]
    first, second = find(repeats, list(prompt))
    assert 64 <= first.start < 64 + EVERY
    assert 284 <= second.start < 284 + EVERY
    assert [found.stop for found in find(repeats, prompt, start=272)] == [second.stop]


def test_tenants_do_not_find_the_texts_of_others(repeats: Repeats) -> None:
    text = words(300, 1)
    find(repeats, [*words(40, 2), *text])
    assert find(repeats, [*words(60, 3), *text], OTHER) == []
    assert len(find(repeats, [*words(60, 3), *text])) == 1


def test_answers_are_not_found_but_what_they_quote_is(repeats: Repeats) -> None:
    text, answer = words(200, 1), words(120, 2)
    prompt = [*words(50, 3), *text]
    find(repeats, prompt)
    repeats.note_answer(TENANT, [*answer, *text[40:160], *answer[:10]])
    (found,) = find(repeats, [*words(70, 4), *answer, *words(9, 5), *text])
    assert 199 <= found.start < 199 + EVERY
    assert 399 - EVERY < found.stop <= 399


def test_prompts_that_come_once_repeat_nothing_and_take_no_more_memory(repeats: Repeats) -> None:
    size = repeats.size
    assert size == 12 << 19
    assert not any(find(repeats, words(1000, 1000 + seed)) for seed in range(500))
    assert repeats.size == size


@pytest.mark.parametrize("prompt", [[], [5], [5] * WINDOW, [5] * 2000, [5, 6] * 1000, words(15, 1)])
def test_short_and_periodic_prompts_repeat_nothing(repeats: Repeats, prompt: list[int]) -> None:
    for before in ([], [], words(16, 3), words(16, 3)):
        assert find(repeats, before + prompt) == []


def test_a_text_begins_and_ends_with_lines_nearby() -> None:
    tokens = [*words(20, 1), LINE, *words(100, 2), LINE, *words(100, 3)]
    near, far = Span(24, 118), Span(22 + NEAR, 120 - NEAR)
    assert to_learn(tokens, [near], [], PLAIN, ENDS) == [Span(21, 122)]
    assert to_learn(tokens, [far], [], PLAIN, ENDS) == [far]
    assert to_learn(tokens, [Span(24, 90), Span(94, 118)], [], PLAIN, ENDS) == [Span(21, 90)]


def test_a_text_is_learned_up_to_the_documents_and_markers_around_it() -> None:
    tokens = [*words(150, 1), *[END] * 10, *words(340, 2)]
    found = to_learn(tokens, [Span(30, 400)], [Span(230, 300)], MARKERS, ENDS)
    assert found == [Span(30, 150), Span(160, 230), Span(300, 400)]


def test_what_is_taken_up_to_a_few_tokens_is_not_looked_at() -> None:
    tokens = words(500, 1)
    assert to_learn(tokens, [Span(30, 400)], [Span(35, 395)], PLAIN, ENDS) == []


def test_special_tokens_headers_and_answers_are_not_learned() -> None:
    said, answered, result = words(100, 1), words(100, 2), words(100, 3)
    tokens = [USER, *said, END, MODEL, *answered, END, USER, *result, END, MODEL]
    assert texts(tokens, MARKERS) == [Span(1, 101), Span(205, 305)]
    whole = [Span(0, len(tokens))]
    assert to_learn(tokens, whole, [], MARKERS, ENDS) == [Span(1, 101)]  # The last text asks.


@pytest.mark.parametrize(("end", "stop"), [(LINE, 301), (BLANK, 221)])
def test_the_question_at_the_end_is_not_learned(end: int, stop: int) -> None:
    """The question begins after the last blank line, or else after the last line."""
    tokens = [*words(100, 1), *words(120, 2), end, *words(79, 3), LINE, *words(30, 4)]
    whole = [Span(100, len(tokens))]
    assert to_learn(tokens, whole, [], PLAIN, ENDS) == [Span(100, stop)]


def test_white_space_after_the_question_is_not_taken_for_it() -> None:
    """Chat templates write a line break between the end of a turn and the header of the next one."""
    said, question = words(100, 1), words(100, 2)
    tokens = [USER, *said, END, LINE, USER, *question, END, BLANK, MODEL]
    assert to_learn(tokens, [Span(0, len(tokens))], [], MARKERS, ENDS) == [Span(1, 101)]


def test_the_result_of_a_tool_is_learned_to_its_end() -> None:
    """A result in JSON has no lines; an agent reads the same file in another session."""
    said, result = words(100, 1), words(100, 2)
    tool = Markers(
        separators=(), special=frozenset({END}), answers=((MODEL,),), messages=((USER,),), results=((USER, 9),)
    )
    for header, learned in (([USER, 9], [Span(1, 101), Span(103, 204)]), ([USER, 10], [Span(1, 101)])):
        tokens = [USER, *said, END, *header, *result, END, BLANK, MODEL]
        assert to_learn(tokens, [Span(0, len(tokens))], [], tool, ENDS) == learned
    assert to_learn(tokens[:-3], [Span(0, len(tokens))], [], tool, ENDS) == [Span(1, 101)]


def test_the_passages_of_a_tools_result_are_learned_to_their_ends() -> None:
    """The last one was taken for the question, if separators stand between them."""
    tool = Markers(
        separators=((60, 61),), special=frozenset({END}), answers=((MODEL,),), messages=((USER,),), results=((USER, 9),)
    )
    passages = words(100, 1), words(100, 2)
    tokens = [USER, 9, *passages[0], 60, 61, *passages[1], END, BLANK, MODEL]
    assert to_learn(tokens, [Span(0, len(tokens))], [], tool, ENDS) == [Span(1, 102), Span(104, 204)]


def test_a_question_that_is_only_a_line_is_not_learned() -> None:
    tokens = words(300, 1)
    assert to_learn(tokens, [Span(100, 300)], [], PLAIN, ENDS) == []


def test_long_texts_are_cut_after_blank_lines_and_short_ones_are_left_out() -> None:
    tokens = words(5000, 1)
    for at in range(99, 5000, 100):
        tokens[at] = BLANK if at % 300 == 299 else LINE
    found = to_learn(tokens, [Span(0, 3250)], [], PLAIN, ENDS)
    assert [span.stop for span in found[:-1]] == [span.start for span in found[1:]]
    assert (found[0].start, found[-1].stop) == (0, 3250)
    assert all(MIN_LEARNED <= len(span) <= MAX_LEARNED for span in found)
    assert all(span.stop % 300 == 0 for span in found[:-1])
    assert to_learn(tokens, [Span(40, 40 + MIN_LEARNED - 1)], [], PLAIN, ENDS) == []


def test_blank_lines_are_known_in_one_token_and_in_two() -> None:
    pieces = {1: "a", 2: "\n", 3: ".\n", 4: ".\n\n", 5: "\n  ", 6: " "}
    ends = LineEnds(lambda tokens: pieces[tokens[0]])
    expected = {(1,): 0, (2,): 1, (3,): 1, (4,): 2, (1, 2, 2): 2, (3, 2): 2, (3, 3): 1, (2, 5): 2, (1, 5): 1, (2, 6): 0}
    assert {tokens: ends.rank(tokens, len(tokens)) for tokens in expected} == expected
    assert ends.rank([2], 0) == 0


def test_every_repeated_text_of_random_prompts_is_found(repeats: Repeats) -> None:
    """Texts of 40 tokens and more have a window in common wherever they are."""
    rng = random.Random(9)
    library = [words(rng.randrange(40, 300), 100 + i) for i in range(60)]
    seen: set[int] = set()
    for prompt in range(60):
        chosen = rng.sample(range(60), 4)
        parts = [part for i in chosen for part in (words(rng.randrange(1, 30), 10_000 + 97 * prompt + i), library[i])]
        tokens = [token for part in parts for token in part]
        found = find(repeats, tokens)
        at = 0
        for i, (before, text) in zip(chosen, list(zip(parts[::2], parts[1::2], strict=True)), strict=True):
            at += len(before)
            covered = sum(max(0, min(at + len(text), one.stop) - max(at, one.start)) for one in found)
            assert covered >= (len(text) - 2 * NEAR if i in seen else 0)
            assert i in seen or covered == 0
            at += len(text)
        assert all(one.stop <= other.start for one, other in pairwise(found))
        seen.update(chosen)


# -- in an engine ------------------------------------------------------------------------------------------------------


def test_learning_what_repeats_takes_a_tenth_of_the_time_at_most(make: Any) -> None:
    """With 0.2 s per token, two texts of 70 tokens fit into five minutes' share. After 140 s, one more does."""
    tokenizer = SimpleNamespace(decode=lambda tokens: "word ")
    more = {"settings": {"blend_find": "repeated"}, "tokenizer": tokenizer, "special": frozenset({END})}
    lab = make(slots=128, blocks=512, **more)
    for _ in range(ENOUGH):
        lab.store.cost.computed(100, 20.0, 100)

    def serve(texts: Sequence[int], beginning: int) -> int:
        parts = [[*words(70, seed), END] for seed in texts]
        tokens = [*words(20, beginning), END, *(token for part in parts for token in part), *words(5, beginning)]
        lab.serve(f"{texts} after {beginning}", tokens)
        lab.settle()
        return int(lab.scheduler.numbers().get("repeated_documents", 0))

    assert serve([1001, 1002, 1003], 50) == 0
    assert serve([1001, 1002, 1003], 51) == 2
    assert serve([1001, 1002, 1003], 52) == 2
    lab.now += 140.0
    assert serve([1001, 1002, 1003], 53) == 3
    assert serve([1001, 1002, 1003], 54) == 3, "all of them are known"
    assert lab.scheduler.numbers()["repeated_tokens"] > 0
