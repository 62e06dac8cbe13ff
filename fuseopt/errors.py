"""Every error fuseopt raises on purpose. Each message says what is wrong, where, and what to do instead.

Text from outside, such as the name of a user's module, goes through `printable` before it is shown.
"""

import os
import reprlib
import sys

_LONGEST = 200
_PACKAGE = os.path.join(os.path.dirname(__file__), "")


class FuseoptError(Exception):
    """Base class: `except fuseopt.errors.FuseoptError` catches all of the errors below."""


class ConfigError(FuseoptError, ValueError):
    """A config that cannot be read, or that asks for something unknown, impossible or not available yet."""


class NotAModelError(FuseoptError, TypeError):
    """The object given is no `torch.nn.Module`."""


class InputsError(FuseoptError, ValueError):
    """Inputs, labels or arguments for which `verify` cannot compare a model; nothing was changed."""


class PlanError(FuseoptError, RuntimeError):
    """Under `strict=True`: something that was asked for by name cannot be done on this model or this machine."""


class ApplyError(FuseoptError, RuntimeError):
    """A replacement could not be built or set; the model has been put back as it was."""


class BackendError(FuseoptError, RuntimeError):
    """An op was asked to run on a backend that cannot run it; the message lists why."""


class OpError(FuseoptError, ValueError):
    """An op of the user's own is defined wrongly, or one of its functions does not do what its signature says."""


class NativeBuildError(FuseoptError, RuntimeError):
    """A source does not compile; the message has the compiler's first error and the path of a file with the rest."""


class CompileError(FuseoptError, RuntimeError):
    """Code could not be compiled; for a model's training step the message says how to train without."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_int(self, value: int, level: int) -> str:
        # repr of an int of more than 4300 digits raises ValueError.
        return repr(value) if value.bit_length() <= 128 else f"<an integer of {value.bit_length()} bits>"


_SHORT = _Short()


def shown(value: object) -> str:
    """`repr(value)` on one line, shortened if it is long or deeply nested."""
    return printable(_SHORT.repr(value))


def shown_name(value: object) -> str:
    """The key of a dict or the path of a file on one line, without quotes, at most about 200 characters."""
    text = value if isinstance(value, str) else os.fspath(value) if isinstance(value, os.PathLike) else shown(value)
    text = printable(str(text))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def printable(text: str) -> str:
    """`text` with line breaks, control characters and all else that `str.isprintable` excludes escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def user_stack_level() -> int:
    """The `stacklevel` by which a warning of the caller's points at the nearest line outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
