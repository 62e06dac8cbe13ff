"""`paused`: turns off Python's garbage collector while a step is compiled or a CUDA graph is captured."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Python 3.12 counts its immortal objects, some hundreds, as frozen. After `gc.freeze()` in a process that has imported
# torch, the count is far higher.
_MOST_IMMORTAL = 10_000

_lock = threading.Lock()
_inside = 0
_was_enabled = False
_keeps_frozen = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Disables garbage collection until the last thread has left the context.

    The collector is shared by all threads. On exit, objects made inside are moved to the oldest generation, so that no
    collection of the young generation starts at once. If the process has frozen objects itself (`gc.freeze`), they
    stay frozen, and that collection runs.
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
                # `get_freeze_count` walks all frozen objects, so it is called only if a collection is due, and no more
                # once the process is known to freeze objects.
                if gc.get_count()[0] > gc.get_threshold()[0] and not _keeps_frozen:
                    _keeps_frozen = gc.get_freeze_count() >= _MOST_IMMORTAL
                    if not _keeps_frozen:
                        gc.freeze()
                        gc.unfreeze()
                gc.enable()


def drop_tracebacks(kind: type[BaseException]) -> None:
    """Removes the tracebacks of young exceptions of this class.

    A traceback keeps its frames and their callers' frames alive, and with them all local variables, such as tensors.
    """
    for found in gc.get_objects(generation=0):
        if issubclass(type(found), kind):
            found.__traceback__ = None
