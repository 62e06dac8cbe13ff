"""`memory_efficient_fusion`: training steps compiled by AOT Autograd with the min-cut rematerialisation partitioner."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from fuseopt.build import loader
from fuseopt.config import AUTO, Config, MemoryEfficientOptions
from fuseopt.models import ModelPolicy
from fuseopt.modules import regions
from fuseopt.ops import registry
from fuseopt.plan import ModelIndex, Replacement, Site, Skip
from fuseopt.strategies import losses
from fuseopt.strategies.propose import Offer, replacement, skip
from fuseopt.training.forward import TrainingForward, not_captured_reason, not_supported_reasons

_REQUEST = "memory_efficient_fusion"
_TARGET = "TrainingForward"
_LOSS = "ForCausalLMLoss"
_LOSS_REASON = "the loss transformers takes for None, but with a warning that would break the graph"


class MemoryEfficientStrategy:
    """Swaps `forward` on the model instance, and sets the loss where transformers would warn before guessing it."""

    name = "memory_efficient"

    def requested(self, config: Config) -> tuple[str, ...]:
        return (_REQUEST,) if config.active_fusion.memory_efficient_fusion else ()

    def propose(self, index: ModelIndex, policy: ModelPolicy, config: Config) -> Iterator[Replacement | Skip]:
        options = config.active_fusion.memory_efficient_fusion
        if options is None:
            return
        model = index.model
        source = f"{type(model).__name__}.forward"
        sites = (Site(model, "forward", "forward"),)
        offer = _offer(self.name, options.backend, index)
        reasons = not_supported_reasons(model) + regions.not_supported_reasons(options.backend)
        if reasons:
            yield skip(sites, source, _TARGET, offer, "; ".join(reasons))
            return
        uncaptured = not_captured_reason(model) if options.cuda_graphs else None
        build = functools.partial(
            TrainingForward,
            model,
            backend=options.backend,
            budget=options.budget,
            cuda_graphs=options.cuda_graphs if uncaptured is None else False,
        )
        yield replacement(sites, source, _TARGET, offer, _reason(options, uncaptured), build)
        guessed = losses.loss_sites(model, losses.guesses_its_loss)
        if guessed:
            offer = Offer(_REQUEST, self.name)
            # Not by `loss_type`: Trainer looks at that to decide by what it divides the loss.
            yield replacement(guessed, "None", _LOSS, offer, _LOSS_REASON, losses.causal_lm_loss)


def _offer(strategy: str, backend: str, index: ModelIndex) -> Offer:
    """With the native library that large products run by on a GPU, or why they do not."""
    op = registry.get("tuned_matmul")
    devices = [device for device in index.devices if device.type == "cuda" and backend == "inductor"]
    choices = [op.choose("auto", device, [torch.bfloat16], may_build=True) for device in devices]
    libraries = tuple(kind for kind in loader.KINDS if any(kind == choice.backend for choice in choices))
    reasons = dict.fromkeys(reason for choice in choices for found in choice.refused.values() for reason in found)
    refused = f"products as cuBLAS chooses: {'; '.join(reasons)}" if reasons else None
    return Offer(_REQUEST, strategy, backend, libraries, refused)


def _reason(options: MemoryEfficientOptions, uncaptured: str | None) -> str:
    budgeted = f", at most {options.budget:.0%} of the others kept" if options.budget < 1 else ""
    captured = ""
    if uncaptured is not None:
        captured = f", without CUDA graphs ({uncaptured})"
    elif options.cuda_graphs:
        captured = f", in CUDA graphs {'where a GPU waits for the host' if options.cuda_graphs == AUTO else 'on a GPU'}"
    kept = f"cheap activations recomputed{budgeted}{captured}"
    return f"training steps as one graph, {kept}; eval and generate() stay as they are"
