"""bench capacity: how the largest batch is found, and what is said where there is none."""

import pytest
import torch

from fuseopt.bench.suites import capacity
from fuseopt.bench.suites.capacity import CannotTrain, largest_batch
from fuseopt.bench.suites.train import Row
from fuseopt.cli import main
from fuseopt.errors import ConfigError


class Memory:
    """Of which a model takes `fixed` MiB and a row `a_row`; as much as `lost` is left over by an allocator."""

    def __init__(self, fixed, a_row, capacity_mib, lost=0.0):
        self.fixed, self.a_row, self.capacity_mib, self.lost = fixed, a_row, capacity_mib, lost
        self.tried = []

    def peak_mib(self, batch):
        self.tried.append(batch)
        peak = self.fixed + self.a_row * batch
        return peak if peak + self.lost * peak <= self.capacity_mib else None


@pytest.mark.parametrize(("lost", "least"), [(0.0, 0.98), (0.03, 0.96), (0.07, 0.96), (0.15, 0.95), (0.25, 0.9)])
def test_a_line_through_two_peaks_leads_to_the_largest(lost, least):
    memory = Memory(fixed=2000, a_row=130, capacity_mib=140_000, lost=lost)
    batch, peak = largest_batch(memory.peak_mib, 16, memory.capacity_mib)
    largest = int((140_000 / (1 + lost) - 2000) / 130)
    assert least * largest <= batch <= largest and peak == 2000 + 130 * batch
    assert len(memory.tried) <= 7 and memory.tried[:2] == [16, 32]


def test_fewer_rows_than_asked_for():
    memory = Memory(fixed=100, a_row=10, capacity_mib=155)
    assert largest_batch(memory.peak_mib, 64, 155) == (5, 150)
    assert memory.tried[:5] == [64, 32, 16, 8, 4]
    assert memory.tried[5:] == [8, 2, 5]
    assert largest_batch(Memory(0, 10, 155).peak_mib, 8, 155) == (15, 150)
    assert largest_batch(Memory(100, 50, 155).peak_mib, 4, 155) == (1, 150)
    with pytest.raises(CannotTrain, match="one row does not fit"):
        largest_batch(Memory(100, 100, 155).peak_mib, 4, 155)


def test_rows_that_take_nothing_end_the_search():
    batch, peak = largest_batch(lambda batch: 50.0 if batch <= 40 else None, 8, 100)
    assert (batch, peak) == (16, 50.0)


def test_it_takes_a_gpu(capsys):
    with pytest.raises(ConfigError, match="bench capacity: needs a GPU, not cpu; "):
        capacity.run(device=torch.device("cpu"), rows=[Row("gpt2-tiny", 2, 8)])
    assert main(["bench", "capacity", "--device", "cpu", "--model", "gpt2-tiny"]) == 2


def test_each_system_is_tried_by_itself(monkeypatch):
    """On a CPU, as if it were a GPU with room for 11 rows."""
    tried = []

    def peak_mib(case, batch):
        tried.append((case.system, batch))
        if case.system == "wrong":
            raise CannotTrain("no such thing")
        return 100.0 * batch if batch <= 11 else None

    monkeypatch.setattr(capacity._Case, "peak_mib", peak_mib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1100 * 2**20, 0))
    rows = [Row("gpt2-tiny", 2, 8, dropout=0.1)]
    results = capacity.run(device=torch.device("cuda"), rows=rows, configs={"training": "training", "wrong": {}})
    stock, compiled, training, wrong = results.rows
    assert stock.case == "gpt2-tiny training step, largest batch x 8, dropout 0.1, bfloat16 autocast"
    assert (stock.largest_batch, stock.peak_mib) == (10, 1000) == (training.largest_batch, training.peak_mib)
    assert compiled.variant == "torch.compile" and wrong.note == "no such thing" and wrong.largest_batch is None
    assert [batch for system, batch in tried if system == "stock"] == [2, 4, 10]
    assert "| 10" in results.to_markdown()


@pytest.mark.gpu
def test_memory_is_filled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 0))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((2**30 + torch.cuda.memory_reserved()) / total)
    try:
        (stock,) = capacity.run(
            device=torch.device("cuda"), rows=[Row("gpt2-tiny", 64, 256)], configs={}, compile=False
        ).rows
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert stock.largest_batch > 128 and 600 < stock.peak_mib < 1024
