"""examples/README.md lists every example, and examples keep to what it says of them."""

from __future__ import annotations

import ast
import re

import pytest

import fuseopt
from tests.examples.scripts import EXAMPLES

TOOLS = {"make_notebook.py", "train_tiny.py"}
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name not in TOOLS)
FILES = sorted(path for path in EXAMPLES.rglob("*.py") if path.name not in TOOLS)  # those of folders too
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_readme_has_a_row_for_each_script_and_config():
    linked = set(re.findall(r"^\| \[.*?\]\((\S+?)\)", README, re.MULTILINE))
    configs = {f"configs/{path.name}" for path in EXAMPLES.glob("configs/*")}
    kernels = {f"{path.parent.name}/README.md" for path in EXAMPLES.glob("*/main.py")}
    assert linked == {path.name for path in SCRIPTS} | configs | kernels
    for script in SCRIPTS:
        (command,) = re.findall(rf"`((?:python|torchrun)[^`]* examples/{script.name})`", README)
        assert command in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(EXAMPLES)) for file in FILES])
def test_file_has_at_most_150_lines(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_script_stands_alone_and_uses_the_public_api(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "fuseopt" in imported
    assert not any(name.startswith(("fuseopt.", "examples")) or name.split(".")[0] in _names() for name in imported)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fuseopt"
    }
    assert used <= {*fuseopt.__all__, "__file__"}


def _names() -> set[str]:
    return {path.stem for path in EXAMPLES.glob("*.py")}


PARSERS = [path for path in (*SCRIPTS, *sorted(EXAMPLES.glob("*/main.py"))) if "ArgumentParser" in path.read_text()]


@pytest.mark.parametrize("script", PARSERS, ids=[str(path.relative_to(EXAMPLES)) for path in PARSERS])
def test_every_option_is_explained_and_says_its_default(script):
    calls = [node for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    options = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    assert options
    for option in options:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in option.keywords}
        assert "help" in given, ast.unparse(option)
        assert "default" in given["help"].lower() or "action" in given, ast.unparse(option)
