"""`bench tune` on a fake clock: the number that each pattern of times gives, what it prints, and what it writes."""

import functools
from pathlib import Path

import pytest
import torch

from fuseopt import ops, tuning
from fuseopt.bench.suites import tune
from fuseopt.bench.suites.tune import ALTERNATIVE, KERNEL, Threshold
from fuseopt.cli import main
from fuseopt.errors import ConfigError

CPU = torch.device("cpu")
SIZES = (10, 20, 30, 40)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in tuning.FOLDER.glob("sm_*.inc"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    return tmp_path


def crossing(at: int, name: str = "decode_linear_long_k", is_minimum: bool = False) -> Threshold:
    """The kernel takes as many seconds as the size, its alternative `at`; from `at` on it is the other way round."""

    def calls(size: int, device: torch.device) -> dict[str, tune.Call]:
        kernel, other = (at, size) if is_minimum else (size, at)
        return {KERNEL: lambda: kernel, ALTERNATIVE: lambda: other}

    return Threshold(name, SIZES, calls, is_minimum)


@pytest.mark.parametrize(
    ("is_faster", "is_minimum", "expected"),
    [
        ((True, True, False, False), False, 20),
        ((True, False, True, False), False, 10),
        ((False, True, True, True), False, None),
        ((True, True, True, True), False, 40),
        ((False, False, True, True), True, 30),
        ((False, True, False, True), True, 40),
        ((True, True, True, False), True, None),
        ((True, True, True, True), True, 10),
    ],
)
def test_value_of_a_threshold(is_faster: tuple[bool, ...], is_minimum: bool, expected: int | None) -> None:
    assert crossing(0, is_minimum=is_minimum).value(is_faster) == expected


def test_run_proposes_and_leaves_the_files(folder: Path) -> None:
    before = {path.name: path.read_text() for path in folder.iterdir()}
    thresholds = [
        crossing(25),
        crossing(25, "decode_linear_max_work", is_minimum=True),
        crossing(5, "decode_attention_warps"),
    ]
    results = tune.run(device=CPU, thresholds=thresholds, sample=lambda call: call())
    notes = {row.case: row.note for row in results.rows if row.variant == "value"}
    assert notes == {
        "decode_linear_long_k": "3072 -> 20",
        "decode_linear_max_work": "160000000 -> 30",
        "decode_attention_warps": "16: the kernel is not faster at any end",
    }
    (row,) = [row for row in results.rows if row.case == "decode_linear_long_k at 40" and row.variant == KERNEL]
    assert row.milliseconds == (40e3,) * 3 and row.speed_up == (25 / 40,) * 3
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_run_writes(folder: Path) -> None:
    tune.run(device=CPU, thresholds=[crossing(25)], save=True, sample=lambda call: call())
    assert tuning.read_table(folder / "sm_90.inc")["decode_linear_long_k"] == 20
    assert "// TUNED: `fuseopt bench tune`, " in (folder / "sm_90.inc").read_text()


def test_a_threshold_that_raises_is_a_row_and_the_next_is_measured(folder: Path, capsys) -> None:
    def broken(size: int, device: torch.device) -> dict[str, tune.Call]:
        raise RuntimeError("no such kernel")

    thresholds = [Threshold("decode_linear_max_work", SIZES, broken), crossing(25)]
    results = tune.run(device=CPU, thresholds=thresholds, sample=lambda call: call())
    failed, *_, value = results.rows
    assert (failed.case, failed.note) == ("decode_linear_max_work", "failed: RuntimeError: no such kernel")
    assert value.note == "3072 -> 20"
    assert "[2/2] decode_linear_long_k" in capsys.readouterr().err


@pytest.mark.parametrize("threshold", tune.THRESHOLDS, ids=lambda threshold: threshold.name)
def test_kernel_and_alternative_compute_the_same(threshold: Threshold, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "decode_linear",
        "decode_qkv_attention_",
        "decode_attention_",
        "prefix_attention",
        "prompt_attention_",
    ):
        monkeypatch.setattr(ops, name, functools.partial(_by_reference, getattr(ops, name)))
    torch.manual_seed(0)
    size = threshold.sizes[0]
    assert list(threshold.sizes) == sorted(set(threshold.sizes))
    assert threshold.sizes[0] <= tuning.tuned(threshold.name, CPU) <= threshold.sizes[-1]
    calls = threshold.calls(size, CPU)
    kernel, alternative = calls[KERNEL]().float(), calls[ALTERNATIVE]().float()
    assert kernel.abs().max() > 0.1
    torch.testing.assert_close(kernel.flatten(), alternative.flatten(), rtol=0.02, atol=0.05)


def _by_reference(op, *arguments, **options):
    return op(*arguments, **options | {"backend": "reference"})


def test_a_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="bench tune: needs a GPU"):
        tune.run(device=CPU)
    for command in (["bench", "tune"], ["tune"]):
        assert main([*command, "--device", "cpu"]) == 2
        assert "bench tune: needs a GPU" in capsys.readouterr().err
