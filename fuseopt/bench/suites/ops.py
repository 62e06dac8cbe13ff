"""`fuseopt bench ops`: every registered op at its sizes, beside other ways to compute it and a copy."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch

from fuseopt.bench.harness.measure import measure
from fuseopt.bench.harness.op_cases import OpCase, sample, tensors
from fuseopt.bench.harness.op_timing import time_op
from fuseopt.bench.harness.records import Results
from fuseopt.build import loader
from fuseopt.config_checks import in_lines, nearest
from fuseopt.errors import ConfigError
from fuseopt.ops import registry

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
DEFAULT_DTYPES = ("bfloat16", "float32")
# On a CPU the default sizes are those whose arguments have at most this many elements together.
CPU_ELEMENTS = 2**22


def run(
    *,
    device: torch.device,
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    shapes: Sequence[str] = (),
    compile: bool | None = None,
) -> Results:
    """Runs the benchmark; prints only progress.

    Args:
        ops: names of ops; by default all that have benchmarks.
        dtypes: names in `DTYPES`; by default "bfloat16" and "float32".
        shapes: names of sizes, or "all"; by default the ops' default sizes, on a CPU only small ones.
        compile: also time torch.compile. The default is True on CUDA; on a CPU it takes minutes.

    Raises:
        ConfigError: an unknown op or size; the message names the nearest known one.
    """
    cases = select(device, ops, dtypes or DEFAULT_DTYPES, shapes)
    for kind in loader.KINDS:
        if kind == device.type:
            loader.load(kind)
    compile = device.type == "cuda" if compile is None else compile
    records = measure(cases, functools.partial(time_op, device=device, compile=compile))
    return Results.measured_here("ops", records, unit="us")


def select(device: torch.device, ops: Sequence[str], dtypes: Sequence[str], shapes: Sequence[str]) -> list[OpCase]:
    """The cases for these names; see `run`."""
    benched = {name: op for name in registry.names() if (op := registry.get(name)).benchmarks}
    _check_known("op", ops, benched)
    chosen = [op for name, op in benched.items() if not ops or name in ops]
    known = {
        shape: None
        for op in chosen
        for benchmark in op.benchmarks
        for shape in (*benchmark.shapes, *benchmark.more_shapes)
    }
    _check_known("shape", [shape for shape in shapes if shape != "all"], known)
    return [case for op in chosen for case in _cases(op, device, dtypes, shapes)]


def _cases(op: registry.Op, device: torch.device, dtypes: Sequence[str], shapes: Sequence[str]) -> Iterator[OpCase]:
    for benchmark in op.benchmarks:
        for shape in (*benchmark.shapes, *benchmark.more_shapes):
            arguments = tensors(sample(benchmark, shape, torch.device("meta"), torch.float32))
            if shapes:
                wanted = "all" in shapes or shape in shapes
            elif device.type == "cuda":
                wanted = shape in benchmark.shapes
            else:
                wanted = sum(argument.numel() for argument in arguments) <= CPU_ELEMENTS
            if wanted:
                directions = (False, True) if any(argument.requires_grad for argument in arguments) else (False,)
                for dtype in dtypes:
                    for backward in directions:
                        yield OpCase(op, benchmark, shape, DTYPES[dtype], backward)


def _check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"no {what} named {name!r} is benchmarked; {nearest(name, known)}known:\n{in_lines(known)}"
            )
