"""The Python blocks of README and docs run, in order; docs/your-own-kernels.md has a test of its own."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt.cli import _parser
from tests import tiny

ROOT = Path(fuseopt.__file__).parents[1]
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/quick-start.md",
    "docs/choosing-a-config.md",
    "docs/config.md",
    "docs/generation.md",
    "docs/low-bit.md",
    "docs/numerics.md",
)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    model = tiny.gpt2()
    names = {"model": model, "config": "inference", "inputs": {"input_ids": torch.arange(8)[None]}}
    for number, block in enumerate(blocks(page), 1):
        tree = ast.parse(block)
        if isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Dict):
            fuseopt.Config.load(ast.literal_eval(block.strip()))
        else:
            exec(compile(tree, f"{page}, block {number}", "exec"), names)
    assert page == "docs/config.md" or blocks(page)


def shell_commands(page: Path) -> list[str]:
    """The `fuseopt` commands of code blocks and of the text, in which a name in capitals stands for a value."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^ {4}fuseopt (.*?)(?: +#.*)?$", text, re.MULTILINE)
    return [command for command in (*blocks, *re.findall(r"`fuseopt (\w[^`]+)`", text)) if " " in command]


def test_commands_of_the_docs_are_taken_by_the_command_line(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    commands = [
        command
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md")
        for command in shell_commands(page)
        if "..." not in command and "bench BENCHMARK" not in command
    ]
    refused = []
    for command in commands:
        try:
            _parser().parse_args(shlex.split(command))
        except SystemExit:
            refused.append((command, capsys.readouterr().err))
    assert not refused
    assert len(commands) > 50


def test_the_wrong_key_of_the_guide_is_an_error_with_the_right_one(capsys):
    (block,) = (block for block in blocks("docs/choosing-a-config.md") if "except" in block)
    exec(block, {"fuseopt": fuseopt})
    assert "'custom_cuda_kernels'" in capsys.readouterr().out


def test_quick_start_decodes_in_the_loop_it_describes(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = {}
    for block in blocks("docs/quick-start.md")[:5]:
        exec(block, names)
    assert "generate(): T0 device loop" in capsys.readouterr().out
