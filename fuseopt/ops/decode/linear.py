"""A linear layer of few rows, with the norm before it and the activation and residual after it, for decode steps.

With few rows a linear layer is bound by reading its weight, or, if that is small, by launch latency. So the CUDA
kernels read the weight in place, before the previous kernel has ended, and compute the neighbouring operations too.
The CPU kernels read the weight once for all rows, in the order in which it is stored.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.library import check_shape, compute_dtype, define, without_autocast
from fuseopt.ops.low_bit import LowBitWeight, check_kind
from fuseopt.ops.packed_weight import PackedWeight
from fuseopt.tuning import table_of

_Quantised = TypeVar("_Quantised", LowBitWeight, PackedWeight)

FEW_ROWS = 16
"""Up to this number of rows the CUDA kernels take any layer; above, those for which `is_fast` is true."""

MAX_ROWS = 256
"""The kernels take no more rows; the BLAS library is as fast there."""

# TUNED: F.linear / decode_linear, of a weight stored as [N, K] and as [K, N]: the range over 5 shapes of 576 to 3072
# (EPYC 9004, one thread). float32: 1.2 to 1.3 and 1.3 to 1.7 with 16 rows, 1.0 to 1.1 and 1.1 with 64. bfloat16 with
# AVX-512 BF16: 1.0 to 1.3 and 1.5 to 1.7 with 16 rows, 1.0 to 1.1 and 1.1 to 1.2 with 32, 0.9 to 1.0 with 64; without:
# 0.9 to 1.1 and 1.6 to 1.8 with 6, 0.7 and 1.1 with 12. float16: 3 and 41 to 100 with 64. float64: 1.8 and 4.3 with 6,
# 0.5 and 1.2 with 64.
# Other processors than those with AVX-512, and matrix units (AMX), were not measured, so fewer rows are taken there.
_HAS_BFLOAT16_PAIRS = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
MOST_ROWS_ON_CPU = {
    torch.float32: (64, 64) if torch.backends.cpu.get_cpu_capability() == "AVX512" else (8, 16),
    torch.bfloat16: (32, 48) if _HAS_BFLOAT16_PAIRS else (6, 12),
    torch.float16: (MAX_ROWS, MAX_ROWS),
    torch.float64: (6, 64),
}
"""By dtype: up to this number of rows the CPU kernels are faster than the BLAS library, for a weight that is stored as
[N, K] and as [K, N]."""

_HALVES = (torch.float16, torch.bfloat16)
# Longest K of the many-rows kernel: with a norm, which one block computes, and without, in a cluster.
_LONGEST_NORMALISED, _LONGEST = 1536, 6144
_TILES_SHARED_BYTES = 208 * 1024

NORMS = ("layer_norm", "rms_norm", "gemma_rms_norm")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


LAYER_SCHEMA = (
    "Tensor? residual, str norm, Tensor? norm_weight, Tensor? norm_bias, float eps, str activation, bool gated,"
    " bool pdl, Tensor[] prefetch"
)


class LayerOptions(NamedTuple):
    """What surrounds the products of a layer: the last arguments of the raw ops, in the order of `LAYER_SCHEMA`.

    Attributes: as `decode_linear` takes them; "" stands for no norm and no activation.
    """

    residual: Tensor | None = None
    norm: str = ""
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    eps: float = 0.0
    activation: str = ""
    gated: bool = False
    pdl: bool = False
    prefetch: Sequence[Tensor] = ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that the result depends on."""
        return self.residual, self.norm_weight, self.norm_bias

    def columns(self, outputs: Sequence[int]) -> int:
        """The number of columns of the result, for weights with these numbers of outputs."""
        return outputs[0] if self.gated else sum(outputs)


_NO_OPTIONS = LayerOptions()


def new_output(input: Tensor, outputs: Sequence[int], dtype: torch.dtype, options: LayerOptions) -> Tensor:
    """An uninitialised result for weights of `outputs` and `dtype`, for the fakes of the raw ops."""
    shape = (*input.shape[:-1], options.columns(outputs))
    return input.new_empty(shape, dtype=output_dtype(dtype, options.residual))


def output_dtype(dtype: torch.dtype, residual: Tensor | None) -> torch.dtype:
    """The dtype of a result, for weights of `dtype`."""
    return dtype if residual is None else torch.promote_types(dtype, residual.dtype)


def _fake(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *options: Any) -> Tensor:
    return new_output(input, [weight.shape[0] for weight in weights], weights[0].dtype, LayerOptions(*options))


RAW = define(f"decode_linear(Tensor input, Tensor[] weights, Tensor[] biases, {LAYER_SCHEMA}) -> Tensor", _fake)


def _normalised(input: Tensor, options: LayerOptions, rounded_to: torch.dtype) -> Tensor:
    """The linear layer's input, rounded to its weight's dtype as the upstream modules leave it."""
    _, norm, weight, bias, eps, *_ = options
    if norm == "":
        return input.to(rounded_to)
    dtype = compute_dtype(input, weight)
    x = input.to(dtype)
    if norm == "layer_norm":
        shift = None if bias is None else bias.to(dtype)
        scale = None if weight is None else weight.to(dtype)
        return F.layer_norm(x, x.shape[-1:], scale, shift, eps).to(rounded_to)
    xhat = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if norm == "gemma_rms_norm":
        return (xhat if weight is None else xhat * (1 + weight.to(dtype))).to(rounded_to)
    xhat = xhat.to(rounded_to)
    return xhat if weight is None else (xhat.to(dtype) * weight.to(dtype)).to(rounded_to)


def reference_layer(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    options: LayerOptions,
    rounded_to: torch.dtype | None = None,
    updates: Callable[[Tensor], Sequence[Tensor]] | None = None,
) -> Tensor:
    """`decode_linear` in plain PyTorch.

    Args:
        rounded_to: dtype of the norm's result, and of the output without a residual; that of `weights` if None.
        updates: called with the normalised input, returns what is added to the product of each weight.
    """
    rounded_to = rounded_to or weights[0].dtype
    with without_autocast(input):
        dtype = compute_dtype(weights[0])
        x = _normalised(input, options, rounded_to).to(dtype)
        products = [F.linear(x, weight.to(dtype)) for weight in weights]
        if updates is not None:
            products = [product + update for product, update in zip(products, updates(x), strict=True)]
        if biases:
            products = [product + bias.to(dtype) for product, bias in zip(products, biases, strict=True)]
        return ended(products, options, output_dtype(rounded_to, options.residual))


def ended(products: list[Tensor], options: LayerOptions, dtype: torch.dtype) -> Tensor:
    """The layer's result in `dtype`, from the product of each weight: activation, gate and residual."""
    if options.activation:
        activation = ACTIVATIONS[options.activation]
        products = [activation(products[0]), *(products[1:] if options.gated else map(activation, products[1:]))]
    output = products[0] * products[1] if options.gated else torch.cat(products, -1)
    if options.residual is not None:
        output = output + options.residual.to(torch.promote_types(output.dtype, options.residual.dtype))
    return output.to(dtype)


def _one_or_several(argument: Any) -> list[Any]:
    """`argument` as a list. A quantised weight is a named tuple, and one."""
    is_one = isinstance(argument, Tensor) or hasattr(argument, "_fields") or not isinstance(argument, Iterable)
    return [argument] if is_one else list(argument)


def as_list(name: str, tensors: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    """The argument `name`, one tensor or several, as a list; an empty one for None.

    Raises:
        TypeError: something else than a tensor.
    """
    if tensors is None:
        return []
    listed = _one_or_several(tensors)
    for each in listed:
        if not isinstance(each, Tensor):
            raise TypeError(f"{name} must be a tensor or a list of tensors, not {type(each).__name__}")
    return listed


def quantised_list(weight: Any, kind: type[_Quantised], made_by: str) -> list[_Quantised]:
    """One weight, or several, as a list.

    Raises:
        TypeError: something else than `kind`, which `made_by` makes, is among them.
    """
    weights = _one_or_several(weight)
    for each in weights:
        check_kind(each, kind, made_by)
    return weights


def check_layer(
    input: Tensor,
    weights: Sequence[Tensor | LowBitWeight | PackedWeight],
    biases: Sequence[Tensor] = (),
    options: LayerOptions = _NO_OPTIONS,
) -> None:
    """Raises a ValueError where these cannot be a layer."""
    residual, norm, norm_weight, norm_bias, _, activation, gated, *_ = options
    if norm not in ("", *NORMS):
        raise ValueError(f"norm must be None, {', '.join(map(repr, NORMS))}, not {norm!r}")
    if not norm and (norm_weight is not None or norm_bias is not None):
        raise ValueError("norm_weight and norm_bias need a norm")
    if norm != "layer_norm" and norm_bias is not None:
        raise ValueError(f"{norm} has no bias")
    if activation not in ("", *ACTIVATIONS):
        raise ValueError(f"activation must be None, {', '.join(map(repr, ACTIVATIONS))}, not {activation!r}")
    if not 1 <= len(weights) <= 3:
        raise ValueError(f"one to three weights, not {len(weights)}")
    if gated and (len(weights) != 2 or not activation):
        raise ValueError("gated takes two weights and an activation")
    for weight in weights:
        rows = weights[0].shape[0] if gated else weight.shape[0]
        check_shape("weight", weight, torch.Size((rows, input.shape[-1])))
        if weight.dtype != weights[0].dtype:
            raise ValueError(f"weights must share one dtype, not {weights[0].dtype} and {weight.dtype}")
    if len(biases) not in (0, len(weights)):
        raise ValueError(f"{len(biases)} biases for {len(weights)} weights")
    for weight, bias in zip(weights, biases, strict=False):
        check_shape("bias", bias, weight.shape[:1])
    for name, parameter in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if parameter is not None:
            check_shape(name, parameter, input.shape[-1:])
    if residual is not None:
        columns = options.columns([weight.shape[0] for weight in weights])
        check_shape("residual", residual, torch.Size((*input.shape[:-1], columns)))


def is_fast(
    input: Tensor,
    weights: Sequence[Tensor],
    residual: Tensor | None = None,
    norm: str | None = None,
    gated: bool = False,
) -> bool:
    """True if the kernels are faster than the BLAS library plus a launch for each neighbouring operation.

    On a CPU they are faster up to `MOST_ROWS_ON_CPU` rows. On a GPU, more than `FEW_ROWS` rows need one dtype and sm_90
    or newer. In 16 bits the work must be at most `decode_linear_max_work` in `fuseopt/tuning`, for a long K
    `decode_linear_max_long_work`; float32 must have no LayerNorm and no gate.

    Args:
        input: [..., K].
        weights: [N, K] each, as `decode_linear` takes them.
    """
    rows, (outputs, columns) = input.shape[:-1].numel(), weights[0].shape
    if input.is_cpu:
        return all(rows <= MOST_ROWS_ON_CPU.get(weight.dtype, (0, 0))[weight.stride(1) != 1] for weight in weights)
    if rows <= FEW_ROWS:
        return True
    if not (
        rows <= MAX_ROWS
        and input.dtype in (*_HALVES, torch.float32)
        and all(tensor.dtype is input.dtype for tensor in (weights[0], residual) if tensor is not None)
        and outputs % 8 == columns % 8 == 0
        and all(len(weight) == outputs for weight in weights)
        and input.is_cuda
        and (norm is None or columns <= _LONGEST_NORMALISED)
    ):
        return False
    if input.dtype is torch.float32:
        return norm != "layer_norm" and not gated and _has_tiles(input.device)
    if norm is None and columns > _LONGEST:
        return False
    is_long = norm is None and len(weights) == 1 and columns >= 2 * outputs
    capability = torch.cuda.get_device_capability(input.device)
    most_work = table_of(capability[0])["decode_linear_max_long_work" if is_long else "decode_linear_max_work"]
    return capability >= (9, 0) and rows * outputs * columns <= most_work


def _has_tiles(device: torch.device) -> bool:
    """Whether a GPU has what csrc/cuda/decode/linear/tiles.cuh takes: clusters and enough shared memory."""
    properties = torch.cuda.get_device_properties(device)
    return properties.major >= 9 and properties.shared_memory_per_block_optin >= _TILES_SHARED_BYTES


def decode_linear(
    input: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
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
    """`residual + activation(F.linear(norm(input), weight, bias))`, for the few rows of a decode step.

    Computed in float32 (float64 if a tensor is float64) and rounded once at the end. The norm's result is rounded to
    the weight's dtype too, as upstream; the tensor core kernels round norm weight times linear weight instead. Autocast
    does not apply.

    Args:
        input: [..., K], any strides; float32, float16, bfloat16 or float64. Cast to `weight`'s dtype, after the norm
            where there is one. More than `MAX_ROWS` rows are left to the reference, and by "auto" all for which the
            kernels are not `is_fast`.
        weight: [N, K], as F.linear takes it, of any one floating dtype. Read in place with unit stride in either
            dimension: a torch.nn.Linear's weight as it is, a Conv1D's as `weight.T`; copied at every call if it has
            neither. Up to three weights, say of query, key and value, read their common input once. They may differ
            in N, unless `gated`.
        bias: [N], one for each weight, or None.
        residual: added at the end: [..., sum of all N], or [..., N] if gated, or None. May have another dtype.
        norm: None, "layer_norm", "rms_norm" (Llama's, T5's: rounded to `weight`'s dtype before the product with
            norm_weight, and after it), or "gemma_rms_norm" (times 1 + norm_weight, rounded after it).
        norm_weight: [K] or None.
        norm_bias: [K] or None.
        eps: the norm's.
        activation: None, "relu", "gelu" (by the error function), "gelu_tanh" or "silu".
        gated: of two weights of one shape, `activation(first) * second`, as in T5 v1.1 and Llama.
        pdl: programmatic dependent launch: the CUDA kernel reads its weights while the previous kernel on the stream
            still runs. That kernel must not write any of the parameters.
        prefetch: tensors that later launches read, at most three of one size and dtype. The tensor core kernels load
            them into the L2 cache from sm_90 on, unless they are so large that their own launch saturates bandwidth.
        backend: "auto", "cuda", "cpu" or "reference". Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        [..., sum of all N] ([..., N] if gated), contiguous, of `weight`'s dtype, or of what that and
        `residual`'s promote to.

    Raises:
        ValueError: shapes or options that do not fit together.
        BackendError: the backend named cannot run here; the message says why.
    """
    weights, biases = as_list("weight", weight), as_list("bias", bias)
    options = LayerOptions(
        residual, norm or "", norm_weight, norm_bias, eps, activation or "", gated, pdl, list(prefetch)
    )
    check_layer(input, weights, biases, options)
    rows = input.shape[:-1].numel()
    if rows > MAX_ROWS:
        if backend not in ("auto", "reference"):
            raise BackendError(f"decode_linear: {backend!r} takes {MAX_ROWS} rows at most, not {rows}; use F.linear")
        chosen = "reference"
    elif backend == "auto" and not is_fast(input, weights, residual, norm, gated):
        chosen = "reference"
    else:
        dtypes, tensors = (input.dtype, weights[0].dtype), (input, *weights, *biases, *options.tensors)
        chosen = registry.pick_without_gradient("decode_linear", backend, dtypes, *tensors)
    if chosen == "reference":
        return reference_layer(input, weights, biases, options)
    return RAW[chosen](input, weights, biases, *options)


decode_linear_reference = functools.partial(decode_linear, backend="reference")


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    layer_norm = {"norm": "layer_norm", "norm_weight": make(48), "norm_bias": make(48)}
    rms_norm = {"norm": "rms_norm", "norm_weight": make(48), "eps": 1e-6}
    yield registry.SampleInput((make(3, 48), make(40, 48), make(40)), {**layer_norm, "activation": "gelu_tanh"})
    yield registry.SampleInput((make(1, 48), make(48, 24).T, make(24)), {"residual": make(1, 24)})
    yield registry.SampleInput((make(2, 2, 48), [make(16, 48) for _ in range(3)]), rms_norm)
    yield registry.SampleInput(
        (make(9, 48), [make(24, 48), make(24, 48)]), {**rms_norm, "activation": "gelu", "gated": True}
    )
    gemma = {"norm": "gemma_rms_norm", "norm_weight": make(48), "eps": 1e-6}
    yield registry.SampleInput((make(1, 48), [make(n, 48) for n in (32, 8, 7)], [make(n) for n in (32, 8, 7)]), gemma)
    yield registry.SampleInput((make(2, 48), [make(20, 48), make(20, 48)]), {"activation": "silu", "gated": True})
    wide = torch.promote_types(dtype, torch.float32)
    yield registry.SampleInput((make(2, 33), make(7, 33, dtype=wide)), {"residual": make(2, 7, dtype=wide)})
    yield registry.SampleInput((make(5, 33), make(33, 7).T, make(7)), {"activation": "relu"})
    yield registry.SampleInput((make(0, 8), make(4, 8)))


registry.register(
    registry.Op(
        name="decode_linear",
        function=decode_linear,
        reference=decode_linear_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.CPU, registry.REFERENCE),
    )
)
