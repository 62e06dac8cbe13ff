"""Result files: rows with the machine, versions, date and commit they were measured on, and the table made of them."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fuseopt.bench import machine
from fuseopt.bench.timer import Timing
from fuseopt.errors import ConfigError

STOCK = "stock"


@dataclass(frozen=True)
class Record:
    """One variant of one piece of work.

    Attributes:
        case: the work: model, shapes, dtype.
        variant: how it was done; "stock" is plain transformers, which the others are held against.
        milliseconds: [lower quartile, median, upper quartile] of a call; None when the variant was not run.
        speed_up: likewise, over stock, round by round.
        difference: of the result from stock's: "1.2e-06", the largest absolute one, or "tokens equal", say.
        peak_mib: most memory allocated on the GPU by a call, above what was there before it.
        note: why a variant was not run.
    """

    case: str
    variant: str
    milliseconds: tuple[float, float, float] | None = None
    speed_up: tuple[float, float, float] | None = None
    rounds: int = 0
    difference: str | None = None
    peak_mib: float | None = None
    note: str | None = None

    @classmethod
    def of(
        cls, case: str, variant: str, timing: Timing, baseline: Timing, difference: str, peak_mib: float | None = None
    ) -> Record:
        seconds, speed_up = timing.seconds, timing.speed_up_over(baseline)
        return cls(
            case,
            variant,
            (seconds.low * 1e3, seconds.median * 1e3, seconds.high * 1e3),
            None if variant == STOCK else (speed_up.low, speed_up.median, speed_up.high),
            len(timing.samples),
            difference=None if variant == STOCK else difference,
            peak_mib=peak_mib,
        )


@dataclass(frozen=True)
class Results:
    """What stands in a file under benchmarks/results."""

    benchmark: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    date: str
    commit: str | None
    rows: tuple[Record, ...]

    @classmethod
    def measured_here(cls, benchmark: str, rows: Sequence[Record]) -> Results:
        """Results of today, of this machine and checkout."""
        today = datetime.date.today().isoformat()
        return cls(benchmark, machine.machine(), machine.versions(), today, machine.commit(), tuple(rows))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the results as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Reads what `save` wrote.

        Raises:
            ConfigError: no such file, or not a result file.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = tuple(Record(**row) for row in content.pop("rows"))
            return cls(rows=rows, **content)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a result file of fuseopt: {error}") from error

    def to_markdown(self) -> str:
        """Where and when it was measured, and a table, aligned so that it reads as plain text too."""
        on_gpu = self.machine["gpu"] != "none"
        place = self.machine["gpu"] if on_gpu else f"{self.machine['cpu']}, {self.machine['threads']} threads"
        versions = ", ".join(f"{name} {self.versions[name]}" for name in ("torch", "transformers", "python"))
        return f"{place}; {versions}; {self.date}, commit {self.commit or 'unknown'}.\n\n{_table(self.rows)}"


def _table(rows: Sequence[Record]) -> str:
    header = ["work", "variant", "ms", "speed-up", "difference"]
    peaks = any(row.peak_mib is not None for row in rows)
    if peaks:
        header.insert(4, "peak MiB")
    lines = [header]
    shown = None
    for row in rows:
        cells = ["" if row.case == shown else row.case, row.variant, _milliseconds(row), _speed_up(row)]
        if peaks:
            cells.append("" if row.peak_mib is None else f"{row.peak_mib:.0f}")
        lines.append([*cells, row.difference or row.note or ""])
        shown = row.case
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _milliseconds(row: Record) -> str:
    if row.milliseconds is None:
        return "not run"
    return f"{row.milliseconds[1]:.3g}" if row.milliseconds[1] < 100 else f"{row.milliseconds[1]:.0f}"


def _speed_up(row: Record) -> str:
    if row.speed_up is None:
        return ""
    low, median, high = row.speed_up
    return f"{median:.2f}x" + (" (within noise)" if low <= 1 <= high else "")
