"""Softmax attention with a bias that depends on the distance between key and query, as in T5.

T5: Raffel et al. 2020 (arXiv 1910.10683); the classes are transformers' `T5Attention` and its relatives. The way to do
without the matrix of scores: Dao 2023 (FlashAttention-2, arXiv 2307.08691).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.library import (
    apply,
    broadcasts,
    check_shape,
    compute_dtype,
    define,
    define_node,
    is_differentiated_again,
    needs_autograd,
    reference_vjp,
    without_autocast,
)
from fuseopt.ops.philox import keep_scores

# An additive mask masks a key where it is at most this, the lowest finite float16.
MASKED = -65504.0
# Largest head size of the kernel; for larger ones "auto" takes the reference.
MOST_DIM = 128
_LOWEST = torch.finfo(torch.float32).min
# Most queries and keys in a tile of scores.
MOST_OF_TILE = 128


def reach_of(line: Tensor | None) -> int:
    """The reach of the bias that LINE made `line` from; 0 without a bias."""
    return 0 if line is None else line.shape[1] // 2 - 2 * MOST_OF_TILE


def _line_fake(bias: Tensor, dtype: torch.dtype) -> Tensor:
    heads, length = bias.shape
    return bias.new_empty((heads, length + 4 * MOST_OF_TILE), dtype=dtype)


def _fwd_fake(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, dim = query.shape
    lse = query.new_empty((batch, heads, queries), dtype=compute_dtype(query))
    return query.new_empty((batch, queries, heads, dim)), lse


def _bwd_fake(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, line: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    (batch, heads, queries, dim), keys = query.shape, key.shape[2]
    grads = (query.new_empty((batch, length, heads, dim)) for length in (queries, keys, keys))
    need_bias_grad = arguments[-1]
    shape = (heads, 2 * reach_of(line) + 1) if need_bias_grad and line is not None else (0,)
    return *grads, query.new_empty(shape, dtype=compute_dtype(query))


def _bwd_joined_fake(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, line: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    *others, with_query = arguments
    grad_query, grad_key, _, grad_bias = _bwd_fake(grad_output, query, key, value, line, *others)
    batch, keys, *rest = grad_key.shape
    joined = query.new_empty((batch, keys, 3 if with_query else 2, *rest))
    return query.new_empty(0) if with_query else grad_query, joined, grad_bias


# In a compiled step all layers that share the bias share one line, forward and backward.
LINE = define(
    "relative_attention_line(Tensor bias, ScalarType dtype) -> Tensor",
    _line_fake,
    triton="fuseopt.ops.triton.relative_attention_tiles",
)
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? line, Tensor? mask, Tensor? seed"
_BWD_INPUTS = f"Tensor grad_output, {_INPUTS}, Tensor output, Tensor lse, float scale, float p, bool causal"
FWD = define(
    f"relative_attention_fwd({_INPUTS}, float scale, float p, bool causal) -> (Tensor, Tensor)",
    _fwd_fake,
    triton="fuseopt.ops.triton.relative_attention",
)
BWD = define(
    f"relative_attention_bwd({_BWD_INPUTS}, bool need_bias_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd_fake,
    triton="fuseopt.ops.triton.relative_attention_bwd",
)
# For compiled steps, whose matrix products read both gradients as one matrix.
BWD_JOINED = define(
    f"relative_attention_bwd_joined({_BWD_INPUTS}, bool need_bias_grad, bool with_query) -> (Tensor, Tensor, Tensor)",
    _bwd_joined_fake,
    triton="fuseopt.ops.triton.relative_attention_bwd",
)


def relative_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
    scale: float = 1.0,
    p: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """`relative_attention` in plain PyTorch, with all scores in memory."""
    compute, (queries, keys) = compute_dtype(query), (query.shape[2], key.shape[2])
    with without_autocast(query):
        scores = query.to(compute) @ key.to(compute).mT * scale
    distance = torch.arange(keys, device=query.device) - torch.arange(queries, device=query.device)[:, None]
    if bias is not None:
        reach = bias.shape[1] // 2
        scores = scores + bias.to(compute)[:, distance.clamp(-reach, reach) + reach]
    if mask is not None:
        masked = ~mask if mask.dtype == torch.bool else (mask <= MASKED) & (mask != float("-inf"))
        scores = scores if mask.dtype == torch.bool else scores + mask.to(compute)
        scores = torch.where(masked, _LOWEST, scores)
    if causal:
        scores = scores.masked_fill(distance > keys - queries, float("-inf"))
    # If a query sees no key, softmax would give NaN.
    sees_none = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill(sees_none, 0.0).softmax(-1).masked_fill(sees_none, 0.0)
    if p > 0.0:
        assert seed is not None
        weights = (weights * (1.0 / (1.0 - p))).masked_fill(~keep_scores(seed, weights.shape, p), 0.0)
    with without_autocast(query):
        return (weights @ value.to(compute)).to(query.dtype)


class _RelativeAttention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        backend: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        line = _line(backend, query, bias)
        return *FWD[backend](query, key, value, line, *rest), line

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor | None]) -> None:
        ctx.backend, *tensors, ctx.scale, ctx.p, ctx.causal = inputs
        ctx.mark_non_differentiable(*(tensor for tensor in output[1:] if tensor is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 10
        *tensors, output, lse, line = ctx.saved_tensors
        scalars = ctx.scale, ctx.p, ctx.causal
        mask, seed = tensors[4:]
        if is_differentiated_again():
            rest = dict(zip(("mask", "seed", "scale", "p", "causal"), (mask, seed, *scalars), strict=True))
            reference = partial(relative_attention_reference, **rest)
            gradients = reference_vjp(reference, grad_output.transpose(1, 2), tensors[:4])
        else:
            *gradients, grad_bias = BWD[ctx.backend](
                grad_output, *tensors[:3], line, mask, seed, output, lse, *scalars, ctx.needs_input_grad[4]
            )
            gradients = (*(gradient.transpose(1, 2) for gradient in gradients), grad_bias)
        needed = zip(ctx.needs_input_grad[1:5], gradients, tensors, strict=False)
        of_inputs = (g.to(t.dtype) if need and g is not None else None for need, g, t in needed)
        return None, *of_inputs, *(None,) * 5


NODE = define_node(
    f"relative_attention(str backend, {_INPUTS.replace('line', 'bias')}, float scale, float p, bool causal) "
    "-> (Tensor, Tensor, Tensor?)",
    _RelativeAttention,
)


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
    scale: float = 1.0,
    p: float = 0.0,
    causal: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`dropout(softmax(scale * query @ key.mT + bias[distance] + mask)) @ value`, without a matrix of scores in memory.

    Scores, softmax and sums are in float32, float64 for float64 tensors. Which weights are dropped is a function of
    `seed`, whatever the backend. The backward computes the scores again and draws the same numbers; kept for it are the
    arguments, the result, and one number a query and head.

    Args:
        query: [batch, heads, queries, dim], any strides, as a transposed view of a projection; float32, float16,
            bfloat16 or float64. A kernel takes dim up to 128; more is left to the reference.
        key, value: [batch, heads, keys, dim], in the dtype of `query`.
        bias: [heads, 2 * reach + 1], any floating dtype, reach at least 1: element `j - i + reach` is added to the
            score of query i and key j, and the first or last one beyond the reach. None adds nothing.
        mask: broadcastable to [batch, heads, queries, keys], and read so; bool, True for keys that are seen, or
            additive, where -65504 (the lowest finite float16) and less masks. A query whose keys are all masked takes
            their mean, as transformers' attention does, and passes no gradient to scores. -inf hides a key as if it
            were not there: a query that sees none gives 0, as torch's attention does for a bool mask.
        seed: [1], int64, on the device of `query`, where `p` is not 0; draw one for each call.
        scale: of the products; T5's is 1.
        p: the probability that a weight is dropped, to a 2**16th, less than 1; 0 in eval mode.
        causal: whether the last query sees all keys, and each one before it one less. A query that sees none gives 0.
        backend: "auto", "triton" or "reference"; the last keeps all scores.

    Returns:
        [batch, heads, queries, dim], in the dtype of `query`; contiguous as [batch, queries, heads, dim].

    Raises:
        TypeError: query, key and value of different dtypes.
        ValueError: shapes that do not fit, a mask that requires a gradient, `p` out of range or without `seed`, dim too
            large for the kernel.
        BackendError: the backend named cannot run here; the message says why.
    """
    _check(query, key, value, bias, mask, seed, p)
    dtypes = (query.dtype, None if bias is None else bias.dtype)
    chosen = registry.pick("relative_attention", backend, query.device, dtypes)
    arguments = (query, key, value, bias, mask, seed, scale, p, causal)
    if chosen == "reference" or (backend == "auto" and query.shape[3] > MOST_DIM):
        output = relative_attention_reference(
            query, key, value, bias, mask=mask, seed=seed, scale=scale, p=p, causal=causal
        )
        return output.transpose(1, 2).contiguous().transpose(1, 2)
    if query.shape[3] > MOST_DIM:
        raise ValueError(f"the kernel takes at most {MOST_DIM} elements a head, not {query.shape[3]}")
    if needs_autograd(query, key, value, bias):
        if is_dynamo_compiling():
            return NODE(chosen, *arguments)[0].transpose(1, 2)
        return apply(_RelativeAttention, chosen, *arguments)[0].transpose(1, 2)
    line = _line(chosen, query, bias)
    return FWD[chosen](query, key, value, line, *arguments[4:])[0].transpose(1, 2)


def _line(backend: str, query: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else LINE[backend](bias, compute_dtype(query))


def has_kernel(backend: str, device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether such queries, with a bias, run on a kernel, which stores no scores."""
    dtypes = (dtype, torch.promote_types(dtype, torch.float32))
    return dim <= MOST_DIM and registry.pick("relative_attention", backend, device, dtypes) != "reference"


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    p: float,
) -> None:
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"query and key must have shape [batch, heads, length, dim], not {tuple(query.shape)}, {tuple(key.shape)}"
        )
    (batch, heads, queries, dim), keys = query.shape, key.shape[2]
    check_shape("key", key, torch.Size((batch, heads, keys, dim)))
    check_shape("value", value, key.shape)
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise TypeError(f"query, key and value must have one dtype, not {query.dtype}, {key.dtype}, {value.dtype}")
    if bias is not None and (bias.dim() != 2 or len(bias) != heads or bias.shape[1] < 3 or bias.shape[1] % 2 == 0):
        raise ValueError(f"bias must have shape [{heads}, 2 * reach + 1], reach at least 1, not {tuple(bias.shape)}")
    if mask is not None:
        full = (batch, heads, queries, keys)
        padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if mask.dim() > 4 or not all(map(broadcasts, padded, full)):
            raise ValueError(f"mask must be broadcastable to {full}, not of shape {tuple(mask.shape)}")
        if mask.requires_grad:
            raise ValueError("mask takes no gradient; detach it")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p must be at least 0 and less than 1, not {p}")
    if p > 0.0:
        if seed is None:
            raise ValueError("dropout needs a seed: torch.randint(2**62, (1,), device=query.device)")
        check_shape("seed", seed, torch.Size((1,)))


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(
        batch: int, heads: int, queries: int, keys: int, dim: int, *, reach: int | None = 4, **kwargs: Any
    ) -> registry.SampleInput:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

        shapes = ((batch, heads, length, dim) for length in (queries, keys, keys))
        tensors = *map(draw, *zip(*shapes, strict=True)), draw(heads, 2 * reach + 1) if reach else None
        if kwargs.get("p"):
            kwargs["seed"] = torch.randint(2**62, (1,), device=device)
        return registry.SampleInput(tensors, kwargs)

    def seen(batch: int, keys: int) -> Tensor:
        return torch.arange(keys, device=device) < torch.arange(keys - batch + 1, keys + 1, device=device)[:, None]

    yield make(2, 3, 5, 7, 8, p=0.2, mask=seen(2, 7)[:, None, None, :])
    yield make(1, 2, 20, 20, 16, reach=40, causal=True, scale=0.5)
    yield make(2, 1, 6, 19, 24, mask=torch.randn(2, 1, 6, 19, device=device), causal=True, p=0.1)
    yield make(1, 2, 33, 18, 16, reach=None)
    left = torch.tensor([2, 9], device=device)[:, None]
    hidden = torch.zeros(2, 9, device=device).masked_fill(torch.arange(9, device=device) < left, float("-inf"))
    yield make(2, 1, 9, 9, 8, reach=None, causal=True, p=0.1, mask=hidden[:, None, None, :])
    yield make(0, 2, 3, 4, 8)


def bench_input(
    device: torch.device, dtype: torch.dtype, batch: int, heads: int, length: int, dim: int
) -> registry.SampleInput:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    query, key, value = (
        (dim**-0.25 * draw(batch, length, heads, dim)).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    return registry.SampleInput((query, key, value, draw(heads, 257).requires_grad_()))


def _eager(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """The attention as T5Attention computes it, given the matrix of biases."""
    queries, keys = query.shape[2], key.shape[2]
    distance = torch.arange(keys, device=query.device) - torch.arange(queries, device=query.device)[:, None]
    reach = bias.shape[1] // 2
    scores = torch.matmul(query, key.transpose(2, 3)) + bias[:, distance.clamp(-reach, reach) + reach]
    return torch.matmul(torch.softmax(scores, dim=-1), value)


registry.register(
    registry.Op(
        name="relative_attention",
        function=relative_attention,
        reference=relative_attention_reference,
        sample_inputs=sample_inputs,
        backends=(registry.TRITON, registry.REFERENCE),
        benchmarks=(registry.Benchmark(bench_input, shapes=("16x12x512x64", "8x12x2048x64"), eager=_eager),),
    )
)
