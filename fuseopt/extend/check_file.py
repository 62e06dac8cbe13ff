"""`python -m fuseopt check FILE.py`: `fuseopt.check` of all ops of a file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

from fuseopt.errors import OpError
from fuseopt.extend.check_report import CheckReport, Row
from fuseopt.extend.checking import check
from fuseopt.extend.own_op import Op, registered


def check_file(file: Path, device: torch.device) -> list[CheckReport]:
    """`check` of each op that running a Python file registers.

    Raises:
        OpError: it registers none, or cannot be run; the error that it raised is chained.
    """
    before = registered()
    try:
        _import_file(file)
    except OpError:
        raise
    except Exception as error:
        raise OpError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    made = [op for name, op in registered().items() if op is not before.get(name)]
    if not made:
        raise OpError(f"{file} registers no op; it should have a function under @fuseopt.op('mine::name')")
    return [_checked(op, device) for op in made]


def _checked(op: Op, device: torch.device) -> CheckReport:
    try:
        return check(op, device=device)
    except Exception as error:  # of its samples: there are none, or the user's generator raises
        detail = str(error) if isinstance(error, OpError) else f"{type(error).__name__}: {error}"
        return CheckReport(op.name, str(device), (Row("-", "samples", "FAIL", detail),))


def _import_file(file: Path) -> None:
    """Run a file as a module that can be imported, which torch.compile needs of the functions in it."""
    name = f"fuseopt_checked_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise OpError(f"{file} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.resolve().parent))
