"""Prebuilt native libraries of a wheel: what `fuseopt/_lib` holds, and whether it fits this machine.

A JSON file beside each library describes what it was made from and for. `fuseopt.build.make_prebuilt` writes both.
"""

import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from fuseopt.build import toolchain

FOLDER = Path(__file__).parents[1] / "_lib"
# From this compute capability on kernels launch as clusters; code compiled for older ones lacks the instructions.
_FIRST_WITH_CLUSTERS = (9, 0)


@dataclasses.dataclass(frozen=True)
class Contents:
    """Description of one shipped library: what it was made from and for.

    Attributes:
        sources: `toolchain.sources_digest` of the sources compiled.
        machine: processor architecture, such as "x86_64".
        size: bytes of the library. Loading a truncated file would kill the process.
        cuda: release of nvcc; None for the other libraries.
        architectures: compute capabilities with machine code; PTX of the last is included.
        interpreter: `toolchain.interpreter()` of the library for Python; None for the others.
    """

    sources: str
    machine: str
    size: int
    cuda: str | None = None
    architectures: tuple[str, ...] = ()
    interpreter: str | None = None

    def __str__(self) -> str:
        if self.interpreter is not None:
            return self.interpreter
        if self.cuda is None:
            return f"{self.machine}-v3" if self.machine == "x86_64" else self.machine
        return f"CUDA {self.cuda}, sm_{', sm_'.join(self.architectures)}, PTX of the last"


def path_of(kind: str) -> Path:
    return FOLDER / f"{kind}.so"


def contents(kind: str) -> Contents | str | None:
    """The description of the library in the package; None if there is no library, a reason if it cannot be read."""
    library = path_of(kind)
    if not library.exists():
        return None
    description = library.with_suffix(".json")
    try:
        read = json.loads(description.read_text(encoding="utf-8"))
        return Contents(**read | {"architectures": tuple(read["architectures"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{description} does not say what it was made for ({type(error).__name__}: {error})"


def not_usable_reason(kind: str) -> str | None:
    """Why the library in the package cannot be used in this process; None if it can. The library must exist."""
    found = contents(kind)
    assert found is not None
    if isinstance(found, str):
        return found
    if found.sources != toolchain.sources_digest(kind):
        return "it is stale: the sources have changed since it was made"
    size = path_of(kind).stat().st_size
    if found.size != size:
        return f"it is damaged: it has {size} bytes, not {found.size}"
    if found.machine != platform.machine():
        return f"it is for {found.machine}, this machine is {platform.machine()}"
    if found.interpreter is not None:
        here = toolchain.interpreter()
        return None if found.interpreter == here else f"it is for {found.interpreter}, this is {here}"
    if found.cuda is None:
        return "this processor lacks AVX2, which it is compiled for" if _is_below_x86_64_v3() else None
    if torch.version.cuda is not None and found.cuda.split(".")[0] != torch.version.cuda.split(".")[0]:
        return f"it was made with CUDA {found.cuda}, torch with CUDA {torch.version.cuda}: major versions must match"
    for device in range(torch.cuda.device_count()):
        reason = _not_run_reason(found.architectures, torch.cuda.get_device_capability(device))
        if reason is not None:
            return f"it is {found}: {reason} device {device}"
    return None


def _is_below_x86_64_v3() -> bool:
    # "DEFAULT" is what torch calls an x86-64 processor without AVX2.
    return torch.backends.cpu.get_cpu_capability() == "DEFAULT" and platform.machine() == "x86_64"


def _not_run_reason(architectures: Sequence[str], capability: tuple[int, int]) -> str | None:
    """Why code for `architectures` does not run on a GPU of this compute capability; None if it does.

    Machine code runs on later minor versions of the same major version; PTX runs on every later version.
    """
    compiled = [divmod(int(architecture), 10) for architecture in architectures]
    name = f"sm_{capability[0]}{capability[1]}"
    if any(major == capability[0] and minor <= capability[1] for major, minor in compiled):
        return None
    if compiled[-1] > capability:
        return f"nothing for {name},"
    if compiled[-1] < _FIRST_WITH_CLUSTERS <= capability:
        return f"PTX older than sm_90 has no clusters, which kernels need on {name},"
    return None
