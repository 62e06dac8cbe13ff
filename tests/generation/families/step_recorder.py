"""Records every op that a decode step calls, with shapes, dtypes, weights by name, and options, without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.generation.engine import attention, layers, prompt_attention, residual_stream
from fuseopt.generation.engine.state import DecodeState, Sizes

# Which kernels there are. "fused": those that take in a neighbour too, which a real GPU has for some sizes only.
PLAIN = ("decode_linear", "decode_attention", "decode_embedding")
KERNELS = {"none": (), "plain": PLAIN, "fused": None}


class Recorded(Tensor):
    """A meta tensor that passes for one of a GPU; `record` collects what is called with any."""

    record: list[str] = []
    names: dict[int, str] = {}
    views: list[Tensor] = []
    is_cuda = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in ("__get__", "is_contiguous"):
            with torch._C.DisableTorchFunctionSubclass():
                cls.record.append(f"{name}({described([*args, *(kwargs or {}).items()])})")
        result = super().__torch_function__(func, types, args, kwargs)
        # A transposed weight keeps its name. It is held, so that no other tensor gets its id.
        if name == "__get__" and isinstance(result, Tensor) and id(args[0]) in cls.names:
            cls.names[id(result)] = f"{cls.names[id(args[0])]}.T"
            cls.views.append(result)
        return result


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        name = Recorded.names.get(id(value)) or Recorded.names.get(id(value._base))
        return f"{name or ''}{list(value.shape)}{str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict):
        value = [f"{name}={described(part)}" for name, part in value.items() if part is not None]
        return ", ".join(value)
    if isinstance(value, (list, tuple)):
        parts = [described(part) for part in value]
        return f"({', '.join(parts)})"
    return str(value)


def on_gpu(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(Recorded)


def _attended(query: Tensor, *_: Any, **__: Any) -> Tensor:
    return on_gpu(len(query), query.shape[1] * query.shape[2], dtype=query.dtype)


def _linear(input: Tensor, weights: Any, *_: Any, gated: bool = False, residual: Any = None, **__: Any) -> Tensor:
    dtype = weights[0].dtype if residual is None else torch.promote_types(weights[0].dtype, residual.dtype)
    return on_gpu(len(input), sum(map(len, weights[:1] if gated else weights)), dtype=dtype)


def _same(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return on_gpu(*input.shape, dtype=input.dtype)


def _like_weight(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    return on_gpu(*input.shape, dtype=weight.dtype)


# What each op returns.
_RESULTS: dict[str, Any] = {
    "decode_linear": _linear,
    "decode_attention": _attended,
    "decode_attention_": _attended,
    "decode_embedding": lambda tokens, weight, *_, **__: on_gpu(len(tokens), weight.shape[1], dtype=weight.dtype),
    "decode_linear_partials": lambda input, weight, *_, **__: on_gpu(2, len(input), len(weight), dtype=torch.float32),
    "decode_linear_of_sum": lambda input, _, weight, *__, **___: (
        on_gpu(len(input), len(weight), dtype=weight.dtype),
        _same(input),
    ),
    "decode_qkv_attention_": lambda input, weight, *_, **__: on_gpu(len(input), len(weight) // 3, dtype=weight.dtype),
    "decode_softmax_linear": lambda *_, residual, **__: _same(residual),
    "prompt_attention_": lambda qkv, *_, **__: on_gpu(*qkv.shape[:2], qkv[0, 0, 0].numel(), dtype=qkv.dtype),
    "rms_norm": _like_weight,
    "layer_norm": lambda input, shape, weight, *_, **__: _like_weight(input, weight),
    "add_layer_norm": lambda a, b, weight, *_, **__: (_like_weight(a, weight), _same(a)),
}


@contextmanager
def recording(model: nn.Module, kernels: str, modules: Iterable[Any]) -> Iterator[list[str]]:
    """The calls inside the context, with the weights of `model` by their names.

    Args:
        kernels: a name in `KERNELS`.
        modules: further modules that ask whether an op has a kernel.
    """
    there = KERNELS[kernels]

    def has_kernel(op: str, like: Tensor) -> bool:
        return there is None or op in there

    def calling(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            # Arguments by the names of no signature, so that a renamed keyword changes nothing here.
            Recorded.record.append(f"{name}({described(list(args))}; {described(options)})")
            with torch._C.DisableTorchFunctionSubclass():
                return _RESULTS[name](*args, **options)

        return call

    Recorded.record, Recorded.views = [], []
    Recorded.names = {id(weight): name for name, weight in model.named_parameters()}
    patches = [mock.patch.object(ops, name, calling(name)) for name in _RESULTS]
    patches.append(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)))
    for module in (attention, layers, prompt_attention, residual_stream, *modules):
        for name in ("has_kernel", "is_fast", "emits_partials", "accepts_partials"):
            if hasattr(module, name) and (module is not layers or name != "is_fast"):
                answer = has_kernel if name == "has_kernel" else lambda *_, **__: there is None
                patches.append(mock.patch.object(module, name, answer))
    with torch.no_grad():
        for patch in patches:
            patch.start()
        try:
            yield Recorded.record
        finally:
            for patch in patches:
                patch.stop()


def state_of(step: Any, rows: int, beams: int = 1, encodes: bool = False) -> DecodeState:
    return step.new_state(Sizes(rows, 128, 128 if encodes else 0, beams, beams))


def as_recorded(model: nn.Module) -> nn.Module:
    """`model`, on the meta device, with parameters that are recorded."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                new = made.get(id(parameter))
                if new is None:
                    new = made[id(parameter)] = on_gpu(*parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = new
    return model.eval()
