"""The tables in docs/low-bit.md, from the result files of `fuseopt bench low-bit`: models by ways to hold weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from readme_targets import rows_of

from fuseopt.bench.harness.records import STATIC, STOCK, Record
from fuseopt.bench.suites.low_bit import CONFIGS, TORCHAO

_LOOP = {name: f"fuseopt, {'unquantised' if name == 'generation' else name}" for name in CONFIGS}
_COMPILED = {f"{name}, {STATIC}": f"{name}, compiled" for name in TORCHAO}
_SPEED = {STATIC: "static cache, compiled", **_COMPILED, **_LOOP}
_MEMORY = {STOCK: "Parameters", **{name: f"copies in {name}" for name in CONFIGS if name != "generation"}}
_Cell = Callable[[Record, Record], str]
"""The cell of a record; the second is that of stock."""
_TEXT = {**_LOOP, **{name: name for name in TORCHAO}}


def _table(files: Mapping[str, str], cases_with: str, columns: Mapping[str, str], cell: _Cell) -> str:
    """A line for each case that the pattern `cases_with` finds, and a column for each variant.

    Args:
        files: name of a result file -> text after the names of its cases.
    """
    cases: dict[str, dict[str, Record]] = {}
    for file, machine in files.items():
        for row in rows_of(file):
            if re.search(cases_with, row.case):
                name = re.sub("^a token of | generate|, greedy", "", row.case) + machine
                cases.setdefault(name, {})[row.variant.partition(" [")[0]] = row
    lines = [["work", *columns.values()], ["---"] * (1 + len(columns))]
    for name, rows in cases.items():
        cells = (cell(rows[variant], rows[STOCK]) if variant in rows else "" for variant in columns)
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def speed_table() -> str:
    """Microseconds a token and, in brackets, the share of the floor."""

    def cell(row: Record, stock: Record) -> str:
        if row.milliseconds is None:
            return ""
        return f"{row.milliseconds[1] * 1e3:,.0f}" + ("" if row.of_floor is None else f" ({row.of_floor:.2f})")

    return _table({"low-bit-h200": "", "low-bit-cpu": ", CPU"}, "^a token of (?!.*-kjv)", _SPEED, cell)


def memory_table() -> str:
    """MiB of the Parameters and of the quantised copies."""

    def cell(row: Record, stock: Record) -> str:
        own = (row.weights_mib or 0) - (0 if row is stock else stock.weights_mib or 0)
        return f"{own:,.0f}" if row.weights_mib else ""

    return _table({"low-bit-h200": ""}, r" 1 x \(128 \+ 128\)", _MEMORY, cell)


def text_table() -> str:
    """KL divergence from stock's predictions, and how the perplexity changes."""

    def cell(row: Record, stock: Record) -> str:
        if row.kl is None or row.perplexity is None or stock.perplexity is None:
            return ""
        return f"{row.kl:.2g} ({row.perplexity / stock.perplexity - 1:+.2%})"

    return _table({"low-bit-h200": ""}, " predicts ", _TEXT, cell)
