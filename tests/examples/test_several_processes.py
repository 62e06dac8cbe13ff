"""The torchrun examples in two CPU processes: the fused model compiles its step and has stock's losses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.examples.scripts import EXAMPLES, ROOT, losses_of, training_config

COMPILED = "GPT2LMHeadModel.forward -> TrainingForward[aot_eager]"
FELL_BACK = "the model's own forward, as 'aot_eager' cannot compile it"


def torchrun(script: str, *arguments: str) -> str:
    """What two processes print; without a GPU, over Gloo on the loopback interface."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    ran = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("script", "flags", "last_column", "reported"),
    [
        ("train_ddp.py", [], "yes", COMPILED),
        ("train_fsdp2.py", [], "1,691,072 of 3,382,080", COMPILED),
        pytest.param(*("train_fsdp2.py", ["--by-block"], "1,691,072 of 3,382,080", FELL_BACK), marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_like_stock(script, flags, last_column, reported, tmp_path):
    printed = torchrun(
        script, "--batch", "2", "--length", "16", "--steps", "3", "--config", training_config(tmp_path), *flags
    )
    rows = {line.split()[0]: line for line in printed.splitlines() if line.startswith(("stock ", "fused "))}
    assert all(line.endswith(f"  {last_column}") for line in rows.values()), printed
    losses = losses_of(printed)
    assert losses["fused"] == pytest.approx(losses["stock"], rel=1e-4)
    assert losses["fused"][1] < 0.99 * losses["fused"][0]
    assert reported in printed and (reported == FELL_BACK) == (FELL_BACK in printed)
