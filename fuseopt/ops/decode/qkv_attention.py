"""Self-attention of a decode step up to its output projection: norm, query, key and value, cache, attention.

Only a head's own attention needs the projection's outputs for that head. So the CUDA kernel keeps them on the
multiprocessors that computed them, and each layer has one kernel boundary less to wait for.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.decode.attention import decode_attention_
from fuseopt.ops.decode.attention_checks import check, check_update
from fuseopt.ops.decode.linear import NORMS, LayerOptions, check_layer, decode_linear
from fuseopt.ops.decode.linear_partials import is_at_an_address
from fuseopt.ops.library import check_shape, define
from fuseopt.tuning import tuned


def _fake(input: Tensor, weight: Tensor, *further: object) -> Tensor:
    return weight.new_empty((input.shape[0], weight.shape[0] // 3))


_LAYER = "Tensor input, Tensor weight, Tensor? bias"
_NORM = "str norm, Tensor? norm_weight, Tensor? norm_bias"
RAW = define(
    f"decode_qkv_attention_({_LAYER}, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor positions, Tensor? mask,"
    f" float scale, {_NORM}, float eps, bool pdl) -> Tensor",
    _fake,
)
# While tensors are traced they have no address, and the answer is no.
RAW_TAKES = define(
    f"takes_qkv_attention({_LAYER}, Tensor key_cache, Tensor value_cache, {_NORM}) -> bool", lambda *arguments: False
)


def takes_qkv_attention(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> bool:
    """Whether the CUDA kernel of `decode_qkv_attention_`, which must exist, takes these tensors.

    It takes one row, a weight stored as [K, N] with K at most 1664, heads of 64 dimensions, and caches of at most 512
    places; fewer if a multiprocessor has less shared memory than an H100's.
    """
    caches = (key_cache, value_cache)
    return is_at_an_address(input) and RAW_TAKES["cuda"](input, weight, bias, *caches, norm, norm_weight, norm_bias)


def is_fast(input: Tensor, weight: Tensor, bias: Tensor | None, *caches: Tensor, **norm: Any) -> bool:
    """True if that kernel, which must exist, takes these tensors and is faster than two kernels, as for a long K."""
    least = tuned("qkv_attention_min_columns", input.device)
    return input.shape[-1] >= least and takes_qkv_attention(input, weight, bias, *caches, **norm)


def decode_qkv_attention_(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`decode_attention_` of the thirds (query, key, value) of `decode_linear(input, weight, bias, norm=norm, ...)`.

    Upstream: `ln_1`, `c_attn` and the attention of `GPT2Block`, for one token a row.

    Args:
        input: [rows, K], float32, float16, bfloat16 or float64.
        weight: [3 * heads * head_dim, K], `input`'s dtype, any strides: queries, keys, then values.
        bias: [3 * heads * head_dim] or None.
        key_cache, value_cache: [rows, heads, capacity, head_dim], `weight`'s dtype, contiguous. Written to.
        positions, mask, scale: as `decode_attention_` takes them.
        norm, norm_weight, norm_bias, eps: as `decode_linear` takes them.
        pdl: as in both. `positions`, `mask` and the caches' places before `positions` are read while previous kernels
            still run.
        backend: "auto", "cuda" or "reference". Tensors that the kernel does not take (`takes_qkv_attention`) go to
            `decode_linear` and `decode_attention_`. Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        [rows, heads * head_dim], contiguous, `weight`'s dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a cache that is not contiguous.
        TypeError: positions that are not int32 or int64, a mask that is not bool.
        BackendError: the named backend cannot run here; the message says why.
    """
    if input.dim() != 2 or key_cache.dim() != 4:
        raise ValueError(
            "input must be [rows, K] and key_cache [rows, heads, capacity, head_dim], not"
            f" {tuple(input.shape)} and {tuple(key_cache.shape)}"
        )
    if input.dtype != weight.dtype:
        raise ValueError(f"weight must have input's dtype {input.dtype}, not {weight.dtype}")
    if norm not in NORMS:
        raise ValueError(f"norm must be {', '.join(map(repr, NORMS))}, not {norm!r}")
    biases = [] if bias is None else [bias]
    check_layer(input, [weight], biases, LayerOptions(None, norm, norm_weight, norm_bias))
    heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    check_shape("weight", weight, torch.Size((3 * heads * head_dim, input.shape[1])))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype != weight.dtype:
            raise ValueError(f"{name} must have weight's dtype {weight.dtype}, not {cache.dtype}")
    vector = weight.new_empty(input.shape[0], heads, head_dim, device="meta")
    checked = key_cache, value_cache, None, None
    check(vector, checked, positions, mask=mask)
    check_update(vector, vector, vector, checked)
    parameters = (input, weight, bias, key_cache, value_cache, norm_weight, norm_bias)
    chosen = registry.pick_without_gradient("decode_qkv_attention_", backend, (input.dtype,), *parameters)
    layer, caches = (input, weight, bias), (key_cache, value_cache)
    of_norm: dict[str, Any] = {"norm": norm, "norm_weight": norm_weight, "norm_bias": norm_bias}
    if chosen != "reference" and takes_qkv_attention(*layer, *caches, **of_norm):
        return RAW[chosen](*layer, *caches, positions, mask, scale, norm, norm_weight, norm_bias, eps, pdl)
    each = "reference" if chosen == "reference" else backend
    qkv = decode_linear(*layer, **of_norm, eps=eps, pdl=pdl, backend=each)
    query, key, value = qkv.view(-1, 3, heads, head_dim).unbind(1)
    return decode_attention_(query, key, value, *caches, positions, mask=mask, scale=scale, pdl=pdl, backend=each)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    for rows, heads, head_dim, columns, capacity, position in (
        (1, 2, 64, 96, 40, 33),
        (1, 16, 64, 1024, 300, 299),
        (3, 2, 5, 12, 9, 0),
        (0, 1, 4, 8, 3, 0),
    ):
        outputs = 3 * heads * head_dim
        norm = {"norm": "layer_norm", "norm_weight": make(columns), "norm_bias": make(columns)}
        layer = (make(rows, columns), (columns**-0.5 * make(columns, outputs)).T, make(outputs))
        caches = (make(rows, heads, capacity, head_dim), make(rows, heads, capacity, head_dim))
        positions = torch.full((1,), position, device=device)
        yield registry.SampleInput((*layer, *caches, positions), {**norm, "scale": head_dim**-0.5})


registry.register(
    registry.Op(
        name="decode_qkv_attention_",
        raw=("decode_qkv_attention_", "takes_qkv_attention"),
        function=decode_qkv_attention_,
        reference=partial(decode_qkv_attention_, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
        in_place=True,
    )
)
