"""Any sources of a library compile as one file, in any order: how they are put together depends on the processors."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fuseopt.build import compilation, toolchain

RECIPES: dict[str, Callable[[], toolchain.Recipe]] = {
    "cpu": toolchain.cpu_recipe,
    "cuda": lambda: toolchain.cuda_recipe(["90"]),
}
SYNTAX_ONLY = {
    ".cpp": ["-fsyntax-only"],
    ".cu": ["-fdevice-syntax-only", "-Xcompiler=-fsyntax-only", "-c", "-o", "/dev/null"],
}


@pytest.mark.parametrize(
    ("kind", "suffix"), [("cpu", ".cpp"), ("cuda", ".cpp"), pytest.param("cuda", ".cu", marks=pytest.mark.slow)]
)
def test_all_sources_compile_as_one_file(tmp_path: Path, kind: str, suffix: str) -> None:
    """Parses the sources in reverse order; the builds of other tests have them in order."""
    try:
        recipe = RECIPES[kind]()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    sources = [source for source in recipe.sources if source.suffix == suffix]
    assert len(sources) > 1
    file = compilation.as_one_file(sources[::-1], tmp_path)
    command = [*recipe.compile_commands[suffix], *SYNTAX_ONLY[suffix], str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
