"""Acting: the only file that sets attributes on a user's model, and the one that puts them back."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fuseopt.errors import ApplyError
from fuseopt.modules.base import FusedModule
from fuseopt.plan import Plan, Site
from fuseopt.report import LateStrict, Report, Reporting

_STATE = "_fuseopt"


class _Absent:
    """Stands for "the instance had no such attribute"; compared by class, so it survives deepcopy and pickle."""


@dataclass
class Change:
    """One site that was set: what stood there, and what stands there now."""

    owner: nn.Module
    name: str
    path: str
    before: Any
    after: Any

    @classmethod
    def make(cls, site: Site, after: Any) -> Change:
        change = cls(site.owner, site.name, site.path, _slot(site.owner, site.name).get(site.name, _Absent()), after)
        change.redo()
        return change

    def redo(self) -> None:
        _set(self.owner, self.name, self.after)

    def undo(self) -> None:
        current = _slot(self.owner, self.name).get(self.name)
        if current is not self.after:
            warnings.warn(
                f"fuseopt.restore: {self.path} is left as it is, a {type(current).__name__}: it was set to that after "
                "fuseopt.initialize",
                stacklevel=4,
            )
            return
        if isinstance(self.after, FusedModule) and isinstance(self.before, nn.Module):
            _hand_back(self.after, self.before)
        _set(self.owner, self.name, self.before)


@dataclass
class Applied:
    """What stays on a model while it is fused."""

    report: Report
    changes: list[Change] = field(default_factory=list)

    def report_now(self) -> Report:
        """The report, with what the replacements have to say by now."""
        lines = (c.after.report_lines() for c in self.changes if isinstance(c.after, Reporting))
        return replace(self.report, since=tuple(line for found in lines for line in found))

    def undo(self) -> None:
        for change in reversed(self.changes):
            change.undo()


def apply_plan(model: nn.Module, plan: Plan) -> Report:
    """Builds every new object, then sets them all. Whatever goes wrong, the model is left as it was.

    Raises:
        ApplyError: naming the site; the error that caused it is chained.
    """
    built = []
    for replacement in plan.replacements:
        try:
            built.append((replacement, replacement.build()))
        except Exception as error:
            raise ApplyError(
                f"{replacement.sites[0].path}: building {replacement.target} failed: {error}; the model is unchanged"
            ) from error
    applied = Applied(Report(plan.title, plan.rows, plan.kept, plan.unmet, plan.config))
    try:
        for replacement, target in built:
            applied.changes += [Change.make(site, target) for site in replacement.sites]
    except BaseException:
        applied.undo()
        raise
    attach(model, applied)
    return applied.report


def applied_to(model: nn.Module) -> Applied | None:
    """What is on `model` now, or None when it is as transformers made it."""
    return model.__dict__.get(_STATE)


def attach(model: nn.Module, applied: Applied) -> None:
    """Records `applied` on the model."""
    model.__dict__[_STATE] = applied


def be_strict(model: nn.Module, strict: bool) -> None:
    """Has replacements on `model` that learn in a call what cannot be done raise it there, or fall back."""
    applied = applied_to(model)
    for change in applied.changes if applied is not None else ():
        if isinstance(change.after, LateStrict):
            change.after.strict = strict


def detach(model: nn.Module) -> Applied | None:
    """Undoes what is on `model`, takes the record off it, and returns the record, which can be redone."""
    applied = model.__dict__.pop(_STATE, None)
    if applied is not None:
        applied.undo()
    return applied


def reattach(model: nn.Module, applied: Applied) -> None:
    """Puts the very objects of a detached record back in."""
    for change in applied.changes:
        change.redo()
    attach(model, applied)


def _slot(owner: nn.Module, name: str) -> dict[str, Any]:
    return owner._modules if name in owner._modules else owner.__dict__


def _set(owner: nn.Module, name: str, value: Any) -> None:
    slot = _slot(owner, name)
    if isinstance(value, _Absent):
        slot.pop(name, None)
    else:
        slot[name] = value


def _hand_back(fused: FusedModule, source: nn.Module) -> None:
    """Carries over what was set on the fused module since, such as the training flag; the rest is shared anyway."""
    for name in source.__dict__.keys() & fused.__dict__.keys():
        source.__dict__[name] = fused.__dict__[name]
