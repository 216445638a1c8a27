"""Scattered queries see every key up to their position, and none behind it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmc.blend.kernels.attention import BLOCK, attend, attend_and_score
from lmc.blend.layer_attention import LayerAttention


def by_definition(query, keys, positions, layer, visible=None):
    """Attention weights [Q, T, N], one head at a time, in float64."""
    group = query.shape[1] // keys.shape[0]
    expanded = keys.repeat_interleave(group, dim=0).double()
    logits = torch.einsum("tqd,qnd->qtn", query.double(), expanded) * layer.scale
    if layer.soft_cap:
        logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
    at, own = torch.arange(keys.shape[1])[None], positions[:, None]
    hidden = at > own
    if layer.window:
        hidden = hidden | (own - at >= layer.window)
    if layer.chunk:
        hidden = hidden | (own // layer.chunk != at // layer.chunk)
    if visible is not None:
        hidden = hidden | ~visible[None]
    logits = logits.masked_fill(hidden[None], float("-inf"))
    if layer.sinks is None:
        return logits.softmax(-1)
    sinks = layer.sinks.double()[:, None, None].expand(-1, len(positions), 1)
    return torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sets(st.integers(0, 40), min_size=1),
    st.integers(0, 5),
    st.sampled_from([{}, {"window": 1}, {"window": 7}, {"chunk": 9}, {"window": 100}]),
    st.booleans(),
    st.sampled_from([0.0, 1.5]),
    st.randoms(use_true_random=False),
)
def test_outputs_and_scores_equal_attention_by_definition(
    heads: int, group: int, chosen: set[int], beyond: int, sight: dict[str, int], sinks: bool, soft_cap: float, random
) -> None:
    torch.manual_seed(random.randrange(1000))
    positions = torch.tensor(sorted(chosen))
    length = int(positions[-1]) + 1 + beyond
    query, keys, values = (
        torch.randn(len(positions), heads * group, 8),
        torch.randn(heads, length, 8),
        torch.randn(heads, length, 8),
    )
    visible = torch.rand(length) < 0.7
    visible[positions] = True
    sink = torch.randn(heads * group) if sinks else None
    layer = LayerAttention(scale=0.4, sinks=sink, soft_cap=soft_cap, **sight)

    weights = by_definition(query, keys, positions, layer, visible)
    wanted = torch.einsum("qtn,qnd->tqd", weights, values.repeat_interleave(group, dim=0).double())

    assert torch.allclose(attend(query, (keys, values), positions, layer, visible).double(), wanted, atol=1e-5)
    for over_heads, scores in (("mean", weights.mean(0).amax(0)), ("max", weights.amax((0, 1)))):
        attended, found = attend_and_score(query, (keys, values), positions, layer, visible, over_heads)
        assert torch.allclose(attended.double(), wanted, atol=1e-5)
        assert torch.allclose(found.double(), scores, atol=1e-6)


def test_more_queries_than_a_block_are_answered_alike() -> None:
    torch.manual_seed(0)
    count = 2 * BLOCK + 3
    positions = torch.arange(count) * 2
    query, keys, values = torch.randn(count, 2, 8), torch.randn(1, 2 * count, 8), torch.randn(1, 2 * count, 8)

    together = attend(query, (keys, values), positions, LayerAttention(scale=0.3))

    weights = by_definition(query, keys, positions, LayerAttention(scale=0.3))
    assert torch.allclose(together.double(), torch.einsum("qtn,nd->tqd", weights, values[0].double()), atol=1e-5)


def test_a_later_key_changes_nothing() -> None:
    torch.manual_seed(0)
    positions = torch.tensor([1, 4, 9])
    query, keys, values = torch.randn(3, 2, 8), torch.randn(2, 12, 8), torch.randn(2, 12, 8)
    before = attend(query, (keys, values), positions, LayerAttention(scale=0.3))

    keys[:, 5:] = 1e4
    values[:, 5:] = 1e4

    assert torch.equal(attend(query, (keys, values), positions, LayerAttention(scale=0.3))[:2], before[:2])
