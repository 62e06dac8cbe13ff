"""Norms with random constants: eps as large as the statistics, offsets, and gradients of every parameter."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.cases import Case, cases, error, examples

OPS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")


def formula(name: str, eps: float, offset: float, *tensors: Tensor) -> Tensor:
    """The norm written out: of (input, weight), (input, weight, bias), with a residual behind the input for sums."""
    input, *rest = tensors
    if name.startswith("add_"):
        residual, *rest = rest
        input = input + residual
    weight, *bias = rest
    if name.endswith("layer_norm"):
        input = input - input.mean(-1, keepdim=True)
        return input / (input.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias[0]
    return input / (input.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


def call(case: Case, eps: float, offset: float) -> Callable[..., Tensor]:
    """`case` as a function of the tensors of `formula`; of a sum's norm alone."""

    def function(*tensors: Tensor) -> Tensor:
        if case.op.name == "layer_norm":
            input, weight, bias = tensors
            return case(input, input.shape[-1:], weight, bias, eps)
        kwargs = {"eps": eps} if case.op.name == "add_layer_norm" else {"eps": eps, "offset": offset}
        output = case(*tensors, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    return function


@pytest.mark.parametrize("case", cases(*OPS))
@settings(max_examples=examples(30), deadline=None)
@given(
    eps=st.floats(1e-12, 10.0),
    offset=st.floats(-2.0, 2.0),
    size=st.sampled_from([1e-3, 0.1, 1.0, 30.0]),
    rows=st.integers(1, 9),
    columns=st.integers(8, 70),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_output_and_every_gradient_against_the_formula_in_float64(
    case: Case, eps: float, offset: float, size: float, rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    shapes = [(rows, columns)] * (1 + case.op.name.startswith("add_"))
    shapes += [(columns,)] * (1 + case.op.name.endswith("layer_norm"))
    tensors = [torch.randn(shape, device=case.device).to(dtype).requires_grad_() for shape in shapes]
    for tensor in tensors[: len(shapes) - (1 + case.op.name.endswith("layer_norm"))]:
        tensor.data *= size
    judges = [tensor.detach().double().requires_grad_() for tensor in tensors]
    if case.op.name.startswith("add_"):
        # The op normalises the rounded sum.
        total = (tensors[0] + tensors[1]).detach().double()
        judges[1] = (total - judges[0].detach()).requires_grad_()
    output = call(case, eps, offset)(*tensors)
    exact = formula(case.op.name, eps, offset, *judges)
    grad_output = torch.randn_like(output)
    # With few columns gradients cancel to the size of rounding errors.
    bound = {torch.float64: 1e-10, torch.float32: 2e-3, torch.bfloat16: 0.1}[dtype]
    assert error([output], [exact]) <= bound
    found = torch.autograd.grad(output, tensors, grad_output)
    expected = torch.autograd.grad(exact, judges, grad_output.double())
    for tensor, gradient, judge in zip(tensors, found, expected, strict=True):
        assert gradient.dtype == tensor.dtype
        assert error([gradient], [judge]) <= bound, tuple(tensor.shape)
