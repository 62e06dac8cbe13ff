"""Applying and undoing plans: the only file that sets attributes on a user's model, and that restores them.

One C call sets all sites and the record of what is applied. Python delivers asynchronous exceptions, such as
KeyboardInterrupt, only between bytecodes and never inside that call. So a model is either stock or fused at any time,
and its record says which.
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
from fuseopt.model_index import Site
from fuseopt.modules.base import RECORD, FusedModule
from fuseopt.ops import registry
from fuseopt.plan import Plan
from fuseopt.report import Decoding, LateStrict, Report, Reporting
from fuseopt.runtime.references import Reference

_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

Step = functools.partial[Any]
"""A call of a C function that runs no Python code and cannot fail."""


class Absent:
    """Stands for an attribute that the instance lacks. The class itself is the mark: deepcopy and pickle keep it."""


@dataclass(frozen=True)
class Change:
    """One site with its value in the stock model, `before`, and in the fused model, `after`."""

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
        """The module that has the site; None once it has been freed."""
        return self.holder()

    @property
    def is_drop_in(self) -> bool:
        """Whether a FusedModule replaces a module and shares its state."""
        return isinstance(self.after, FusedModule) and isinstance(self.before, nn.Module)

    def current(self) -> Any:
        """The current value of the site; `Absent` if it has none, or if its module has been freed."""
        owner = self.owner
        return Absent if owner is None else _slot(owner, self.name).get(self.name, Absent)

    def is_at(self, value: Any) -> bool:
        """Whether the site holds `value` and may be set to the other value."""
        return self.current() is value and not (self.is_drop_in and not self.after.is_exchangeable(self.before))

    def steps(self, old: Any, new: Any) -> Iterator[Step]:
        """The steps that set `new` in place of `old` and copy what was set on `old` since, such as `training`."""
        owner = self.owner
        if owner is None:
            return
        if self.is_drop_in:
            shared = self.after.shared_attributes(old, new)
            yield functools.partial(new.__dict__.update, shared)
            for name in new.__dict__.keys() - shared.keys() - self.after._own:
                yield _step(new.__dict__, name, Absent)
        yield _step(_slot(owner, self.name), self.name, new)


@dataclass(frozen=True)
class Applied:
    """The record that a model carries while it is fused."""

    report: Report
    changes: tuple[Change, ...] = ()

    def report_now(self, model: nn.Module) -> Report:
        """The report, with a line for each backend that now differs from the plan, and the replacements' own lines."""
        lines = (c.after.report_lines() for c in self.changes if isinstance(c.after, Reporting))
        said = (line for found in lines for line in found)
        calls = (c.after.call_records() for c in self.changes if isinstance(c.after, Decoding))
        return replace(
            self.report,
            since=(*_changed_backends(self.report, model), *said),
            generate_calls=tuple(call for found in calls for call in found),
        )


def lock(model: nn.Module) -> AbstractContextManager[Any]:
    """The model's reentrant lock, to be held while the model is changed."""
    return _locks.setdefault(model, threading.RLock())


def apply_plan(model: nn.Module, plan: Plan) -> Report:
    """Builds every new object, then sets all of them at once. The model must be stock.

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
    report = Report(plan.title, plan.rows, plan.kept, plan.unmet, plan.config, summary=plan.summary)
    put(model, Applied(report, tuple(changes)))
    return report


def applied_to(model: nn.Module) -> Applied | None:
    """The record of what is applied to `model`; None for a stock model."""
    return model.__dict__.get(RECORD)


def put(model: nn.Module, wanted: Applied | None, stacklevel: int = 3) -> None:
    """Applies the record `wanted`; None restores the stock model. Does nothing if that is the state already.

    A site that other code has set in between is left unchanged, with a warning, whose `stacklevel` is that of
    `warnings.warn`.
    """
    current = applied_to(model)
    if current is wanted:
        return
    left = []
    if current is not None:
        _fetch_parameters(current)
        left += _switch(model, None, [(change, change.after, change.before) for change in current.changes])
    if wanted is not None:
        left += _switch(model, wanted, [(change, change.before, change.after) for change in wanted.changes])
    for path, kind in dict.fromkeys((change.path, type(change.current()).__name__) for change in left):
        warnings.warn(
            f"fuseopt.restore: {printable(path)} is left as it is, a {kind}: code outside fuseopt set it, its class or "
            "one of its methods after fuseopt.initialize. To get the original back, set it yourself",
            stacklevel=stacklevel,
        )


def _fetch_parameters(record: Applied) -> None:
    """Moves Parameters from host memory back to the device, where plans and the stock model expect them."""
    for change in record.changes:
        if isinstance(change.after, Decoding):
            change.after.fetch_parameters()


def forget_calls(record: Applied) -> None:
    """Empties the records of `generate()` calls that were made under `record`, and the prefix cache."""
    for change in record.changes:
        if isinstance(change.after, Decoding):
            change.after.calls.clear()
            change.after.forget_prompts()


def forget_prompts(model: nn.Module) -> None:
    """Empties the prefix cache of a fused model, so that a call repeated to time it runs its whole prompt again."""
    applied = applied_to(model)
    for change in applied.changes if applied is not None else ():
        if isinstance(change.after, Decoding):
            change.after.forget_prompts()


def be_strict(model: nn.Module, strict: bool) -> None:
    """Sets whether replacements that fail in a later call, such as a training step, raise or fall back to stock."""
    applied = applied_to(model)
    for change in applied.changes if applied is not None else ():
        if isinstance(change.after, LateStrict):
            change.after.strict = strict


@contextmanager
def as_found_after(model: nn.Module) -> Iterator[None]:
    """At the end of a with block, restores the record that `model` had at its start."""
    before = applied_to(model)

    def put_back() -> None:
        with lock(model):
            put(model, before)

    with put_back_after(put_back):
        yield


@contextmanager
def put_back_after(put_back: Callable[[], object]) -> Iterator[None]:
    """Calls `put_back` at the end of a with block, and again if an exception such as KeyboardInterrupt cuts it off."""
    try:
        try:
            yield
        finally:
            put_back()
    except BaseException:
        put_back()
        raise


def run_at_once(steps: Iterable[Step]) -> None:
    """Runs all steps in one C call, so that no asynchronous exception comes between two of them."""
    deque(map(functools.partial.__call__, list(steps)), maxlen=0)  # type: ignore[arg-type]


def stock_view(model: nn.Module) -> nn.Module:
    """A read-only view of the stock model; a model that is stock is returned itself.

    Modules with nothing applied in or below them are shared with `model`. The others are stand-ins of the same class
    that hold the stock values of the attributes that fuseopt has set. Parameters in host memory are moved back.
    """
    applied = applied_to(model)
    if applied is None:
        return model
    _fetch_parameters(applied)
    stock: dict[int, dict[str, Any]] = {}
    shared: dict[int, dict[str, Any]] = {}
    for change in applied.changes:
        owner = change.owner
        if owner is not None and change.is_at(change.after):
            stock.setdefault(id(owner), {})[change.name] = change.before
            if change.is_drop_in:
                shared[id(change.before)] = change.after.shared_attributes(change.after, change.before)
    modules, parents, stack = {id(model): model}, defaultdict(list), [model]
    while stack:
        module = stack.pop()
        for child in _children(module, stock).values():
            parents[id(child)].append(id(module))
            if id(child) not in modules:
                modules[id(child)] = child
                stack.append(child)
    differing = [identity for identity in (*stock, *shared) if identity in modules]
    views: dict[int, nn.Module] = {}
    while differing:
        identity = differing.pop()
        if identity not in views:
            views[identity] = object.__new__(type(modules[identity]))
            differing += parents[identity]
    for identity, view in views.items():
        module = modules[identity]
        attributes = {**shared.get(identity, module.__dict__), **stock.get(identity, {})}
        children = _children(module, stock)
        attributes["_modules"] = {name: child and views.get(id(child), child) for name, child in children.items()}
        hidden = {RECORD, *children}
        view.__dict__.update((n, value) for n, value in attributes.items() if n not in hidden and value is not Absent)
    return views.get(id(model), model)


def _changed_backends(report: Report, model: nn.Module) -> Iterator[str]:
    """A line, with the reason, for each op whose backend is no longer the planned one, such as after `.to("cuda")`."""
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("meta")
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
    rows = Counter((row.target, row.op, row.wanted, row.backend) for row in report.replaced if row.op is not None)
    for (target, op, wanted, planned), count in rows.items():
        if planned in ("auto", None) or op is None or device.type == "meta":
            continue
        what = f"{target} x {count}, planned for {planned}"
        if op not in registry.names():
            yield printable(f"{what}: its op {op} is not registered any more")
            continue
        try:
            choice = registry.get(op).choose(wanted, device, [dtype])
        except BackendError as error:
            yield printable(f"{what}: {error}")
            continue
        if choice.backend != planned:
            reasons = "; ".join(choice.refused.get(planned, [f"{choice.backend} is preferred on {device}"]))
            yield printable(f"{what}, runs on {choice.backend} now: {reasons}")


def _children(module: nn.Module, stock: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The children of a module in the stock model."""
    there = stock.get(id(module), {})
    return {name: there.get(name, child) for name, child in module._modules.items()}


def _switch(model: nn.Module, record: Applied | None, moves: Iterable[tuple[Change, Any, Any]]) -> list[Change]:
    """Sets each site from its old to its new value, and the record. Returns the changes whose site was not `old`."""
    steps: list[Step] = []
    left = []
    for change, old, new in moves:
        if change.is_at(old):
            steps += change.steps(old, new)
        elif change.owner is not None:
            left.append(change)
    steps.append(_step(model.__dict__, RECORD, Absent if record is None else record))
    run_at_once(steps)
    return left


def _step(slot: dict[str, Any], name: str, value: Any) -> Step:
    if value is Absent:
        return functools.partial(slot.pop, name, None)
    return functools.partial(operator.setitem, slot, name, value)


def _slot(owner: nn.Module, name: str) -> dict[str, Any]:
    return owner._modules if name in owner._modules else owner.__dict__
