"""Connectors beside lmc: which they are, and beside which of them prompts are blended."""

from types import SimpleNamespace

import pytest

from lmc.connectors.vllm.multi import blending_objection, neighbours


def of_class(name):
    return type(name, (), {})()


def test_an_engine_s_only_connector_has_no_neighbours():
    ours = of_class("LMCConnector")
    assert neighbours(ours, ours) is None


def test_a_connector_that_is_not_part_of_the_engine_has_no_neighbours():
    assert neighbours(of_class("LMCConnector"), SimpleNamespace(sub_connectors=[of_class("NixlConnector")])) is None


def test_alone_in_a_multi_connector_there_are_none_beside_it():
    ours = of_class("LMCConnector")
    assert neighbours(ours, SimpleNamespace(sub_connectors=[ours])) == []


def test_neighbours_are_found_at_every_depth():
    ours, nixl, example = map(of_class, ("LMCConnector", "NixlConnector", "ExampleConnector"))
    inner = SimpleNamespace(sub_connectors=[ours, example])
    assert neighbours(ours, SimpleNamespace(sub_connectors=[nixl, inner])) == ["NixlConnector", "ExampleConnector"]


@pytest.mark.parametrize("names", [[], ["SimpleCPUOffloadConnector"]])
def test_prompts_are_blended_beside_connectors_that_use_block_hashes(names):
    assert blending_objection(names) == ""


def test_an_objection_names_every_unsafe_connector_once():
    said = blending_objection(["NixlConnector", "SimpleCPUOffloadConnector", "ExampleConnector", "NixlConnector"])
    assert said.startswith("NixlConnector, ExampleConnector next to lmc ")
