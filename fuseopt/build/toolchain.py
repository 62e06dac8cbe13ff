"""Recipes of the native libraries: which compilers, flags, commands and sources make a shared library of `csrc`.

The CPU library is C++ on the LibTorch stable ABI. The CUDA library is `.cu` files without torch, compiled by nvcc, and
thin bindings on the stable ABI, compiled by the C++ compiler. Neither needs Python or a header outside the stable ABI.
The file that calls raw ops from Python needs both, so it is a third library, for one release of torch and of Python.

`fuseopt.build.compilation` runs recipes.
"""

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

CSRC = Path(__file__).parents[1] / "csrc"
_TORCH = Path(torch.__file__).parent
# The oldest supported release. Code may use only what the stable ABI of that release has, whichever headers compile it.
_TORCH_TARGET_VERSION = "0x020b000000000000"
# -Werror=switch: a switch must handle every value of its enum.
_CXX_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-Werror=switch")
# -fno-trapping-math: without masked arithmetic, as in AVX2, a loop with a condition is vectorised only if it may raise
# floating-point flags. Nobody reads those flags, and no result depends on them.
_SIMD_FLAGS = ("-O3", "-fopenmp-simd", "-fno-trapping-math")
# The headers of torch or CUDA cost each compiler run a second or more. So all bindings are compiled as one unit, and
# the other sources as this many units per processor.
_UNITS_A_PROCESSOR = 2
_BINDING_SUFFIX = "_binding.cpp"
QUERY_SECONDS = 60
"""Timeout of a query for a compiler's version, folder or flags; long enough for a cold network file system."""

MANY_KERNELS = ("rms_norm.cu", "rms_norm_of_sum.cu", "softmax.cu")
"""Sources that compile for longer than their size suggests: their kernels have many dtypes and shapes."""


class ToolchainError(Exception):
    """This kind of library cannot be compiled on this machine; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """What one shared library is made from, and by which commands.

    Attributes:
        sources: the files to compile.
        compile_commands: compile command by suffix of the source; `-c SOURCE -o OBJECT` is appended.
        link_command, link_libraries: link command; objects and `-o LIBRARY` go between the two.
        key: hash of sources, headers, flags, compiler versions and torch's minor version. Patch releases of torch
            change neither headers nor ABI. Minor releases may change inline code of headers, so two of them do not
            share a library, although the ABI would allow it. Folder names are not part of the key.
        stub: name of a shared library that this torch lacks but that the result must link with.
    """

    sources: tuple[Path, ...]
    compile_commands: dict[str, tuple[str, ...]]
    link_command: tuple[str, ...]
    link_libraries: tuple[str, ...]
    key: str
    stub: str | None = None

    @functools.cached_property
    def units(self) -> tuple[tuple[Path, ...], ...]:
        """The sources in compile order; those of one tuple are compiled as one file."""

        # Longest first: a long file started last would be compiled alone at the end.
        def order(path: Path) -> tuple[bool, int, str]:
            # Kernels are in headers: a source of 8 lines can include thousands of lines.
            size = sum(file.stat().st_size for file in with_headers(path))
            return path.name not in MANY_KERNELS, -size, path.name

        sources = sorted(self.sources, key=order)
        bindings = tuple(source for source in sources if source.name.endswith(_BINDING_SUFFIX))
        others = [source for source in sources if source not in bindings]
        count = min(len(others), _UNITS_A_PROCESSOR * (os.cpu_count() or 1))
        # Sources are dealt out in turn, so that no unit gets all of the longest.
        units = [tuple(others[first::count]) for first in range(count)]
        # The bindings together take about as long as the longest other unit.
        return (bindings, *units) if bindings else tuple(units)


def cpu_recipe(*, portable: bool = False) -> Recipe:
    """The recipe of the CPU library, for this machine's processor or, if `portable`, for any x86-64-v3 processor.

    Raises:
        ToolchainError: no working C++ compiler.
    """
    cxx = _cxx_compiler()
    target = f"-DTORCH_TARGET_VERSION={_TORCH_TARGET_VERSION}"
    flags = (*_CXX_FLAGS, *_SIMD_FLAGS, target, *_machine_flags(portable))
    return Recipe(
        sources=_sources("cpu"),
        compile_commands={".cpp": (*cxx, *flags, *include_flags(), "-isystem", str(_TORCH / "include"))},
        link_command=(*cxx, "-shared"),
        link_libraries=_torch_libraries("torch_cpu"),
        key=_key("cpu", *flags, _cxx_fingerprint(cxx, flags)),
    )


def cuda_recipe(architectures: Sequence[str], *, ptx: bool = False) -> Recipe:
    """The recipe of the CUDA library.

    Args:
        architectures: compute capabilities to compile for, such as "90".
        ptx: also keep PTX of the last of them.

    Raises:
        ToolchainError: no C++ compiler, no nvcc, or nvcc's major version is not that of torch's CUDA.
    """
    sources = _sources("cuda")
    cxx = _cxx_compiler()
    nvcc = find_nvcc()
    nvcc_version = nvcc_release(nvcc)
    torch_cuda = torch.version.cuda
    if torch_cuda is not None and nvcc_version.split(".")[0] != torch_cuda.split(".")[0]:
        raise ToolchainError(
            f"{nvcc} is CUDA {nvcc_version}, torch was built with CUDA {torch_cuda}: major versions must match "
            f"(CUDA_HOME names another toolkit)"
        )
    root = toolkit_root(nvcc)
    cxx_flags = (*_CXX_FLAGS, "-O2", f"-DTORCH_TARGET_VERSION={_TORCH_TARGET_VERSION}", "-DUSE_CUDA")
    nvcc_flags = (*NVCC_FLAGS, *gencode_flags(architectures, ptx=ptx))
    if len(architectures) > 1:
        nvcc_flags += ("--threads=0",)  # architectures in parallel, or the largest file would end up alone
    include = (*include_flags(), "-isystem", str(_TORCH / "include"), "-isystem", str(root / "include"))
    libraries = ("torch_cpu",) if torch_cuda is None else ("torch_cpu", "torch_cuda")
    return Recipe(
        sources=sources,
        compile_commands={".cpp": (*cxx, *cxx_flags, *include), ".cu": (nvcc, *nvcc_flags, *include_flags())},
        link_command=(*cxx, "-shared"),
        link_libraries=(*_torch_libraries(*libraries), str(_cuda_runtime(root))),
        key=_key("cuda", *cxx_flags, *nvcc_flags, nvcc_version, _cxx_fingerprint(cxx, cxx_flags)),
        # A CPU build of torch has no libtorch_cuda to link with, but can still make a wheel.
        stub=None if torch_cuda else "libtorch_cuda.so",
    )


def python_recipe() -> Recipe:
    """The recipe of the library that calls raw ops from Python, for this torch and this Python.

    Raises:
        ToolchainError: no C++ compiler, or no headers of Python.
    """
    cxx = _cxx_compiler()
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise ToolchainError(f"there is no Python.h in {headers}: the headers of this Python are not installed")
    # In a cold build this file takes longest, because of torch's headers. So it leaves out those of the operators, and
    # is compiled with -O1. torch is compiled with NDEBUG, on which the members of some of its classes depend.
    flags = (*_CXX_FLAGS, "-O1", "-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS")
    include = (*include_flags(), "-isystem", str(_TORCH / "include"), "-isystem", str(headers))
    return Recipe(
        sources=_sources("python"),
        compile_commands={".cpp": (*cxx, *flags, *include)},
        link_command=(*cxx, "-shared"),
        link_libraries=_torch_libraries("torch_python", "torch_cpu", "c10"),
        key=_key("python", *flags, interpreter(), _cxx_fingerprint(cxx, flags)),
    )


def interpreter() -> str:
    """The torch and Python of this process. The library for Python must have been compiled for exactly these."""
    return f"torch {torch.__version__}, {sysconfig.get_config_var('SOABI')}"


# -O1 is for host code, which only launches kernels; device code is fully optimised in any case. The standard library's
# headers compile faster as C++17, in which nvcc accepts lambdas with template parameters too (diagnostic 3288).
NVCC_FLAGS = (
    "-std=c++17",
    "-diag-suppress=3288",
    "-O1",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Werror=switch",
)


def gencode_flags(architectures: Sequence[str], *, ptx: bool = False) -> list[str]:
    """nvcc's flags for machine code of each compute capability and, if `ptx`, for PTX of the last."""
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    if ptx:
        flags.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    return flags


def find_nvcc() -> str:
    """Path of nvcc: from CUDA_HOME, else from PATH, else from /usr/local/cuda.

    Raises:
        ToolchainError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    for candidate in (home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"):
        path = candidate and shutil.which(candidate)
        if path:
            return path
    raise ToolchainError("no nvcc: not in CUDA_HOME, not on PATH, not in /usr/local/cuda")


@functools.cache
def nvcc_release(nvcc: str) -> str:
    """nvcc's release, such as "13.0"."""
    match = re.search(r"release (\d+\.\d+)", _output_of([nvcc, "--version"]))
    if match is None:
        raise ToolchainError(f"{nvcc} --version names no release")
    return match[1]


@functools.cache
def known_architectures(nvcc: str) -> frozenset[str]:
    """The compute capabilities that nvcc can compile for, such as "90"."""
    return frozenset(re.findall(r"sm_(\d+)\b", _output_of([nvcc, "--list-gpu-code"])))


@functools.cache
def toolkit_root(nvcc: str) -> Path:
    """The toolkit's folder. nvcc itself is asked, because the nvcc on PATH may be a wrapper in another folder."""
    match = re.search(r"TOP=(.+)", _output_of([nvcc, "--dryrun", "-x", "cu", os.devnull]))
    if match is None:
        raise ToolchainError(f"{nvcc} --dryrun names no toolkit folder")
    return Path(match[1].strip()).resolve()


def sources_digest(kind: str) -> str:
    """Hash of the names and contents of a library's sources and headers; a wheel leaves out the folders' READMEs."""
    digest = hashlib.sha256()
    measured = (CSRC.parent / "tuning").glob("*.inc") if kind == "cuda" else ()
    for path in sorted((*CSRC.glob("*.*"), *(CSRC / kind).rglob("*.*"), *measured)):
        if path.suffix == ".md":
            continue
        digest.update(f"{os.path.relpath(path, CSRC)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def include_flags() -> tuple[str, ...]:
    """Include paths in sources are relative to `csrc`, so a file can move without changes to its own includes."""
    return ("-I", str(CSRC))


def _sources(kind: str) -> tuple[Path, ...]:
    sources = [path for path in (CSRC / kind).rglob("*") if path.suffix in (".cpp", ".cu")]
    if not sources:
        raise ToolchainError(f"there are no sources in {CSRC / kind}")
    return tuple(sorted(sources))


def with_headers(source: Path) -> set[Path]:
    """A source and all files of this package that it includes, directly or indirectly."""
    seen: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path.exists() and path not in seen:
            seen.add(path)
            included = re.findall(r'#include "(.+)"', path.read_text(encoding="utf-8"))
            waiting += [folder / name for name in included for folder in (path.parent, CSRC)]
    return seen


def _key(kind: str, *facts: str) -> str:
    digest = hashlib.sha256(sources_digest(kind).encode())
    for fact in (*facts, ".".join(torch.__version__.split(".")[:2])):
        digest.update(f"{fact}\0".encode())
    return digest.hexdigest()[:16]


def _cxx_compiler() -> tuple[str, ...]:
    """The command in CXX, which may contain arguments; else the first compiler found on PATH."""
    if os.environ.get("CXX", "").strip():
        try:
            command = shlex.split(os.environ["CXX"])
        except ValueError as error:
            raise ToolchainError(f"CXX is not a valid command: {os.environ['CXX']!r} ({error})") from error
        if shutil.which(command[0]) is None:
            raise ToolchainError(f"the C++ compiler that CXX names does not exist: {command[0]}")
        return tuple(command)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return (name,)
    raise ToolchainError("no C++ compiler: neither c++, g++ nor clang++ is on PATH, and CXX is not set")


@functools.cache
def _cxx_fingerprint(cxx: tuple[str, ...], flags: tuple[str, ...]) -> str:
    """The compiler's full command line: it names its version, and the processor that `-march=native` stands for."""
    return _output_of([*cxx, *flags, "-###", "-S", "-x", "c++", os.devnull, "-o", os.devnull])


def _machine_flags(portable: bool) -> tuple[str, ...]:
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        # Compilers prefer 256-bit vectors; with 512-bit vectors these loops are up to 1.5 times faster.
        return ("-march=x86-64-v3",) if portable else ("-march=native", "-mprefer-vector-width=512")
    return () if portable else ("-mcpu=native",)


def _torch_libraries(*names: str) -> tuple[str, ...]:
    return (f"-L{_TORCH / 'lib'}", *(f"-l{name}" for name in names))


def _cuda_runtime(root: Path) -> Path:
    # The toolkit's pip packages ship libcudart.so.13 without the name libcudart.so that -lcudart needs.
    for folder in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib"):
        for path in sorted((root / folder).glob("libcudart.so*")):
            return path
    raise ToolchainError(f"no libcudart.so in {root}")


def _output_of(command: Sequence[str]) -> str:
    """stdout and stderr of a query to a compiler.

    Raises:
        ToolchainError: the compiler cannot be started, fails, or exceeds `QUERY_SECONDS`.
    """
    try:
        # cwd is fixed because clang prints the current folder. A new session lets a timeout kill the whole process
        # group: the child of a compiler wrapper would keep the pipe open.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=os.sep,
            start_new_session=True,
        )
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot be started: {error}") from error
    with process:
        try:
            output, _ = process.communicate(timeout=QUERY_SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                message = f"{shlex.join(command)} did not answer within {QUERY_SECONDS} s"
                raise ToolchainError(message) from error
            raise
    if process.returncode != 0:
        raise ToolchainError(f"{shlex.join(command)} failed with exit status {process.returncode}:\n{output}")
    return output
