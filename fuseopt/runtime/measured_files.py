"""What was measured on this machine, as JSON files in the cache folder, under its rules for owners, modes and digests.

The name of a file is a digest of the device, the versions of torch and fuseopt, and what was measured. So another GPU,
or another version, finds none. With FUSEOPT_MEASURED=0 none is read or written.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fuseopt._version import __version__
from fuseopt.build import library_cache


def is_wanted() -> bool:
    """Whether times are kept and read: FUSEOPT_MEASURED is not 0."""
    return os.environ.get("FUSEOPT_MEASURED", "1") not in ("", "0")


def digest(device: str, parts: Iterable[str]) -> str:
    """The name of the file for what `parts` describe, on a device type ("cpu" or "cuda") of this machine."""
    found = hashlib.sha256(repr((device_name(device), torch.__version__, __version__)).encode())
    for part in parts:
        found.update(part.encode())
    return found.hexdigest()[:32]


def load(name: str) -> Mapping[str, Any] | None:
    """The content of a file; None if there is none, or if it must not be read or is not trusted."""
    if not is_wanted():
        return None
    try:
        file = _folder() / f"{name}.json"
        if not file.is_file() or library_cache.damage(file) is not None:
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
    except (library_cache.CacheError, OSError, ValueError):
        return None
    return content if isinstance(content, Mapping) else None


def save(name: str, content: Mapping[str, Any]) -> Path:
    """Writes a file, in place of an earlier one.

    Raises:
        library_cache.CacheError: the cache folder must not be used.
        OSError: it cannot be written.
    """
    folder = _folder()
    library_cache.create(folder)
    file = folder / f"{name}.json"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        written = Path(temporary) / file.name
        written.write_text(json.dumps(content), encoding="utf-8")
        library_cache.publish(written, file)
    return file


@functools.cache
def device_name(device: str) -> str:
    """The GPU, or the processor with the number of threads that torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a processor")
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' * (threads != 1)}"


def _folder() -> Path:
    return library_cache.folder() / "measured"
