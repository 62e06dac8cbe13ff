"""From a policy's rule to Replacements and Skips, for all proposers; and the reasons that several of them give."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from fuseopt.model_index import Candidate, ModelIndex, Site
from fuseopt.models import Rule
from fuseopt.modules.base import FusedModule, has_plain_weights, untouched_reasons
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext

PAYS_ON_GPU = "it is faster on a GPU only"
EXACT_MATCH = "exact class match"
# Candidate -> keyword arguments for `from_module` of a rule's target, or the reason why it cannot be replaced.
Options = Callable[[Candidate], "Mapping[str, Any] | str"]


def propose_rule(context: ProposalContext, rule: Rule, options: Options) -> Iterator[Replacement | Skip]:
    """A Replacement or a Skip for every module of the rule's class, and a Skip for modules of its subclasses."""
    for candidate in context.index.of_class(rule.source):
        if candidate.is_exactly(rule.source):
            yield _propose(context, candidate, rule, options(candidate))
        else:
            is_fused = isinstance(candidate.module, FusedModule)
            reason = "it is fused already" if is_fused else subclass_reason(rule.source)
            yield context.skip(candidate.sites, candidate.class_name, rule.target_name, reason)


def subclass_reason(source: str) -> str:
    return f"it is a subclass of {source.rpartition('.')[2]}, so its forward may differ"


def runs_on_gpu(index: ModelIndex) -> bool:
    """True if the model is on a GPU or on the meta device."""
    return any(device.type in ("cuda", "meta") for device in index.devices)


def stacks_of(index: ModelIndex, rules: Iterable[Rule]) -> Iterator[tuple[Candidate, Rule]]:
    """The model and its modules whose class, or one of its bases, is the source of a rule; with that rule."""
    by_source = {rule.source: rule for rule in rules}
    for candidate in (index.root, *index.candidates):
        rule = next((by_source[name] for name in candidate.lineage if name in by_source), None)
        if rule is not None:
            yield candidate, rule


def child_rule(candidate: Candidate, child: str, rules: Iterable[Rule], target: str) -> Rule | None:
    """The rule with this target whose source is exactly the class of the candidate's attribute `child`."""
    module = getattr(candidate.module, child, None)
    return next((r for r in rules if r.target_name == target and module is not None and r.names(type(module))), None)


def forward_sites(candidate: Candidate) -> tuple[Site, ...]:
    """The `forward` of the candidate, which is set on the instance; the module itself stays."""
    path = f"{candidate.sites[0].path}.forward" if candidate.sites else "forward"
    return (Site(candidate.module, "forward", path),)


def forward_name(candidate: Candidate) -> str:
    return f"{candidate.class_name}.forward"


def _propose(
    context: ProposalContext, candidate: Candidate, rule: Rule, options: Mapping[str, Any] | str
) -> Replacement | Skip:
    if isinstance(options, str):
        return context.skip(candidate.sites, candidate.class_name, rule.target_name, options)
    target: type[FusedModule] = rule.target_class
    reasons = candidate.blocked_reasons() + weight_reasons(candidate.module)
    claimed = [context.index.candidate(getattr(candidate.module, child)) for child in rule.claims]
    reasons += [f"its {inner.sites[0].name}: {reason}" for inner in claimed for reason in inner.blocked_reasons()]
    reasons += target.not_supported_reasons(candidate.module)
    if reasons:
        return context.skip(candidate.sites, candidate.class_name, rule.target_name, "; ".join(reasons))
    if rule.reads:
        options = {**options, "reads": {name: _class_named(of) for name, (of,) in rule.reads.items()}}
    called = [f"{name} is called as the source class calls it: {why}" for name, why in touched(candidate, rule)]
    return context.replacement(
        candidate.sites,
        candidate.class_name,
        rule.target_name,
        "; ".join((EXACT_MATCH, *called)),
        functools.partial(target.from_module, candidate.module, **options),
        claims=tuple(site for inner in claimed for site in inner.sites),
    )


def touched(candidate: Candidate, rule: Rule) -> Iterator[tuple[str, str]]:
    """(path, reason) of each module in `rule.reads` that must be called, as it does more than its class's forward."""
    for path, names in rule.reads.items():
        module: Any = candidate.module
        for name in path.split("."):
            module = getattr(module, name, None)
        if module is not None:
            yield from ((path, reason) for reason in untouched_reasons(module, names))


def weight_reasons(module: nn.Module) -> list[str]:
    """Why ops cannot read the module's weights directly; empty if they can."""
    return [] if has_plain_weights(module) else ["its weights are of a tensor subclass, such as quantised ones"]


def _class_named(name: str) -> type[nn.Module]:
    """The class of that full name; its module has been imported, as the model uses the class."""
    module, _, attribute = name.rpartition(".")
    named: type[nn.Module] = getattr(sys.modules[module], attribute)
    return named
