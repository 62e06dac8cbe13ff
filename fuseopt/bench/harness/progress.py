"""Progress on stderr: a bar if stderr is a terminal, else one line for each piece of work."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

_T = TypeVar("_T")
# Seconds before `waiting` shows anything.
PATIENCE = 1.5


def is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def say(text: str) -> None:
    """Writes a line to stderr, above a bar that may be there."""
    if sys.stderr is not None:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


def each(items: Sequence[_T], name: Callable[[_T], str], unit: str = "case") -> Iterator[_T]:
    """`items`, each announced by its name and number."""
    if is_terminal():
        with tqdm(items, unit=unit, dynamic_ncols=True) as bar:
            for item in bar:
                bar.set_postfix_str(name(item))
                yield item
        return
    for number, item in enumerate(items, 1):
        say(f"[{number}/{len(items)}] {name(item)}")
        yield item


def steps(items: Iterable[_T], what: str, total: int) -> Iterable[_T]:
    """`items`, of which there are `total`, with a bar on a terminal; else one line when they begin."""
    if is_terminal():
        return tqdm(items, what, total, leave=False, unit="step")
    say(f"{what}, {total} steps")
    return items


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says that `what` is being done if that takes more than `PATIENCE` seconds; on a terminal with the seconds."""
    done = threading.Event()

    def show() -> None:
        start = time.perf_counter()
        if done.wait(PATIENCE):
            return
        if not is_terminal():
            say(f"{what} ...")
            return
        while not done.wait(1.0):
            print(f"\r{what} ... {time.perf_counter() - start:.0f} s", end="", file=sys.stderr, flush=True)
        print("\r\033[K", end="", file=sys.stderr, flush=True)

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        yield
    finally:
        done.set()
        shower.join()
