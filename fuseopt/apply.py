"""Acting: the only file that sets attributes on a user's model, and the one that puts them back.

A model goes from stock to fused, or back, in one call of C that sets every site and the record. Python delivers an
exception from outside, such as KeyboardInterrupt, between two bytecodes and so never inside that call: whenever it
comes, the model is wholly stock or wholly fused, and its record says which.
"""

from __future__ import annotations

import functools
import operator
import threading
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fuseopt.errors import ApplyError, BackendError, printable
from fuseopt.modules.base import FusedModule
from fuseopt.ops import registry
from fuseopt.plan import Plan, Site
from fuseopt.references import Reference
from fuseopt.report import LateStrict, Report, Reporting

_STATE = "_fuseopt"
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

Step = functools.partial[Any]
"""One call of C that neither runs Python code nor fails."""


class Absent:
    """Stands for "the instance has no such attribute": the class itself, which deepcopy and pickle keep."""


@dataclass(frozen=True)
class Change:
    """What stands at one site while the model is stock, `before`, and while it is fused, `after`."""

    holder: Reference
    name: str
    path: str
    before: Any
    after: Any

    @classmethod
    def at(cls, site: Site, after: Any) -> Change:
        before = _slot(site.owner, site.name).get(site.name, Absent)
        return cls(Reference(site.owner), site.name, site.path, before, after)

    @property
    def owner(self) -> nn.Module | None:
        """The module that the site is on; None when it is gone."""
        return self.holder()

    @property
    def is_drop_in(self) -> bool:
        """Whether one module stands in for another, whose state it shares."""
        return isinstance(self.after, FusedModule) and isinstance(self.before, nn.Module)

    def current(self) -> Any:
        owner = self.owner
        return Absent if owner is None else _slot(owner, self.name).get(self.name, Absent)

    def steps(self, old: Any, new: Any) -> Iterator[Step]:
        """Puts `new` in the place of `old`, with what was set on that since, such as the training flag."""
        owner = self.owner
        if owner is None:
            return
        if isinstance(old, FusedModule) and isinstance(new, nn.Module):
            yield functools.partial(new.__dict__.update, old.handed_back(new))
        elif self.is_drop_in:
            yield functools.partial(new.__dict__.update, _common_attributes(old, new))
        yield _step(_slot(owner, self.name), self.name, new)


@dataclass(frozen=True)
class Applied:
    """What stays on a model while it is fused."""

    report: Report
    changes: tuple[Change, ...] = ()

    def report_now(self, model: nn.Module) -> Report:
        """The report, with where `model` runs on other backends by now, and what the replacements have to say."""
        lines = (c.after.report_lines() for c in self.changes if isinstance(c.after, Reporting))
        said = (line for found in lines for line in found)
        return replace(self.report, since=(*_changed_backends(self.report, model), *said))


def lock(model: nn.Module) -> AbstractContextManager[Any]:
    """The lock of whoever changes `model`: another thread waits, the same one may take it again."""
    return _locks.setdefault(model, threading.RLock())


def apply_plan(model: nn.Module, plan: Plan) -> Report:
    """Builds every new object, then sets them all on a model that is stock.

    Raises:
        ApplyError: naming the site; the error that caused it is chained. The model is as it was.
    """
    changes: list[Change] = []
    for replacement in plan.replacements:
        try:
            target = replacement.build()
        except Exception as error:
            path = printable(replacement.sites[0].path)
            raise ApplyError(
                f"{path}: building {replacement.target} failed: {error}; the model is unchanged"
            ) from error
        changes += [Change.at(site, target) for site in replacement.sites]
    applied = Applied(Report(plan.title, plan.rows, plan.kept, plan.unmet, plan.config), tuple(changes))
    put(model, applied)
    return applied.report


def applied_to(model: nn.Module) -> Applied | None:
    """What is on `model` now, or None when it is as transformers made it."""
    return model.__dict__.get(_STATE)


def put(model: nn.Module, wanted: Applied | None) -> None:
    """Makes `model` one that `wanted` is applied to, or a stock one for None; does nothing where it is that already.

    A site at which somebody else has set something since is left as it is, with a warning.
    """
    current = applied_to(model)
    if current is wanted:
        return
    if current is not None:
        for change in _switch(model, None, [(change, change.after, change.before) for change in current.changes]):
            warnings.warn(
                f"fuseopt.restore: {printable(change.path)} is left as it is, a {type(change.current()).__name__}: it "
                "was set to that after fuseopt.initialize",
                stacklevel=3,
            )
    if wanted is not None:
        _switch(model, wanted, [(change, change.before, change.after) for change in wanted.changes])


def be_strict(model: nn.Module, strict: bool) -> None:
    """Has replacements on `model` that learn in a call what cannot be done raise it there, or fall back."""
    applied = applied_to(model)
    for change in applied.changes if applied is not None else ():
        if isinstance(change.after, LateStrict):
            change.after.strict = strict


@contextmanager
def as_found_after(model: nn.Module) -> Iterator[None]:
    """Puts on `model`, at the end of a with block, what was applied to it at its start."""
    before = applied_to(model)

    def put_back() -> None:
        with lock(model):
            put(model, before)

    with put_back_after(put_back):
        yield


@contextmanager
def put_back_after(put_back: Callable[[], object]) -> Iterator[None]:
    """Calls `put_back` at the end of a with block; again, where an exception from outside has cut that short."""
    try:
        try:
            yield
        finally:
            put_back()
    except BaseException:
        put_back()
        raise


def run_at_once(steps: Iterable[Step]) -> None:
    """Runs all steps in one call of C, between which Python does nothing else."""
    deque(map(functools.partial.__call__, list(steps)), maxlen=0)  # type: ignore[arg-type]


def stock_view(model: nn.Module) -> nn.Module:
    """`model` as it stands without what is applied to it, to be read only; a stock model itself.

    Modules with nothing applied in or below them are the model's own. The others are stand-ins, of the same class and
    with the same attributes but for those that were set.
    """
    applied = applied_to(model)
    if applied is None:
        return model
    stock: dict[int, dict[str, Any]] = {}
    handed_back: dict[int, dict[str, Any]] = {}
    for change in applied.changes:
        owner = change.owner
        if owner is not None and change.current() is change.after:
            stock.setdefault(id(owner), {})[change.name] = change.before
            if change.is_drop_in:
                handed_back[id(change.before)] = change.after.handed_back(change.before)
    modules, parents, stack = {id(model): model}, defaultdict(list), [model]
    while stack:
        module = stack.pop()
        for child in _children(module, stock).values():
            parents[id(child)].append(id(module))
            if id(child) not in modules:
                modules[id(child)] = child
                stack.append(child)
    differing = [identity for identity in (*stock, *handed_back) if identity in modules]
    views: dict[int, nn.Module] = {}
    while differing:
        identity = differing.pop()
        if identity not in views:
            views[identity] = object.__new__(type(modules[identity]))
            differing += parents[identity]
    for identity, view in views.items():
        module = modules[identity]
        attributes = {**module.__dict__, **handed_back.get(identity, {}), **stock.get(identity, {})}
        children = _children(module, stock)
        attributes["_modules"] = {name: child and views.get(id(child), child) for name, child in children.items()}
        hidden = {_STATE, *children}
        view.__dict__.update((n, value) for n, value in attributes.items() if n not in hidden and value is not Absent)
    return views.get(id(model), model)


def _changed_backends(report: Report, model: nn.Module) -> Iterator[str]:
    """What runs now in the place of the planned backends, on another device or machine, and why."""
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("meta")
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
    rows = Counter((row.target, row.op, row.wanted, row.backend) for row in report.replaced if row.op is not None)
    for (target, op, wanted, planned), count in rows.items():
        if planned in ("auto", None) or op is None or device.type == "meta":
            continue
        what = f"{target} x {count}, planned for {planned}"
        try:
            choice = registry.get(op).choose(wanted, device, [dtype])
        except BackendError as error:
            yield printable(f"{what}: {error}")
            continue
        if choice.backend != planned:
            reasons = "; ".join(choice.refused.get(planned, [f"{device} is asked for other backends"]))
            yield printable(f"{what}, runs on {choice.backend} now: {reasons}")


def _children(module: nn.Module, stock: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The children of a module, as they are when it is stock."""
    there = stock.get(id(module), {})
    return {name: there.get(name, child) for name, child in module._modules.items()}


def _switch(model: nn.Module, record: Applied | None, moves: Iterable[tuple[Change, Any, Any]]) -> list[Change]:
    """Sets each site from an old value to a new one, and the record; returns the changes whose old value was gone."""
    steps: list[Step] = []
    left = []
    for change, old, new in moves:
        if change.current() is old:
            steps += change.steps(old, new)
        elif change.owner is not None:
            left.append(change)
    steps.append(_step(model.__dict__, _STATE, Absent if record is None else record))
    run_at_once(steps)
    return left


def _step(slot: dict[str, Any], name: str, value: Any) -> Step:
    if value is Absent:
        return functools.partial(slot.pop, name, None)
    return functools.partial(operator.setitem, slot, name, value)


def _slot(owner: nn.Module, name: str) -> dict[str, Any]:
    return owner._modules if name in owner._modules else owner.__dict__


def _common_attributes(one: nn.Module, other: nn.Module) -> dict[str, Any]:
    """What `one` has of the attributes that both have."""
    return {name: one.__dict__[name] for name in one.__dict__.keys() & other.__dict__.keys()}
