"""`fuseopt bench scaling`: a training step in one process, and in several by DistributedDataParallel."""

from __future__ import annotations

import dataclasses
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from fuseopt.bench.harness.architectures import dropout_rates, load_config, random_model
from fuseopt.bench.harness.records import Record, Results
from fuseopt.bench.harness.timer import Call, Timing, time_in_turns, work_seconds
from fuseopt.bench.harness.workloads import FusionConfig, fuse
from fuseopt.bench.suites.train import LEARNING_RATE, PRECISIONS, Loop, Row, make_batch
from fuseopt.errors import ConfigError

ALONE = "one process"
ROUNDS = 5


def run(*, device: torch.device, row: Row, processes: int, name: str, config: FusionConfig) -> Results:
    """Times the step of `row` first without DistributedDataParallel, then with it; each process has its own batch.

    All processes run in both cases, each on its own GPU; on CPUs they share the cores. The first process shows a
    progress bar on stderr.

    Args:
        processes: number of processes, and of GPUs; over NCCL, on CPUs over Gloo.
        name: name of `config` in the results.

    Raises:
        ConfigError: fewer GPUs than processes; `config` replaces nothing.
    """
    if device.type == "cuda" and torch.cuda.device_count() < processes:
        raise ConfigError(f"--processes {processes}: torch sees {torch.cuda.device_count()} GPU(s)")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, folder, device.type, row, config)
        torch.multiprocessing.spawn(_time_in_process, arguments, nprocs=processes)
        found: dict[str, list[float]] = torch.load(Path(folder) / "seconds.pt")
    alone, together = (Timing(tuple(samples)) for samples in found.values())
    scaling = processes * together.speed_up_over(alone).median
    return Results.measured_here(
        "scaling",
        [
            Record.of(row.name, f"{name}, {ALONE}", alone, None, tokens=row.tokens),
            Record.of(
                row.name,
                f"{name}, {processes} processes",
                together,
                None,
                tokens=processes * row.tokens,
                note=f"{scaling:.2f} times the tokens of {ALONE}",
            ),
        ],
    )


def _time_in_process(rank: int, processes: int, folder: str, device_type: str, row: Row, config: FusionConfig) -> None:
    on_gpu = device_type == "cuda"
    device = torch.device(device_type, rank) if on_gpu else torch.device(device_type)
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        f"file://{folder}/rendezvous",
        timedelta(minutes=5),
        rank=rank,
        world_size=processes,
    )
    overrides = {} if row.dropout is None else dropout_rates(row.model, row.dropout)
    model = random_model(row.model, device, PRECISIONS[row.precision], **overrides).train()
    _, unmet = fuse(model, "", config)
    if unmet is not None:
        raise ConfigError(f"nothing is replaced in {row.model}: {unmet}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    alone = Loop(model, optimizer, make_batch(row, load_config(row.model).vocab_size, device), row.autocast)
    with tqdm(total=2 * ROUNDS, unit="round", disable=rank != 0) as progress:

        def sample(call: Call) -> float:
            seconds = work_seconds(call, device, repetitions=3)
            progress.update()
            return seconds

        progress.set_postfix_str(ALONE)
        timings = time_in_turns({ALONE: alone}, sample, rounds=ROUNDS, warm_up=2)
        progress.set_postfix_str(f"{processes} processes")
        # The same number of calls in every process: each call waits for all processes.
        together = dataclasses.replace(alone, model=DistributedDataParallel(model))
        timings |= time_in_turns({"together": together}, sample, rounds=ROUNDS, warm_up=2)
    if rank == 0:
        torch.save({key: list(timing.samples) for key, timing in timings.items()}, Path(folder) / "seconds.pt")
    del together
    dist.destroy_process_group()
