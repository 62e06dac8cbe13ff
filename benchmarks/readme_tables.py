"""Writes the tables of result files into README.md, between the markers that name the files.

python benchmarks/readme_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from fuseopt.bench.records import Results

ROOT = Path(__file__).resolve().parents[1]
SLOT = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def filled(text: str) -> str:
    """`text` with every slot holding the table of its file, or nothing where there is no such file."""

    def fill(slot: re.Match[str]) -> str:
        start, name, end = slot.groups()
        path = ROOT / name
        table = f"\n{Results.load(path).to_markdown()}\n\n" if path.is_file() else ""
        return f"{start}{table}{end}"

    return SLOT.sub(fill, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
