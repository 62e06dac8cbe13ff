"""What a backward multiplies by a number and reads much later is multiplied there."""

import pytest
import torch

from fuseopt.training.passes import defer_grad_scaling
from tests.training.graphs import targets, traced

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
MATRIX, NUMBER = (8, 4), ()


def order(function, *shapes) -> list[object]:
    graph = traced(function, *shapes, dtype=torch.float32)
    results = [str(node) for node in graph.output_node().all_input_nodes]
    defer_grad_scaling.run(graph)
    graph.lint()
    assert [str(node) for node in graph.output_node().all_input_nodes] == results
    return targets(graph)


@pytest.mark.parametrize("number", [NUMBER, (1,)])
@pytest.mark.parametrize("turned", [False, True])
def test_is_made_where_it_is_read(turned, number):
    def backward(call, weight_grad, scale, x):
        factors = (scale, weight_grad) if turned else (weight_grad, scale)
        scaled = call(aten.mul.Tensor, *factors)
        others = call(aten.exp.default, x)
        return call(aten.add.Tensor, call(aten.cos.default, others), scaled), others

    moved = [aten.exp.default, aten.cos.default, aten.mul.Tensor, aten.add.Tensor]
    assert order(backward, MATRIX, number, MATRIX) == moved


def test_what_is_only_returned_is_made_last():
    def backward(call, weight_grad, scale, x):
        scaled = call(aten.mul.Tensor, weight_grad, scale)
        return scaled, call(aten.exp.default, x)

    assert order(backward, MATRIX, NUMBER, MATRIX) == [aten.exp.default, aten.mul.Tensor]


@pytest.mark.parametrize("tied", [True, False])
def test_the_cast_of_a_16_bit_model_s_gradient_goes_with_it(tied):
    def backward(call, weight_grad, scale, x):
        rounded = call(CAST, call(aten.mul.Tensor, weight_grad, scale), torch.bfloat16)
        others = call(CAST, call(aten.exp.default, x), torch.bfloat16)
        return (call(aten.add.Tensor, others, rounded), others) if tied else (rounded, others)

    expected = [aten.exp.default, CAST, aten.mul.Tensor, CAST, *([aten.add.Tensor] if tied else [])]
    assert order(backward, MATRIX, NUMBER, MATRIX) == expected


def test_a_cast_beside_another_reader_stays():
    def backward(call, weight_grad, scale, x):
        scaled = call(aten.mul.Tensor, weight_grad, scale)
        rounded = call(CAST, scaled, torch.bfloat16)
        return call(aten.add.Tensor, call(aten.exp.default, x), scaled), rounded

    expected = [aten.mul.Tensor, CAST, aten.exp.default, aten.add.Tensor]
    assert order(backward, MATRIX, NUMBER, MATRIX) == expected


def test_the_first_of_its_readers_counts():
    def backward(call, hidden_grad, scale, x):
        scaled = call(aten.mul.Tensor, hidden_grad, call(aten.neg.default, scale))
        first = call(aten.sin.default, scaled)
        return call(aten.add.Tensor, call(aten.exp.default, x), scaled), first

    assert order(backward, MATRIX, NUMBER, MATRIX) == [
        *(aten.neg.default, aten.mul.Tensor, aten.sin.default),
        *(aten.exp.default, aten.add.Tensor),
    ]


@pytest.mark.parametrize("shape", [MATRIX, (4,)])
def test_products_of_tensors_stay(shape):
    def backward(call, left, right, x):
        product = call(aten.mul.Tensor, left, right)
        return call(aten.add.Tensor, call(aten.exp.default, x), product)

    assert order(backward, MATRIX, shape, MATRIX) == [aten.mul.Tensor, aten.exp.default, aten.add.Tensor]


def test_what_the_backward_computes_itself_stays():
    def backward(call, x, scale, y):
        scaled = call(aten.mul.Tensor, call(aten.neg.default, x), scale)
        return call(aten.add.Tensor, call(aten.exp.default, y), scaled)

    stay = [aten.neg.default, aten.mul.Tensor, aten.exp.default, aten.add.Tensor]
    assert order(backward, MATRIX, NUMBER, MATRIX) == stay
