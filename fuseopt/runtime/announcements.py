"""The logger "fuseopt": lines about what was done, seen without any setup and silenced by `setLevel`."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import torch

_LOGGER = logging.getLogger("fuseopt")


def announce(message: str) -> None:
    """Logs `message` at level INFO; on other ranks of a distributed job than 0, at level DEBUG."""
    distributed = torch.distributed
    is_first = not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
    _LOGGER.log(logging.INFO if is_first else logging.DEBUG, "fuseopt: %s", message)


def is_bar_disabled() -> bool | None:
    """tqdm's `disable` for fuseopt's bars: on a terminal only, and not where transformers' bars are switched off."""
    bars: Any = sys.modules.get("transformers.utils.logging")
    # None: silent if stderr is no terminal.
    return True if bars is not None and not bars.is_progress_bar_enabled() else None


class _LastResort(logging.StreamHandler[TextIO]):
    """Prints to stderr, as `logging.lastResort` does, if no other handler gets the record."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr  # whatever it is now: pytest and notebooks exchange it

    def filter(self, record: logging.LogRecord) -> bool:
        others = [handler for handler in _LOGGER.handlers if handler is not self]
        return not others and not (_LOGGER.propagate and logging.getLogger().handlers)


def install() -> None:
    """Gives the logger its handler, and the level INFO unless a level has been set."""
    if not any(isinstance(handler, _LastResort) for handler in _LOGGER.handlers):
        _LOGGER.addHandler(_LastResort())
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
