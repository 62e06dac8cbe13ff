"""`fuseopt.elementwise`: an op from an expression, with kernels for both directions that are written from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuseopt.build import loader
from fuseopt.errors import OpError
from fuseopt.extend import cpu_expression
from fuseopt.extend.backends import Kernel
from fuseopt.extend.expression import computed, inputs_of, operations, parse
from fuseopt.extend.launches import PreparedLaunch, as_list, launches_by
from fuseopt.extend.own_op import Op
from fuseopt.extend.signature import check_name
from fuseopt.ops.library import TRITON_INTERPRETED, compute_dtype

_TAKES = (torch.float32, torch.float16, torch.bfloat16)
# On a CPU, smaller calls do not start a compilation.
_ELEMENTS_FOR_CPP = 16384


def elementwise(name: str, expression: str, scalars: Sequence[str] = (), *, reduce_grad: bool = True) -> Op:
    """An op that computes an elementwise expression of tensors, which broadcast, in float32 with one rounding.

    It is called with the tensors in the order in which they first appear, and the scalars by keyword. The result has
    the tensors' promoted dtype. A comparison is 1 or 0 where a number belongs.

    On a GPU, one Triton kernel runs each direction; if a tensor is float64, PyTorch runs both in float64. On a CPU, a
    C++ kernel runs each direction, in float64 if a tensor is float64. It is compiled once per machine, in seconds, and
    a line on stderr says so. The first eager call that has a tensor of at least 16384 elements, or names
    `backend="cpu"`, compiles it. PyTorch runs smaller calls until then, smaller calls with a gradient, calls under
    torch.compile, and all calls without a C++ compiler or with FUSEOPT_NO_BUILD.

    The op has samples: tensors of one shape, and one of them a row; `samples` gives others. For `bench`, each operation
    and each function of the expression counts as one floating-point operation.

    Args:
        name: "namespace::name", in a namespace of your own.
        expression: of `+ - * / **`, comparisons, numbers, names, and where, min, max, relu, gelu, gelu_tanh, silu,
            sigmoid, tanh, exp, log, sqrt, abs, softplus, erf, clamp.
        scalars: the names that are Python numbers, without gradient; the others are tensors.
        reduce_grad: sum the gradient of a tensor that broadcasts over rows inside the backward kernel, a share of the
            rows each, without atomics; False writes the unsummed gradient and leaves the sum to torch.

    Raises:
        OpError: the expression has something else in it, or a scalar does not appear.
    """
    check_name(name)
    tree = parse(expression)
    names = list(inputs_of(tree))
    scalars = (scalars,) if isinstance(scalars, str) else tuple(dict.fromkeys(scalars))
    absent = [scalar for scalar in scalars if scalar not in names]
    if absent:
        raise OpError(f"{name}: the scalar {absent[0]!r} is not in {expression!r}")
    tensors = [each for each in names if each not in scalars]
    if not tensors:
        raise OpError(f"{name}: {expression!r} has no tensor; all of its names are scalars")
    if "backend" in names:
        raise OpError(f"{name}: an argument cannot be called 'backend', by which a call names one; rename it")

    def compute(*arguments: Any) -> Tensor:
        present = arguments[: len(tensors)]
        dtype, result = compute_dtype(*present), present[0].dtype
        for tensor in present[1:]:
            if tensor.dtype != result:
                result = torch.promote_types(result, tensor.dtype)
        wide = [t.to(dtype) if t.dtype != dtype and t.is_floating_point() else t for t in present]
        values = dict(zip((*tensors, *scalars), (*wide, *arguments[len(tensors) :]), strict=True))
        output: Tensor = computed(tree, values, dtype, present[0].device)
        return output if output.dtype == result else output.to(result)

    op = Op(name, _annotated(name, expression, compute, tensors, scalars))
    kernels = _Kernels(expression, tuple(tensors), tuple(scalars), reduce_grad)
    op.add_kernel(Kernel("triton", kernels.forward, kernels.takes, launches=kernels.launches))
    op.backward("triton")(kernels.backward)
    compiled = _CppKernels(name, expression, tuple(tensors), tuple(scalars), reduce_grad)
    op.add_kernel(Kernel("cpu", compiled.forward, compiled.takes, in_eager=compiled.is_worth_it, raw=compiled.raw))
    op.backward("cpu")(compiled.backward)
    forward, backward = operations(tree, tensors)

    def elements(*arguments: Any) -> int:
        return torch.broadcast_shapes(*(tensor.shape for tensor in arguments[: len(tensors)])).numel()

    op.flops(lambda *given: forward * elements(*given), lambda *given: backward * elements(*given))
    op.samples(_Samples(compute, len(tensors), len(scalars)))
    return op


class _Samples:
    """Samples of an expression: tensors of one shape, then the last of them a row, and different scalars."""

    def __init__(self, compute: Callable, tensors: int, scalars: int) -> None:
        self._compute, self._tensors = compute, tensors
        self._scalars = [0.5 + 0.25 * place for place in range(scalars)]

    def __call__(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
        low, high = self._range
        for last in ((8, 768), (768,))[: self._tensors]:
            shapes = [(8, 768)] * (self._tensors - 1) + [last]
            drawn = [torch.empty(shape, device=device).uniform_(low, high).to(dtype) for shape in shapes]
            yield (*drawn, *self._scalars)

    @functools.cached_property
    def _range(self) -> tuple[float, float]:
        """Of the values: the first for which the result is finite, as that of a logarithm is not everywhere."""
        ranges = ((-2.0, 2.0), (0.5, 2.0), (0.1, 0.9))
        generator = torch.Generator().manual_seed(0)
        for low, high in ranges:
            shape = (self._tensors, 4096)
            drawn = torch.rand(shape, dtype=torch.float64, generator=generator) * (high - low) + low
            if self._compute(*drawn, *self._scalars).isfinite().all():
                return low, high
        return ranges[0]


def _annotated(
    name: str, expression: str, compute: Callable, tensors: Sequence[str], scalars: Sequence[str]
) -> Callable[..., Tensor]:
    """`compute` with an argument for each tensor and each scalar."""
    names = ", ".join([*tensors, *scalars])
    inner = "_" + "".join([*tensors, *scalars])  # which none of them is
    source = f"def made({inner}):\n    def op({names}):\n        return {inner}({names})\n    return op\n"
    # Names of no module: torch.compile looks its globals up in one of that name.
    short = name.partition("::")[2]
    namespace: dict[str, Any] = {"__name__": f"fuseopt_elementwise_{short}"}
    exec(compile(source, f"<elementwise {name}>", "exec"), namespace)
    function: Callable[..., Tensor] = namespace["made"](compute)
    function.__name__ = function.__qualname__ = short
    function.__annotations__ = {**dict.fromkeys(tensors, Tensor), **dict.fromkeys(scalars, float), "return": Tensor}
    function.__doc__ = f"`{expression}`"
    return function


class _Kernels:
    """The Triton kernels of an expression, written and imported on the first call."""

    def __init__(self, expression: str, tensors: tuple[str, ...], scalars: tuple[str, ...], reduce_grad: bool) -> None:
        self._description = (expression, tensors, scalars)
        self._tensors, self._reduce_grad = len(tensors), reduce_grad
        self.takes = self._takes  # one object, by which csrc/python knows that a prepared launch needs no answer of it
        self._backward_launches: Any = None

    @functools.cached_property
    def _triton(self) -> Any:
        from fuseopt.extend import triton_expression

        return triton_expression.kernels_of(*self._description)

    def launches(self, library: Any) -> Any:
        """The forward's launches by csrc/python; None in Triton's interpreter."""
        return self._launches_of(self._prepare_forward, library)

    def _launches_of(self, prepare: Callable[..., PreparedLaunch | None], library: Any) -> Any:
        if TRITON_INTERPRETED:
            return None
        from fuseopt.extend.triton_expression import has_launch_hooks

        return launches_by(library, prepare, supports=self.takes, is_watched=has_launch_hooks, as_floats=True)

    @functools.cached_property
    def _runs_here(self) -> bool:
        from fuseopt.extend import triton_expression

        return not TRITON_INTERPRETED or "libdevice." not in "".join(
            triton_expression.sources(*self._description).values()
        )

    def _takes(self, *arguments: Any) -> bool | str:
        """For `supports`."""
        tensors = arguments[: self._tensors]
        other = next((t.dtype for t in tensors if t.dtype not in _TAKES), None)
        if other is not None:
            return f"takes float32, float16 and bfloat16, not {other}"
        if any(tensor.device != tensors[0].device for tensor in tensors):
            return "takes tensors of one device"
        return self._runs_here or "Triton's interpreter has no pow"

    def forward(self, *arguments: Any) -> Tensor:
        return self._triton.forward(arguments[: self._tensors], arguments[self._tensors :])

    def _prepare_forward(self, *arguments: Any) -> PreparedLaunch | None:
        return self._triton.prepare_forward(arguments[: self._tensors], arguments[self._tensors :])

    def backward(self, inputs: Sequence[Any], output: Tensor, grad_output: Tensor) -> Sequence[Tensor]:
        tensors, scalars = inputs[: self._tensors], inputs[self._tensors :]
        grads: Any = NotImplemented
        if self._backward_launches is None and (library := loader.python_library()) is not None:
            self._backward_launches = self._launches_of(self._prepare_backward, library)
        if self._backward_launches is not None:
            grads = self._backward_launches(grad_output, *inputs)
        if grads is NotImplemented:
            return self._triton.backward(tensors, scalars, grad_output, self._reduce_grad)
        return self._triton.finished(tensors, grad_output, self._reduce_grad, as_list(grads))

    def _prepare_backward(self, grad_output: Tensor, *inputs: Any) -> PreparedLaunch | None:
        tensors, scalars = inputs[: self._tensors], inputs[self._tensors :]
        return self._triton.prepare_backward(tensors, scalars, grad_output, self._reduce_grad)


class _CppKernels:
    """The C++ kernels of an expression, compiled when a call first asks for them."""

    def __init__(
        self, name: str, expression: str, tensors: tuple[str, ...], scalars: tuple[str, ...], reduce_grad: bool
    ) -> None:
        self._description = (name, expression, tensors, scalars)
        self._tensors, self._reduce_grad = len(tensors), reduce_grad
        self._is_built: bool | None = None  # None: not yet known

    @property
    def raw(self) -> OpOverload:
        """The raw op that `forward` calls."""
        return cpu_expression.operations_of(*self._description[1:]).forward

    @functools.cached_property
    def _kernels(self) -> Any:
        kernels = cpu_expression.kernels_of(*self._description)
        self._is_built = not isinstance(kernels, str)
        return kernels

    def is_worth_it(self, *arguments: Any) -> bool | str:
        """For `in_eager`: a small call does not wait for a compilation, and PyTorch computes its backward faster."""
        tensors = arguments[: self._tensors]
        if self._is_built is None:
            self._is_built = not isinstance(cpu_expression.kernels_of(*self._description, may_build=False), str)
        if self._is_built and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return True
        is_large = any(tensor.numel() >= _ELEMENTS_FOR_CPP for tensor in tensors)
        return is_large or (
            f"below {_ELEMENTS_FOR_CPP} elements it runs if already compiled and without gradient, or if it is named"
        )

    def takes(self, *arguments: Any) -> bool | str:
        """For `supports`."""
        for tensor in arguments[: self._tensors]:
            if not tensor.dtype.is_floating_point:
                return f"takes floating point tensors, not {tensor.dtype}"
        return self._kernels if isinstance(self._kernels, str) else True

    def forward(self, *arguments: Any) -> Tensor:
        return self._kernels.run_forward(*arguments)

    def backward(
        self, inputs: Sequence[Any], output: Tensor, grad_output: Tensor, needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        tensors, scalars = inputs[: self._tensors], inputs[self._tensors :]
        return self._kernels.backward(tensors, scalars, grad_output, needed, self._reduce_grad)
