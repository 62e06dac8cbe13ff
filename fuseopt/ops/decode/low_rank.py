"""A linear layer of few rows with a low-rank update of each weight, such as LoRA's, for decode steps.

The update is two small products, `(x @ a.T) @ b.T`. The CUDA kernel computes both inside the layer's own launch: its
first blocks compute a row of `a` each and leave the result where all blocks read it before they end.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.decode.linear import (
    LAYER_SCHEMA,
    MAX_ROWS,
    LayerOptions,
    as_list,
    check_layer,
    decode_linear,
    ended,
    is_fast,
    new_output,
    output_dtype,
    reference_layer,
)
from fuseopt.ops.decode.linear_partials import is_at_an_address
from fuseopt.ops.library import check_shape, compute_dtype, define, without_autocast

KERNEL_ROWS = 8
"""Up to this number of rows a CUDA kernel computes the update inside the layer's launch."""

RANK_MULTIPLE = 8
"""The CUDA kernels take ranks that are a multiple of it."""


_COPIES = 4  # of what the kernel's blocks exchange


def _fake(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Tensor,
    b: Sequence[Tensor],
    exchange: Tensor | None,
    *options: Any,
) -> Tensor:
    return new_output(input, [weight.shape[0] for weight in weights], weights[0].dtype, LayerOptions(*options))


_LAYER = f"(Tensor input, Tensor[] weights, Tensor[] biases, Tensor a, Tensor[] b, Tensor? exchange, {LAYER_SCHEMA})"
RAW = define(f"decode_linear_low_rank{_LAYER} -> Tensor", _fake)
# Of tensors without an address nobody knows.
RAW_TAKES = define(f"takes_low_rank{_LAYER} -> bool", lambda *arguments: False)


def takes_low_rank(input: Tensor, *others: Any) -> bool:
    """True if one launch computes the layer, whose other arguments are the raw op's. The CUDA kernels must be there."""
    return is_at_an_address(input) and RAW_TAKES["cuda"](input, *others)


def exchange_size(a: Tensor) -> int:
    """Elements of the `exchange` that `decode_linear_low_rank` takes with `a`."""
    return 2 + _COPIES * KERNEL_ROWS * len(a)


def _check(input: Tensor, weights: Sequence[Tensor], a: Tensor, b: Sequence[Tensor], exchange: Tensor | None) -> None:
    check_shape("a", a, torch.Size((len(a), input.shape[-1])))
    if len(b) != len(weights):
        raise ValueError(f"{len(b)} factors b for {len(weights)} weights")
    for weight, factor in zip(weights, b, strict=True):
        check_shape("b", factor, torch.Size((len(weight), *factor.shape[1:2])))
    ranks = [factor.shape[1] for factor in b]
    if sum(ranks) != len(a):
        raise ValueError(f"a has {len(a)} rows, but the ranks of b are {' + '.join(map(str, ranks))}")
    for factor in (a, *b):
        if factor.dtype != weights[0].dtype:
            raise ValueError(f"a and b must have the weights' dtype, {weights[0].dtype}, not {factor.dtype}")
    if exchange is not None:
        if exchange.dtype != torch.int64:
            raise TypeError(f"exchange must be torch.int64, not {exchange.dtype}")
        check_shape("exchange", exchange, torch.Size((exchange_size(a),)))


def updates(input: Tensor, a: Tensor, b: Sequence[Tensor]) -> list[Tensor]:
    """The update of each weight's product, [..., N], in the dtype of the factors. Rounded after each product.

    Args:
        input: [..., K], normalised, in the factors' dtype.
    """
    projected = F.linear(input, a).split([factor.shape[1] for factor in b], dim=-1)
    return [F.linear(part, factor) for part, factor in zip(projected, b, strict=True)]


def decode_linear_low_rank(
    input: Tensor,
    weight: Tensor | Sequence[Tensor],
    a: Tensor,
    b: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    exchange: Tensor | None = None,
    residual: Tensor | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    gated: bool = False,
    pdl: bool = False,
    prefetch: Sequence[Tensor] = (),
    backend: str = "auto",
) -> Tensor:
    """`decode_linear` with `weight + b @ a` in place of each weight, without computing that sum.

    Computed in float32 (float64 if a tensor is float64) and rounded once at the end, if one kernel computes it: on a
    CPU, and on a GPU from sm_80 on with 16-bit tensors, an `exchange` and up to `KERNEL_ROWS` rows. Otherwise a GPU
    runs `decode_linear` and the two products of the update, each of which is rounded.

    Args:
        input, weight, bias: as `decode_linear` takes them.
        a: [R, K], contiguous: the rows of the first weight's update, then those of the second's, and so on.
        b: [N, R of this weight] for each weight, contiguous; the ranks add up to R and may be 0. A scale is part of it.
        exchange: int64 [exchange_size(a)], zeros at first. Its first element must differ from that of every earlier
            call with it; the kernel writes the others, through which its blocks pass on `x @ a.T`. None: no kernel
            computes the update inside the layer's launch.
        residual, norm, norm_weight, norm_bias, eps, activation, gated, pdl, prefetch: as `decode_linear` takes them.
            With `pdl`, the previous kernel must not write `a` or `b` either.
        backend: as `decode_linear` takes it.

    Returns:
        as `decode_linear`.

    Raises:
        ValueError: shapes or options that do not fit together.
        TypeError: exchange of another dtype.
        BackendError: the backend named cannot run here; the message says why.

    Source: https://arxiv.org/abs/2106.09685
    """
    weights, biases, factors = as_list("weight", weight), as_list("bias", bias), as_list("b", b)
    options = LayerOptions(
        residual, norm or "", norm_weight, norm_bias, eps, activation or "", gated, pdl, list(prefetch)
    )
    check_layer(input, weights, biases, options)
    _check(input, weights, a, factors, exchange)
    rows = input.shape[:-1].numel()
    if rows > MAX_ROWS and backend not in ("auto", "reference"):
        raise BackendError(f"decode_linear_low_rank: {backend!r} takes {MAX_ROWS} rows at most, not {rows}")
    chosen = "reference"
    if rows <= MAX_ROWS and (backend != "auto" or is_fast(input, weights, residual, norm, gated)):
        tensors = input, *weights, *biases, a, *factors, *options.tensors
        dtypes = (input.dtype, weights[0].dtype)
        chosen = registry.pick_without_gradient("decode_linear_low_rank", backend, dtypes, *tensors)
    if chosen == "reference":
        wide = [factor.to(compute_dtype(weights[0])) for factor in (a, *factors)]
        return reference_layer(input, weights, biases, options, updates=lambda x: updates(x, wide[0], wide[1:]))
    arguments = input, weights, biases, a, factors, exchange, *options
    if chosen == "cpu" or takes_low_rank(*arguments):
        return RAW[chosen](*arguments)
    with without_autocast(input):
        return _composed(input, weights, biases, a, factors, options)


def _composed(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Tensor,
    b: Sequence[Tensor],
    options: LayerOptions,
) -> Tensor:
    """By `decode_linear` and the products of the update."""
    residual, norm, norm_weight, norm_bias, eps, activation, _, pdl, prefetch = options
    of_norm: dict[str, Any] = {
        "norm": norm or None,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "eps": eps,
        "pdl": pdl,
    }
    projected = decode_linear(input, a, **of_norm)
    plain = residual if not activation else None
    output = decode_linear(input, weights, biases or None, residual=plain, **of_norm, prefetch=prefetch)
    parts = output.split([len(weight) for weight in weights], dim=-1)
    for part, own, factor in zip(parts, projected.split([f.shape[1] for f in b], dim=-1), b, strict=True):
        if factor.shape[1]:
            part += F.linear(own, factor)
    if not activation:
        return output
    return ended(list(parts), options, output_dtype(weights[0].dtype, residual))


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    layer_norm = {"norm": "layer_norm", "norm_weight": make(48), "norm_bias": make(48)}
    rms_norm = {"norm": "rms_norm", "norm_weight": make(48), "eps": 1e-6}
    yield registry.SampleInput(
        (make(3, 48), make(40, 48), make(4, 48), make(40, 4), make(40)), {**layer_norm, "activation": "gelu_tanh"}
    )
    yield registry.SampleInput(
        (make(1, 48), make(48, 24).T, make(8, 48), make(24, 8), make(24)), {"residual": make(1, 24)}
    )
    factors = [make(n, r) for n, r in ((32, 8), (8, 0), (7, 3))]
    yield registry.SampleInput((make(2, 2, 48), [make(n, 48) for n in (32, 8, 7)], make(11, 48), factors), rms_norm)
    yield registry.SampleInput(
        (make(2, 48), [make(24, 48), make(24, 48)], make(24, 48), [make(24, 8), make(24, 16)]),
        {**rms_norm, "activation": "silu", "gated": True},
    )
    wide = torch.promote_types(dtype, torch.float32)
    factors = [make(7, 2, dtype=wide)]
    yield registry.SampleInput(
        (make(2, 33), make(7, 33, dtype=wide), make(2, 33, dtype=wide), factors), {"residual": make(2, 7, dtype=wide)}
    )
    yield registry.SampleInput((make(0, 8), make(4, 8), make(2, 8), make(4, 2)))


registry.register(
    registry.Op(
        name="decode_linear_low_rank",
        function=decode_linear_low_rank,
        reference=partial(decode_linear_low_rank, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.CPU, registry.REFERENCE),
    )
)
