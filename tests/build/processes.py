"""Other processes on the sources and the cache of a test."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from fuseopt.build import prebuilt


def compilations(log: Path) -> int:
    return sum(" -c " in line for line in log.read_text().splitlines())


def start_process(csrc: Path, statement: str, **options: Any) -> subprocess.Popen:
    """A fresh Python on the same sources, environment and cache."""
    code = f"""
from pathlib import Path
from fuseopt.build import loader, prebuilt, toolchain
toolchain.CSRC = Path({str(csrc)!r})
prebuilt.FOLDER = Path({str(prebuilt.FOLDER)!r})
{statement}
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], text=True, **pipes, **options)


def output_of(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()
