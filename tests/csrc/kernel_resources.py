"""What nvcc says about the kernels of a `.cu`: no GPU is needed."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuseopt import toolchain

ARCHITECTURES = ("80", "90")


@dataclass(frozen=True)
class KernelResources:
    """One kernel (by its mangled name), compiled for one architecture ("sm_90")."""

    name: str
    architecture: str
    registers: int
    spilled_bytes: int


def kernel_resources(source: Path, architectures: Sequence[str] = ARCHITECTURES) -> list[KernelResources]:
    """Compile the kernels of `source` as the CUDA library does, keep nothing, and return what ptxas reports of each.

    The host's code is checked by nvcc, but not compiled.

    Raises:
        toolchain.ToolchainError: there is no nvcc.
        subprocess.CalledProcessError: the source does not compile; nvcc's words are its `stderr`.
    """
    flags = [*toolchain.NVCC_FLAGS, *toolchain.gencode_flags(architectures), "-Xptxas=-v"]
    command = [toolchain.find_nvcc(), *flags, "-fatbin", str(source), "-o", "/dev/null"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    kernel = re.compile(
        r"Compiling entry function '(?P<name>\S+)' for '(?P<architecture>sm_\w+)'.*?"
        r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return [
        KernelResources(
            match["name"], match["architecture"], int(match["registers"]), int(match["stores"]) + int(match["loads"])
        )
        for match in kernel.finditer(report)
    ]
