"""A kernel that was compiled is launched again, with all its arguments, where nothing but addresses has changed."""

from unittest import mock

import pytest
import torch
from triton.runtime.jit import JITFunction

from fuseopt.ops import relative_attention
from fuseopt.ops.triton import launch
from fuseopt.ops.triton.launch import Launch


class Kernel:
    """In the place of a JITFunction: keeps what it was launched with, and by which way.

    Args:
        compiles: as Triton does; its interpreter does not.
    """

    arg_names = ("x_ptr", "y_ptr", "size", "scale", "BLOCK")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles, self.calls = compiles, []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.calls.append(("looked up", grid, args, constants))
            return Compiled(self.calls) if self.compiles else None

        return run


class Compiled:
    """In the place of what a launch returns."""

    def __init__(self, calls: list) -> None:
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("again", grid, args))


CONSTANTS = {"BLOCK": 64, "num_warps": 4}


def tensors() -> list[torch.Tensor]:
    return [torch.empty(9) for _ in range(2)]


def test_the_second_call_goes_past_triton_with_every_argument_in_place() -> None:
    kernel = Kernel()
    run = Launch(kernel, (3,), (9, 0.5), CONSTANTS)
    first, second = tensors(), tensors()
    run(*first)
    run(*second)
    looked_up, again = kernel.calls
    assert looked_up == ("looked up", (3, 1, 1), (*first, 9, 0.5), CONSTANTS)
    assert again == ("again", (3, 1, 1), (*(tensor.data_ptr() for tensor in second), 9, 0.5, 64))


def test_tensors_that_begin_elsewhere_are_looked_up() -> None:
    kernel = Kernel()
    run = Launch(kernel, (3,), (9, 0.5), CONSTANTS)
    odd = [torch.empty(10)[1:], torch.empty(9)]
    for given in (odd, odd, tensors(), odd, tensors()):
        run(*given)
    assert [call[0] for call in kernel.calls] == ["looked up"] * 4 + ["again"]


def test_a_tensor_that_is_not_there() -> None:
    kernel = Kernel()
    run = Launch(kernel, (3,), (9, 0.5), CONSTANTS)
    (tensor, _) = tensors()
    run(tensor, None)
    run(tensor, None)
    assert kernel.calls[0][2] == (tensor, None, 9, 0.5)
    assert kernel.calls[1][2] == (tensor.data_ptr(), 0, 9, 0.5, 64)


@pytest.mark.parametrize(("compiles", "known"), [(False, True), (True, False)], ids=["interpreter", "later Triton"])
def test_who_is_always_asked(compiles: bool, known: bool, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_TAKES_ALL", known)
    kernel = Kernel(compiles)
    run = Launch(kernel, (3,), (9, 0.5), CONSTANTS)
    for _ in range(3):
        run(*tensors())
    assert [call[0] for call in kernel.calls] == ["looked up"] * 3


@pytest.mark.gpu
def test_attention_is_the_same_to_the_bit_by_both_ways() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 37, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    bias, seed = torch.randn(3, 33, device="cuda"), torch.tensor([5], device="cuda")
    mask = torch.rand(2, 1, 37, 37, device="cuda") > 0.2

    def step() -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, bias)]
        query, key, value = (leaf.transpose(1, 2) for leaf in leaves[:3])
        output = relative_attention(query, key, value, leaves[3], mask=mask, seed=seed, p=0.1, backend="triton")
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as looked_up:
        first = step()
        before = looked_up.call_count
        second = step()
        assert before >= 4 and looked_up.call_count == before
    with mock.patch.object(launch, "_ALIGNMENT", 2**62):
        third = step()
    for others in (second, third):
        assert all(map(torch.equal, first, others))
