import pytest
import torch

# Rounding to bfloat16 is truncation in the interpreter, so one unit in the last place, 2**-7, and not half of it.
RELATIVE_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2**-6, torch.float64: 1e-13}


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request):
    """The interpreter's device, and a real one."""
    return torch.device(request.param)


@pytest.fixture
def assert_matches():
    """`assert_matches(actual, expected)`: within a few roundings of actual's dtype of a float64 `expected`."""

    def check(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        assert actual.is_contiguous()
        assert expected.dtype == torch.float64
        rtol = RELATIVE_TOLERANCE[dtype or actual.dtype]
        largest = expected.abs().nan_to_num(0.0).max().item() if expected.numel() else 0.0
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * largest, equal_nan=True)

    return check
