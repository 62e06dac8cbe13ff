"""The table of planted faults fits the code, and the runner tells a fault that is noticed from one that is not."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant, outcome
from tests.mutants.table import MUTANTS

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_planted_fault_is_one_change_to_the_code_as_it_is(mutant):
    text = (CHECKOUT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(text)
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert mutant.tests
    for test in (argument for argument in mutant.tests if argument.startswith("tests/")):
        path, *names = test.split("::")
        assert (CHECKOUT / path).exists(), test
        for name in names:
            written = (CHECKOUT / path).read_text(encoding="utf-8")
            assert re.search(rf"\b(def|class) {re.escape(name.partition('[')[0])}\b", written), test


def test_each_planted_fault_has_words_of_its_own():
    assert not [what for what, count in Counter(mutant.what for mutant in MUTANTS).items() if count > 1]


def test_a_fault_is_caught_survives_or_is_stale(tmp_path):
    code = tmp_path / "doubling.py"
    code.write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_doubling.py").write_text(
        "import doubling\n\n\ndef test_double():\n    assert doubling.double(2) == 4\n"
    )
    before = code.read_text()

    def outcome_of(old: str, new: str, tests: str = "test_doubling.py") -> str:
        return outcome(Mutant("", code.name, old, new, (tests,)), tmp_path)[0]

    assert outcome_of("2 * x", "3 * x") == "caught"
    assert outcome_of("2 * x", "x**2") == "survived"  # of the one number that is tried
    assert outcome_of("4 * x", "3 * x") == "stale"
    assert outcome_of("2 * x", "3 * x", "test_nothing.py") == "error"
    assert code.read_text() == before
