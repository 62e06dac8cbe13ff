"""`fuseopt bench ops`: which cases the options stand for, and what the command prints and returns."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch

from fuseopt.bench.harness import op_timing
from fuseopt.bench.harness.op_cases import OpCase
from fuseopt.bench.harness.op_timing import time_op
from fuseopt.bench.suites import ops
from fuseopt.cli import main
from fuseopt.errors import ConfigError
from fuseopt.ops import registry
from fuseopt.runtime.timer import Timing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def selected(device=CUDA, ops_=(), dtypes=("float32",), shapes=()):
    return [(case.op.name, case.shape, case.backward) for case in ops.select(device, ops_, dtypes, shapes)]


def test_default_cases_on_a_gpu_and_on_a_cpu():
    on_gpu = selected()
    assert {"rms_norm", "layer_norm", "gelu", "softmax", "no_repeat_ngram"} < {name for name, _, _ in on_gpu}
    assert ("rms_norm", "65536x768", False) in on_gpu and ("rms_norm", "65536x768", True) in on_gpu
    assert ("rms_norm", "8192x1001", False) not in on_gpu
    on_cpu = selected(CPU)
    assert ("rms_norm", "8x768", True) in on_cpu and ("rms_norm", "65536x768", False) not in on_cpu
    assert not [row for row in on_cpu if row[0] == "no_repeat_ngram" and row[2]]


def test_cases_by_name():
    assert selected(ops_=["softmax"], shapes=["64x262144"]) == [("softmax", "64x262144", b) for b in (False, True)]
    assert ("rms_norm", "8192x1001", False) in selected(CPU, shapes=["all"])
    dtypes = {case.dtype for case in ops.select(CPU, ["gelu"], ["float16", "bfloat16"], [])}
    assert dtypes == {torch.float16, torch.bfloat16}


@pytest.mark.parametrize(
    ("names", "shapes", "message"),
    [
        (["rms_nrom"], [], "no op named 'rms_nrom' is benchmarked; did you mean 'rms_norm'"),
        (["rms_norm"], ["65536x786"], "no shape named '65536x786' is benchmarked; did you mean '65536x768'"),
        (["rms_norm"], ["64x262144"], r"known:\s+65536x768, 16384x4096"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(names, shapes, message):
    with pytest.raises(ConfigError, match=message):
        ops.select(CPU, names, ["float32"], shapes)


def test_the_command_from_options_to_exit_code(capsys, tmp_path):
    out, edited = tmp_path / "ops.json", tmp_path / "earlier.json"
    argv = ["bench", "ops", "--device", "cpu", "--op", "rms_norm", "--shapes", "8x768", "--dtype", "float32"]
    assert main([*argv, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "rms_norm bwd, 8x768, float32" in printed.out and "(auto)" in printed.out
    assert "rms_norm bwd, 8x768, float32" in printed.err

    content = json.loads(out.read_text())
    assert (content["benchmark"], content["unit"], len(content["rows"])) == ("ops", "us", 10)
    assert main(["bench", "show", str(out)]) == 0
    assert capsys.readouterr().out.strip() in printed.out
    assert main(["bench", "show", str(out), "--auto"]) == 0
    assert capsys.readouterr().out.count("| rms_norm") == 2

    for row in content["rows"]:
        if row["variant"] == "cpu":
            row["milliseconds"] = [value / 1000 for value in row["milliseconds"]]
    edited.write_text(json.dumps(content))
    assert main([*argv, "--against", str(edited)]) == 1
    assert "10 rows compared, 2 slower beyond the noise" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("first_call", [0, 1], ids=["as it is checked", "as it is made ready"])
def test_a_contender_that_raises_leaves_the_others(monkeypatch, capsys, backend, first_call):
    """Also where it is what `backend: auto` takes."""
    op, calls = registry.get("softmax"), []

    def function(*args, **kwargs):
        if kwargs["backend"] == backend:
            calls.append(None)
            if len(calls) > first_call:
                raise RuntimeError("out of order\nin two lines")
        return op.function(*args, **kwargs)

    broken = dataclasses.replace(op, function=function)
    case = OpCase(broken, op.benchmarks[0], "8x768", torch.float32, backward=False)
    monkeypatch.setattr(ops, "select", lambda *_: [case, OpCase(op, op.benchmarks[0], "8x768", torch.float32, False)])
    assert main(["bench", "ops", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert "failed: RuntimeError: out of order" in printed.out and "in two lines" in printed.err
    assert "1 of 8 rows failed" in printed.out
    broken_rows, whole = (time_op(other, CPU, compile=False) for other in ops.select())
    assert [row.variant for row in broken_rows] == [row.variant for row in whole]
    assert [row.variant for row in broken_rows if row.milliseconds is None] == [backend]
    assert all(row.milliseconds for row in whole)


def test_what_the_command_does_not_take(capsys, tmp_path):
    assert main(["bench", "ops", "--device", "cpu", "--op", "sofmax"]) == 2
    assert "did you mean 'softmax'" in capsys.readouterr().err
    assert main(["bench", "ops", "--device", "cpu", "--against", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    for argv in (["bench"], ["bench", "ops", "--dtype", "float8"]):
        with pytest.raises(SystemExit):
            main(argv)
        assert "usage: fuseopt" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms_norm", "no_repeat_ngram", "encoder_no_repeat_ngram"])
def test_on_a_gpu_every_contender_is_timed(name):
    shape = {"rms_norm": "8x768", "no_repeat_ngram": "8x1024x50257", "encoder_no_repeat_ngram": "64x128x4x32128"}[name]
    results = ops.run(device=CUDA, ops=[name], shapes=[shape], dtypes=["bfloat16"], compile=False)
    assert {"cuda", "reference", "eager", "copy"} <= {row.variant for row in results.rows}
    for row in results.rows:
        assert row.note is None or not row.note.startswith("WRONG")
        assert row.wall_us > 0 and row.host_us > 0 and row.gigabytes_per_second > 0
    (cuda, eager) = (next(row for row in results.rows if row.variant == name) for name in ("cuda", "eager"))
    assert cuda.milliseconds[1] < eager.milliseconds[1]


@pytest.mark.parametrize(
    ("own", "note"),
    [
        ([9.0, 9.5, 9.2, 9.4], None),
        ([10.0, 11.0, 9.0, 10.0], None),
        ([12.0, 13.0, 12.5, 12.0], "torch keeps the host for 0.825 of the time"),
    ],
)
def test_what_the_host_s_time_comes_to(own, note, monkeypatch):
    """It is behind where most rounds say so."""
    host = {"cpu": own, "reference": own, "torch": [10.0, 10.5, 10.2, 10.1]}
    timed = op_timing._on_cpu

    def with_host(runs):
        timings, wall, _ = timed(runs)
        # As fast as all others on the device.
        alike = dict.fromkeys(timings, timings["cpu"])
        return alike, wall, {name: Timing(tuple(samples)) for name, samples in host.items()}

    monkeypatch.setattr(op_timing, "_on_cpu", with_host)
    op = registry.get("softmax")
    for backward in (False, True):
        case = OpCase(op, op.benchmarks[0], "8x768", torch.float32, backward)
        rows = {row.variant: row for row in time_op(case, CPU, compile=False)}
        assert rows["cpu"].auto and rows["cpu"].note == (None if backward else note)
        assert rows["torch"].host_speed_up is None and rows["copy"].host_speed_up is None
        assert (rows["cpu"].host_speed_up is None) == backward
        assert rows["torch"].host_us == pytest.approx(10.15e6)


@pytest.mark.gpu
def test_the_host_s_time_is_held_against_torch_s():
    slow = registry.get("softmax").function

    def slower(*args, **kwargs):
        if kwargs.get("backend") == "cuda":
            time.sleep(1e-3)
        return slow(*args, **kwargs)

    for function, is_behind in ((slow, False), (slower, True)):
        op = dataclasses.replace(registry.get("softmax"), function=function)
        case = OpCase(op, op.benchmarks[0], "8x768", torch.bfloat16, False)
        rows = time_op(case, CUDA, compile=False)
        (auto,) = (row for row in rows if row.auto)
        low, median, high = auto.host_speed_up
        assert low <= median <= high
        if is_behind:
            assert high < 0.5 and "torch keeps the host for 0.0" in auto.note
        else:
            assert median > 0.5
        assert next(row for row in rows if row.variant == "torch").host_speed_up is None
        backward = time_op(dataclasses.replace(case, backward=True), CUDA, compile=False)
        assert all(row.host_speed_up is None for row in backward)
