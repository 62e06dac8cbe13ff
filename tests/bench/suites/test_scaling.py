"""bench scaling: the same step in one process and in two that meet in every step."""

import dataclasses
import multiprocessing

import pytest
import torch

from fuseopt.bench.suites import scaling
from fuseopt.bench.suites.train import Row
from fuseopt.cli import main
from fuseopt.errors import ConfigError
from tests.two_processes import start_two

ROW = Row("gpt2-tiny", 2, 8, dropout=0.0, precision="float32")
KERNELS = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False}}


@pytest.fixture
def forked(monkeypatch):
    """Processes that need not import torch, as those that are spawned do."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        torch.multiprocessing, "spawn", lambda function, arguments, nprocs, join: start_two(function, arguments, join)
    )


@pytest.mark.slow
def test_two_processes_are_timed_beside_one(forked, capfd):
    results = scaling.run(device=torch.device("cpu"), row=ROW, processes=2, name="kernels", config=KERNELS)
    alone, together = results.rows
    assert [alone.variant, together.variant] == ["kernels, one process", "kernels, 2 processes"]
    assert alone.case == together.case == ROW.name and alone.rounds == together.rounds == scaling.ROUNDS
    assert (alone.tokens, together.tokens) == (16, 32) and min(alone.milliseconds + together.milliseconds) > 0
    assert together.note.endswith(" times the tokens of one process")
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith(ROW.name)]
    assert said == [f"{ROW.name}: one process", f"{ROW.name}: 2 processes"]


def test_a_process_that_fails_is_a_row_and_an_interrupt_ends_the_others(forked, capfd, monkeypatch):
    # The first process fails, and the second waits for it.
    wrong = dataclasses.replace(ROW, precision="no such precision")
    results = scaling.run(device=torch.device("cpu"), row=wrong, processes=2, name="kernels", config=KERNELS)
    assert [row.milliseconds for row in results.rows] == [None, None]
    assert all(row.failed and "no such precision" in row.note for row in results.rows)
    assert "KeyError" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"^nothing is replaced in gpt2-tiny: "):
        norm = {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"], "jit": False}}
        scaling.run(device=torch.device("cpu"), row=ROW, processes=2, name="norm", config=norm)

    def interrupt(context, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.multiprocessing.ProcessContext, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        scaling.run(device=torch.device("cpu"), row=ROW, processes=2, name="kernels", config=KERNELS)
    for process in multiprocessing.active_children():
        process.join(10)
    assert not multiprocessing.active_children()


def test_what_cannot_be_run_is_said_before_a_process_starts(monkeypatch, capsys):
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"--processes 2: torch sees 1 GPU\(s\)"):
        scaling.run(device=torch.device("cuda"), row=ROW, processes=2, name="kernels", config=KERNELS)
    assert main(["bench", "scaling", "--config", "trainign", "--device", "cpu"]) == 2
    assert "did you mean 'training'" in capsys.readouterr().err
