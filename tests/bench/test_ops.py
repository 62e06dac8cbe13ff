"""`fuseopt bench ops`: which cases the options stand for, and what the command prints and returns."""

from __future__ import annotations

import json

import pytest
import torch

from fuseopt.bench import ops
from fuseopt.cli import main
from fuseopt.errors import ConfigError

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
        (["rms_norm"], ["64x262144"], "known: 65536x768, 16384x4096"),
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
    assert "case" in printed.err

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
        assert row.wall_us > 0 and row.host_us > 0 and row.terabytes_per_second > 0
    (cuda, eager) = (next(row for row in results.rows if row.variant == name) for name in ("cuda", "eager"))
    assert cuda.milliseconds[1] < eager.milliseconds[1]
