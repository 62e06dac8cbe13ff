"""Two linear layers of a decoding step that hand on a sum in parts.

The blocks of the first share out a long K and leave what each has, and the second adds that up with the residual
stream while it reads its input. Blocks that share out K and add up themselves have to meet, in a cluster, and such
blocks do not start before the layer ahead has ended.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.decode.linear import check_layer, decode_linear
from fuseopt.ops.library import check_shape, compute_dtype, define

ADDENDS = 2
_OF_WARP = 128  # of K, in a block that leaves addends


def _fake_addends(input: Tensor, weight: Tensor, bias: Tensor | None, overlap: bool, ahead: Sequence[Tensor]) -> Tensor:
    return input.new_empty((ADDENDS, *input.shape[:-1], weight.shape[0]), dtype=torch.float32)


RAW_ADDENDS = define(
    "decode_linear_addends(Tensor input, Tensor weight, Tensor? bias, bool overlap, Tensor[] ahead) -> Tensor",
    _fake_addends,
)


def _fake_of_sum(
    input: Tensor,
    addends: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    overlap: bool,
    ahead: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    output = input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=weight.dtype)
    return output, input.new_empty(input.shape)


RAW_OF_SUM = define(
    "decode_linear_of_sum(Tensor input, Tensor addends, Tensor weight, Tensor? bias, str norm, Tensor? norm_weight,"
    " Tensor? norm_bias, float eps, bool overlap, Tensor[] ahead) -> (Tensor, Tensor)",
    _fake_of_sum,
)


# Of tensors without an address nobody knows.
RAW_LEAVES = define("leaves_addends(Tensor input, Tensor weight, Tensor? bias) -> bool", lambda *arguments: False)
RAW_TAKES = define(
    "takes_addends(Tensor input, Tensor weight, Tensor? bias, str norm, Tensor? norm_weight, Tensor? norm_bias)"
    " -> bool",
    lambda *arguments: False,
)


def leaves_addends(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the CUDA kernel of `decode_linear_addends`, which must be there, takes such a layer: one of few rows, and
    too long a K for a block."""
    return is_at_an_address(input) and RAW_LEAVES["cuda"](input, weight, bias)


def takes_addends(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> bool:
    """Whether those of `decode_linear_of_sum` and `decode_head_select_` do: one of few rows, and a short K with many
    outputs, or a head."""
    return is_at_an_address(input) and RAW_TAKES["cuda"](input, weight, bias, norm, norm_weight, norm_bias)


def is_at_an_address(input: Tensor) -> bool:
    """Of a GPU's, as far as that is known."""
    return input.is_cuda and not is_dynamo_compiling()


def first_share(columns: int) -> int:
    """How many of `columns` the first addend is the sum over: whole chunks of all warps of a block."""
    return -(-columns // (ADDENDS * _OF_WARP)) * _OF_WARP


def decode_linear_addends_reference(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`decode_linear_addends` in plain PyTorch, for any number of rows."""
    return decode_linear_addends(input, weight, bias, backend="reference")


def decode_linear_addends(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    overlap: bool = False,
    ahead: Sequence[Tensor] = (),
    backend: str = "auto",
) -> Tensor:
    """Two tensors whose sum is `F.linear(input, weight, bias)`, not rounded.

    The first is the sum over the first `first_share(K)` columns, and the bias; the second that over the others.

    Args:
        input, weight, bias, overlap, ahead: as `decode_linear` takes them, one weight.
        backend: "auto", "cuda" or "reference". Layers that the kernel does not take (`leaves_addends`) are left to
            `decode_linear`, twice. Tensors that require a gradient under grad mode, and torch.func transforms, need the
            reference, which "auto" then takes.

    Returns:
        [2, ..., N] float32, or float64 where a tensor is float64.

    Raises:
        ValueError: shapes that do not fit together.
        BackendError: the backend named cannot run here; the message says why.
    """
    check_layer(input, [weight], [] if bias is None else [bias], None, None, None, None, None, False)
    dtypes = (input.dtype, weight.dtype)
    chosen = registry.pick_without_gradient("decode_linear_addends", backend, dtypes, input, weight, bias)
    if chosen != "reference" and leaves_addends(input, weight, bias):
        return RAW_ADDENDS[chosen](input, weight, bias, overlap, list(ahead))
    share, each = first_share(weight.shape[1]), "reference" if chosen == "reference" else backend
    # With a residual in float32 sums are not rounded.
    none = input.new_zeros((*input.shape[:-1], len(weight)), dtype=compute_dtype(input, weight))
    addends = [decode_linear(input[..., :share], weight[:, :share], bias, residual=none, backend=each), none]
    if weight.shape[1] > share:
        addends[1] = decode_linear(input[..., share:], weight[:, share:], residual=none, backend=each)
    return torch.stack(addends)


def decode_linear_of_sum_reference(
    input: Tensor, addends: Tensor, weight: Tensor, bias: Tensor | None = None, **norm: Any
) -> tuple[Tensor, Tensor]:
    """`decode_linear_of_sum` in plain PyTorch, for any number of rows."""
    return decode_linear_of_sum(input, addends, weight, bias, **norm, backend="reference")


def summed(input: Tensor, addends: Tensor) -> Tensor:
    """`input + addends[0] + addends[1]`, rounded to `input`'s dtype."""
    return (addends.sum(0) + input.to(compute_dtype(input))).to(input.dtype)


def check_addends(input: Tensor, addends: Tensor, norm: str | None) -> None:
    """Raises what `decode_linear_of_sum` does."""
    if norm is None:
        raise ValueError("addends need a norm: 'layer_norm' or 't5_rms_norm'")
    check_shape("addends", addends, torch.Size((ADDENDS, *input.shape)))
    dtype = compute_dtype(input)
    if addends.dtype != dtype:
        raise TypeError(f"addends must be {dtype}, not {addends.dtype}")


def decode_linear_of_sum(
    input: Tensor,
    addends: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    overlap: bool = False,
    ahead: Sequence[Tensor] = (),
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`decode_linear(sum, weight, bias, norm=norm, ...)`, and `sum`, which is `input + addends[0] + addends[1]`.

    Args:
        input: [..., K], as `decode_linear` takes it.
        addends: [2, ..., K] float32, of a float64 input float64. The sum is rounded to the input's dtype.
        weight, bias, norm, norm_weight, norm_bias, eps, overlap, ahead: as `decode_linear` takes them, one weight.
        backend: "auto", "cuda" or "reference". Layers that the kernel does not take (`takes_addends`) are left to
            PyTorch's sum and `decode_linear`. Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        [..., N] of the weight's dtype, and [..., K] of the input's.

    Raises:
        ValueError: shapes that do not fit together.
        TypeError: addends of another dtype.
        BackendError: the backend named cannot run here; the message says why.
    """
    check_layer(input, [weight], [] if bias is None else [bias], None, norm, norm_weight, norm_bias, None, False)
    check_addends(input, addends, norm)
    dtypes, parameters = (input.dtype, weight.dtype), (weight, bias, norm_weight, norm_bias)
    chosen = registry.pick_without_gradient("decode_linear_of_sum", backend, dtypes, input, addends, *parameters)
    of_norm: dict[str, Any] = {"norm": norm, "norm_weight": norm_weight, "norm_bias": norm_bias}
    if chosen != "reference" and takes_addends(input, weight, bias, **of_norm):
        return RAW_OF_SUM[chosen](input, addends, weight, bias, norm, norm_weight, norm_bias, eps, overlap, list(ahead))
    sum = summed(input, addends)
    each = "reference" if chosen == "reference" else backend
    output = decode_linear(sum, weight, bias, **of_norm, eps=eps, backend=each)
    return output, sum


def _addends_samples(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
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
        addends = make(ADDENDS, rows, columns, dtype=torch.promote_types(dtype, torch.float32))
        arguments = (make(rows, columns), addends, make(columns, outputs).T, make(outputs))
        yield registry.SampleInput(arguments, norm)


registry.register(
    registry.Op(
        name="decode_linear_addends",
        raw=("decode_linear_addends", "leaves_addends"),
        function=decode_linear_addends,
        reference=decode_linear_addends_reference,
        sample_inputs=_addends_samples,
        backends=(registry.CUDA, registry.REFERENCE),
    )
)
registry.register(
    registry.Op(
        name="decode_linear_of_sum",
        raw=("decode_linear_of_sum", "takes_addends"),
        function=decode_linear_of_sum,
        reference=decode_linear_of_sum_reference,
        sample_inputs=_of_sum_samples,
        backends=(registry.CUDA, registry.REFERENCE),
    )
)
