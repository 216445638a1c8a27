"""Which versions of vLLM are accepted, and what is said of the others."""

import ast
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lmc.connectors.vllm import vllm_api
from lmc.connectors.vllm.vllm_api import OVERRIDE, USED, check_version
from lmc.errors import ConfigError

CONNECTOR = Path(vllm_api.__file__).parent
OTHERS = ["0.33.0", "0.31.2", "0.320.0", "1.32.0", "0", "0.x", "dev", ""]


@pytest.fixture
def install(monkeypatch):
    """Puts a vLLM of some version, with these names in its `vllm.config`, where imports find it."""
    monkeypatch.delenv(OVERRIDE, raising=False)

    def put(version, **names):
        vllm, config = ModuleType("vllm"), ModuleType("vllm.config")
        vllm.__version__ = version
        vars(config).update(names)
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        monkeypatch.setitem(sys.modules, "vllm.config", config)
        monkeypatch.setitem(sys.modules, "vllm.distributed", None)  # cannot be imported

    return put


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.DEBUG)
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.5", "0.32.10", "0.32.1rc2", "0.32.0.dev7+g1a2b3c", "0.32.0+cpu"])
@pytest.mark.parametrize("override", ["", "1"])
def test_every_patch_of_the_supported_version_is_accepted(install, monkeypatch, warnings, version, override):
    install(version)
    monkeypatch.setenv(OVERRIDE, override)
    check_version()
    assert warnings() == []


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("override", [None, "", "0", "true"])
def test_another_version_is_refused_and_the_error_says_what_to_install(install, monkeypatch, version, override):
    install(version)
    if override is not None:
        monkeypatch.setenv(OVERRIDE, override)
    with pytest.raises(ConfigError) as caught:
        check_version()
    assert f"this is vLLM {version}: install 'vllm==0.32.*'" in str(caught.value)
    assert f"set {OVERRIDE}=1" in str(caught.value)


@pytest.mark.parametrize("version", OTHERS)
def test_another_version_is_tried_with_one_warning_if_the_user_says_so(install, monkeypatch, warnings, version):
    install(version)
    monkeypatch.setenv(OVERRIDE, "1")
    check_version()
    assert warnings() == [("WARNING", f"lmc was not verified with vLLM {version}, only with 0.32 ({OVERRIDE}=1)")]


def test_a_name_is_taken_from_vllm(install):
    install("0.32.0", VllmConfig=dict)
    assert vllm_api.VllmConfig is dict


@pytest.mark.parametrize("name", ["VllmConfig", "get_tp_group"])
def test_a_name_that_a_supported_vllm_does_not_have_is_an_error_that_names_it(install, name):
    """The module has no such name, or there is no such module."""
    install("0.32.9")
    with pytest.raises(ConfigError, match=f"this vLLM has no {USED[name]}.{name}, which lmc needs") as caught:
        getattr(vllm_api, name)
    assert isinstance(caught.value.__cause__, AttributeError | ImportError)


def test_a_name_that_another_version_does_not_have_is_blamed_on_the_version(install, monkeypatch):
    install("0.40.0")
    with pytest.raises(ConfigError, match=r"install 'vllm==0.32.\*'"):
        vllm_api.VllmConfig
    monkeypatch.setenv(OVERRIDE, "1")
    with pytest.raises(ConfigError, match=r"has no vllm\.config\.VllmConfig"):
        vllm_api.VllmConfig


def test_a_version_that_is_not_supported_is_refused_even_if_it_has_every_name(install):
    install("0.33.0", VllmConfig=dict)
    assert vllm_api.VllmConfig is dict, "names alone are not what was verified"
    with pytest.raises(ConfigError):
        check_version()


def test_any_other_name_is_no_name_of_the_module(install):
    install("0.33.0")
    with pytest.raises(AttributeError, match="Vllmconfig"):
        vllm_api.Vllmconfig
    assert not hasattr(vllm_api, "__path__")


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
