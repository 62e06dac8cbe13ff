"""`Op.bench` times a user's op by the package's benchmark."""

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.bench.harness.records import Results
from fuseopt.errors import OpError
from fuseopt.ops import registry


def test_backends_are_timed_beside_eager_and_a_copy(tmp_path):
    @fuseopt.op("mine::mul_add_relu")
    def mul_add_relu(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.relu(a * b + c)

    @mul_add_relu.kernel("cpu")
    def _(a, b, c):
        return torch.addcmul(c, a, b).clamp_min(0)

    @mul_add_relu.samples
    def _(device, dtype):
        yield (
            *(torch.randn(4, 24, device=device, dtype=dtype) for _ in range(2)),
            torch.randn(24, device=device).to(dtype),
        )

    results = mul_add_relu.bench(["16x48"], ["float32"], device="cpu")
    table = results.to_markdown()
    assert all(f"mine::mul_add_relu {way}, 16x48, float32" in table for way in ("fwd", "bwd"))
    assert all(name in table for name in ("cpu", "reference", "eager", "copy")), table
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json").to_markdown() == table
    assert not registry.get("mine::mul_add_relu").benchmarks
    with pytest.raises(OpError, match="the shape '16' must have 2 sizes"):
        mul_add_relu.bench(["16"])
