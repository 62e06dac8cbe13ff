"""From a policy's rule to Replacements and Skips: shared by the strategies that swap modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fuseopt.build import loader
from fuseopt.models import Rule
from fuseopt.modules.base import FusedModule, has_plain_weights, untouched_reasons
from fuseopt.plan import Candidate, ModelIndex, Replacement, Site, Skip


@dataclass(frozen=True)
class Offer:
    """Who proposes, and what would run it.

    Attributes:
        request: the config name that asks.
        strategy: the strategy's name.
        backend: what will run the replacement on this model.
        libraries: the native libraries that needs.
        refused: why something better will not.
        by_size: what takes over from `backend` at some sizes.
        op, wanted: as in `Replacement`.
    """

    request: str
    strategy: str
    backend: str | None = None
    libraries: tuple[loader.Kind, ...] = ()
    refused: str | None = None
    by_size: str | None = None
    op: str | None = None
    wanted: str = "auto"


PAYS_ON_GPU = "it pays on a GPU alone"
# What `from_module` of a rule's target is given for one candidate, or why there is nothing to give.
Options = Callable[[Candidate], "Mapping[str, Any] | str"]


def propose_rule(index: ModelIndex, rule: Rule, offer: Offer, options: Options) -> Iterator[Replacement | Skip]:
    """Every module of the rule's class as a Replacement or a Skip; subclasses, whose forward may differ, as Skips."""
    for candidate in index.of_class(rule.source):
        if candidate.is_exactly(rule.source):
            yield _propose(index, candidate, rule, offer, options(candidate))
        else:
            is_fused = isinstance(candidate.module, FusedModule)
            subclass = f"it is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ"
            reason = "it is fused already" if is_fused else subclass
            yield skip(candidate.sites, candidate.class_name, rule.target_name, offer, reason)


def runs_on_gpu(index: ModelIndex) -> bool:
    """Whether the model is on a GPU, or on no device yet."""
    return any(device.type in ("cuda", "meta") for device in index.devices)


def stacks_of(index: ModelIndex, rules: Iterable[Rule]) -> Iterator[tuple[Candidate, Rule]]:
    """The modules, the model itself among them, of whose class or of a base of it one of the rules is."""
    by_source = {rule.source: rule for rule in rules}
    for candidate in (Candidate(index.model, ()), *index.candidates):
        rule = next((by_source[name] for name in candidate.lineage if name in by_source), None)
        if rule is not None:
            yield candidate, rule


def child_rule(candidate: Candidate, child: str, rules: Iterable[Rule], target: str) -> Rule | None:
    """The rule with this target that names the exact class of a candidate's child."""
    module = getattr(candidate.module, child, None)
    return next((r for r in rules if r.target_name == target and module is not None and r.names(type(module))), None)


def forward_sites(candidate: Candidate) -> tuple[Site, ...]:
    """The `forward` of a module that stays: set on the instance."""
    path = f"{candidate.sites[0].path}.forward" if candidate.sites else "forward"
    return (Site(candidate.module, "forward", path),)


def forward_name(candidate: Candidate) -> str:
    return f"{candidate.class_name}.forward"


def skip(sites: tuple[Site, ...], source: str, target: str, offer: Offer, reason: str) -> Skip:
    return Skip(sites, source, target, offer.request, offer.strategy, reason)


def replacement(
    sites: tuple[Site, ...],
    source: str,
    target: str,
    offer: Offer,
    reason: str,
    build: Callable[[], Any],
    absorbs: tuple[Site, ...] = (),
    needs: tuple[Site, ...] = (),
) -> Replacement:
    return Replacement(
        sites,
        source,
        target,
        offer.request,
        offer.strategy,
        reason,
        build,
        backend=offer.backend,
        libraries=offer.libraries,
        refused=offer.refused,
        by_size=offer.by_size,
        absorbs=absorbs,
        needs=needs,
        op=offer.op,
        wanted=offer.wanted,
    )


def _propose(
    index: ModelIndex, candidate: Candidate, rule: Rule, offer: Offer, options: Mapping[str, Any] | str
) -> Replacement | Skip:
    if isinstance(options, str):
        return skip(candidate.sites, candidate.class_name, rule.target_name, offer, options)
    target: type[FusedModule] = rule.target_class
    reasons = candidate.blocked_reasons() + weight_reasons(candidate.module)
    absorbed = [index.candidate(getattr(candidate.module, child)) for child in rule.absorbs]
    reasons += [f"its {inner.sites[0].name}: {reason}" for inner in absorbed for reason in inner.blocked_reasons()]
    reasons += target.not_supported_reasons(candidate.module)
    if reasons:
        return skip(candidate.sites, candidate.class_name, rule.target_name, offer, "; ".join(reasons))
    if rule.reads:
        options = {**options, "reads": {name: _class_named(of) for name, (of,) in rule.reads.items()}}
    called = [f"{name} is called as the source calls it: {why}" for name, why in touched(candidate, rule)]
    return replacement(
        candidate.sites,
        candidate.class_name,
        rule.target_name,
        offer,
        "; ".join(("exactly the class that the policy names", *called)),
        functools.partial(target.from_module, candidate.module, **options),
        absorbs=tuple(site for inner in absorbed for site in inner.sites),
    )


def touched(candidate: Candidate, rule: Rule) -> Iterator[tuple[str, str]]:
    """(path, reason) of each module in `rule.reads` that does more than its class's forward, so must be called."""
    for path, names in rule.reads.items():
        module: Any = candidate.module
        for name in path.split("."):
            module = getattr(module, name, None)
        if module is not None:
            yield from ((path, reason) for reason in untouched_reasons(module, names))


def weight_reasons(module: nn.Module) -> list[str]:
    """Why ops cannot read the module's own weights; empty if they can."""
    return [] if has_plain_weights(module) else ["its weights are of a tensor subclass, such as quantised ones"]


def _class_named(name: str) -> type[nn.Module]:
    """The class of a full name, whose module the model's own module has imported."""
    module, _, attribute = name.rpartition(".")
    named: type[nn.Module] = getattr(sys.modules[module], attribute)
    return named
