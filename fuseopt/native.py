"""Finds, builds and loads the native libraries that implement `torch.ops.fuseopt`: one for the CPU, one for CUDA.

Looked for in this order: a prebuilt library in the package (`fuseopt/_lib`, from a wheel), one built earlier in the
user's cache folder, else it is compiled into the cache. Nothing is compiled at import or unasked, or written into the
package.

Environment: `FUSEOPT_CACHE_DIR` names the cache folder (default `$XDG_CACHE_HOME/fuseopt`, `~/.cache/fuseopt`);
`FUSEOPT_NO_BUILD=1` forbids compiling; `CXX` and `CUDA_HOME` choose the compilers.
"""

import functools
import os
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from fuseopt import prebuilt, toolchain
from fuseopt.errors import NativeBuildError

Kind = Literal["cpu", "cuda"]
KINDS: tuple[Kind, ...] = ("cpu", "cuda")

_LOCK_TIMEOUT_SECONDS = 900

_process_lock = threading.Lock()
_settled: dict[str, "LibraryState"] = {}
_broken_prebuilt: dict[str, str] = {}


@dataclass(frozen=True)
class LibraryState:
    """Where one native library stands.

    Attributes:
        kind: "cpu" or "cuda".
        status: "loaded"; "available": a file is there, not loaded yet; "buildable": sources and compilers are there;
            "absent": `reason` says why.
        origin: "prebuilt", "cache" or "built" (by this process); None where there is no file.
        path: the file, or where building would put it.
        reason: why it is absent; None otherwise.
        passed_over: why the prebuilt library in the package was not taken; None where it was, or where there is none.
        seconds: what building and loading took.
    """

    kind: Kind
    status: Literal["loaded", "available", "buildable", "absent"]
    origin: Literal["prebuilt", "cache", "built"] | None = None
    path: Path | None = None
    reason: str | None = None
    passed_over: str | None = None
    seconds: float = 0.0


def state(kind: Kind) -> LibraryState:
    """Where the library stands, from a look at the disk; nothing is loaded or compiled."""
    return _settled.get(kind) or _find(kind)


def load(kind: Kind, *, build: bool = True) -> LibraryState:
    """Load the library into the process, compiled first where that is needed and `build` allows it.

    Never raises for a library that cannot be had: the state is "absent" and holds the reason, with the compiler's own
    words where it failed. A loaded library and a failed build are remembered: later calls cost nothing.
    """
    with _process_lock:
        if kind in _settled:
            return _settled[kind]
        start = time.perf_counter()
        found = _find(kind)
        if found.origin == "prebuilt" and (broken := _load_file(found)).status == "absent":
            _broken_prebuilt[kind] = str(broken.reason)
            found = _find(kind)
        if found.status == "buildable" and build:
            found = _build(found)
        if found.status == "available":
            found = _load_file(found)
        found = replace(found, seconds=time.perf_counter() - start)
        if found.status == "loaded" or (found.status == "absent" and build):
            _settled[kind] = found
        return found


def cache_dir() -> Path:
    """The folder that compiled libraries are kept in."""
    explicit = os.environ.get("FUSEOPT_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fuseopt"


def _find(kind: Kind) -> LibraryState:
    obstacle = _obstacle(kind)
    if obstacle is not None:
        return LibraryState(kind, "absent", reason=obstacle)
    passed_over = None
    if prebuilt.path_of(kind).exists():
        passed_over = _broken_prebuilt.get(kind) or prebuilt.not_usable_reason(kind)
        if passed_over is None:
            return LibraryState(kind, "available", "prebuilt", prebuilt.path_of(kind))
    return replace(_find_built(kind), passed_over=passed_over)


def _find_built(kind: Kind) -> LibraryState:
    recipe = _recipe(kind)
    if isinstance(recipe, str):
        return LibraryState(kind, "absent", reason=recipe)
    path = cache_dir() / f"{kind}-{recipe.key}.so"
    if path.exists():
        return LibraryState(kind, "available", "cache", path)
    if os.environ.get("FUSEOPT_NO_BUILD", "0") not in ("", "0"):
        return LibraryState(kind, "absent", reason="it is not built yet, and FUSEOPT_NO_BUILD forbids building")
    return LibraryState(kind, "buildable", path=path)


def _obstacle(kind: Kind) -> str | None:
    """Why no library of this kind can run in this process, prebuilt or not."""
    if kind == "cuda":
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
    return None


@functools.cache
def _recipe(kind: Kind) -> toolchain.Recipe | str:
    """How to build the library on this machine, or why that cannot be done."""
    try:
        if kind == "cpu":
            return toolchain.cpu_recipe()
        capabilities = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
        return toolchain.cuda_recipe([f"{major}{minor}" for major, minor in sorted(capabilities)])
    except toolchain.ToolchainError as error:
        return str(error)


def _build(wanted: LibraryState) -> LibraryState:
    import filelock

    recipe, path = _recipe(wanted.kind), wanted.path
    assert isinstance(recipe, toolchain.Recipe) and path is not None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_SECONDS):
            if path.exists():
                return replace(wanted, status="available", origin="cache")
            for abandoned in path.parent.glob(f"{path.stem}.*/"):
                shutil.rmtree(abandoned, ignore_errors=True)
            what = f"compiling the {wanted.kind} library, once"
            if wanted.passed_over is not None:
                what += f" (the prebuilt one is passed over: {wanted.passed_over})"
            with toolchain.progress_line(what, recipe) as progress:
                toolchain.build(recipe, path, progress)
    except filelock.Timeout:
        reason = f"another process has been building it for {_LOCK_TIMEOUT_SECONDS} s and holds {path}.lock"
        return replace(wanted, status="absent", path=None, reason=reason)
    except NativeBuildError as error:
        return replace(wanted, status="absent", path=None, reason=str(error))
    except OSError as error:
        reason = f"the cache folder cannot be written ({error}); FUSEOPT_CACHE_DIR names another"
        return replace(wanted, status="absent", path=None, reason=reason)
    return replace(wanted, status="available", origin="built")


def _load_file(found: LibraryState) -> LibraryState:
    try:
        torch.ops.load_library(found.path)
    except OSError as error:
        reason = f"{found.path} cannot be loaded ({error}); once it is deleted, it can be built again"
        return replace(found, status="absent", origin=None, path=None, reason=reason)
    return replace(found, status="loaded")
