"""`fuseopt bench capacity`: the largest batch whose training step fits on the GPU, for each system."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from fuseopt.bench.harness.architectures import load_config
from fuseopt.bench.harness.machine import needs_gpu
from fuseopt.bench.harness.measure import measure
from fuseopt.bench.harness.records import Record, Results
from fuseopt.bench.harness.workloads import FusionConfig
from fuseopt.bench.suites.train import OUT_OF_MEMORY, Row, all_systems, default_configs, first_steps, make_batch

GPU_ROWS = (Row("gpt2", 32, 1024, dropout=0.1),)
# Shares of the predicted largest batch that are tried in turn.
_SHARES = (0.99, 0.96, 0.92, 0.85, 0.75)


def run(
    *,
    device: torch.device,
    rows: Sequence[Row] = (),
    configs: Mapping[str, FusionConfig] | None = None,
    compile: bool | None = None,
) -> Results:
    """Trains each system alone for a few steps on batches of several sizes.

    Args:
        device: a GPU that nothing else uses.
        rows: each with the batch size to start with; `GPU_ROWS` by default.
        configs: by default those of `bench train`.
        compile: also try torch.compile of the stock model; the default is True.

    Raises:
        ConfigError: `device` is no GPU; a model is no architecture by name, folder with a config.json or model id; a
            config is wrong.
    """
    if device.type != "cuda":
        raise needs_gpu("bench capacity", device)
    systems = all_systems(default_configs(device) if configs is None else configs, compile is not False)
    cases = [_Case(row, system, config, device) for row in rows or GPU_ROWS for system, config in systems.items()]
    return Results.measured_here("capacity", measure(cases, _Case.records))


@dataclasses.dataclass(frozen=True)
class _Case:
    row: Row
    system: str
    config: FusionConfig | None
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.row.name}, {self.system}"

    def records(self) -> Iterator[Record]:
        free, _ = torch.cuda.mem_get_info(self.device)
        work = self.row.name_with("largest batch")
        try:
            found = largest_batch(self.peak_mib, self.row.batch, free / 2**20)
        except CannotTrain as error:
            yield Record(work, self.system, note=str(error))
        else:
            batch, peak = found
            sized = dataclasses.replace(self.row, batch=batch)
            yield Record(work, self.system, largest_batch=batch, peak_mib=peak, tokens=sized.tokens)

    def peak_mib(self, batch: int) -> float | None:
        """Peak memory of a step on `batch` rows in MiB; None if it does not fit."""
        sized = dataclasses.replace(self.row, batch=batch)
        tokens = make_batch(sized, load_config(self.row.model).vocab_size, self.device)
        _, trial = first_steps(sized, self.system, self.config, tokens, self.device)
        peak = trial if isinstance(trial, str) else trial.peak_mib
        del tokens, trial
        # A compiled step and its model form a reference cycle.
        gc.collect()
        torch.cuda.empty_cache()
        if isinstance(peak, str) and peak != OUT_OF_MEMORY:
            raise CannotTrain(peak)
        return None if isinstance(peak, str) else peak


class CannotTrain(Exception):
    """The system cannot train at any batch size; the message says why."""


def largest_batch(peak_mib: Callable[[int], float | None], batch: int, capacity_mib: float) -> tuple[int, float]:
    """The largest batch that was tried and fits, and its peak memory in MiB.

    The peaks of two batch sizes give the memory per row, and so a prediction of the largest batch, which is then tried.

    Args:
        peak_mib: peak memory of a batch; None if it does not fit.
        capacity_mib: free memory.

    Raises:
        CannotTrain: not even one row fits.
    """
    peaks: dict[int, float] = {}

    def fits(rows: int) -> bool:
        peak = peak_mib(rows)
        if peak is not None:
            peaks[rows] = peak
        return peak is not None

    while not fits(batch):
        if batch == 1:
            raise CannotTrain("a batch of one row does not fit")
        batch //= 2
    if fits(2 * batch):
        batch *= 2
    elif batch > 1:
        fits(batch // 2)
    smallest, peak = min(peaks), peaks[batch]
    a_row = (peak - peaks[smallest]) / (batch - smallest) if smallest < batch else 0.0
    for share in _SHARES if a_row > 0.0 else ():
        rows = batch + int((share * capacity_mib - peak) / a_row)
        if rows > batch and fits(rows):
            return rows, peaks[rows]
    return batch, peak
