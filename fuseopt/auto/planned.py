"""What "auto" would measure for a model, and what it has measured here: `fuseopt.plan(model, "auto")`."""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fuseopt.auto import remembered
from fuseopt.auto.choices import Choices
from fuseopt.auto.work import Kind
from fuseopt.errors import printable
from fuseopt.measurements import COMPILED, STOCK, Measurements
from fuseopt.tables import WIDTH


@dataclass(frozen=True)
class AutoPlan:
    """`print(plan)`, `to_json()`; a notebook shows what `print` does.

    Attributes:
        model: class name.
        choices: for each kind of call, the names of what is timed before changes of the fastest one.
        measured: earlier results on this machine for such a model.
        verbose: whether to print the times of the earlier results too.
        how: the call or command that measures.
    """

    model: str
    choices: Mapping[str, tuple[str, ...]]
    measured: tuple[Measurements, ...]
    verbose: bool = False
    how: str = "fuseopt.initialize(model, 'auto', inputs=dict(inputs)), with generate={...} to time generate()"

    @classmethod
    def of(cls, model: nn.Module, written: Mapping[str, Any], *, verbose: bool = False) -> AutoPlan:
        """
        Args:
            model: stock; on the meta device too.
            written: the blocks beside the preset "auto".
        """
        kinds = [kind for kind in Kind if kind is not Kind.GENERATE or hasattr(type(model), "generate")]
        choices = {
            kind.value: (STOCK, *(choice.name for choice in Choices(model, kind, written).starts()), COMPILED)
            for kind in kinds
        }
        measured = tuple(each for each in remembered.everything(model) if each.source == "auto")
        return cls(type(model).__name__, choices, measured, verbose)

    def to_json(self) -> str:
        measured = [each.to_dict() for each in self.measured]
        return json.dumps({"model": self.model, "choices": self.choices, "measured": measured}, indent=2)

    def __str__(self) -> str:
        lines = [f"plan for {self.model}: 'auto' times these choices on your inputs, then changes of the fastest one"]
        for kind, names in self.choices.items():
            lines += _wrapped(f"{kind}: {', '.join(names)}")
        for each in self.measured:
            lines += _wrapped(each.summary)
            lines += [f"  {line}" for line in each.lines()] if self.verbose else []
        if not self.measured:
            lines.append("  nothing is measured yet on this machine")
        return "\n".join([*lines, *_wrapped(f"to measure: {self.how}")])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(printable(text), WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
