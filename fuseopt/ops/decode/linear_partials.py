"""Split-K over two linear layers of a decode step.

The first layer splits a long K over blocks and stores their partial sums. The second adds the partial sums and the
residual stream while it reads its input. Blocks that add up among themselves would have to form a cluster, and a
cluster does not start before the previous kernel has ended.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.decode.linear import LayerOptions, check_layer, decode_linear
from fuseopt.ops.library import check_shape, compute_dtype, define

SPLIT_K = 2
_OF_WARP = 128  # of K, in a block that emits partial sums


def _fake_partials(input: Tensor, weight: Tensor, bias: Tensor | None, pdl: bool, prefetch: Sequence[Tensor]) -> Tensor:
    return input.new_empty((SPLIT_K, *input.shape[:-1], weight.shape[0]), dtype=torch.float32)


RAW_PARTIALS = define(
    "decode_linear_partials(Tensor input, Tensor weight, Tensor? bias, bool pdl, Tensor[] prefetch) -> Tensor",
    _fake_partials,
)


def _fake_of_sum(input: Tensor, split_k_partials: Tensor, weight: Tensor, *further: object) -> tuple[Tensor, Tensor]:
    output = input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=weight.dtype)
    return output, input.new_empty(input.shape)


RAW_OF_SUM = define(
    "decode_linear_of_sum(Tensor input, Tensor split_k_partials, Tensor weight, Tensor? bias, str norm,"
    " Tensor? norm_weight, Tensor? norm_bias, float eps, bool pdl, Tensor[] prefetch) -> (Tensor, Tensor)",
    _fake_of_sum,
)


# Of tensors without an address nobody knows.
RAW_EMITS = define("emits_partials(Tensor input, Tensor weight, Tensor? bias) -> bool", lambda *arguments: False)
RAW_ACCEPTS = define(
    "accepts_partials(Tensor input, Tensor weight, Tensor? bias, str norm, Tensor? norm_weight, Tensor? norm_bias)"
    " -> bool",
    lambda *arguments: False,
)


def emits_partials(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """True if the CUDA kernel of `decode_linear_partials` takes this layer: few rows, and a K too long for one block.

    The kernel must be there.
    """
    return is_at_an_address(input) and RAW_EMITS["cuda"](input, weight, bias)


def accepts_partials(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> bool:
    """True if the kernels of `decode_linear_of_sum` and `decode_head_select_` take it: few rows, and a short K with
    many outputs, or a head."""
    return is_at_an_address(input) and RAW_ACCEPTS["cuda"](input, weight, bias, norm, norm_weight, norm_bias)


def is_at_an_address(input: Tensor) -> bool:
    """Of a GPU's, as far as that is known."""
    return input.is_cuda and not is_dynamo_compiling()


def first_share(columns: int) -> int:
    """How many of `columns` the first partial sum is over: whole chunks of all warps of a block."""
    return -(-columns // (SPLIT_K * _OF_WARP)) * _OF_WARP


def decode_linear_partials(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pdl: bool = False,
    prefetch: Sequence[Tensor] = (),
    backend: str = "auto",
) -> Tensor:
    """Two tensors whose sum is `F.linear(input, weight, bias)`, not rounded.

    The first is the sum over the first `first_share(K)` columns, and the bias; the second that over the others.

    Args:
        input, weight, bias, pdl, prefetch: as `decode_linear` takes them, one weight.
        backend: "auto", "cuda" or "reference". Layers that the kernel does not take (`emits_partials`) are left to
            `decode_linear`, twice. Tensors that require a gradient under grad mode, and torch.func transforms, need the
            reference, which "auto" then takes.

    Returns:
        [2, ..., N] float32, or float64 where a tensor is float64.

    Raises:
        ValueError: shapes that do not fit together.
        BackendError: the backend named cannot run here; the message says why.
    """
    check_layer(input, [weight], [] if bias is None else [bias])
    dtypes = (input.dtype, weight.dtype)
    chosen = registry.pick_without_gradient("decode_linear_partials", backend, dtypes, input, weight, bias)
    if chosen != "reference" and emits_partials(input, weight, bias):
        return RAW_PARTIALS[chosen](input, weight, bias, pdl, list(prefetch))
    share, each = first_share(weight.shape[1]), "reference" if chosen == "reference" else backend
    # With a residual in float32 sums are not rounded.
    none = input.new_zeros((*input.shape[:-1], len(weight)), dtype=compute_dtype(input, weight))
    split_k_partials = [decode_linear(input[..., :share], weight[:, :share], bias, residual=none, backend=each), none]
    if weight.shape[1] > share:
        split_k_partials[1] = decode_linear(input[..., share:], weight[:, share:], residual=none, backend=each)
    return torch.stack(split_k_partials)


def summed(input: Tensor, split_k_partials: Tensor) -> Tensor:
    """`input + split_k_partials[0] + split_k_partials[1]`, rounded to `input`'s dtype."""
    return (split_k_partials.sum(0) + input.to(compute_dtype(input))).to(input.dtype)


def check_partials(input: Tensor, split_k_partials: Tensor, norm: str | None) -> None:
    """Raises what `decode_linear_of_sum` does."""
    if norm is None:
        raise ValueError("split_k_partials need a norm: 'layer_norm', 'rms_norm' or 'gemma_rms_norm'")
    check_shape("split_k_partials", split_k_partials, torch.Size((SPLIT_K, *input.shape)))
    dtype = compute_dtype(input)
    if split_k_partials.dtype != dtype:
        raise TypeError(f"split_k_partials must be {dtype}, not {split_k_partials.dtype}")


def decode_linear_of_sum(
    input: Tensor,
    split_k_partials: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    pdl: bool = False,
    prefetch: Sequence[Tensor] = (),
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`decode_linear(sum, weight, bias, norm=norm, ...)`, and `sum`: `input` plus both partial sums.

    Args:
        input: [..., K], as `decode_linear` takes it.
        split_k_partials: [2, ..., K] float32, of a float64 input float64. The sum is rounded to the input's dtype.
        weight, bias, norm, norm_weight, norm_bias, eps, pdl, prefetch: as `decode_linear` takes them, one weight.
        backend: "auto", "cuda" or "reference". Layers that the kernel does not take (`accepts_partials`) are left to
            PyTorch's sum and `decode_linear`. Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        [..., N] of the weight's dtype, and [..., K] of the input's.

    Raises:
        ValueError: shapes that do not fit together.
        TypeError: split_k_partials of another dtype.
        BackendError: the backend named cannot run here; the message says why.
    """
    options = LayerOptions(None, norm or "", norm_weight, norm_bias)
    check_layer(input, [weight], [] if bias is None else [bias], options)
    check_partials(input, split_k_partials, norm)
    dtypes, parameters = (input.dtype, weight.dtype), (weight, bias, norm_weight, norm_bias)
    tensors = input, split_k_partials, *parameters
    chosen = registry.pick_without_gradient("decode_linear_of_sum", backend, dtypes, *tensors)
    of_norm: dict[str, Any] = {"norm": norm, "norm_weight": norm_weight, "norm_bias": norm_bias}
    if chosen != "reference" and accepts_partials(input, weight, bias, **of_norm):
        others = norm, norm_weight, norm_bias, eps, pdl, list(prefetch)
        return RAW_OF_SUM[chosen](input, split_k_partials, weight, bias, *others)
    sum = summed(input, split_k_partials)
    each = "reference" if chosen == "reference" else backend
    output = decode_linear(sum, weight, bias, **of_norm, eps=eps, backend=each)
    return output, sum


decode_linear_partials_reference = partial(decode_linear_partials, backend="reference")


def _partials_samples(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield registry.SampleInput((make(1, 2112), make(2112, 48).T, make(48)))
    yield registry.SampleInput((make(3, 48), make(24, 48)))
    yield registry.SampleInput((make(2, 2, 33), make(33, 7).T, make(7)))
    yield registry.SampleInput((make(0, 8), make(4, 8)))


def _of_sum_samples(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    for rows, columns, outputs in ((1, 96, 1536), (3, 40, 24), (0, 8, 4)):
        norm = {"norm": "layer_norm", "norm_weight": make(columns), "norm_bias": make(columns)}
        split_k_partials = make(SPLIT_K, rows, columns, dtype=torch.promote_types(dtype, torch.float32))
        arguments = (make(rows, columns), split_k_partials, make(columns, outputs).T, make(outputs))
        yield registry.SampleInput(arguments, norm)


registry.register(
    registry.Op(
        name="decode_linear_partials",
        raw=("decode_linear_partials", "emits_partials"),
        function=decode_linear_partials,
        reference=decode_linear_partials_reference,
        sample_inputs=_partials_samples,
        backends=(registry.CUDA, registry.REFERENCE),
    )
)
registry.register(
    registry.Op(
        name="decode_linear_of_sum",
        raw=("decode_linear_of_sum", "accepts_partials"),
        function=decode_linear_of_sum,
        reference=partial(decode_linear_of_sum, backend="reference"),
        sample_inputs=_of_sum_samples,
        backends=(registry.CUDA, registry.REFERENCE),
    )
)
