"""The command line: exit codes, JSON, and errors that say what to do instead of a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import fuseopt
from fuseopt.bench.harness.records import Record
from fuseopt.cli import main
from fuseopt.config import GenerationOptions, KernelFusion


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What argparse says of arguments it does not take."""
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    return capsys.readouterr().err


def python_m_fuseopt(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fuseopt", *argv], capture_output=True, text=True, check=False)


def test_what_was_measured_is_kept_when_the_job_is_ended(capsys, monkeypatch, tmp_path):
    def timed_until_the_second(case, device, *, compile):
        if times:
            os.kill(os.getpid(), signal.SIGTERM)
        times.append(case)
        return [Record(case.name, "cpu", note="measured")]

    times, before, out = [], signal.getsignal(signal.SIGTERM), tmp_path / "out.json"
    monkeypatch.setattr("fuseopt.bench.suites.ops.time_op", timed_until_the_second)
    code, printed, err = run(capsys, "bench", "ops", "--op", "gelu", "--device", "cpu", "--out", str(out))
    assert code == 0 and len(times) == 1 and "interrupted" in err
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == [times[0].name] and times[0].name in printed
    assert signal.getsignal(signal.SIGTERM) is before


def test_as_a_module():
    wrong = python_m_fuseopt("demo", "--markdown", "nowhere.json")
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr.splitlines()[-1].startswith("fuseopt demo: error: nowhere.json: cannot be read: ")
    assert "Traceback" not in wrong.stderr


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert (raised.value.code, capsys.readouterr().out) == (0, f"fuseopt {fuseopt.__version__}\n")


@pytest.mark.parametrize("argv", [(), ("fuse",), ("plan",), ("demo", "--device", "tpu"), ("env", "gpt2")])
def test_arguments_it_does_not_take(capsys, argv):
    assert "usage: fuseopt" in refused(capsys, *argv)


def test_plan_prints_the_plan(capsys):
    code, out, _ = run(capsys, "plan", "gpt2-tiny", "--config", "reference", "--device", "cpu")
    assert code == 0
    assert out.startswith("plan for GPT2LMHeadModel (policy gpt2)\n")
    assert "NewGELUActivation -> FusedGELU[reference]" in out


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_plan_as_json(capsys, device, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"], "backend": "reference"}}')
    code, out, _ = run(capsys, "plan", "t5-tiny", "--config", str(config), "--json", "--device", device)
    plan = json.loads(out)
    assert code == 0
    assert plan["model"].startswith("T5ForConditionalGeneration")
    norms = [row for row in plan["replaced"] if row["target"] == "FusedRMSNorm"]
    assert len(norms) == 12
    assert {row["backend"] for row in norms} == {"reference"}


def test_init_config_prints_a_config_that_loads_as_the_preset(capsys):
    for preset in ("inference", "training", "reference"):
        code, out, _ = run(capsys, "init-config", preset)
        assert code == 0 and fuseopt.Config.load(json.loads(out)) == fuseopt.Config.load(preset)
    code, out, _ = run(capsys, "init-config")
    written = json.loads(out)
    assert code == 0 and fuseopt.Config.load(written) == fuseopt.Config.load(None)
    assert set(written["kernel_fusion"]) == set(KernelFusion.__dataclass_fields__)
    assert set(written["generation"]) == set(GenerationOptions.__dataclass_fields__)


def test_a_config_may_be_json_text(capsys):
    text = '{"preset": "reference", "kernel_fusion": {"only": ["decoder"]}}'
    code, out, _ = run(capsys, "plan", "t5-tiny", "--config", text, "--device", "cpu", "-v")
    assert code == 0
    assert "T5LayerNorm -> FusedRMSNorm[reference]" in out and "`only` does not name it" in out
    code, out, _ = run(capsys, "plan", "t5-tiny", "--config", text, "--device", "cpu")
    assert "encoder" not in out and "-v, says why" in out
    code, _, err = run(capsys, "plan", "t5-tiny", "--config", text[:-1])
    assert code == 2 and "config: not valid JSON at line 1" in err


def test_plan_of_a_folder(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}')
    code, out, _ = run(capsys, "plan", str(tmp_path), "--config", "reference")
    assert code == 0
    assert "transformer.ln_f" in out


def test_strict_fails_after_the_plan(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"]}}')
    code, out, err = run(capsys, "plan", "gpt2-tiny", "--config", str(config), "--strict", "--json")
    assert code == 2
    assert "FusedRMSNorm" in err
    assert "matches nothing in the model" in err
    assert json.loads(out)["unmet"]


def test_errors_name_the_fix(capsys, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"kernel_fusion":\n {"enable": yes}}')
    for argv, message in (
        (("plan", "gpt2-xxl"), "did you mean 'gpt2-xl'?"),
        (("plan", str(tmp_path)), "a folder with a config.json"),
        (("plan", "gpt2-tiny", "--config", str(broken)), "not valid JSON at line 2, column 13"),
        (("plan", "gpt2-tiny", "--config", "fastest"), "error: config: 'fastest' is neither a file nor"),
        (("plan", "gpt2-tiny", "--config", "inferense"), "did you mean 'inference'?"),
        (("demo", "--markdown", str(tmp_path / "none.json")), "cannot be read"),
        (("demo", "--markdown", str(broken)), "not a result file"),
    ):
        code, out, err = run(capsys, *argv)
        assert (code, out) == (2, "")
        assert message in err
    assert "in a folder that does not exist" in refused(capsys, "demo", "--out", str(tmp_path / "none" / "out.json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("argv", [("demo", "--quick"), ("plan", "gpt2-tiny")])
def test_cuda_where_there_is_none(capsys, argv):
    code, _, err = run(capsys, *argv, "--device", "cuda")
    assert code == 2
    assert "no CUDA device" in err


def test_env_shows_versions_machine_and_native_code(capsys):
    code, out, _ = run(capsys, "env", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"].isdigit()
    assert set(found["native code"]) == {"cpu", "cuda", "python", "cache", "prebuilt"}
    code, out, _ = run(capsys, "env")
    assert code == 0
    for value in (torch.__version__, found["machine"]["cpu"], found["native code"]["cache"]):
        assert value in out
