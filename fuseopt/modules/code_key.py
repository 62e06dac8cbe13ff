"""What decides how fuseopt has a graph compiled, for the key under which Inductor caches the result on disk.

Graph passes, autograd functions, the fakes and decompositions of ops: all of it is in two folders, whose files count
one and all. A list of those that matter would miss the next one, and code from before a change would run after it.
"""

from pathlib import Path

from torch._inductor.custom_graph_pass import get_hash_for_files

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("modules", "ops")


def code_key(extra: str = "") -> bytes:
    """A hash of every Python file in the folders, and of `extra`."""
    files = sorted(str(path) for folder in _FOLDERS for path in (_PACKAGE / folder).rglob("*.py"))
    return get_hash_for_files(tuple(files), extra=extra)
