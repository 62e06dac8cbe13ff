"""The logger "fuseopt": lines about what was done, seen without any setup and silenced by `setLevel`."""

from __future__ import annotations

import importlib.util
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


def bar(description: str, **options: Any) -> Any:
    """A tqdm bar that is gone at its end: made of widgets in a notebook with ipywidgets, else of text.

    It shows in terminals and notebooks unless transformers' bars are off.

    Args:
        options: of tqdm.
    """
    return _bar_class()(desc=description, leave=False, disable=_is_bar_disabled(), **options)


def _is_bar_disabled() -> bool | None:
    bars: Any = sys.modules.get("transformers.utils.logging")
    if bars is not None and not bars.is_progress_bar_enabled():
        return True
    return False if _is_notebook() else None  # None: silent if stderr is no terminal


def _bar_class() -> Any:
    has_widgets = _is_notebook() and importlib.util.find_spec("ipywidgets") is not None
    return importlib.import_module("tqdm.auto" if has_widgets else "tqdm").tqdm


def _is_notebook() -> bool:
    """True if a Jupyter kernel runs this code. tqdm tests for the same module."""
    return "ipykernel.zmqshell" in sys.modules


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
