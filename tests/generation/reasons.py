"""The reasons in tiers.py as a table, and variants of its functions with one reason taken out."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fuseopt.generation import tiers

FUNCTIONS = (tiers.argument_reasons, tiers.model_reasons, tiers.call_reasons, tiers.device_loop_reasons)


class Reason(NamedTuple):
    """A reason that a function yields; `text` has {} for formatted values."""

    function: str
    place: int
    text: str


def all_reasons() -> Iterator[Reason]:
    for function in FUNCTIONS:
        for place, node in enumerate(_yields(_tree(function))):
            yield Reason(function.__name__, place, _text(node.value.value))


def without(reason: Reason) -> Callable[..., Iterator[str]]:
    """The function without this reason."""
    tree = _tree(getattr(tiers, reason.function))
    removed = _yields(tree)[reason.place]

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.AST:
            return ast.copy_location(ast.Pass(), node) if node is removed else node

    made: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(Remove().visit(tree)), "<without a reason>", "exec"), vars(tiers), made)
    return made[reason.function]


def _tree(function: Callable[..., Any]) -> ast.Module:
    return ast.parse("from __future__ import annotations\n" + textwrap.dedent(inspect.getsource(function)))


def _yields(tree: ast.Module) -> list[ast.Expr]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield)]


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
