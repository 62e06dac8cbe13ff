"""`Op.bench`: a user's op beside eager, torch.compile and a copy of as many bytes, by the package's own benchmark."""

from __future__ import annotations

import dataclasses
import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fuseopt.build.library_cache import CacheError
from fuseopt.config_checks import nearest
from fuseopt.errors import OpError, shown
from fuseopt.extend import measured
from fuseopt.extend.inputs import by_table, resized
from fuseopt.extend.signature import tensors_of
from fuseopt.ops import registry
from fuseopt.runtime import measured_files

if TYPE_CHECKING:
    from fuseopt.extend.own_op import Op


def bench(
    op: Op,
    shapes: str | Sequence[str | Sequence[int]] = (),
    dtypes: Sequence[str] = (),
    *,
    device: str | torch.device | None = None,
    compile: bool | None = None,
    torch_op: Callable | None = None,
    remember: bool = True,
) -> Any:
    """See `Op.bench`."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise OpError(f"{op.name}: device {str(where)!r}, but torch sees no CUDA device; pass device='cpu'")
    # By name: benchmarks stand above this package, which imports nothing of them.
    suite = importlib.import_module("fuseopt.bench.suites.ops")
    for name in dtypes:
        if name not in suite.DTYPES:
            hint = nearest(str(name), suite.DTYPES)
            raise OpError(f"{op.name}: no dtype {shown(name)}; {hint}known: {', '.join(suite.DTYPES)}")
    first = next(tensors_of(next(op.sample_arguments(torch.device("meta"), torch.float32))))
    given = [shapes] if isinstance(shapes, str) else shapes or [first.shape]
    named = tuple(shape if isinstance(shape, str) else "x".join(map(str, shape)) for shape in given)
    for shape in named:
        if len(shape.split("x")) != first.dim() or not all(part.isdigit() for part in shape.split("x")):
            raise OpError(
                f"{op.name}: the shape {shape!r} must have {first.dim()} sizes, as the first tensor of its samples "
                f"has, such as {'x'.join(map(str, first.shape))!r}"
            )

    def make(device: torch.device, dtype: torch.dtype, *sizes: int) -> registry.SampleInput:
        sample = next(op.sample_arguments(device, dtype))
        arguments = resized(sample, by_table(dict(zip(first.shape, sizes, strict=True))))
        for tensor in tensors_of(arguments):
            tensor.requires_grad_(tensor.is_floating_point())
        return registry.SampleInput(arguments)

    entry = registry.get(op.name)
    has_flops = op.operations(next(op.sample_arguments(torch.device("meta"), torch.float32)), False) is not None
    benchmark = registry.Benchmark(
        make, shapes=named, eager=op.function, torch=torch_op, flops=op.operations if has_flops else None
    )
    registry.unregister(op.name)
    registry.register(dataclasses.replace(entry, benchmarks=(benchmark,)))
    try:
        results = suite.run(device=where, ops=[op.name], dtypes=dtypes, shapes=["all"], compile=compile)
    finally:
        registry.unregister(op.name)
        registry.register(entry)
    if remember and measured_files.is_wanted():
        _remember(op, where.type, results)
    if not has_flops:
        return results
    roofline = importlib.import_module("fuseopt.bench.harness.roofline")
    peaks = roofline.peaks(where, [suite.DTYPES[name] for name in dtypes or suite.DEFAULT_DTYPES])
    return dataclasses.replace(results, rows=(*results.rows, *peaks))


def _remember(op: Op, device: str, results: Any) -> None:
    """Keep the times of the op's backends for "auto"."""
    own = {backend.name for backend in registry.get(op.name).backends}
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in results.rows:
        if row.milliseconds is not None and row.variant in own:
            case, shape, dtype = row.case.split(", ")
            found.setdefault((shape, dtype, case[-3:]), {})[row.variant] = 1000 * row.milliseconds[1]
    times: dict[measured.Key, dict[str, float]] = {}
    for (shape, dtype, direction), forward in found.items():
        if direction == "fwd":
            elements = measured.size_class(math.prod(map(int, filter(None, shape.split("x")))))
            times[f"torch.{dtype}", elements, False] = forward
            backward = found.get((shape, dtype, "bwd"), {})
            both = {name: forward[name] + backward[name] for name in forward if name in backward}
            times[f"torch.{dtype}", elements, True] = both
    try:
        op.calls = op.calls.remember(device, times)
    except (CacheError, OSError) as error:
        warnings.warn(f"fuseopt: the times of {op.name} are not kept for 'auto': {error}", stacklevel=4)
