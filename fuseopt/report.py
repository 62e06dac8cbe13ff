"""The Report that stays on a model after a plan is applied, and the JSON of plans and reports."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from fuseopt.config import Config
from fuseopt.measurements import Measurements
from fuseopt.tables import Row, Tabled

NOTHING = "nothing replaced"


@dataclass(frozen=True)
class Report(Tabled):
    """What was done to a model: `print(report)`, `to_dict()`, `to_json()`, `to_html()`.

    Plain data; copied and pickled with the model. `since` has lines about events after `initialize`, such as calls
    served by another backend than planned. `measured` is what `initialize(model, "auto")` measured; else None.
    `generate_calls` has a dict for each of the last calls of `generate()`: the "tier" ("T0", "T1" or "T2"), the
    "reason" why not a faster one, how "steps" ran ("graph", "recorded" or "eager"), a "note", and the size of its
    "cache"; empty where there is none.
    """

    model: str
    rows: tuple[Row, ...] = ()
    kept: Mapping[str, int] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()
    config: Config | None = None
    since: tuple[str, ...] = ()
    generate_calls: tuple[Mapping[str, str], ...] = ()
    summary: str = NOTHING
    measured: Measurements | None = None
    verbose: bool = field(default=False, compare=False)

    @property
    def heading(self) -> str:
        return f"report on {self.model}"

    @property
    def replaced(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.replaced)

    @property
    def skipped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.replaced)

    def to_dict(self) -> dict[str, Any]:
        content = to_json_types(self.model, self, self.config)
        measured = None if self.measured is None else self.measured.to_dict()
        calls = list(map(dict, self.generate_calls))
        return {**content, "since": list(self.since), "generate_calls": calls, "measured": measured}


@runtime_checkable
class Reporting(Protocol):
    """A replacement that adds lines to the report each time it is asked for."""

    def report_lines(self) -> tuple[str, ...]: ...


@runtime_checkable
class Decoding(Protocol):
    """A replacement of `generate` that keeps records of its last calls.

    It may also keep their prompts, and Parameters in host memory.
    """

    calls: MutableSequence[Any]

    def forget_prompts(self) -> None: ...

    def fetch_parameters(self) -> None: ...

    def call_records(self) -> tuple[Mapping[str, str], ...]: ...


@runtime_checkable
class LateStrict(Protocol):
    """A replacement that may fail in a later call. If `strict`, that call raises; else it falls back to stock code."""

    strict: bool


def to_json_types(model: str, tabled: Tabled, config: Config | None) -> dict[str, Any]:
    """The content of a Plan or Report as JSON types."""
    return {
        "model": model,
        "summary": tabled.summary,
        "config": config.to_dict() if config else None,
        "preset": config.preset if config else None,
        "replaced": [row.to_dict() for row in tabled.rows if row.replaced],
        "skipped": [row.to_dict() for row in tabled.rows if not row.replaced],
        "kept": dict(tabled.kept),
        "unmet": list(tabled.unmet),
    }
