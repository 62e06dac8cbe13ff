"""FusedRotaryEmbedding: the rotary embedding inside attention modules, whose class stays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator

from fuseopt.blocks.rotary_embedding import RotaryAttentionForward
from fuseopt.model_index import Candidate
from fuseopt.models import Rule
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext
from fuseopt.strategies.propose import EXACT_MATCH, forward_name, forward_sites, subclass_reason


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The `forward` of each attention; a Skip for attentions with a rotary embedding that the policy does not name."""
    rules = {rule.source: rule for rule in context.policy.rotary_attentions}
    for candidate in context.index.candidates:
        rule = next((rules[name] for name in candidate.lineage if name in rules), None)
        if rule is None and not _calls_a_rotation(candidate):
            continue
        sites, name = forward_sites(candidate), forward_name(candidate)
        reasons = _not_supported_reasons(candidate, rule)
        if rule is None or reasons:
            yield context.skip(sites, name, rule.target_name if rule else context.request, "; ".join(reasons))
            continue
        build = functools.partial(RotaryAttentionForward, candidate.module, backend=context.wanted, **rule.options)
        yield context.replacement(sites, name, rule.target_name, EXACT_MATCH, build)


def _not_supported_reasons(candidate: Candidate, rule: Rule | None) -> list[str]:
    if rule is None:
        return ["it has a rotary embedding, but its class is not known to compute what Llama's does"]
    if not candidate.is_exactly(rule.source):
        return [subclass_reason(rule.source)]
    return candidate.forward_blocked_reasons()


def _calls_a_rotation(candidate: Candidate) -> bool:
    code = getattr(inspect.unwrap(type(candidate.module).forward), "__code__", None)
    return code is not None and any(name.startswith("apply_rotary") for name in code.co_names)
