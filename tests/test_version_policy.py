"""Which versions of vLLM are used, and what happens with the others."""

import ast
import logging
import sys
from abc import ABC, abstractmethod
from enum import Enum, auto
from pathlib import Path
from types import ModuleType

import pytest

from lmc.connectors.vllm import contract, entry, vllm_api
from lmc.connectors.vllm.plugin import register
from lmc.connectors.vllm.vllm_api import LATER, SUBSTITUTES, USED, parsed_version, warn_if_untested
from lmc.errors import ConfigError

CONNECTOR = Path(vllm_api.__file__).parent
TESTED = ["0.30.0", "0.31.2", "0.32.0", "0.32.1rc2", "0.32.0.dev7+g1a2b3c", "0.33.0+cpu", "0.33.10"]
UNTESTED = ["0.34.0", "0.320.0", "1.32.0", "0", "0.x", "dev", ""]


@pytest.fixture
def install(monkeypatch):
    """Puts a vLLM of some version, with these names of `USED`, where imports find it."""

    def put(version, **names):
        vllm = ModuleType("vllm")
        vllm.__version__, vllm.__path__ = version, []  # so that nothing else is found in it
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        for name, value in names.items():
            if USED[name] not in sys.modules or not hasattr(sys.modules[USED[name]], "ours"):
                module = ModuleType(USED[name])
                module.ours = True
                monkeypatch.setitem(sys.modules, USED[name], module)
            setattr(sys.modules[USED[name]], name, value)

    for module in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, module)
    return put


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.DEBUG)
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


class Role(Enum):
    SCHEDULER = auto()
    WORKER = auto()


class Base(ABC):
    """Connectors' base class of a version that does not exist: a hook that lmc has never seen has to be implemented."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.given = vllm_config, role, kv_cache_config

    @abstractmethod
    def start_load_kv(self, forward_context, **named): ...

    @abstractmethod
    def a_hook_of_tomorrow(self, one, *, other): ...


class Factory:
    """As vLLM's: names of connectors, and what imports their classes."""

    def __init__(self):
        self._registry = self.registered = {}

    def register_connector(self, name, module, class_name):
        self._registry[name] = module, class_name


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", TESTED)
def test_nothing_is_said_of_a_version_that_was_tested(install, logged, version):
    install(version)
    warn_if_untested()
    assert logged() == []


@pytest.mark.parametrize("version", UNTESTED)
def test_one_warning_is_logged_for_a_version_that_was_not_tested(install, logged, version):
    install(version)
    warn_if_untested()
    assert logged() == [("WARNING", f"lmc was tested with vLLM 0.30 to 0.33, but not with {version}")]


@pytest.mark.parametrize(
    ("version", "number"),
    [("0.30.0", (0, 30)), ("0.320", (0, 320)), ("1.2rc1", (1, 2)), ("12.0.1+cpu", (12, 0)), ("0.x", None), ("", None)],
)
def test_a_version_is_compared_by_its_first_two_numbers(version, number):
    assert parsed_version(version) == number


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_name_is_taken_from_vllm(install):
    install("0.32.0", VllmConfig=dict)
    assert vllm_api.VllmConfig is dict


@pytest.mark.parametrize("name", ["CUDAGraphMode", "get_tp_group"])
def test_a_name_that_vllm_does_not_have_is_an_error_that_names_it(install, name):
    """The module has no such name, or there is no such module."""
    install("0.32.9", VllmConfig=dict)
    with pytest.raises(ConfigError, match=f"this vLLM has no {USED[name]}.{name}, which lmc needs") as caught:
        getattr(vllm_api, name)
    assert isinstance(caught.value.__cause__, AttributeError | ImportError)


def test_a_name_that_older_versions_do_not_have_has_a_substitute(install):
    install("0.30.0")
    assert vllm_api.to_event_extra_keys([("salt",), None]) == [("salt",), None]
    install("0.31.0", to_event_extra_keys=tuple)
    assert vllm_api.to_event_extra_keys is tuple


def test_any_other_name_is_no_name_of_the_module(install):
    install("0.33.0")
    with pytest.raises(AttributeError, match="Vllmconfig"):
        vllm_api.Vllmconfig
    assert not hasattr(vllm_api, "__path__")


# -- vLLM without lmc -------------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch):
    """What vLLM gets as `LMCConnector`, chosen anew."""
    monkeypatch.setattr(entry, "_chosen", {})
    return lambda: entry.LMCConnector


def test_with_a_vllm_that_lacks_something_the_connector_does_nothing_and_says_what_is_missing(install, chosen, logged):
    install("0.40.0", KVConnectorBase_V1=Base, KVConnectorMetadata=dict)
    kind = chosen()
    scheduler, worker = (kind("config", role, kv_cache_config="caches") for role in Role)
    ((level, line),) = logged()
    assert level == "ERROR"
    assert line.startswith(
        "lmc is disabled, because it does not work with vLLM 0.40.0: vllm.config.CUDAGraphMode is miss"
    )
    assert "a_hook_of_tomorrow of connectors is new, and lmc must implement it" in line
    assert line.endswith("To use lmc, install 'vllm>=0.30,<0.34'")
    assert scheduler.given == ("config", Role.SCHEDULER, "caches")
    assert scheduler.get_num_new_matched_tokens("request", 0) == (0, False)
    assert scheduler.request_finished("request", [1]) == (False, None)
    assert scheduler.build_connector_meta("output") == {}
    assert worker.start_load_kv("context", more=1) is None
    assert worker.a_hook_of_tomorrow(1, other=2) is None
    assert chosen() is kind


def test_an_older_vllm_is_served_without_lmc_even_if_it_has_every_name(install, chosen, logged):
    install("0.29.1", **{**dict.fromkeys(USED, dict), "KVConnectorBase_V1": Base})
    chosen()("config", Role.SCHEDULER, "caches")
    ((_, line),) = logged()
    assert "does not work with vLLM 0.29.1: it is older than 0.30. To use lmc, install" in line


def test_names_that_only_some_tested_versions_have_are_not_missed(install):
    names = USED.keys() - SUBSTITUTES.keys() - LATER
    install("0.30.0", **dict.fromkeys(names, dict))
    missing = [one for one in contract.objections(contract.facts_of_imported()) if one.startswith("vllm.")]
    assert missing == []


def test_the_plugin_registers_the_connector_also_where_lmc_cannot_work(install, logged):
    factory = Factory()
    install("0.40.0", KVConnectorFactory=factory)
    register()
    register()
    assert factory.registered == {"LMCConnector": ("lmc.connectors.vllm.entry", "LMCConnector")}
    assert logged()[0][0] == "WARNING"
    assert "WorkerWrapperBase" in logged()[0][1]


def test_the_plugin_warns_if_vllm_has_no_connectors(install, logged):
    install("2.0.0")
    register()
    ((level, line),) = logged()
    assert level == "WARNING"
    assert "this vLLM has no vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory" in line


# -- the one module ---------------------------------------------------------------------------------------------------


def imported(path):
    """What a file imports, or takes from `vllm_api`: module and name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vllm_api":
            yield vllm_api.__name__, node.attr


def test_all_that_lmc_uses_of_vllm_is_in_one_list():
    """A name that nobody uses any more need not be checked for a new version."""
    found = [one for path in sorted(CONNECTOR.rglob("*.py")) for one in imported(path)]
    assert [module for module, _ in found if module.split(".")[0] == "vllm"] == []
    used = {name for module, name in found if module == vllm_api.__name__} - vars(vllm_api).keys()
    assert used == USED.keys()


def test_differences_between_versions_are_found_by_what_is_there():
    """Only these modules know a version's number, and none of them branches on it for anything but the policy."""
    may = {"vllm_api.py", "contract.py", "entry.py"}
    asked = {"installed_version", "parsed_version", "OLDEST", "NEWEST", "__version__"}
    for path in CONNECTOR.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert path.name in may or not names & asked, path.name
