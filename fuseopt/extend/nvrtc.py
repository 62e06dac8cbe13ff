"""Compiles a bare CUDA kernel by NVRTC, which CUDA builds of torch ship: in a tenth of nvcc's time, and without it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from fuseopt.build import toolchain
from fuseopt.build.compiler_messages import build_error
from fuseopt.extend.own_library import Missing


def cubin(text: str, label: str, options: Sequence[str]) -> bytes:
    """Machine code of a source.

    Args:
        label: what the compiler is to call the source.
        options: such as "--gpu-architecture=sm_90".

    Raises:
        Missing: there is no NVRTC of torch's CUDA.
        NativeBuildError: it refuses the source; the message has its first error, with file and line.
    """
    library = _library()
    program = ctypes.c_void_p()
    encoded = [option.encode() for option in options]
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), label.encode(), 0, None, None))
    try:
        status = library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        if status != 0:
            said = _text(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise build_error(f"{label} does not compile", (), said)
        return _text(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def include_flags() -> list[str]:
    """Of CUDA's headers, such as cuda_fp16.h, from where `cubin` finds the library."""
    return [f"-I{folder}" for folder in _folders("include") if (folder / "cuda_fp16.h").exists()][:1]


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise Missing(f"NVRTC fails: {library.nvrtcGetErrorString(status).decode()}")


@functools.cache
def _library() -> ctypes.CDLL:
    name = f"libnvrtc.so.{_cuda_major()}"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)  # as torch may have loaded it
    for file in (folder / name for lib in ("lib", "lib64") for folder in _folders(lib)):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(file))
            for builtins in file.parent.glob("libnvrtc-builtins.so.*"):  # which it looks up by name
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return library
    raise Missing("there is no libnvrtc of torch's CUDA")


def _folders(name: str) -> Iterator[Path]:
    """The folders of a name in the pip packages that torch depends on, and in nvcc's toolkit."""
    found = importlib.util.find_spec("nvidia")
    for folder in map(Path, (found and found.submodule_search_locations) or ()):
        yield from sorted(folder.glob(f"*/{name}"))
    with contextlib.suppress(toolchain.ToolchainError):
        yield toolchain.toolkit_root(toolchain.find_nvcc()) / name


def _cuda_major() -> str:
    """Of torch, or where that has no CUDA, of nvcc."""
    import torch

    if torch.version.cuda is not None:
        return torch.version.cuda.partition(".")[0]
    try:
        return toolchain.nvcc_release(toolchain.find_nvcc()).partition(".")[0]
    except toolchain.ToolchainError as error:
        raise Missing(str(error)) from error
