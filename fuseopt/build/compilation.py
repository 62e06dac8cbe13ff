"""Runs a recipe: compiles its sources in parallel, links them, and moves the library to its place in one step."""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from fuseopt.build.compiler_messages import build_error
from fuseopt.build.toolchain import Recipe
from fuseopt.errors import NativeBuildError


def build(
    recipe: Recipe,
    library: Path,
    progress: Callable[[str], None] = lambda name: None,
    publish: Callable[[Path, Path], None] = os.replace,
) -> None:
    """Compiles and links in a new folder beside `library`, then moves the result there in one step.

    Uses ninja if it is installed; otherwise starts the compilers itself, one per processor at a time.

    Args:
        progress: called with the name of each unit of the recipe once it is compiled.
        publish: called as `publish(built, library)` to move the linked file to its place.

    Raises:
        NativeBuildError: a compiler failed; the message has its first error.
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
    """Writes one growing line to stderr: `what`, each compiled unit with its number of the total, and the outcome.

    Yields the function that `build` takes as `progress`. Several builds may call it at the same time.
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
    """Writes progress to stderr; if that fails, the build goes on."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # full, closed
            print(text, end="", file=sys.stderr, flush=True)


def as_one_file(unit: Sequence[Path], folder: Path) -> Path:
    """The file to compile for a unit: its only source, or a new file in `folder` that includes all of them."""
    if len(unit) == 1:
        return unit[0]
    file = folder / f"{unit[0].stem}+{len(unit) - 1}{unit[0].suffix}"
    file.write_text("".join(f'#include "{source}"\n' for source in unit), encoding="utf-8")
    return file


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
    """Runs ninja; yields the description of each statement that has finished."""
    marker = "fuseopt-done:"
    said = []
    # The job server that MAKEFLAGS names under `make -j` is not open to the children of a recipe's command.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment | {"NINJA_STATUS": marker},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(marker):
                yield line.removeprefix(marker).strip()
            else:
                said.append(line)
    if process.returncode != 0:
        raise _failed(command, process.returncode, "".join(said))


def _run(command: Sequence[str]) -> None:
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise NativeBuildError(f"{command[0]} cannot be started: {error}") from error
    if process.returncode != 0:
        raise _failed(command, process.returncode, process.stdout)


def _failed(command: Sequence[str], status: int, said: str) -> NativeBuildError:
    return build_error(
        f"the native code does not compile (exit status {status} of {Path(command[0]).name})", command, said
    )
