"""`fuseopt bench scaling`: a training step in one process, and in several by DistributedDataParallel."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fuseopt.bench.harness import progress
from fuseopt.bench.harness.architectures import dropout_rates, load_config, random_model
from fuseopt.bench.harness.records import FAILED, Record, Results
from fuseopt.bench.harness.workloads import FusionConfig, fuse
from fuseopt.bench.suites.train import LEARNING_RATE, PRECISIONS, Loop, Row, make_batch
from fuseopt.errors import ConfigError
from fuseopt.runtime.timer import Timing, time_in_turns, work_seconds

ALONE, TOGETHER = "one process", "together"
INTERRUPTED = "interrupted"
_REPLACES_NOTHING = "nothing is replaced in"
ROUNDS = 5


def run(*, device: torch.device, row: Row, processes: int, name: str, config: FusionConfig) -> Results:
    """Times the step of `row` first without DistributedDataParallel, then with it; each process has its own batch.

    All processes run in both cases, each on its own GPU; on CPUs they share the cores. If a process fails, the rows
    that are missing say why. On an interrupt the processes are ended.

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
        note = _run_processes(arguments, processes)
        saved = Path(folder) / "seconds.pt"
        found: dict[str, list[float]] = torch.load(saved) if saved.exists() else {}
    timings = {key: Timing(tuple(samples)) for key, samples in found.items()}
    if not timings and note == INTERRUPTED:
        raise KeyboardInterrupt
    records = []
    for key, variant, count in ((ALONE, ALONE, 1), (TOGETHER, f"{processes} processes", processes)):
        if key not in timings:
            records.append(Record(row.name, f"{name}, {variant}", note=note))
            continue
        scaling = count * timings[key].speed_up_over(timings[ALONE]).median
        gain = None if key == ALONE else f"{scaling:.2f} times the tokens of {ALONE}"
        tokens = count * row.tokens
        records.append(Record.of(row.name, f"{name}, {variant}", timings[key], None, tokens=tokens, note=gain))
    return Results.measured_here("scaling", records)


def _run_processes(arguments: tuple[Any, ...], count: int) -> str | None:
    """Runs `count` processes of `_time_in_process`; why they did not end by themselves, or None if they did.

    Raises:
        ConfigError: the config replaces nothing.
    """
    context = torch.multiprocessing.spawn(_time_in_process, arguments, nprocs=count, join=False)
    try:
        while not context.join():
            pass
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if _REPLACES_NOTHING in str(error):
            raise ConfigError(str(error).strip().splitlines()[-1].partition(": ")[2]) from error
        progress.say(str(error))
        return FAILED + str(error).strip().splitlines()[-1]
    finally:
        for process in context.processes:
            process.terminate()
    return None


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
        raise ConfigError(f"{_REPLACES_NOTHING} {row.model}: {unmet}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    alone = Loop(model, optimizer, make_batch(row, load_config(row.model).vocab_size, device), row.autocast)
    sample = functools.partial(work_seconds, device=device, repetitions=3)
    timings: dict[str, Timing] = {}
    for key in (ALONE, TOGETHER):
        if rank == 0:
            progress.say(f"{row.name}: {ALONE if key == ALONE else f'{processes} processes'}")
        # The same number of calls in every process: together, each call waits for all processes.
        step = alone if key == ALONE else dataclasses.replace(alone, model=DistributedDataParallel(model))
        timings |= time_in_turns({key: step}, sample, rounds=ROUNDS, warm_up=2)
        if rank == 0:
            torch.save({name: list(timing.samples) for name, timing in timings.items()}, Path(folder) / "seconds.pt")
    del step
    dist.destroy_process_group()
