"""ResidualStream and HeadInput: what runs through the layers of a decode step, and what its head reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt import ops
from fuseopt.blocks.t5_inference import clamped
from fuseopt.generation.engine.layers import Activation, Linear, Norm, has_kernel, linear, normalised, takes_kernel
from fuseopt.ops.decode.linear import FEW_ROWS, NORMS
from fuseopt.ops.decode.linear_partials import accepts_partials, emits_partials


class HeadInput(NamedTuple):
    """The output of a step's last layer, from which either logits or only the likeliest token are computed.

    Attributes:
        hidden: [rows, hidden], before the final norm.
        norm: the final norm; None if the last layer ends with it.
        split_k_partials: [2, rows, hidden] float32, which the kernel that reads `hidden` adds to it; or None.
        softcap: logits are replaced by softcap * tanh(logits / softcap); None if they are not.
    """

    hidden: Tensor
    head: Linear
    norm: Norm | None
    split_k_partials: Tensor | None = None
    softcap: float | None = None

    def logits(self) -> Tensor:
        """[rows, vocab] in the weight's dtype."""
        if self.split_k_partials is not None and self.norm is not None:
            logits = _linear_of_sum(self.hidden, self.split_k_partials, self.head, self.norm)[0]
        else:
            logits = linear(self.hidden, self.head, norm=self.norm)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    @property
    def has_kernel_to_select(self) -> bool:
        """Whether `ops.decode_head_select_` is faster than computing all logits and taking their maximum."""
        head = self.head.at(len(self.hidden))
        is_plain = not (head.biases or head.low_rank or head.low_bit) and self.softcap is None
        few = len(self.hidden) <= FEW_ROWS and is_plain
        has_norm = self.norm is not None and self.norm.op_kind in NORMS
        return few and has_norm and has_kernel("decode_head_select_", self.head.weights[0])


class ResidualStream:
    """The residual stream of a transformer: sublayers read it, as a rule normalised, and add their outputs to it.

    Additions are deferred: if only the next norm reads a sum, that norm's kernel computes it.

    Args:
        begin: the initial value [rows, hidden], which may be overwritten.
        clamps_float16: each sum in float16 is clamped as T5Block does.
        scale: factor on what is added; None for 1.
    """

    def __init__(self, begin: Tensor, *, clamps_float16: bool = False, scale: float | None = None) -> None:
        self.clamps_float16, self.scale = clamps_float16, scale
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
        return ResidualStream(self.total()[rows], clamps_float16=self.clamps_float16, scale=self.scale)

    def linear(
        self, layer: Linear, norm: Norm | None, activation: Activation | None = None, *, gated: bool = False
    ) -> Tensor:
        """`activation(layer(norm(total)))`; `gated` as in `linear`."""
        if self._partials is not None:
            assert activation is None and norm is not None
            output, self._sum = _linear_of_sum(self._sum, self._partials, layer, norm)
            self._partials = None
            return output
        is_layer_norm = norm is not None and norm.kind == "layer_norm" and not self.clamps_float16
        if norm is None or self._added is None or not self._added.is_cuda or not is_layer_norm:
            return linear(self.total(), layer, norm=norm, activation=activation, gated=gated)
        normed, self._sum = ops.add_layer_norm(self._added, self._sum, norm.weight, norm.bias, norm.eps)
        self._added = None
        return linear(normed, layer, activation=activation, gated=gated)

    def before(self, head: Linear, norm: Norm | None, softcap: float | None = None) -> HeadInput:
        """The input of `head(norm(.))`."""
        if self._partials is not None:
            return HeadInput(self._sum, head, norm, self._partials, softcap)
        return HeadInput(self.total(), head, norm, softcap=softcap)

    def add(
        self,
        input: Tensor,
        layer: Linear,
        following: tuple[Linear, Norm] | None = None,
        *,
        output_norm: Norm | None = None,
        sum_norm: Norm | None = None,
    ) -> None:
        """Adds `layer(input)`.

        Args:
            following: the layer and norm of the next call of `linear` or `before`, if that comes before any `total` and
                has no activation. The layer may then leave split-K partial sums to it.
            output_norm: of what is added.
            sum_norm: of the sum, which continues as its result.
        """
        if output_norm is not None or self.scale is not None:
            output = linear(input, layer)
            output = output if output_norm is None else normalised(output, output_norm)
            self.replace(torch.add(self.total(), output, alpha=1 if self.scale is None else self.scale))
        elif following is not None and sum_norm is None and self._emits_partials(input, layer, *following):
            weight, self._sum = layer.weights[0], self.total()
            self._partials = ops.decode_linear_partials(input, weight, *layer.biases, pdl=True, prefetch=layer.prefetch)
        elif not layer.biases or takes_kernel(input, layer, self.total()):
            self.replace(linear(input, layer, residual=self.total()))
        else:
            # cuBLAS adds either a bias or a residual to a product.
            self._sum, self._added = self.total(), linear(input, layer)
        if sum_norm is not None:
            self.replace(normalised(self.total(), sum_norm))

    def _emits_partials(self, input: Tensor, layer: Linear, following: Linear, norm: Norm) -> bool:
        weight, next_weight = layer.weights[0], following.weights[0]
        if len(following.weights) > 1 or any(
            part.low_rank or part.at(len(input)).low_bit for part in (layer, following)
        ):
            return False
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
