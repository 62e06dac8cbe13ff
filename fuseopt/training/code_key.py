"""Hash of the code that decides what fuseopt compiles, part of the key of Inductor's cache on disk.

Graph passes, autograd functions, fakes and decompositions of ops are in two folders, and every file there counts. A
list of the files that matter could miss one, and code compiled before a change would run after it.
"""

from pathlib import Path

from torch._inductor.custom_graph_pass import get_hash_for_files

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("blocks", "modules", "ops", "runtime", "training")


def code_key(extra: str = "") -> bytes:
    """A hash of every Python file in the folders, and of `extra`."""
    files = sorted(str(path) for folder in _FOLDERS for path in (_PACKAGE / folder).rglob("*.py"))
    return get_hash_for_files(tuple(files), extra=extra)
