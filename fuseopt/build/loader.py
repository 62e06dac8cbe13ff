"""Finds, builds and loads the native libraries.

There are three: "cpu" and "cuda" implement `torch.ops.fuseopt`; "python" calls these ops from Python with less host
time. The loader takes the first of these: the prebuilt library in the package (`fuseopt/_lib`, from a wheel); the
library built earlier in the user's cache folder; a new build in the cache folder. Importing fuseopt compiles nothing,
and nothing is written into the package.

A library in the cache is loaded only if no other user can write it and if it matches its digest
(`fuseopt.build.library_cache`). A library that is damaged, or that cannot be loaded, is built again.

Environment: `FUSEOPT_CACHE_DIR` names the cache folder (default `$XDG_CACHE_HOME/fuseopt`, `~/.cache/fuseopt`);
`FUSEOPT_NO_BUILD=1` forbids compiling; `CXX` and `CUDA_HOME` choose the compilers.
"""

import contextlib
import functools
import importlib.util
import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from fuseopt.build import compilation, library_cache, prebuilt, toolchain
from fuseopt.errors import NativeBuildError

Kind = Literal["cpu", "cuda"]
KINDS: tuple[Kind, ...] = ("cpu", "cuda")
"""The libraries of kernels, named after the device type that they are for."""

Library = Literal["cpu", "cuda", "python"]
LIBRARIES: tuple[Library, ...] = (*KINDS, "python")
"""All native libraries. "python" saves host time per call. It is loaded with any other library, and is optional."""

_LOCK_TIMEOUT_SECONDS = 900
_PYTHON_MODULE = "fuseopt_python"  # what csrc/python calls itself

_process_lock = threading.Lock()
_settled: dict[str, "LibraryState"] = {}
# (path, inode, change time) of files that could not be loaded -> reason. A new file at the same path is tried again.
_not_loadable: dict[tuple[Path, int, int], str] = {}
_python_library: ModuleType | None = None


@dataclass(frozen=True)
class LibraryState:
    """State of one native library.

    Attributes:
        kind: "cpu", "cuda" or "python".
        status: "loaded"; "available", a file exists but is not loaded; "buildable", sources and compilers exist;
            "absent", for the reason in `reason`.
        origin: "prebuilt", "cache" or "built" (by this process); None if there is no file.
        path: the file, or the path that a build would write.
        reason: why it is absent; None otherwise.
        passed_over: why the prebuilt library in the package was not used; None if it was, or if there is none.
        damage: why the library in the cache cannot be used; None if it can, or if there is none.
        seconds: time of building and loading.
    """

    kind: Library
    status: Literal["loaded", "available", "buildable", "absent"]
    origin: Literal["prebuilt", "cache", "built"] | None = None
    path: Path | None = None
    reason: str | None = None
    passed_over: str | None = None
    damage: str | None = None
    seconds: float = 0.0


def state(kind: Library) -> LibraryState:
    """State of the library according to the disk; nothing is loaded or compiled."""
    return _settled.get(kind) or _find(kind)


def load(kind: Kind, *, build: bool = True) -> LibraryState:
    """Loads the library into the process. If there is none yet and `build` allows it, compiles it first.

    Never raises: if the library cannot be built or loaded, the state is "absent" with the reason, such as the
    compiler's message. A loaded library and a failed build are remembered, so later calls cost nothing.
    """
    return load_all([kind], build=build)[0]


def load_all(kinds: Sequence[Library], *, build: bool = True) -> list[LibraryState]:
    """`load` for each of `kinds`; builds run in parallel."""
    with _process_lock:
        start = time.perf_counter()
        # Every process takes the file locks in the same order.
        wanted = [kind for kind in LIBRARIES if kind in kinds or (kind == "python" and kinds)]
        found = {kind: _find_working(kind) for kind in wanted if kind not in _settled}
        if build:
            if "python" in found and not any(_is_of_this_machine(found.get(kind) or _settled[kind]) for kind in kinds):
                found["python"] = _without_compiling(found["python"])
            found |= _build([state for state in found.values() if state.status == "buildable"])
        for kind, state in found.items():
            loaded = _load_file(state) if state.status == "available" else state
            found[kind] = loaded = replace(loaded, seconds=time.perf_counter() - start)
            if loaded.status == "loaded" or (loaded.status == "absent" and build):
                _settled[kind] = loaded
        return [_settled.get(kind) or found[kind] for kind in kinds]


def python_library() -> ModuleType | None:
    """The module of `csrc/python` if it is loaded, else None."""
    return _python_library


def _is_of_this_machine(state: LibraryState) -> bool:
    return state.status == "buildable" or state.origin in ("cache", "built")


def _without_compiling(found: LibraryState) -> LibraryState:
    if found.status != "buildable":
        return found
    reason = "it only saves host time, so it is not compiled where the kernels are prebuilt"
    return replace(found, status="absent", path=None, reason=reason)


def _find(kind: Library) -> LibraryState:
    obstacle = _obstacle(kind)
    if obstacle is not None:
        return LibraryState(kind, "absent", reason=obstacle)
    passed_over = None
    path = prebuilt.path_of(kind)
    if path.exists():
        passed_over = _not_loadable.get(_identity(path)) or prebuilt.not_usable_reason(kind)
        if passed_over is None:
            return LibraryState(kind, "available", "prebuilt", path)
    return replace(_find_built(kind), passed_over=passed_over)


def _find_working(kind: Library) -> LibraryState:
    """`_find`, and loads an existing library: only loading shows whether it can be used."""
    while (found := _find(kind)).status == "available":
        loaded = _load_file(found)
        if loaded.status == "loaded":
            return loaded
        assert found.path is not None
        _not_loadable[_identity(found.path)] = str(loaded.reason)
    return found


def _find_built(kind: Library) -> LibraryState:
    recipe = _recipe(kind)
    if isinstance(recipe, str):
        return LibraryState(kind, "absent", reason=recipe)
    try:
        folder = library_cache.folder()
        library_cache.check_trusted(folder)
        path = folder / f"{kind}-{recipe.key}.so"
        is_there, damage = path.exists(), _damage(path)
    except library_cache.CacheError as error:
        return LibraryState(kind, "absent", reason=str(error))
    except OSError as error:
        return LibraryState(
            kind, "absent", reason=f"the cache folder cannot be read ({error}); set FUSEOPT_CACHE_DIR to another"
        )
    if is_there and damage is None:
        return LibraryState(kind, "available", "cache", path)
    if os.environ.get("FUSEOPT_NO_BUILD", "0") not in ("", "0"):
        why = f"the library in the cache cannot be used ({path}: {damage})" if damage else "it is not built yet"
        return LibraryState(kind, "absent", reason=f"{why}, and FUSEOPT_NO_BUILD forbids building", damage=damage)
    return LibraryState(kind, "buildable", path=path, damage=damage)


def _damage(path: Path) -> str | None:
    """Why the file must be built again; None if it is usable or does not exist."""
    return (_not_loadable.get(_identity(path)) or library_cache.damage(path)) if path.exists() else None


def _identity(path: Path) -> tuple[Path, int, int]:
    status = path.stat()
    return path, status.st_ino, status.st_mtime_ns


def _obstacle(kind: Library) -> str | None:
    """Why no library of this kind can run in this process, prebuilt or not."""
    if kind == "cuda":
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
    return None


@functools.cache
def _recipe(kind: Library) -> toolchain.Recipe | str:
    """How to build the library on this machine, or why that cannot be done."""
    try:
        if kind == "cpu":
            return toolchain.cpu_recipe()
        if kind == "python":
            return toolchain.python_recipe()
        capabilities = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
        return toolchain.cuda_recipe([f"{major}{minor}" for major, minor in sorted(capabilities)])
    except toolchain.ToolchainError as error:
        return str(error)


def _build(wanted: Sequence[LibraryState]) -> dict[Library, LibraryState]:
    """What becomes of libraries to build: each is compiled, unless another process has done it meanwhile."""
    with contextlib.ExitStack() as locks:
        states = {state.kind: _lock(state, locks) for state in wanted}
        missing = [state for state in states.values() if state.status == "buildable"]
        return states | (_compile(missing) if missing else {})


def _lock(wanted: LibraryState, locks: contextlib.ExitStack) -> LibraryState:
    """Takes the lock on building the library. The state is "buildable" if no other process has built it meanwhile."""
    import filelock

    path = wanted.path
    assert path is not None
    try:
        library_cache.create(path.parent)
        locks.enter_context(filelock.FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_SECONDS, mode=0o600))
        is_done = path.exists() and _damage(path) is None
    except filelock.Timeout:
        reason = f"another process has been building it for {_LOCK_TIMEOUT_SECONDS} s and holds {path}.lock"
        return replace(wanted, status="absent", path=None, reason=reason)
    except (OSError, library_cache.CacheError) as error:
        return _after_build(wanted, error)
    if is_done:
        return replace(wanted, status="available", origin="cache")
    for abandoned in path.parent.glob(f"{path.stem}.*/"):
        shutil.rmtree(abandoned, ignore_errors=True)
    return wanted


def _compile(missing: Sequence[LibraryState]) -> dict[Library, LibraryState]:
    """Builds libraries, whose locks this process holds, in parallel and with one progress line; their new states."""
    what = f"compiling {' and '.join(f'the {state.kind} library' for state in missing)}, once"
    for state in missing:
        if state.passed_over is not None:
            what += f" (the prebuilt one is passed over: {state.passed_over})"
        if state.damage is not None:
            what += f" (the one in the cache is replaced: {state.damage})"
    recipes = []
    for state in missing:
        recipe = _recipe(state.kind)
        assert isinstance(recipe, toolchain.Recipe)
        recipes.append(recipe)
    with (
        contextlib.suppress(NativeBuildError, OSError),
        compilation.progress_line(what, recipes) as progress,
        ThreadPoolExecutor(len(missing)) as pool,
    ):
        builds = []
        for state, recipe in zip(missing, recipes, strict=True):
            assert state.path is not None
            builds.append(pool.submit(compilation.build, recipe, state.path, progress, library_cache.publish))
        wait(builds)
        for build in builds:
            build.result()
    return {state.kind: _after_build(state, build.exception()) for state, build in zip(missing, builds, strict=True)}


def _after_build(wanted: LibraryState, error: BaseException | None) -> LibraryState:
    if error is None:
        return replace(wanted, status="available", origin="built")
    if isinstance(error, (NativeBuildError, library_cache.CacheError)):
        return replace(wanted, status="absent", path=None, reason=str(error))
    if isinstance(error, OSError):
        reason = f"the cache folder cannot be written ({error}); set FUSEOPT_CACHE_DIR to another"
        return replace(wanted, status="absent", path=None, reason=reason)
    raise error


def _load_file(found: LibraryState) -> LibraryState:
    assert found.path is not None
    try:
        if found.kind == "python":
            _import_python_library(found.path)
        else:
            torch.ops.load_library(found.path)
    except (OSError, ImportError) as error:
        reason = f"{found.path} cannot be loaded ({error.__cause__ or error})"
        return replace(found, status="absent", origin=None, path=None, reason=reason)
    return replace(found, status="loaded")


def _import_python_library(path: Path) -> None:
    global _python_library
    spec = importlib.util.spec_from_loader(_PYTHON_MODULE, ExtensionFileLoader(_PYTHON_MODULE, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _python_library = module
