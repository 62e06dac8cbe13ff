"""`Op.bench` times a user's op by the package's benchmark."""

import json

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.bench.harness.records import COPY, PEAK, Results
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
    assert str(results) == table
    assert all(f"mine::mul_add_relu {way}, 16x48, float32" in table for way in ("fwd", "bwd"))
    assert all(name in table for name in ("cpu", "reference", "eager", "copy")), table
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json").to_markdown() == table
    assert not registry.get("mine::mul_add_relu").benchmarks
    assert not any("compile" in row.variant for row in results.rows)  # which takes seconds, and nobody asked for it
    for wrong in (["16"], "16", [(16,)]):
        with pytest.raises(OpError, match="the shape '16' must have 2 sizes"):
            mul_add_relu.bench(wrong)
    same = mul_add_relu.bench([(16, 48)], ["float32"], device="cpu", remember=False)
    assert [row.case for row in same.rows] == [row.case for row in results.rows]


def test_figures_are_bytes_and_operations_over_the_time(tmp_path):
    @fuseopt.op("mine::cube", flops=lambda a, b: 3 * a.numel())
    def cube(a: Tensor, b: Tensor) -> Tensor:
        return a * a * a + b

    @cube.samples
    def _(device, dtype):
        yield tuple(torch.randn(4, 24, device=device, dtype=dtype) for _ in range(2))

    results = cube.bench(["64x96"], ["float32"], device="cpu")
    forward = {
        row.variant: row
        for row in results.rows
        if row.case == "mine::cube fwd, 64x96, float32" and row.milliseconds is not None
    }
    assert {"reference", "eager", COPY} <= forward.keys()
    for name, row in forward.items():
        assert row.bytes == 3 * 64 * 96 * 4  # two arguments and the result
        seconds = row.milliseconds[1] / 1e3
        assert row.gigabytes_per_second == pytest.approx(row.bytes / seconds / 1e9)
        if name == COPY:
            assert row.flops is None and row.of_copy == 1
        else:
            assert row.flops == 3 * 64 * 96 and row.gigaflops_per_second == pytest.approx(row.flops / seconds / 1e9)
            assert 0.2 < row.of_copy / (forward[COPY].milliseconds[1] / row.milliseconds[1]) < 5  # medians of ratios
    assert not any(row.flops for row in results.rows if " bwd, " in row.case)
    peaks = {row.case: row for row in results.rows if row.case.startswith(PEAK)}
    assert peaks.keys() == {"peak of copy", "peak of matmul, float32"}
    assert peaks["peak of matmul, float32"].flops == 2 * 1024**3 and peaks["peak of copy"].bytes == 2**28
    header = next(line for line in results.to_markdown().splitlines() if line.startswith("| work"))
    assert [cell.strip() for cell in header.strip("|").split("|")][2:6] == ["us", "GB/s", "GFLOP/s", "of copy"]
    results.save(tmp_path / "results.json")
    assert any(row.get("flops") == 3 * 64 * 96 for row in json.loads((tmp_path / "results.json").read_text())["rows"])


def test_an_expression_counts_its_own_operations():
    op = fuseopt.elementwise("mine::scale_add_relu", "relu(a + scale * b + bias)", scalars=("scale",))
    arguments = torch.empty(6, 8), torch.empty(6, 8), torch.empty(8), 2.0
    assert op.operations(arguments, backward=False) == 4 * 48
    assert op.operations(arguments, backward=True) > 3 * 48


def test_wrong_arguments_are_named_before_anything_runs(monkeypatch):
    @fuseopt.op("mine::double")
    def double(a: Tensor) -> Tensor:
        return a + a

    @double.samples
    def _(device, dtype):
        yield (torch.randn(4, 24, device=device, dtype=dtype),)

    with pytest.raises(OpError, match=r"mine::double: no dtype 'fp32'; .*known: bfloat16, float32, float16"):
        double.bench(["4x24"], ["fp32"], device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OpError, match="mine::double: device 'cuda', but torch sees no CUDA device; pass device='cpu'"):
        double.bench(["4x24"], ["float32"], device="cuda")


def test_a_call_that_a_kernel_refuses_is_a_row_with_the_reason_and_no_traceback(capsys):
    @fuseopt.op("mine::double")
    def double(a: Tensor) -> Tensor:
        return a + a

    double.kernel("cpu", supports=lambda a: a.dtype == torch.float32 or "takes float32")(lambda a: a * 2)

    @double.samples
    def _(device, dtype):
        yield (torch.randn(4, 24, device=device, dtype=dtype),)

    results = double.bench(["4x24"], ["bfloat16"], device="cpu", remember=False)
    notes = [row.note for row in results.rows if row.variant == "cpu"]
    assert notes == ["cpu: takes float32"] * 2
    assert "Traceback" not in capsys.readouterr().err
