"""FusedRotaryEmbedding: the rotation of queries and keys inside attentions, which stay modules of their own class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator

from fuseopt.blocks.rotary_embedding import RotaryAttentionForward
from fuseopt.models import ModelPolicy, Rule
from fuseopt.plan import Candidate, ModelIndex, Replacement, Skip
from fuseopt.strategies.propose import Offer, forward_name, forward_sites, replacement, skip


def propose(index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str) -> Iterator[Replacement | Skip]:
    """One site an attention: its `forward`. Attentions that rotate, but that the policy does not name, are Skips."""
    rules = {rule.source: rule for rule in policy.rotary_attentions}
    for candidate in index.candidates:
        rule = next((rules[name] for name in candidate.lineage if name in rules), None)
        if rule is None and not _calls_a_rotation(candidate):
            continue
        sites, name = forward_sites(candidate), forward_name(candidate)
        reasons = _not_supported_reasons(candidate, rule)
        if rule is None or reasons:
            yield skip(sites, name, rule.target_name if rule else offer.request, offer, "; ".join(reasons))
            continue
        build = functools.partial(RotaryAttentionForward, candidate.module, backend=backend, **rule.options)
        yield replacement(sites, name, rule.target_name, offer, "exactly the class that the policy names", build)


def _not_supported_reasons(candidate: Candidate, rule: Rule | None) -> list[str]:
    if rule is None:
        return ["it rotates, but not by a forward and a function that compute what Llama's do"]
    if not candidate.is_exactly(rule.source):
        return [f"it is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ"]
    # Hooks on the attention run around its forward, whichever that is.
    return ["its forward has been replaced on the instance"] if "forward" in candidate.module.__dict__ else []


def _calls_a_rotation(candidate: Candidate) -> bool:
    code = getattr(inspect.unwrap(type(candidate.module).forward), "__code__", None)
    return code is not None and any(name.startswith("apply_rotary") for name in code.co_names)
