"""An elementwise expression as a tree: parsed from text, computed by torch, and differentiated."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fuseopt.errors import OpError


@dataclass(frozen=True)
class Node:
    """One operation of an expression.

    Attributes:
        kind: "input", "number", or the name of an operation in OPERATIONS.
        value: an input's name or a number.
        of: what it is computed from.
    """

    kind: str
    value: Any = None
    of: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Operation:
    """One operation: by torch, in Triton, and its derivative.

    Attributes:
        torch: of tensors.
        triton: a format string of {0}, {1} ...
        gradient: (operands, result) -> the derivative by each operand, or None where it is zero.
    """

    torch: Callable
    triton: str
    gradient: Callable[..., tuple[Node | None, ...]]


def number(value: float) -> Node:
    return Node("number", float(value))


def _of(kind: str, *operands: Node) -> Node:
    """The operation, without what multiplies by one or adds zero."""
    if kind == "mul":
        for one, other in (operands, operands[::-1]):
            if one == number(1):
                return other
    if kind == "div" and all(operand.kind == "number" for operand in operands):
        return _simplified(kind, *operands)  # Triton does not divide the number 1 by the number 0
    return Node(kind, None, operands)


_ONE, _ZERO = number(1), number(0)


def _sign_where(condition: Node, yes: Node, no: Node) -> Node:
    return Node("where", None, (condition, yes, no))


def _gelu(x: Node, _: Node) -> tuple[Node]:
    return (_of("add", _of("normal_cdf", x), _of("mul", x, _of("normal_pdf", x))),)


def _gelu_tanh(x: Node, _: Node) -> tuple[Node]:
    # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
    square = _of("mul", x, x)
    twice = number(1.5957691216057308)
    inner = _of("mul", x, _of("add", twice, _of("mul", number(1.5957691216057308 * 0.044715), square)))
    slope = _of("add", twice, _of("mul", number(1.5957691216057308 * 0.134145), square))
    s = _of("sigmoid", inner)
    return (_of("add", s, _of("mul", x, _of("mul", slope, _sigmoid_slope(s)))),)


def _sigmoid_slope(s: Node) -> Node:
    return _of("mul", s, _of("sub", _ONE, s))


def _silu(x: Node, _: Node) -> tuple[Node]:
    s = _of("sigmoid", x)
    return (_of("add", s, _of("mul", x, _sigmoid_slope(s))),)


def _power(operands: Sequence[Node], y: Node) -> tuple[Node | None, ...]:
    # Zero, as torch has it, where the formula is 0 * inf or 0 * NaN.
    x, n = operands
    if n.kind == "number":
        return None if n.value == 0 else _of("mul", n, _of("pow", x, number(n.value - 1))), None
    by_x = _sign_where(_of("eq", n, _ZERO), _ZERO, _of("mul", n, _of("pow", x, _of("sub", n, _ONE))))
    by_n = _of("mul", y, _of("log", x))
    return by_x, _sign_where(_of("eq", x, _ZERO), _sign_where(_of("ge", n, _ZERO), _ZERO, by_n), by_n)


def _chosen(kind: str) -> Callable[..., tuple[Node, ...]]:
    def gradient(operands: Sequence[Node], _: Node) -> tuple[Node, ...]:
        # As torch.minimum and torch.maximum: each has half where they are equal, and all where one is NaN.
        a, b = operands
        shared = _sign_where(_of("eq", a, b), number(0.5), _ONE)
        return _sign_where(_of(kind, b, a), _ZERO, shared), _sign_where(_of(kind, a, b), _ZERO, shared)

    return gradient


def _unary(gradient: Callable[[Node, Node], Any]) -> Callable[..., tuple[Node | None, ...]]:
    def of_one(operands: Sequence[Node], y: Node) -> tuple[Node | None, ...]:
        found = gradient(operands[0], y)
        return found if isinstance(found, tuple) else (found,)

    return of_one


def _pair(a: Callable, b: Callable) -> Callable[..., tuple[Node | None, ...]]:
    return lambda operands, y: (a(*operands, y), b(*operands, y))


def _compared(symbol: str, function: Callable) -> Operation:
    return Operation(function, f"({{0}} {symbol} {{1}})", lambda operands, y: (None, None))


def _clamp_gradient(operands: Sequence[Node], _: Node) -> tuple[Node | None, ...]:
    x, low, high = operands
    inside = _sign_where(_of("ge", x, low), _sign_where(_of("le", x, high), _ONE, _ZERO), _ZERO)
    return inside, None, None


def _where_gradient(operands: Sequence[Node], _: Node) -> tuple[Node | None, ...]:
    return None, _sign_where(operands[0], _ONE, _ZERO), _sign_where(operands[0], _ZERO, _ONE)


OPERATIONS: Mapping[str, Operation] = {
    "add": Operation(lambda a, b: a + b, "({0} + {1})", _pair(lambda a, b, y: _ONE, lambda a, b, y: _ONE)),
    "sub": Operation(lambda a, b: a - b, "({0} - {1})", _pair(lambda a, b, y: _ONE, lambda a, b, y: number(-1))),
    "mul": Operation(lambda a, b: a * b, "({0} * {1})", _pair(lambda a, b, y: b, lambda a, b, y: a)),
    "div": Operation(
        lambda a, b: a / b,
        "({0} / {1})",
        _pair(lambda a, b, y: _of("div", _ONE, b), lambda a, b, y: _of("neg", _of("div", y, b))),
    ),
    "pow": Operation(lambda a, b: a**b, "libdevice.pow({0}, {1})", _power),
    "neg": Operation(lambda a: -a, "(-{0})", _unary(lambda x, y: number(-1))),
    "lt": _compared("<", lambda a, b: a < b),
    "le": _compared("<=", lambda a, b: a <= b),
    "gt": _compared(">", lambda a, b: a > b),
    "ge": _compared(">=", lambda a, b: a >= b),
    "eq": _compared("==", lambda a, b: a == b),
    "ne": _compared("!=", lambda a, b: a != b),
    "where": Operation(torch.where, "tl.where({0}, {1}, {2})", _where_gradient),
    "min": Operation(torch.minimum, "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", _chosen("lt")),
    "max": Operation(torch.maximum, "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", _chosen("gt")),
    "clamp": Operation(
        torch.clamp,
        "tl.minimum(tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL), {2}, propagate_nan=tl.PropagateNan.ALL)",
        _clamp_gradient,
    ),
    "relu": Operation(
        F.relu, "tl.where({0} <= 0, 0.0, {0})", _unary(lambda x, y: _sign_where(_of("le", x, _ZERO), _ZERO, _ONE))
    ),
    "gelu": Operation(F.gelu, "({0} * normal_cdf({0}, IS_HALF))", _unary(_gelu)),
    "normal_cdf": Operation(torch.special.ndtr, "normal_cdf({0}, IS_HALF)", _unary(lambda x, y: _of("normal_pdf", x))),
    "normal_pdf": Operation(
        lambda x: 0.3989422804014327 * torch.exp(-0.5 * x * x),
        "normal_pdf({0}, IS_HALF)",
        _unary(lambda x, y: _of("neg", _of("mul", x, y))),
    ),
    "gelu_tanh": Operation(
        lambda x: F.gelu(x, approximate="tanh"),
        "({0} * tl.sigmoid({0} * (1.5957691216057308 + 0.07135481282629625 * {0} * {0})))",
        _unary(_gelu_tanh),
    ),
    "silu": Operation(F.silu, "({0} * tl.sigmoid({0}))", _unary(_silu)),
    "sigmoid": Operation(torch.sigmoid, "tl.sigmoid({0})", _unary(lambda x, y: _sigmoid_slope(y))),
    "tanh": Operation(
        torch.tanh, "(2 * tl.sigmoid(2 * {0}) - 1)", _unary(lambda x, y: _of("sub", _ONE, _of("mul", y, y)))
    ),
    "exp": Operation(torch.exp, "tl.exp({0})", _unary(lambda x, y: y)),
    "log": Operation(torch.log, "tl.log({0})", _unary(lambda x, y: _of("div", _ONE, x))),
    "sqrt": Operation(torch.sqrt, "tl.sqrt({0})", _unary(lambda x, y: _of("div", number(0.5), y))),
    "abs": Operation(
        torch.abs,
        "tl.abs({0})",
        _unary(
            lambda x, y: _sign_where(_of("gt", x, _ZERO), _ONE, _sign_where(_of("lt", x, _ZERO), number(-1), _ZERO))
        ),
    ),
    # log(1 + exp(x)), which does not overflow.
    "softplus": Operation(
        F.softplus, "(tl.maximum({0}, 0.0) + tl.log(1 + tl.exp(-tl.abs({0}))))", _unary(lambda x, y: _of("sigmoid", x))
    ),
    "erf": Operation(
        torch.erf,
        "tl.erf({0})",
        _unary(lambda x, y: _of("mul", number(1.1283791670955126), _of("exp", _of("neg", _of("mul", x, x))))),
    ),
}

_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
_COMPARED = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
_ARGUMENTS = {"where": 3, "clamp": 3, "min": 2, "max": 2}
# What Python's operators do with two numbers as torch does, and what torch's functions take tensors alone for.
_OF_NUMBERS = ("add", "sub", "mul", "neg", *_COMPARED.values())
_OF_TENSORS = ("where", "min", "max")
_OF_DERIVATIVES = ("normal_cdf", "normal_pdf")
FUNCTIONS = tuple(
    name for name in OPERATIONS if name not in (*_BINARY.values(), *_COMPARED.values(), "neg", *_OF_DERIVATIVES)
)


def parse(text: str) -> Node:
    """The tree of an expression of + - * / **, comparisons, numbers, names and FUNCTIONS.

    Raises:
        OpError: naming what it has besides, and where.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise OpError(f"the expression {text!r} is no Python: {error.msg} at column {error.offset}") from error
    return _as_number(_node(tree, text))


def inputs_of(node: Node) -> Iterator[str]:
    """The names in an expression, in the order in which they first appear."""
    seen: dict[str, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current.kind == "input":
            seen.setdefault(current.value)
        stack += reversed(current.of)
    return iter(seen)


def computed(node: Node, values: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """The expression by torch.

    Args:
        dtype, device: those of the tensors that replace numbers where torch accepts only tensors.
    """
    if node.kind == "input":
        return values[node.value]
    if node.kind == "number":
        return node.value
    operands = [computed(operand, values, dtype, device) for operand in node.of]
    if node.kind not in _OF_NUMBERS and not any(isinstance(operand, torch.Tensor) for operand in operands):
        operands[0] = _as_tensor(operands[0], dtype, device)
    if node.kind in _OF_TENSORS:
        operands = [_as_tensor(operand, dtype, device) for operand in operands]
    return OPERATIONS[node.kind].torch(*operands)


def _as_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), value, dtype=torch.bool if isinstance(value, bool) else dtype, device=device)


def derivatives(node: Node, names: Sequence[str]) -> dict[str, Node | None]:
    """The derivative of an expression by each name; None where it is zero. In reverse, each node once."""
    order: dict[Node, None] = {}

    def visit(current: Node) -> None:
        if current not in order:
            for operand in current.of:
                visit(operand)
            order[current] = None

    visit(node)
    upstream: dict[Node, Node] = {node: _ONE}
    for current in reversed(order):
        if current not in upstream or not current.of:
            continue
        slopes = OPERATIONS[current.kind].gradient(current.of, current)
        for operand, slope in zip(current.of, slopes, strict=True):
            if slope is not None and operand.kind != "number":
                term = _of("mul", upstream[current], slope)
                upstream[operand] = _of("add", upstream[operand], term) if operand in upstream else term
    return {name: upstream.get(Node("input", name)) for name in names}


def operations(node: Node, names: Sequence[str]) -> tuple[int, int]:
    """Operations of an element's forward, and of its backward by all names; each subexpression counts once."""
    slopes = [slope for slope in derivatives(node, names).values() if slope is not None]

    def count(nodes: Sequence[Node]) -> int:
        seen: set[Node] = set()
        waiting = list(nodes)
        while waiting:
            current = waiting.pop()
            if current.of and current not in seen:
                seen.add(current)
                waiting += current.of
        return len(seen)

    return count([node]), count(slopes) + len(slopes)


def _simplified(kind: str, *operands: Node) -> Node:
    """An operation as it is written: comparisons are 0 or 1 where a number belongs, and numbers alone are computed."""
    if kind == "where":
        condition, yes, no = operands[0], *map(_as_number, operands[1:])
        if condition.kind not in _COMPARED.values():
            condition = Node("ne", None, (condition, _ZERO))
        return Node(kind, None, (condition, yes, no))
    operands = tuple(map(_as_number, operands))
    if all(operand.kind == "number" for operand in operands):
        exact = (torch.tensor(operand.value, dtype=torch.float64) for operand in operands)
        return number(OPERATIONS[kind].torch(*exact).item())
    return Node(kind, None, operands)


def _as_number(node: Node) -> Node:
    return _sign_where(node, _ONE, _ZERO) if node.kind in _COMPARED.values() else node


def _node(tree: ast.expr, text: str) -> Node:
    def wrong(what: str) -> OpError:
        return OpError(f"the expression {text!r} has {what} at column {tree.col_offset + 1}")

    if isinstance(tree, ast.Name):
        return Node("input", tree.id)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, (int, float)) and not isinstance(tree.value, bool):
        try:
            return number(tree.value)
        except OverflowError as error:
            raise wrong("a number that no float holds") from error
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, (ast.USub, ast.UAdd)):
        inner = _as_number(_node(tree.operand, text))
        return inner if isinstance(tree.op, ast.UAdd) else _simplified("neg", inner)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
        return _simplified(_BINARY[type(tree.op)], _node(tree.left, text), _node(tree.right, text))
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _COMPARED:
        return _simplified(_COMPARED[type(tree.ops[0])], _node(tree.left, text), _node(tree.comparators[0], text))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
        name = tree.func.id
        if name not in FUNCTIONS:
            raise wrong(f"the unknown function {name!r} (there are {', '.join(FUNCTIONS)})")
        if len(tree.args) != _ARGUMENTS.get(name, 1):
            raise wrong(f"{len(tree.args)} arguments for {name}, which takes {_ARGUMENTS.get(name, 1)},")
        operands = tuple(_node(argument, text) for argument in tree.args)
        if name == "clamp" and any(operand.kind != "number" for operand in operands[1:]):
            raise wrong("a clamp whose bounds are no numbers (use min and max)")
        if name == "where" and operands[0].kind == "number":
            raise wrong("a where whose condition is the same everywhere")
        return _simplified(name, *operands)
    raise wrong(f"{ast.unparse(tree)!r}, which is no + - * / **, comparison, name, number or function,")
