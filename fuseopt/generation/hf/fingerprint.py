"""ModelFingerprint: what a decode step was built from: module classes, hooks, constants and weight addresses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fuseopt.blocks.causal_attention import CausalStackForward
from fuseopt.blocks.gpt2_inference import GPT2InferenceForward, GPT2StackForward
from fuseopt.blocks.llama_inference import LlamaInferenceForward, LlamaStackForward
from fuseopt.blocks.relative_attention import RelativeStackForward
from fuseopt.blocks.residual import GPT2BlockForward, T5BlockForward
from fuseopt.blocks.rotary_embedding import RotaryAttentionForward
from fuseopt.blocks.t5_inference import T5InferenceForward, T5StackForward
from fuseopt.generation.engine.parked_weights import ParkedForward, is_parked
from fuseopt.generation.hf.redundant_attributes import contradictions
from fuseopt.modules import lora, quantised
from fuseopt.modules.base import has_hooks, is_own_method
from fuseopt.modules.children import Children, unexpected_modules
from fuseopt.modules.lora import LoraLayers, is_lora_linear, kind_of
from fuseopt.runtime.module_watch import (
    CONSTANTS,
    REDUNDANT,
    ModuleWatch,
    has_other_weights,
    modules_below,
    only_captures_outputs,
    trains_or_has_hooks,
)
from fuseopt.training.forward import TrainingForward

# Forwards that fuseopt sets on modules. They compute what the class's forward does.
_FORWARDS = (
    CausalStackForward,
    GPT2BlockForward,
    GPT2InferenceForward,
    GPT2StackForward,
    LlamaInferenceForward,
    LlamaStackForward,
    ParkedForward,
    RelativeStackForward,
    RotaryAttentionForward,
    T5BlockForward,
    T5InferenceForward,
    T5StackForward,
    TrainingForward,
)


@dataclass(frozen=True)
class ModelFingerprint:
    """Result of one walk over a model's modules.

    Attributes:
        reason: why a decode step would not compute what the modules do; None if it would.
        key: differs if a module or a constant is another, or if a weight has another address, dtype or layout. Weight
            values are not part of it, since steps read them in place.
        watch: compares the modules with this walk faster than another walk; None if a module has hooks, which only a
            walk can examine.
        lora: the LoRA layers in the trees.
        parameters: the Parameters of the modules, except weights that `parked_weights` keeps in host memory; for
            pre-quantised layers, the tensors that their forwards read.
    """

    reason: str | None
    key: tuple[Hashable, ...] = ()
    watch: ModuleWatch | None = None
    lora: LoraLayers = field(default_factory=lambda: LoraLayers({}), compare=False)
    parameters: Sequence[nn.Parameter] = field(default=(), compare=False)

    def is_in_place(self) -> bool:
        """Whether the weights have their addresses and autocast is off, so that a step can read them.

        Its results may still be invalid, since nothing else is compared.
        """
        watch = self.watch
        return watch is not None and not torch.is_autocast_enabled(watch.device_type) and watch.is_in_place()


def fingerprint(
    model: nn.Module,
    roots: Sequence[nn.Module],
    children: Children,
    before: ModelFingerprint | None = None,
    *,
    takes_lora: bool = False,
    takes_low_bit: bool = False,
) -> ModelFingerprint:
    """Fingerprint of `model` itself and the trees below `roots`, which are children of it.

    Written for speed, since it runs in every call and models have hundreds of modules.

    Args:
        children: the class that each module must have, see `fuseopt.modules.children`.
        before: an earlier result for the same arguments, returned if nothing has changed.
        takes_lora: linear layers may be inside LoRA layers.
        takes_low_bit: linear layers may be pre-quantised.
    """
    if before is not None and before.watch is not None and before.watch.is_unchanged():
        return before

    def accepts(module: nn.Module, names: Sequence[str]) -> bool:
        return (takes_lora and lora.fits(module, names)) or (takes_low_bit and quantised.fits(module, names))

    for path, module in unexpected_modules(model, children, roots, accepts):
        kind = kind_of(module) or quantised.library_of(module)
        return ModelFingerprint(
            f"{path} {kind or f'is a {type(module).__name__}, which the decode step does not know'}"
        )
    key: list[Hashable] = []
    modules, special = [model, *modules_below(*roots)], False
    parameters: list[Tensor] = []
    buffers = []
    for module in modules:
        state, reason = module.__dict__, None
        held = [parameter for parameter in state["_parameters"].values() if parameter is not None]
        if is_parked(module):
            held = [parameter for parameter in held if parameter is not state["_parameters"]["weight"]]
        is_quantised = takes_low_bit and quantised.is_quantised(module)
        if is_quantised:
            stored, reason = quantised.stored_tensors(module)
            held = list(stored)
            # A tensor inside a weight of a subclass may be replaced, as in `weight.scale = scale`.
            subclassed = (vars(parameter) for parameter in state["_parameters"].values() if parameter is not None)
            buffers += [state["_buffers"], *subclassed]
        elif any(type(parameter) is not nn.Parameter for parameter in held):
            reason = quantised.library_of(module) or "has parameters of a tensor subclass, such as sharded ones"
        if is_quantised or trains_or_has_hooks(module) or "forward" in state or has_other_weights(module):
            reason = reason or _module_reason(module, is_quantised)
            special = special or trains_or_has_hooks(module)
        if reason:
            path = next(path for path, other in model.named_modules() if other is module)
            return ModelFingerprint(f"{path or 'the model'} {reason}")
        key.append((id(module), type(module), *map(state.get, (*CONSTANTS, *REDUNDANT))))
        parameters += held
    for module, name in contradictions(modules):
        path = next(path for path, other in model.named_modules() if other is module)
        return ModelFingerprint(f"{path}.{name} is {module.__dict__.get(name)!r}, unlike its weights or config")
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):
            return ModelFingerprint("the model has parameters that DeepSpeed ZeRO-3 shards")
        key.append((parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()))
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        return ModelFingerprint("the model's parameters are on several devices")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        return ModelFingerprint(f"the model is on {device}")
    if torch.is_autocast_enabled(device.type):
        return ModelFingerprint("autocast is on")
    watch = None if special else ModuleWatch(modules, parameters, buffers=buffers)
    return ModelFingerprint(None, (device, *key), watch, _lora_layers(model, modules), parameters)


def _lora_layers(model: nn.Module, modules: Sequence[nn.Module]) -> LoraLayers:
    found = {id(module) for module in modules if is_lora_linear(module)}
    return LoraLayers({path: module for path, module in model.named_modules() if id(module) in found} if found else {})


def _module_reason(module: nn.Module, is_quantised: bool) -> str | None:
    if module.training:
        return "is in training mode"
    if has_hooks(module) and not (only_captures_outputs(module) or quantised.only_decompresses(module)):
        return "carries hooks" + (", such as peft's for adapter_names" if is_lora_linear(module) else "")
    if "_hf_hook" in module.__dict__:
        return "is dispatched or offloaded by accelerate"
    forward = module.__dict__.get("forward")
    is_own = is_quantised and quantised.has_own_forward(module)
    is_own = is_own or type(forward) in _FORWARDS
    if "forward" in module.__dict__ and not is_own and not is_own_method(module, "forward"):
        return "has had its forward replaced"
    if not is_quantised and has_other_weights(module):
        return "has weights that are not Parameters, or an embedding's max_norm"
    return None
