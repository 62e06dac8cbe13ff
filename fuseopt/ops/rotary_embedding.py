"""Rotary position embedding of queries and keys, by the halves of a head (Su et al. 2021, arXiv 2104.09864).

The upstream function is transformers' `apply_rotary_pos_emb` of Llama and its relatives, and of those that rotate the
first part of each head only, as GPT-NeoX. Families whose pairs are neighbours (GPT-J, Cohere, GLM) have another one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.library import (
    apply,
    broadcasts,
    check_shape,
    define,
    is_differentiated_again,
    needs_autograd,
    reference_vjp,
)


def _fwd_fake(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), dtype=torch.promote_types(x.dtype, cos.dtype))
        for x in (query, key)
    )


def _bwd_fake(
    grad_query: Tensor, grad_key: Tensor, cos: Tensor, sin: Tensor, query_dtype: torch.dtype, key_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return (
        grad_query.new_empty(grad_query.shape, dtype=query_dtype),
        grad_key.new_empty(grad_key.shape, dtype=key_dtype),
    )


FWD = define(
    "rotary_embedding_fwd(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    _fwd_fake,
    triton="fuseopt.ops.triton.rotary_embedding",
)
BWD = define(
    "rotary_embedding_bwd(Tensor grad_query, Tensor grad_key, Tensor cos, Tensor sin, ScalarType query_dtype,"
    " ScalarType key_dtype) -> (Tensor, Tensor)",
    _bwd_fake,
    triton="fuseopt.ops.triton.rotary_embedding",
)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _split(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated part of each head, and the rest."""
    rotary = cos.shape[-1]
    return x[..., :rotary], x[..., rotary:]


def _plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both [batch, length, heads, dim], as the raw op returns them."""

    def rotated(x: Tensor) -> Tensor:
        turned, rest = _split(x.transpose(1, 2), cos)
        turned = turned * cos[:, :, None] + _rotate_half(turned) * sin[:, :, None]
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned.contiguous()

    return rotated(query), rotated(key)


def _plain_bwd(grad: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of query or key, [batch, length, heads, dim]; it can be differentiated again."""
    turned, rest = _split(grad, cos)
    turned = (turned * cos[:, :, None]).to(dtype) - _rotate_half((turned * sin[:, :, None]).to(dtype))
    return torch.cat((turned, rest.to(dtype)), dim=-1)


def rotary_embedding_reference(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_embedding` in plain PyTorch: transformers' function, bit for bit."""
    rotated_query, rotated_key = _plain(query, key, cos, sin)
    return rotated_query.transpose(1, 2), rotated_key.transpose(1, 2)


class _RotaryEmbedding(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.backend, query, key, cos, sin = inputs
        ctx.dtypes = query.dtype, key.dtype
        # The gradients of query and key are functions of cos and sin alone.
        ctx.angles_are_learned = any(ctx.needs_input_grad[3:])
        ctx.save_for_backward(cos, sin, *((query, key) if ctx.angles_are_learned else ()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *inputs = ctx.saved_tensors
        if ctx.angles_are_learned:
            gradients = reference_vjp(_plain, grads, (*inputs, cos, sin))
        else:
            if is_differentiated_again():
                of_rows = tuple(
                    _plain_bwd(grad, cos, sin, dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)
                )
            else:
                of_rows = BWD[ctx.backend](*grads, cos, sin, *ctx.dtypes)
            gradients = (*(gradient.transpose(1, 2) for gradient in of_rows), None, None)
        needed = zip(gradients, ctx.needs_input_grad[1:], strict=True)
        return None, *(gradient if is_needed else None for gradient, is_needed in needed)


def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """`x * cos + rotate_half(x) * sin` for x in (query, key), in one pass; `rotate_half` of halves (a, b) is (-b, a).

    The result is that of these operations one after the other, each of which rounds to its own dtype; so is the
    gradient, which is the rotation back. `cos` and `sin` may be any numbers: their halves need not be equal, nor need
    the squares of two add up to one. Autocast has no say in it.

    Args:
        query: [batch, heads, length, dim], any strides, as a transposed view of a projection; float32, float16,
            bfloat16 or float64.
        key: [batch, key_heads, length, dim]; may have fewer heads, and another of these dtypes.
        cos, sin: [batch, length, rotary] or [1, length, rotary], both in one dtype, which may be another; rotary is
            even and at most dim. What a head has beyond is returned as it is. Where one requires a gradient, plain
            PyTorch computes the backward, and query and key are kept for it.
        backend: "auto", "triton" or "reference".

    Returns:
        The shapes of query and key, in the dtypes that these promote to with that of `cos`; contiguous as
        [batch, length, heads, dim], which is how a projection leaves them and wants their gradients.

    Raises:
        TypeError: cos and sin of different dtypes.
        ValueError: shapes that do not fit.
        BackendError: the backend named cannot run here; the message says why.
    """
    _check(query, key, cos, sin)
    chosen = registry.pick("rotary_embedding", backend, query.device, (query.dtype, key.dtype, cos.dtype))
    if chosen == "reference":
        return rotary_embedding_reference(query, key, cos, sin)
    if needs_autograd(query, key, cos, sin):
        rotated_query, rotated_key = apply(_RotaryEmbedding, chosen, query, key, cos, sin)
    else:
        rotated_query, rotated_key = FWD[chosen](query, key, cos, sin)
    return rotated_query.transpose(1, 2), rotated_key.transpose(1, 2)


def _check(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"query and key must have shape [batch, heads, length, dim], not {tuple(query.shape)}, {tuple(key.shape)}"
        )
    batch, _, length, dim = query.shape
    check_shape("key", key, torch.Size((batch, key.shape[1], length, dim)))
    if cos.dim() != 3 or not broadcasts(cos.shape[0], batch) or cos.shape[1] != length:
        raise ValueError(f"cos must have shape [{batch} or 1, {length}, rotary], not {tuple(cos.shape)}")
    if cos.shape[2] % 2 or not 0 < cos.shape[2] <= dim:
        raise ValueError(f"cos must have an even number of elements a token, at most {dim}, not {cos.shape[2]}")
    check_shape("sin", sin, cos.shape)
    if cos.dtype != sin.dtype:
        raise TypeError(f"cos and sin must have one dtype, not {cos.dtype}, {sin.dtype}")


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(
        batch: int,
        heads: int,
        key_heads: int,
        length: int,
        dim: int,
        *,
        rotary: int | None = None,
        shared: bool = False,
        angle_dtype: torch.dtype = dtype,
        learned: bool = False,
    ) -> registry.SampleInput:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

        angles = 3 * torch.randn(2, 1 if shared else batch, length, rotary or dim, device=device, dtype=torch.float64)
        cos, sin = (
            turn.to(angle_dtype).requires_grad_(requires_grad and learned)
            for turn in (angles[0].cos(), angles[1].sin())
        )
        return registry.SampleInput((draw(batch, heads, length, dim), draw(batch, key_heads, length, dim), cos, sin))

    wide = torch.promote_types(dtype, torch.float32)
    yield make(2, 4, 2, 5, 6, angle_dtype=wide)
    yield make(2, 2, 2, 3, 10, rotary=4, shared=True)
    yield make(2, 1, 1, 4, 4, learned=True)
    yield make(2, 2, 1, 0, 8)


def bench_input(
    device: torch.device, dtype: torch.dtype, batch: int, length: int, heads: int, key_heads: int, dim: int
) -> registry.SampleInput:
    query, key = (
        torch.randn(batch, length, n, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in (heads, key_heads)
    )
    angles = torch.rand(1, length, dim, device=device)
    return registry.SampleInput((query, key, angles.cos().to(dtype), angles.sin().to(dtype)))


def _apply_rotary_pos_emb(function: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return function(query, key, cos, sin)


registry.register(
    registry.Op(
        name="rotary_embedding",
        function=rotary_embedding,
        reference=rotary_embedding_reference,
        sample_inputs=sample_inputs,
        backends=(registry.TRITON, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                # Llama 3 8B and Qwen2 0.5B; a decode step.
                shapes=("4x4096x32x8x128", "8x2048x14x2x64", "8x1x32x8x128"),
                eager=registry.Upstream(
                    "transformers.models.llama.modeling_llama.apply_rotary_pos_emb", _apply_rotary_pos_emb
                ),
            ),
        ),
    )
)
