"""What "auto" shows while it measures: a bar, and no warnings."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def bar(time_limit: float) -> Iterator[Any]:
    """A tqdm bar of seconds, on a terminal only; silent where transformers' bars are (`disable_progress_bar`)."""
    from tqdm import tqdm

    bars: Any = sys.modules.get("transformers.utils.logging")
    is_silent = bars is not None and not bars.is_progress_bar_enabled()
    # None: silent if stderr is no terminal.
    disable = True if is_silent else None
    with tqdm(desc="fuseopt auto", total=time_limit, bar_format=_FORMAT, leave=False, disable=disable) as shown:
        yield shown
