"""README, docs and folder READMEs: tables match result files, examples are valid, links, paths and names exist."""

from __future__ import annotations

import functools
import importlib
import json
import re
import runpy
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from fuseopt.config import KERNEL_BACKENDS, Config, GenerationOptions, KernelFusion, MemoryEfficientOptions
from fuseopt.kernel_table import PRESETS, kernels
from fuseopt.models import COMMON, GPT2, T5

ROOT = Path(__file__).parents[1]
RESULT_PAGES = ROOT / "docs" / "results"
LAB_NOTES = ROOT / "docs" / "lab-notes"
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(
            page
            for folder in ("docs", "fuseopt", "benchmarks", "examples", "tests")
            for page in (ROOT / folder).rglob("*.md")
        ),
    }
)
CURRENT = [page for page in PAGES if page.parent not in (RESULT_PAGES, LAB_NOTES)]
"""Pages that describe the code as it is now; the others quote names of the commit they were measured at."""

_SOURCES = ("py", "md", "cu", "cuh", "cpp", "h", "json", "toml", "txt")
_PATH = re.compile(rf"`([\w./*<>{{}}-]+\.(?:{'|'.join(_SOURCES)})|[\w.-]+(?:/[\w.-]+)*/)`")
_DOTTED = re.compile(r"`((?:fuseopt|ops|torch)(?:\.\w+)+)(?:\([^`]*)?`")


def _prose(page: Path) -> str:
    """The page without fenced parts and result tables."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- results: .*?<!-- end of results -->", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _missing_links(page: Path) -> list[str]:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            missing.append(target)
    return missing


@functools.cache
def _endings() -> frozenset[str]:
    """Every ending, in whole components, of the path of every file and folder: "a/b.py" and "b.py" for "a/b.py"."""
    folders = ("fuseopt", "tests", "docs", "benchmarks", "examples")
    paths = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    parts = [path.relative_to(ROOT).parts for path in paths if "__pycache__" not in path.parts]
    return frozenset("/".join(path[start:]) for path in parts for start in range(len(path)))


def _missing_paths(page: Path) -> list[str]:
    """Paths in backticks that end no path of the checkout.

    `x` as a name stands for a file yet to be written; what is written into build/ is not in the checkout.
    """
    elsewhere = r"[*<>{}]|(^|[/_])x([/_.]|$)|^my|^build/|YYYY"
    paths = [path for path in _PATH.findall(_prose(page)) if not re.search(elsewhere, path)]
    return [path for path in paths if path.rstrip("/") not in _endings()]


def _resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one that can be imported."""
    first, *rest = (f"fuseopt.{name}" if name.startswith("ops.") else name).split(".")
    value = importlib.import_module(first)
    for position, part in enumerate(rest):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join((first, *rest[: position + 1])))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def _missing_names(page: Path) -> list[str]:
    return [name for name in _DOTTED.findall(_prose(page)) if not _resolves(name)]


def _faults(pages: list[Path], find: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    faults = {str(page.relative_to(ROOT)): find(page) for page in pages}
    return {page: found for page, found in faults.items() if found}


@pytest.fixture
def script(monkeypatch):
    """The names of benchmarks/readme_tables.py."""
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    return runpy.run_path(str(folder / "readme_tables.py"))


def test_tables_are_those_of_the_result_files_and_of_the_code(script):
    for page in script["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert re.search("<!-- (results|generated): ", text), page
        assert script["filled"](text) == text, f"{page}: run python benchmarks/readme_tables.py"


def test_the_picture_is_that_of_the_result_files(script):
    picture = script["readme_picture"]
    svg = picture.PICTURE.read_text(encoding="utf-8")
    assert svg == picture.picture(), "run python benchmarks/readme_tables.py"
    assert len(svg) < 150_000
    # Bars are in proportion to the ratios of the medians, from zero.
    bars = [float(width) for width in re.findall(r'<rect x="190" y="[\d.]+" width="([\d.]+)" height="18"', svg)]
    rows = [row for works in picture.WORKS.values() for work in works for row in work.rows()]
    assert len(bars) == len(rows) == 12
    for first in range(0, 12, 3):
        ratios = [rows[first].milliseconds[1] / row.milliseconds[1] for row in rows[first : first + 3]]
        assert [bar / bars[first] for bar in bars[first : first + 3]] == pytest.approx(ratios, rel=0.05)


def test_families_with_a_decode_step_are_those_with_a_decode_loop(script):
    lines = script["GENERATED"]["decoder-families"]().splitlines()
    named = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    steps = [step for policy in (COMMON, GPT2, T5) for step in policy.decode_steps]
    assert named == {model_class.split(".")[2] for model_class in steps} >= {"gpt2", "t5", "llama"}
    (row,) = (line for line in lines if "`llama`" in line)
    assert "RMSNorm, gated feed-forwards" in row and "padded batches" in row and "T5 attention" not in row
    assert not named & {*re.findall(r"`(\w+)`", script["GENERATED"]["other-families"]())}


def test_every_page_of_the_site_is_in_its_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    patterns = re.findall(r"^([\w./*-]+)$", index, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    left_out = {page for page in pages - {"index"} if not any(fnmatch(page, pattern) for pattern in patterns)}
    assert left_out == {page for page in pages if page.startswith("lab-notes/20")}


def test_every_result_file_is_on_a_results_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in RESULT_PAGES.glob("*.md"))
    shown = set(re.findall(r"<!-- results: (\S+)", pages))
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert files == shown


def test_links_lead_somewhere():
    assert _faults(PAGES, _missing_links) == {}


def test_paths_exist():
    assert _faults(CURRENT, _missing_paths) == {}


def test_dotted_names_exist():
    assert _faults(CURRENT, _missing_names) == {}


def test_what_is_wrong_on_a_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A b: c\n[1](page.md) [2](#a-b-c) [3](gone.md) [4](#gone) `config.py` `fuseopt/config.py` `fuseopt/ops/`\n"
        "`ops/x.py` `fuseopt/gone.py` `gone/` `fuseopt.plan` `ops.rms_norm(x)` `fuseopt.gone` `ops.gone`\n"
    )
    assert _missing_links(page) == ["gone.md", "#gone"]
    assert _missing_paths(page) == ["fuseopt/gone.py", "gone/"]
    assert _missing_names(page) == ["fuseopt.gone", "ops.gone"]


def test_lab_notes_are_indexed_and_say_what_they_must():
    index = (LAB_NOTES / "README.md").read_text(encoding="utf-8")
    notes = sorted(LAB_NOTES.glob("20*.md"))
    assert [note.name for note in notes] == sorted(re.findall(r"\((20\S+\.md)\)", index))
    for note in notes:
        text = note.read_text(encoding="utf-8")
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}-[a-z0-9-]+\.md", note.name)
        for part in (f"- Date: {note.name[:10]}", "- Commit:", "- Measured on:", "- Result files:"):
            assert part in text, (note.name, part)
        for part in ("**Hypothesis.**", "**Result.**", "**Conclusion.**"):
            assert part in text, (note.name, part)


def test_the_config_page_covers_the_config():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    fields = (*KernelFusion.__dataclass_fields__, *GenerationOptions.__dataclass_fields__)
    for name in (*fields, *kernels(), *PRESETS, *KERNEL_BACKENDS):
        assert f"`{name}`" in page, name
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    Config.load(json.loads(example))


def test_the_readme_is_short_and_the_page_of_keys_complete():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    fields = (*KernelFusion.__dataclass_fields__, *GenerationOptions.__dataclass_fields__)
    for name in (*fields, *MemoryEfficientOptions.__dataclass_fields__, *kernels(), *PRESETS):
        assert f"`{name}`" in page, name


def test_messages_that_troubleshooting_quotes_are_those_of_the_code():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fuseopt").rglob("*.py"))
    sources = re.sub(r'"\s+f?"', "", sources)  # strings written in several parts
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        text for cell in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) for text in re.findall("`(.+?)`", cell)
    ]
    parts = [part.strip() for text in quoted for part in re.split(r"\.\.\.|: |\(|\)", text)]
    parts = [part for part in parts if " " in part and len(part) > 8]
    assert len(parts) > 15
    assert [part for part in parts if part not in sources] == []


def test_pytest_leaves_out_no_folder_of_tests(pytestconfig):
    folders = {parent for file in (ROOT / "tests").rglob("test_*.py") for parent in file.relative_to(ROOT).parents}
    left_out = pytestconfig.getini("norecursedirs")
    assert "build" in {folder.name for folder in folders}
    assert [folder for folder in folders if any(fnmatch(folder.name, pattern) for pattern in left_out)] == []
