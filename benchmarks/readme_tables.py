"""Writes tables and the README's picture into README.md and the pages of docs/, between markers.

A marker `results: FILE` stands for the table of a result file; with "auto" after the file's name, for the rows that
`backend: auto` takes. A marker `generated: NAME` stands for one of `GENERATED`.

python benchmarks/readme_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

import readme_families
import readme_keys
import readme_low_bit
import readme_picture
import readme_targets

from fuseopt.bench.harness.records import Results

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{page}.md" for page in ("families", "keys", "low-bit", "performance", "training")),
    *sorted((ROOT / "docs" / "results").glob("[a-z]*.md")),
)
SLOT = re.compile(r"(<!-- results: (\S+?)( auto)? -->\n).*?(<!-- end of results -->)", re.DOTALL)
GENERATED_SLOT = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
GENERATED = {
    "summary": readme_picture.table,
    "families": readme_families.short_table,
    "targets": readme_targets.table,
    "low-bit-speed": readme_low_bit.speed_table,
    "low-bit-memory": readme_low_bit.memory_table,
    "low-bit-texts": readme_low_bit.text_table,
    "decoder-families": readme_families.decoder_table,
    "other-families": readme_families.full_list,
    "kernel_fusion": readme_keys.kernel_fusion_table,
    "kernels": readme_keys.kernel_table,
    "memory_efficient_fusion": lambda: readme_keys.option_table("memory_efficient_fusion"),
    "generation": lambda: readme_keys.option_table("generation"),
}


def filled(text: str) -> str:
    """`text` with its table in every slot; a slot whose result file is missing becomes empty."""

    def fill(slot: re.Match[str]) -> str:
        start, name, auto, end = slot.groups()
        path = ROOT / name
        if not path.is_file():
            return f"{start}{end}"
        results = Results.load(path)
        return f"{start}\n{(results.of_auto() if auto else results).to_markdown()}\n\n{end}"

    def generate(slot: re.Match[str]) -> str:
        start, name, end = slot.groups()
        return f"{start}\n{GENERATED[name]()}\n\n{end}"

    return GENERATED_SLOT.sub(generate, SLOT.sub(fill, text))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    readme_picture.PICTURE.write_text(readme_picture.picture(), encoding="utf-8")
