"""LazyLogits: logits that are computed only if read; their cross-entropy is computed without them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from fuseopt import ops
from fuseopt.ops.library import Observer, without_autocast
from fuseopt.runtime.written_values import Samples


class LinearOutput:
    """A deferred `F.linear`, computed at most once, as part of the autograd graph.

    Args:
        input: [..., features], in the dtype that the product is computed in.
        weight: [classes, features], in any dtype.
        bias: [classes] in any dtype, or None.
        backend: option of `ops.linear_cross_entropy`.
    """

    def __init__(self, input: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> None:
        self.input, self.weight, self.bias, self.backend = input, weight, bias, backend
        self.computed: Tensor | None = None
        self.hooks: OrderedDict[int, Callable] = OrderedDict()
        self._read = tuple(tensor for tensor in (input, weight, bias) if tensor is not None)
        self._versions = self._versions_now()
        self._samples = self._samples_now()

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self._read]

    def _samples_now(self) -> Samples | None:
        """Samples of what the product is computed from; None if the host cannot read the values now."""
        if not all(map(_has_real_values, self._read)):
            return None
        samples = Samples(self._read)
        samples.join()
        return samples

    def _is_unwritten(self) -> bool:
        """Whether nothing has written to input, weight or bias since.

        Compares versions, then samples of the values, which waits for the device. Only versions are compared where
        values cannot be read: under a dispatch mode or a function transform, and while a CUDA graph is captured.
        """
        # While Dynamo traces, version counters are not real, and the graph keeps the order of reads and writes.
        if torch.compiler.is_dynamo_compiling():
            return True
        if self._versions != self._versions_now():
            return False
        before, now = self._samples, self._samples_now()
        return before is None or now is None or before.values() == now.values()

    def tensor(self) -> Tensor:
        """The product, [..., classes].

        Raises:
            RuntimeError: input, weight or bias have been modified in place since, as by an optimizer's step.
        """
        if self.computed is None:
            if not self._is_unwritten():
                raise RuntimeError(
                    "these logits were first read after the head's weight or bias, or the hidden states, had been "
                    "modified in place, so they can no longer be computed; read them before optimizer.step() and "
                    "before writes through weight.data"
                )
            dtype = self.input.dtype
            bias = None if self.bias is None else self.bias.to(dtype)
            with torch.enable_grad(), without_autocast(self.input):
                self.computed = F.linear(self.input, self.weight.to(dtype), bias)
            for hook in self.hooks.values():
                self.computed.register_hook(hook)
        return self.computed

    def cross_entropy(self, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str) -> Tensor:
        """Cross-entropy of the rows [*, classes] against `target` [*], in float32; float64 for float64 input."""
        return ops.linear_cross_entropy(
            self.input.flatten(0, -2),
            self.weight,
            self.bias,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            product_dtype=self.input.dtype,
            backend=self.backend,
        )


def _has_real_values(tensor: Tensor) -> bool:
    """Whether the host can read the tensor's values now.

    False for tensors on the meta device and subclasses with their own dispatch (FakeTensor), under a tracer, transform
    or dispatch mode, and while a CUDA graph is captured, which a wait for the device would break.
    """
    return not (
        torch.compiler.is_dynamo_compiling()
        or tensor.is_meta
        or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or torch._C._are_functorch_transforms_active()
        or not all(isinstance(mode, Observer) for mode in _get_current_dispatch_mode_stack())
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


class LazyLogits:
    """Stands in for the logits [..., classes] of a training step.

    Reading shape, dtype and device computes nothing. `float()`, `contiguous()` and a view as [rows, classes] return
    LazyLogits again. `F.cross_entropy` of these against class indices runs `ops.linear_cross_entropy`. Any other
    operator, method or torch function computes the tensor, once; from then on cross-entropy is torch's own, too. This
    first read waits for a GPU to check that weight, bias and hidden states have not been modified since, as by an
    optimizer's step, and raises if they have.

    It is not a `torch.Tensor` to `isinstance`; `tensor()` returns one, and so does a copy or a pickle.

    Args:
        output: the deferred product.
        dtype: dtype of the logits.
        shape: shape of the logits: that of `output`, or [rows, classes].
    """

    def __init__(self, output: LinearOutput, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.output, self.dtype, self.shape = output, dtype, torch.Size(shape)

    def tensor(self) -> Tensor:
        """The logits, [..., classes].

        Raises:
            RuntimeError: input, weight or bias have been modified in place since, as by an optimizer's step.
        """
        return self.output.tensor().to(self.dtype).view(self.shape)

    @property
    def device(self) -> torch.device:
        return self.output.input.device

    @property
    def requires_grad(self) -> bool:
        return self.output.input.requires_grad or self.output.weight.requires_grad

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def register_hook(self, hook: Callable) -> RemovableHandle:
        """torch.Tensor.register_hook; the hook runs only if the tensor is ever computed."""
        if self.output.computed is not None:
            return self.tensor().register_hook(hook)
        handle = RemovableHandle(self.output.hooks)
        self.output.hooks[handle.id] = hook
        return handle

    def float(self) -> LazyLogits:
        return LazyLogits(self.output, torch.float32, self.shape)

    def view(self, *shape: Any) -> LazyLogits | Tensor:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        rows, classes = self.shape[:-1].numel(), self.shape[-1]
        if len(sizes) == 2 and sizes[0] in (-1, rows) and sizes[1] == classes:
            return LazyLogits(self.output, self.dtype, (rows, classes))
        return self.tensor().view(*shape)

    reshape = view

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> LazyLogits | Tensor:
        if memory_format in (torch.contiguous_format, torch.preserve_format):
            return self
        return self.tensor().contiguous(memory_format=memory_format)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("output", "dtype", "shape"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.tensor().__deepcopy__(memo)

    def __repr__(self) -> str:
        return f"LazyLogits({self.tensor()!r})"

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.tensor, (args, kwargs))
        return func(*args, **kwargs)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """F.cross_entropy computed without the logits; None if these arguments need them."""
    lazy = isinstance(input, LazyLogits) and input.ndim == 2 and input.output.computed is None
    of_classes = isinstance(target, Tensor) and target.dtype == torch.int64 and target.shape == input.shape[:1]
    plain = weight is None and size_average is None and reduce is None
    if not (lazy and of_classes and plain):
        return None
    loss = input.output.cross_entropy(target, ignore_index, label_smoothing, reduction)
    device = input.device.type
    return loss if device != "meta" and torch.is_autocast_enabled(device) else loss.to(input.dtype)


def _on_the_tensor(name: str) -> Callable:
    def method(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.tensor, (args, kwargs))
        return getattr(self.tensor(), name)(*args, **kwargs)

    return method


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs invert
    iadd isub imul itruediv and rand or ror xor rxor eq ne lt le gt ge getitem setitem len iter contains bool float int
    index complex format array dlpack dlpack_device reversed
"""
for _name in _OPERATORS.split():
    if hasattr(Tensor, f"__{_name}__"):
        setattr(LazyLogits, f"__{_name}__", _on_the_tensor(f"__{_name}__"))
