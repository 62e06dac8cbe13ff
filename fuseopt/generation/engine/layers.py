"""Parts of a decode step: embeddings, norms and linear layers; one token a row.

All read the model's own tensors. Few rows run on the kernels of `ops.decode`, others by the BLAS library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.generation.engine.library_products import products_by_library
from fuseopt.generation.engine.low_rank import LoraPart, LowRank
from fuseopt.modules.base import full_name, source_class
from fuseopt.modules.quantised import quantised_weights
from fuseopt.modules.quantised_weight import QuantisedWeight
from fuseopt.ops import registry
from fuseopt.ops.decode.linear import ACTIVATIONS, FEW_ROWS, NORMS, is_fast
from fuseopt.ops.decode.low_rank import updates
from fuseopt.ops.decode.packed_linear import MOST_NORMALISED_ROWS, SLOW_TRANSPOSED_ROWS, most_fast_rows
from fuseopt.ops.dequantize_packed import dequantize_packed
from fuseopt.ops.low_bit import MAX_ROWS as MOST_LOW_BIT_ROWS
from fuseopt.ops.low_bit import LowBitWeight, dequantize
from fuseopt.ops.packed_weight import PackedWeight
from fuseopt.tuning import tuned

# A name in `ACTIVATIONS`, or a module that is called.
Activation = str | Callable[[Tensor], Tensor]
HALVES = (torch.float16, torch.bfloat16)
RMS_NORMS: dict[str, dict[str, Any]] = {
    "t5_rms_norm": {"cast_order": "t5"},
    "rms_norm": {"cast_order": "llama"},
    "float32_rms_norm": {"cast_order": "input"},
    "gemma_rms_norm": {"cast_order": "input", "offset": 1.0},
}
"""Kinds of RMSNorms -> keyword arguments of `ops.rms_norm`."""
_ACTIVATIONS_OF = {
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.SiLUActivation": "silu",
}


class Norm(NamedTuple):
    """A norm of the last dimension.

    Attributes:
        kind: "layer_norm", or a key of `RMS_NORMS`, which say where an RMSNorm rounds.
        weight, bias: [width]; an RMSNorm has no bias, a LayerNorm may have neither.
    """

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float

    @property
    def of_op(self) -> dict[str, Any]:
        """Keyword arguments of the decode ops; `eps` is one of its own."""
        return {"norm": self.op_kind, "norm_weight": self.weight, "norm_bias": self.bias}

    @property
    def op_kind(self) -> str:
        """The decode ops' name: they round an RMSNorm's result to the linear weight's dtype."""
        return "rms_norm" if self.kind == "t5_rms_norm" else self.kind


@dataclass(eq=False)
class Linear:
    """Linear layers that read the same input.

    Attributes:
        weights: [N, K] each, of any strides.
        biases: [N] for each weight, or none.
        prefetch: weights of a later launch, which the kernel reads into the L2 cache.
        low_rank: updates of the weights by LoRA adapters; None without any.
        sources: the modules that the weights belong to.
        low_bit: quantised weights that the layer multiplies with instead of `weights`, made from them or read from
            `checkpoint`, and packed on a GPU; empty without quantisation.
        has_unquantised: `weights` hold values beside `low_bit`, for products of many rows; else they may hold none.
        checkpoint: the weights as a pre-quantised checkpoint stores them; `weights` are then placeholders with their
            shapes, dtype and device. Empty for other checkpoints.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] = ()
    prefetch: tuple[Tensor, ...] = ()
    low_rank: LowRank | None = None
    sources: tuple[nn.Module, ...] = ()
    low_bit: tuple[LowBitWeight | PackedWeight, ...] = ()
    has_unquantised: bool = False
    checkpoint: tuple[QuantisedWeight, ...] = ()

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that hold the weights that a step reads."""
        return tuple(weight.tensors[0] for weight in self.low_bit) if self.low_bit else self.weights

    @functools.cached_property
    def most_low_bit_rows(self) -> int:
        """The most rows multiplied with `low_bit` as it is; more rows use `weights`, or `low_bit` dequantised."""
        first = self.low_bit[0]
        if isinstance(first, PackedWeight) and self.has_unquantised:
            return most_fast_rows([low.shape[0] for low in self.low_bit], first.inputs)
        return MOST_LOW_BIT_ROWS

    @functools.cached_property
    def slow_low_bit_rows(self) -> range:
        """Numbers of rows for which `weights` are as fast as `low_bit`, below `most_low_bit_rows`."""
        return SLOW_TRANSPOSED_ROWS if self.weights[0].T.is_contiguous() else range(0)

    def at(self, rows: int) -> Linear:
        """The layer for products of `rows` rows: itself, or without `low_bit` where that is faster."""
        if not (self.low_bit and self.has_unquantised):
            return self
        is_slow = rows > self.most_low_bit_rows or rows in self.slow_low_bit_rows
        return self._unquantised if is_slow else self

    @functools.cached_property
    def _unquantised(self) -> Linear:
        return replace(self, low_bit=(), has_unquantised=False)

    def multiplied(self) -> tuple[Tensor, ...]:
        """The weights to multiply with: `weights`, or new tensors of their dtype, dequantised."""
        if not self.low_bit or self.has_unquantised:
            return self.weights
        return tuple(
            dequantize_packed(low) if isinstance(low, PackedWeight) else dequantize(low, weight.dtype)
            for low, weight in zip(self.low_bit, self.weights, strict=True)
        )

    def compute_in(self, dtype: torch.dtype) -> None:
        """Sets the dtype of a pre-quantised layer, whose module computes in the dtype of its input."""
        if self.checkpoint:
            self.weights = tuple(weight.stand_in(dtype) for weight in self.checkpoint)
            self.biases = tuple(bias.to(dtype) for bias in self.biases)

    @functools.cached_property
    def no_bias(self) -> Tensor:
        """Zeros [N], for a cuBLAS epilogue that needs a bias."""
        return self.weights[0].new_zeros(len(self.weights[0]))


def linear_of(*modules: nn.Linear) -> Linear:
    """The Linear of torch.nn.Linear modules, also inside LoRA layers, or of pre-quantised layers. If one of them has a
    bias, those without get a bias of zeros.

    Raises:
        UnreadableWeight: a layer is quantised in a format that is not read.
    """
    checkpoint = quantised_weights(modules)
    weights = tuple(part.stand_in() for part in checkpoint) or tuple(module.weight for module in modules)
    biases = [module.bias for module in modules]
    parts = [LoraPart(module, 0, len(weight)) for module, weight in zip(modules, weights, strict=True)]
    low_rank = LowRank.of(parts, weights[0])
    if all(bias is None for bias in biases):
        return Linear(weights, low_rank=low_rank, sources=modules, checkpoint=checkpoint)
    filled = (w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True))
    return Linear(weights, tuple(filled), low_rank=low_rank, sources=modules, checkpoint=checkpoint)


def conv1d_of(module: nn.Module) -> Linear:
    """The Linear of a Conv1D, whose weight is [in, out], also inside a LoRA layer, or of a pre-quantised one.

    Raises:
        UnreadableWeight: as `linear_of`.
    """
    checkpoint = quantised_weights([module])
    weight = checkpoint[0].stand_in() if checkpoint else module.weight.T
    low_rank = LowRank.of([LoraPart(module, 0, len(weight))], weight)
    return Linear((weight,), (module.bias,), low_rank=low_rank, sources=(module,), checkpoint=checkpoint)


def halves_of(module: nn.Module) -> Linear:
    """The Linear of both halves of a torch.nn.Linear's outputs, also inside a LoRA layer, or of a pre-quantised one.

    Raises:
        UnreadableWeight: as `linear_of`.
    """
    checkpoint = tuple(half for whole in quantised_weights([module]) for half in whole.halves())
    first, second = (part.stand_in() for part in checkpoint) if checkpoint else module.weight.chunk(2)
    parts = [LoraPart(module, 0, len(first)), LoraPart(module, len(first), len(first) + len(second))]
    biases = () if module.bias is None else tuple(module.bias.chunk(2))
    low_rank = LowRank.of(parts, first)
    return Linear((first, second), biases, low_rank=low_rank, sources=(module,), checkpoint=checkpoint)


def layer_norm_of(norm: nn.Module) -> Norm:
    """Of a torch.nn.LayerNorm over one dimension."""
    return Norm("layer_norm", norm.weight, norm.bias, norm.eps)


def activation_of(module: nn.Module) -> Activation:
    """The name in `ACTIVATIONS` of what a module computes, also if it is a drop-in; else the module."""
    name = _ACTIVATIONS_OF.get(full_name(source_class(module)))
    return name if name in ACTIVATIONS else module


def embedded(
    tokens: Tensor, weight: Tensor, positions: Tensor | None = None, position_weight: Tensor | None = None
) -> Tensor:
    """Token embeddings, plus position embeddings if there are any.

    Args:
        tokens, positions: [tokens] int64.
        weight, position_weight: [vocabulary, hidden] and [positions, hidden].

    Returns:
        [tokens, hidden].
    """
    if has_kernel("decode_embedding", weight):
        return ops.decode_embedding(tokens, weight, positions, position_weight, pdl=True)
    embeddings = F.embedding(tokens, weight)
    if positions is None or position_weight is None:
        return embeddings
    return embeddings + F.embedding(positions, position_weight)


def normalised(input: Tensor, norm: Norm) -> Tensor:
    if norm.kind in RMS_NORMS:
        return ops.rms_norm(input, norm.weight, norm.eps, **RMS_NORMS[norm.kind])
    if not input.is_cuda:
        # PyTorch's kernel overflows to NaN earlier than fuseopt's, and beams and samples depend on those NaN.
        return F.layer_norm(input, norm.weight.shape, norm.weight, norm.bias, norm.eps)
    return ops.layer_norm(input, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def linear(
    input: Tensor,
    layer: Linear,
    *,
    norm: Norm | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`residual + activation(layer(norm(input)))`; few rows in one kernel, others by the BLAS library.

    Args:
        input: [rows, K].
        gated: the activated product with the first weight times that with the second.
        residual: of the result's shape; may be overwritten with it.

    Returns:
        [rows, sum of N] ([rows, N] if gated), in the weights' dtype or what that and `residual`'s give;
        neighbouring columns, and rows that may lie apart.
    """
    layer = layer.at(len(input))
    weight = layer.weights[0]
    if norm is not None and _normalises_before(input, layer, norm):
        input, norm = normalised(input, norm), None
    of_norm = norm.of_op if norm is not None else {}
    if takes_kernel(input, layer, residual, of_norm.get("norm"), gated) and not callable(activation):
        return _by_kernel(
            input,
            layer,
            residual=residual,
            **of_norm,
            eps=norm.eps if norm is not None else 0.0,
            activation=activation,
            gated=gated,
        )
    if norm is not None:
        input = normalised(input, norm)
    return _by_library(input.to(weight.dtype), layer, activation, gated, residual)


def _low_bit_op(layer: Linear) -> str:
    return "decode_packed_linear" if isinstance(layer.low_bit[0], PackedWeight) else "decode_low_bit_linear"


def _by_kernel(input: Tensor, layer: Linear, **options: Any) -> Tensor:
    options |= {"pdl": True, "prefetch": layer.prefetch}
    added = layer.low_rank
    if layer.low_bit:
        op = getattr(ops, _low_bit_op(layer))
        return op(input.to(layer.weights[0].dtype), layer.low_bit, layer.biases or None, **options)
    if added is None:
        return ops.decode_linear(input, layer.weights, layer.biases or None, **options)
    return ops.decode_linear_low_rank(
        input, layer.weights, added.a, added.b, layer.biases or None, exchange=added.exchange, **options
    )


def _normalises_before(input: Tensor, layer: Linear, norm: Norm) -> bool:
    """Whether the norm is an op of its own although the layer's kernel could compute it."""
    if norm.op_kind not in NORMS:
        return True
    dtype = layer.weights[0].dtype
    if layer.low_bit and (input.dtype is not dtype or norm.weight.dtype is not dtype):
        return True  # Low-bit ops round to the input's dtype, and their CUDA kernels require it.
    if input.is_cpu:
        # For the reason that `normalised` gives.
        return norm.kind == "layer_norm"
    if layer.low_bit and len(input) > MOST_NORMALISED_ROWS:
        return True  # the kernel for more rows has no norm
    if norm.kind == "layer_norm" and input.dtype is torch.float32 and len(input) > FEW_ROWS:
        return True  # its kernel for more rows has no LayerNorm
    return len(layer.weights) == 1 and len(input) > tuned("decode_linear_max_rows_to_normalise", input.device)


def takes_kernel(
    input: Tensor,
    layer: Linear,
    residual: Tensor | None = None,
    norm: str | None = None,
    gated: bool = False,
) -> bool:
    """Whether `linear` runs on a kernel of `ops.decode`; it never does if the activation is a module."""
    layer = layer.at(len(input))
    if layer.low_bit:
        return len(input) <= layer.most_low_bit_rows and has_kernel(_low_bit_op(layer), layer.weights[0])
    op = "decode_linear" if layer.low_rank is None else "decode_linear_low_rank"
    return has_kernel(op, layer.weights[0]) and is_fast(input, layer.weights, residual, norm, gated)


def _by_library(
    input: Tensor, layer: Linear, activation: Activation | None, gated: bool, residual: Tensor | None
) -> Tensor:
    """`linear` without a norm, by the BLAS library with its epilogues where they fit."""
    packed = tuple(low for low in layer.low_bit if isinstance(low, PackedWeight))
    weights = layer.weights if packed else layer.multiplied()
    weight, bias = weights[0], layer.biases[0] if layer.biases else None
    is_plain = layer.low_rank is None and len(weights) == 1 and not packed
    if is_plain and residual is not None and bias is None and activation is None and residual.dtype is weight.dtype:
        return residual.addmm_(input, weight.T)
    is_gelu = activation == "gelu_tanh" and bias is not None
    if (is_gelu or activation == "relu") and is_plain and weight.is_cuda and weight.dtype in HALVES:
        # The GELU is the tanh approximation on CUDA.
        bias = layer.no_bias if bias is None else bias
        output = torch._addmm_activation(bias, input, weight.T, use_gelu=is_gelu)
    else:
        output = _products(input, layer, packed or weights)
        if gated and output.is_cuda and isinstance(activation, str):
            output = ops.gated_activation(output[:, : len(weight)], output[:, len(weight) :], activation)
        elif gated:
            output = _activated(output[:, : len(weight)], activation) * output[:, len(weight) :]
        else:
            output = _activated(output, activation)
    return output if residual is None else residual + output


def _activated(input: Tensor, activation: Activation | None) -> Tensor:
    if activation is None:
        return input
    return activation(input) if callable(activation) else ACTIVATIONS[activation](input)


def _products(input: Tensor, layer: Linear, weights: Sequence[Tensor | PackedWeight]) -> Tensor:
    """[rows, sum of N]: `linear` without norm, activation and residual."""
    if takes_kernel(input, layer):
        return _by_kernel(input, layer)
    output = products_by_library(input, weights, layer.biases)
    if layer.low_rank is not None:
        parts = output.split([weight.shape[0] for weight in weights], dim=1)
        for part, added in zip(parts, updates(input, layer.low_rank.a, layer.low_rank.b), strict=True):
            part += added
    return output


def has_kernel(op: str, like: Tensor) -> bool:
    """Whether a decode op has a native kernel for the device and dtype of `like`. The references are slow."""
    return registry.pick(op, "auto", like.device, (like.dtype,)) != "reference"


def has_cuda_kernel(op: str, like: Tensor) -> bool:
    """`has_kernel` for tensors on a GPU; what is captured in a CUDA graph needs one."""
    return like.is_cuda and has_kernel(op, like)


def causal_mask(length: int, device: torch.device, start: int = 0) -> Tensor:
    """[length, start + length] bool, for queries from slot `start` on: True where the key is not after the query."""
    return torch.ones(length, start + length, dtype=torch.bool, device=device).tril_(start)
