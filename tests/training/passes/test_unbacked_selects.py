"""The last entry of a dimension whose size depends on data is indexed, with the value that `select` gives."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fuseopt.training.passes import unbacked_selects

aten = torch.ops.aten


def rows_where(first, keep):
    return first[torch.nonzero(keep)[:, 0]]


@pytest.mark.parametrize(
    ("select", "is_indexed"),
    [
        (lambda rows: rows.select(0, -1), True),
        (lambda rows: rows.t().select(1, -2), True),
        (lambda rows: rows.t().select(-1, -1), True),
        (lambda rows: rows.select(0, 1), False),
        (lambda rows: rows.select(1, -1), False),
    ],
)
def test_a_negative_index_into_an_unbacked_size(select, is_indexed):
    def function(x, keep):
        return select(rows_where(x, keep))

    x, keep = torch.randn(6, 5), torch.tensor([1, 0, 1, 1, 0, 1])
    traced = make_fx(function, tracing_mode="symbolic")(x, keep)
    before = len(traced.graph.find_nodes(op="call_function", target=aten.select.int))
    unbacked_selects.run(traced.graph)
    traced.graph.lint()
    traced.recompile()
    left = len(traced.graph.find_nodes(op="call_function", target=aten.select.int))
    assert before - left == is_indexed
    assert torch.equal(traced(x, keep), function(x, keep))
