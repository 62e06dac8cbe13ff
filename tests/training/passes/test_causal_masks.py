"""Masks computed from sizes alone are told from others by what they hide."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseopt.training.passes import causal_masks


class Attention(nn.Module):
    """Attention whose mask `make(length, given)` makes."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, query, given):
        mask = self.make(query.shape[2], given)
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask, is_causal=False)


def triangle(length, given):
    places = torch.arange(length)
    return (places[None, :] <= places[:, None])[None, None].expand(2, 1, -1, -1)


def window(size):
    def make(length, given):
        places = torch.arange(length)
        return triangle(length, given) & (places[None, :] > places[:, None] - size)

    return make


MASKS = {
    "causal": triangle,
    "window of 3": window(3),
    "window of 200": window(200),
    "window of 300": window(300),
    "last": lambda length, given: triangle(length, given) & (triangle(length, given).sum(-2, keepdim=True) > 1),
    "half": lambda length, given: triangle(length, given) & (torch.arange(length) >= length // 4),
    "all": lambda length, given: torch.ones(length, length, dtype=torch.bool),
    "added": lambda length, given: torch.zeros(length, length).masked_fill(~triangle(length, given), -torch.inf),
    "given": lambda length, given: triangle(length, given) & given,
    "wide": lambda length, given: torch.ones(length, 2 * length, dtype=torch.bool)[:, ::2].tril(),
    "none": lambda length, given: None,
}


@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_only_a_causal_mask_known_in_advance_is_exchanged(name, changing):
    query, given = torch.randn(2, 3, 6, 8), torch.ones(2, 1, 6, 6, dtype=torch.bool)
    calls = []

    def backend(graph, inputs):
        (call,) = graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        before = dict(call.kwargs)
        causal_masks.run(graph)
        calls.append((before, dict(call.kwargs)))
        return graph.forward

    torch._dynamo.reset()
    attention = Attention(MASKS[name])
    output = torch.compile(attention, backend=backend, fullgraph=True, dynamic=changing)(query, given)
    torch.testing.assert_close(output, attention(query, given))
    ((before, after),) = calls
    # Six positions are inside of the windows.
    if name in ("causal", "wide") or (name in ("window of 200", "window of 300") and not changing):
        assert before["attn_mask"] is not None
        assert after == before | {"attn_mask": None, "is_causal": True}
    else:
        assert after == before


def repeat_kv(states, count):
    """As transformers writes it."""
    batch, heads, length, size = states.shape
    states = states[:, :, None, :, :].expand(batch, heads, count, length, size)
    return states.reshape(batch, heads * count, length, size)


def repeat_in_turns(states, count):
    batch, heads, length, size = states.shape
    return states[:, None].expand(batch, count, heads, length, size).reshape(batch, heads * count, length, size)


class Grouped(nn.Module):
    def __init__(self, repeat, make):
        super().__init__()
        self.repeat, self.make = repeat, make

    def forward(self, query, key, value):
        mask = self.make(query.shape[2], None)
        key, value = self.repeat(key, 3), self.repeat(value, 3)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=False)


@pytest.mark.parametrize(
    ("repeat", "make", "dtype", "grouped"),
    [
        (repeat_kv, triangle, torch.bfloat16, True),
        (repeat_in_turns, triangle, torch.bfloat16, False),
        (repeat_kv, window(3), torch.bfloat16, False),
        # On a GPU only the kernel that stores all scores would take these.
        (repeat_kv, triangle, torch.float32, False),
    ],
)
def test_keys_and_values_that_were_repeated_because_of_the_mask(repeat, make, dtype, grouped):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 8, dtype=dtype, requires_grad=True) for heads in (6, 2, 2))
    calls = []

    def backend(graph, inputs):
        (call,) = graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        causal_masks.run(graph)
        calls.append((call.kwargs.get("enable_gqa", False), call.args[1].meta["example_value"].shape[1]))
        return graph

    torch._dynamo.reset()
    model = Grouped(repeat, make)
    output = torch.compile(model, backend=backend, fullgraph=True)(query, key, value)
    assert calls == [(True, 2) if grouped else (False, 6)]
    expected = model(query, key, value)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(output, (query, key, value), grad),
        torch.autograd.grad(expected, (query, key, value), grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
