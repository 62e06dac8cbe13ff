"""`generation`: the decode loop behind one model instance's `generate()`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from fuseopt.build import loader
from fuseopt.config import Config, GenerationOptions
from fuseopt.generation.engine.low_bit import packs_on
from fuseopt.generation.engine.quantised_cache import no_8_bit_cache_reason
from fuseopt.generation.families.step_interface import DecodeStep, StepName, decode_step_class, registered_step
from fuseopt.model_index import ModelIndex
from fuseopt.models import ModelPolicy, full_name
from fuseopt.modules import lora, quantised
from fuseopt.modules.children import unexpected_modules
from fuseopt.ops import registry
from fuseopt.ops.decode.quantized_heads import EIGHT_BIT_ATTENTION
from fuseopt.plan import Replacement, Skip
from fuseopt.runtime.module_watch import modules_below
from fuseopt.strategies.context import BackendChoice, ProposalContext, generating_site
from fuseopt.tuning import tuned

_REQUEST = "generation"
_TARGET = "FusedGenerate"
_METHOD = "generate"
_REASON = "transformers prepares each call; the tier that decodes is chosen in each call"


class GenerationStrategy:
    """Sets `generate` on the model instance."""

    name = "generation"
    block = "generation"

    def requested(self, config: Config) -> tuple[str, ...]:
        return (_REQUEST,) if config.generation and config.generation.enable else ()

    def propose(self, index: ModelIndex, policy: ModelPolicy, config: Config) -> Iterator[Replacement | Skip]:
        if config.generation is None or not config.generation.enable:
            return
        site = generating_site(index, _METHOD)
        model, model_class = site.owner, type(site.owner)
        name = full_name(model_class)
        step = registered_step(name) or policy.decode_steps.get(name)
        reason = None
        if not hasattr(model_class, _METHOD):
            reason = f"{model_class.__name__} has no generate() of transformers"
        elif step is None:
            reason = f"no decode step is written for {model_class.__name__}"
        elif _METHOD in model.__dict__:
            reason = f"{_METHOD} has been set on the instance"
        else:
            reason = "; ".join(decode_step_class(step).not_supported_reasons(model)) or None
        context = ProposalContext(index, policy, _REQUEST, self.name, choice=BackendChoice(libraries=_libraries(index)))
        if step is None or reason is not None:
            yield context.skip((site,), model_class.__name__, _TARGET, reason or "")
            return
        build = functools.partial(_build, model, step, config.generation)
        adapted = {path: module for path, module in model.named_modules() if lora.is_lora_linear(module)}
        around = (f"{path} {why}" for path, module in adapted.items() if (why := quantised.reason_against(module)))
        notes, options = [lora.described(adapted, next(around, None))] if adapted else [], config.generation
        notes += [*_weight_notes(index, model, step, options), *_cache_notes(index, model, step, options)]
        notes += _prefix_notes(index, model, step, options)
        reason = "; ".join((_REASON, *notes))
        planned = context.replacement((site,), "GenerationMixin", _TARGET, reason, build)
        yield dataclasses.replace(planned, notes=tuple(notes))


def _cache_notes(index: ModelIndex, model: nn.Module, step: StepName, options: GenerationOptions) -> Iterator[str]:
    """The plan's note on keys and values in 8 bits, or the reason against them."""
    if options.cache_dtype is None:
        return
    reason = _plain_cache_reason(index, model, decode_step_class(step))
    if reason is not None:
        yield f"keys and values stay in the model's dtype: {reason}"
        return
    on_gpu = [device for device in index.devices if device.type == "cuda"]
    least = max((tuned("decode_attention_8_bit_bytes", device) for device in on_gpu), default=0)
    condition = f" if a layer has {least / 1e6:.0f} MB of them or more" if least else ""
    yield f"keys and values in {options.cache_dtype}{condition}"
    attention, devices = registry.get(EIGHT_BIT_ATTENTION), (d for d in index.devices if d.type != "meta")
    for choice in (attention.choose("auto", device, [index.dtype], may_build=True) for device in devices):
        if choice.backend == "reference":
            yield f"each step dequantises them in PyTorch, which is slow: {'; '.join(choice.refused['cpu'])}"


def _plain_cache_reason(index: ModelIndex, model: nn.Module, step_class: type[DecodeStep]) -> str | None:
    """The reason why keys and values stay in the model's dtype; None if they can have 8 bits."""
    if not step_class.takes_quantised_cache:
        return f"{step_class.__name__} does not support 8-bit caches"
    head_dim = step_class.head_dim_of(model)
    reasons = (no_8_bit_cache_reason(device, index.dtype, head_dim, may_build=True) for device in index.devices)
    return next(filter(None, reasons), None)


def _weight_notes(index: ModelIndex, model: nn.Module, step: StepName, options: GenerationOptions) -> Iterator[str]:
    """Which weights are pre-quantised, which would be quantised, and why not the others."""
    step_class, weights = decode_step_class(step), options.weights
    below = {id(module) for module in modules_below(*step_class.roots(model))}
    named = ((path, module) for path, module in model.named_modules() if id(module) in below)
    came = {path: reason for path, module in named if (reason := quantised.reason_against(module)) is not None}
    unread = _unread_reason(model, step_class, came)
    if came and unread is not None:
        count = sum(not lora.is_lora_linear(model.get_submodule(path)) for path in came)
        yield f"{count} pre-quantised linear layers; transformers decodes, since {unread}"
    elif came:
        layers = step_class.quantised_layers(model)
        yield quantised.described(part for layer in layers for part in layer.checkpoint) + ", read by the step"
    if weights is None:
        return
    if not step_class.takes_low_bit:
        yield f"no weight in {weights}: {step_class.__name__} reads the model's own"
    elif unread is not None:
        yield f"weights in {weights}: none, since transformers decodes"
    else:
        yield f"weights in {weights}: {step_class.low_bit_choice(model, weights)}"
        if weights.keep == "cpu" and not any(map(packs_on, index.devices)):
            yield "`keep: 'cpu'` has no effect, since the weights are not on a GPU"


def _unread_reason(model: nn.Module, step_class: type[DecodeStep], came: Mapping[str, str]) -> str | None:
    """Why no step reads the model's weights; None if one does.

    Args:
        came: path of each pre-quantised layer -> why it is not read; "" if it is.
    """
    for path, reason in came.items():
        if reason:
            return f"{path} {reason}"
    if came and not step_class.takes_low_bit:
        return f"{step_class.__name__} reads no quantised weights"
    unexpected = unexpected_modules(model, step_class.children, step_class.roots(model), _fits)
    if unexpected:
        path, module = unexpected[0]
        return f"{path} {lora.kind_of(module) or f'is a {type(module).__name__}, which the decode step does not know'}"
    try:
        if came:
            step_class.quantised_layers(model)
    except quantised.UnreadableWeight as error:
        return error.said_of(model)
    return None


def _fits(module: nn.Module, names: Sequence[str]) -> bool:
    return lora.fits(module, names) or quantised.fits(module, names)


def _prefix_notes(index: ModelIndex, model: nn.Module, step: StepName, options: GenerationOptions) -> Iterator[str]:
    """Whether a prefix cache is used, or why not."""
    if not options.prefix_cache_mib:
        return
    step_class = decode_step_class(step)
    if model.config.is_encoder_decoder:
        yield "no prefix cache: each token of an encoder's output depends on all of its input"
    elif not step_class.takes_prefix:
        yield f"no prefix cache: {step_class.__name__} always runs prompts from their first token"
    elif options.cache_dtype is not None and _plain_cache_reason(index, model, step_class) is None:
        yield "no prefix cache: a prompt attends to its keys and values before they are rounded to 8 bits"
    else:
        yield f"prefix cache of {options.prefix_cache_mib} MiB"


def _libraries(index: ModelIndex) -> tuple[loader.Kind, ...]:
    """The native libraries that run the step's norms, if they are available."""
    norm = registry.get("rms_norm")
    devices = (device for device in index.devices if device.type != "meta")
    chosen = {norm.choose("auto", device, [index.dtype], may_build=True).backend for device in devices}
    return tuple(kind for kind in loader.KINDS if kind in chosen)


def _build(model: nn.Module, step: StepName, options: GenerationOptions) -> object:
    from fuseopt.generation.generate import FusedGenerate

    return FusedGenerate(model, step, options)
