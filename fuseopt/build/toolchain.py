"""Compilers, flags and commands: how a folder of `csrc` becomes one shared library.

CPU code is C++ against the LibTorch stable ABI. CUDA code is torch-free `.cu` compiled by nvcc, and a thin binding on
the stable ABI compiled by the C++ compiler. Neither needs Python or a header outside the stable ABI. The one file that
calls them from Python needs both, and is a library of its own, for one release of torch and of Python.
"""

import contextlib
import functools
import hashlib
import itertools
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseopt.errors import NativeBuildError

CSRC = Path(__file__).parents[1] / "csrc"
_TORCH = Path(torch.__file__).parent
# The oldest supported release: only what its stable ABI has may be used, whichever release's headers are compiled.
_TORCH_TARGET_VERSION = "0x020b000000000000"
# A switch that does not handle every value of its enum does not compile.
_CXX_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-Werror=switch")
# Without masked arithmetic, as in AVX2, a loop with a choice in it is only vectorised where that may raise the
# processor's floating-point flags, which nobody reads. No result depends on it.
_SIMD_FLAGS = ("-O3", "-fopenmp-simd", "-fno-trapping-math")
# A file costs its compiler a second or more before the first line of ours, for the headers of torch or CUDA: so all
# bindings are compiled as one, and the others as no more than keep every processor busy until the end.
_UNITS_A_PROCESSOR = 2
_BINDING_SUFFIX = "_binding.cpp"
QUERY_SECONDS = 60
"""Timeout of queries for a compiler's version, folder or flags; long enough for a cold network file system."""

MANY_KERNELS = ("rms_norm.cu", "rms_norm_of_sum.cu", "softmax.cu")
"""Sources that take longer to compile than their size tells, for the many dtypes and shapes of their kernels."""


class ToolchainError(Exception):
    """No library of this kind can be compiled on this machine; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """Everything that one shared library is made from.

    Attributes:
        sources: the files to compile, those first that take longest.
        compile_commands: by suffix of a source, the command that compiles it when `-c SOURCE -o OBJECT` follows.
        link_command, link_libraries: the command that links it, when objects and `-o LIBRARY` come between.
        stub: name of a library that this torch lacks and that the result asks for when it is loaded elsewhere.
        key: a hash of sources, headers, flags, compiler versions and the minor version of torch. Patch releases change
            neither headers nor ABI. A minor release may change inline code of the headers, so a library is not shared
            between two of them although the ABI would allow it. Folders are no part of it.
    """

    sources: tuple[Path, ...]
    compile_commands: dict[str, tuple[str, ...]]
    link_command: tuple[str, ...]
    link_libraries: tuple[str, ...]
    key: str
    stub: str | None = None

    @property
    def units(self) -> tuple[tuple[Path, ...], ...]:
        """The sources in the order to compile them in; those of a tuple are compiled as one file."""
        bindings = tuple(source for source in self.sources if source.name.endswith(_BINDING_SUFFIX))
        others = [source for source in self.sources if source not in bindings]
        count = min(len(others), _UNITS_A_PROCESSOR * (os.cpu_count() or 1))
        # Dealt out, so that each has its share of the longest.
        units = [tuple(others[first::count]) for first in range(count)]
        # Together they take about as long as the longest of the others.
        return (bindings, *units) if bindings else tuple(units)


def cpu_recipe(*, portable: bool = False) -> Recipe:
    """The CPU library, for this machine's processor, or (`portable`) for any x86-64-v3 one.

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
    """The CUDA library.

    Args:
        architectures: compute capabilities to compile for, as "90".
        ptx: keep PTX of the last of them as well.

    Raises:
        ToolchainError: no C++ compiler, no nvcc, or one of another major version than torch's CUDA.
    """
    sources = _sources("cuda")
    cxx = _cxx_compiler()
    nvcc = find_nvcc()
    nvcc_version = nvcc_release(nvcc)
    torch_cuda = torch.version.cuda
    if torch_cuda is not None and nvcc_version.split(".")[0] != torch_cuda.split(".")[0]:
        raise ToolchainError(
            f"{nvcc} is CUDA {nvcc_version}, torch was built with CUDA {torch_cuda}: majors must match "
            f"(CUDA_HOME names another toolkit)"
        )
    root = toolkit_root(nvcc)
    cxx_flags = (*_CXX_FLAGS, "-O2", f"-DTORCH_TARGET_VERSION={_TORCH_TARGET_VERSION}", "-DUSE_CUDA")
    nvcc_flags = (*NVCC_FLAGS, *gencode_flags(architectures, ptx=ptx))
    if len(architectures) > 1:
        nvcc_flags += ("--threads=0",)  # one architecture a processor, else the largest file is compiled alone at last
    include = (*include_flags(), "-isystem", str(_TORCH / "include"), "-isystem", str(root / "include"))
    libraries = ("torch_cpu",) if torch_cuda is None else ("torch_cpu", "torch_cuda")
    return Recipe(
        sources=sources,
        compile_commands={".cpp": (*cxx, *cxx_flags, *include), ".cu": (nvcc, *nvcc_flags, *include_flags())},
        link_command=(*cxx, "-shared"),
        link_libraries=(*_torch_libraries(*libraries), str(_cuda_runtime(root))),
        key=_key("cuda", *cxx_flags, *nvcc_flags, nvcc_version, _cxx_fingerprint(cxx, cxx_flags)),
        # A CPU build of torch has no such library to link with; a wheel can be made with it all the same.
        stub=None if torch_cuda else "libtorch_cuda.so",
    )


def python_recipe() -> Recipe:
    """The library that calls raw ops from Python, for this torch and this Python.

    Raises:
        ToolchainError: no C++ compiler, or no headers of Python.
    """
    cxx = _cxx_compiler()
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise ToolchainError(f"there is no Python.h in {headers}: the headers of this Python are not installed")
    # Of a cold build this one file takes longest, for torch's headers: it does without those of every operator, and
    # without what -O2 does to them.
    flags = (*_CXX_FLAGS, "-O1", "-DAT_PER_OPERATOR_HEADERS")
    include = (*include_flags(), "-isystem", str(_TORCH / "include"), "-isystem", str(headers))
    return Recipe(
        sources=_sources("python"),
        compile_commands={".cpp": (*cxx, *flags, *include)},
        link_command=(*cxx, "-shared"),
        link_libraries=_torch_libraries("torch_python", "torch_cpu", "c10"),
        key=_key("python", *flags, interpreter(), _cxx_fingerprint(cxx, flags)),
    )


def interpreter() -> str:
    """The torch and the Python of this process, as a library that needs both must have been compiled for."""
    return f"torch {torch.__version__}, {sysconfig.get_config_var('SOABI')}"


# -O1 is for the host's code, which only launches; the device's is optimised in full whatever it says. As C++17 the
# headers of the standard library compile faster; nvcc takes lambdas with template parameters (3288) there as well.
NVCC_FLAGS = (
    "-std=c++17",
    "-diag-suppress=3288",
    "-O1",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Werror=switch",
)


def gencode_flags(architectures: Sequence[str], *, ptx: bool = False) -> list[str]:
    """nvcc's flags for machine code of each compute capability, and PTX of the last."""
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    if ptx:
        flags.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    return flags


def find_nvcc() -> str:
    """nvcc of CUDA_HOME, else of PATH, else of /usr/local/cuda.

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
    """nvcc's release, as "13.0"."""
    match = re.search(r"release (\d+\.\d+)", _output_of([nvcc, "--version"]))
    if match is None:
        raise ToolchainError(f"{nvcc} --version names no release")
    return match[1]


@functools.cache
def known_architectures(nvcc: str) -> frozenset[str]:
    """The compute capabilities that nvcc compiles for, as "90"."""
    return frozenset(re.findall(r"sm_(\d+)\b", _output_of([nvcc, "--list-gpu-code"])))


@functools.cache
def toolkit_root(nvcc: str) -> Path:
    """The toolkit's folder, asked from nvcc itself: the one on PATH may be a wrapper that lives elsewhere."""
    match = re.search(r"TOP=(.+)", _output_of([nvcc, "--dryrun", "-x", "cu", os.devnull]))
    if match is None:
        raise ToolchainError(f"{nvcc} --dryrun names no toolkit folder")
    return Path(match[1].strip()).resolve()


def build(
    recipe: Recipe,
    library: Path,
    progress: Callable[[str], None] = lambda name: None,
    publish: Callable[[Path, Path], None] = os.replace,
) -> None:
    """Compile and link in a new folder beside `library`, then move the result there in one step.

    Uses ninja where it is installed, else calls the compilers itself, as many at a time as there are processors.

    Args:
        progress: called with the name of each unit of the recipe when it is compiled.
        publish: called as `publish(built, library)` to move the linked file to its place.

    Raises:
        NativeBuildError: a compiler failed; the message is its own.
        OSError: the folder of `library` cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}.", dir=library.parent) as name:
        folder = Path(name)
        folder.chmod(0o700)  # whatever the umask
        compilations = {
            source.name: [*recipe.compile_commands[source.suffix], "-c", str(source), "-o", f"{folder / source.name}.o"]
            for source in (as_one_file(unit, folder) for unit in recipe.units)
        }
        objects = [command[-1] for command in compilations.values()]
        built = folder / library.name
        link = [*recipe.link_command, *objects, "-o", str(built), *recipe.link_libraries]
        if recipe.stub is not None:
            _run(
                [
                    *recipe.link_command,
                    f"-Wl,-soname,{recipe.stub}",
                    "-o",
                    str(folder / recipe.stub),
                    "-x",
                    "c++",
                    os.devnull,
                ]
            )
            link += ["-Wl,--no-as-needed", str(folder / recipe.stub)]
        ninja = _ninja()
        if ninja is not None:
            (folder / "build.ninja").write_text(_ninja_file(compilations, objects, link, built))
            for description in _run_ninja([ninja, "-C", str(folder)]):
                if description in compilations:
                    progress(description)
        else:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                pending = {pool.submit(_run, command): source for source, command in compilations.items()}
                for done in as_completed(pending):
                    done.result()
                    progress(pending[done])
            _run(link)
        publish(built, library)


@contextlib.contextmanager
def progress_line(what: str, recipes: Sequence[Recipe]) -> Iterator[Callable[[str], None]]:
    """One line on stderr that grows: what begins, each file that is done and how many there are, and how it ended.

    Yields what `build` takes as `progress`; several builds may call it at the same time.
    """
    start = time.perf_counter()
    total, done, one_at_a_time = sum(len(recipe.units) for recipe in recipes), itertools.count(1), threading.Lock()

    def progress(name: str) -> None:
        with one_at_a_time:
            _say(f"{next(done)}/{total} {name} ")

    _say(f"fuseopt: {what}: ")
    try:
        yield progress
    finally:
        outcome = "failed" if sys.exc_info()[0] else "done"
        _say(f"{outcome} after {time.perf_counter() - start:.1f} s\n")


def _say(text: str) -> None:
    """Write progress to stderr; a build goes on if that fails."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # full, closed
            print(text, end="", file=sys.stderr, flush=True)


def sources_digest(kind: str) -> str:
    """A hash of the sources and headers of a library: their names and content."""
    digest = hashlib.sha256()
    for path in sorted((*CSRC.glob("*.*"), *(CSRC / kind).rglob("*.*"))):
        digest.update(f"{path.relative_to(CSRC).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def include_flags() -> tuple[str, ...]:
    """Includes are written as paths below `csrc`, so that a file can move without edits to its own includes."""
    return ("-I", str(CSRC))


def _sources(kind: str) -> tuple[Path, ...]:
    sources = [path for path in (CSRC / kind).rglob("*") if path.suffix in (".cpp", ".cu")]
    if not sources:
        raise ToolchainError(f"there are no sources in {CSRC / kind}")

    # The longest first: begun last, it would be compiled alone at the end.
    def order(path: Path) -> tuple[bool, int, str]:
        # Kernels are in headers: a source of 8 lines can include several thousand.
        size = sum(file.stat().st_size for file in with_headers(path))
        return path.name not in MANY_KERNELS, -size, path.name

    return tuple(sorted(sources, key=order))


def with_headers(source: Path) -> set[Path]:
    """A source and all files of this package that it includes, directly or not."""
    seen: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path.exists() and path not in seen:
            seen.add(path)
            included = re.findall(r'#include "(.+)"', path.read_text(encoding="utf-8"))
            waiting += [folder / name for name in included for folder in (path.parent, CSRC)]
    return seen


def as_one_file(unit: Sequence[Path], folder: Path) -> Path:
    """The file that stands for a unit; one in `folder` where it has several."""
    if len(unit) == 1:
        return unit[0]
    file = folder / f"{unit[0].stem}+{len(unit) - 1}{unit[0].suffix}"
    file.write_text("".join(f'#include "{source}"\n' for source in unit), encoding="utf-8")
    return file


def _key(kind: str, *facts: str) -> str:
    digest = hashlib.sha256(sources_digest(kind).encode())
    for fact in (*facts, ".".join(torch.__version__.split(".")[:2])):
        digest.update(f"{fact}\0".encode())
    return digest.hexdigest()[:16]


def _cxx_compiler() -> tuple[str, ...]:
    """The command in CXX, which may have arguments, else the first compiler on PATH."""
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
    """What the compiler would run, unabridged: its version, and the processor that `-march=native` stands for."""
    return _output_of([*cxx, *flags, "-###", "-S", "-x", "c++", os.devnull, "-o", os.devnull])


def _machine_flags(portable: bool) -> tuple[str, ...]:
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        # Compilers prefer 256-bit vectors; these loops gain up to 1.5x from 512-bit ones where the processor has them.
        return ("-march=x86-64-v3",) if portable else ("-march=native", "-mprefer-vector-width=512")
    return () if portable else ("-mcpu=native",)


def _torch_libraries(*names: str) -> tuple[str, ...]:
    return (f"-L{_TORCH / 'lib'}", *(f"-l{name}" for name in names))


def _cuda_runtime(root: Path) -> Path:
    # The pip packages of the toolkit ship libcudart.so.13 without the plain name that -lcudart needs.
    for folder in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib"):
        for path in sorted((root / folder).glob("libcudart.so*")):
            return path
    raise ToolchainError(f"no libcudart.so in {root}")


def _ninja() -> str | None:
    try:
        import ninja
    except ImportError:
        return shutil.which("ninja")
    return str(Path(ninja.BIN_DIR) / "ninja")


def _ninja_file(compilations: dict[str, list[str]], objects: list[str], link: list[str], library: Path) -> str:
    def statement(description: str, command: list[str], output: str, inputs: list[str]) -> str:
        paths = [re.sub(r"([$ :])", r"$\1", path) for path in (output, *inputs)]
        written = shlex.join(command).replace("$", "$$")
        return f"build {paths[0]}: run {' '.join(paths[1:])}\n  description = {description}\n  command = {written}\n"

    rule = "rule run\n  command = $command\n  description = $description\n"
    compile_statements = [statement(name, command, command[-1], []) for name, command in compilations.items()]
    return "".join([rule, *compile_statements, statement("link", link, str(library), objects)])


def _run_ninja(command: Sequence[str]) -> Iterator[str]:
    """Runs ninja; yields the description of each statement that is over."""
    marker = "fuseopt-done:"
    said = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"NINJA_STATUS": marker},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(marker):
                yield line.removeprefix(marker).strip()
            else:
                said.append(line)
    if process.returncode != 0:
        raise NativeBuildError(f"{shlex.join(command)} failed with exit status {process.returncode}:\n{''.join(said)}")


def _run(command: Sequence[str]) -> None:
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise NativeBuildError(f"{command[0]} cannot be started: {error}") from error
    if process.returncode != 0:
        raise NativeBuildError(f"{shlex.join(command)} failed with exit status {process.returncode}:\n{process.stdout}")


def _output_of(command: Sequence[str]) -> str:
    """stdout and stderr of a query to a compiler.

    Raises:
        ToolchainError: it cannot be started, fails, or does not answer in time.
    """
    try:
        # In a fixed folder, as clang prints the current one. In a new session, so that after a timeout the whole group
        # of processes can be killed: the child of a compiler wrapper would keep the pipe open.
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
