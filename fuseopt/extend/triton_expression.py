"""Triton kernels of elementwise expressions: written from the expression's tree, launched over tiles of a matrix."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from fuseopt.build import loader
from fuseopt.extend.expression import Node, derivatives, parse
from fuseopt.extend.launches import PreparedLaunch, launches_by
from fuseopt.extend.written_expression import TRITON, written_lines
from fuseopt.ops.library import TRITON_INTERPRETED
from fuseopt.ops.triton.elementwise import NUM_WARPS, PROGRAM_ELEMENTS
from fuseopt.ops.triton.launch import Launch
from fuseopt.ops.triton.rms_norm import column_sum_kernel
from fuseopt.ops.triton.rows import multiprocessor_count

# Programs a multiprocessor of a backward that sums over rows: enough to hide the latency of memory.
_PROGRAMS_A_MULTIPROCESSOR = 8
_FULL, _SUMMED = 1, 2
_KINDS_OF_CALLS = 1024  # that an expression keeps

_Call = TypeVar("_Call")

_HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice

from fuseopt.ops.library import TRITON_INTERPRETED
from fuseopt.ops.triton.elementwise import normal_cdf, normal_pdf, tile_places

"""


class Places(NamedTuple):
    """Tensors as matrices [rows, columns] of the broadcast shape.

    Attributes:
        shape: the broadcast shape.
        tensors: the tensors; where `is_copied`, contiguous copies in the broadcast shape.
        strides: (row stride, column stride) of each; 0 where it broadcasts.
        rows, columns: the matrix; its columns are the last `column_dims` dimensions of the shape.
    """

    shape: torch.Size
    tensors: list[Tensor]
    strides: list[tuple[int, int]]
    rows: int
    columns: int
    column_dims: int
    is_copied: bool


def places_of(tensors: Sequence[Tensor]) -> Places:
    """The tensors as matrices. Where no two strides describe them, all are copied."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    expanded = [tensor.expand(shape) for tensor in tensors]
    found = _matrix(shape, expanded)
    is_copied = found is None
    if found is None:
        expanded = [tensor.contiguous() for tensor in expanded]
        found = _matrix(shape, expanded)
        assert found is not None
    return Places(shape, expanded, *found, is_copied)


def _matrix(shape: torch.Size, tensors: Sequence[Tensor]) -> tuple[list[tuple[int, int]], int, int, int] | None:
    """(strides, rows, columns, dimensions in a row) if two strides describe all tensors, else None."""
    groups: list[list[int]] = []  # of dimensions, outermost first, that one stride describes
    for dim in range(len(shape)):
        if groups and (shape[dim] == 1 or all(_follows(t, groups[-1], dim) for t in tensors)):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    if len(groups) > 2:
        return None
    strides = [[_stride(tensor, group) for group in groups] for tensor in tensors]
    sizes = [torch.Size(shape[dim] for dim in group).numel() for group in groups]
    if len(groups) < 2:
        return [(0, sum(stride)) for stride in strides], 1, (sizes or [1])[0], len(shape)
    return [(row, column) for row, column in strides], sizes[0], sizes[1], len(groups[1])


def _follows(tensor: Tensor, group: Sequence[int], dim: int) -> bool:
    """Whether the stride of `dim` continues that of the dimensions before it."""
    last = next((d for d in reversed(group) if tensor.shape[d] > 1), None)
    return last is None or tensor.stride(last) == tensor.stride(dim) * tensor.shape[dim]


def _stride(tensor: Tensor, group: Sequence[int]) -> int:
    last = next((d for d in reversed(group) if tensor.shape[d] > 1), None)
    return 0 if last is None else tensor.stride(last)


def sources(expression: str, tensors: Sequence[str], scalars: Sequence[str]) -> Mapping[str, str]:
    """The text of the kernels `forward_kernel` and `backward_kernel`."""
    tree = parse(expression)
    held = {name: f"x{place}" for place, name in enumerate(tensors)} | {
        name: f"s{place}" for place, name in enumerate(scalars)
    }
    slopes = [derivatives(tree, tensors)[name] or Node("number", 0.0) for name in tensors]
    return {
        "forward_kernel": _forward_source(tree, held, len(tensors), len(scalars)),
        "backward_kernel": _backward_source(slopes, held, len(tensors), len(scalars)),
    }


def _parameters(pointers: Sequence[str], tensors: int, scalars: int) -> list[str]:
    """Pointers, the matrix, row and column strides in elements, and scalars: the order that `Launch` wants."""
    return [
        *(f"{name}_ptr" for name in pointers),
        *("rows", "columns", "column_tiles"),
        *(f"x{i}_{part}" for i in range(tensors) for part in ("row", "column")),
        *(f"s{i}" for i in range(scalars)),
    ]


def _load(i: int, column: str = "column", mask: str = "mask") -> str:
    place = f"row * x{i}_row + {column} * x{i}_column" if column == "column" else f"{column} * x{i}_column"
    return f"x{i} = tl.load(x{i}_ptr + {place}, mask={mask}, other=1.0).to(tl.float32)"


def _forward_source(tree: Node, held: Mapping[str, str], tensors: int, scalars: int) -> str:
    lines, (result,) = written_lines([tree], held, TRITON)
    parameters = _parameters(["output", *(f"x{i}" for i in range(tensors))], tensors, scalars)
    body = [
        "tile = tl.program_id(0)",
        "row, column, mask = tile_places("
        "tile // column_tiles, tile % column_tiles, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)",
        *map(_load, range(tensors)),
        *lines,
        f"tl.store(output_ptr + row * columns + column, {result}, mask=mask)",
    ]
    return _function("forward_kernel", parameters, [], body)


def _backward_source(slopes: Sequence[Node], held: Mapping[str, str], tensors: int, scalars: int) -> str:
    lines, results = written_lines(slopes, held, TRITON)
    pointers = [f"{kind}{i}" for kind in ("x", "g") for i in range(tensors)]
    parameters = _parameters(["grad", *pointers], tensors, scalars)
    body = [
        "share, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles",
        "row_tiles, shares = tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0) // column_tiles",
        "share_row, share_column, in_share = tile_places(share, column_tile, shares, columns, 1, BLOCK_COLUMNS)",
    ]
    for i in range(tensors):
        body += [
            f"if KIND{i} == {_SUMMED}:",
            f"    {_load(i, 'share_column', 'in_share')}",  # one row for all tiles
            f"    sum{i} = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)",
        ]
    # Programs take tiles in turn, so that those that run together read neighbouring memory.
    body.append("for row_tile in tl.range(share, row_tiles, shares):")
    inner = ["row, column, mask = tile_places(row_tile, column_tile, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)"]
    for i in range(tensors):
        inner += [f"if KIND{i} == {_FULL}:", f"    {_load(i)}"]
    inner += [
        "grad = tl.load(grad_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)",
        *lines,
    ]
    for i, result in enumerate(results):
        inner += [
            f"if KIND{i} == {_FULL}:",
            f"    tl.store(g{i}_ptr + row * columns + column, grad * {result}, mask=mask)",
            f"if KIND{i} == {_SUMMED}:",
            f"    sum{i} += tl.where(mask, grad * {result}, 0.0)",
        ]
    body += [f"    {line}" for line in inner]
    for i in range(tensors):
        body += [
            f"if KIND{i} == {_SUMMED}:",
            f"    total = tl.sum(sum{i}, axis=0, keep_dims=True)",
            f"    tl.store(g{i}_ptr + share_row * columns + share_column, total, mask=in_share)",
        ]
    return _function("backward_kernel", parameters, [f"KIND{i}" for i in range(tensors)], body)


def _function(name: str, parameters: Sequence[str], constants: Sequence[str], body: Sequence[str]) -> str:
    listed = [*parameters, *(f"{c}: tl.constexpr" for c in (*constants, "IS_HALF", "BLOCK_ROWS", "BLOCK_COLUMNS"))]
    lines = [
        "@triton.jit",
        f"def {name}(",
        *(f"    {each}," for each in listed),
        "):",
        *(f"    {each}" for each in body),
    ]
    return "\n".join(lines) + "\n"


class Kernels:
    """The kernels of one expression, and how they are launched."""

    def __init__(self, forward_kernel: Any, backward_kernel: Any) -> None:
        self._forward_kernel, self._backward_kernel = forward_kernel, backward_kernel
        # What calls with tensors of the same shapes, strides and dtypes share.
        self._forwards: dict[Any, _Forward] = {}
        self._backwards: dict[Any, _Backward] = {}

    def forward(self, tensors: Sequence[Tensor], scalars: Sequence[float]) -> Tensor:
        """The expression; contiguous, in the tensors' promoted dtype."""
        return self._forward(tensors)(tensors, scalars)

    def prepare_forward(self, tensors: Sequence[Tensor], scalars: Sequence[float]) -> PreparedLaunch | None:
        """How `forward(tensors, scalars)` is launched, for calls with tensors and scalars; None if by Triton only."""
        return self._forward(tensors).prepare(tensors, scalars)

    def backward(
        self, tensors: Sequence[Tensor], scalars: Sequence[float], grad_output: Tensor, reduce_grad: bool
    ) -> list[Tensor]:
        """The gradient of each tensor, in its shape and dtype. The same inputs give the same bits."""
        return self._backward(tensors, grad_output, reduce_grad)(tensors, scalars, grad_output)

    def prepare_backward(
        self, tensors: Sequence[Tensor], scalars: Sequence[float], grad_output: Tensor, reduce_grad: bool
    ) -> PreparedLaunch | None:
        """How the kernel of `backward` is launched, for calls with `grad_output`, tensors and scalars.

        None if only Triton can launch it. The results are what `finished` takes.
        """
        return self._backward(tensors, grad_output, reduce_grad).prepare(tensors, scalars, grad_output)

    def finished(
        self, tensors: Sequence[Tensor], grad_output: Tensor, reduce_grad: bool, grads: Sequence[Tensor]
    ) -> list[Tensor]:
        """What `backward` returns, of the results of its kernel."""
        if all(
            one.shape == tensor.shape and one.dtype == tensor.dtype for one, tensor in zip(grads, tensors, strict=True)
        ):
            return list(grads)
        return self._backward(tensors, grad_output, reduce_grad).finished(grads, tensors)

    def _forward(self, tensors: Sequence[Tensor]) -> _Forward:
        return _found(self._forwards, _key(tensors), lambda: _Forward(self._forward_kernel, tensors))

    def _backward(self, tensors: Sequence[Tensor], grad_output: Tensor, reduce_grad: bool) -> _Backward:
        key = (*_key(tensors), grad_output.dtype, reduce_grad)
        make = functools.partial(_Backward, self._backward_kernel, tensors, grad_output, reduce_grad)
        return _found(self._backwards, key, make)


def _key(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tensors[0].device, *[(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def _found(known: dict[Any, _Call], key: Any, make: Callable[[], _Call]) -> _Call:
    call = known.get(key)
    if call is None:
        if len(known) == _KINDS_OF_CALLS:
            known.clear()  # shapes without end: kept calls would only take memory
        call = known[key] = make()
    return call


class _Forward:
    """Forwards of tensors of one shape, layout and dtype each."""

    def __init__(self, kernel: Any, tensors: Sequence[Tensor]) -> None:
        at = places_of(tensors)
        self._shape, self._is_copied = at.shape, at.is_copied
        self._dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        rows, columns, constants = _tiles(at, self._dtype)
        self._launch = Launch(kernel, (rows * columns,), (at.rows, at.columns, columns, *_flat(at)), constants)

    def __call__(self, tensors: Sequence[Tensor], scalars: Sequence[float]) -> Tensor:
        output = self._output(tensors)
        if output.numel():
            if self._is_copied:
                tensors = places_of(tensors).tensors
            with torch.cuda.device_of(output):
                self._launch(output, *tensors, floats=[*map(float, scalars)])
        return output

    def prepare(self, tensors: Sequence[Tensor], scalars: Sequence[float]) -> PreparedLaunch | None:
        output = self._output(tensors)
        if self._is_copied or not output.numel():
            return None
        inputs, floats = dict(enumerate(tensors)), dict(enumerate(map(float, scalars), len(tensors)))
        return _prepared(self._launch, {len(inputs) + len(floats): output, **inputs}, floats, [output], [])

    def _output(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=tensors[0].device)


class _Backward:
    """Backwards of tensors of one shape, layout and dtype each."""

    def __init__(self, kernel: Any, tensors: Sequence[Tensor], grad_output: Tensor, reduce_grad: bool) -> None:
        at = self._at = places_of(tensors)._replace(tensors=[])
        rows, columns, constants = _tiles(at, grad_output.dtype)
        self._kinds = [_SUMMED if reduce_grad and at.rows > 1 and _is_one_row(t, at) else _FULL for t in tensors]
        self._shares = rows
        if _SUMMED in self._kinds:
            programs = _PROGRAMS_A_MULTIPROCESSOR * multiprocessor_count(grad_output.device)
            self._shares = min(rows, max(programs // max(columns, 1), 1))
        constants |= {f"KIND{place}": kind for place, kind in enumerate(self._kinds)}
        self._launch = Launch(kernel, (self._shares * columns,), (at.rows, at.columns, columns, *_flat(at)), constants)

    def __call__(self, tensors: Sequence[Tensor], scalars: Sequence[float], grad_output: Tensor) -> list[Tensor]:
        if grad_output.numel() == 0:
            return [torch.zeros_like(tensor) for tensor in tensors]
        grads = self._grads(tensors)
        inputs = places_of(tensors).tensors if self._at.is_copied else tensors
        with torch.cuda.device_of(grad_output):
            self._launch(grad_output.contiguous(), *inputs, *grads, floats=[*map(float, scalars)])
        return self.finished(grads, tensors)

    def finished(self, grads: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the tensors, of what the kernel writes."""
        with torch.cuda.device_of(grads[0]):
            return [_reduced(*each, self._at) for each in zip(grads, self._kinds, tensors, strict=True)]

    def prepare(
        self, tensors: Sequence[Tensor], scalars: Sequence[float], grad_output: Tensor
    ) -> PreparedLaunch | None:
        if self._at.is_copied or not grad_output.numel():
            return None
        grads = self._grads(tensors)
        inputs = dict(enumerate([grad_output.contiguous(), *tensors]))
        floats = dict(enumerate(map(float, scalars), len(inputs)))
        outputs = dict(enumerate(grads, len(inputs) + len(floats)))
        return _prepared(self._launch, {**inputs, **outputs}, floats, grads, [0])

    def _grads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialised memory for what the kernel writes."""
        return [self._room(tensor, kind) for tensor, kind in zip(tensors, self._kinds, strict=True)]

    def _room(self, tensor: Tensor, kind: int) -> Tensor:
        if kind == _SUMMED:
            return tensor.new_empty((self._shares, self._at.columns), dtype=torch.float32)
        is_whole = tensor.shape == self._at.shape
        return tensor.new_empty(self._at.shape, dtype=tensor.dtype if is_whole else torch.float32)


def _prepared(
    launch: Launch,
    tensors: Mapping[int, Tensor],
    floats: Mapping[int, float],
    results: Sequence[Tensor],
    contiguous: list[int],
) -> PreparedLaunch | None:
    """How a kernel is launched that takes `tensors` and `floats`, by their places in a call."""
    with torch.cuda.device_of(results[0]):
        loaded = launch.loaded(tensors, floats)
    if loaded is None:
        return None
    shapes = [(tuple(result.shape), result.dtype) for result in results]
    block = (loaded.threads, 1, 1)
    return PreparedLaunch(
        loaded.function, launch.grid, block, loaded.shared, shapes, loaded.parameters, contiguous, loaded.kernel
    )


def has_launch_hooks() -> bool:
    """Whether something, such as a profiler, has hooks that Triton calls at each launch."""
    hooks = triton.knobs.runtime
    try:
        return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
    except AttributeError:  # of another version
        return True


def _is_one_row(tensor: Tensor, at: Places) -> bool:
    """Whether it broadcasts to all rows; an expanded tensor of several rows, whose row stride is 0 too, does not."""
    return tensor.shape[: max(tensor.dim() - at.column_dims, 0)].numel() == 1


def _reduced(grad: Tensor, kind: int, tensor: Tensor, at: Places) -> Tensor:
    if kind == _SUMMED:
        is_row = tensor.numel() == at.columns
        grad = _column_sum(grad, tensor if is_row else grad[0])
        if not is_row:
            dims = len(at.shape) - at.column_dims
            grad = grad.view([*(1 for _ in range(dims)), *at.shape[dims:]])
    return grad.sum_to_size(tensor.shape).to(tensor.dtype)


def _column_sum(grad: Tensor, row: Tensor) -> Tensor:
    """The sum over the rows of `grad` [rows, columns], in the shape and dtype of `row`, which has as many columns."""
    library = None if TRITON_INTERPRETED or grad.is_meta else loader.python_library()
    total = NotImplemented if library is None else _column_sums(library)(grad, row)
    if total is NotImplemented:
        total = row.new_empty(row.shape)
        _sum_launch(grad)(grad, total)
    return total


@functools.cache
def _column_sums(library: Any) -> Any:
    """The `Launches` of `_column_sum`."""
    return launches_by(library, _prepare_column_sum, is_watched=has_launch_hooks, as_floats=True)


def _prepare_column_sum(grad: Tensor, row: Tensor) -> PreparedLaunch | None:
    total = row.new_empty(row.shape)
    return _prepared(_sum_launch(grad), {0: grad, 2: total}, {}, [total], [])


def _sum_launch(grad: Tensor) -> Launch:
    rows, columns = grad.shape
    constants = {"BLOCK_ROWS": 256, "BLOCK_COLUMNS": 16, "num_warps": 8, "enable_fp_fusion": True}
    return Launch(column_sum_kernel, (triton.cdiv(columns, 16),), (rows, columns), constants)


def _flat(at: Places) -> list[int]:
    return [stride for pair in at.strides for stride in pair]


def _tiles(at: Places, dtype: torch.dtype) -> tuple[int, int, dict[str, int]]:
    """(tiles of rows, tiles of columns, the constants of kernels for results of `dtype`)."""
    block_columns = min(triton.next_power_of_2(max(at.columns, 1)), PROGRAM_ELEMENTS)
    block_rows = PROGRAM_ELEMENTS // block_columns
    constants = {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns, "num_warps": NUM_WARPS}
    constants["IS_HALF"] = dtype.itemsize == 2
    return triton.cdiv(at.rows, block_rows), triton.cdiv(at.columns, block_columns), constants


@functools.cache
def _folder() -> Path:
    """A folder of this process, for the files that Triton reads the kernels' text from."""
    folder = tempfile.mkdtemp(prefix="fuseopt-elementwise-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def kernels_of(expression: str, tensors: tuple[str, ...], scalars: tuple[str, ...]) -> Kernels:
    """The kernels of an expression."""
    text = _HEADER + "\n\n".join(sources(expression, tensors, scalars).values())
    path = _folder() / f"expression_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Kernels(module.forward_kernel, module.backward_kernel)
