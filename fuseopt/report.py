"""Rows of plans and reports, their table and JSON, and the Report that stays on a model after a plan is applied."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from fuseopt.config import Config
from fuseopt.errors import printable


@dataclass(frozen=True)
class Row:
    """One object of the model that was considered for replacement by `target`; `replaced` says whether it was.

    `op` and `wanted` are as in `fuseopt.plan.Replacement`.
    """

    paths: tuple[str, ...]
    source: str
    target: str
    backend: str | None
    strategy: str
    reason: str
    replaced: bool
    op: str | None = None
    wanted: str = "auto"

    @property
    def change(self) -> str:
        if not self.replaced:
            return f"{self.source} -/-> {self.target}"
        backend = f"[{self.backend}]" if self.backend else ""
        return f"{self.source} -> {self.target}{backend}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "paths": list(self.paths),
            "source": self.source,
            "target": self.target,
            "backend": self.backend,
            "strategy": self.strategy,
            "reason": self.reason,
            "replaced": self.replaced,
        }


@dataclass(frozen=True)
class Report:
    """What was done to a model: `print(report)`, `to_dict()`, `to_json()`. Plain data; copied and pickled with it.

    `since` has lines about events after `initialize`, such as calls served by another backend than planned.
    `generate_calls` has a dict for each of the last calls of `generate()`: the "tier" ("T0", "T1" or "T2"), the
    "reason" why not a faster one, whether "steps" ran in a "graph" or "eager", and a "note"; empty where there is none.
    """

    model: str
    rows: tuple[Row, ...] = ()
    kept: Mapping[str, int] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()
    config: Config | None = None
    since: tuple[str, ...] = ()
    generate_calls: tuple[Mapping[str, str], ...] = ()

    @property
    def replaced(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.replaced)

    @property
    def skipped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.replaced)

    def to_dict(self) -> dict[str, Any]:
        content = rows_to_json(self.model, self.rows, self.kept, self.unmet, self.config)
        return {**content, "since": list(self.since), "generate_calls": list(map(dict, self.generate_calls))}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        table = render(f"report on {self.model}", self.rows, self.kept, self.unmet)
        return "\n".join((table, *(f"  {line}" for line in self.since)))


@runtime_checkable
class Reporting(Protocol):
    """A replacement that adds lines to the report each time it is asked for."""

    def report_lines(self) -> tuple[str, ...]: ...


@runtime_checkable
class Decoding(Protocol):
    """A replacement of `generate` that keeps a record of each of its last calls."""

    def call_records(self) -> tuple[Mapping[str, str], ...]: ...


@runtime_checkable
class LateStrict(Protocol):
    """A replacement that may fail in a later call. If `strict`, that call raises; else it falls back to stock code."""

    strict: bool


def rows_to_json(
    model: str, rows: Sequence[Row], kept: Mapping[str, int], unmet: Sequence[str], config: Config | None
) -> dict[str, Any]:
    """The content of a Plan or Report as JSON types."""
    return {
        "model": model,
        "config": config.to_dict() if config else None,
        "preset": config.preset if config else None,
        "replaced": [row.to_dict() for row in rows if row.replaced],
        "skipped": [row.to_dict() for row in rows if not row.replaced],
        "kept": dict(kept),
        "unmet": list(unmet),
    }


def render(title: str, rows: Sequence[Row], kept: Mapping[str, int], unmet: Sequence[str]) -> str:
    """An aligned table. Rows that differ only in layer numbers are merged into one row with a count."""
    header = ("module", "count", "change", "strategy", "reason")
    table = [header, *(tuple(map(printable, line)) for line in _grouped(rows))]
    widths = [max(len(line[column]) for line in table) for column in range(len(header) - 1)]
    lines = [printable(title)]
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        lines.append("  " + "  ".join((*cells, line[-1])).rstrip())
    if not rows:
        lines[1:] = ["  nothing replaced"]
    if kept:
        lines.append("  kept as they are: " + ", ".join(f"{printable(name)} x {count}" for name, count in kept.items()))
    lines += [f"  not done: {printable(message)}" for message in unmet]
    return "\n".join(lines)


def _grouped(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        pattern = re.sub(r"\d+", "*", row.paths[0])
        groups.setdefault((pattern, row.change, row.strategy, row.reason), []).append(row)
    return [
        (pattern if len(group) > 1 else group[0].paths[0], str(len(group)), change, strategy, reason)
        for (pattern, change, strategy, reason), group in groups.items()
    ]
