"""In which region a pointwise node is computed that another region reads."""

import torch

from fuseopt.training.region_crossings import avoid_crossings
from tests.training.graphs import traced

aten, prims = torch.ops.aten, torch.ops.prims
ROWS, WEIGHT = (16, 8), (8, 8)


def regions_of(function, *shapes):
    """The names of the nodes of each region, before and after. `function` calls `cut()` where a region ends."""
    nodes, ends = [], []

    def run(call, *given):
        def counted(op, *args, **kwargs):
            nodes.append(call(op, *args, **kwargs))
            return nodes[-1]

        return function(counted, lambda: ends.append(len(nodes)), *given)

    graph = traced(run, *shapes)
    spans = zip([0, *ends], [*ends, len(nodes)], strict=True)
    regions = [[node for node in nodes[start:end] if node.target is not aten.view.default] for start, end in spans]
    found = avoid_crossings(regions)
    graph.lint()
    return [[node.target for node in region] for region in found]


def test_what_follows_from_one_input_is_computed_where_it_is_read():
    def step(call, cut, x, rstd, weight):
        wide = call(prims.convert_element_type.default, x, torch.float32)
        rows = call(aten.view.default, call(aten.mul.Tensor, wide, rstd), list(ROWS))
        first = call(aten.exp.default, rows)
        product = call(aten.mm.default, call(prims.convert_element_type.default, first, torch.bfloat16), weight)
        cut()
        return call(aten.add.Tensor, call(aten.add.Tensor, product, wide), rows)

    own = [prims.convert_element_type.default, aten.mul.Tensor, aten.exp.default]
    first, second = regions_of(step, ROWS, (16, 1), WEIGHT)
    assert first == [*own, prims.convert_element_type.default, aten.mm.default]
    assert second == [prims.convert_element_type.default, aten.mul.Tensor, aten.add.Tensor, aten.add.Tensor]


def test_what_nothing_reads_any_more_is_left_out():
    def step(call, cut, gate, x, weight):
        wide = call(prims.convert_element_type.default, gate, torch.float32)
        denominator = call(aten.exp.default, wide)
        product = call(aten.mm.default, x, weight)
        cut()
        return call(aten.div.Tensor, call(aten.mul.Tensor, product, wide), denominator)

    first, second = regions_of(step, ROWS, ROWS, WEIGHT)
    assert first == [aten.mm.default]
    assert second[:2] == [prims.convert_element_type.default, aten.exp.default]


def test_what_is_returned_stays_too():
    def step(call, cut, gate, x, weight):
        wide = call(aten.exp.default, gate)
        product = call(aten.mm.default, x, weight)
        cut()
        return call(aten.mul.Tensor, product, wide), wide

    first, second = regions_of(step, ROWS, ROWS, WEIGHT)
    assert first == [aten.exp.default, aten.mm.default]
    assert second == [aten.exp.default, aten.mul.Tensor]


def test_sums_of_two_inputs_reductions_and_operands_of_matmuls_are_handed_over():
    def step(call, cut, x, y, weight):
        both = call(aten.add.Tensor, x, y)
        centred = call(aten.sub.Tensor, x, call(aten.sum.dim_IntList, x, [1], True))
        left = call(aten.exp.default, x)
        product = call(aten.mm.default, call(aten.mul.Tensor, call(aten.mul.Tensor, both, left), centred), weight)
        cut()
        products = call(aten.mul.Tensor, product, both), call(aten.mm.default, left, weight)
        return call(aten.add.Tensor, *products), call(aten.mul.Tensor, product, centred)

    _, second = regions_of(step, ROWS, ROWS, WEIGHT)
    assert second == [aten.mul.Tensor, aten.mm.default, aten.add.Tensor, aten.mul.Tensor]


def test_a_sum_of_matmuls_moves_to_the_one_region_that_reads_it():
    def step(call, cut, x, y, weight):
        left, right = (call(aten.mm.default, given, weight) for given in (x, y))
        both = call(aten.add.Tensor, left, right)
        last = call(aten.mm.default, x, weight)
        cut()
        return call(aten.mul.Tensor, last, both)

    assert regions_of(step, ROWS, ROWS, WEIGHT) == [[aten.mm.default] * 3, [aten.add.Tensor, aten.mul.Tensor]]


def test_a_sum_that_two_regions_or_a_matmul_read_stays():
    def step(call, cut, x, y, weight):
        left, right = (call(aten.mm.default, given, weight) for given in (x, y))
        both, difference = call(aten.add.Tensor, left, right), call(aten.sub.Tensor, left, right)
        cut()
        last = call(aten.mm.default, difference, weight)
        middle = call(aten.mul.Tensor, last, both)
        cut()
        return call(aten.mul.Tensor, middle, both)

    first, *_ = regions_of(step, ROWS, ROWS, WEIGHT)
    assert first == [aten.mm.default, aten.mm.default, aten.add.Tensor, aten.sub.Tensor]
