import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.cases import cases
from tests.ops.interpreter import UNFIT

TESTS = Path(__file__).parents[1]
# Marks and names of what is interpreted: in quick runs, and of slow tests those that take no minutes.
QUICK = "interpreter and not slow", ""
REST = (
    "interpreter and slow",
    "not with_inductor and (test_arguments or a_compiled_step"
    " or (test_contract or extend or examples) and not relative_attention)",
)


def interpreted_files() -> list[Path]:
    """All in which a test is marked; most tests of ops are so by the parametrisation of their cases."""
    ops = TESTS / "ops"
    marked = [file for file in TESTS.rglob("test_*.py") if "mark.interpreter" in file.read_text(encoding="utf-8")]
    return [ops, *sorted(file for file in marked if ops not in file.parents)]


def passed_files(printed: str) -> set[str]:
    return set(re.findall(r"^PASSED (.*?)::", printed, re.M))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process that the test starts")
@pytest.mark.parametrize(("marked", "named"), [QUICK, pytest.param(*REST, marks=pytest.mark.slow)])
def test_interpreted_kernels_in_a_process_of_their_own(marked, named):
    options = ["-q", "-rps", "-m", marked, "-k", named, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *interpreted_files()]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr
    unfit = re.search(rf"{UNFIT}.*", result.stdout)
    if unfit:
        pytest.skip(unfit[0])
    passed = set(re.findall(r"^PASSED .*::(test_output_and_gradients_against_float64\[.*\])$", result.stdout, re.M))
    interpreted = [p for p in cases() if p.id.endswith("-triton-cpu") and not p.id.startswith("relative_attention")]
    assert {"extend", "examples"} <= {Path(name).parent.name for name in passed_files(result.stdout)}
    is_rest = (marked, named) == REST
    wanted = [p.id for p in interpreted if any(mark.name == "slow" for mark in p.marks) == is_rest]
    assert wanted
    missing = [name for name in wanted if not any(test.endswith(f"[{name}-torch.float32]") for test in passed)]
    assert not missing, result.stdout
