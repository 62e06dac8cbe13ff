"""The rotary embedding of queries and keys and its gradient: each element is read once and written once."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.rows import TL_DTYPES, compute_dtype

# Of a head's first half, and as many of its second: 8 of each a thread, a vector of 16 bytes in half precision.
# TUNED: measurement not recorded (30c2e87); `fuseopt bench ops --op rotary_embedding` measures it again.
PROGRAM_ELEMENTS = 1024
NUM_WARPS = 4


@triton.jit
def rotate_tile(
    input_ptr,  # [batch, heads, length, DIM], by the strides below
    output_ptr,  # [batch, length, heads, DIM], contiguous
    cos_ptr,  # [batch, length, ROTARY], adjacent in the last dimension
    sin_ptr,  # likewise, with the strides of cos
    tile,  # the rows from tile * BLOCK_ROWS on; a row is one head of one token
    rows,
    heads,
    length,
    batch_stride,
    head_stride,
    length_stride,
    dim_stride,
    cos_batch_stride,
    cos_stride,
    BACKWARD: tl.constexpr,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = row // heads, (row % heads).to(tl.int64)
    batch, position = (token // length).to(tl.int64), (token % length).to(tl.int64)
    input_row = input_ptr + (batch * batch_stride + head * head_stride + position * length_stride)[:, None]
    output_row = output_ptr + (row.to(tl.int64) * DIM)[:, None]
    inside = (row < rows)[:, None]

    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, BLOCK_HALF)[None, :]
    mask = inside & (column < HALF)
    angle = (batch * cos_batch_stride + position * cos_stride)[:, None] + column
    x_1 = tl.load(input_row + column.to(tl.int64) * dim_stride, mask=mask).to(COMPUTE)
    x_2 = tl.load(input_row + (column + HALF).to(tl.int64) * dim_stride, mask=mask).to(COMPUTE)
    cos_1 = tl.load(cos_ptr + angle, mask=mask).to(COMPUTE)
    cos_2 = tl.load(cos_ptr + angle + HALF, mask=mask).to(COMPUTE)
    sin_1 = tl.load(sin_ptr + angle, mask=mask).to(COMPUTE)
    sin_2 = tl.load(sin_ptr + angle + HALF, mask=mask).to(COMPUTE)
    # Each product is rounded to the result's dtype before the sum, as torch's operations one after the other do.
    OUTPUT: tl.constexpr = output_ptr.dtype.element_ty
    straight_1 = (x_1 * cos_1).to(OUTPUT).to(COMPUTE)
    straight_2 = (x_2 * cos_2).to(OUTPUT).to(COMPUTE)
    if BACKWARD:
        y_1 = straight_1 + (x_2 * sin_2).to(OUTPUT).to(COMPUTE)
        y_2 = straight_2 - (x_1 * sin_1).to(OUTPUT).to(COMPUTE)
    else:
        y_1 = straight_1 - (x_2 * sin_1).to(OUTPUT).to(COMPUTE)
        y_2 = straight_2 + (x_1 * sin_2).to(OUTPUT).to(COMPUTE)
    tl.store(output_row + column, y_1, mask=mask)
    tl.store(output_row + column + HALF, y_2, mask=mask)

    if ROTARY < DIM:
        rest = ROTARY + tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = inside & (rest < DIM)
        tl.store(output_row + rest, tl.load(input_row + rest.to(tl.int64) * dim_stride, mask=rest_mask), mask=rest_mask)


@triton.jit(do_not_specialize=["tokens", "length"])
def rotary_embedding_kernel(
    query_ptr,  # [batch, heads, length, DIM], by the strides below
    key_ptr,  # [batch, key_heads, length, DIM], likewise
    query_output_ptr,  # [batch, length, heads, DIM], contiguous
    key_output_ptr,  # [batch, length, key_heads, DIM], contiguous
    cos_ptr,  # [batch, length, ROTARY], adjacent in the last dimension
    sin_ptr,  # likewise, with the strides of cos
    tokens,  # batch * length
    length,
    query_heads,
    key_heads,
    query_batch_stride,
    query_head_stride,
    query_length_stride,
    query_dim_stride,
    key_batch_stride,
    key_head_stride,
    key_length_stride,
    key_dim_stride,
    cos_batch_stride,
    cos_stride,
    BACKWARD: tl.constexpr,  # turns back, and the tensors are gradients
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,  # of DIM, what is rotated
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Each program takes BLOCK_ROWS heads, of neighbouring tokens, of the queries or of the keys."""
    tile = tl.program_id(0)
    query_tiles = tl.cdiv(tokens * query_heads, BLOCK_ROWS)
    if tile < query_tiles:
        rotate_tile(
            query_ptr, query_output_ptr, cos_ptr, sin_ptr, tile, tokens * query_heads, query_heads, length,
            query_batch_stride, query_head_stride, query_length_stride, query_dim_stride, cos_batch_stride, cos_stride,
            BACKWARD, COMPUTE, DIM, ROTARY, BLOCK_ROWS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        rotate_tile(
            key_ptr, key_output_ptr, cos_ptr, sin_ptr, tile - query_tiles, tokens * key_heads, key_heads, length,
            key_batch_stride, key_head_stride, key_length_stride, key_dim_stride, cos_batch_stride, cos_stride,
            BACKWARD, COMPUTE, DIM, ROTARY, BLOCK_ROWS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


class Angles(NamedTuple):
    """`cos` and `sin`, with adjacent elements and the same strides, 0 over a batch that shares them."""

    cos: torch.Tensor
    sin: torch.Tensor
    batch_stride: int
    length_stride: int


def as_angles(cos: torch.Tensor, sin: torch.Tensor) -> Angles:
    """[batch or 1, length, rotary], any strides."""
    if cos.stride(2) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return Angles(cos, sin, cos.stride(0) if len(cos) > 1 else 0, cos.stride(1))


def rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_output: torch.Tensor,
    key_output: torch.Tensor,
    *,
    backward: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(query_output, key_output) [batch, length, heads, dim], of query and key [batch, heads, length, dim]."""
    (batch, heads, length, dim), key_heads, rotary = query.shape, key.shape[1], cos.shape[2]
    tokens = batch * length
    if tokens == 0:
        return query_output, key_output
    angles = as_angles(cos, sin)
    block_half = triton.next_power_of_2(rotary // 2)
    block_rows = max(PROGRAM_ELEMENTS // block_half, 1)
    programs = triton.cdiv(tokens * heads, block_rows) + triton.cdiv(tokens * key_heads, block_rows)
    with torch.cuda.device_of(query):
        # Fused multiply-add would leave out the rounding of a product.
        rotary_embedding_kernel[(programs,)](
            query, key, query_output, key_output, angles.cos, angles.sin, tokens, length, heads, key_heads,
            *query.stride(), *key.stride(), angles.batch_stride, angles.length_stride,
            backward, TL_DTYPES[compute_dtype(query, key, cos, query_output, key_output)], dim, rotary,
            block_rows, block_half, triton.next_power_of_2(max(dim - rotary, 1)),
            num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return query_output, key_output


def rotary_embedding_fwd(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x * cos + rotate_half(x) * sin` of queries and keys.

    Args:
        query: [batch, heads, length, dim], any strides; float32, float16, bfloat16 or float64.
        key: [batch, key_heads, length, dim], likewise, in any of these dtypes.
        cos, sin: [batch or 1, length, rotary], any strides, both in one of these dtypes; rotary is even. What a head
            has beyond is copied.

    Returns:
        [batch, length, heads, dim] and [batch, length, key_heads, dim], contiguous, in the dtypes that the tensors
        promote to with `cos`.
    """
    outputs = (
        torch.empty(
            (x.shape[0], x.shape[2], x.shape[1], x.shape[3]),
            dtype=torch.promote_types(x.dtype, cos.dtype),
            device=x.device,
        )
        for x in (query, key)
    )
    return rotated(query, key, cos, sin, *outputs, backward=False)


def rotary_embedding_bwd(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_dtype: torch.dtype,
    key_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of query and key, for those of what the forward returned.

    Args:
        grad_query, grad_key: [batch, length, heads, dim], [batch, length, key_heads, dim], any strides.
        cos, sin: as given to the forward.
        query_dtype, key_dtype: of query and key.

    Returns:
        As the forward: [batch, length, heads, dim] and [batch, length, key_heads, dim], contiguous.
    """
    grads = (
        torch.empty(grad.shape, dtype=dtype, device=grad.device)
        for grad, dtype in ((grad_query, query_dtype), (grad_key, key_dtype))
    )
    return rotated(grad_query.transpose(1, 2), grad_key.transpose(1, 2), cos, sin, *grads, backward=True)
