"""FusedBlock: the forward of a block without gradients, past those of the modules inside; on a GPU all at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from fuseopt.blocks import stack_runner
from fuseopt.blocks.inference_blocks import InferenceForward
from fuseopt.blocks.stack_runner import StackRunner
from fuseopt.models import ModelPolicy, Rule
from fuseopt.modules.children import unexpected_modules
from fuseopt.plan import Candidate, ModelIndex, Replacement, Skip
from fuseopt.strategies.propose import Offer, forward_name, forward_sites, replacement, skip

_REASON = "exactly the class that the policy names, with nothing but known classes inside"
_CHAINED = "its blocks are launched as one CUDA graph, for each size that comes often"
_AT_ONCE = "its blocks run at once, past their own forwards"
_NOT_ON_GPU = "it runs with all blocks of its stack at once, which is done on a GPU"
_NOT_NAMED = "it runs with all blocks of its stack at once, and the policy names no such stack around it"


def propose(
    index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str, cuda_graphs: bool
) -> Iterator[Replacement | Skip]:
    """One site a block, its `forward`; and that of a stack of nothing but such blocks, where the model is on a GPU."""
    blocks = [(rule, candidate) for rule in policy.inference_blocks for candidate in index.of_class(rule.source)]
    on_gpu = any(device.type in stack_runner.DEVICE_TYPES for device in index.devices)
    reasons = {id(block.module): _not_supported_reasons(block, rule, backend, on_gpu) for rule, block in blocks}
    runners: dict[int, StackRunner] = {}
    refusals: dict[int, str] = {}
    stacks = {rule.source: rule for rule in policy.stacks} if on_gpu else {}
    of_stacks: list[Replacement | Skip] = []
    for stack in (Candidate(index.model, ()), *index.candidates):
        rule = stacks.get(stack.lineage[0])
        if rule is None:
            continue
        container = getattr(stack.module, rule.options["blocks"])
        sites, name = forward_sites(stack), forward_name(stack)
        left = [path for path, block in container.named_children() if reasons.get(id(block), ["it is another block"])]
        if left:
            refusals[id(container)] = f"block {left[0]} of its stack stays as it is, and all run at once or none"
            reason = f"its block {left[0]} stays as it is, and all run at once or none"
            of_stacks.append(skip(sites, name, rule.target_name, offer, reason))
        elif "forward" in stack.module.__dict__:
            refusals[id(container)] = "the forward of its stack has been replaced on the instance"
            reason = "its forward has been replaced on the instance"
            of_stacks.append(skip(sites, name, rule.target_name, offer, reason))
        else:
            runners[id(container)] = StackRunner(stack.module, rule.options["blocks"], cuda_graphs)
            build = functools.partial(rule.target_class, stack.module, runners[id(container)])
            needs = tuple(site for block in container for site in forward_sites(index.candidate(block)))
            reason = _CHAINED if cuda_graphs else _AT_ONCE
            of_stacks.append(replacement(sites, name, rule.target_name, offer, reason, build, needs=needs))
    for rule, candidate in blocks:
        sites, name = forward_sites(candidate), forward_name(candidate)
        target, container = _target(rule), candidate.sites[0].owner
        runner, found = runners.get(id(container)), reasons[id(candidate.module)]
        if target.needs_runner and runner is None and not found:
            found = [refusals.get(id(container), _NOT_NAMED)]
        if found:
            yield skip(sites, name, rule.target_name, offer, "; ".join(found))
            continue
        build = functools.partial(target, candidate.module, backend, **rule.options, runner=runner)
        yield replacement(sites, name, rule.target_name, offer, _REASON, build)
    yield from of_stacks


def _target(rule: Rule) -> type[InferenceForward]:
    target: type[InferenceForward] = rule.target_class
    return target


def _not_supported_reasons(candidate: Candidate, rule: Rule, backend: str, on_gpu: bool) -> list[str]:
    if not candidate.is_exactly(rule.source):
        return [f"it is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ"]
    target = _target(rule)
    if target.needs_runner and not on_gpu:
        return [_NOT_ON_GPU]
    # Hooks on the block run around its forward, whichever that is.
    reasons = ["its forward has been replaced on the instance"] if "forward" in candidate.module.__dict__ else []
    unexpected = unexpected_modules(candidate.module, rule.options.get("children", {}))
    if unexpected:
        others = [f"{path} ({type(module).__name__})" for path, module in unexpected]
        reasons.append(f"the policy does not name the classes of {', '.join(others)}")
    return reasons or target.backend_reasons(candidate.module, backend)
