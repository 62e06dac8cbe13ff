"""Which replacements `verify` has seen at work, and lines about those that it has not."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from fuseopt import apply
from fuseopt.blocks.dropout_add import DeferredDropout, DropoutAddForward
from fuseopt.modules.base import fused_class
from fuseopt.training.forward import TrainingForward

_NEED_DROPOUT = (DeferredDropout, DropoutAddForward)


@dataclass
class Watch:
    """Which replacements ran, seen from the calls of their Python functions; those that have none count as seen.

    Attributes:
        seen: ids of the replacements that ran.
    """

    changes: Sequence[apply.Change]
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        entries = {id(change.after): _entry(change.after) for change in self.changes}
        self.seen.update(identity for identity, code in entries.items() if code is None)
        self._codes = {id(code) for code in entries.values()}
        self._compiled = next((c.after for c in self.changes if isinstance(c.after, TrainingForward)), None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before)

    @contextmanager
    def watching_training(self) -> Iterator[None]:
        """As `watching`; a compiled training step counts as one of all replacements, which it has traced."""
        if self._compiled is None:
            with self.watching():
                yield
            return
        yield
        if not self._compiled.fallback_reason:
            self.seen.update(id(change.after) for change in self.changes)

    def training_not_run(self, rate: float) -> list[str]:
        """What training steps with dropout off do not show.

        Args:
            rate: the largest dropout rate of the model.
        """
        lines = []
        if rate:
            lines.append(f"dropout: rates of up to {rate:g} were set to 0, as fused dropout draws other masks")
        if self._compiled is not None and self._compiled.fallback_reason:
            lines.append(f"compiled training steps: the stock forward ran instead: {self._compiled.fallback_reason}")
        return lines

    def idle_lines(self) -> list[str]:
        """A line for each class of replacements of which some were not called."""
        lines = []
        idle: dict[str, list[str]] = defaultdict(list)
        for change in self.changes:
            target = change.after
            if not isinstance(target, _NEED_DROPOUT) and id(target) in self.seen:
                continue
            if change.name == "generate":
                lines.append("generate(): pass generate={'max_new_tokens': 16} to compare tokens")
            else:
                idle[_name(target)].append(change.path)
        return lines + [f"{name} x {len(paths)}, such as {paths[0]}: not called" for name, paths in idle.items()]

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and id(code) in self._codes and code.co_argcount:
            self.seen.add(id(frame.f_locals.get(code.co_varnames[0])))


def _entry(replacement: Any) -> CodeType | None:
    """The code that runs if, and only if, `replacement` does."""
    if isinstance(replacement, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return None
    for cls in type(replacement).__mro__:  # a subclass may have a `__call__` that runs no `_forward`
        for name in ("_forward", "forward", "__call__"):
            method = vars(cls).get(name)
            if isinstance(method, FunctionType):
                return method.__code__
    return None


def _name(replacement: Any) -> str:
    """What plans and reports call it: the user's function that a forward calls, or a class."""
    if isinstance(replacement, nn.Module):
        return fused_class(replacement).__name__
    name: str = getattr(getattr(replacement, "replacement", None), "__name__", type(replacement).__name__)
    return name
