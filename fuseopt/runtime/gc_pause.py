"""Holding back Python's garbage collector, which is one for all threads."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Python 3.12 puts its immortal objects among the frozen ones, some hundreds. A process that has imported torch, and
# froze what it has, keeps many times as many.
_MOST_IMMORTAL = 10_000

_lock = threading.Lock()
_inside = 0
_was_enabled = False
_keeps_frozen = False


@contextlib.contextmanager
def not_collected() -> Iterator[None]:
    """Garbage waits until the last thread has left: a search goes over all objects, and frees some of any thread's.

    What is there then counts as old: the next search of all generations goes over it, none of the young one, which
    would come at once. Where the process keeps objects frozen, that is left alone, and the search comes.
    """
    global _inside, _was_enabled, _keeps_frozen
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                # Asked only where a search is due, not behind every step, and until the answer is yes: Python counts
                # what is frozen one by one.
                if gc.get_count()[0] > gc.get_threshold()[0] and not _keeps_frozen:
                    _keeps_frozen = gc.get_freeze_count() >= _MOST_IMMORTAL
                    if not _keeps_frozen:
                        gc.freeze()
                        gc.unfreeze()
                gc.enable()


def drop_tracebacks(kind: type[BaseException]) -> None:
    """Of young exceptions of this kind, which are garbage or soon will be and which nobody is going to show.

    A traceback has frames, these their callers', and each frame what its variables hold.
    """
    for found in gc.get_objects(generation=0):
        if issubclass(type(found), kind):
            found.__traceback__ = None
