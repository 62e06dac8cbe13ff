"""Calls of the raw ops that have kernels, kept as the public functions make them of their samples."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fuseopt import ops
from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.decode.head_rotation import HeadRotation
from fuseopt.ops.decode.low_rank import exchange_size
from fuseopt.ops.dequantize_packed import dequantize_packed
from tests.ops.cases import results, tensors

CALLS_OF_AN_OP = 3


class Target(NamedTuple):
    device: str
    backend: str


TARGETS = {
    "cpu": Target("cpu", "cpu"),
    "interpreted": Target("cpu", "triton"),
    "cuda": Target("cuda", "cuda"),
    "triton": Target("cuda", "triton"),
}


class Call(NamedTuple):
    op: OpOverload
    arguments: tuple[Any, ...]

    def tensor_places(self) -> Iterator[tuple[str, int, Tensor]]:
        """Each tensor, with the name of its argument and its place among the leaves of all arguments."""
        place = 0
        for declared, argument in zip(self.op._schema.arguments, self.arguments, strict=False):
            for leaf in tree_flatten(argument)[0]:
                if isinstance(leaf, Tensor):
                    yield declared.name, place, leaf
                place += 1

    def replaced(self, place: int, tensor: Tensor) -> "Call":
        leaves, structure = tree_flatten(self.arguments)
        leaves[place] = tensor
        return self._replace(arguments=tree_unflatten(leaves, structure))

    def run(self) -> list[Tensor]:
        """What the op returns, and what it has written to, of copies laid out like its arguments."""
        arguments = tree_map_only(Tensor, laid_out_alike, self.arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # an op may overlap with what has just written its arguments
        output = self.op(*arguments)
        written = [
            tensor
            for declared, argument in zip(self.op._schema.arguments, arguments, strict=False)
            if declared.is_write
            for tensor in tree_flatten(argument)[0]
            if tensor is not None
        ]
        returned = [] if output is None or isinstance(output, bool) else results(output)
        return [tensor.detach() for tensor in (*returned, *written)]


def laid_out_alike(tensor: Tensor, offset: int = -1) -> Tensor:
    """A copy with the tensor's strides, `offset` elements into its memory; by default as well aligned as the tensor."""
    if tensor.device.type == "meta":
        return tensor
    if offset < 0:
        offset = tensor.data_ptr() % 16 // tensor.itemsize
    unique = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    size = 1 + sum((size - 1) * stride for size, stride in zip(unique.shape, unique.stride(), strict=True))
    copy = tensor.new_empty(size + offset).as_strided(unique.shape, unique.stride(), offset)
    return copy.copy_(unique).expand(tensor.shape)


class Recorder(TorchDispatchMode):
    """Keeps copies of the arguments of the first few calls of each raw op."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[OpOverload, list[Call]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fuseopt" and not kwargs:
            calls = self.calls.setdefault(func, [])
            if len(calls) < CALLS_OF_AN_OP:
                calls.append(Call(func, tree_map_only(Tensor, laid_out_alike, args)))
        return func(*args, **(kwargs or {}))


@functools.cache
def recorded(target: Target) -> dict[str, list[Call]]:
    """Calls of each raw op that has a kernel, by its name, as the public functions make them of their samples."""
    recorder = Recorder()
    for op in map(registry.get, registry.names()):
        if any(backend.name == target.backend for backend in op.backends):
            record(recorder, op, target)
    with recorder:
        for call in further_calls(target, recorder.calls):
            call()
    is_triton = target.backend == "triton"
    # Each call of Triton's takes seconds to interpret or to compile.
    return {
        op._schema.name: calls[: 1 if is_triton else None]
        for op, calls in recorder.calls.items()
        if (op._overloadname == "triton") == is_triton
    }


def record(recorder: Recorder, op: registry.Op, target: Target) -> None:
    # On a GPU most kernels are for half precision.
    dtype = torch.bfloat16 if target.device == "cuda" else torch.float32
    for requires_grad in (False, True):
        torch.manual_seed(0)
        for sample in op.sample_inputs(torch.device(target.device), dtype, requires_grad):
            if any(tensor.numel() == 0 for tensor in tensors(sample)):
                continue
            with recorder, contextlib.suppress(BackendError):  # of sizes that its kernels do not take
                output = op.function(*sample.args, **sample.kwargs, backend=target.backend)
                differentiable = [t for t in ([] if output is None else results(output)) if t.requires_grad]
                if differentiable:
                    torch.autograd.backward(differentiable, [torch.randn_like(t) for t in differentiable])


def further_calls(target: Target, calls: dict[OpOverload, list[Call]]) -> Iterator[Callable[[], Any]]:
    """Of the raw ops that no public function calls with its samples."""
    raw, device = torch.ops.fuseopt, target.device
    if target.backend == "triton":
        (_, arguments), *_ = calls[raw.relative_attention_bwd.triton]
        yield lambda: raw.relative_attention_bwd_joined.triton(*arguments, False)
        return
    ids, scores = torch.randint(0, 8, (2, 5), device=device), torch.randn(2, 8, device=device)
    yield lambda: raw.process_logits_(ids, scores, 2)
    query, key, value = torch.randn(3, 2, 3, 8, device=device).unbind()
    cache, bias = torch.randn(2, 2, 3, 9, 8, device=device), torch.randn(3, 4, device=device)
    position, kept = torch.tensor([5], device=device), torch.ones(2, 9, dtype=torch.bool, device=device)
    ancestry = torch.zeros(2, 9, dtype=torch.int32, device=device)
    rotation = HeadRotation(torch.zeros(4, 8, device=device), torch.zeros_like(ids[:, 0]), q_norm=bias.new_ones(8))
    yield lambda: raw.decode_attention_(
        query, key, value, *cache, None, None, position, None, kept, bias, ancestry, 1.0, *rotation, 0, 0.0, False
    )
    halves, without_norm = torch.randn(3, 2, 3, 16, device=device).bfloat16(), rotation._replace(q_norm=None)
    elements, scales = ops.quantize_heads(torch.randn(2, 2, 3, 9, 16, device=device), torch.int8)
    yield lambda: raw.decode_attention_(
        *halves, *elements, *scales, position, None, kept, bias, ancestry, 1.0, *without_norm, 0, 0.0, False
    )
    if target.backend == "cuda":
        low_rank = [torch.randn(s, device=device).bfloat16() for s in ((2, 64), (40, 64), (8, 64), (40, 8))]
        exchange = torch.zeros(exchange_size(low_rank[2]), dtype=torch.int64, device=device)
        exchange[0] = 1  # a ticket
        yield lambda: ops.decode_linear_low_rank(*low_rank, exchange=exchange, backend="cuda")
        packed = ops.pack_for_cuda(ops.quantize(torch.randn(40, 64, device=device), bits=4, group=32), torch.bfloat16)
        yield lambda: dequantize_packed(packed)
        yield lambda: raw.takes_short_attention(torch.randn(1, 2, 3, 8, device=device, dtype=torch.float64))
        left, right, shift = (torch.randn(s, device=device).bfloat16() for s in ((16, 32), (32, 24), (24,)))
        yield lambda: raw.tuned_matmul_gelu(left, right, shift, False)
        yield lambda: raw.tuned_matmul_(torch.randn(16, 24, device=device), left, right, True, False)
