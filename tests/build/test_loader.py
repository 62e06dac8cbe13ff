"""The loader, on a library of two tiny sources that compiles in a fraction of a second."""

import ctypes
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fuseopt.bench.harness import machine
from fuseopt.build import compilation, library_cache, loader, make_prebuilt, prebuilt, toolchain
from tests.build.processes import compilations, output_of, start_process


def test_from_buildable_to_loaded(csrc, capfd):
    before = loader.state("cpu")
    assert (before.status, before.origin, before.reason) == ("buildable", None, None)
    assert loader.load("cpu", build=False).status == "buildable"
    assert not library_cache.folder().exists()

    loaded = loader.load("cpu")
    assert (loaded.status, loaded.origin, loaded.reason) == ("loaded", "built", None)
    assert loaded.seconds > 0
    assert loaded.path.parent == library_cache.folder()
    assert loader.load("cpu") is loaded
    assert loader.state("cpu") is loaded
    line = r"compiling the cpu library, once: 1/2 (answer|other)\.cpp 2/2 (answer|other)\.cpp done after \d+\.\d s\n"
    assert re.search(line, capfd.readouterr().err)
    assert sorted(path.suffix for path in library_cache.folder().iterdir()) == [".lock", ".sha256", ".so"]


def test_a_fresh_process_loads_the_cached_file_and_compiles_nothing(csrc, logging_compiler):
    assert loader.load("cpu").origin == "built"
    count = compilations(logging_compiler)
    assert count == 2
    statement = "s = loader.state('cpu'); l = loader.load('cpu'); print(s.status, s.origin, l.status, l.origin)"
    assert output_of(start_process(csrc, statement)) == "available cache loaded cache"
    assert compilations(logging_compiler) == count


def test_import_compiles_nothing_and_is_light(csrc):
    statement = "import sys; print(*({'filelock', 'ninja', 'transformers', 'triton'} & set(sys.modules)))"
    assert output_of(start_process(csrc, statement)) == ""
    assert not library_cache.folder().exists()


def test_without_ninja_the_compilers_are_called_directly(csrc, monkeypatch, logging_compiler, capfd):
    monkeypatch.setattr(compilation, "_ninja", lambda: None)
    assert loader.load("cpu").origin == "built"
    assert compilations(logging_compiler) == 2
    assert re.search(r": 1/2 \w+\.cpp 2/2 \w+\.cpp done after", capfd.readouterr().err)


@pytest.mark.parametrize("with_ninja", [True, False])
def test_a_failed_build_keeps_the_compilers_words_and_is_not_tried_again(
    csrc, monkeypatch, logging_compiler, with_ninja
):
    if not with_ninja:
        monkeypatch.setattr(compilation, "_ninja", lambda: None)
    (csrc / "cpu" / "other.cpp").write_text('#error "words of the compiler"\n')
    failed = loader.load("cpu")
    assert (failed.status, failed.origin) == ("absent", None)
    assert "words of the compiler" in failed.reason
    count = compilations(logging_compiler)
    assert loader.load("cpu") is failed
    assert loader.state("cpu") is failed
    assert compilations(logging_compiler) == count
    assert not list(library_cache.folder().glob("*.so"))
    assert not [path for path in library_cache.folder().iterdir() if path.is_dir()]


def test_a_build_under_make_does_not_look_for_its_job_server(csrc, monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", " -j2 --jobserver-auth=1000,1001")
    (csrc / "cpu" / "other.cpp").write_text('#error "words of the compiler"\n')
    failed = loader.load("cpu")
    assert "jobserver" not in failed.reason
    assert "words of the compiler" in failed.reason.splitlines()[1]


def test_a_compiler_that_cannot_run_is_a_reason(csrc, monkeypatch, tmp_path):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho out of order; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    state = loader.load("cpu")
    assert state.status == "absent"
    assert "out of order" in state.reason
    assert "exit status 3" in state.reason


def test_a_missing_compiler_is_a_reason(csrc, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "CXX names does not exist: /nowhere/c++" in loader.state("cpu").reason
    loader._recipe.cache_clear()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    state = loader.load("cpu")
    assert state.status == "absent"
    assert state.reason.startswith("no C++ compiler")


def test_no_build_forbids_compiling_but_not_loading(csrc, monkeypatch):
    monkeypatch.setenv("FUSEOPT_NO_BUILD", "1")
    state = loader.load("cpu")
    assert state.status == "absent"
    assert "FUSEOPT_NO_BUILD" in state.reason
    assert not library_cache.folder().exists()

    monkeypatch.setattr(loader, "_settled", {})
    monkeypatch.delenv("FUSEOPT_NO_BUILD")
    loader.load("cpu")
    monkeypatch.setattr(loader, "_settled", {})
    monkeypatch.setenv("FUSEOPT_NO_BUILD", "1")
    assert loader.load("cpu").origin == "cache"


def test_no_sources_is_a_reason(csrc):
    for path in (csrc / "cpu").iterdir():
        path.unlink()
    assert loader.load("cpu").reason == f"there are no sources in {csrc / 'cpu'}"


def test_a_cache_folder_may_be_named_from_where_one_stands(csrc, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", "here")
    state = loader.load("cpu")
    assert state.status == "loaded", state.reason
    assert state.origin == "built" and state.path.is_relative_to(tmp_path / "here")


def test_a_cache_folder_that_cannot_be_made_is_a_reason(csrc, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    state = loader.load("cpu")
    assert state.status == "absent"
    assert "FUSEOPT_CACHE_DIR" in state.reason


def test_a_killed_build_does_not_block_the_next_one(csrc, monkeypatch, tmp_path):
    hanging = tmp_path / "hanging-c++"
    hanging.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) [ -e {tmp_path}/patient ] || exec sleep 10;; esac\nexec c++ "$@"\n'
    )
    hanging.chmod(0o755)
    monkeypatch.setenv("CXX", str(hanging))
    process = start_process(csrc, "loader.load('cpu')")
    deadline = time.monotonic() + 30
    while not list(library_cache.folder().glob("*/build.ninja")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (abandoned,) = (path for path in library_cache.folder().iterdir() if path.is_dir())

    (tmp_path / "patient").touch()
    state = loader.load("cpu")
    assert (state.status, state.origin) == ("loaded", "built")
    assert not abandoned.exists()


def test_what_takes_longest_is_compiled_first(csrc, monkeypatch):
    """A kernel's file may be all headers, and its own size says nothing."""
    (csrc / "cpu" / "kernels.h").write_text(f"// {'x' * 500}\n")
    (csrc / "cpu" / "short.cpp").write_text('#include "kernels.h"\n')
    (csrc / "cpu" / "long.cpp").write_text(f"// {'x' * 400}\n")
    (csrc / "cpu" / "a_binding.cpp").write_text(f'#include "kernels.h"\n// {"x" * 900}\n')
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [unit[0].stem for unit in toolchain.cpu_recipe().units] == ["a_binding", "short", "long", "answer", "other"]

    monkeypatch.setattr(toolchain, "MANY_KERNELS", ("answer.cpp",))
    assert [unit[0].stem for unit in toolchain.cpu_recipe().units][:2] == ["a_binding", "answer"]


def test_sources_that_are_known_to_take_long_are_there():
    assert {path.name for path in (toolchain.CSRC / "cuda").rglob("*.cu")} > set(toolchain.MANY_KERNELS)


@pytest.mark.parametrize("processors", [1, None])
def test_few_processors_compile_few_files(csrc, monkeypatch, logging_compiler, capfd, processors):
    """Each with its share of what takes longest."""
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    (csrc / "dtypes.h").write_text("#pragma once\nconstexpr int kAnswer = 42;\n")
    for number in range(3):
        (csrc / "cpu" / f"long{number}.cpp").write_text(
            f'#include "../dtypes.h"\nextern "C" __attribute__((visibility("default"))) int long{number}() '
            f"{{ return kAnswer + {number}; }} // {'x' * (900 - number)}\n"
        )
    units = [[source.stem for source in unit] for unit in toolchain.cpu_recipe().units]
    assert units == [["long0", "long2", "other"], ["long1", "answer"]]
    loaded = loader.load("cpu")
    assert (loaded.status, loaded.reason) == ("loaded", None)
    assert compilations(logging_compiler) == 2
    assert re.search(r" 2/2 long\d\+\d\.cpp done after", capfd.readouterr().err)
    library = ctypes.CDLL(str(loaded.path))
    assert [getattr(library, f"long{number}")() for number in range(3)] == [42, 43, 44]
    assert library.answer() == 42


@pytest.mark.parametrize("with_ninja", [True, False])
def test_bindings_are_compiled_as_one_file(csrc, monkeypatch, logging_compiler, capfd, with_ninja):
    if not with_ninja:
        monkeypatch.setattr(compilation, "_ninja", lambda: None)
    for number in range(7):
        (csrc / "cpu" / f"op{number}_binding.cpp").write_text(
            f'#include "../dtypes.h"\nnamespace op{number}_binding {{ static int value() {{ return {number}; }} }}\n'
            f'extern "C" __attribute__((visibility("default"))) int op{number}() '
            f"{{ return kAnswer + op{number}_binding::value(); }}\n"
        )
    (csrc / "dtypes.h").write_text("#pragma once\nconstexpr int kAnswer = 42;\n")
    loaded = loader.load("cpu")
    assert (loaded.status, loaded.reason) == ("loaded", None)
    assert compilations(logging_compiler) == 3
    assert re.search(r" 3/3 \S+ done after", capfd.readouterr().err)
    library = ctypes.CDLL(str(loaded.path))
    assert [getattr(library, f"op{number}")() for number in range(7)] == [42 + number for number in range(7)]


@pytest.fixture
def two_kinds(csrc, monkeypatch) -> Path:
    """A "cuda" library that needs no nvcc and no GPU, and one source for each of the two."""
    (csrc / "cpu" / "other.cpp").unlink()
    (csrc / "cuda").mkdir()
    (csrc / "cuda" / "kernel.cpp").write_text("int kernel() { return 1; }\n")
    monkeypatch.setattr(loader, "_obstacle", lambda kind: None)

    def cuda_recipe(architectures: list[str]) -> toolchain.Recipe:
        return replace(toolchain.cpu_recipe(), sources=(csrc / "cuda" / "kernel.cpp",), key="of-cuda")

    monkeypatch.setattr(toolchain, "cuda_recipe", cuda_recipe)
    return csrc


def test_libraries_are_compiled_at_the_same_time(two_kinds, monkeypatch, tmp_path, capfd):
    patient = tmp_path / "waits-for-the-other-c++"
    patient.write_text(f"""#!/bin/sh
case "$*" in *" -c "*)
  touch {tmp_path}/begun-$$
  for i in $(seq 200); do [ $(ls {tmp_path}/begun-* | wc -l) -ge 2 ] && exec c++ "$@"; sleep 0.1; done
  echo alone; exit 7;;
esac
exec c++ "$@"
""")
    patient.chmod(0o755)
    monkeypatch.setenv("CXX", str(patient))
    cuda, cpu = loader.load_all(["cuda", "cpu"])
    assert (cuda.kind, cuda.status, cuda.origin) == ("cuda", "loaded", "built")
    assert (cpu.kind, cpu.status, cpu.origin) == ("cpu", "loaded", "built")
    line = r"compiling the cpu library and the cuda library, once: 1/2 \S+ 2/2 \S+ done after \d+\.\d s\n"
    assert re.search(line, capfd.readouterr().err)
    assert loader.load_all(["cpu", "cuda"]) == [cpu, cuda]


def test_files_that_are_done_at_the_same_time_follow_each_other_in_the_line(monkeypatch):
    written = []

    def write(text):
        time.sleep(0.01)
        written.append(text)

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    recipe = SimpleNamespace(units=range(4))
    with compilation.progress_line("compiling", [recipe]) as progress, ThreadPoolExecutor(4) as builds:
        list(builds.map(progress, ["file"] * 4))
    assert re.fullmatch(r"fuseopt: compiling: 1/4 file 2/4 file 3/4 file 4/4 file done after .* s\n", "".join(written))


def test_one_library_that_fails_leaves_the_other(two_kinds, capfd):
    (two_kinds / "cuda" / "kernel.cpp").write_text('#error "words of the compiler"\n')
    cpu, cuda = loader.load_all(["cpu", "cuda"])
    assert cpu.status == "loaded"
    assert cuda.status == "absent" and "words of the compiler" in cuda.reason
    assert "failed after" in capfd.readouterr().err
    assert loader.state("cuda") is cuda


def test_two_processes_build_once(csrc, logging_compiler):
    processes = [start_process(csrc, "print(loader.load('cpu').status)") for _ in range(2)]
    assert [output_of(process) for process in processes] == ["loaded", "loaded"]
    assert compilations(logging_compiler) == 2


@pytest.fixture
def shipped(csrc, monkeypatch) -> Path:
    """The CPU library, made as for a wheel; the loader has seen nothing yet."""
    monkeypatch.setattr(toolchain, "find_nvcc", mock.Mock(side_effect=toolchain.ToolchainError("no nvcc here")))
    assert make_prebuilt.build(prebuilt.FOLDER) == "no nvcc here"
    return prebuilt.path_of("cpu")


def test_a_prebuilt_library_comes_first(shipped, monkeypatch):
    monkeypatch.setenv("FUSEOPT_NO_BUILD", "1")
    monkeypatch.setenv("PATH", "/nowhere")
    assert loader.state("cpu") == loader.LibraryState("cpu", "available", "prebuilt", shipped)
    loaded = loader.load("cpu", build=False)
    assert (loaded.status, loaded.origin, loaded.path) == ("loaded", "prebuilt", shipped)


PYTHON_SOURCE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuseopt_python"};
PyMODINIT_FUNC PyInit_fuseopt_python() { return PyModule_Create(&module); }
"""


@pytest.fixture
def with_python(csrc, monkeypatch) -> Path:
    """`csrc` with a library for Python, which no test has loaded yet."""
    (csrc / "python").mkdir()
    (csrc / "python" / "module.cpp").write_text(PYTHON_SOURCE)
    monkeypatch.setattr(loader, "_python_library", None)
    return csrc


def test_the_library_for_python_comes_along_with_any_other(with_python, capfd):
    assert loader.load("cpu", build=False).status == "buildable"
    assert loader.state("python").status == "buildable" and loader.python_library() is None
    assert loader.load_all([]) == [] and loader.state("python").status == "buildable"
    assert loader.load("cpu").origin == "built"
    python = loader.state("python")
    assert (python.status, python.origin) == ("loaded", "built")
    assert loader.python_library().__name__ == "fuseopt_python"
    assert "compiling the cpu library and the python library, once: 1/3" in capfd.readouterr().err


def test_without_headers_of_python_its_library_alone_is_absent(with_python, monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    assert loader.load("cpu").status == "loaded"
    assert f"there is no Python.h in {tmp_path}" in loader.state("python").reason
    assert loader.python_library() is None


def test_a_library_for_python_that_cannot_be_imported_leaves_the_others(with_python):
    (with_python / "python" / "module.cpp").write_text("int nothing;\n")
    assert loader.load("cpu").status == "loaded"
    python = loader.state("python")
    assert python.status == "absent" and "cannot be loaded" in python.reason and loader.python_library() is None


@pytest.mark.parametrize("is_for_this_python", [True, False])
def test_beside_prebuilt_kernels_none_is_compiled_for_python(
    with_python, shipped, logging_compiler, is_for_this_python
):
    if not is_for_this_python:
        change_contents(interpreter="torch 1.0, cpython-27")(prebuilt.path_of("python"))
    assert loader.load("cpu").origin == "prebuilt"
    python = loader.state("python")
    if is_for_this_python:
        assert (python.status, python.origin) == ("loaded", "prebuilt")
    else:
        assert python.status == "absent" and "not compiled where the kernels are prebuilt" in python.reason
        assert "it is for torch 1.0, cpython-27, this is torch 2." in python.passed_over
    assert compilations(logging_compiler) == 0


def change_a_source(shipped: Path) -> None:
    (toolchain.CSRC / "dtypes.h").write_text("constexpr int kAnswer = 43;\n")


def truncate(shipped: Path) -> None:
    shipped.write_bytes(shipped.read_bytes()[:200])


def change_contents(**contents: object) -> Callable[[Path], None]:
    def change(shipped: Path) -> None:
        description = shipped.with_suffix(".json")
        description.write_text(json.dumps(json.loads(description.read_text()) | contents))

    return change


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (change_a_source, "it is stale: the sources have changed"),
        (truncate, "it is damaged: it has 200 bytes, not "),
        (change_contents(machine="riscv64"), "it is for riscv64"),
        (change_contents(unheard_of=1), "does not say what it was made for"),
        (lambda shipped: shipped.with_suffix(".json").unlink(), "does not say what it was made for"),
    ],
)
def test_a_prebuilt_library_that_does_not_fit_is_passed_over(shipped, capfd, monkeypatch, spoil, reason):
    spoil(shipped)
    loader._recipe.cache_clear()
    built = loader.load("cpu")
    assert (built.status, built.origin) == ("loaded", "built")
    assert reason in built.passed_over
    assert f"(the prebuilt one is passed over: {built.passed_over})" in capfd.readouterr().err
    assert reason in machine.environment()["native code"]["cpu"]

    monkeypatch.setattr(loader, "_settled", {})
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(toolchain.CSRC / "empty"))
    monkeypatch.setenv("FUSEOPT_NO_BUILD", "1")
    absent = loader.load("cpu")
    assert absent.status == "absent" and reason in absent.passed_over


def test_a_prebuilt_library_needs_the_processor_it_is_compiled_for(shipped, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    assert "lacks AVX2" in loader.state("cpu").passed_over


@pytest.mark.parametrize(
    ("cuda", "architectures", "device", "reason"),
    [
        ("13.1", ["75", "90"], (9, 0), None),
        ("13.0", ["90", "100"], (9, 0), None),
        ("13.0", ["75", "80"], (8, 9), None),
        ("13.0", ["75"], (8, 0), None),  # by PTX
        ("13.0", ["75", "90"], (12, 0), None),  # by PTX
        ("13.0", ["75", "80"], (9, 0), "PTX older than sm_90 has no clusters, which kernels need on sm_90, device 0"),
        ("13.0", ["75", "89"], (12, 0), "PTX older than sm_90 has no clusters"),
        ("12.8", ["75", "90"], (9, 0), "major versions must match"),
        ("13.0", ["100", "120"], (9, 0), "nothing for sm_90, device 0"),
    ],
)
def test_a_prebuilt_cuda_library_fits_torchs_cuda_and_the_devices(
    cuda_csrc, gpu_of_sm_90, monkeypatch, cuda, architectures, device, reason
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: device)
    prebuilt.FOLDER.mkdir()
    prebuilt.path_of("cuda").touch()
    contents = {"sources": toolchain.sources_digest("cuda"), "machine": platform.machine(), "size": 0, "cuda": cuda}
    prebuilt.path_of("cuda").with_suffix(".json").write_text(json.dumps({**contents, "architectures": architectures}))
    state = loader.state("cuda")
    assert (state.origin == "prebuilt") == (reason is None)
    assert (state.passed_over is None) if reason is None else (reason in state.passed_over)


def test_the_key_is_of_content_flags_and_compiler_but_not_of_place(csrc, monkeypatch, tmp_path):
    def key(**options: bool) -> str:
        return toolchain.cpu_recipe(**options).key

    first = key()
    assert key(portable=True) != first
    csrc.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(toolchain, "CSRC", tmp_path / "elsewhere")
    assert key() == first
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    assert (minor := key()) != first
    monkeypatch.setattr(torch, "__version__", "2.99.2")
    assert key() == minor
    (tmp_path / "elsewhere" / "dtypes.h").write_text("constexpr int kAnswer = 43;\n")
    assert (changed := key()) != minor
    monkeypatch.setenv("CXX", "c++ -O1")
    assert key() != changed


def test_cuda_needs_a_cuda_build_of_torch(csrc, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in loader.load("cuda").reason


def test_cuda_needs_a_device(csrc, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loader.load("cuda").reason == "torch sees no CUDA device"


@pytest.fixture
def gpu_of_sm_90(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_cuda_needs_sources(csrc, gpu_of_sm_90):
    assert loader.load("cuda").reason == f"there are no sources in {csrc / 'cuda'}"


@pytest.fixture
def nvcc() -> str:
    try:
        return toolchain.find_nvcc()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture
def cuda_csrc(csrc) -> Path:
    (csrc / "cuda").mkdir()
    (csrc / "cuda" / "binding.cpp").write_text("#include <cuda_runtime.h>\nint binding() { return cudaSuccess; }\n")
    (csrc / "cuda" / "kernel.cu").write_text("__global__ void kernel(float* x) { *x = 1; }\n")
    return csrc


def test_cuda_needs_an_nvcc_of_torchs_major_version(cuda_csrc, gpu_of_sm_90, monkeypatch, nvcc):
    monkeypatch.setattr(torch.version, "cuda", "7.5")
    reason = loader.load("cuda").reason
    assert f"{nvcc} is CUDA {toolchain.nvcc_release(nvcc)}, torch was built with CUDA 7.5" in reason


def test_cuda_without_nvcc(cuda_csrc, gpu_of_sm_90, monkeypatch):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None if "nvcc" in name else name)
    assert loader.load("cuda").reason.startswith("no nvcc")


def test_cuda_builds_the_same_way(cuda_csrc, monkeypatch, tmp_path, nvcc):
    monkeypatch.setattr(torch.version, "cuda", toolchain.nvcc_release(nvcc))
    recipe = toolchain.cuda_recipe(["80", "90"], ptx=True)
    flags = " ".join(recipe.compile_commands[".cu"])
    assert "compute_80,code=sm_80" in flags
    assert "compute_90,code=sm_90" in flags
    assert "compute_90,code=compute_90" in flags
    assert recipe.key != toolchain.cuda_recipe(["90"]).key
    # This torch may have no libtorch_cuda to link with: a stub takes its place, which leaves its name in the library.
    recipe = replace(recipe, link_libraries=recipe.link_libraries[-1:], stub="libtorch_cuda.so")
    compilation.build(recipe, tmp_path / "cuda.so")
    needed = subprocess.run(["readelf", "-d", str(tmp_path / "cuda.so")], capture_output=True, text=True, check=True)
    assert "[libtorch_cuda.so]" in needed.stdout


REFUSING_BINDING = """
#include <torch/csrc/stable/library.h>
#include "../check.h"

void refuse(int64_t number) { FUSEOPT_CHECK(number >= 0, "must not be negative, got ", number); }

STABLE_TORCH_LIBRARY(fuseopt_refusing, m) { m.def("refuse(int number) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(fuseopt_refusing, CompositeExplicitAutograd, m) { m.impl("refuse", TORCH_BOX(&refuse)); }
"""


def test_initialize_builds_and_says_so_and_nothing_else_does(csrc, monkeypatch, tmp_path):
    """With a statically linked C++ runtime: such a library crashed when it composed a message with a number in it
    through a stream."""
    shutil.copy(loader.__file__.replace("build/loader.py", "csrc/check.h"), csrc)
    (csrc / "cpu" / "refusing_binding.cpp").write_text(REFUSING_BINDING)
    compiler = tmp_path / "static-g++"
    compiler.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    statement = """
import sys, torch, fuseopt
from fuseopt import ops
model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.GELU())
config = {'kernel_fusion': {'custom_cuda_kernels': ['FusedLayerNorm', 'FusedGELU'], 'jit': False}}
fuseopt.plan(model, config), ops.gelu(model(torch.ones(2, 8)))
print(loader.state('cpu').status, file=sys.stderr)
fuseopt.initialize(model, config, strict=True)
print(loader.state('cpu').status, file=sys.stderr)
try:
    torch.ops.fuseopt_refusing.refuse(-3)
except RuntimeError as error:
    print(error)
"""
    process = start_process(csrc, statement)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    before, progress, announced, after = err.splitlines()
    assert (before, after) == ("buildable", "loaded")
    assert re.match(r"fuseopt: compiling the cpu library, once: 1/3 \S+\.cpp ", progress), progress
    assert announced.startswith("fuseopt: 2 of 2 modules replaced")
    assert "must not be negative, got -3" in out
