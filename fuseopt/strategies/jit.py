"""`jit`: elementwise regions compiled by TorchScript or by torch.compile with Inductor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fuseopt.config import Config
from fuseopt.model_index import Candidate, ModelIndex
from fuseopt.models import ModelPolicy, Rule
from fuseopt.modules import regions
from fuseopt.modules.regions import GatedRegion, Region
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import BackendChoice, ProposalContext
from fuseopt.strategies.propose import Options, child_rule, propose_rule


class JitStrategy:
    """Replaces activations, and feed-forward blocks whose activation has a bias or a gate to fuse with."""

    name = "jit"
    block = "kernel_fusion"

    def requested(self, config: Config) -> tuple[str, ...]:
        fusion = config.active_fusion
        return ("jit",) if fusion.jit and not fusion.jit.implied else ()

    def propose(self, index: ModelIndex, policy: ModelPolicy, config: Config) -> Iterator[Replacement | Skip]:
        fusion = config.active_fusion
        if fusion.jit is None:
            return
        backend = fusion.jit.backend
        reasons = regions.not_supported_reasons(backend)
        refused = f"{backend} is not available, so it runs eagerly: {'; '.join(reasons)}" if reasons else None
        backend = "eager" if reasons else backend
        context = ProposalContext(index, policy, "jit", self.name, choice=BackendChoice(backend, refused=refused))
        for rule in policy.regions:
            yield from propose_rule(context, rule, _options(rule, policy, backend))


def _options(rule: Rule, policy: ModelPolicy, backend: str) -> Options:
    def activation(candidate: Candidate) -> Mapping[str, Any]:
        return {**rule.options, "region": Region(rule.options["region"], backend)}

    def biased(candidate: Candidate) -> Mapping[str, Any] | str:
        act = child_rule(candidate, "act", policy.regions, "FusedActivation")
        if act is None or f"bias_{act.options['region']}" not in regions.REGIONS:
            return f"its activation {type(candidate.module.act).__name__} has no region"
        name = act.options["region"]
        return {"activation": Region(name, backend), "bias_activation": Region(f"bias_{name}", backend)}

    def gated(candidate: Candidate) -> Mapping[str, Any] | str:
        act = child_rule(candidate, rule.options["act"], policy.regions, "FusedActivation")
        if act is None or f"gated_{act.options['region']}" not in regions.REGIONS:
            return f"its activation {type(getattr(candidate.module, rule.options['act'])).__name__} has no region"
        region = GatedRegion(f"gated_{act.options['region']}", backend)
        upcast = act.options.get("float32_under_autocast", False)
        return {**rule.options, "gated_activation": region, "float32_under_autocast": upcast}

    return {"FusedActivation": activation, "FusedMLP": biased, "FusedGatedMLP": gated}[rule.target_name]
