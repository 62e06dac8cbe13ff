"""The command line: exit codes, JSON, and errors that say what to do instead of a traceback."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt import cli
from fuseopt.bench.command_options import positive
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
    assert code == 128 + signal.SIGTERM and len(times) == 1 and "interrupted" in err
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == [times[0].name] and times[0].name in printed
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_quietly(capsys, monkeypatch, number):
    monkeypatch.setattr("fuseopt.bench.suites.demo.run", lambda **options: os.kill(os.getpid(), number) or fail())
    # What starts the tests may ignore the signal, which a command then does too.
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        handler = signal.getsignal(number)
        assert run(capsys, "demo", "--device", "cpu") == (128 + number, "", "")
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def fail():
    for _ in range(1000):
        time.sleep(0.01)  # a signal is delivered between bytecodes
    pytest.fail("the signal did nothing")


def test_a_signal_that_is_ignored_stays_ignored(capsys, monkeypatch):
    def ends_by_itself(**options):
        os.kill(os.getpid(), signal.SIGINT)
        print("done")

    monkeypatch.setattr("fuseopt.bench.suites.demo.run", ends_by_itself)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(capsys, "demo", "--device", "cpu") == (0, "done\n", "")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow  # new processes import torch, one after the other
def test_a_signal_ends_the_child_processes_too(tmp_path):
    arguments = ["--model", "gpt2-kjv", "--batch", "64", "--length", "256", "--device", "cpu", "--precision", "float32"]
    command = [sys.executable, "-m", "fuseopt", "bench", "scaling", *arguments, "--config", write_norms(tmp_path)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    line = process.stderr.readline()  # a child says that it begins to measure
    assert "one process" in line, line + process.stderr.read()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + signal.SIGTERM, "") and "Traceback" not in err, err
    deadline = time.monotonic() + 10
    while left := [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def write_norms(folder: Path) -> str:
    path = folder / "norms.json"
    path.write_text(
        '{"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "backend": "reference", "jit": false}}'
    )
    return str(path)


def test_as_a_module():
    wrong = python_m_fuseopt("demo", "--markdown", "nowhere.json")
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr.splitlines()[-1].startswith("fuseopt demo: error: nowhere.json: cannot be read: ")
    assert "Traceback" not in wrong.stderr


EARLY = """
import sys
from fuseopt.cli import main
for command in sys.argv[1:]:
    try:
        status = main(command.split())
    except SystemExit as error:
        status = error.code
    assert status == (0 if "help" in command else 2), (command, status)
assert not {"torch", "transformers"} & sys.modules.keys()
"""


def test_wrong_arguments_are_refused_before_torch_is_imported(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    commands = {
        "--help": "usage: fuseopt",
        "plan --help": "usage: fuseopt plan",
        "plan gpt2 --confg x": "plan: error: unrecognized arguments: --confg x; did you mean '--config'",
        "plan ./nowhere": "'./nowhere' is neither a folder with a config.json",
        "plan a..b/c": "'a..b/c' is neither a folder with a config.json, nor a model id",
        "bench train --dropout 2": "fuseopt bench train: error: argument --dropout: '2' is not a number from 0 to 1",
        "bench generate --sample --top-p high": "'high' is not a number from 0 to 1",
        "demo --checkpoints nowhere": "--checkpoints: no folder nowhere",
        "plan gpt2-xxl": "did you mean 'gpt2-xl'?",
        "bench train --model own/er": "own/er is not in transformers' cache",
        "verify gpt2 --config fast": "'fast' is neither a file nor a preset",
        f"report gpt2 --config {broken}": "not valid JSON",
        "report gpt2 --train": "--train: only --config auto measures",
        "check none.py": "none.py: no such file",
        "bench ops --against none.json": "none.json: cannot be read",
        f"bench show {broken}": "not a result file",
        "bench generate --batch 2": "--batch: also name a model",
        "bench generate --lora 2": "--lora: also name a model",
        "bench low-bit --new 2": "also name a model",
    }
    done = subprocess.run([sys.executable, "-c", EARLY, *commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for message in commands.values():
        assert message in done.stdout + done.stderr


# Sends itself a signal while torch is imported, where it executes generated code and where it does not.
IMPORTING = """
import os, signal, sys
from importlib.abc import MetaPathFinder
from fuseopt.cli import main
class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn" and sys.argv[1] == "import":
            os.kill(os.getpid(), int(sys.argv[2]))
        if name == "torch.nn" and sys.argv[1] == "exec":
            exec("os.kill(os.getpid(), int(sys.argv[2]))")
        if name == "torch.nn" and sys.argv[1] == "error":
            try:
                os.kill(os.getpid(), int(sys.argv[2]))
            except KeyboardInterrupt:
                raise ImportError(name)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.exit(main(["plan", "gpt2-tiny"]))
"""


@pytest.mark.parametrize(("where", "number"), [("import", signal.SIGINT), ("exec", signal.SIGTERM), ("error", 2)])
def test_a_signal_ends_the_import_of_torch_quietly(where, number):
    command = [sys.executable, "-c", IMPORTING, where, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


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


def test_errors_name_the_fix(capsys, tmp_path, monkeypatch):
    broken = tmp_path / "broken.json"
    broken.write_text('{"kernel_fusion":\n {"enable": yes}}')
    for argv, message in (
        (("plan", "gpt2-xxl"), "did you mean 'gpt2-xl'?"),
        (("plan", str(tmp_path)), "a folder with a config.json"),
        (("plan", "gpt2-tiny", "--config", str(broken)), "not valid JSON at line 2, column 13"),
        (("plan", "gpt2-tiny", "--config", "fastest"), "error: config: 'fastest' is neither a file nor"),
        (("plan", "gpt2-tiny", "--config", "inferense"), "did you mean 'inference'?"),
        (("plan", "gpt2-tiny", "--config", "INFERENCE"), "did you mean 'inference'?"),
        (("demo", "--markdown", str(tmp_path / "none.json")), "cannot be read"),
        (("demo", "--markdown", str(broken)), "not a result file"),
    ):
        code, out, err = run(capsys, *argv)
        assert (code, out) == (2, "")
        assert message in err
    assert "in a folder that does not exist" in refused(capsys, "demo", "--out", str(tmp_path / "none" / "out.json"))
    monkeypatch.setattr("os.access", lambda path, mode: path not in (tmp_path, tmp_path / "old.json"))
    (tmp_path / "old.json").touch()
    for name in ("old.json", "new.json"):
        assert f"{name}' cannot be written" in refused(capsys, "demo", "--out", str(tmp_path / name))


def test_help_stands_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    seen = 0
    for name, parser in parsers(cli._parser(), "fuseopt"):
        assert parser.description and "gpu" not in parser.description, name
        for action in parser._actions:
            if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction, argparse._VersionAction)):
                continue
            what, text = f"{name} {action.option_strings or action.dest}", action.help or ""
            seen += 1
            assert len(text) > 3, what
            takes_a_value = action.nargs != 0
            if action.option_strings and takes_a_value:
                assert "default: " in text, what
            if action.option_strings and action.type is positive:
                assert action.metavar in ("ROWS", "TOKENS", "N"), what
            if isinstance(action.default, (int, float, str)) and takes_a_value and not isinstance(action.default, bool):
                assert f"default: {action.default}" in text, what
    assert seen > 100


def parsers(parser, name):
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, inner in action.choices.items():
                yield from parsers(inner, f"{name} {command}")


def test_numbers_that_are_none_are_refused(capsys):
    for number in ("0", "-1", "1.5", "many"):
        assert f"'{number}' is not a whole number of at least 1" in refused(
            capsys, "bench", "train", "--length", number
        )


def test_report_says_what_was_done(capsys, tmp_path):
    code, out, err = run(capsys, "report", "gpt2-tiny", "--config", write_norms(tmp_path), "--json", "--device", "cpu")
    done = json.loads(out)
    assert (code, err) == (0, "gpt2-tiny: random weights\n")
    assert {(row["target"], row["backend"]) for row in done["replaced"]} == {("FusedLayerNorm", "reference")}
    code, out, _ = run(capsys, "report", "gpt2-tiny", "--config", write_norms(tmp_path), "--device", "cpu")
    assert code == 0 and out.startswith("report on GPT2LMHeadModel")


@pytest.mark.parametrize("arch", [None, "sm_80", "sm_90"])
def test_a_plan_for_a_gpu_needs_none(capsys, arch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = [] if arch is None else ["--arch", arch]
    code, out, _ = run(capsys, "plan", "t5-tiny", "--device", "cuda", "--json", *given)
    backends = {(row["target"], row["backend"]) for row in json.loads(out)["replaced"]}
    assert code == 0 and {("FusedRMSNorm", "cuda"), ("T5InferenceForward", "cuda")} <= backends
    assert not {backend for _, backend in backends} & {"cpu", "reference"}
    _, out, _ = run(capsys, "plan", "gpt2-tiny", "--device", "cuda", "--config", "training", *given)
    assert f"capability {'8.0' if arch == 'sm_80' else '9.0'}" in out and "[triton]" in out
    _, out, _ = run(capsys, "plan", "t5-tiny", "--device", "cpu", "--json")
    assert "cuda" not in {row["backend"] for row in json.loads(out)["replaced"]}


def test_an_architecture_is_that_of_a_gpu(capsys):
    assert "should be sm_ and a compute capability" in refused(capsys, "plan", "gpt2", "--arch", "90")
    code, _, err = run(capsys, "plan", "gpt2-tiny", "--device", "cpu", "--arch", "sm_90")
    assert code == 2 and "add --device cuda" in err


def test_a_file_without_weights_that_load_is_an_error(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}')
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    code, _, err = run(capsys, "verify", str(tmp_path), "--device", "cpu")
    assert code == 2 and f"the weights of {tmp_path} cannot be loaded" in err
    code, _, err = run(capsys, "check", str(tmp_path / "none.py"))
    assert code == 2 and "none.py: no such file" in err


def test_no_memory_is_an_error_that_says_what_to_do(capsys, monkeypatch):
    def no_memory(**options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nMore words.")

    monkeypatch.setattr("fuseopt.bench.suites.demo.run", no_memory)
    code, _, err = run(capsys, "demo", "--device", "cpu")
    assert code == 2 and err.count("\n") == 1 and err.endswith("Take a smaller model, batch or length.\n")


@pytest.mark.parametrize("command", [["verify"], ["report", "--config", "auto"]])
def test_more_tokens_than_a_model_has_positions_are_refused(command, capsys):
    assert main([*command, "gpt2-tiny", "--length", "9999", "--generate", "4"]) == 2
    printed = capsys.readouterr().err
    assert "error: --length: 9999 tokens and 4 new ones are more than the " in printed
    assert " positions of GPT2LMHeadModel" in printed


@pytest.mark.slow
def test_a_reader_that_goes_ends_a_command_quietly():
    command = f"{sys.executable} -m fuseopt env | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("argv", [("demo", "--quick"), ("verify", "gpt2-tiny")])
def test_cuda_where_there_is_none(capsys, argv):
    code, _, err = run(capsys, *argv, "--device", "cuda")
    assert code == 2
    assert "no CUDA device" in err


def test_env_shows_versions_machine_and_native_code(capsys, monkeypatch):
    monkeypatch.setenv("FUSEOPT_TRIED", "yes")
    code, out, _ = run(capsys, "env", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"].isdigit()
    assert set(found["native code"]) == {"cpu", "cuda", "python", "cache", "prebuilt"}
    assert found["gpus"] and found["versions"]["commit"]
    assert found["variables"]["FUSEOPT_TRIED"] == "yes" and "HOME" not in found["variables"]
    code, out, _ = run(capsys, "env")
    assert code == 0
    assert "libraries  " in out
    for value in (torch.__version__, found["machine"]["cpu"], found["native code"]["cache"]):
        assert value in out


def test_report_measures_with_the_config_auto(capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    auto = '{"preset": "auto", "kernel_fusion": {"jit": false, "only": ["transformer.h.0.ln_1"]}}'
    sizes = ("--batch", "2", "--length", "8", "--device", "cpu", "--time-limit", "100")
    code, out, err = run(capsys, "report", "gpt2-tiny", "--config", auto, "--json", "--generate", "3", *sizes)
    measured = json.loads(out)["measured"]
    assert (code, err) == (
        0,
        "gpt2-tiny: random weights\ngpt2-tiny: measuring, if this machine has no earlier result\n",
    )
    assert measured["work"].startswith("generate() of input_ids [2, 8]") and measured["time_limit"] == 100
    assert {"stock", "inference", "generation", "torch.compile"} <= {choice["name"] for choice in measured["choices"]}
    code, out, _ = run(
        capsys, "report", "gpt2-tiny", "--config", auto.replace("ln_1", "attn.c_attn"), "--train", *sizes
    )
    words = " ".join(out.split())
    assert code == 0 and ": training step of input_ids [2, 8], attention_mask [2, 8], labels [2, 8] " in words


def test_options_of_auto_need_it(capsys):
    for given in (("--batch", "2"), ("--train",), ("--time-limit", "3"), ("--generate", "3")):
        code, _, err = run(capsys, "report", "gpt2-tiny", "--device", "cpu", *given)
        assert code == 2 and f"{given[0]}: only --config auto measures" in err
    code, _, err = run(capsys, "report", "gpt2-tiny", "--config", "auto", "--train", "--generate", "3")
    assert code == 2 and "leave one out" in err
    code, _, err = run(capsys, "verify", "gpt2-tiny", "--config", "auto")
    assert code == 2 and "fuseopt report MODEL --config auto" in err
    code, _, err = run(capsys, "plan", "gpt2-tiny", "--config", "auto", "--strict")
    assert code == 2 and "--strict: has no effect" in err


def test_plan_says_what_auto_would_measure_and_what_it_has(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEOPT_MEASURED", "1")
    monkeypatch.setattr("fuseopt.runtime.measured_files.library_cache.folder", lambda: tmp_path / "cache")
    auto = '{"preset": "auto", "kernel_fusion": {"jit": false, "only": ["transformer.h.0.ln_1"]}}'
    code, out, _ = run(capsys, "plan", "gpt2-tiny", "--config", auto)
    assert code == 0 and "nothing is measured yet" in out and "fuseopt report gpt2-tiny --config auto" in out
    assert "\n  forward: stock, inference, torch.compile\n" in out
    sizes = ["--batch", "2", "--length", "4", "--time-limit", "1"]
    assert run(capsys, "report", "gpt2-tiny", "--config", auto, *sizes)[0] == 0
    code, out, _ = run(capsys, "plan", "gpt2-tiny", "--config", auto, "-v")
    assert code == 0 and "nothing is measured" not in out
    assert "\n  auto: " in out and "forward of input_ids [2, 4]" in out and "\n    stock " in out
    code, out, _ = run(capsys, "plan", "gpt2-tiny", "--config", auto, "--json")
    found = json.loads(out)
    assert found["choices"]["training step"] == ["stock", "FusedLayerNorm", "torch.compile"]
    assert [each["work"].partition(" of ")[0] for each in found["measured"]] == ["forward"]


def test_demo_draws_its_results(capsys, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("fuseopt.bench.harness.plot.check_available", lambda: None)
    monkeypatch.setattr("fuseopt.bench.harness.plot.save", lambda results, path: drawn.append((results, path)))
    monkeypatch.setattr("fuseopt.bench.suites.demo.run", lambda **options: "results")
    path = tmp_path / "demo.svg"
    code, out, _ = run(capsys, "demo", "--device", "cpu", "--plot", str(path))
    assert code == 0 and drawn == [("results", path)] and f"drawn in {path}" in out
    assert "should end in .png" in refused(capsys, "demo", "--plot", str(tmp_path / "demo.txt"))
