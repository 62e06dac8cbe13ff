"""`memory_efficient_fusion`: training steps compiled by AOT Autograd with the min-cut rematerialisation partitioner."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from fuseopt.build import loader
from fuseopt.config import AUTO, Config, MemoryEfficientOptions
from fuseopt.model_index import ModelIndex, Site
from fuseopt.models import ModelPolicy
from fuseopt.modules import regions
from fuseopt.ops import registry
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies import losses
from fuseopt.strategies.context import BackendChoice, ProposalContext
from fuseopt.training.forward import TrainingForward, not_captured_reason, not_supported_reasons

_REQUEST = "memory_efficient_fusion"
_TARGET = "TrainingForward"
_LOSS = "ForCausalLMLoss"
_LOSS_REASON = "transformers would use this loss too, but its warning would break the graph"


class MemoryEfficientStrategy:
    """Sets `forward` on the model instance, and the loss if transformers would warn before it guesses that."""

    name = "memory_efficient"
    block = "kernel_fusion"

    def requested(self, config: Config) -> tuple[str, ...]:
        return (_REQUEST,) if config.active_fusion.memory_efficient_fusion else ()

    def propose(self, index: ModelIndex, policy: ModelPolicy, config: Config) -> Iterator[Replacement | Skip]:
        options = config.active_fusion.memory_efficient_fusion
        if options is None:
            return
        model = index.model
        source = f"{type(model).__name__}.forward"
        sites = (Site(model, "forward", "forward"),)
        choice = _backend_choice(options.backend, index)
        context = ProposalContext(index, policy, _REQUEST, self.name, choice=choice)
        reasons = not_supported_reasons(model) + regions.not_supported_reasons(options.backend)
        if reasons:
            yield context.skip(sites, source, _TARGET, "; ".join(reasons))
            return
        uncaptured = not_captured_reason(model) if options.cuda_graphs else None
        build = functools.partial(
            TrainingForward,
            model,
            backend=options.backend,
            budget=options.budget,
            cuda_graphs=options.cuda_graphs if uncaptured is None else False,
        )
        yield context.replacement(sites, source, _TARGET, _reason(options, uncaptured), build)
        guessed = losses.loss_sites(model, losses.guesses_its_loss)
        if guessed:
            context = ProposalContext(index, policy, _REQUEST, self.name)
            # `loss_type` stays as it is: Trainer reads it to decide what it divides the loss by.
            yield context.replacement(guessed, "None", _LOSS, _LOSS_REASON, losses.causal_lm_loss)


def _backend_choice(backend: str, index: ModelIndex) -> BackendChoice:
    """The compiler, and the native library for large matmuls on a GPU or the reason why that is not used."""
    op = registry.get("tuned_matmul")
    devices = [device for device in index.devices if device.type == "cuda" and backend == "inductor"]
    choices = [op.choose("auto", device, [torch.bfloat16], may_build=True) for device in devices]
    libraries = tuple(kind for kind in loader.KINDS if any(kind == choice.backend for choice in choices))
    reasons = dict.fromkeys(reason for choice in choices for found in choice.refused.values() for reason in found)
    refused = f"matmuls by cuBLAS's default algorithm: {'; '.join(reasons)}" if reasons else None
    return BackendChoice(backend, libraries, refused)


def _reason(options: MemoryEfficientOptions, uncaptured: str | None) -> str:
    budgeted = f", at most {options.budget:.0%} of the others kept" if options.budget < 1 else ""
    captured = ""
    if uncaptured is not None:
        captured = f", without CUDA graphs ({uncaptured})"
    elif options.cuda_graphs:
        captured = f", in CUDA graphs {'if a GPU waits for the host' if options.cuda_graphs == AUTO else 'on a GPU'}"
    kept = f"cheap activations recomputed{budgeted}{captured}"
    return f"training steps as one graph, {kept}; eval mode and generate() are unchanged"
