"""Attention of a decode step: one query per row over a cache of keys and values whose filled length is on the device.

Lengths, padding and positions are tensors, so a CUDA graph captured once stays valid for every length up to the
cache's capacity. T5's relative position bias depends only on the distance between key and query (Raffel et al. 2020,
arXiv 1910.10683), so a vector per head replaces a matrix.

At long contexts, reading the cache limits attention, so a cache may be stored with 8 bits an element.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.decode import quantized_heads
from fuseopt.ops.decode.attention_checks import Caches, check, check_options, check_update
from fuseopt.ops.decode.head_rotation import HeadRotation
from fuseopt.ops.decode.quantized_heads import as_bytes, dequantize_heads, quantize_heads
from fuseopt.ops.library import compute_dtype, define, without_autocast


def _fake(query: Tensor, *further: object) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1] * query.shape[2]))


# Caches of float8_e4m3fn are passed as uint8.
RAW = define(
    "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? key_scales, Tensor? value_scales,"
    " Tensor lengths, Tensor? starts, Tensor? mask, Tensor? bias, float scale, bool pdl) -> Tensor",
    _fake,
)
UPDATE_RAW = define(
    "decode_attention_(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor(c!)? key_scales, Tensor(d!)? value_scales, Tensor positions, Tensor? starts, Tensor? mask, Tensor? bias,"
    " Tensor? ancestry, float scale, Tensor? rotary, Tensor? row_positions, bool interleaved, Tensor? q_norm,"
    " Tensor? k_norm, float norm_eps, float norm_offset, int window, float softcap, bool pdl) -> Tensor",
    _fake,
)


def attend_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """`decode_attention`, with window and softcap, in plain PyTorch; computes in float32, or float64 for such a query.

    Args:
        query: [rows, heads, head_dim].
        key_cache, value_cache: [batch, kv_heads, capacity, head_dim], of any floating-point dtype.

    Returns:
        [rows, heads * head_dim], `query`'s dtype.
    """
    rows, heads, head_dim = query.shape
    batch, kv_heads, capacity, _ = key_cache.shape
    dtype = compute_dtype(query)
    places = torch.arange(capacity, device=query.device)
    ends = lengths.reshape(-1, 1).expand(batch, 1)
    attended = places < ends
    if starts is not None:
        attended = attended & (places >= starts.unsqueeze(1))
    if window > 0:
        attended = attended & (places >= ends - window)
    if mask is not None:
        attended = attended & mask
    with without_autocast(query):
        # Rows that share an item of the cache (beams), and heads that share keys, are queries of the same keys.
        shape = (batch, rows // max(batch, 1), kv_heads, heads // max(kv_heads, 1), head_dim)
        queries = query.to(dtype).reshape(shape).transpose(1, 2)  # [batch, kv_heads, beams, group, head_dim]
        scores = queries @ key_cache.to(dtype).mT.unsqueeze(2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            distances = (ends - 1 - places).clamp(min=0, max=bias.shape[1] - 1)
            of_heads = bias.to(dtype)[:, distances].unflatten(0, (kv_heads, -1))  # [kv_heads, group, batch, capacity]
            scores = scores + of_heads.permute(2, 0, 1, 3).unsqueeze(2)
        attended = attended[:, None, None, None, :]
        probabilities = torch.softmax(scores.masked_fill(~attended, float("-inf")), -1)
        # Without this, rows that attend to nothing would be NaN. So would products with places that were never written.
        probabilities = torch.where(attended.any(-1, keepdim=True), probabilities, 0.0)
        values = value_cache.to(dtype).unsqueeze(2).masked_fill(~attended.mT, 0.0)
        return (probabilities @ values).transpose(1, 2).reshape(rows, heads * head_dim).to(query.dtype)


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention of one query per row over the places `starts <= place < lengths` of a cache, in float32.

    For a decoder's cross-attention to its encoder. For self-attention `decode_attention_` first writes a step's own key
    and value.

    Args:
        query: [rows, heads, head_dim], any strides; float32, float16, bfloat16 or float64.
        key_cache: [batch, kv_heads, capacity, head_dim], `query`'s dtype. `rows` is a multiple of `batch`: row i (a
            beam) reads item `i // (rows // batch)`. `heads` is a multiple of `kv_heads`: head h (grouped queries)
            reads head `h // (heads // kv_heads)`.
        value_cache: like `key_cache`.
        key_scales, value_scales: [batch, kv_heads, capacity], float32, not negative, if `quantize_heads` has rounded
            the caches to int8 or float8_e4m3fn; else None. With scales, the CUDA kernel needs compute capability 8.0,
            float16 or bfloat16, a head_dim that is a multiple of 16, and tensors aligned to 16 bytes. For another
            head_dim, and for float64, "auto" is the reference.
        lengths: [batch] or one element, int32 or int64, on `query`'s device.
        starts: [batch], like `lengths`, or None for zeros: left padding.
        mask: [batch, capacity], bool, False for places that are not attended to, or None.
        bias: [heads, distances], added to the score of the key that is `distance` places before the last one, or None.
            Greater distances take the last column.
        scale: multiplies the scores before `bias` is added.
        pdl: launch the CUDA kernel programmatically dependent on its predecessor on the stream. Caches, lengths,
            starts, mask and bias are then read while previous kernels still run. So between the kernels that write them
            and this one there must be a kernel that was launched without pdl.
        backend: "auto", "cuda", "cpu" or "reference". Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        [rows, heads * head_dim], contiguous, `query`'s dtype; zeros in a row that attends to nothing.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        TypeError: lengths or starts that are not int32 or int64, a mask that is not bool.
        BackendError: the named backend cannot run here; the message says why.
    """
    caches = key_cache, value_cache, key_scales, value_scales
    check(query, caches, lengths, starts, mask, bias)
    chosen = _backend(backend, query, caches, bias)
    if chosen != "reference":
        stored = (as_bytes(key_cache), as_bytes(value_cache), key_scales, value_scales)
        return RAW[chosen](query, *stored, lengths, starts, mask, bias, scale, pdl)
    keys, values = _dequantised(caches, query)
    return attend_reference(query, keys, values, lengths, starts, mask, bias, scale)


def decode_attention_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    ancestry: Tensor | None = None,
    scale: float = 1.0,
    rotary: Tensor | None = None,
    row_positions: Tensor | None = None,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Writes `key` and `value` to place `positions` of the caches, then attends to all places up to and including it.

    Queries and new keys are first normalised and rotated in float32, then rounded to their dtype, if that is asked for.
    With `key_scales`, the new key and value are then quantised, and the query attends to the quantised ones.

    Args:
        query: [rows, heads, head_dim], any strides; for example a view of a packed projection.
        key, value: [rows, kv_heads, head_dim], any strides, `query`'s dtype; `heads` is a multiple of `kv_heads`.
        key_cache, value_cache: [rows, kv_heads, capacity, head_dim], contiguous. Written to.
        key_scales, value_scales: [rows, kv_heads, capacity], contiguous, or None; as in `decode_attention`. Written to.
        positions: [rows] or one element, int32 or int64, below `capacity`. The CUDA kernel writes nothing for a
            position outside the cache; the row's result is then meaningless. The CPU kernel raises RuntimeError.
        starts, mask, bias, scale, backend: as in `decode_attention`, with `lengths` = `positions` + 1.
        ancestry: [rows, capacity], int32: the row of the caches that holds a row's key and value for a place, or None
            for its own row. So beams can be reordered without copying their caches. A row writes its new key to its own
            row; entries from `positions` on, which must have one element, are not read.
        rotary: [table_positions, rotated] float32, `rotated` even and at most head_dim: the cosines of a position, then
            its sines, scaled as the model does. Dimensions from `rotated` on are not rotated. None: no rotation.
        row_positions: [rows], int32 or int64, each row's position in `rotary`, below `table_positions`. The CUDA kernel
            takes the nearest one for others.
        interleaved: rotate pairs (2i, 2i + 1), as GPT-J does; else (i, i + rotated / 2), as Llama does.
        q_norm, k_norm: [head_dim], weights of an RMS norm of each query and new key before rotation, or None.
        norm_eps: added to the mean of squares in these norms.
        norm_offset: added to their weights: 1 for Gemma.
        window: a query attends to its own place and the `window` - 1 places before it; 0: to all.
        softcap: scores, after `scale`, become softcap * tanh(score / softcap) before `bias` is added; 0: as they are.
        pdl: as in `decode_attention`, for places before `positions`, `ancestry`, `rotary`, `row_positions` and norms.

    Returns:
        [rows, heads * head_dim], contiguous, `query`'s dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a cache that is not contiguous.
        TypeError, BackendError: as in `decode_attention`; TypeError also for an ancestry that is not int32 and a
            rotary that is not float32, BackendError for tensors that require a gradient under grad mode, because a
            cache takes no part in autograd.
    """
    caches = key_cache, value_cache, key_scales, value_scales
    check(query, caches, positions, starts, mask, bias)
    check_update(query, key, value, caches)
    rotation = HeadRotation(rotary, row_positions, interleaved, q_norm, k_norm, norm_eps, norm_offset)
    rotation.check(query.shape[2], (query.shape[0],))
    check_options(query, key_cache, positions, ancestry, window, softcap)
    chosen = _backend(backend, query, caches, key, value, bias, q_norm, k_norm)
    if chosen != "reference":
        step = (query, key, value, as_bytes(key_cache), as_bytes(value_cache), key_scales, value_scales)
        places = (positions, starts, mask, bias, ancestry, scale)
        return UPDATE_RAW[chosen](*step, *places, *rotation, window, softcap, pdl)
    rows = torch.arange(query.shape[0], device=query.device)
    ends = positions.reshape(-1).expand(query.shape[0]).long()
    new_keys, new_values = rotation.of_keys(key), value
    if key_scales is not None and value_scales is not None:
        new_keys, key_scales[rows, :, ends] = quantize_heads(new_keys, key_cache.dtype)
        new_values, value_scales[rows, :, ends] = quantize_heads(new_values, value_cache.dtype)
    for cache, vectors in ((key_cache, new_keys), (value_cache, new_values)):
        as_bytes(cache)[rows, :, ends] = as_bytes(vectors)  # PyTorch cannot index float8
    keys, values = _dequantised(caches, query)
    if ancestry is not None:
        keys, values = gathered((keys, values), ancestry, ends)
    query = rotation.of_queries(query)
    return attend_reference(query, keys, values, positions + 1, starts, mask, bias, scale, window, softcap)


def _backend(backend: str, query: Tensor, caches: Caches, *others: Tensor | None) -> str:
    keys, values, *scales = caches
    if scales[0] is None:
        return registry.pick_without_gradient("decode_attention", backend, (query.dtype,), query, keys, values, *others)
    if backend == "auto" and query.is_cuda and not quantized_heads.is_head_dim_of_kernel(query.shape[2]):
        return "reference"
    return registry.pick_without_gradient(
        quantized_heads.EIGHT_BIT_ATTENTION, backend, (query.dtype,), query, *scales, *others
    )


def _dequantised(caches: Caches, query: Tensor) -> tuple[Tensor, Tensor]:
    keys, values, key_scales, value_scales = caches
    if key_scales is None or value_scales is None:
        return keys, values
    dtype = compute_dtype(query)
    return dequantize_heads(keys, key_scales, dtype), dequantize_heads(values, value_scales, dtype)


def gathered(caches: tuple[Tensor, Tensor], ancestry: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Copies caches [rows, heads, capacity, head_dim] along `ancestry`; `places` [rows] is each row's last place."""
    slots = torch.arange(ancestry.shape[1], device=ancestry.device)
    rows = torch.arange(ancestry.shape[0], device=ancestry.device).unsqueeze(1)
    sources = torch.where(slots < places.unsqueeze(1), ancestry.long(), rows)
    keys, values = (cache[sources, :, slots].transpose(1, 2) for cache in caches)
    return keys, values


decode_attention_reference = partial(decode_attention, backend="reference")


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def caches(*shape: int) -> tuple[Tensor, Tensor]:
        return make(*shape), make(*shape)

    yield registry.SampleInput((make(2, 3, 16), *caches(2, 3, 20, 16), integers(20, 7)), {"scale": 0.25})
    yield registry.SampleInput(
        (make(2, 3, 8), *caches(2, 3, 9, 8), integers(9, 5)), {"starts": integers(3, 0), "bias": make(3, 9)}
    )
    mask = torch.tensor([[True, False, True, True], [False, True, False, True]], device=device)
    yield registry.SampleInput((make(4, 1, 5), *caches(2, 1, 4, 5), integers(4).int()), {"mask": mask})
    yield registry.SampleInput((make(6, 2, 64), *caches(2, 2, 37, 64), integers(37, 0)), {"bias": make(2, 9)})
    yield registry.SampleInput((make(0, 2, 8), *caches(0, 2, 4, 8), integers()))


registry.register(
    registry.Op(
        name="decode_attention",
        raw=("decode_attention", "decode_attention_"),
        function=decode_attention,
        reference=decode_attention_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.CPU, registry.REFERENCE),
    )
)
registry.register(
    registry.Op(
        name=quantized_heads.EIGHT_BIT_ATTENTION,
        raw=("decode_attention", "decode_attention_"),
        function=decode_attention,
        reference=decode_attention_reference,
        sample_inputs=quantized_heads.sample_inputs,
        backends=(
            registry.NativeBackend("cuda", (torch.float16, torch.bfloat16), capability=(8, 0)),
            registry.NativeBackend("cpu", (torch.float32, torch.bfloat16, torch.float16)),
            registry.REFERENCE,
        ),
    )
)
