"""The machine, versions and commit that a measurement was made with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

import fuseopt
from fuseopt.build import library_cache, loader, prebuilt, toolchain
from fuseopt.errors import ConfigError

# Environment variables, by prefix, that change what is built and what runs.
_VARIABLES = ("FUSEOPT_", "TRITON_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "CXX", "OMP_NUM_THREADS", "HF_HOME")
_CHECKOUT = Path(fuseopt.__file__).resolve().parents[1]


def machine() -> dict[str, str]:
    """Processor, cores, GPUs, compilers and native libraries; "none" for what cannot be found out."""
    found = {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": _gpu_names(),
        "c++": _first_line(os.environ.get("CXX", "c++"), "--version"),
        "nvcc": _last_line("nvcc", "--version"),
        "native libraries": ", ".join(kind for kind in loader.LIBRARIES if _is_there(kind)),
    }
    return {name: value or "none" for name, value in found.items()}


def needs_gpu(what: str, device: torch.device) -> ConfigError:
    """The error for a benchmark `what` that needs a GPU and was given `device`, with the fix."""
    fix = "pass --device cuda" if torch.cuda.is_available() else "torch sees none here, and `fuseopt env` says more"
    return ConfigError(f"{what}: needs a GPU, not {device}; {fix}")


def versions() -> dict[str, str]:
    """Versions of Python, fuseopt and the packages that it uses; none of these is imported for this."""
    found = {"fuseopt": fuseopt.__version__, "python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = torch.version.cuda or "none"
    for package in ("triton", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def commit() -> str | None:
    """The commit of the checkout that fuseopt runs from, with "-dirty" appended if files differ; None when installed.

    FUSEOPT_COMMIT, if set, is used instead: for a copy of a checkout whose git folder is missing or out of date.
    """
    if "FUSEOPT_COMMIT" in os.environ:
        return os.environ["FUSEOPT_COMMIT"]
    if not (_CHECKOUT / ".git").exists():
        return None
    return _first_line("git", "-C", str(_CHECKOUT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty")


def environment() -> dict[str, dict[str, str]]:
    """What a bug report needs: versions, machine, GPUs, native libraries, and the variables that change them."""
    native_code: dict[str, str] = {kind: _describe(loader.state(kind)) for kind in loader.LIBRARIES}
    shipped = [f"{kind}: {held}" for kind in loader.LIBRARIES if (held := prebuilt.contents(kind)) is not None]
    return {
        "versions": {**versions(), "commit": commit() or "none"},
        "machine": machine(),
        "gpus": _gpus(),
        "native code": {
            **native_code,
            "cache": _cache_folder(),
            "prebuilt": "; ".join(shipped) or "none",
        },
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)},
    }


def _gpus() -> dict[str, str]:
    """Each GPU with compute capability and memory, and the driver."""
    if not torch.cuda.is_available():
        return {"none": "torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"}
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found = {
        str(index): f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        for index, gpu in enumerate(properties)
    }
    driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {**found, "driver": driver or "unknown"}


def _cache_folder() -> str:
    try:
        return str(library_cache.folder())
    except library_cache.CacheError as error:
        return f"none: {error}"


def _is_there(kind: loader.Library) -> bool:
    return loader.state(kind).status in ("available", "loaded")


def _describe(state: loader.LibraryState) -> str:
    words: list[str] = [state.status]
    if state.origin is not None:
        words.append(f"({state.origin})")
    if state.path is not None:
        words.append(str(state.path))
    if state.reason is not None:
        words.append(f": {state.reason}")
    if state.passed_over is not None:
        words.append(f": the prebuilt library is passed over: {state.passed_over}")
    if state.damage is not None:
        words.append(f": the library in the cache is built again: {state.damage}")
    return " ".join(words).replace(" :", ":")


def _cpu_name() -> str | None:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_names() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _first_line(*command: str) -> str | None:
    return next(iter(_lines(*command)), None)


def _last_line(*command: str) -> str | None:
    return next(reversed(_lines(*command)), None)


def _lines(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        return []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=toolchain.QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines()
