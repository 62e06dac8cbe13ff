"""`python -m tests.mutants`: plants faults, one at a time, in a copy of the checkout, and lists those no test catches.

Exits with 1 if a fault survived, its entry is stale, or its tests fail without it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.mutant import Mutant, outcome, run_tests
from tests.mutants.table import MUTANTS

CHECKOUT = Path(__file__).resolve().parents[2]
_CACHES = shutil.ignore_patterns("__pycache__", ".*_cache")
_OUTPUTS = shutil.ignore_patterns(".git", ".venv", ".hypothesis", "build", "dist")  # beside fuseopt/, not inside


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", metavar="WORD", help="only faults whose description or file has this word")
    chosen = [mutant for mutant in MUTANTS if parser.parse_args().k in f"{mutant.what} {mutant.file}"]
    with tempfile.TemporaryDirectory(prefix="fuseopt-mutants-") as folder:
        tree = Path(folder) / "checkout"
        shutil.copytree(CHECKOUT, tree, ignore=_left_out)
        used = [sys.executable, "-c", "import fuseopt; print(fuseopt.__file__)"]
        found = subprocess.run(used, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(found).is_relative_to(tree):
            print(f"tests in a copy of the checkout would import {found}")
            return 1
        missed = sum(not _is_caught(mutant, tree) for mutant in chosen)
        print(f"{len(chosen)} faults, {len(chosen) - missed} caught")
        return 1 if missed else 0


def _left_out(folder: str, names: list[str]) -> set[str]:
    return _CACHES(folder, names) | (_OUTPUTS(folder, names) if Path(folder) == CHECKOUT else set())


_sound: dict[tuple[tuple[str, ...], bool], bool] = {}


def _is_caught(mutant: Mutant, tree: Path) -> bool:
    start = time.perf_counter()
    tests = mutant.tests, mutant.interpreter
    if tests not in _sound:
        code, output = run_tests(mutant.tests, tree, interpreter=mutant.interpreter)
        _sound[tests] = code == 0
    if _sound[tests]:
        result, output = outcome(mutant, tree)
    else:
        result, output = "error", "its tests fail without the fault, or there are none"
    print(f"{result:<9}{time.perf_counter() - start:4.0f} s  {mutant.file}: {mutant.what}", flush=True)
    if result != "caught":
        print("\n".join(f"    {line}" for line in output.splitlines()), flush=True)
    return result == "caught"


if __name__ == "__main__":
    sys.exit(main())
