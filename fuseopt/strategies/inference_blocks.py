"""FusedBlock: blocks in inference without the forwards of the modules inside; on a GPU a whole stack at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import nn

from fuseopt.blocks import stack_runner
from fuseopt.blocks.inference_blocks import InferenceForward
from fuseopt.blocks.stack_runner import StackRunner
from fuseopt.model_index import Candidate
from fuseopt.models import Rule
from fuseopt.modules.children import unexpected_modules
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext
from fuseopt.strategies.propose import EXACT_MATCH, forward_name, forward_sites, subclass_reason

_REASON = f"{EXACT_MATCH}, and every module inside has its expected class"
_CAPTURED = "its blocks are launched as one CUDA graph for each input size that repeats"
_EAGER = "all of its blocks run together, without the forwards of the modules inside"
_NOT_ON_GPU = "it runs with all blocks of its stack together, on a GPU only"
_NOT_NAMED = "it runs with all blocks of its stack together, and the policy names no such stack around it"


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The `forward` of each block and, if the model is on a GPU, that of each stack of such blocks only."""
    index, policy = context.index, context.policy
    blocks = [(rule, candidate) for rule in policy.inference_blocks for candidate in index.of_class(rule.source)]
    on_gpu = any(device.type in stack_runner.DEVICE_TYPES for device in index.devices)
    reasons = {id(block.module): _not_supported_reasons(context, block, rule, on_gpu) for rule, block in blocks}
    rules = {rule.source: rule for rule in policy.stacks} if on_gpu else {}
    stacks = [candidate for candidate in (index.root, *index.candidates) if candidate.lineage[0] in rules]
    # The ModuleList that the blocks of a stack are in -> what runs them together, or why they do not run so.
    runners: dict[int, StackRunner | str] = {}
    of_stacks: list[Replacement | Skip] = []
    for stack in stacks:
        rule = rules[stack.lineage[0]]
        container = getattr(stack.module, rule.options["blocks"])
        proposal, runners[id(container)] = _propose_stack(context, stack, rule, container, reasons)
        of_stacks.append(proposal)
    for rule, candidate in blocks:
        sites, name = forward_sites(candidate), forward_name(candidate)
        target, found = _target(rule), reasons[id(candidate.module)]
        runner = runners.get(id(candidate.sites[0].owner), _NOT_NAMED)
        if target.needs_runner and isinstance(runner, str) and not found:
            found = [runner]
        if found:
            yield context.skip(sites, name, rule.target_name, "; ".join(found))
            continue
        found_runner = None if isinstance(runner, str) else runner
        build = functools.partial(target, candidate.module, context.wanted, **rule.options, runner=found_runner)
        yield context.replacement(sites, name, rule.target_name, _REASON, build)
    yield from of_stacks


def _propose_stack(
    context: ProposalContext, stack: Candidate, rule: Rule, container: nn.Module, reasons: dict[int, list[str]]
) -> tuple[Replacement | Skip, StackRunner | str]:
    """The proposal for the stack, and what runs its blocks together or the reason why they do not run so.

    Args:
        reasons: id of a block -> why that cannot be replaced.
    """
    sites, name = forward_sites(stack), forward_name(stack)
    left = [path for path, block in container.named_children() if reasons.get(id(block), ["it is another block"])]
    if left:
        why = f"its block {left[0]} cannot be replaced, and all of its blocks run together or none"
        of_blocks = f"block {left[0]} of its stack cannot be replaced, and all run together or none"
        return context.skip(sites, name, rule.target_name, why), of_blocks
    blocked = "; ".join(stack.forward_blocked_reasons())
    if blocked:
        return context.skip(sites, name, rule.target_name, blocked), f"its stack cannot be replaced: {blocked}"
    cuda_graphs = context.options.get("cuda_graphs", True)
    runner = StackRunner(stack.module, rule.options["blocks"], cuda_graphs)
    build = functools.partial(rule.target_class, stack.module, runner)
    requires = tuple(site for block in container for site in forward_sites(context.index.candidate(block)))
    why = _CAPTURED if cuda_graphs else _EAGER
    return context.replacement(sites, name, rule.target_name, why, build, requires=requires), runner


def _target(rule: Rule) -> type[InferenceForward]:
    target: type[InferenceForward] = rule.target_class
    return target


def _not_supported_reasons(context: ProposalContext, candidate: Candidate, rule: Rule, on_gpu: bool) -> list[str]:
    if not candidate.is_exactly(rule.source):
        return [subclass_reason(rule.source)]
    target = _target(rule)
    if target.needs_runner and not on_gpu:
        return [_NOT_ON_GPU]
    reasons = candidate.forward_blocked_reasons()
    inner = [context.index.candidate(module) for module in candidate.module.modules()]
    reasons = reasons or [f"its {c.sites[0].path}: {why}" for c in inner for why in c.left_out_reasons()][:1]
    unexpected = unexpected_modules(candidate.module, rule.options.get("children", {}))
    if unexpected:
        others = [f"{path} ({type(module).__name__})" for path, module in unexpected]
        reasons.append(f"the policy does not name the classes of {', '.join(others)}")
    return reasons or target.backend_reasons(candidate.module, context.wanted)
