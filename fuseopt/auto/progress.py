"""What "auto" shows while it measures: a bar, and no warnings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fuseopt.runtime import announcements

_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, Python's and transformers', which each of hundreds of calls would repeat."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def bar(time_limit: float) -> Any:
    """A bar of seconds."""
    return announcements.bar("fuseopt auto", total=time_limit, bar_format=_FORMAT)
