import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.cases import cases
from tests.ops.interpreter import UNFIT

# Marks and names of what is interpreted: in quick runs, and of the contract's slow tests those that take no minutes.
QUICK = "interpreter and not slow", ""
REST = "interpreter and slow", "test_contract and not relative_attention and not with_inductor"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process that the test starts")
@pytest.mark.parametrize(("marked", "named"), [QUICK, pytest.param(*REST, marks=pytest.mark.slow)])
def test_interpreted_kernels_in_a_process_of_their_own(marked, named):
    options = ["-q", "-rps", "-m", marked, "-k", named, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, Path(__file__).parent]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr
    unfit = re.search(rf"{UNFIT}.*", result.stdout)
    if unfit:
        pytest.skip(unfit[0])
    passed = set(re.findall(r"^PASSED .*::(test_output_and_gradients_against_float64\[.*\])$", result.stdout, re.M))
    interpreted = [p for p in cases() if p.id.endswith("-triton-cpu") and not p.id.startswith("relative_attention")]
    is_rest = (marked, named) == REST
    wanted = [p.id for p in interpreted if any(mark.name == "slow" for mark in p.marks) == is_rest]
    assert wanted
    missing = [name for name in wanted if not any(test.endswith(f"[{name}-torch.float32]") for test in passed)]
    assert not missing, result.stdout
