"""Libraries of sources that are not the package's own: compiled by its recipes and kept in its cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fuseopt.build import compilation, library_cache, toolchain


class Missing(Exception):
    """This machine cannot build or run the source; the message says why."""


def library_of(
    name: str,
    text: str,
    kind: str,
    *,
    file: str,
    recipe: toolchain.Recipe,
    command: Sequence[str],
    beside: Sequence[Path] = (),
    digest: str = "",
    may_build: bool = True,
) -> Path:
    """The library of a source, built unless it is in the cache.

    Args:
        name: what the line about the compilation calls it.
        kind: "cpu" or "cuda".
        file: name of the file that the text is compiled in.
        recipe: for fuseopt's own library of that kind, by which it is linked, and whose key it depends on.
        command: compiles the file.
        beside: sources of fuseopt to be linked in.
        digest: what the library depends on besides.
        may_build: False to use the cache only, without compiling.

    Raises:
        Missing: it is not in the cache, and not to be built.
        NativeBuildError: the compiler refuses the source; the message has its first error, with file and line.
        library_cache.CacheError: the cache folder must not be used.
    """
    key = hashlib.sha256(f"{recipe.key}{command}{text}{digest}".encode()).hexdigest()[:16]
    folder = library_cache.folder()
    library_cache.check_trusted(folder)
    library = folder / f"own-{kind}-{key}.so"
    if library.exists() and library_cache.damage(library) is None:
        return library
    if not may_build:
        raise Missing("it is not in the cache")
    if os.environ.get("FUSEOPT_NO_BUILD", "0") not in ("", "0"):
        raise Missing("it is not in the cache, and FUSEOPT_NO_BUILD forbids building")
    library_cache.create(folder)
    with tempfile.TemporaryDirectory(prefix="fuseopt-") as folder_name:
        source = Path(folder_name) / file
        source.write_text(text, encoding="utf-8")
        commands = {source.suffix: tuple(command)}
        own = dataclasses.replace(recipe, sources=(source, *beside), compile_commands=commands, key=key)
        with compilation.progress_line(f"compiling {name} for {kind}, once", [own]) as progress:
            compilation.build(own, library, progress, library_cache.publish)
    return library
