"""bench scaling: the same step in one process and in two that meet in every step."""

import pytest
import torch

from fuseopt.bench.suites import scaling
from fuseopt.bench.suites.train import Row
from fuseopt.cli import main
from fuseopt.errors import ConfigError
from tests.two_processes import start_two

ROW = Row("gpt2-tiny", 2, 8, dropout=0.0, precision="float32")
KERNELS = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False}}


def test_two_processes_are_timed_beside_one(monkeypatch, capfd):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Each of those that are spawned imports torch for itself.
    monkeypatch.setattr(
        torch.multiprocessing, "spawn", lambda function, arguments, nprocs: start_two(function, arguments)
    )
    results = scaling.run(device=torch.device("cpu"), row=ROW, processes=2, name="kernels", config=KERNELS)
    alone, together = results.rows
    assert [alone.variant, together.variant] == ["kernels, one process", "kernels, 2 processes"]
    assert alone.case == together.case == ROW.name and alone.rounds == together.rounds == scaling.ROUNDS
    assert (alone.tokens, together.tokens) == (16, 32) and min(alone.milliseconds + together.milliseconds) > 0
    assert together.note.endswith(" times the tokens of one process")
    progress = capfd.readouterr().err
    assert f"{2 * scaling.ROUNDS}/{2 * scaling.ROUNDS}" in progress and "2 processes" in progress


def test_what_cannot_be_run_is_said_before_a_process_starts(monkeypatch, capsys):
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"--processes 2: torch sees 1 GPU\(s\)"):
        scaling.run(device=torch.device("cuda"), row=ROW, processes=2, name="kernels", config=KERNELS)
    assert main(["bench", "scaling", "--config", "trainign", "--device", "cpu"]) == 2
    assert "did you mean 'training'" in capsys.readouterr().err
