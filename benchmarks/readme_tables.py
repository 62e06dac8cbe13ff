"""Writes the tables of result files into README.md and the pages of docs/, between markers that name the files.

A marker with "auto" after the file's name selects the rows that `backend: auto` takes.

python benchmarks/readme_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from fuseopt.bench.harness.records import Results

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{page}.md" for page in ("performance", "training")),
    *sorted((ROOT / "docs" / "results").glob("[a-z]*.md")),
)
SLOT = re.compile(r"(<!-- results: (\S+?)( auto)? -->\n).*?(<!-- end of results -->)", re.DOTALL)


def filled(text: str) -> str:
    """`text` with the table of its file in every slot; a slot whose file is missing becomes empty."""

    def fill(slot: re.Match[str]) -> str:
        start, name, auto, end = slot.groups()
        path = ROOT / name
        if not path.is_file():
            return f"{start}{end}"
        results = Results.load(path)
        return f"{start}\n{(results.of_auto() if auto else results).to_markdown()}\n\n{end}"

    return SLOT.sub(fill, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
