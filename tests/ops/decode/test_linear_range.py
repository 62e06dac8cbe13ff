"""decode_linear in float16 where a normalised layer's input or norm weight is far from one."""

import pytest
import torch
from torch import Tensor

from fuseopt.ops import decode_linear
from fuseopt.ops.decode.linear import decode_linear_reference
from tests.ops.cases import launched_kernels, to_float64

pytestmark = pytest.mark.gpu
COLUMNS, OUTPUTS = 1600, 4800  # GPT-2 XL's, which the kernel of one row takes


def relative_error(output: Tensor, judge: Tensor) -> float:
    return ((output.double() - judge).norm() / judge.norm()).item()


def errors(
    rows: int, std: float, gain: float, norm: str, mean: float = 0.0, outlier: float = 1.0
) -> tuple[float, float]:
    """Errors of the kernel and of upstream against float64; outputs are of size 1."""
    torch.manual_seed(0)
    x = (torch.randn(rows, COLUMNS, device="cuda") + mean) * std
    x[:, 7] *= outlier
    x, scale = x.half(), (torch.rand(COLUMNS, device="cuda") + 0.5) * gain
    scale[7] /= outlier
    weight = torch.randn(COLUMNS, OUTPUTS, device="cuda").half().T
    arguments = {"norm": norm, "norm_weight": scale.half(), "eps": 1e-3 * std**2}
    # Upstream multiplies normalised rows, whose outputs in float16 must be neither tiny nor infinite.
    weight = (weight.double() / COLUMNS**0.5 / gain).clamp(-60000, 60000).half()
    output = decode_linear(x, weight, **arguments, backend="cuda")
    plain = decode_linear_reference(x, weight, **arguments)
    exact = {**arguments, "norm_weight": to_float64(scale.half())}
    judge = decode_linear_reference(to_float64(x), to_float64(weight), **exact)
    assert output.isfinite().all() and judge.abs().mean() > 0.1
    return relative_error(output, judge), relative_error(plain, judge)


@torch.no_grad()
def test_the_kernel_of_one_row_takes_such_a_layer() -> None:
    x, weight = torch.randn(1, COLUMNS, device="cuda").half(), torch.randn(COLUMNS, OUTPUTS, device="cuda").half().T
    (kernel,) = launched_kernels(lambda: decode_linear(x, weight, norm="layer_norm", backend="cuda"))
    assert "decode_linear_gemv_kernel" in kernel


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("std", [1e-6, 1e-5, 1e-4, 1e-3, 5e-3, 0.1, 1.0, 30.0, 1e3, 1e4])
@torch.no_grad()
def test_small_and_large_rows_lose_no_more_than_upstream(std: float, norm: str) -> None:
    """With a fixed power of two the error was 9.5e-4 at a deviation of 0.005, and 4.5e-3 at 0.001."""
    kernel, upstream = errors(1, std, 1.0, norm)
    print(f"\n{norm} std {std:g}: {kernel:.2e}, upstream {upstream:.2e}")
    assert kernel <= 1.02 * upstream


@pytest.mark.parametrize(("std", "gain"), [(1.0, 1e-3), (1e-3, 1e-3), (1e-3, 0.03), (100.0, 100.0)])
@torch.no_grad()
def test_small_and_large_norm_weights(std: float, gain: float) -> None:
    kernel, upstream = errors(1, std, gain, "layer_norm")
    assert kernel <= 1.02 * upstream


@torch.no_grad()
def test_a_mean_far_from_zero_and_an_outlier_with_a_small_weight() -> None:
    """What an outlier takes of the range the other values lack; the second half of each has it to spare."""
    for mean, outlier in ((3.0, 1.0), (0.0, 300.0), (30.0, 1.0)):
        kernel, upstream = errors(1, 0.01, 1.0, "layer_norm", mean, outlier)
        assert kernel <= 1.1 * upstream, (mean, outlier)


@torch.no_grad()
def test_a_row_of_zeros_and_rows_that_are_no_numbers() -> None:
    weight, bias = torch.randn(COLUMNS, OUTPUTS, device="cuda").half().T, torch.randn(OUTPUTS, device="cuda").half()
    for value, expected in ((0.0, bias), (torch.inf, bias * torch.nan), (torch.nan, bias * torch.nan)):
        x = torch.zeros(1, COLUMNS, device="cuda", dtype=torch.float16)
        x[0, 5] = value
        output = decode_linear(x, weight, bias, norm="layer_norm", backend="cuda")
        torch.testing.assert_close(output, expected[None], equal_nan=True)
