"""The README's table and picture: generate() and training beside stock and torch.compile, from result files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from fuseopt.bench.harness.records import Record, Results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "speed-up.svg"


@dataclass(frozen=True)
class Work:
    """One group of bars.

    Attributes:
        title: the model and what it does.
        file: result file, which has rows named `stock`, `compiled` and `fused` of one case.
        page: page of docs/results with the whole table.
    """

    title: str
    file: str
    page: str
    compiled: str
    fused: str

    def rows(self) -> tuple[Record, Record, Record]:
        """Rows of transformers, torch.compile and fuseopt.

        Raises:
            KeyError: the file has no such row.
        """
        rows = {row.variant.partition(" [")[0]: row for row in Results.load(RESULTS / self.file).rows}
        return rows["stock"], rows[self.compiled], rows[self.fused]


_COMPILED = "static cache and torch.compile"
WORKS = {
    "generate(), one token, one row": (
        Work("GPT-2", "generate-compiled-h200.json", "generate.md", _COMPILED, "generation and kernels"),
        Work("T5-base", "generate-compiled-t5-h200.json", "generate.md", _COMPILED, "generation and kernels"),
    ),
    "one training step": (
        Work("GPT-2, 64 x 1024 tokens", "train-h200.json", "training.md", "torch.compile", "training"),
        Work("T5-base, 16 x (512 + 512)", "train-t5-h200.json", "training.md", "torch.compile", "training"),
    ),
}


def table() -> str:
    """Times of each work, and the speed-ups over stock."""
    rows, facts = [], []
    for kind, works in WORKS.items():
        for work in works:
            results = Results.load(RESULTS / work.file)
            stock, compiled, fused = work.rows()
            link = f"[{work.title}: {kind}](docs/results/{work.page})"
            rows.append(f"| {link} | {_ms(stock)} | {_times(compiled)} | {_times(fused)} |")
            facts.append(f"{results.machine['gpu']}, torch {results.versions['torch']}, {results.date}")
    head = "| work | transformers | torch.compile | fuseopt |\n|---|---|---|---|"
    return "\n".join((head, *rows)) + f"\n\nMeasured on: {'; '.join(dict.fromkeys(facts))}."


def _ms(row: Record) -> str:
    value = row.milliseconds[1]
    return f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"


def _times(row: Record) -> str:
    return f"{_ms(row)}, {row.speed_up[1]:.1f}x"


_BAR, _GAP, _LEFT, _WIDTH, _SCALE = 18, 4, 190, 720, 400
_COLORS = {"transformers": "#9aa5b1", "torch.compile": "#f0a830", "fuseopt": "#2f6fde"}


def picture() -> str:
    """SVG with one panel a kind of work: bars from zero, the speed-up over transformers, the time beside each."""
    parts: list[str] = []
    y = 34
    for x, (name, color) in zip((_LEFT, 310, 440), _COLORS.items(), strict=True):
        parts += [f'<rect x="{x}" y="10" width="12" height="12" fill="{color}"/>', _text(x + 18, 20, name)]
    for kind, works in WORKS.items():
        y += 20
        parts.append(_text(12, y, f"{kind}: speed-up over transformers", weight="bold"))
        y += 12
        groups = [work.rows() for work in works]
        longest = max(_ratio(rows, row) for rows in groups for row in rows)
        for work, rows in zip(works, groups, strict=True):
            parts.append(_text(12, y + 1.5 * _BAR + _GAP + 4, work.title))
            parts += _bars(rows, y, longest)
            y += 3 * (_BAR + _GAP) + 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}"'
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#1f2933"'
    body = "\n".join(parts)
    return f'{head} {style}>\n<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>\n{body}\n</svg>\n'


def _bars(rows: Sequence[Record], y: float, longest: float) -> list[str]:
    parts = []
    for color, row in zip(_COLORS.values(), rows, strict=True):
        ratio = _ratio(rows, row)
        width = round(_SCALE * ratio / longest, 1)
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_BAR}" fill="{color}"/>')
        parts.append(_text(_LEFT + width + 6, y + _BAR - 4, f"{ratio:.1f}x, {_ms(row)}"))
        y += _BAR + _GAP
    return parts


def _ratio(rows: Sequence[Record], row: Record) -> float:
    return 1.0 if row is rows[0] else row.speed_up[1]


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{round(x, 1)}" y="{round(y, 1)}" font-weight="{weight}">{escape(text)}</text>'
