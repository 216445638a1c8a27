"""The contract with vLLM, over what was extracted from the versions that lmc supports, and how it is extracted."""

import json
import zipfile
from copy import deepcopy
from pathlib import Path
from textwrap import dedent

import pytest

from lmc.connectors.vllm import contract
from lmc.connectors.vllm.contract import BASE, CALLS, FIELDS, findings, lmc_calls, lmc_hooks, main, objections
from lmc.connectors.vllm.vllm_api import NEWEST, OLDEST, USED
from lmc.connectors.vllm.vllm_facts import (
    HookCall,
    Sources,
    VllmFacts,
    accepts,
    hook_calls,
    read_facts,
    signature_of,
)
from lmc.errors import InputError

DATA = Path(__file__).parent / "data" / "vllm"
VERSIONS = [f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]


def facts_in(file: Path) -> VllmFacts:
    """The facts that `to_json` has written."""
    found = json.loads(file.read_text())
    return VllmFacts(**{**found, "calls": [HookCall(**call) for call in found["calls"]]})


ALL = {version: facts_in(DATA / f"{version}.json") for version in VERSIONS}
REQUEST = "vllm.v1.request.Request"


@pytest.fixture(params=VERSIONS)
def facts(request):
    """A copy of what was extracted from one version."""
    return deepcopy(ALL[request.param])


# -- the versions of the window ---------------------------------------------------------------------------------------


def test_every_supported_version_was_extracted_and_fulfils_the_contract(facts):
    assert findings(facts) == []


def test_an_extract_is_of_the_version_that_its_name_says():
    assert {path.stem for path in DATA.glob("*.json")} == set(VERSIONS)
    for version, facts in ALL.items():
        assert facts.version.startswith(f"{version}.")
        assert (DATA / f"{version}.json").read_text() == facts.to_json() + "\n"


def test_the_tables_have_nothing_that_is_in_no_version_and_no_question_mark_too_many():
    places = [{(call.hook, call.file, name) for call in one.calls for name in call.functions} for one in ALL.values()]
    written = {(hook, *place.split()) for place, hooks in CALLS.items() for hook in hooks.split()}
    in_all, in_some = set.intersection(*places), set.union(*places)
    marked = {(f"?{hook}", file, name) for hook, file, name in in_some - in_all}
    assert written == in_all | marked


def test_what_made_old_versions_of_lmc_fail_is_visible_in_the_calls():
    """In 0.30 empty steps do not save, and from 0.33 on an engine that wakes up repeats the handshake."""

    def called(version, hook):
        return {name for call in ALL[version].calls if call.hook == hook for name in call.functions}

    empty = {"ActiveKVConnector.no_forward", "KVConnectorModelRunnerMixin.kv_connector_no_forward"}
    assert not empty & called("0.30", "wait_for_save")
    assert empty <= called("0.31", "wait_for_save")
    assert empty <= called("0.30", "get_finished") | called("0.30", "build_connector_worker_meta")
    assert "EngineCore.wake_up" in called("0.33", "set_xfer_handshake_metadata_pp_aware")
    assert "EngineCore.wake_up" not in called("0.32", "set_xfer_handshake_metadata_pp_aware")


# -- what is found ----------------------------------------------------------------------------------------------------


def test_a_missing_name_is_named(facts):
    (facts.functions if "vllm.forward_context.set_forward_context" in facts.functions else facts.classes).pop(
        "vllm.forward_context.set_forward_context"
    )
    del facts.classes["vllm.distributed.kv_events.BlockStored"]
    wanted = [
        "vllm.distributed.kv_events.BlockStored is missing",
        "vllm.forward_context.set_forward_context is missing",
    ]
    assert sorted(objections(facts)) == wanted
    assert sorted(findings(facts)) == wanted


@pytest.mark.parametrize(
    ("hook", "signature", "said"),
    [
        ("get_finished", ["finished_req_ids", "step"], "lmc does not accept step"),
        ("get_finished", ["finished_req_ids", "*", "step="], "lmc does not accept step"),
        ("get_finished", ["finished_req_ids", "**more"], "lmc does not accept further arguments"),
        ("get_finished", [], "lmc needs finished_req_ids"),
        ("request_finished", ["block_ids", "request"], "lmc expects request instead of block_ids"),
    ],
)
def test_a_hook_with_other_parameters_is_named(facts, hook, signature, said):
    facts.classes[BASE][hook] = signature
    (found,) = objections(facts)
    assert found == f"{hook} of connectors has other parameters, ({', '.join(signature)}): {said}"


def test_a_hook_may_lose_a_parameter_that_lmc_does_not_need(facts):
    facts.classes[BASE]["start_load_kv"] = ["forward_context"]
    facts.classes[BASE]["build_kv_connector_stats"] = []
    assert findings(facts) == []


def test_a_hook_that_is_gone_and_one_that_has_to_be_implemented_are_named(facts):
    del facts.classes[BASE]["bind_gpu_block_pool"]
    facts.classes[BASE]["take_events"] = None
    facts.abstract.append("pack_pages")
    assert objections(facts) == [
        "bind_gpu_block_pool of connectors is missing",
        "take_events of connectors is data instead of a method",
        "pack_pages of connectors is new, and lmc must implement it",
    ]


def test_an_older_version_is_refused_whatever_it_has():
    facts = deepcopy(ALL["0.30"])
    older = VllmFacts(**{name: getattr(facts, name) for name in ("functions", "classes", "calls")}, version="0.29.0")
    assert objections(older) == ["it is older than 0.30"]


def test_a_newer_version_that_has_everything_is_not_refused():
    facts = ALL["0.33"]
    newer = VllmFacts(**{name: getattr(facts, name) for name in ("functions", "classes", "calls")}, version="0.47.0")
    assert findings(newer) == []


def test_functions_that_do_not_take_what_lmc_gives_them_are_named(facts):
    facts.functions["vllm.utils.hashing.get_hash_fn_by_name"] = ["hash_fn_name", "seed"]
    metadata = "vllm.v1.attention.backend.CommonAttentionMetadata"
    facts.classes[metadata]["__init__"].remove("seq_lens")
    assert findings(facts) == [
        f"{metadata} has other parameters, ({', '.join(facts.classes[metadata]['__init__'])}), than lmc passes",
        "vllm.utils.hashing.get_hash_fn_by_name has other parameters, (hash_fn_name, seed), than lmc passes",
    ]


def test_a_missing_attribute_and_a_method_with_other_parameters_are_named(facts):
    del facts.classes[REQUEST]["num_preemptions"]
    facts.classes["vllm.v1.core.block_pool.BlockPool"]["touch"] = ["blocks", "group"]
    del facts.classes["vllm.v1.metrics.stats.PrefillStats"]
    assert findings(facts) == [
        "vllm.v1.core.block_pool.BlockPool.touch has other parameters, (blocks, group), than lmc passes",
        "vllm.v1.metrics.stats.PrefillStats is missing",
        f"{REQUEST}.num_preemptions is missing",
    ]


def test_a_call_of_a_hook_that_vanished_is_named(facts):
    """The hook is still there, and vLLM does not call it where it did."""
    facts.calls[:] = [call for call in facts.calls if call.hook != "has_pending_push_work"]
    said = "has_pending_push_work is no longer called in Scheduler.has_requests (v1/core/sched/scheduler.py)"
    assert objections(facts) == []
    assert findings(facts) == [said]


def test_a_call_of_a_hook_in_another_place_and_with_other_arguments_is_named(facts):
    facts.calls.append(
        HookCall(
            hook="reset_cache", file="v1/engine/core.py", functions=["EngineCore.doze"], positional=1, keywords=["deep"]
        )
    )
    assert objections(facts) == []
    assert findings(facts) == [
        "reset_cache is called with other arguments than lmc accepts, in v1/engine/core.py: 1 positional, deep",
        "reset_cache is now called in EngineCore.doze (v1/engine/core.py) as well",
    ]


def test_the_cheap_half_needs_nothing_but_names_and_hooks(facts):
    names = dict.fromkeys([f"{module}.{name}" for name, module in USED.items()])
    only = VllmFacts(version=facts.version, functions=names, classes={BASE: facts.classes[BASE]})
    assert objections(only) == []


# -- lmc's side -------------------------------------------------------------------------------------------------------


def test_lmc_s_own_hooks_and_calls_are_read_from_its_code():
    assert lmc_hooks()["__init__"] == ["vllm_config", "role", "kv_cache_config"]
    assert lmc_hooks()["start_load_kv"] == ["forward_context", "**named"]
    assert lmc_hooks()["build_prom_metrics"] == ["*arguments"]
    assert not [name for name in lmc_hooks() if name.startswith("_") and name != "__init__"]
    assert ("get_request_block_hasher", 2, ()) in lmc_calls()
    wanted = ("attn_metadata", "num_tokens", "skip_compiled", "slot_mapping", "vllm_config")
    assert ("set_forward_context", 0, wanted) in lmc_calls()


def test_each_attribute_is_listed_once():
    for path, names in FIELDS.items():
        assert len(set(names.split())) == len(names.split()), path


# -- extraction -------------------------------------------------------------------------------------------------------

PACKAGE = {
    "vllm/__init__.py": "",
    "vllm/config/__init__.py": """
        from typing import TYPE_CHECKING
        from .cache import CacheConfig as Cache
        from vllm.config.model import *
        if TYPE_CHECKING:
            from vllm.config.model import hidden as only_for_types
    """,
    "vllm/config/cache.py": """
        @dataclass
        class Parent:
            first: int

        @dataclass
        class CacheConfig(Parent):
            block_size: int = 16

            @property
            def pages(self): return 1

            @staticmethod
            def parse(text, *, strict=False): ...

            def fill(self, request, /, count=1, *rest, deadline, **more):
                self.filled, self.full = request, True
                self.left: int = 3
    """,
    "vllm/config/model.py": """
        try:
            from fast import hasher
        except ImportError:
            def hasher(data, seed=0): ...
        LIMIT = 3
        def hidden(): ...
    """,
    "vllm/engine.py": """
        class Engine:
            def __init__(self):
                self._greet()

            def wake_up(self):
                self._greet()

            def _greet(self):
                self.scheduler.connector.greet(1, loud=True)

            def step(self):
                self._finish()
                other.ec_connector.save()

            def empty_step(self):
                self._finish(save=False)

            def _finish(self, save=True):
                if save:
                    get_kv_transfer_group().save(*given, **more)

            async def unrelated(self):
                disk.save()
    """,
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": """
        class Base(ABC):
            @abstractmethod
            def save(self): ...
            def greet(self, count, loud): self.save()
    """,
    "vllm/distributed/kv_transfer/kv_connector/v1/other/connector.py": "def f(connector): connector.save()",
    "vllm/v1/kv_offload/tiers.py": "def f(connector): connector.save()",
    "vllm-9.1.0.dist-info/METADATA": "Name: vllm",
}  # fmt: skip
CORE = "distributed/kv_transfer/kv_connector/v1/base.py"


@pytest.fixture(params=["directory", "package", "wheel"])
def sources(request, tmp_path):
    """A small vLLM as a directory, as the package in it, and as a wheel."""
    return Sources(write(tmp_path, request.param))


def write(folder, kind):
    for name, text in PACKAGE.items():
        path = folder / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    if kind != "wheel":
        return folder / "site" / ("vllm" if kind == "package" else "")
    with zipfile.ZipFile(folder / "vllm-9.1.0-cp38-abi3-linux.whl", "w") as wheel:
        for name, text in PACKAGE.items():
            wheel.writestr(name, dedent(text))
    return folder / "vllm-9.1.0-cp38-abi3-linux.whl"


def test_names_are_found_through_imports_and_only_those_that_exist_at_run_time(sources):
    names = [f"vllm.config.{name}" for name in ("Cache", "CacheConfig", "hasher", "LIMIT", "only_for_types", "none")]
    facts = read_facts(sources, [*names, "vllm.missing.name"], {}, "vllm.b.Base", [])
    assert facts.version == "9.1.0"
    assert facts.classes == {"vllm.config.Cache": {}}
    assert facts.functions == {"vllm.config.hasher": ["data", "seed="], "vllm.config.LIMIT": None}


def test_attributes_are_fields_properties_methods_and_what_methods_set_also_of_a_base_class(sources):
    names = ["first", "block_size", "pages", "parse", "fill", "filled", "full", "left", "missing", "__init__"]
    assert read_facts(sources, [], {"vllm.config.Cache": names}, "vllm.b.Base", []).classes["vllm.config.Cache"] == {
        "__init__": ["*", "first", "block_size="],
        "block_size": None,
        "fill": ["request", "count=", "*rest", "deadline", "**more"],
        "filled": None,
        "first": None,
        "full": None,
        "left": None,
        "pages": None,
        "parse": ["text", "*", "strict="],
    }


def test_a_call_of_a_hook_is_said_to_be_in_the_functions_that_are_called_from_outside(sources):
    """A function that turns the hook off by an argument of its name does not count, and no other object's methods."""
    greeting = ["Engine.__init__", "Engine.wake_up"]
    assert hook_calls(sources, ["greet", "save"]) == [
        HookCall(hook="greet", file="engine.py", functions=greeting, positional=1, keywords=["loud"]),
        HookCall(hook="save", file=CORE, functions=["Base.greet"], positional=0, keywords=[]),
        HookCall(hook="save", file="engine.py", functions=["Engine.step"], positional=1, keywords=["**"]),
    ]  # fmt: skip


def test_hooks_of_the_base_class_and_what_connectors_have_to_implement(sources):
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base.Base"
    facts = read_facts(sources, [], {base: []}, base, ["greet", "save", "other"])
    assert facts.classes[base] == {"greet": ["count", "loud"], "save": []}
    assert facts.abstract == ["save"]


def test_signatures_of_what_was_imported_read_as_those_of_files():
    class One:
        def method(self, first, second=2, *, word, other=1, **more): ...

        def further(self, *rest, word): ...

    assert signature_of(One.method, bound=True) == ["first", "second=", "*", "word", "other=", "**more"]
    assert signature_of(One.further, bound=True) == ["*rest", "word"]


@pytest.mark.parametrize(
    ("signature", "positional", "keywords", "taken"),
    [
        (["a", "b="], 1, [], True),
        (["a", "b="], 2, [], True),
        (["a", "b="], 3, [], False),
        (["a", "b="], 0, ["b"], False),
        (["a", "*", "c"], 1, ["c"], True),
        (["a", "*", "c"], 2, [], False),
        (["a", "*", "c"], 1, [], False),
        (["*rest", "c"], 5, ["c"], True),
        (["a", "**more"], 1, ["x"], True),
        (["a"], 1, ["a"], False),
    ],
)
def test_a_signature_says_which_calls_it_takes(signature, positional, keywords, taken):
    assert accepts(signature, positional, keywords) is taken


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["package", "wheel"])
def test_the_command_lists_what_is_missing_and_writes_facts(tmp_path, capsys, kind):
    path = write(tmp_path, kind)
    assert main([str(path)]) == 1
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert f"{BASE} is missing" in lines
    assert f"{REQUEST} is missing" in lines
    assert verdict == f"vLLM 9.1.0: {len(lines)} differences"
    assert main([str(path), "--extract", str(tmp_path / "facts.json")]) == 0
    facts = facts_in(tmp_path / "facts.json")
    assert facts == contract.facts_of(Sources(path))
    assert findings(facts) == lines


def test_the_command_says_that_there_is_no_vllm(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "has no package `vllm`: pass a wheel, or the directory that contains the package" in capsys.readouterr().err
    with pytest.raises(InputError):
        Sources(tmp_path / "missing.whl")
