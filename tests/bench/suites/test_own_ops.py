"""bench own-ops: host times of a user's op and of torch's."""

import torch

from fuseopt.bench.harness.records import Results
from fuseopt.bench.suites import own_ops
from fuseopt.cli import main
from fuseopt.errors import NativeBuildError
from fuseopt.extend.own_op import registered

CASES = [f"host time of a * b + c, 64, float32, {how} autograd" for how in ("without", "with")]


def refused(name, device):
    raise NativeBuildError("no compiler")


def test_each_way_is_a_row_beside_torch(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(own_ops.OPS, "native", refused)
    monkeypatch.setattr(own_ops, "_CALLS", 3)
    assert main(["bench", "own-ops", "--device", "cpu", "--out", str(tmp_path / "own.json")]) == 1  # a row failed
    rows = Results.load(tmp_path / "own.json").rows
    assert [(row.case, row.variant) for row in rows] == [
        (case, name) for case in CASES for name in ("torch", *own_ops.OPS)
    ]
    for row in rows:
        if row.variant == "native":
            assert row.milliseconds is None and row.note.endswith("no compiler")
        else:
            assert 0 < row.milliseconds[1] < 10 and (row.speed_up is None) == (row.variant == "torch"), row
    assert not [name for name in registered() if name.startswith("fuseopt_bench")]


def test_an_op_that_falls_back_says_so(monkeypatch):
    ops = {"cuda": lambda name, device: own_ops._in_python(name, "cuda"), "cpu": own_ops._in_python}
    monkeypatch.setattr(own_ops, "OPS", ops)
    results = own_ops.run(device=torch.device("cpu"))
    assert [row.note for row in results.rows] == [None, "runs on reference", "runs on cpu"] * 2


def test_a_wrong_result_is_not_timed(monkeypatch):
    def wrong(name, device):
        op = own_ops._in_python(name, device)
        op.kernel(device)(lambda a, b, c: a + b)
        return op

    monkeypatch.setattr(own_ops, "OPS", {"in_python": wrong})
    results = own_ops.run(device=torch.device("cpu"))
    assert all(row.failed and "not close" in row.note and row.milliseconds is None for row in results.rows)
    assert "fuseopt_bench::in_python" not in registered()
