"""Tabled: how plans and reports are printed, as text of at most 120 columns and as HTML."""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fuseopt.errors import printable

if TYPE_CHECKING:
    from fuseopt.measurements import Measurements

WIDTH = 120
_HEADER = ("module", "count", "change", "strategy")
_GAP = "  "


@dataclass(frozen=True)
class Row:
    """One object of the model that was considered for replacement by `target`; `replaced` says whether it was.

    `op`, `wanted` and `refused` are as in `fuseopt.plan.Replacement`.
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
    refused: str | None = None

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


class Tabled:
    """What a Plan and a Report print: a summary line and what changes; all candidates with reasons if
    `verbose`, or if nothing changes.

    Attributes:
        heading: what this is, and of which model.
        summary: what is done, in a few words.
        kept: class name -> number of modules without children that stay as they are.
        unmet: messages about what was asked for by name and is not done.
        since: lines about events after `initialize`.
        expected: lines about the gain that was measured on this machine.
        measured: what `initialize(model, "auto")` measured, if it was called.
    """

    since: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    measured: Measurements | None = None

    if TYPE_CHECKING:

        @property
        def heading(self) -> str: ...
        @property
        def summary(self) -> str: ...
        @property
        def rows(self) -> tuple[Row, ...]: ...
        @property
        def kept(self) -> Mapping[str, int]: ...
        @property
        def unmet(self) -> tuple[str, ...]: ...
        @property
        def verbose(self) -> bool: ...

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        replaced, skipped = self._split()
        verbose = self.verbose or not replaced
        rows = [*replaced, *skipped] if verbose else replaced
        lines = [*_wrapped(self.heading, ""), *_wrapped(self.summary, _GAP)]
        for line in self.expected:
            lines += _wrapped(line, _GAP)
        lines += _table([_cells(row) for row in rows], [row.reason for row in rows] if verbose else None)
        if verbose and self.kept:
            lines += _wrapped(self._kept(), _GAP)
        for note in self._notes():
            lines += _wrapped(note, _GAP)
        if skipped and not verbose:
            lines.append(f"{_GAP}{_count(skipped)} not replaced; verbose=True, or -v, says why")
        if self.measured is not None:
            lines += (_GAP + line for line in self.measured.lines())
        return "\n".join(lines)

    def to_html(self) -> str:
        """The summary and a table of what changes; the other candidates and all reasons fold out."""
        replaced, skipped = self._split()
        parts = [f"<p><b>{_escaped(self.heading)}</b>: {_escaped(self.summary)}</p>"]
        parts += [_html_table(_HEADER, map(_cells, replaced))] if replaced else []
        parts += [f"<p>{_escaped(note)}</p>" for note in (*self.expected, *self._notes())]
        if replaced or skipped:
            summary = f"all reasons; {_count(skipped)} not replaced" if skipped else "all reasons"
            reasons = ((*_cells(row), row.reason) for row in (*replaced, *skipped))
            kept = f"<p>{_escaped(self._kept())}</p>" if self.kept else ""
            parts.append(
                f"<details><summary>{summary}</summary>{_html_table((*_HEADER, 'reason'), reasons)}{kept}</details>"
            )
        if self.measured is not None:
            heading, *measured = self.measured.cells()
            parts.append(f"<p>{_escaped(self.measured.heading)}</p>{_html_table(heading, measured)}")
        return f"<div>{''.join(parts)}</div>"

    def _repr_html_(self) -> str:
        return self.to_html()

    def _split(self) -> tuple[list[_Group], list[_Group]]:
        """The rows that are replaced, and the others; each merged with those that differ only in layer numbers."""
        groups: dict[tuple[str, str, str, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((re.sub(r"\d+", "*", row.paths[0]), row.change, row.strategy, row.reason), []).append(row)
        merged = [
            _Group(
                pattern if len(rows) > 1 else rows[0].paths[0], len(rows), change, strategy, reason, rows[0].replaced
            )
            for (pattern, change, strategy, reason), rows in groups.items()
        ]
        return [group for group in merged if group.replaced], [group for group in merged if not group.replaced]

    def _notes(self) -> Iterator[str]:
        if not self.verbose:
            refused = ((row.target, row.backend, row.refused) for row in self.rows if row.replaced and row.refused)
            yield from (f"{target} runs on {backend}: {why}" for target, backend, why in dict.fromkeys(refused))
        yield from (f"not done: {message}" for message in self.unmet)
        yield from self.since

    def _kept(self) -> str:
        return "kept as they are: " + ", ".join(f"{name} x {count}" for name, count in self.kept.items())


@dataclass(frozen=True)
class _Group:
    """Rows of one kind; `module` is their path, with * for numbers if they are several."""

    module: str
    count: int
    change: str
    strategy: str
    reason: str
    replaced: bool


def _cells(group: _Group) -> tuple[str, ...]:
    return group.module, str(group.count), group.change, group.strategy


def _count(groups: Sequence[_Group]) -> str:
    count = sum(group.count for group in groups)
    return f"{count} candidate{'' if count == 1 else 's'}"


def _table(lines: Sequence[tuple[str, ...]], reasons: Sequence[str] | None) -> Iterator[str]:
    """The header and the lines, aligned; each with its reason below it if there are reasons."""
    if not lines:
        return
    table = [_HEADER, *(tuple(map(printable, line)) for line in lines)]
    module, count, change, strategy = (max(map(len, column)) for column in zip(*table, strict=True))
    available = WIDTH - len(_GAP) * len(_HEADER) - count - strategy
    if module + change > available:
        module = min(module, max(available - change, available // 2))
        change = available - module
    for place, line in enumerate(table):
        cells = zip(line, (module, count, change, strategy), strict=True)
        yield _GAP + _GAP.join(clipped(cell, width).ljust(width) for cell, width in cells).rstrip()
        if place and reasons is not None:
            yield from _wrapped(reasons[place - 1], _GAP * 3)


def clipped(text: str, width: int) -> str:
    """`text` cut in the middle if it is longer than `width`."""
    if len(text) <= width:
        return text
    start = (width - 3) // 2
    return f"{text[:start]}...{text[len(text) - (width - 3 - start) :]}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        printable(text), WIDTH, initial_indent=indent, subsequent_indent=indent + _GAP, break_on_hyphens=False
    )


def _html_table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{_escaped(cell)}</th>" for cell in header)
    body = ("<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))
