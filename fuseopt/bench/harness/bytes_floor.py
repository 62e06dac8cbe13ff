"""Lower bound on the time of a decode step: the bytes that it must read, at the speed of memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from fuseopt.runtime.timer import time_in_turns, work_seconds
from fuseopt.verify_low_bit import fused_generate

# Decoder layers that run once per call, over the encoder's output.
_ONCE_A_CALL = tuple(
    f"{attention}.{part}"
    for attention, parts in (("EncDecAttention", "kv"), ("encoder_attn", ("k_proj", "v_proj")))
    for part in parts
)

_SCALE_BYTES = 4


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that every step reads: decoder and head, without embeddings, which are looked up by row."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    modules = [
        module
        for path, module in decoder.named_modules()
        if not isinstance(module, nn.Embedding) and not path.endswith(_ONCE_A_CALL)
    ]
    parameters = {parameter for module in (*modules, head) for parameter in module.parameters(recurse=False)}
    return sum(parameter.nbytes for parameter in parameters)


def cache_bytes(model: nn.Module, batch: int, beams: int, prompt: int, new: int) -> int:
    """Bytes of the keys and values that a step reads, averaged over `new` steps.

    Args:
        model: stock, or one whose generate() has run; its config may keep keys and values in 8 bits.
        prompt: tokens per row. All beams share the keys and values of an encoder's prompt.
    """
    config = model.config.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "d_kv", None) or getattr(config, "head_dim", None) or width
    own, shared = batch * beams * new // 2, batch * prompt
    tokens = own + (shared if model.config.is_encoder_decoder else shared * beams)
    generate = fused_generate(model)
    has_8_bits = generate is not None and generate.cache_dtype
    a_vector = head_dim + _SCALE_BYTES if has_8_bits else head_dim * model.dtype.itemsize
    return 2 * layers * heads * a_vector * tokens


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which a step can read weights: a copy's on a GPU, a sum's on a CPU.

    A copy on a CPU is slower than its bytes read alone, as it reads the lines of the target too.
    """
    if device.type == "cuda":
        return copy_bandwidth(device)
    source = torch.ones(2**26, device=device)
    return source.nbytes / _seconds(source.sum, device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy of a large tensor reads and writes."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(functools.partial(target.copy_, source), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    sample = functools.partial(work_seconds, device=device, repetitions=4)
    return time_in_turns({"call": call}, sample, rounds=7)["call"].seconds.median
