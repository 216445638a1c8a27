"""The published routing policies: their worked examples, and what holds for each of them."""

import gc
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_fakes import Clock

from lmc.errors import ConfigError
from lmc.router.kv_index import BlockIndex, CacheSource
from lmc.router.policies import POLICIES, make
from lmc.router.policies.base import Policy
from lmc.router.policies.precise import Precise
from lmc.router.policies.published.approx_lru import ApproximateLru, LruIndex
from lmc.router.policies.published.block_hash import BlockHash, match_percent
from lmc.router.policies.published.cache_aware import LOG_OF_2025_06, PYTHON_ARGUMENTS, CacheAware, decide
from lmc.router.policies.published.chwbl import BoundedLoads, within_bound
from lmc.router.policies.published.prefix_hash_trie import PrefixHashTrie
from lmc.router.policies.published.simhash import fingerprint
from lmc.router.policies.simple import Ring
from lmc.router.policy_types import Candidate, PromptRequest
from lmc.router.prefix_hashes import byte_blocks, chained, leading

VECTORS = json.loads((Path(__file__).parent / "data/router.json").read_text())
REMEMBER = ("prefix_hash_trie", "cache_aware", "block_hash", "approx_lru", "precise")  # what prompts have been sent
SIZE = 4  # tokens of a block


def tokenize(text: str) -> list[int]:
    return [ord(character) for character in text]


def index_of(*engines: str) -> BlockIndex:
    """An index in which each engine has a block of its own, from which its block size is known."""
    index = BlockIndex(max_blocks=50)
    for number, engine in enumerate(engines):
        index.stored(CacheSource(engine), [number], None, [number] * SIZE, SIZE)
    return index


def policy_of(name: str, *engines: str) -> Any:
    """A policy with small limits and without chance."""
    options: dict[str, dict[str, Any]] = {
        "documents": {"cache_tokens": 500.0, "conversations": 50},
        "random": {"seed": 1},
        "power_of_two": {"seed": 1},
        "prefix_hash_trie": {"seed": 1, "chunk_characters": 8, "max_nodes": 50},
        "cache_aware": {"max_tree_size": 500, "max_nodes": 50, "clock": Clock()},
        "block_hash": {"block_bytes": 8, "max_blocks": 50, "clock": Clock()},
        "approx_lru": {"block_tokens": 2, "server_blocks": 50},
        "precise": {"tokenize": tokenize, "index": index_of(*engines), "max_expected": 50, "clock": Clock()},
    }
    return make(name, **options.get(name, {}))


def engines(*loads: int) -> list[Candidate]:
    return [Candidate(f"e{number}", load) for number, load in enumerate(loads)]


def asked(text: str, salt: str = "", session: str = "") -> PromptRequest:
    return PromptRequest(text=text, model="m", salt=salt, session=session)


def written(formula: str) -> str:
    """The text that "x*128 + y*72" stands for."""
    return "".join(
        letter * int(count or 1) for letter, _, count in (part.partition("*") for part in formula.split(" + "))
    )


@pytest.mark.long
@pytest.mark.parametrize("case", VECTORS["cache_aware_decision"]["cases"])
def test_cache_aware_decides_as_published(case: dict[str, Any]) -> None:
    assert decide(case["loads"], case["rate"], case["threshold"], case["abs"], case["rel"]).value == case["expect"]


@pytest.mark.long
def test_the_presets_of_cache_aware_are_those_that_were_seen() -> None:
    for preset, seen in zip(
        (LOG_OF_2025_06, PYTHON_ARGUMENTS), VECTORS["cache_aware_decision"]["defaults_seen"], strict=True
    ):
        assert {name: seen[name] for name in preset if name != "no_match"}.items() <= preset.items()
        CacheAware(**preset)


@pytest.mark.long
@pytest.mark.parametrize("case", VECTORS["bounded_loads"]["ok"])
def test_loads_are_bounded_as_published(case: dict[str, Any]) -> None:
    assert within_bound(case["load"], case["total"], case["n"], case["factor"]) == case["ok"]


@pytest.mark.long
def test_chwbl_serves_as_published() -> None:
    run = VECTORS["bounded_loads"]["run"]
    policy, both, served = BoundedLoads(mean_load_factor=run["factor"]), engines(*run["loads"]), Counter[str]()
    homes: dict[str, PromptRequest] = {}  # of each engine, a request that belongs to it
    for number in range(100):
        homes.setdefault(policy.choose(asked(str(number)), engines(0, 0)).engine, asked(str(number)))
    for step in run["steps"]:
        for _ in range(step["requests"]):
            name = policy.choose(homes[f"e{step['prefer']}"], both).engine
            served[name] += 1
            both[int(name[1:])].load += 1
        assert [served["e0"], served["e1"]] == step["served"]
        assert [one.load for one in both] == step.get("loads", [one.load for one in both])


@pytest.mark.long
def test_chwbl_takes_the_first_one_if_all_are_above_the_bound() -> None:
    policy = BoundedLoads(mean_load_factor=1.0)
    assert policy.choose(asked("x"), engines(7, 7)).why == "first on the ring"  # 7 <= (14 + 1) / 2
    first = policy.choose(asked("x"), engines(0, 0)).engine
    assert policy.choose(asked("x"), engines(*(9 if f"e{n}" == first else 0 for n in (0, 1)))).why == "next on the ring"


@pytest.mark.long
@pytest.mark.parametrize("case", VECTORS["hash_trie"]["cases"])
def test_the_hash_trie_matches_as_published(case: dict[str, Any]) -> None:
    policy = PrefixHashTrie()
    for formula, engine in VECTORS["hash_trie"]["insert"]:
        policy.sent(asked(written(formula)), engine)
    assert policy.match(asked(written(case["text"])), case["available"]) == (case["matched"], case["endpoints"])


@pytest.mark.long
@pytest.mark.parametrize("case", VECTORS["approximate_lru_index"]["cases"])
def test_blocks_of_approx_lru_are_as_published(case: dict[str, Any]) -> None:
    policy = ApproximateLru(block_tokens=1, characters_per_token=case["block_chars"])
    if "text" in case:
        assert len(policy.hashes(asked(written(case["text"])))) == case["blocks"]
        return
    one, other = (policy.hashes(asked(text)) for text in case["texts"])
    assert (sum(map(int.__eq__, one, other)), len(other)) == (case["matched"], case["of"])


@pytest.mark.long
def test_the_index_of_approx_lru_is_as_published() -> None:
    for case in VECTORS["approximate_lru_index"]["lru"]:
        index = LruIndex(case["size"])
        for server, hashes in case["add"]:
            index.add(server, hashes)
        servers = sorted({server for server, _ in case["add"]})
        found = {block: [server for server in servers if index.leading(server, [int(block)])] for block in case["get"]}
        assert found == case["get"]


@pytest.mark.long
@pytest.mark.parametrize("case", VECTORS["block_hash_table"]["cases"])
def test_blocks_of_block_hash_are_as_published(case: dict[str, Any]) -> None:
    if "bytes" in case:
        assert len(byte_blocks(bytes(case["bytes"]), case["block"])) == case["hashes"]
    else:
        assert match_percent(case["matched"], case["of"]) == case["percent"]


@pytest.mark.long
def test_the_least_cost_is_taken_as_published() -> None:
    """Dynamo's example has costs, which are compared as loads are here."""
    case = VECTORS["cost"]
    candidates = [Candidate(name, cost) for name, cost in case["workers"].items()]
    assert make("least_loaded").choose(asked("x"), candidates).engine == case["expect"]


def modules_after(program: str) -> set[str]:
    """The modules that a new process has imported after a program."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_policies_need_nothing_heavy_and_published_ones_are_imported_when_named() -> None:
    modules = modules_after(
        "from lmc.router.policies import make; [make(n) for n in ('documents', 'precise', 'session')]"
    )
    assert not {"torch", "zmq", "numpy", "msgspec"} & modules
    assert not {name for name in modules if "published" in name}
    modules = modules_after("from lmc.router.policies import make; make('cache_aware')")
    assert "lmc.router.policies.published.cache_aware" in modules
    assert not {"torch", "zmq", "numpy", "msgspec", "lmc.router.policies.published.simhash"} & modules


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("fastest", {}, "unknown policy 'fastest': use one of documents, precise, round_robin"),
        ("chwbl", {"factor": 2}, "no option factor; its options are prefix_characters, replicas, mean_load_factor"),
        ("round_robin", {"seed": 2}, "no option seed; it has no options"),
        ("chwbl", {"mean_load_factor": 0.5}, "mean_load_factor = 0.5 is invalid: use 1 or more"),
        ("cache_aware", {"max_tree_size": 0}, "max_tree_size = 0 is invalid: use a whole number above 0"),
        ("prefix_hash_trie", {"ties": "first"}, "ties = 'first' is invalid: use random or least_loaded"),
    ],
)
def test_a_wrong_policy_or_option_is_explained(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(name, **options)


# What holds for every policy.


def run(
    policy: Policy, requests: Sequence[PromptRequest], shuffle: random.Random | None = None
) -> list[tuple[str, str, float]]:
    """The choices for requests of which nobody finishes any."""
    candidates, chosen = engines(0, 0, 0, 0), []
    loads = {candidate.name: candidate for candidate in candidates}
    for request in requests:
        if shuffle:
            shuffle.shuffle(candidates)
        choice = policy.choose(request, candidates)
        policy.sent(request, choice.engine)
        loads[choice.engine].load += 1
        chosen.append(tuple(choice))
    return chosen


def requests_of(salt: str, letters: str = "abcd", count: int = 60) -> list[PromptRequest]:
    dice = random.Random(7)
    return [
        asked("".join(dice.choices(letters, k=3)) * dice.randint(1, 30), salt, session=f"{letters}{dice.randint(0, 9)}")
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_choices_are_the_same_again_whatever_the_order_of_candidates(name: str) -> None:
    names = ("e0", "e1", "e2", "e3")
    first, again = policy_of(name, *names), policy_of(name, *names)
    choices = run(first, requests_of("tenant"))
    assert choices == run(again, requests_of("tenant"), random.Random(3))
    assert {engine for engine, *_ in choices} <= set(names)


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_tenant_writes_steers_nobody_else(name: str) -> None:
    names = ("e0", "e1", "e2", "e3")
    same, other = policy_of(name, *names), policy_of(name, *names)
    for policy, letters in ((same, "abcd"), (other, "wxyz")):
        for number, request in enumerate(requests_of("one tenant", letters)):
            policy.sent(request, names[number % 4])
    mine = requests_of("another tenant")
    assert [same.choose(request, engines(0, 0, 0, 0)) for request in mine] == [
        other.choose(request, engines(0, 0, 0, 0)) for request in mine
    ]


@pytest.mark.parametrize("name", REMEMBER)
def test_a_prompt_goes_where_its_tenant_sent_it_before(name: str) -> None:
    policy = policy_of(name, "e0", "e1", "e2")
    document = "A document that is long enough to have several blocks. "
    policy.sent(asked(document + "One question", "tenant"), "e2")
    choice = policy.choose(asked(document + "Another one", "tenant"), engines(1, 1, 1))
    assert choice.engine == "e2"
    assert choice.expected_tokens >= len(document) / 4 - 8
    other = policy.choose(asked(document + "Another one", "another tenant"), engines(1, 1, 1))
    assert other.expected_tokens == 0


@pytest.mark.parametrize("name", [*REMEMBER, "documents"])
def test_what_an_engine_has_not_taken_is_taken_back_and_nothing_else(name: str) -> None:
    policy = make(name) if name == "documents" else policy_of(name, "e0", "e1", "e2")
    beginning = "system # # " + "one " * 15
    longer = asked(beginning + " # # " + "two " * 15 + " # # why", "tenant")
    policy.sent(asked(beginning + " # # why", "tenant"), "e2")
    before = policy.choose(longer, engines(1, 1, 1))
    assert before.expected_tokens > 0
    take_back = policy.sent(longer, "e2")
    assert take_back is not None
    assert policy.choose(longer, engines(1, 1, 1)).expected_tokens > before.expected_tokens
    take_back()
    assert policy.choose(longer, engines(1, 1, 1)) == before
    take_back()


def test_a_conversation_goes_back_to_where_it_was() -> None:
    policy, request = make("documents"), asked("x" * 4000, session="s")
    policy.choose(request, engines(0, 0))
    policy.sent(request, "e0")
    take_back = policy.sent(asked("y" * 4000, session="s"), "e1")
    assert take_back is not None
    take_back()
    assert policy.choose(asked("z" * 4000, session="s"), engines(0, 0))[:2] == ("e0", "conversation")


def reachable(root: object) -> list[object]:
    """All objects that are reached from one, except for code."""
    seen, waiting = {id(root): root}, [root]
    while waiting:
        looked_at = waiting.pop()
        # What Python's own search for garbage leaves out are keys of a dict that are strings.
        keys = list(looked_at) if isinstance(looked_at, dict) else []
        for found in gc.get_referents(looked_at) + keys:
            if id(found) not in seen and not isinstance(found, type | ModuleType | FunctionType | BuiltinFunctionType):
                seen[id(found)] = found
                waiting.append(found)
    return list(seen.values())


def mentions(policy: Policy, engine: str) -> bool:
    return any(found == engine for found in reachable(policy) if isinstance(found, str))


@pytest.mark.parametrize("name", POLICIES)
def test_an_engine_that_is_forgotten_leaves_nothing_behind(name: str) -> None:
    policy = policy_of(name, "e0", "e1", "e2", "e3")
    requests = requests_of("one tenant") + requests_of("another")
    for number, request in enumerate(requests):
        policy.choose(request, engines(0, 0, 0, 0))
        policy.sent(request, f"e{number % 4}")
    if name in REMEMBER or name in ("session", "chwbl", "simhash", "round_robin", "documents"):
        assert mentions(policy, "e2")
    policy.forget("e2")
    policy.forget("e2")
    policy.forget("never seen")
    assert not mentions(policy, "e2")
    assert "e2" not in {policy.choose(request, engines(0, 0)).engine for request in requests}


@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_bounded(name: str) -> None:
    """Each request is of another tenant and session, which is where a limit of each tenant alone would grow."""
    policy = policy_of(name, "e0", "e1")

    def send(numbers: range) -> int:
        for number in numbers:
            request = asked(f"{number:06} is asked this " * 3, f"tenant {number}", f"session {number}")
            policy.choose(request, engines(0, 0))
            policy.sent(request, f"e{number % 2}")
        return len(reachable(policy))

    full = send(range(500))
    assert send(range(500, 1500)) <= full + 100


# What is particular to one of them.


def test_round_robin_takes_turns_even_if_candidates_change() -> None:
    policy = make("round_robin")

    def turn(*loads: int) -> str:
        name = policy.choose(asked("x"), engines(*loads)).engine
        policy.sent(asked("x"), name)
        return name

    assert [turn(0, 0, 0) for _ in range(4)] == ["e0", "e1", "e2", "e0"]
    assert [turn(9, 0), turn(9, 0), turn(0, 0, 0), turn(0, 0, 0)] == ["e1", "e0", "e2", "e1"]


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    policy = make("power_of_two", seed=1)
    chosen = Counter(policy.choose(asked("x"), engines(0, 1, 2, 3)).engine for _ in range(600))
    assert sorted(chosen, key=lambda name: -chosen[name]) == ["e0", "e1", "e2"]
    idle = Counter(policy.choose(asked("x"), engines(0, 0)).engine for _ in range(600))
    assert min(idle.values()) > 250
    assert policy.choose(asked("x"), engines(5)).engine == "e0"


def test_a_session_stays_and_a_request_without_one_goes_where_the_load_is_least() -> None:
    policy = make("session")
    homes = {policy.choose(asked(str(n), "", "a session"), engines(n, 9 - n, n % 3)).engine for n in range(10)}
    assert len(homes) == 1
    assert policy.choose(asked("x"), engines(2, 1, 1))[:3] == ("e1", "no session", 0.0)
    of_tenants = {policy.choose(asked("x", f"t{n}", "a session"), engines(0, 0, 0)).engine for n in range(20)}
    assert len(of_tenants) == 3


@pytest.mark.long
def test_ties_of_the_hash_trie_are_random_or_go_by_load() -> None:
    for ties, chosen in (("random", {"e0", "e1"}), ("least_loaded", {"e1"})):
        policy = make("prefix_hash_trie", ties=ties, seed=1, min_match_characters=128)
        for name in ("e0", "e1"):
            policy.sent(asked("x" * 200), name)
        assert {policy.choose(asked("x" * 200), engines(2, 1, 0)).engine for _ in range(30)} == chosen
        assert policy.choose(asked("y" * 200), engines(2, 1, 0))[:3] == ("e2", "match too short", 0.0)
        assert policy.choose(asked("x" * 200), engines(2, 1, 0)).expected_tokens == 50


@pytest.mark.long
def test_cache_aware_evicts_when_its_interval_has_passed() -> None:
    clock = Clock()
    policy = CacheAware(max_tree_size=100, eviction_interval_secs=60, clock=clock)
    for letter in "abc":
        policy.sent(asked(letter * 60), "e1")
    assert policy.choose(asked("a" * 60), engines(0, 0)).why == "longest prefix"
    clock.now = 60
    policy.sent(asked("c" * 60), "e1")
    assert policy.choose(asked("a" * 60), engines(0, 0)).why == "match too short"
    assert policy.choose(asked("c" * 60), engines(0, 0))[:3] == ("e1", "longest prefix", 15.0)
    for letter in "wxyz":  # more than twice the size before the next interval has passed
        policy.sent(asked(letter * 60), "e1")
    assert policy.choose(asked("c" * 60), engines(0, 0)).why == "match too short"


@pytest.mark.long
def test_cache_aware_takes_the_smallest_tree_or_the_least_load() -> None:
    older, newer = CacheAware(**LOG_OF_2025_06), CacheAware()
    for policy in (older, newer):
        policy.sent(asked("x" * 50), "e0")
        policy.sent(asked("y" * 20), "e1")
    assert older.choose(asked("z"), engines(0, 1))[:3] == ("e1", "smallest tree", 0.0)
    assert newer.choose(asked("z"), engines(0, 1))[:3] == ("e0", "match too short", 0.0)
    assert newer.choose(asked("y" * 20), engines(0, 70)).why == "loads out of balance"
    assert newer.choose(asked("y" * 20), engines(0)).why == "match too short", "the engine that has it is away"


@pytest.mark.long
def test_block_hash_keeps_load_in_bounds_and_drops_what_is_idle() -> None:
    clock = Clock()
    policy = BlockHash(block_bytes=4, idle_secs=100, clock=clock)
    policy.sent(asked("a" * 12 + "b" * 4), "e1")
    policy.sent(asked("a" * 12), "e2")
    prompt = asked("a" * 12 + "b" * 5)
    assert policy.choose(prompt, engines(0, 2, 0))[:3] == ("e2", "highest match", 3.0), (
        "2 is above the mean + 1 deviation"
    )
    assert policy.choose(prompt, engines(2, 2, 2))[:3] == ("e1", "highest match", 4.0)
    assert policy.choose(prompt, engines(0, 9, 0)).why == "loads out of balance"
    clock.now = 100.5
    assert policy.choose(prompt, engines(2, 2, 2)).why == "no match"


@pytest.mark.long
def test_approx_lru_has_no_end_of_a_prompt_without_its_beginning() -> None:
    policy = ApproximateLru(block_tokens=1, characters_per_token=1, server_blocks=5)
    policy.sent(asked("abcd"), "e1")
    policy.sent(asked("xyz"), "e1")
    assert policy.choose(asked("abcd"), engines(0, 0))[:3] == ("e1", "largest share", 2.0)
    assert policy.choose(asked("xyz"), engines(0, 0))[:3] == ("e1", "largest share", 3.0)


def test_precise_counts_tiers_by_their_weights_and_expects_what_was_sent() -> None:
    clock, index = Clock(), BlockIndex()
    policy = Precise(tokenize=tokenize, index=index, clock=clock)
    for engine, media in (("e0", ["gpu", "cpu"]), ("e1", ["cpu", "cpu"]), ("e2", ["gpu", "storage"])):
        for number, medium in enumerate(media):
            parent = None if number == 0 else 0
            index.stored(CacheSource(engine), [number], parent, [97 + number] * SIZE, SIZE, (medium, None))
    prompt = asked("aaaabbbbcccc")
    assert policy.choose(prompt, engines(9, 0, 0))[:3] == ("e0", "longest run", 2 * SIZE)
    index.removed(CacheSource("e0"), [0])
    assert policy.choose(prompt, engines(0, 9, 0))[:3] == ("e1", "longest run", 2 * SIZE)
    policy.sent(prompt, "e2")
    assert policy.choose(prompt, engines(0, 0, 9))[:3] == ("e2", "longest run", 3 * SIZE)
    clock.now = 2.0
    assert policy.choose(prompt, engines(0, 9, 0)).engine == "e1"


def test_precise_tokenizes_a_prompt_once() -> None:
    asked_for = []

    def counting(text: str) -> list[int]:
        asked_for.append(text)
        return tokenize(text)

    policy = Precise(tokenize=counting, index=index_of("e0", "e1"))
    for text in ("one prompt", "another prompt"):
        policy.choose(asked(text), engines(0, 0))
        policy.sent(asked(text), "e0")
    assert asked_for == ["one prompt", "another prompt"]


@pytest.mark.long
def test_similar_prompts_have_the_same_fingerprint_more_often_than_others() -> None:
    dice = random.Random(5)
    words = ["".join(dice.choices("etaoinshrdlu", k=dice.randint(2, 9))) for _ in range(2000)]
    prompts = [" ".join(dice.choices(words, k=400)) for _ in range(200)]
    like = sum(fingerprint(prompt, 8) == fingerprint("Hello! " + prompt + " Thanks.", 8) for prompt in prompts)
    unlike = sum(fingerprint(one, 8) == fingerprint(other, 8) for one, other in pairwise(prompts))
    assert like > 100
    assert unlike < 10
    assert [fingerprint(text, 8) == fingerprint(text, 8) for text in ("", "a", "é" * 9, "\ud800")] == [True] * 4


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_may_be_empty_or_have_half_a_surrogate_pair(name: str) -> None:
    policy = policy_of(name, "e0", "e1")
    for text in ("", "\ud800" * 40, "\0"):
        choice = policy.choose(asked(text, text, text), engines(0, 0))
        policy.sent(asked(text, text, text), choice.engine)


NAMES = st.sets(st.text("abc:/0123", min_size=1, max_size=6), min_size=2, max_size=6)


@given(NAMES, st.lists(st.text(max_size=5), max_size=30), st.data())
def test_an_engine_that_goes_moves_its_own_keys_only(names: set[str], keys: list[str], data: st.DataObject) -> None:
    ring, other = Ring(replicas=8), Ring(replicas=8)
    before = {key: list(ring.walk(key, names)) for key in keys}
    gone = data.draw(st.sampled_from(sorted(names)))
    left = names - {gone}
    away = {key: list(ring.walk(key, left)) for key in keys}
    ring.remove(gone)
    removed = {key: list(ring.walk(key, left)) for key in keys}
    assert removed == away == {key: [name for name in order if name != gone] for key, order in before.items()}
    assert {key: list(other.walk(key, names)) for key in keys} == before, "each router finds the same"
    assert all(sorted(order) == sorted(names) for order in before.values())


def test_keys_are_spread_evenly_over_a_ring() -> None:
    ring, names = Ring(), [f"http://10.0.0.{number}:8000" for number in range(8)]
    counts = Counter(next(ring.walk(str(key), names)) for key in range(4000))
    assert max(counts.values()) < 1.25 * 500


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=20), st.integers(0, 20))
def test_the_number_of_leading_blocks_is_found(blocks: list[bytes], held: int) -> None:
    hashes = chained(blocks, "scope")
    assert leading(hashes, set(hashes[:held]).__contains__) == min(held, len(hashes))
    assert not set(hashes) & set(chained(blocks, "another scope"))


@pytest.mark.long
@given(
    st.lists(
        st.tuples(st.text("ab", max_size=12), st.sampled_from(["e0", "e1"]), st.sampled_from(["", "t"])), max_size=25
    ),
    st.text("ab", max_size=12),
)
def test_the_hash_trie_finds_what_a_list_of_texts_does(sent: list[tuple[str, str, str]], text: str) -> None:
    def chunks(of: str) -> list[str]:
        return [of[start : start + 2] for start in range(0, len(of), 2)]

    policy, best = PrefixHashTrie(chunk_characters=2), dict.fromkeys(("e0", "e1"), 0)
    for before, engine, salt in sent:
        policy.sent(asked(before, salt), engine)
        if not salt:
            pairs = enumerate(zip(chunks(before), chunks(text), strict=False))
            same = next((place for place, (one, other) in pairs if one != other), None)
            found = min(len(chunks(before)), len(chunks(text))) if same is None else same
            best[engine] = max(best[engine], found)
    most = max(best.values())
    assert policy.match(asked(text), best) == (2 * most, [name for name in best if best[name] == most])


@pytest.mark.parametrize("name", REMEMBER)
def test_a_policy_learns_nothing_by_being_asked_about_a_prompt(name: str) -> None:
    policy = policy_of(name, "e0", "e1")
    policy.sent(asked("a" * 80), "e1")
    before = policy.choose(asked("a" * 80 + "b"), engines(0, 0))
    for _ in range(3):
        policy.choose(asked("b" * 80), engines(0, 0))
    assert policy.choose(asked("a" * 80 + "b"), engines(0, 0)) == before
    assert policy.choose(asked("b" * 80), engines(0, 0)).expected_tokens == 0
