"""Drop-in modules on fuseopt's ops: `custom_cuda_kernels` and `triton_kernels`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fuseopt import ops
from fuseopt.build import loader
from fuseopt.config import Config, KernelFusion, KernelRequest
from fuseopt.errors import BackendError
from fuseopt.models import ModelPolicy, Rule
from fuseopt.ops import registry
from fuseopt.plan import Candidate, ModelIndex, Replacement, Skip
from fuseopt.strategies import (
    causal_attention,
    eager_attention,
    heads,
    inference_blocks,
    logits_processors,
    losses,
    relative_attention,
    residual,
    rotary_embedding,
)
from fuseopt.strategies.propose import Offer, Options, child_rule, propose_rule

# Kernel name -> the op whose backends run it.
OP_NAMES = {
    "FusedRMSNorm": "rms_norm",
    "FusedLayerNorm": "layer_norm",
    "FusedGatedGELU": "gated_activation",
    "FusedSwiGLU": "gated_activation",
    "FusedGELU": "gelu",
    "FusedAttention": "relative_attention",
    "FusedRelativeAttention": "relative_attention",
    "FusedRotaryEmbedding": "rotary_embedding",
    "FusedSoftmax": "softmax",
    "FusedBlock": "add_layer_norm",
    "FusedDropoutAdd": "dropout_add_layer_norm",
    "FusedLinearCrossEntropy": "linear_cross_entropy",
    "FusedCrossEntropy": "cross_entropy",
    "FusedNoRepeatNGram": "no_repeat_ngram",
}

# Kernel name -> what proposes more than the policy's rules for kernels.
_PROPOSERS = {
    "FusedCrossEntropy": losses.propose,
    "FusedDropoutAdd": residual.propose_dropout_add,
    "FusedLinearCrossEntropy": heads.propose_loss,
    "FusedRotaryEmbedding": rotary_embedding.propose,
    "FusedSoftmax": eager_attention.propose,
}

# Likewise, of those that may be asked for where they pay.
_ATTENTIONS = {
    "FusedAttention": causal_attention.propose,
    "FusedRelativeAttention": relative_attention.propose,
}

# Kernel name -> the activations of the gated feed-forwards that it takes.
GATED_ACTIVATIONS = {"FusedGatedGELU": ("gelu", "gelu_tanh"), "FusedSwiGLU": ("silu",)}


@dataclass(frozen=True)
class KernelStrategy:
    """`option` is the key of its kernel list in the config; `backend` pins one, or None leaves it to the config."""

    name: str
    option: str
    backend: str | None = None

    def requested(self, config: Config) -> tuple[str, ...]:
        return tuple(request.name for request in self._requests(config.active_fusion))

    def propose(self, index: ModelIndex, policy: ModelPolicy, config: Config) -> Iterator[Replacement | Skip]:
        fusion = config.active_fusion
        for request in self._requests(fusion):
            if request.name == "FusedLMHead":
                yield from heads.propose_inference(index, policy, Offer(request.name, self.name))
                continue
            backend, offer = choose_backend(request.name, self.backend or fusion.backend, self.name, index)
            if request.name == "FusedNoRepeatNGram":
                yield logits_processors.propose(index, offer, backend)
                continue
            if request.name in GATED_ACTIVATIONS:
                yield from _propose_gated_mlps(index, policy, offer, backend)
            if request.options.get("fold_bias"):
                yield from _propose_bias_gelu(index, policy, offer, backend)
            for rule in policy.kernels:
                if rule.target_name == request.name:
                    yield from propose_rule(index, rule, offer, _options(rule, backend))
            if request.options.get("fuse_residual"):
                op = f"add_{OP_NAMES[request.name]}"
                backend, offer = choose_backend(request.name, self.backend or fusion.backend, self.name, index, op)
                yield from residual.propose(index, policy, offer, backend)
            if request.name == "FusedBlock":
                cuda_graphs = request.options.get("cuda_graphs", True)
                yield from inference_blocks.propose(index, policy, offer, backend, cuda_graphs)
            if request.name in _ATTENTIONS:
                where_it_pays = request.options.get("where_it_pays", False)
                yield from _ATTENTIONS[request.name](index, policy, offer, backend, where_it_pays)
            if request.name in _PROPOSERS:
                yield from _PROPOSERS[request.name](index, policy, offer, backend)

    def _requests(self, fusion: KernelFusion) -> tuple[KernelRequest, ...]:
        """In the order of OP_NAMES, whatever the config's: blocks before the activations inside them."""
        requests: tuple[KernelRequest, ...] = getattr(fusion, self.option)
        places = {name: place for place, name in enumerate(OP_NAMES)}
        return tuple(sorted(requests, key=lambda request: places.get(request.name, len(places))))


CUSTOM_KERNELS = KernelStrategy("kernels", "custom_cuda_kernels")
TRITON_KERNELS = KernelStrategy("triton", "triton_kernels", backend="triton")


def choose_backend(
    kernel: str, wanted: str, strategy: str, index: ModelIndex, op_name: str | None = None
) -> tuple[str, Offer]:
    """The `backend` argument for the fused module, and what that comes to for this model's devices and dtype.

    Args:
        op_name: the op that is to run, where that is not the kernel's own.
    """
    if torch.device("meta") in index.devices:
        return wanted, Offer(kernel, strategy, wanted)
    op = registry.get(op_name or OP_NAMES[kernel])
    refused = []
    try:
        choices = _choices(op, wanted, index)
    except BackendError as error:
        wanted, refused = "auto", [str(error)]
        choices = _choices(op, wanted, index)
    if wanted == "auto" and not refused:
        for device, choice in choices.items():
            if choice.backend != device:
                reasons = choice.refused.get(device, [f"there is no {device} backend"])
                refused.append(f"not on {device}: {'; '.join(reasons)}")
    backends = {choice.backend for choice in choices.values()}
    libraries = tuple(kind for kind in loader.KINDS if kind in backends)
    # Where the device of the input decides between several, the plan can name none of them.
    backend = backends.pop() if len(backends) == 1 else wanted
    by_size = _by_size(op, wanted, index)
    return wanted, Offer(kernel, strategy, backend, libraries, "; ".join(refused) or None, by_size, op.name, wanted)


def _choices(op: registry.Op, wanted: str, index: ModelIndex) -> dict[str, registry.Choice]:
    """The choice for each type of device that `wanted` can run on; BackendError where there is none."""
    choices, refusals = {}, []
    for device in index.devices:
        try:
            choices[device.type] = op.choose(wanted, device, [index.dtype], may_build=True)
        except BackendError as error:
            refusals.append(str(error))
    if not choices:
        raise BackendError("\n".join(dict.fromkeys(refusals)))
    return choices


def _by_size(op: registry.Op, wanted: str, index: ModelIndex) -> str | None:
    """What `wanted` takes at some sizes in the place of the op's first backend."""
    preferred = [str(p) for device in index.devices for p in op.preferred(wanted, device, [index.dtype])]
    return f"by size {', '.join(dict.fromkeys(preferred))}" if preferred else None


def _options(rule: Rule, backend: str) -> Options:
    return lambda candidate: {**rule.options, "backend": backend}


def _propose_bias_gelu(
    index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str
) -> Iterator[Replacement | Skip]:
    def options(candidate: Candidate) -> Mapping[str, Any] | str:
        gelu = child_rule(candidate, "act", policy.kernels, "FusedGELU")
        if gelu is None:
            return f"its activation is no GELU but {type(candidate.module.act).__name__}"
        # torch.nn.GELU computes the erf or the tanh form, which its attribute says.
        approximate = gelu.options.get("approximate") or candidate.module.act.approximate
        run = functools.partial(ops.gelu, approximate=approximate, backend=backend)
        return {"activation": run, "bias_activation": run}

    for rule in policy.regions:
        if rule.target_name == "FusedMLP":
            yield from propose_rule(index, rule, offer, options)


def _propose_gated_mlps(
    index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str
) -> Iterator[Replacement | Skip]:
    def options(rule: Rule, candidate: Candidate) -> Mapping[str, Any] | str:
        act = child_rule(candidate, rule.options["act"], policy.regions, "FusedActivation")
        activation = act.options["region"] if act is not None else None
        if act is None or activation not in GATED_ACTIVATIONS[offer.request]:
            taker = next((name for name, taken in GATED_ACTIVATIONS.items() if activation in taken), None)
            name = type(getattr(candidate.module, rule.options["act"])).__name__
            return f"its activation is {name}" + (f", which {taker} takes" if taker else "")
        return {
            **rule.options,
            "gated_activation": functools.partial(ops.gated_activation, activation=activation, backend=backend),
            "float32_under_autocast": act.options.get("float32_under_autocast", False),
        }

    for rule in policy.regions:
        if rule.target_name == "FusedGatedMLP":
            yield from propose_rule(index, rule, offer, functools.partial(options, rule))
