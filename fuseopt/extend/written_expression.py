"""An elementwise expression as text of a compiled language."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fuseopt.extend.expression import OPERATIONS, Node


@dataclass(frozen=True)
class Language:
    """How a compiled language writes an expression.

    Attributes:
        operation: kind of a node -> a format string of {0}, {1} ...
        number: a finite number -> its literal.
        special: the same for "inf", "-inf" and "nan".
        statement: a format string of {0}, a new variable, and {1}, its value.
    """

    operation: Callable[[str], str]
    number: Callable[[float], str]
    special: Callable[[float], str]
    statement: str


TRITON = Language(lambda kind: OPERATIONS[kind].triton, repr, lambda value: f'float("{value}")', "{0} = {1}")


def written_lines(nodes: Sequence[Node], names: Mapping[str, str], language: Language) -> tuple[list[str], list[str]]:
    """(statements, names of the results): `nodes` in a language, each subexpression computed once.

    Args:
        names: input -> the variable that holds it.
    """
    lines: list[str] = []
    known: dict[Node, str] = {}

    def written(node: Node) -> str:
        if node.kind == "input":
            return names[node.value]
        if node.kind == "number":
            return (language.number if math.isfinite(node.value) else language.special)(node.value)
        if node not in known:
            operands = [written(operand) for operand in node.of]
            text = _power_text(node, operands[0], language) or language.operation(node.kind).format(*operands)
            known[node] = f"v{len(known)}"
            lines.append(language.statement.format(known[node], text))
        return known[node]

    return lines, [written(node) for node in nodes]


def _power_text(node: Node, base: str, language: Language) -> str | None:
    """A power with a small whole exponent as a product, which is exact for negative bases too."""
    if node.kind != "pow" or node.of[1].kind != "number":
        return None
    exponent = node.of[1].value
    if exponent != int(exponent) or abs(exponent) > 8:
        return None
    one = language.number(1.0)
    if exponent == 0:
        return language.operation("where").format(f"({base} == {base})", one, one)
    product = " * ".join([base] * int(abs(exponent)))
    return f"({one} / ({product}))" if exponent < 0 else f"({product})"
