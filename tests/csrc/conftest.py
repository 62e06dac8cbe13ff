import shutil

import pytest
import torch

import fuseopt.ops  # noqa: F401 -- defines the schemas
from fuseopt.build import loader


@pytest.fixture(scope="session")
def cpu_ops():
    """`torch.ops.fuseopt` with the CPU library loaded."""
    state = loader.load("cpu")
    if state.status != "loaded" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip(state.reason)
    assert state.status == "loaded", state.reason
    return torch.ops.fuseopt
