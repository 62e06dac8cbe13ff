"""What nvcc says about the kernels of a `.cu`: no GPU is needed."""

import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fuseopt.build import toolchain


@dataclass(frozen=True)
class KernelResources:
    """One kernel (by its mangled name), compiled for one architecture ("sm_90")."""

    name: str
    architecture: str
    registers: int
    spilled_bytes: int


def kernel_resources(source: Path, architectures: Sequence[str], cache: Path | None = None) -> list[KernelResources]:
    """Compile the kernels of `source` as the CUDA library does, keep nothing, and return what ptxas reports of each.

    The host's code is checked by nvcc, but not compiled.

    Args:
        cache: a folder to keep the report in, or to take it from where source, headers, nvcc and flags are the same.

    Raises:
        toolchain.ToolchainError: there is no nvcc.
        subprocess.CalledProcessError: the source does not compile; nvcc's words are its `stderr`.
    """
    flags = [*toolchain.NVCC_FLAGS, *toolchain.gencode_flags(architectures), "-Xptxas=-v"]
    nvcc = toolchain.find_nvcc()
    command = [nvcc, *flags, *toolchain.include_flags(), "-fatbin", str(source), "-o", "/dev/null"]
    if cache is None:
        return _resources(command)
    file = cache / f"{source.name}-{'-'.join(architectures)}.json"
    key = _key(source, _version(nvcc), *flags)
    found = _read(file, key)
    if found is None:
        found = _resources(command)
        _write(file, key, found)
    return found


def _resources(command: Sequence[str]) -> list[KernelResources]:
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


@functools.cache
def _version(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout


def _key(source: Path, *facts: str) -> str:
    digest = hashlib.sha256("\0".join(facts).encode())
    for path in sorted(toolchain.with_headers(source)):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _read(file: Path, key: str) -> list[KernelResources] | None:
    try:
        content = json.loads(file.read_text())
        return [KernelResources(**kernel) for kernel in content["kernels"]] if content["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(file: Path, key: str, kernels: Sequence[KernelResources]) -> None:
    """Writes the file atomically, as other workers may read or write it at the same time."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
        json.dump({"key": key, "kernels": [asdict(kernel) for kernel in kernels]}, part)
    os.replace(part.name, file)
