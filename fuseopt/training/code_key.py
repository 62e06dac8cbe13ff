"""Hash of the code that decides what fuseopt compiles; part of the key of Inductor's disk cache.

Graph passes, autograd functions, fakes, decompositions and tuned numbers are in a few folders. Every file in them is
hashed. A hand-written list could miss a file, and then code compiled before a change would still run after it.
"""

from pathlib import Path

from torch._inductor.custom_graph_pass import get_hash_for_files

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("blocks", "modules", "ops", "runtime", "training", "tuning")


def code_key(extra: str = "") -> bytes:
    """Hash of every file in the folders, data files included, and of `extra`."""
    found = (path for folder in _FOLDERS for path in (_PACKAGE / folder).rglob("*") if path.is_file())
    files = sorted(str(path) for path in found if path.suffix != ".pyc")
    return get_hash_for_files(tuple(files), extra=extra)
