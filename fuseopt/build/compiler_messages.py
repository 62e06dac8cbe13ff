"""What a compiler refused, for people: its first error, with file and line, and a file with all that it said."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Sequence

from fuseopt.errors import NativeBuildError

_ERROR = re.compile(r"\berror(?: [#\w-]+)?: |\bfatal\b|undefined reference to")
_SOURCE_LINES = 4
_LAST_LINES = 8


def build_error(what: str, command: Sequence[str], said: str) -> NativeBuildError:
    """The exception for a command that failed; its message has the path of the file.

    Args:
        what: what failed, such as "mine::op (cpu source) does not compile".
        command: empty for a compiler that is a library.
        said: what the compiler printed.
    """
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [place for place, line in enumerate(lines) if _ERROR.search(line)]
    shown = _with_source(lines, errors[0]) if errors else lines[-_LAST_LINES:]
    others = f"{len(errors) - 1} more, and all" if len(errors) > 1 else "all"
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="replace", prefix="fuseopt-build-", suffix=".log", delete=False
        ) as log:
            log.write(f"{shlex.join(command)}\n\n{said}")
    except OSError as error:
        return NativeBuildError("\n".join([f"{what}:", said, f"{shlex.join(command)} (no log is written: {error})"]))
    return NativeBuildError("\n".join([f"{what}:", *shown, f"{others} that the compiler said: {log.name}"]))


def _with_source(lines: Sequence[str], error: int) -> list[str]:
    """An error's line, the user's line that a template is required from, and the quoted source below."""
    start, end = error, error + 1
    while start and "required from here" in lines[start - 1]:
        start -= 1
    while end < min(len(lines), error + 1 + _SOURCE_LINES) and lines[end].startswith(" "):
        end += 1
    return list(lines[start:end])
