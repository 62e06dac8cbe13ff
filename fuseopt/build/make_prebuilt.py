"""`python -m fuseopt.build.make_prebuilt`: builds the native libraries that a wheel ships into `fuseopt/_lib`.

Builds the CPU library for any x86-64-v3 processor, and the library for Python for the torch and Python at hand. If
nvcc exists, it also builds the CUDA library for those compute capabilities of SHIPPED_ARCHITECTURES that nvcc knows,
with PTX of the last one for newer devices.
"""

import argparse
import contextlib
import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuseopt.build import compilation, loader, prebuilt, toolchain

SHIPPED_ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")


def build(folder: Path, architectures: Sequence[str] = SHIPPED_ARCHITECTURES) -> str | None:
    """Builds the libraries and their descriptions into `folder`, replacing those that it holds.

    Returns:
        why there is no CUDA library; None if there is one.

    Raises:
        toolchain.ToolchainError: no C++ compiler.
        NativeBuildError: a compiler failed.
    """
    folder.mkdir(exist_ok=True)
    for name in loader.LIBRARIES:
        for suffix in (".so", ".json"):
            (folder / name).with_suffix(suffix).unlink(missing_ok=True)
    _build(toolchain.cpu_recipe(portable=True), folder / "cpu.so")
    with contextlib.suppress(toolchain.ToolchainError):  # without headers of Python: calls take a little longer
        _build(toolchain.python_recipe(), folder / "python.so", interpreter=toolchain.interpreter())
    try:
        nvcc = toolchain.find_nvcc()
        known = toolchain.known_architectures(nvcc)
        compiled = tuple(architecture for architecture in architectures if architecture in known)
        if not compiled:
            return f"{nvcc} compiles for none of sm_{', sm_'.join(architectures)}"
        recipe = toolchain.cuda_recipe(compiled, ptx=True)
    except toolchain.ToolchainError as error:
        return str(error)
    _build(recipe, folder / "cuda.so", cuda=toolchain.nvcc_release(nvcc), architectures=compiled)
    return None


def _build(recipe: toolchain.Recipe, library: Path, **made_for: Any) -> None:
    made = prebuilt.Contents(toolchain.sources_digest(library.stem), platform.machine(), size=0, **made_for)
    with compilation.progress_line(f"compiling {library.name} for {made}", [recipe]) as progress:
        compilation.build(recipe, library, progress)
    made = dataclasses.replace(made, size=library.stat().st_size)
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
