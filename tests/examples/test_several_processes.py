"""The distributed examples in two CPU processes: the fused model compiles its step and has stock's losses."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2LMHeadModel

import fuseopt  # noqa: F401 -- imported once, before the two processes are forked
from tests.examples.scripts import EXAMPLES, ROOT, load, losses_of, training_config
from tests.two_processes import start_two

COMPILED = f"{GPT2LMHeadModel.__name__}.forward -> TrainingForward[aot_eager]"
FELL_BACK = "the model's own forward, as 'aot_eager' cannot compile it"
ARGUMENTS = ["--batch", "2", "--length", "16", "--steps", "3"]
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def torchrun(script: str, *arguments: str) -> str:
    """What two processes print; without a GPU, over Gloo on the loopback interface."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, **ON_CPU, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _run_in_process(rank: int, script: str, arguments: list[str], port: int, printed: str) -> None:
    """Run an example with the variables that torchrun sets; the first process prints to the file `printed`."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= ON_CPU | {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in ranks.items()}
    sys.argv = [script, *arguments]
    with open(printed if rank == 0 else os.devnull, "w") as file, contextlib.redirect_stdout(file):
        load(script.removesuffix(".py")).main()


def assert_trains_like_stock(printed: str, last_column: str, reported: str) -> None:
    rows = {line.split()[0]: line for line in printed.splitlines() if line.startswith(("stock ", "fused "))}
    assert all(line.endswith(f"  {last_column}") for line in rows.values()), printed
    losses = losses_of(printed)
    assert losses["fused"] == pytest.approx(losses["stock"], rel=1e-4)
    assert losses["fused"][1] < 0.99 * losses["fused"][0]
    assert reported in printed and (reported == FELL_BACK) == (FELL_BACK in printed)


@pytest.mark.parametrize(
    ("script", "last_column"),
    [
        ("train_ddp.py", "yes"),
        pytest.param("train_fsdp2.py", "1,691,072 of 3,382,080", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_like_stock(
    script: str, last_column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed = tmp_path / "printed.txt"
    arguments = [*ARGUMENTS, "--config", training_config(tmp_path)]
    start_two(_run_in_process, (script, arguments, port, str(printed)))
    assert_trains_like_stock(printed.read_text(), last_column, COMPILED)


@pytest.mark.slow
def test_the_command_of_the_example_falls_back_for_several_units(tmp_path: Path) -> None:
    printed = torchrun("train_fsdp2.py", *ARGUMENTS, "--config", training_config(tmp_path), "--by-block")
    assert_trains_like_stock(printed, "1,691,072 of 3,382,080", FELL_BACK)
