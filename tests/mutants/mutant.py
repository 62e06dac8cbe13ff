"""A planted fault, and the outcome of the tests that must catch it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["caught", "survived", "stale", "error"]
SECONDS = 900


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        what: the fault, in words: what the code does wrong.
        file: of the checkout.
        old: text that the file has exactly once.
        new: the text that replaces it.
        tests: arguments of pytest, at least one of which must fail.
        interpreter: whether Triton's kernels run in the interpreter.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    interpreter: bool = False

    def applied(self, text: str) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: the old text is not there exactly once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file} has the old text {count} times: {self.old!r}")
        return text.replace(self.old, self.new)


def outcome(mutant: Mutant, tree: Path) -> tuple[Outcome, str]:
    """The outcome of the mutant's tests in a copy of the checkout, and the end of their output. The copy is restored.

    "error": pytest found no tests, or was interrupted.
    """
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutant.applied(text), encoding="utf-8")
    except ValueError as error:
        return "stale", str(error)
    try:
        code, output = run_tests(mutant.tests, tree, interpreter=mutant.interpreter)
    finally:
        file.write_text(text, encoding="utf-8")
    if code == 0:
        return "survived", output
    return "caught" if code == 1 or code < 0 else "error", output


def run_tests(tests: Sequence[str], tree: Path, *, interpreter: bool = False) -> tuple[int, str]:
    """pytest's exit code and the end of its output: below 0 if a signal killed it, 1 after a timeout."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    # Python would take a bytecode file for current if the source changes within a second and keeps its size.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "CI": "1"}
    environment["TRITON_INTERPRET"] = "1" if interpreter else "0"
    marks = ["-m", "not gpu and not multigpu"]
    try:
        done = subprocess.run(
            [*command, *marks, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return 1, f"not done after {SECONDS} s"
    return done.returncode, "\n".join(done.stdout.strip().splitlines()[-3:])
