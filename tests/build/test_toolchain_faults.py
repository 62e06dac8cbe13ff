"""Builds without a usable stderr, and compilers that do not answer."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

import pytest
import torch

from fuseopt.build import compilation, loader, toolchain


def full_file() -> TextIO:
    return Path("/dev/full").open("w")


def closed_file() -> TextIO:
    file = full_file()
    file.close()
    return file


@pytest.mark.parametrize("with_ninja", [True, False])
@pytest.mark.parametrize("stderr", [lambda: None, closed_file, full_file], ids=["None", "closed", "full"])
def test_a_build_succeeds_where_its_progress_cannot_be_written(csrc, monkeypatch, capsys, stderr, with_ninja):
    if not with_ninja:
        monkeypatch.setattr(compilation, "_ninja", lambda: None)
    with monkeypatch.context() as replaced:
        replaced.setattr(sys, "stderr", stderr())
        loaded = loader.load("cpu")
    assert (loaded.status, loaded.origin, loaded.reason) == ("loaded", "built", None)
    assert capsys.readouterr().out == ""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("question", ["c++ -###", "nvcc --version", "nvcc --dryrun"])
def test_a_compiler_that_does_not_answer_is_a_reason_and_is_ended(csrc, monkeypatch, tmp_path, question):
    """The child of a compiler wrapper, which holds the pipe, is killed too."""
    monkeypatch.setattr(toolchain, "QUERY_SECONDS", 0.3)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    compiler, option = question.split()
    (csrc / "cuda").mkdir()
    (csrc / "cuda" / "kernel.cu").write_text("")
    wrapper = script(
        tmp_path / "bin" / compiler,
        f'case "$*" in *{option}*) sleep 100 & echo $! > {tmp_path}/pid; wait;; *) echo release 13.0;; esac\n',
    )
    if compiler == "c++":
        monkeypatch.setenv("CXX", str(wrapper))
    else:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    start = time.perf_counter()
    with pytest.raises(toolchain.ToolchainError, match=r"did not answer within 0\.3 s") as raised:
        toolchain.cpu_recipe() if compiler == "c++" else toolchain.cuda_recipe(["90"])
    assert str(wrapper) in str(raised.value) and option in str(raised.value)
    assert time.perf_counter() - start < 5
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not is_running(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the process that the wrapper waited for was left running")


@pytest.mark.parametrize(
    ("command", "words"),
    [("c++ 'unclosed", "CXX is not a valid command"), ("{folder}/no-program", "cannot be started"), ("  ", None)],
)
def test_a_command_that_is_none_is_a_reason(csrc, monkeypatch, tmp_path, command, words):
    (tmp_path / "no-program").write_bytes(b"\x7fELF")
    (tmp_path / "no-program").chmod(0o755)
    monkeypatch.setenv("CXX", command.format(folder=tmp_path))
    state = loader.load("cpu")
    if words is None:
        assert state.status == "loaded"
    else:
        assert state.status == "absent" and words in state.reason


def test_a_readme_beside_sources_is_no_source(csrc):
    """A wheel has no READMEs, and its libraries must count as made from its sources."""
    before = toolchain.sources_digest("cpu")
    (csrc / "README.md").write_text("# Words\n")
    (csrc / "cpu" / "README.md").write_text("# Words\n")
    assert toolchain.sources_digest("cpu") == before
    (csrc / "dtypes.h").write_text("constexpr int kAnswer = 43;\n")
    assert toolchain.sources_digest("cpu") != before
