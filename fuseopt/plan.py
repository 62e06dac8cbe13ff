"""Planning: which objects of a model would be replaced, by what, and why or why not. Nothing here changes the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from fuseopt.build import loader
from fuseopt.config import Config, KernelFusion
from fuseopt.errors import PlanError, printable
from fuseopt.model_index import ModelIndex, Site
from fuseopt.models import ModelPolicy, policy_for
from fuseopt.modules.base import fused_class, is_drop_in
from fuseopt.report import NOTHING, to_json_types
from fuseopt.tables import Row, Tabled


@dataclass(frozen=True)
class Replacement:
    """One new object, and the sites where it will replace an existing one.

    Attributes:
        sites: where it goes; several if the existing object has several names in the model.
        source: class name of the existing object.
        target: class name of the new object.
        request: the config name that asked for it.
        strategy: name of the strategy that proposed it.
        reason: why the replacement is allowed.
        build: returns the new object; changes nothing.
        backend: the backend that will run it; None if there is no choice.
        libraries: native libraries that must be loaded before it runs.
        refused: why the backend that was asked for, or that fits the device best, cannot run it.
        claims: inner sites whose work the target does too, so that no other replacement may have them.
        requires: sites that the same request must have been given, or the target would do nothing.
        op: name of the op that the target calls; None if there is no choice of backends.
        wanted: the backend that the target passes to `op` in every call, such as "auto".
        notes: parts of `reason` that are printed without `verbose` too, such as which weights are quantised.
    """

    sites: tuple[Site, ...]
    source: str
    target: str
    request: str
    strategy: str
    reason: str
    build: Callable[[], Any]
    backend: str | None = None
    libraries: tuple[loader.Kind, ...] = ()
    refused: str | None = None
    claims: tuple[Site, ...] = ()
    requires: tuple[Site, ...] = ()
    op: str | None = None
    wanted: str = "auto"
    notes: tuple[str, ...] = ()


class RaisedReason(str):
    """Reason of a Skip: a predicate of the user's own raised `error`, which copies and pickles leave out."""

    error: Exception

    @classmethod
    def of(cls, what: str, error: Exception) -> RaisedReason:
        reason = cls(f"{what} raised {type(error).__name__}: {error}")
        reason.error = error
        return reason

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@dataclass(frozen=True)
class Skip:
    """A candidate that is not replaced, with the reason."""

    sites: tuple[Site, ...]
    source: str
    target: str
    request: str
    strategy: str
    reason: str


_OF_WHOLE_MODELS = {
    "FusedGenerate": "generate() by the decode loop",
    "TrainingForward": "training steps compiled",
}
"""Target that is set on the model itself -> what a summary says of it."""


class Strategy(Protocol):
    """Proposes replacements of one kind. `name` is shown in plans and reports; `block` is a key of the config."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> str: ...

    def requested(self, config: Config) -> tuple[str, ...]:
        """The names that `config` asks this strategy for."""

    def propose(self, index: ModelIndex, policy: ModelPolicy, config: Config) -> Iterator[Replacement | Skip]:
        """Every candidate as a Replacement or a Skip; changes nothing."""


@dataclass(frozen=True)
class Plan(Tabled):
    """Everything that `initialize` would do to one model: `print(plan)`, `to_dict()`, `to_json()`, `to_html()`.

    `fallbacks` are messages about what was asked for by name and will not run on the backend asked for. `expected` has
    a line for each kind of call whose gain by this config "auto" or a benchmark has measured on this machine.
    """

    model_class: str
    policy: str
    config: Config
    replacements: tuple[Replacement, ...]
    skips: tuple[Skip, ...]
    kept: dict[str, int] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    summary: str = NOTHING
    expected: tuple[str, ...] = field(default=(), compare=False)
    verbose: bool = field(default=False, compare=False)

    @property
    def native_libraries(self) -> tuple[loader.Kind, ...]:
        """The native libraries to load, and to build if necessary, before the plan is applied."""
        return tuple(sorted({kind for r in self.replacements for kind in r.libraries}))

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*map(_replacement_row, self.replacements), *map(_skip_row, self.skips))

    @property
    def title(self) -> str:
        return f"{self.model_class} (policy {self.policy})"

    @property
    def heading(self) -> str:
        return f"plan for {self.title}"

    def to_dict(self) -> dict[str, Any]:
        return {**to_json_types(self.title, self, self.config), "expected": list(self.expected)}

    def _notes(self) -> Iterator[str]:
        if not self.verbose:  # then they are among the reasons
            yield from (f"{r.sites[0].name}(): {note}" for r in self.replacements for note in r.notes)
        yield from super()._notes()

    def check_strict(self) -> None:
        """Raises PlanError if something asked for by name will not be done, or not by the backend asked for.

        It is raised too if a predicate of the user's own raised, from that error.
        """
        for skip in self.skips:
            if isinstance(skip.reason, RaisedReason):
                where = f"{printable(self.model_class)}: {printable(skip.sites[0].path)}"
                raise PlanError(f"strict: {where}: {printable(skip.reason)}") from skip.reason.error
        problems = [*self.unmet, *self.fallbacks]
        if problems:
            raise PlanError(
                f"strict: {printable(self.model_class)} cannot be fused as the config asks:\n  "
                + "\n  ".join(map(printable, problems))
            )


def build_plan(model: nn.Module, config: Config, strategies: Sequence[Strategy]) -> Plan:
    """The plan for `model`. If two strategies claim a site, the earlier one in `strategies` gets it."""
    policy = policy_for(model)
    fusion = config.active_fusion
    index = ModelIndex(model, fusion.paths)
    replacements: list[Replacement] = []
    skips: list[Skip] = []
    claimed: dict[tuple[int, str], Replacement] = {}
    covered: set[tuple[str, str]] = set()  # requests whose work another request of the same strategy does
    for strategy in strategies:
        for proposal in strategy.propose(index, policy, config):
            if isinstance(proposal, Skip):
                skips.append(proposal)
                continue
            renamed = next(filter(None, (site.renamed_cache_reason for site in proposal.sites)), None)
            left_out = renamed or _left_out_reason(fusion, strategy, proposal)
            if left_out is not None:
                skips.append(_skip(proposal, left_out))
                continue
            drop_in = next((site.owner for site in proposal.sites if is_drop_in(site.owner)), None)
            if drop_in is not None:
                skips.append(_inside(drop_in, proposal))
                continue
            sites = (*proposal.sites, *proposal.claims)
            winner = next((claimed[site.key] for site in sites if site.key in claimed), None)
            if winner is not None:
                skips.append(_lost_to(winner, proposal))
                if winner.strategy == proposal.strategy:
                    covered.add((proposal.strategy, proposal.request))
                continue
            holders = ((site, claimed.get(site.key)) for site in proposal.requires)
            missing = next((held for held in holders if held[1] is None or held[1].request != proposal.request), None)
            if missing is not None:
                skips.append(_without(*missing, proposal))
                continue
            replacements.append(proposal)
            claimed.update(dict.fromkeys((site.key for site in sites), proposal))
    preset = None if config.preset is None else Config.load(config.preset)
    of_preset = {(s.name, name) for s in strategies if preset is not None for name in s.requested(preset)}
    requested = [(s.name, name) for s in strategies for name in s.requested(config)]
    unmet = [
        _unmet(strategy, name, skips)
        for strategy, name in requested
        if (strategy, name) not in of_preset | covered and not _is_met(name, strategy, replacements)
    ]
    paths = ("", *(site.path for c in index.candidates for site in c.sites))
    patterns = [*fusion.paths.unmatched(paths)]
    generation = config.generation
    if generation is not None and generation.enable and generation.weights is not None:
        patterns += generation.weights.paths.unmatched(paths, "generation.weights")
    return Plan(
        model_class=type(model).__name__,
        policy=policy.name,
        config=config,
        replacements=tuple(replacements),
        skips=tuple(skips),
        kept=_kept(index, claimed),
        unmet=(*unmet, *patterns),
        fallbacks=tuple(_fallbacks(config, preset, of_preset, replacements)),
        summary=_summary(index, replacements),
    )


def _kept(index: ModelIndex, claimed: dict[tuple[int, str], Replacement]) -> dict[str, int]:
    leaves = (c for c in index.candidates if not c.module._modules)
    return dict(Counter(c.class_name for c in leaves if not any(site.key in claimed for site in c.sites)).most_common())


def _left_out_reason(fusion: KernelFusion, strategy: Strategy, proposal: Replacement) -> str | None:
    """Why `only` and `exclude` forbid it; proposers ask by themselves where several replacements need each other."""
    if strategy.block != "kernel_fusion":
        return None
    return fusion.paths.left_out_reason([site.module_path for site in proposal.sites])


def _fallbacks(
    config: Config, preset: Config | None, of_preset: set[tuple[str, str]], replacements: list[Replacement]
) -> Iterator[str]:
    """A message for each request, other than the preset's, that another backend than the one asked for will run."""
    fusion = config.active_fusion
    is_preset_s = preset is not None and all(
        getattr(fusion, key) == getattr(preset.kernel_fusion, key) for key in ("backend", "jit")
    )
    refused = (r for r in replacements if r.refused and not (is_preset_s and (r.strategy, r.request) in of_preset))
    yield from dict.fromkeys(f"{r.request}: would run on {r.backend}: {r.refused}" for r in refused)


def _summary(index: ModelIndex, replacements: list[Replacement]) -> str:
    if not replacements:
        return NOTHING
    # GenerationMixin's methods are the whole model's, which inside a peft model is a module too.
    modules = {r.sites[0].module_path for r in replacements if r.source != "GenerationMixin"} - {""}
    parts = [f"{len(modules)} of {len(index.candidates)} modules replaced"] if modules else []
    parts += [what for target, what in _OF_WHOLE_MODELS.items() if any(r.target == target for r in replacements)]
    return ", ".join(parts) or f"{', '.join(dict.fromkeys(r.target for r in replacements))} set on the model"


def _is_met(name: str, strategy: str, replacements: list[Replacement]) -> bool:
    return any(r.request == name and r.strategy == strategy for r in replacements)


def _unmet(strategy: str, name: str, skips: list[Skip]) -> str:
    reasons = list(dict.fromkeys(s.reason for s in skips if s.request == name and s.strategy == strategy))
    why = "; ".join(reasons) or "there is no module that it replaces"
    return f"{name} ({strategy}) matches nothing in the model: {why}"


def _inside(drop_in: nn.Module, loser: Replacement) -> Skip:
    # Restoring a drop-in frees it, and nothing could find a site of it afterwards.
    return _skip(loser, f"it is part of a {fused_class(drop_in).__name__} that another call of initialize put there")


def _lost_to(winner: Replacement, loser: Replacement) -> Skip:
    won, lost = winner.sites[0], loser.sites[0]
    what = (
        "it"
        if won.key == lost.key
        else f"its {won.name}"
        if won.path.startswith(lost.path)
        else f"{won.name} around it"
    )
    return _skip(loser, f"{winner.target} by strategy {winner.strategy} has {what} already")


def _without(site: Site, holder: Replacement | None, loser: Replacement) -> Skip:
    what = "stays as it is" if holder is None else f"{holder.target} by strategy {holder.strategy} has"
    return _skip(loser, f"it needs {site.path}, which {what}")


def _skip(proposal: Replacement, reason: str) -> Skip:
    return Skip(proposal.sites, proposal.source, proposal.target, proposal.request, proposal.strategy, reason)


def _replacement_row(r: Replacement) -> Row:
    reason = "; ".join(filter(None, (r.reason, r.refused)))
    paths = tuple(site.path for site in r.sites)
    return Row(paths, r.source, r.target, r.backend, r.strategy, reason, True, r.op, r.wanted, r.refused)


def _skip_row(s: Skip) -> Row:
    return Row(tuple(site.path for site in s.sites), s.source, s.target, None, s.strategy, s.reason, replaced=False)
