"""shared_memory.cu: what it permits, from two threads at once, and that no other source sets limits."""

import os
import subprocess
from pathlib import Path

import pytest

from fuseopt.build import toolchain

CUDA = toolchain.CSRC / "cuda"
PROGRAM = Path(__file__).with_name("shared_memory.cpp")


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        include = toolchain.toolkit_root(toolchain.find_nvcc()) / "include"
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    program = tmp_path_factory.mktemp("planner") / "planner"
    command = ["g++", "-std=c++17", "-O1", "-pthread", f"-I{toolchain.CSRC}", f"-isystem{include}", str(PROGRAM), "-o"]
    subprocess.run([*command, str(program)], check=True)
    return program


def facts(planner: Path, **environment: str) -> list[str]:
    done = subprocess.run([planner], env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_permissions_only_grow_and_stop_at_the_devices_limit(planner: Path) -> None:
    assert facts(planner) == [
        "limits 232448 233472",
        "limits of the second device 101376 102400",
        "fits 0 1 0",
        "refused 1, set 0",
        "unasked, set 0",
        "of the first kernel 70000, second 0",
        "two threads: refused 0, lowered 0",
        "resident 20 80 20",
    ]


def test_a_lower_limit_can_be_set_for_tests(planner: Path) -> None:
    assert facts(planner, FUSEOPT_SHARED_MEMORY_LIMIT="65536")[:3] == [
        "limits 65536 66560",
        "limits of the second device 65536 66560",
        "fits 0 0 0",
    ]


@pytest.mark.parametrize(
    "asked",
    [
        "cudaFuncAttributeMaxDynamicSharedMemorySize",
        "cudaFuncAttributePreferredSharedMemoryCarveout",
        "cudaDevAttrMaxSharedMemoryPerBlockOptin",
        "cudaDevAttrMaxSharedMemoryPerMultiprocessor",
    ],
)
def test_only_the_planner_asks_the_runtime(asked: str) -> None:
    """Other code that sets a kernel's limit could lower it below what a launch of another thread needs."""
    assert [path.name for path in sorted(CUDA.rglob("*.*")) if asked in path.read_text()] == ["shared_memory.cu"]
