"""`fuseopt.op`: a plain PyTorch function as an op of torch, with kernels of the user's own behind it."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fuseopt.errors import BackendError, OpError
from fuseopt.extend import gradients
from fuseopt.extend.backends import (
    COMPILE,
    KERNELS,
    PLAIN,
    REFERENCE,
    Kernel,
    compiled_on_first_call,
    in_order,
    order_on,
    with_reason,
)
from fuseopt.extend.signature import Signature, as_results, check_name, look_at, tensors_of, without_autocast_for
from fuseopt.extend.torch_op import TorchOp, unshared
from fuseopt.ops import registry
from fuseopt.ops.library import apply, in_forward_mode

FunctionT = TypeVar("FunctionT", bound=Callable)

_OPS: dict[str, Op] = {}
# Ops by a key that no other op ever has, as torch.compile passes strings, but not objects, to a function that it runs.
_BY_KEY: weakref.WeakValueDictionary[str, Op] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_LOCK = threading.RLock()  # held while names are taken or freed


def op(name: str, *, flops: Callable | None = None) -> Callable[[Callable], Op]:
    """Decorator that makes a plain PyTorch function the op `torch.ops.<namespace>.<name>`, and returns it as an `Op`.

    The function is the op's reference: its annotations give the schema, and what it computes gives the fake and the
    gradient. It must not write into its arguments. Registering a name again replaces the op, with a warning.

    Args:
        name: "namespace::name", in a namespace of your own.
        flops: the op's arguments -> floating-point operations of a call, for `bench`; see `Op.flops`.

    Raises:
        OpError: a bad name, one that another package has, or an annotation that is missing or that no op takes.
    """
    if not isinstance(name, str):
        raise OpError("fuseopt.op takes the op's name: write @fuseopt.op('mine::scale') above the function")
    check_name(name)

    def made(function: Callable) -> Op:
        made = Op(name, function)
        if flops is not None:
            made.flops(flops)
        return made

    return made


def unregister(name: str) -> None:
    """Remove an op of the user's own, from `torch.ops` too.

    Raises:
        KeyError: there is none of that name.
    """
    with _LOCK:
        if name not in _OPS:
            raise KeyError(f"no op {name!r}; there are {', '.join(sorted(_OPS)) or 'none'}")
        _OPS.pop(name).close()


def registered() -> dict[str, Op]:
    """The ops of the user's own, by name."""
    return dict(_OPS)


def _named(name: str) -> Op:
    if name not in _OPS:
        raise OpError(f"no op {name!r} in this process; import the file that defines it first")
    return _OPS[name]


class Op:
    """An op of the user's own. Calling it calls the best kernel that can run; its decorators add to it.

    A call takes the function's arguments and `backend`: "auto" or the name of one. Results are new contiguous tensors.
    On a GPU "auto" takes the first that can run of cuda, triton, compile (torch.compile of the function) and reference,
    on a CPU of cpu, triton (in Triton's interpreter) and reference. Inside `torch.func` transforms and forward-mode AD
    the reference runs. Autocast has no say in it: an op computes in its arguments' dtypes.

    Attributes:
        name: "namespace::name".
        function: the reference.
        signature: of a call.
        fake_function: what `fake` was given; None where the fake is the reference's.
    """

    __name__: str

    def __init__(self, name: str, function: Callable) -> None:
        self.signature = Signature.of(name, function)
        self.name, self.function = name, function
        self._key = f"{name}#{next(_numbers)}"
        _BY_KEY[self._key] = self
        self.fake_function: Callable | None = None
        functools.update_wrapper(self, function)
        self._kernels: dict[str, Kernel] = {REFERENCE: Kernel(REFERENCE, function)}
        self._formulas: dict[str | None, Callable] = {}
        self._samples: Callable | None = None
        self._flops: tuple[Callable, Callable | None] | None = None
        self._orders: dict[tuple[str, str], tuple[tuple[Kernel, ...], dict[str, list[str]]]] = {}
        self._is_closed = False
        if name in _OPS:
            warnings.warn(f"fuseopt: {name} is registered again and replaces the one before", stacklevel=3)
        with _LOCK:
            if name in _OPS:
                unregister(name)
            self._torch_op = TorchOp(self)
            try:
                self._torch_op.define("auto")
                self._torch_op.define(REFERENCE)
                self.kernel(COMPILE)(function)
            except OpError:
                self._torch_op.close()
                raise
            _OPS[name] = self

    def kernel(self, backend: str, supports: Callable | None = None) -> Callable[[FunctionT], FunctionT]:
        """Decorator for a function with the op's signature that computes it on `backend`, in place of any it had.

        Args:
            backend: "cuda", "triton", "cpu", or "compile" for a form of the function that torch.compile is to have.
            supports: called with the arguments of a call: True, or False or a reason for the next backend to run it.

        Raises:
            OpError: no such backend.
        """
        if backend not in KERNELS:
            raise OpError(f"{self.name}: a kernel can be given for {', '.join(KERNELS)}, not for {backend!r}")

        def add(function: FunctionT) -> FunctionT:
            run = compiled_on_first_call(function) if backend == COMPILE else function
            self.add_kernel(Kernel(backend, run, supports))
            return function

        return add

    def add_kernel(self, kernel: Kernel) -> None:
        """Put in a kernel, in place of any that its backend had.

        Raises:
            OpError: the op is not registered any more, or the name that the kernel gets in `torch.ops` is taken.
        """
        with _LOCK:
            self._check_open()
            self._torch_op.define(kernel.backend)
            self._kernels[kernel.backend] = kernel
            self._register()

    def supports(self, predicate: Callable, backend: str | None = None) -> Op:
        """Say what the op's kernels take: those of one backend, or all that it has so far. Returns the op.

        Args:
            predicate: called with the arguments of a call: True, or False or a reason for the next backend to run it.

        Raises:
            OpError: the op has no such kernel.
        """
        named = [name for name in self._kernels if name not in PLAIN] if backend is None else [backend]
        for name in named:
            if name not in self._kernels:
                raise OpError(f"{self.name} has no kernel for {name!r}; give that first, by .kernel({name!r})")
            self.add_kernel(self._kernels[name].supporting(predicate))
        return self

    def backward(self, formula: Any) -> Any:
        """Decorator for the gradient: `(inputs, output, grad_output) -> gradients`, one for each tensor, or None.

        `inputs` are all arguments; `output` and `grad_output` are tuples where the op has several results. Written
        `@op.backward("triton")` it is that backend's alone, and the others keep the reference's. The second derivative
        is always the reference's. A formula with a fourth argument `needed` gets a bool for each tensor there, and may
        give None for the gradients that are not.
        """
        if isinstance(formula, str):
            return functools.partial(self._set_formula, formula)
        return self._set_formula(None, formula)

    def _set_formula(self, backend: str | None, formula: FunctionT) -> FunctionT:
        takes_needed = "needed" in inspect.signature(formula).parameters
        self._formulas[backend] = formula if takes_needed else lambda *given: formula(*given[:3])
        return formula

    def fake(self, function: FunctionT) -> FunctionT:
        """Decorator for the op on tensors without data: the function's arguments -> empty results, contiguous."""
        self.fake_function = function
        return function

    def samples(self, function: FunctionT) -> FunctionT:
        """Decorator for a generator `(device, dtype)` of argument tuples, for `check`, `bench` and `verify`."""
        self._samples = function
        return function

    def flops(self, forward: FunctionT, backward: Callable | None = None) -> FunctionT:
        """Decorator for the op's arguments -> floating-point operations of a call, which `bench` shows as GFLOP/s.

        Args:
            backward: the same for the backward.
        """
        self._flops = forward, backward
        return forward

    def operations(self, arguments: Sequence[Any], backward: bool) -> int | None:
        """Floating-point operations of a call, or of its backward; None where `flops` was given nothing for it."""
        function = None if self._flops is None else self._flops[backward]
        return None if function is None else int(function(*arguments))

    def native(
        self,
        *,
        cuda: str | os.PathLike[str] | None = None,
        cpu: str | os.PathLike[str] | None = None,
        kernel: str | None = None,
        grid: Callable | None = None,
        block: int | Sequence[int] = 256,
    ) -> Op:
        """Give kernels as C++ or CUDA source. They are compiled here, once per machine. Returns the op.

        A source is C++ against torch's stable ABI (`torch/csrc/stable`), with a function of the op's name and
        arguments, that checks what it is given. With `kernel`, the CUDA source is a bare `__global__` kernel, called
        with pointers of the tensors, made contiguous, and the numbers, as int and double, in the op's order, then
        pointers of the results, which are allocated, and the number of elements of the first of them, as int.

        Args:
            cuda, cpu: the text of a source, or the path of a file.
            kernel: name of the bare kernel.
            grid: the op's arguments -> blocks of a launch, in up to three dimensions.
            block: threads of a block, in up to three dimensions.

        Raises:
            NativeBuildError: a source does not compile; the message is the compiler's, with file and line. What this
                machine cannot build, as CUDA without a GPU or nvcc, is a reason in `choose` instead.
            OpError: there is no such file or kernel, or no source.
        """
        from fuseopt.extend import native

        native.add(self, cuda=cuda, cpu=cpu, kernel=kernel, grid=grid, block=block)
        return self

    def bench(self, shapes: Sequence[str] = (), dtypes: Sequence[str] = (), **options: Any) -> Any:
        """Time each backend, forward and backward, beside eager, torch.compile and a copy of as many bytes.

        Args:
            shapes: of the samples' first tensor, as "4096x1024"; other tensors follow where they have the same sizes.
                By default the samples' own.
            dtypes: of "bfloat16", "float32" and "float16"; by default the first two.
            options: `device`; `compile`: whether torch.compile takes part, by default on a GPU; `torch_op`: torch's own
                operation of the same kind, called with the op's arguments, to be timed too.

        Returns:
            `fuseopt.bench.harness.records.Results`: `to_markdown()` is a table, `save(path)` writes JSON, and
            `save` and `save_bandwidth` of `fuseopt.bench.harness.plot` draw it. Where the op has its `flops`, GFLOP/s
            and the machine's peaks are in it, for `save_roofline`.

        Raises:
            OpError: there are no samples, or a shape has another number of sizes.
        """
        from fuseopt.extend import benching

        return benching.bench(self, shapes, dtypes, **options)

    def define_native(self, name: str) -> Callable:
        """The function that a library has registered as `name`, in the op's namespace, with the op's schema."""
        self._check_open()
        return self._torch_op.define_native(name)

    def fake_results(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """The op on tensors without data."""
        return as_results(self._torch_op.run_fake(*arguments))

    def __call__(self, /, *args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        arguments = args
        if kwargs or len(args) != len(self.signature.names):
            arguments = self.signature.bind(self.name, args, kwargs)
        if torch.compiler.is_compiling():
            return self._call_traced(backend, arguments)
        first, needs_grad = look_at(arguments)
        if first is None:
            if in_forward_mode() or torch._C._are_functorch_transforms_active():
                return self._reference(arguments)
            return self._seen_by_torch(backend, arguments)
        kernel = self._chosen(backend, first, arguments)
        if needs_grad and (kernel.backend not in PLAIN or self.formula(kernel.backend) is not None):
            if self.signature.has_lists or self.signature.results is None:  # autograd.Function does not look into them
                return self._seen_by_torch(kernel.backend, arguments)
            return apply(gradients.Call, self, kernel, *arguments)
        return self.run(kernel, arguments)

    def choose(self, /, *args: Any, backend: str = "auto", **kwargs: Any) -> registry.Choice:
        """The backend that a call would run on, and why those before it would not.

        Raises:
            BackendError: the backend named cannot run the call; the message says why.
        """
        arguments = self.signature.bind(self.name, args, kwargs)
        device = next((tensor.device.type for tensor in tensors_of(arguments)), "cpu")
        kernels, refused = self._order(backend, device)
        refused = dict(refused)
        for kernel in kernels:
            reason = kernel.refuses(arguments)
            if reason is None:
                return registry.Choice(kernel.backend, refused)
            refused[kernel.backend] = [reason]
        raise BackendError(f"{self.name} cannot run this call by {backend!r}:{with_reason(refused)}")

    def refusal(self, backend: str, arguments: Sequence[Any]) -> str | None:
        """Why a backend does not take a call that names it; None if it does."""
        return self._kernels[backend].refuses(arguments)

    def formula(self, backend: str) -> Callable | None:
        """What was given as the gradient of `backend`; None where it is the reference's."""
        return self._formulas.get(backend) or self._formulas.get(None)

    def sample_arguments(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
        """What the op's samples give, with defaults filled in.

        Raises:
            OpError: no samples were given, or they give none.
        """
        if self._samples is None:
            raise OpError(
                f"{self.name} has no samples to be called with; give a generator of argument tuples:\n"
                f"    @{self.__name__}.samples\n    def _(device, dtype):\n"
                "        yield (torch.randn(8, 768, device=device, dtype=dtype),)"
            )
        number = 0
        for number, sample in enumerate(self._samples(device, dtype), 1):  # noqa: B007
            yield self.signature.bind(self.name, sample if isinstance(sample, tuple) else (sample,), {})
        if number == 0:
            raise OpError(f"{self.name}: its samples yield nothing for {device} and {dtype}")

    def backends_on(self, device: str) -> tuple[list[str], dict[str, list[str]]]:
        """The backends that can run on a type of device, in order, and the reasons of those that cannot."""
        kernels, refused = self._order("auto", device)
        return [kernel.backend for kernel in kernels], refused

    def overload(self, backend: str = "auto") -> Any:
        """The op as `torch.ops` has it, or what that has for one backend."""
        return self._torch_op.overload(backend)

    def run(self, kernel: Kernel, arguments: Sequence[Any]) -> Any:
        """A kernel's results for plain tensors, as they are promised."""
        if torch._C._is_any_autocast_enabled():
            with without_autocast_for(arguments):
                output = self.checked(kernel.function(*arguments), kernel.backend)
        else:
            output = self.checked(kernel.function(*arguments), kernel.backend)
        given = [argument.data_ptr() for argument in arguments if isinstance(argument, Tensor)]
        for result in as_results(output):
            if result._is_view() or result.is_inference() or result.data_ptr() in given:
                return unshared(output, tensors_of(arguments))
        return output

    def eager_function(self, backend: str) -> Callable:
        """What computes the op on a backend without compiling anything."""
        return self.function if backend == COMPILE else self._kernels[backend].function

    def checked(self, output: Any, backend: str) -> Any:
        """The results of a kernel, contiguous.

        Raises:
            OpError: they are not as many tensors as the signature says.
        """
        wanted = self.signature.results
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
        raise OpError(f"{self.name}: its {backend} kernel gave {given}; the signature says {promised}")

    def close(self) -> None:
        """Take the op out of `torch.ops` and of the registry.

        Who holds it may go on calling it: where torch has to see a call, it sees the function.
        """
        self._is_closed = True
        self._torch_op.close()
        registry.unregister(self.name)

    def __repr__(self) -> str:
        return f"<fuseopt op {self.name}{self.signature.schema}; backends: {', '.join(self._kernels)}>"

    def __reduce__(self) -> Any:
        return _named, (self.name,)

    def _chosen(self, backend: str, first: Tensor, arguments: Sequence[Any]) -> Kernel:
        for kernel in self._order(backend, "cuda" if first.is_cuda else "cpu")[0]:
            if kernel.supports is None or kernel.refuses(arguments) is None:
                return kernel
        return self._kernels[self.choose(*arguments, backend=backend).backend]  # raises, with the reasons

    def _call_traced(self, backend: str, arguments: Sequence[Any]) -> Any:
        """A call that Dynamo traces: the function itself where no kernel could run, so that Inductor can fuse it."""
        first = next(tensors_of(arguments), None)
        if _is_inlined(self._key, backend, "cpu" if first is None else first.device.type):
            return self._reference(arguments)
        return self._seen_by_torch(backend, arguments)

    def _seen_by_torch(self, backend: str, arguments: Sequence[Any]) -> Any:
        """A call by `torch.ops`, where another op may have the name of one that is closed."""
        return self._reference(arguments) if self._is_closed else self._torch_op.overload(backend)(*arguments)

    def _reference(self, arguments: Sequence[Any]) -> Any:
        with without_autocast_for(arguments):
            return self.function(*arguments)

    def _check_open(self) -> None:
        if self._is_closed:
            raise OpError(f"this {self.name} is not registered any more; register it, and give the kernel to that op")

    def _order(self, backend: str, device: str) -> tuple[tuple[Kernel, ...], dict[str, list[str]]]:
        """The kernels to ask, in order, and the reasons of those that cannot run on the device at all."""
        found = self._orders.get((backend, device))
        if found is None:
            found = self._orders[backend, device] = order_on(self.name, self._kernels, backend, device)
        return found

    def _register(self) -> None:
        """Put the op as it is now into the registry, where plans and reports look it up."""
        self._orders.clear()
        backends = tuple(kernel.as_backend() for kernel in in_order(self._kernels))
        registry.unregister(self.name)
        registry.register(registry.Op(self.name, self, self.function, self._registry_samples, backends))

    def _registry_samples(
        self, device: torch.device, dtype: torch.dtype, requires_grad: bool
    ) -> Iterator[registry.SampleInput]:
        for arguments in self.sample_arguments(device, dtype):
            for tensor in tensors_of(arguments):
                tensor.requires_grad_(requires_grad and tensor.is_floating_point())
            yield registry.SampleInput(arguments)


def _is_inlined(key: str, backend: str, device: str) -> bool:
    """Whether torch.compile takes the op's function in place of a call."""
    op = _BY_KEY[key]
    first = next((kernel.backend for kernel in op._order(backend, device)[0] if kernel.in_eager is None), None)
    return first in PLAIN and op.formula(first) is None


# What torch.compiler.assume_constant_result sets; calling that would import torch._dynamo.
_is_inlined._dynamo_marked_constant = True  # type: ignore[attr-defined]
