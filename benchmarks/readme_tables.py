"""Writes the tables of result files into README.md and pages of docs/, between the markers that name the files.

A marker that says "auto" after the file's name stands for the rows of what `backend: auto` takes.

python benchmarks/readme_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from fuseopt.bench.harness.records import Results

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in ("performance", "generation", "training")))
SLOT = re.compile(r"(<!-- results: (\S+?)( auto)? -->\n).*?(<!-- end of results -->)", re.DOTALL)


def filled(text: str) -> str:
    """`text` with every slot holding the table of its file, or nothing where there is no such file."""

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
