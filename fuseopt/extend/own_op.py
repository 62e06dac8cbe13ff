"""`fuseopt.op`: a plain PyTorch function as an op of torch, with kernels of the user's own behind it."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.compiler import is_dynamo_compiling

from fuseopt.errors import OpError, user_stack_level
from fuseopt.extend import inlined_ops
from fuseopt.extend.backends import COMPILE, KERNELS, PLAIN, REFERENCE, Kernel, compiled_on_first_call, in_order, noting
from fuseopt.extend.eager_calls import EagerCalls
from fuseopt.extend.inputs import registry_samples
from fuseopt.extend.signature import (
    Signature,
    as_results,
    check_name,
    check_takes,
    takes_argument,
    tensors_of,
    without_autocast_for,
)
from fuseopt.extend.torch_op import TorchOp, unshared_views
from fuseopt.ops import registry

FunctionT = TypeVar("FunctionT", bound=Callable)

_OPS: dict[str, Op] = {}
_LOCK = threading.RLock()  # held while names are taken or freed


def op(name: str, *, flops: Callable | None = None) -> Callable[[Callable], Op]:
    """Decorator that makes a plain PyTorch function the op `torch.ops.<namespace>.<name>`, and returns it as an `Op`.

    The function is the op's reference: its annotations give the schema, and what it computes gives the fake and the
    gradient. It must not write into its arguments or draw random numbers. Registering a name again replaces the op,
    with a warning.

    Args:
        name: "namespace::name", in a namespace of your own.
        flops: the op's arguments -> floating-point operations of a call, for `bench`; see `Op.flops`.

    Raises:
        OpError: a bad name, one that another package has, or an annotation that is missing or that no op takes.
    """
    if not isinstance(name, str):
        raise OpError("fuseopt.op takes the op's name: write @fuseopt.op('mine::scale') above the function")
    check_name(name)
    return lambda function: Op(name, function, flops)


def unregister_op(name: str) -> None:
    """Remove an op of the user's own, from `torch.ops` too; KeyError if there is none of that name."""
    with _LOCK:
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

    __slots__ = ("__dict__", "__weakref__", "calls")  # a slot, so that csrc/python can read `calls` by its offset
    __name__: str

    def __init__(self, name: str, function: Callable, flops: Callable | None = None) -> None:
        self.signature = Signature.of(name, function)
        self.name, self.function = name, function
        self._count, self._numbers = len(self.signature.names), self.signature.numbers
        self._key = inlined_ops.add(self)
        self.fake_function: Callable | None = None
        functools.update_wrapper(self, function)
        self._kernels: dict[str, Kernel] = {REFERENCE: Kernel(REFERENCE, function, name=f"function of {name}")}
        self._formulas: dict[str | None, Callable] = {}
        self._samples: Callable | None = None
        self._flops: tuple[Callable | None, Callable | None] = (None, None)
        if flops is not None:
            self.flops(flops)
        self.calls = EagerCalls(self, {})
        self._is_closed = False
        with _LOCK:
            if name in _OPS:
                message = f"fuseopt: {name} is registered again and replaces the one before"
                warnings.warn(message, stacklevel=user_stack_level())
                unregister_op(name)
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
            check_takes(self.name, f"{backend} kernel", function, *self.signature.names)
            run = compiled_on_first_call(function) if backend == COMPILE else function
            self.add_kernel(Kernel(backend, run, supports))
            return function

        return add

    def add_kernel(self, kernel: Kernel) -> None:
        """Put in a kernel, in place of any that its backend had.

        Raises:
            OpError: the op is not registered any more, or the name that the kernel gets in `torch.ops` is taken.
        """
        if kernel.supports is not None:
            check_takes(self.name, "`supports`", kernel.supports, *self.signature.names)
        with _LOCK:
            self._check_open()
            self._torch_op.define(kernel.backend)
            self._kernels[kernel.backend] = dataclasses.replace(kernel, name=f"{kernel.backend} kernel of {self.name}")
            self._register()

    def supports(self, predicate: Callable, backend: str | None = None) -> Op:
        """Say what the op's kernels take: those of one backend, or all that it has so far. Returns the op.

        Args:
            predicate: called with the arguments of a call: True, or False or a reason for the next backend to run it.

        Raises:
            OpError: the op has no such kernel.
        """
        check_takes(self.name, "`supports`", predicate, *self.signature.names)
        named = [name for name in self._kernels if name not in PLAIN] if backend is None else [backend]
        if not named:
            raise OpError(f"{self.name} has no kernel yet; give one first, by .kernel(...) or .native(...)")
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
            if formula not in (*KERNELS, REFERENCE):
                raise OpError(f"{self.name} has no backend {formula!r} that a backward could be for")
            return functools.partial(self._set_formula, formula)
        return self._set_formula(None, formula)

    def _set_formula(self, backend: str | None, formula: FunctionT) -> FunctionT:
        takes_needed = takes_argument(formula, "needed")
        check_takes(self.name, "backward", formula, "inputs", "output", "grad_output", *["needed"] * takes_needed)
        self._formulas[backend] = formula if takes_needed else lambda *given: formula(*given[:3])
        self._renew_calls()
        return formula

    def fake(self, function: FunctionT) -> FunctionT:
        """Decorator for the op on tensors without data: the function's arguments -> empty results, contiguous."""
        check_takes(self.name, "fake", function, *self.signature.names)
        self.fake_function = function
        self._renew_calls()
        return function

    def samples(self, function: FunctionT) -> FunctionT:
        """Decorator for a generator `(device, dtype)` of argument tuples, for `check`, `bench` and `verify`."""
        check_takes(self.name, "samples", function, "device", "dtype")
        self._samples = function
        return function

    def flops(self, forward: FunctionT, backward: Callable | None = None) -> FunctionT:
        """Decorator for the op's arguments -> floating-point operations of a call, which `bench` shows as GFLOP/s.

        Args:
            backward: the same for the backward.
        """
        for each in filter(None, (forward, backward)):
            check_takes(self.name, "flops", each, *self.signature.names)
        self._flops = forward, backward
        return forward

    def operations(self, arguments: Sequence[Any], backward: bool) -> int | None:
        """Floating-point operations of a call, or of its backward; None where `flops` was given nothing for it."""
        return None if (function := self._flops[backward]) is None else int(function(*arguments))

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
        arguments that checks them. With `kernel`, the CUDA source is a bare `__global__` kernel, called with pointers
        of the tensors, made contiguous, and the numbers, as int and double, in the op's order, then pointers of the
        results, and the number of elements of the first, as int. NVRTC compiles it, or nvcc what that refuses.

        Args:
            cuda, cpu: the text of a source, or the path of a file.
            kernel: name of the bare kernel.
            grid: the op's arguments -> blocks of a launch, in up to three dimensions.
            block: threads of a block, in up to three dimensions.

        Raises:
            NativeBuildError: a source does not compile; the message has the first error, with file and line. What this
                machine cannot build, as CUDA without a GPU or nvcc, is a reason in `choose` instead.
            OpError: there is no such file or kernel, or no source.
        """
        from fuseopt.extend import native

        native.add(self, cuda=cuda, cpu=cpu, kernel=kernel, grid=grid, block=block)
        return self

    def bench(
        self, shapes: str | Sequence[str | Sequence[int]] = (), dtypes: Sequence[str] = (), **options: Any
    ) -> Any:
        """Time each backend, forward and backward, beside eager, torch.compile and a copy of as many bytes.

        "auto" then takes the backend that was the fastest by 5% or more, until a source of the op changes: for calls
        whose first tensor has this dtype and a size between the same powers of two; by forward and backward together
        where a gradient is needed. FUSEOPT_MEASURED=0 keeps and reads no times.

        Args:
            shapes: of the samples' first tensor, as "4096x1024" or (4096, 1024); other tensors follow where they have
                the same sizes. By default the samples' own.
            dtypes: of "bfloat16", "float32" and "float16"; by default the first two.
            options: `device`; `compile`: whether torch.compile takes part, by default on a GPU; `torch_op`: torch's own
                operation of the same kind, called with the op's arguments, to be timed too; `remember`: False not to
                keep the times for "auto".

        Returns:
            `fuseopt.bench.harness.records.Results`: `print` shows its table, `save(path)` writes JSON, `plot(path,
            "times" | "bandwidth")` draws it, and "roofline" too for an op with `flops`.

        Raises:
            OpError: there are no samples, or a shape has another number of sizes.
        """
        from fuseopt.extend import benching

        return benching.bench(self, shapes, dtypes, **options)

    def define_native(self, name: str) -> OpOverload:
        """What a library has registered as `name`, in the op's namespace, with the op's schema."""
        self._check_open()
        return self._torch_op.define_native(name)

    def fake_results(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """The op on tensors without data."""
        return as_results(self._torch_op.run_fake(*arguments))

    def __call__(self, /, *args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        # Eager calls that csrc/python runs do not come here: its `call_ops` sets the class's slot.
        if kwargs or len(args) != self._count:
            args = self.signature.bind(self.name, args, kwargs)
        if is_dynamo_compiling():
            return self._call_traced(backend, args)
        for place, types in self._numbers:
            if args[place].__class__ not in types:
                self.signature.check_numbers(self.name, args)
        return self._call_traced(backend, args) if torch.compiler.is_compiling() else self.calls.call(backend, args)

    @staticmethod
    def called_by(library: Any) -> None:
        """Lets `library` (csrc/python) run eager calls of all ops, except those of subclasses."""
        library.call_ops(Op, EagerCalls)

    def choose(self, /, *args: Any, backend: str = "auto", **kwargs: Any) -> registry.Choice:
        """The backend that a call would run on, and why those before it would not.

        Raises:
            BackendError: the backend named cannot run the call; the message says why.
        """
        return self.calls.choose(backend, self.signature.bind(self.name, args, kwargs))

    def formula(self, backend: str) -> Callable | None:
        """What was given as the gradient of `backend`; None where it is the reference's."""
        return self._formulas.get(backend) or self._formulas.get(None)

    def sample_arguments(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
        """What the op's samples give, with defaults filled in.

        Raises:
            OpError: no samples were given, or they give none.
        """
        if self._samples is None:
            hint = self.signature.samples_hint(self.__name__)
            raise OpError(f"{self.name} has no samples to be called with; give a generator of argument tuples:\n{hint}")
        sample = None
        with noting(f"the samples of {self.name}"):
            for sample in self._samples(device, dtype):
                yield self.signature.bind(self.name, sample if isinstance(sample, tuple) else (sample,), {})
        if sample is None:
            raise OpError(f"{self.name}: its samples yield nothing for {device} and {dtype}")

    def backends_on(self, device: str) -> tuple[list[str], dict[str, list[str]]]:
        """The backends that can run on a type of device, in order, and the reasons of those that cannot."""
        kernels, refused = self.calls.order("auto", device)
        return list(dict.fromkeys(kernel.backend for kernel in kernels)), refused

    def overload(self, backend: str = "auto") -> Any:
        """The op as `torch.ops` has it, or what that has for one backend."""
        return self._torch_op.overload(backend)

    def eager_kernel(self, kernel: Kernel) -> Kernel:
        """The kernel, or the function itself in place of what would compile it."""
        return self._kernels[REFERENCE] if kernel.backend == COMPILE else kernel

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

    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: Any) -> Op:
        # By name it would be another op, or none, after the name was registered again or unregistered.
        return self

    def _call_traced(self, backend: str, arguments: Sequence[Any]) -> Any:
        """A call that Dynamo traces: the function itself where no kernel could run, so that Inductor can fuse it."""
        first = next(tensors_of(arguments), None)
        if inlined_ops.is_inlined(self._key, backend, "cpu" if first is None else first.device.type):
            return self.reference(arguments)
        return self.seen_by_torch(backend, arguments)

    def seen_by_torch(self, backend: str, arguments: Sequence[Any]) -> Any:
        """A call by `torch.ops`, where another op may have the name of one that is closed."""
        return self.reference(arguments) if self._is_closed else self._torch_op.overload(backend)(*arguments)

    def reference(self, arguments: Sequence[Any]) -> Any:
        """What the function gives, in the dtypes of its arguments, as new contiguous tensors."""
        with without_autocast_for(arguments):
            output = self.function(*arguments)
        return unshared_views(output, tensors_of(arguments))

    def _check_open(self) -> None:
        if self._is_closed:
            raise OpError(f"this {self.name} is not registered any more; register it, and give the kernel to that op")

    def _renew_calls(self) -> None:
        self.calls = EagerCalls(self, dict(self._kernels))

    def _register(self) -> None:
        """Put the op as it is now into the registry, where plans and reports look it up."""
        self._renew_calls()
        backends = tuple(kernel.as_backend() for kernel in in_order(self._kernels))
        registry.unregister(self.name)
        samples = functools.partial(registry_samples, self.sample_arguments)
        registry.register(registry.Op(self.name, self, self.function, samples, backends))
