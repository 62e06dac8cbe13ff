"""Eager calls of a user's op: which kernel runs, and results as the op promises them.

If nothing observes a call, `call_op` of csrc/python binds arguments, chooses and runs a kernel, and makes the autograd
node, all in C++. `Op.__call__` and `EagerCalls.call` do the same in Python: where that library is not built, under
autocast, and for calls that torch has to see.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuseopt.build import loader
from fuseopt.errors import BackendError, OpError
from fuseopt.extend import gradients, measured
from fuseopt.extend.backends import PLAIN, Kernel, order_on, with_reason
from fuseopt.extend.measured import Key, Measured, Preferred
from fuseopt.extend.signature import look_at, tensors_of, without_autocast_for
from fuseopt.extend.torch_op import unshared
from fuseopt.ops import registry
from fuseopt.ops.library import in_forward_mode

if TYPE_CHECKING:
    from fuseopt.extend.own_op import Op

_DEVICES = ("cpu", "cuda")  # in the order of `EagerCalls._listed`


class EagerCalls:
    """Calls of an op's current kernels; a change of its kernels or formulas makes a new instance.

    Attributes:
        op: the op.
        direct: data that `call_op` of csrc/python reads, such as the kernels to ask; None until the library is loaded.
    """

    __slots__ = ("__dict__", "direct")  # a slot, so that csrc/python can read `direct` by its offset

    def __init__(self, op: Op, kernels: Mapping[str, Kernel]) -> None:
        self.op, self._kernels = op, kernels
        self._orders: dict[tuple[str, str], tuple[tuple[Kernel, ...], dict[str, list[str]]]] = {}
        self._measured: dict[str, Measured | None] = {}
        self._direct: dict[Kernel, tuple[Any, ...]] = {}
        self._listed: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self.direct: tuple[Any, ...] | None = None

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the op's sources: another one where a result, a fake or a gradient may be another."""
        return hashlib.sha256("\0".join(measured.sources_of_op(self.op, self._kernels)).encode()).hexdigest()[:16]

    def order(self, backend: str, device: str) -> tuple[tuple[Kernel, ...], dict[str, list[str]]]:
        """The kernels to ask, in order, and the reasons of those that cannot run on the type of device at all.

        Raises:
            BackendError: the op has no such backend.
        """
        found = self._orders.get((backend, device))
        if found is None:
            kernels, refused = order_on(self.op.name, self._kernels, backend, device)
            known = self.measured(device) if backend == "auto" else None
            found = self._orders[backend, device] = (known.ordered(kernels) if known else kernels, refused)
            loader.load_all(["python"], build=False)
        return found

    def choose(self, backend: str, arguments: Sequence[Any]) -> registry.Choice:
        """See `Op.choose`."""
        device = next((tensor.device.type for tensor in tensors_of(arguments)), "cpu")
        kernels, refused = self.order(backend, device)
        refused = dict(refused)
        for kernel in kernels:
            reason = kernel.refuses(arguments)
            if reason is None:
                known = self.measured(device)
                return registry.Choice(kernel.backend, refused, known.text(arguments) if known else "")
            if not isinstance(kernel.in_eager, Preferred):
                refused[kernel.backend] = [reason]
        raise BackendError(f"{self.op.name} cannot run this call by {backend!r}:{with_reason(refused)}")

    def refusal(self, backend: str, arguments: Sequence[Any]) -> str | None:
        """Why a backend does not take a call that names it; None if it does."""
        return self._kernels[backend].refuses(arguments)

    def measured(self, device: str) -> Measured | None:
        """What `bench` measured of the kernels on the type of device; None if nothing."""
        if device not in self._measured:
            self._measured[device] = measured.load(self.op, self._kernels, device)
        return self._measured[device]

    def remember(self, device: str, times: Mapping[Key, Mapping[str, float]]) -> EagerCalls:
        """Keep what was measured of the kernels, in microseconds; the calls that heed it.

        Raises:
            library_cache.CacheError, OSError: the cache folder must not be used, or cannot be written.
        """
        measured.save(self.op, self._kernels, device, times)
        return EagerCalls(self.op, self._kernels)

    def chosen(self, backend: str, device: str, arguments: Sequence[Any], *, without: str | None = None) -> Kernel:
        """The kernel that a call runs on.

        Args:
            without: a backend that is not asked.

        Raises:
            BackendError: none takes it; the message says why.
        """
        for kernel in self.order(backend, device)[0]:
            if kernel.backend != without and (kernel.supports is None or kernel.refuses(arguments) is None):
                return kernel
        return self._kernels[self.choose(backend, arguments).backend]  # raises, with the reasons

    def call(self, backend: str, arguments: tuple[Any, ...]) -> Any:
        """A call that was not run directly."""
        op = self.op
        first, needs_grad = look_at(arguments)
        if first is None:
            if in_forward_mode() or torch._C._are_functorch_transforms_active():
                return op.reference(arguments)
            return op.seen_by_torch(backend, arguments)
        device = "cuda" if first.is_cuda else "cpu"
        kernel = self.chosen(backend, device, arguments)
        self._list(backend, device)
        gradient = self._gradient(kernel) if needs_grad else None
        return self.run(kernel, arguments) if gradient is None else gradient(*arguments)

    def run(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        """A kernel's results for plain tensors, as they are promised."""
        if torch._C._is_any_autocast_enabled():
            with without_autocast_for(arguments):
                return self._run(kernel, arguments)
        return self._run(kernel, arguments)

    def _run(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        library = loader.python_library()
        if library is not None:
            return library.run_own(self, self._described(kernel, library), arguments)
        return self.finished(kernel, kernel.compute(arguments), arguments)

    def finished(self, kernel: Kernel, output: Any, arguments: Sequence[Any]) -> Any:
        """What a kernel gave, as it is promised: contiguous, and in memory of its own."""
        return unshared(self.checked(output, kernel.backend), tensors_of(arguments))

    def checked(self, output: Any, backend: str) -> Any:
        """The results of a kernel, contiguous.

        Raises:
            OpError: they are not as many tensors as the signature says.
        """
        wanted = self.op.signature.results
        if isinstance(output, Tensor):
            if wanted == 1:
                return output if output.is_contiguous() else output.contiguous()
        elif (
            isinstance(output, (tuple, list))
            and wanted in (None, len(output))
            and wanted != 1
            and all(isinstance(item, Tensor) for item in output)
        ):
            results = [item.contiguous() for item in output]
            return results if wanted is None else tuple(results)
        given = f"{len(output)} results" if isinstance(output, (tuple, list)) else f"a {type(output).__name__}"
        promised = "a list of tensors" if wanted is None else f"{wanted} tensor{'s' if wanted > 1 else ''}"
        raise OpError(f"{self.op.name}: its {backend} kernel gave {given}; the signature says {promised}")

    def _gradient(self, kernel: Kernel) -> Callable | None:
        """What calls the kernel with a node of autograd; None where autograd sees through its function."""
        op, backend = self.op, kernel.backend
        if backend in PLAIN and op.formula(backend) is None:
            return None
        if self._is_flat:
            return functools.partial(gradients.differentiable_call, self, kernel)
        return lambda *arguments: op.seen_by_torch(backend, arguments)

    @property
    def _is_flat(self) -> bool:
        """Whether neither arguments nor results have lists of tensors, into which no node of autograd looks."""
        return not self.op.signature.has_lists and self.op.signature.results is not None

    def _list(self, backend: str, device: str) -> None:
        """Let further calls of a backend run directly, if the library for that is loaded."""
        library = loader.python_library()
        listed = self._listed[_DEVICES.index(device)]
        if library is None or backend in listed:
            return
        listed[backend] = tuple(self._described(kernel, library) for kernel in self.order(backend, device)[0])
        signature = self.op.signature
        self.direct = self, signature.names, dict(signature.defaults), signature.numbers, *self._listed
        self.op.called_by(library)

    def _described(self, kernel: Kernel, library: Any) -> tuple[Any, ...]:
        """A kernel as csrc/python/own_ops.h describes it."""
        found = self._direct.get(kernel)
        if found is None:
            direct = None
            if kernel.launches is not None:
                direct = kernel.launches(library)
            elif kernel.raw is not None:
                direct = library.DirectCalls(kernel.function)
                try:
                    direct.settle("", kernel.backend, kernel.raw._schema.name, kernel.raw._schema.overload_name)
                except RuntimeError:  # a schema with other types than DirectCalls reads
                    direct = None
            gradient: Any = self._gradient(kernel)
            if gradient is not None and self._is_flat:
                differentiated = functools.partial(gradients.gradients, self.op, kernel.backend)
                reads_results = self.op.formula(kernel.backend) is not None
                gradient = differentiated, reads_results, functools.partial(gradients.as_python_node, self.op, kernel)
            results = self.op.signature.results or 0
            found = (kernel, kernel.function, direct, kernel.supports, results, gradient, kernel.name)
            self._direct[kernel] = found
        return found
