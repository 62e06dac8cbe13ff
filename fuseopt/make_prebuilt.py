"""`python -m fuseopt.make_prebuilt`: builds the native libraries that a wheel ships into `fuseopt/_lib`.

The CPU library for any x86-64-v3 processor; the library for Python, for the torch and the Python at hand; and where
there is an nvcc, the CUDA library for those compute capabilities of SHIPPED_ARCHITECTURES that it knows, with PTX of
the last for newer devices.
"""

import argparse
import contextlib
import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from fuseopt import native, prebuilt, toolchain

SHIPPED_ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")


def build(folder: Path, architectures: Sequence[str] = SHIPPED_ARCHITECTURES) -> str | None:
    """Build the libraries and their descriptions into `folder`, in place of what it holds of them.

    Returns:
        why there is no CUDA library; None when there is one.

    Raises:
        toolchain.ToolchainError: no C++ compiler.
        NativeBuildError: a compiler failed.
    """
    folder.mkdir(exist_ok=True)
    for name in native.LIBRARIES:
        for suffix in (".so", ".json"):
            (folder / name).with_suffix(suffix).unlink(missing_ok=True)
    machine = platform.machine()
    made = prebuilt.Contents(toolchain.sources_digest("cpu"), machine)
    _build(toolchain.cpu_recipe(portable=True), folder / "cpu.so", made)
    with contextlib.suppress(toolchain.ToolchainError):  # without headers of Python: calls take a little longer
        made = prebuilt.Contents(toolchain.sources_digest("python"), machine, interpreter=toolchain.interpreter())
        _build(toolchain.python_recipe(), folder / "python.so", made)
    try:
        nvcc = toolchain.find_nvcc()
        known = toolchain.known_architectures(nvcc)
        compiled = tuple(architecture for architecture in architectures if architecture in known)
        if not compiled:
            return f"{nvcc} compiles for none of sm_{', sm_'.join(architectures)}"
        recipe = toolchain.cuda_recipe(compiled, ptx=True)
    except toolchain.ToolchainError as error:
        return str(error)
    made = prebuilt.Contents(toolchain.sources_digest("cuda"), machine, toolchain.nvcc_release(nvcc), compiled)
    _build(recipe, folder / "cuda.so", made)
    return None


def _build(recipe: toolchain.Recipe, library: Path, made: prebuilt.Contents) -> None:
    with toolchain.progress_line(f"compiling {library.name} for {made}", [recipe]) as progress:
        toolchain.build(recipe, library, progress)
    library.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(made), indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the native libraries that a wheel ships into fuseopt/_lib.")
    parser.add_argument("--architectures", nargs="+", default=SHIPPED_ARCHITECTURES, metavar="SM", help="90, 120 ...")
    arguments = parser.parse_args()
    missing = build(prebuilt.FOLDER, arguments.architectures)
    if missing is not None:
        print(f"fuseopt: the wheel has the CPU library only: {missing}", file=sys.stderr)


if __name__ == "__main__":
    main()
