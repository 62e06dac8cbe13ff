"""Masks computed from sizes alone are told from others by what they hide."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseopt.modules import causal_masks


class Attention(nn.Module):
    """Attention whose mask `make(length, given)` makes."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, query, given):
        return F.scaled_dot_product_attention(query, query, query, attn_mask=self.make(6, given), is_causal=False)


def triangle(length, given):
    places = torch.arange(length)
    return (places[None, :] <= places[:, None])[None, None].expand(2, 1, -1, -1)


MASKS = {
    "causal": triangle,
    "window": lambda length, given: triangle(length, given) & (triangle(length, given).sum(-2, keepdim=True) > 1),
    "all": lambda length, given: torch.ones(length, length, dtype=torch.bool),
    "added": lambda length, given: torch.zeros(length, length).masked_fill(~triangle(length, given), -torch.inf),
    "given": lambda length, given: triangle(length, given) & given,
    "wide": lambda length, given: torch.ones(length, 2 * length, dtype=torch.bool)[:, ::2].tril(),
    "none": lambda length, given: None,
}


@pytest.mark.parametrize("name", MASKS)
def test_only_a_causal_mask_known_in_advance_is_exchanged(name):
    query, given = torch.randn(2, 3, 6, 8), torch.ones(2, 1, 6, 6, dtype=torch.bool)
    calls = []

    def backend(graph, inputs):
        (call,) = graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        before = dict(call.kwargs)
        causal_masks.drop(graph)
        calls.append((before, dict(call.kwargs)))
        return graph.forward

    torch._dynamo.reset()
    attention = Attention(MASKS[name])
    output = torch.compile(attention, backend=backend, fullgraph=True)(query, given)
    torch.testing.assert_close(output, attention(query, given))
    ((before, after),) = calls
    if name in ("causal", "wide"):
        assert before["attn_mask"] is not None
        assert after == before | {"attn_mask": None, "is_causal": True}
    else:
        assert after == before
