"""examples/low_bit_linear: the layer against its weight, the rows of the table, and contenders that fail."""

import copy
import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from fuseopt.bench.harness.records import Record, Results
from fuseopt.ops.low_bit import dequantize
from tests.examples.scripts import EXAMPLES


@pytest.fixture
def main():
    spec = importlib.util.spec_from_file_location("low_bit_main", EXAMPLES / "low_bit_linear" / "main.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quick(main, monkeypatch):
    """Times one call and measures no roofs."""
    monkeypatch.setattr(main, "milliseconds", lambda call: call() is None or (1e-3, 2e-3, 4e-3))
    bandwidth = Record("peak of copy", "copy", (1, 1, 1), bytes=2 * 10**6)  # 2 GB/s
    matmul = Record("peak of matmul", "torch", (1, 1, 1), flops=9)
    monkeypatch.setattr(main, "peaks", lambda *given: [bandwidth, matmul])
    monkeypatch.setattr(main, "HELD", 2**18)
    return main


def test_the_table_has_a_row_for_each_way_and_number_of_rows(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", types.ModuleType("torchao.quantization"))
    results = quick.main(["--device", "cpu", "--shapes", "48x128", "--rows", "1", "5", "--out", str(tmp_path)])
    table = results.rows[2:]
    measured, failed = [row for row in table if row.milliseconds], [row for row in table if row.failed]
    assert len(measured) + len(failed) == len(table)
    assert [(row.case, row.variant) for row in measured] == [
        (f"48x128, rows: {rows}", way) for rows in (1, 5) for way in ("float32", "bfloat16", *quick.KINDS)
    ]
    assert [row.variant for row in failed] == ["torchao int8", "torchao int4"]
    assert all("AttributeError" in row.note for row in failed)
    assert all(row.speed_up == (0.5, 1, 2) and row.of_copy == row.bytes / 4000 for row in measured)
    bytes_of = {row.variant: row.bytes - 4 * (128 + 48) for row in measured if row.case.endswith(" 1")}
    weight = 48 * 128
    assert bytes_of["float32"] == 4 * weight and bytes_of["bfloat16"] == 2 * weight
    assert bytes_of["int8"] == weight + 4 * 48 and bytes_of["int4, groups of 32"] == weight // 2 + 4 * 48 * 4
    errors = {row.variant: float(row.difference) for row in measured if row.case.endswith(" 5")}
    assert errors["float32"] < 1e-6 < errors["int8"] < 0.02 < errors["int4, groups of 32"] < 0.2
    saved = Results.load(tmp_path / "results.json").rows
    assert [(row.case, row.variant, row.bytes) for row in saved] == [
        (row.case, row.variant, row.bytes) for row in results.rows
    ]
    printed = capsys.readouterr().out
    assert "48x128" in printed and "AttributeError" in printed
    assert (tmp_path / "roofline.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_copies_share_no_memory(quick):
    for weight in (torch.randn(8, 32), quick.ops.quantize(torch.randn(8, 32), bits=4, group=32, symmetric=False)):
        own, other = (part if isinstance(part, tuple) else (part,) for part in (weight, copy.deepcopy(weight)))
        pairs = [pair for pair in zip(own, other, strict=True) if isinstance(pair[0], torch.Tensor)]
        assert pairs and all(torch.equal(*pair) and pair[0].data_ptr() != pair[1].data_ptr() for pair in pairs)
        assert quick.size_of(weight) == sum(pair[0].nbytes for pair in pairs)


@pytest.mark.parametrize("kind", ["int8", "int4, groups of 32", "int4, zero points"])
def test_the_layer_multiplies_with_the_dequantised_weight(main, kind):
    linear, input = nn.Linear(256, 24), torch.randn(2, 3, 256, requires_grad=True)
    layer = main.LowBitLinear(linear, **main.KINDS[kind])
    output = layer(input)
    wanted = nn.functional.linear(input, dequantize(layer.weight), linear.bias)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(output, linear(input), rtol=1e-5, atol=1e-5)


def test_the_check_fails_for_a_wrong_layer(main, monkeypatch):
    monkeypatch.setattr(main.LowBitLinear, "forward", lambda self, input: input[..., :96] * 0)
    with pytest.raises(AssertionError, match="not close"):
        main.check(torch.device("cpu"))
