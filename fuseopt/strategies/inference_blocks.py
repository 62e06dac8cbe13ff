"""FusedBlock: the forward of a block without gradients, past those of the modules inside; on a GPU all in one graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from fuseopt import modules
from fuseopt.models import ModelPolicy, Rule
from fuseopt.modules import block_chain
from fuseopt.modules.block_chain import BlockChain
from fuseopt.modules.inference_blocks import unknown_modules
from fuseopt.plan import Candidate, ModelIndex, Replacement, Skip
from fuseopt.strategies.propose import Offer, forward_name, forward_sites, replacement, skip

_REASON = "exactly the class that the policy names, with nothing but known classes inside"
_CHAINED = "its blocks are launched as one CUDA graph, for each size that comes often"


def propose(
    index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str, cuda_graphs: bool
) -> Iterator[Replacement | Skip]:
    """One site a block, its `forward`; and that of a stack of nothing but such blocks, where the model is on a GPU."""
    chains: dict[int, BlockChain] = {}
    blocks = [(rule, candidate) for rule in policy.inference_blocks for candidate in index.of_class(rule.source)]
    reasons = {id(candidate.module): _not_supported_reasons(candidate, rule) for rule, candidate in blocks}
    if cuda_graphs and any(device.type in block_chain.DEVICE_TYPES for device in index.devices):
        stacks = {rule.source: rule for rule in policy.stacks}
        for stack in (Candidate(index.model, ()), *index.candidates):
            rule = stacks.get(stack.lineage[0])
            if rule is None:
                continue
            container = getattr(stack.module, rule.options["blocks"])
            if any(reasons.get(id(block), ["it is another block"]) for block in container.children()):
                continue
            sites, name = forward_sites(stack), forward_name(stack)
            if "forward" in stack.module.__dict__:
                yield skip(sites, name, rule.target, offer, "its forward has been replaced on the instance")
                continue
            chains[id(container)] = BlockChain(stack.module, rule.options["blocks"])
            build = functools.partial(getattr(modules, rule.target), stack.module, chains[id(container)])
            yield replacement(sites, name, rule.target, offer, _CHAINED, build)
    for rule, candidate in blocks:
        sites, name = forward_sites(candidate), forward_name(candidate)
        if reasons[id(candidate.module)]:
            yield skip(sites, name, rule.target, offer, "; ".join(reasons[id(candidate.module)]))
            continue
        chain = chains.get(id(candidate.sites[0].owner))
        target = getattr(modules, rule.target)
        build = functools.partial(target, candidate.module, backend, **rule.options, chain=chain)
        yield replacement(sites, name, rule.target, offer, _REASON, build)


def _not_supported_reasons(candidate: Candidate, rule: Rule) -> list[str]:
    if not candidate.is_exactly(rule.source):
        return [f"it is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ"]
    # Hooks on the block run around its forward, whichever that is.
    reasons = ["its forward has been replaced on the instance"] if "forward" in candidate.module.__dict__ else []
    unknown = unknown_modules(candidate.module, rule.options["classes"])
    if unknown:
        reasons.append(f"the policy does not name the classes of {', '.join(unknown)}")
    return reasons
