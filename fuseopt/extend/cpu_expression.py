"""C++ kernels of elementwise expressions: written from the expression's tree, compiled on the first use, and loaded.

`fuseopt/csrc/cpu/expression.h` runs them over tensors that broadcast.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuseopt.build import library_cache, toolchain
from fuseopt.errors import NativeBuildError
from fuseopt.extend.expression import OPERATIONS, Node, derivatives, parse
from fuseopt.extend.own_library import Missing, library_of
from fuseopt.extend.written_expression import Language, written_lines

_NAMESPACE = "fuseopt_expressions"
_SPECIAL = {
    "inf": "std::numeric_limits<Math>::infinity()",
    "-inf": "-std::numeric_limits<Math>::infinity()",
    "nan": "std::numeric_limits<Math>::quiet_NaN()",
}


def _operation(kind: str) -> str:
    """Infix operators are those of Triton; functions have their names in expression_math.h."""
    if kind == "where":
        return "({0} ? {1} : {2})"
    written = OPERATIONS[kind].triton
    if kind == "neg" or (written.startswith("({0} ") and written.endswith(" {1})") and written.count(" ") == 2):
        return written
    operands = {"clamp": 3, "min": 2, "max": 2, "pow": 2}.get(kind, 1)
    return f"expression::{kind}({', '.join(f'{{{place}}}' for place in range(operands))})"


CPP = Language(
    _operation,
    lambda value: f"static_cast<Math>({value!r})",
    lambda value: _SPECIAL[str(value)],
    "const auto {0} = {1};",
)


def source(expression: str, tensors: Sequence[str], scalars: Sequence[str], digest: str) -> str:
    """The C++ of an expression, which registers `forward_<digest>` and `backward_<digest>`."""
    tree = parse(expression)
    held = {name: f"x{place}" for place, name in enumerate(tensors)}
    held |= {name: f"s{place}" for place, name in enumerate(scalars)}
    found = derivatives(tree, tensors)
    slopes = [
        Node("mul", None, (Node("input", "grad of the result"), found[name] or Node("number", 0.0))) for name in tensors
    ]
    count, factors = len(tensors), len(scalars)
    parameters = [f"const Tensor& x{i}" for i in range(count)] + [f"double s{i}" for i in range(factors)]
    pointers = ", ".join(f"&x{i}" for i in range(count))
    values = f"std::array<double, {factors}>{{{', '.join(f's{i}' for i in range(factors))}}}"
    grads = f"backward<Backward>({{{pointers}, &grad}}, {values}, needed, sums_here)"
    places = f"std::make_index_sequence<{count}>()"
    return "\n".join(
        [
            '#include "cpu/expression.h"',
            "#include <torch/csrc/stable/library.h>",
            "namespace fuseopt::expression {",
            "namespace {",
            _function("Forward", [tree], held, count, factors),
            _function("Backward", slopes, held | {"grad of the result": f"x{count}"}, count + 1, factors),
            f"Tensor run_forward({', '.join(parameters)}) {{ return forward<Forward>({{{pointers}}}, {values}); }}",
            f"auto run_backward({', '.join(parameters)}, const Tensor& grad, int64_t needed, bool sums_here) {{",
            f"  return {grads}[0];" if count == 1 else f"  return as_tuple({grads}, {places});",
            "}",
            "}  // namespace",
            "}  // namespace fuseopt::expression",
            f"STABLE_TORCH_LIBRARY_IMPL({_NAMESPACE}, CPU, library) {{",
            f'  library.impl("forward_{digest}", TORCH_BOX(&fuseopt::expression::run_forward));',
            f'  library.impl("backward_{digest}", TORCH_BOX(&fuseopt::expression::run_backward));',
            "}",
            "",
        ]
    )


def _function(name: str, nodes: Sequence[Node], held: dict[str, str], tensors: int, scalars: int) -> str:
    lines, results = written_lines(nodes, held, CPP)
    body = [
        *(f"const Math* __restrict p{i} = inputs[{i}];" for i in range(tensors)),
        *(f"const Math s{i} = scalars[{i}];" for i in range(scalars)),
        *(f"Math* __restrict y{i} = outputs[{i}];" for i in range(len(results))),
        "#pragma omp simd",
        "for (int64_t i = 0; i < n; ++i) {",
        *(f"  const Math x{i} = p{i}[i];" for i in range(tensors)),
        *(f"  {line}" for line in lines),
        *(f"  y{i}[i] = {result};" for i, result in enumerate(results)),
        "}",
    ]
    return "\n".join(
        [
            f"struct {name} {{",
            f"  static constexpr int kInputs = {tensors}, kScalars = {scalars}, kOutputs = {len(results)};",
            "  template <typename Math>",
            "  static void compute(int64_t n, const Math* const* inputs, const Math* scalars, Math* const* outputs) {",
            *(f"    {line}" for line in body),
            "  }",
            "};",
        ]
    )


class Kernels(NamedTuple):
    """The kernels of one expression.

    Attributes:
        run_forward: (*tensors, *scalars) -> the expression, contiguous, in the promoted dtype.
        run_backward: (*tensors, *scalars, gradient of the result, a bit for each gradient that is needed, whether to
            sum gradients of tensors that broadcast) -> a flat gradient for each, or an unsummed one.
    """

    run_forward: Callable
    run_backward: Callable

    def backward(
        self,
        tensors: Sequence[Tensor],
        scalars: Sequence[float],
        grad_output: Tensor,
        needed: Sequence[bool],
        reduce_grad: bool,
    ) -> list[Tensor | None]:
        """The gradient of each tensor that needs one. The same inputs give the same bits, on any number of threads."""
        if grad_output.numel() == 0:
            return [None] * len(tensors)
        bits = sum(1 << place for place, needs in enumerate(needed) if needs)
        found = self.run_backward(*tensors, *map(float, scalars), grad_output, bits, reduce_grad)
        pairs = zip((found,) if isinstance(found, Tensor) else found, tensors, needed, strict=True)
        return [
            None if not needs else g.view(t.shape) if g.numel() == t.numel() else g.sum_to_size(t.shape)
            for g, t, needs in pairs
        ]


class Operations(NamedTuple):
    """The raw ops of an expression in `torch.ops`, which its library registers when it is loaded."""

    digest: str
    forward: OpOverload
    backward: OpOverload


_lock = threading.Lock()
_library: torch.library.Library | None = None


@functools.cache
def operations_of(expression: str, tensors: tuple[str, ...], scalars: tuple[str, ...]) -> Operations:
    """The raw ops of an expression, which no library needs to have registered yet."""
    global _library
    digest = hashlib.sha256(repr((expression, tensors, scalars)).encode()).hexdigest()[:16]
    listed = ", ".join(
        [*(f"Tensor {x}" for x in _numbered("x", tensors)), *(f"float {s}" for s in _numbered("s", scalars))]
    )
    grads = ", ".join(["Tensor"] * len(tensors))
    with _lock:
        if _library is None:
            _library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        _library.define(f"forward_{digest}({listed}) -> Tensor")
        _library.define(f"backward_{digest}({listed}, Tensor grad, int needed, bool sums_here) -> ({grads})")
    namespace = getattr(torch.ops, _NAMESPACE)
    return Operations(digest, *(getattr(namespace, f"{way}_{digest}").default for way in ("forward", "backward")))


def _numbered(letter: str, names: Sequence[str]) -> list[str]:
    return [f"{letter}{place}" for place in range(len(names))]


def kernels_of(
    name: str, expression: str, tensors: tuple[str, ...], scalars: tuple[str, ...], *, may_build: bool = True
) -> Kernels | str:
    """The kernels of an expression; or why there are none.

    Args:
        name: of the op, for the line about the compilation.
        may_build: whether to compile them if they are not in the cache.
    """
    operations = operations_of(expression, tensors, scalars)
    find = _kernels_of if may_build else _kernels_of.__wrapped__  # not cached: the library may be there later
    with _lock:
        return find(name, expression, tensors, scalars, operations, may_build)


@functools.cache
def _kernels_of(
    name: str,
    expression: str,
    tensors: tuple[str, ...],
    scalars: tuple[str, ...],
    operations: Operations,
    may_build: bool,
) -> Kernels | str:
    try:
        recipe = toolchain.cpu_recipe()
        library = library_of(
            name,
            source(expression, tensors, scalars, operations.digest),
            "cpu",
            file=f"{name.partition('::')[2]}.cpp",
            recipe=recipe,
            # Without it a square root is a call, which is not vectorised.
            command=(*recipe.compile_commands[".cpp"], "-fno-math-errno"),
            beside=(toolchain.CSRC / "cpu" / "rows.cpp", toolchain.CSRC / "cpu" / "convert.cpp"),
            may_build=may_build,
        )
        torch.ops.load_library(library)
    except (Missing, toolchain.ToolchainError, library_cache.CacheError, NativeBuildError, OSError) as error:
        return f"its C++ is not built: {error}"
    return Kernels(operations.forward._op, operations.backward._op)
