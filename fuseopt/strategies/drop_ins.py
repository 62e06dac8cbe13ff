"""Kernels that exchange a module for a drop-in of `fuseopt.modules`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from fuseopt import ops
from fuseopt.kernel_table import find_kernel, kernels
from fuseopt.model_index import Candidate
from fuseopt.models import Rule
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies import eager_attention, residual
from fuseopt.strategies.context import ProposalContext
from fuseopt.strategies.propose import child_rule, propose_rule


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The modules for which a rule in `ModelPolicy.kernels` has a target with the kernel's name."""
    backend = {} if find_kernel(context.request).op is None else {"backend": context.wanted}
    for rule in context.policy.kernels:
        if rule.target_name == context.request:
            yield from propose_rule(context, rule, functools.partial(_constant, {**rule.options, **backend}))


def propose_norm(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The norms, and with `fuse_residual` the blocks whose residual adds the norms take in."""
    yield from propose(context)
    if context.options.get("fuse_residual"):
        yield from residual.propose(context.for_op(f"add_{find_kernel(context.request).op}"))


def propose_gelu(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """With `fold_bias` the feed-forwards around a GELU, then the GELUs."""
    if context.options.get("fold_bias"):
        for rule in context.policy.regions:
            if rule.target_name == "FusedMLP":
                yield from propose_rule(context, rule, functools.partial(_bias_gelu, context))
    yield from propose(context)


def propose_gated_mlp(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The gated feed-forwards, as those whose activation another kernel takes with that reason."""
    for rule in context.policy.regions:
        if rule.target_name == "FusedGatedMLP":
            yield from propose_rule(context, rule, functools.partial(_gated_activation, context, rule))


def propose_softmax(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The softmax modules, and the softmax inside transformers' eager attention."""
    yield from propose(context)
    yield from eager_attention.propose(context)


def _constant(options: Mapping[str, Any], candidate: Candidate) -> Mapping[str, Any]:
    return options


def _bias_gelu(context: ProposalContext, candidate: Candidate) -> Mapping[str, Any] | str:
    gelu = child_rule(candidate, "act", context.policy.kernels, "FusedGELU")
    if gelu is None:
        return f"its activation is {type(candidate.module.act).__name__}, not a GELU"
    # torch.nn.GELU computes the erf or the tanh form, which its attribute says.
    approximate = gelu.options.get("approximate") or candidate.module.act.approximate
    run = functools.partial(ops.gelu, approximate=approximate, backend=context.wanted)
    return {"activation": run, "bias_activation": run}


def _gated_activation(context: ProposalContext, rule: Rule, candidate: Candidate) -> Mapping[str, Any] | str:
    act = child_rule(candidate, rule.options["act"], context.policy.regions, "FusedActivation")
    activation = act.options["region"] if act is not None else None
    if act is None or activation not in find_kernel(context.request).activations:
        taker = next((kernel.name for kernel in kernels().values() if activation in kernel.activations), None)
        name = type(getattr(candidate.module, rule.options["act"])).__name__
        return f"its activation is {name}" + (f", which {taker} takes" if taker else "")
    return {
        **rule.options,
        "gated_activation": functools.partial(ops.gated_activation, activation=activation, backend=context.wanted),
        "float32_under_autocast": act.options.get("float32_under_autocast", False),
    }
