"""The bars of a chart of results: which number of a row is drawn, and how it is labelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuseopt.bench.harness.records import Record, Results


@dataclass(frozen=True)
class Bar:
    """One row as a bar: `length` from zero, in the axis' unit, and the label at its end."""

    row: Record
    length: float
    label: str


@dataclass(frozen=True)
class Bars:
    """All bars of a chart; `baseline` is where stock is, or None."""

    axis: str
    bars: tuple[Bar, ...]
    baseline: float | None = None


def bars(results: Results) -> Bars | None:
    """The first of these that any row has: speed-ups, times, batch sizes, differences. None if there is none.

    A chart of speed-ups has the rows that were timed in a case with a speed-up; the case's baseline has length 1.
    """
    sped_up = {row.case for row in results.rows if row.speed_up is not None}
    if sped_up:
        timed = [row for row in results.rows if row.case in sped_up and row.milliseconds is not None]
        unit = results.shown_unit
        drawn = tuple(Bar(row, _speed_up(row, timed), _speed_up_label(row, timed, unit)) for row in timed)
        return Bars("speed-up over the baseline (1x); longer is faster", drawn, 1.0)
    unit = results.shown_unit
    numbers: tuple[tuple[str, Callable[[Record], float | None]], ...] = (
        (f"{unit}; shorter is faster", lambda row: row.milliseconds and _in(unit, row.milliseconds[1])),
        ("largest batch in rows; longer is better", lambda row: row.largest_batch),
        ("difference from the reference; shorter is better", _difference),
    )
    for axis, number in numbers:
        found = [(row, value) for row in results.rows if (value := number(row)) is not None]
        if found:
            return Bars(axis, tuple(Bar(row, value, f"{value:.3g}") for row, value in found))
    return None


def _in(unit: str, milliseconds: float) -> float:
    return milliseconds * (1000 if unit == "us" else 1)


def _speed_up(row: Record, timed: list[Record]) -> float:
    if row.speed_up is not None:
        return row.speed_up[1]
    # Rows without a speed-up are what the others are compared with, the fastest of them, or other controls.
    assert row.milliseconds is not None
    controls = (other.milliseconds for other in timed if other.case == row.case and other.speed_up is None)
    return min(times[1] for times in controls if times is not None) / row.milliseconds[1]


def _speed_up_label(row: Record, timed: list[Record], unit: str) -> str:
    assert row.milliseconds is not None
    return f"{_speed_up(row, timed):.2f}x, {_in(unit, row.milliseconds[1]):.4g} {unit}"


def _difference(row: Record) -> float | None:
    try:
        return float(row.difference or "")
    except ValueError:
        return None
