"""Result files as one web page that needs nothing else: tables, and bars drawn by CSS."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from fuseopt.bench.harness.bars import Bars, bars
from fuseopt.bench.harness.records import Results, shortened
from fuseopt.errors import ConfigError

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.85rem; }
.wide { overflow-x: auto; margin-top: 1rem; }
th, td { padding: 0.25rem 0.6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2), td:last-child, th:last-child { text-align: left; }
td:last-child { white-space: normal; min-width: 12rem; }
.chart { display: grid; grid-template-columns: minmax(8rem, 16rem) 1fr; gap: 0.15rem 0.6rem; font-size: 0.85rem; }
.chart div { overflow-wrap: anywhere; }
.case { grid-column: 1 / -1; font-weight: 600; margin-top: 0.5rem; }
.bar { position: relative; margin-right: 9rem; }
.bar i { display: inline-block; height: 0.8em; background: #3b7dd8; vertical-align: middle; }
.bar.baseline i { background: #999; }
.bar span { position: absolute; padding-left: 0.4rem; white-space: nowrap; }
"""


def save(shown: Sequence[Results], path: str | os.PathLike[str]) -> None:
    """Writes the results, one after the other, as an HTML page.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).write_text(page(shown), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def page(shown: Sequence[Results]) -> str:
    """The whole HTML document."""
    title = "fuseopt: " + ", ".join(dict.fromkeys(results.benchmark for results in shown))
    sections = "\n".join(map(_section, shown))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{sections}\n</body>\n</html>\n"
    )


def _section(results: Results) -> str:
    drawn = bars(results)
    cases = "".join(f"<li>{html.escape(line)}</li>" for line in results.slower_auto)
    return (
        f"<h2>{html.escape(results.benchmark)}</h2>\n<p>{html.escape(results.origin)}</p>\n"
        + ("" if drawn is None else _chart(drawn))
        + _table(results)
        + (f"\n<p>Cases where <code>backend: auto</code> is not the fastest:</p>\n<ul>{cases}</ul>" if cases else "")
    )


def _chart(drawn: Bars) -> str:
    longest = max(bar.length for bar in drawn.bars) or 1.0
    parts, case = [], None
    for bar in drawn.bars:
        if bar.row.case != case:
            case = bar.row.case
            parts.append(f'<div class="case">{html.escape(case)}</div>')
        kind = "bar baseline" if drawn.baseline is not None and bar.row.speed_up is None else "bar"
        parts.append(
            f'<div>{html.escape(shortened(bar.row.variant))}</div><div class="{kind}">'
            f'<i style="width:{100 * bar.length / longest:.2f}%"></i><span>{html.escape(bar.label)}</span></div>'
        )
    listed = "\n".join(parts)
    return f'<p>{html.escape(drawn.axis)}</p>\n<div class="chart">\n{listed}\n</div>\n'


def _table(results: Results) -> str:
    columns = results.columns()
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    rows = (
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        for cells in zip(*columns.values(), strict=True)
    )
    listed = "\n".join(rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{listed}\n</tbody></table></div>'
