"""Compares two result files: which rows became slower by more than the noise of both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fuseopt.bench.harness.records import CONTROLS, Record, Results
from fuseopt.errors import ConfigError

_Rows = Mapping[tuple[str, str], Record]


@dataclass(frozen=True)
class Comparison:
    """Result of comparing with an earlier result file.

    Attributes:
        compared: number of rows timed in both files.
        missing: number of rows of the earlier file that were not timed now.
        slower: a line for each row that became slower beyond the noise.
    """

    compared: int
    missing: int
    slower: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.compared} rows compared, {len(self.slower)} slower beyond the noise"
        missing = f"; {self.missing} rows of the earlier file were not timed now" if self.missing else ""
        return "\n".join([head + missing, *(f"  {line}" for line in self.slower)])


def compare(now: Results, earlier: Results) -> Comparison:
    """Compares the medians of rows with the same case and variant; only variants with fuseopt's code can be slower.

    A row may be slower by its noise, the distance between its quartiles in both files. If the `CONTROLS` of its case
    became slower, so did the machine, and the row may be slower by as much.

    Raises:
        ConfigError: results of another benchmark or another device.
    """
    place = "cpu" if now.machine["gpu"] == "none" else "gpu"
    for what, one, other in (
        ("benchmark", now.benchmark, earlier.benchmark),
        ("machine", now.machine[place], earlier.machine[place]),
    ):
        if one != other:
            raise ConfigError(f"results of another {what} cannot be compared: {one!r} now, {other!r} earlier")
    before, after = _timed(earlier), _timed(now)
    shared = [key for key in after if key in before]
    drifts = {case: _drift(case, before, after) for case, _ in shared}
    own = [key for key in shared if key[1] not in CONTROLS]
    slower = (_slower(before[key], after[key], drifts[key[0]]) for key in own)
    return Comparison(len(shared), len(before) - len(shared), tuple(line for line in slower if line is not None))


def _timed(results: Results) -> _Rows:
    return {(row.case, row.variant): row for row in results.rows if row.milliseconds is not None}


def _drift(case: str, before: _Rows, after: _Rows) -> float:
    """How many times slower the machine became, judging by the case's controls; at least 1."""
    keys = [(case, variant) for variant in CONTROLS]
    ratios = [_median(after[key]) / _median(before[key]) for key in keys if key in before and key in after]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def _slower(before: Record, after: Record, drift: float) -> str | None:
    ratio = _median(after) / _median(before)
    allowed = (1 + _noise(before) + _noise(after)) * drift
    if ratio <= allowed:
        return None
    microseconds = " -> ".join(f"{_median(row) * 1e3:.4g}" for row in (before, after))
    return f"{after.case}: {after.variant}: {microseconds} us, {ratio - 1:.1%} more; noise {allowed - 1:.1%}"


def _median(row: Record) -> float:
    assert row.milliseconds is not None
    return row.milliseconds[1]


def _noise(row: Record) -> float:
    assert row.milliseconds is not None
    low, median, high = row.milliseconds
    return (high - low) / median
