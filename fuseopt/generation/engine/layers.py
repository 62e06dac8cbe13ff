"""Parts of a decode step: linear layers with norms, the residual stream and the head's input; one token a row.

All read the model's own tensors. Few rows run on the kernels of `ops.decode`, others by the BLAS library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

from fuseopt import ops
from fuseopt.blocks.t5_inference import clamped
from fuseopt.modules.base import source_class
from fuseopt.ops import registry
from fuseopt.ops.decode.linear import ACTIVATIONS, FEW_ROWS, is_fast
from fuseopt.ops.decode.linear_partials import accepts_partials, emits_partials
from fuseopt.tuning import multiprocessors, tuned

# A name in `ACTIVATIONS`, or a module that is called.
Activation = str | Callable[[Tensor], Tensor]
HALVES = (torch.float16, torch.bfloat16)


class Norm(NamedTuple):
    """`kind` as `ops.decode_linear` has it; `bias` is None for an RMSNorm."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float

    @property
    def of_op(self) -> dict[str, Any]:
        """Keyword arguments of the decode ops; `eps` is one of its own."""
        return {"norm": self.kind, "norm_weight": self.weight, "norm_bias": self.bias}


@dataclass(eq=False)
class Linear:
    """Linear layers that read the same input.

    Attributes:
        weights: [N, K] each, of any strides.
        biases: [N] for each weight, or none.
        prefetch: weights of a later launch, which the kernel reads into the L2 cache.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] = ()
    prefetch: tuple[Tensor, ...] = ()

    @functools.cached_property
    def no_bias(self) -> Tensor:
        """Zeros [N], for a cuBLAS epilogue that needs a bias."""
        return self.weights[0].new_zeros(len(self.weights[0]))


def plan_l2_prefetch(layers: Sequence[Linear], head: Linear) -> None:
    """Sets `prefetch` of a step's linear layers, given in the order they run in.

    Each prefetches the weights of the layer after the next. Large layers skip that, since their own weight loads
    already saturate memory bandwidth; if the next layer is large too, they prefetch a part of its weight, late. The
    head reads more than the L2 cache holds; at its end it prefetches the weights of the next step's first layer.
    """
    for layer, following, later in zip(layers, [*layers[1:], head], [*layers[2:], head, head], strict=True):
        layer.prefetch = later.weights
        if _skips_prefetch(layer):
            layer.prefetch = _first_part(following.weights[0]) if _skips_prefetch(following) else ()
    head.prefetch = layers[0].weights


def _skips_prefetch(layer: Linear) -> bool:
    """True if a layer has more bytes than a GPU's blocks hold: its own weight loads already saturate bandwidth.

    The kernels decide so too (`most_held_bytes` in csrc/cuda/decode/linear/params.cuh). Which kernel takes a layer is
    another question, with a lower limit for a long K: `exceeds_registers` there.
    """
    device = layer.weights[0].device
    held_bytes = tuned("decode_linear_held_bytes", device) * multiprocessors(device)
    return sum(weight.nbytes for weight in layer.weights) >= held_bytes


def _first_part(weight: Tensor) -> tuple[Tensor, ...]:
    """The first rows of a weight [N, K] that is stored as [K, N], as many as a large layer prefetches."""
    lines = weight.T
    count = len(lines) // tuned("decode_linear_prefetch_divisor", weight.device)
    return (lines[:count],) if lines.is_contiguous() else ()


def linear_of(*modules: nn.Linear) -> Linear:
    """The Linear of torch.nn.Linear modules. If one of them has a bias, those without get a bias of zeros."""
    weights, biases = tuple(module.weight for module in modules), [module.bias for module in modules]
    if all(bias is None for bias in biases):
        return Linear(weights)
    filled = (w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True))
    return Linear(weights, tuple(filled))


def activation_of(module: nn.Module) -> Activation:
    """The name in `ACTIVATIONS` of what a module computes, also if it is a drop-in; else the module."""
    return {NewGELUActivation: "gelu_tanh", nn.ReLU: "relu"}.get(source_class(module), module)


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
    if norm.kind == "t5_rms_norm":
        return ops.rms_norm(input, norm.weight, norm.eps, cast_order="t5")
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
        [rows, N * number of weights] ([rows, N] if gated), in the weights' dtype or what that and `residual`'s give;
        neighbouring columns, and rows that may lie apart.
    """
    weight = layer.weights[0]
    if norm is not None and _normalises_before(input, layer, norm):
        input, norm = normalised(input, norm), None
    kind, norm_weight, norm_bias, eps = norm or (None, None, None, 0.0)
    if takes_kernel(input, layer, residual, kind, gated) and not callable(activation):
        return ops.decode_linear(
            input,
            layer.weights,
            layer.biases or None,
            residual=residual,
            norm=kind,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            activation=activation,
            gated=gated,
            pdl=True,
            prefetch=layer.prefetch,
        )
    if norm is not None:
        input = normalised(input, norm)
    return _by_library(input.to(weight.dtype), layer, activation, gated, residual)


def _normalises_before(input: Tensor, layer: Linear, norm: Norm) -> bool:
    """Whether the norm is an op of its own although the layer's kernel could compute it."""
    if input.is_cpu:
        # For the reason that `normalised` gives.
        return norm.kind == "layer_norm"
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
    """Whether `linear` runs on `ops.decode_linear`; it never does if the activation is a module."""
    return has_kernel("decode_linear", layer.weights[0]) and is_fast(input, layer.weights, residual, norm, gated)


class HeadInput(NamedTuple):
    """The output of a step's last layer, from which either logits or only the likeliest token are computed.

    Attributes:
        hidden: [rows, hidden], before the final norm.
        split_k_partials: [2, rows, hidden] float32, which the kernel that reads `hidden` adds to it; or None.
    """

    hidden: Tensor
    head: Linear
    norm: Norm
    split_k_partials: Tensor | None = None

    def logits(self) -> Tensor:
        """[rows, vocab] in the weight's dtype."""
        if self.split_k_partials is not None:
            return _linear_of_sum(self.hidden, self.split_k_partials, self.head, self.norm)[0]
        return linear(self.hidden, self.head, norm=self.norm)

    @property
    def has_kernel_to_select(self) -> bool:
        """Whether `ops.decode_head_select_` is faster than computing all logits and taking their maximum."""
        few = len(self.hidden) <= FEW_ROWS and not self.head.biases
        return few and has_kernel("decode_head_select_", self.head.weights[0])


class ResidualStream:
    """The residual stream of a pre-norm transformer: sublayers read it normalised and add their outputs to it.

    Additions are deferred: if only the next norm reads a sum, that norm's kernel computes it.

    Args:
        begin: the initial value [rows, hidden], which may be overwritten.
        clamps_float16: each sum in float16 is clamped as T5Block does.
    """

    def __init__(self, begin: Tensor, *, clamps_float16: bool = False) -> None:
        self.clamps_float16 = clamps_float16
        self._sum = begin
        self._added: Tensor | None = None
        self._partials: Tensor | None = None

    def total(self) -> Tensor:
        """The current value [rows, hidden]."""
        assert self._partials is None, "the next linear layer adds them up"
        if self._added is not None:
            self.replace(self._sum + self._added)
        return self._sum

    def replace(self, total: Tensor) -> None:
        """Continues with a sum that an op outside this class has computed."""
        self._sum, self._added = clamped(total) if self.clamps_float16 else total, None

    @property
    def is_stored(self) -> bool:
        """Whether `total` is a tensor already: no addition is deferred."""
        return self._added is None and self._partials is None

    def of(self, rows: Tensor) -> ResidualStream:
        """A stream of some of the rows."""
        return ResidualStream(self.total()[rows], clamps_float16=self.clamps_float16)

    def linear(self, layer: Linear, norm: Norm, activation: Activation | None = None, *, gated: bool = False) -> Tensor:
        """`activation(layer(norm(total)))`; `gated` as in `linear`."""
        if self._partials is not None:
            assert activation is None
            output, self._sum = _linear_of_sum(self._sum, self._partials, layer, norm)
            self._partials = None
            return output
        is_layer_norm = norm.kind == "layer_norm" and not self.clamps_float16
        if self._added is None or not self._added.is_cuda or not is_layer_norm:
            return linear(self.total(), layer, norm=norm, activation=activation, gated=gated)
        normed, self._sum = ops.add_layer_norm(self._added, self._sum, norm.weight, norm.bias, norm.eps)
        self._added = None
        return linear(normed, layer, activation=activation, gated=gated)

    def before(self, head: Linear, norm: Norm) -> HeadInput:
        """The input of `head(norm(.))`."""
        if self._partials is not None:
            return HeadInput(self._sum, head, norm, self._partials)
        return HeadInput(self.total(), head, norm)

    def add(self, input: Tensor, layer: Linear, following: tuple[Linear, Norm] | None = None) -> None:
        """Adds `layer(input)`.

        Args:
            following: the layer and norm of the next call of `linear` or `before`, if that comes before any `total` and
                has no activation. The layer may then leave split-K partial sums to it.
        """
        if following is not None and self._emits_partials(input, layer, *following):
            weight, self._sum = layer.weights[0], self.total()
            self._partials = ops.decode_linear_partials(input, weight, *layer.biases, pdl=True, prefetch=layer.prefetch)
        elif not layer.biases or takes_kernel(input, layer, self.total()):
            self.replace(linear(input, layer, residual=self.total()))
        else:
            # cuBLAS adds either a bias or a residual to a product.
            self._sum, self._added = self.total(), linear(input, layer)

    def _emits_partials(self, input: Tensor, layer: Linear, following: Linear, norm: Norm) -> bool:
        weight, next_weight = layer.weights[0], following.weights[0]
        if not (has_kernel("decode_linear_partials", weight) and has_kernel("decode_linear_of_sum", next_weight)):
            return False
        if not emits_partials(input, weight, *layer.biases):
            return False
        return accepts_partials(self.total(), next_weight, *following.biases, **norm.of_op)


def _linear_of_sum(input: Tensor, split_k_partials: Tensor, layer: Linear, norm: Norm) -> tuple[Tensor, Tensor]:
    return ops.decode_linear_of_sum(
        input,
        split_k_partials,
        layer.weights[0],
        *layer.biases,
        **norm.of_op,
        eps=norm.eps,
        pdl=True,
        prefetch=layer.prefetch,
    )


def _by_library(
    input: Tensor, layer: Linear, activation: Activation | None, gated: bool, residual: Tensor | None
) -> Tensor:
    """`linear` without a norm, by the BLAS library with its epilogues where they fit."""
    weight, *others = layer.weights
    bias = layer.biases[0] if layer.biases else None
    if residual is not None and not others and bias is None and activation is None and residual.dtype is weight.dtype:
        return residual.addmm_(input, weight.T)
    is_gelu = activation == "gelu_tanh" and bias is not None
    if (is_gelu or activation == "relu") and not others and weight.is_cuda and weight.dtype in HALVES:
        # The GELU is the tanh approximation on CUDA.
        bias = layer.no_bias if bias is None else bias
        output = torch._addmm_activation(bias, input, weight.T, use_gelu=is_gelu)
    else:
        output = _products(input, layer)
        if gated:
            output = _activated(output[:, : len(weight)], activation) * output[:, len(weight) :]
        else:
            output = _activated(output, activation)
    return output if residual is None else residual + output


def _activated(input: Tensor, activation: Activation | None) -> Tensor:
    if activation is None:
        return input
    return activation(input) if callable(activation) else ACTIVATIONS[activation](input)


def _products(input: Tensor, layer: Linear) -> Tensor:
    """[rows, N * number of weights]; on a GPU rows are aligned to 16 bytes.

    cuBLAS takes several times as long if N is odd, as GPT-2's vocabulary is: the last few columns are a second product.
    """
    if takes_kernel(input, layer):
        return ops.decode_linear(input, layer.weights, layer.biases or None, pdl=True, prefetch=layer.prefetch)
    out_features, count = len(layer.weights[0]), len(layer.weights)
    biases = layer.biases or (None,) * count
    aligned = out_features // 8 * 8 if input.is_cuda else out_features
    if count == 1 and aligned == out_features:
        return F.linear(input, layer.weights[0], biases[0])
    output = input.new_empty(len(input), -(-out_features * count // 8) * 8)[:, : out_features * count]
    for part, weight, bias in zip(output.split(out_features, dim=1), layer.weights, biases, strict=True):
        for begin, end in ((0, aligned), (aligned, out_features)):
            if begin == end:
                continue
            factor, out = weight[begin:end].T, part[:, begin:end]
            if bias is None:
                torch.mm(input, factor, out=out)
            else:
                torch.addmm(bias[begin:end], input, factor, out=out)
    return output


def has_kernel(op: str, like: Tensor) -> bool:
    """Whether a decode op has a native kernel for the device and dtype of `like`. The references are slow."""
    return registry.pick(op, "auto", like.device, (like.dtype,)) != "reference"


def has_cuda_kernel(op: str, like: Tensor) -> bool:
    """`has_kernel` for tensors on a GPU; what is captured in a CUDA graph needs one."""
    return like.is_cuda and has_kernel(op, like)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """[length, length] bool: True where the key is not after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_()
