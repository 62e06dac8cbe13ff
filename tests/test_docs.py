"""README and docs say what is so: tables come from result files, configs are valid, links lead somewhere."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from fuseopt.config import (
    CUSTOM_KERNELS,
    KERNEL_BACKENDS,
    PRESETS,
    TRITON_KERNELS,
    Config,
    GenerationOptions,
    KernelFusion,
)

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "results" / "README.md"]


def test_tables_are_those_of_the_result_files():
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme_tables.py"))
    for page in script["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert "<!-- results: benchmarks/results/" in text
        assert script["filled"](text) == text, "run: python benchmarks/readme_tables.py"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_config_page_covers_the_config():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    fields = (*KernelFusion.__dataclass_fields__, *GenerationOptions.__dataclass_fields__)
    for name in (*fields, *CUSTOM_KERNELS, *TRITON_KERNELS, *PRESETS, *KERNEL_BACKENDS):
        assert f"`{name}`" in page, name
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    Config.load(json.loads(example))


def test_the_readme_covers_keys_and_presets():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (*KernelFusion.__dataclass_fields__, *CUSTOM_KERNELS, *PRESETS):
        assert f"`{name}`" in page, name
