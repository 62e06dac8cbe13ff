"""What every op file shares: defining raw ops under `torch.ops.fuseopt`, and the rules for when autograd takes part."""

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

LIBRARY = torch.library.Library("fuseopt", "DEF")

# What implements an op's overload `.triton`, once it is imported, by the op's name.
_TRITON_FUNCTIONS: dict[str, Callable[[], Callable]] = {}

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Name of a tensor in the schemas of Triton ops -> its dtypes. Tensors of other names are floating point.
_TAKES = {
    "target": (torch.int64,),
    "seed": (torch.int64,),
    "in_range": (torch.bool,),
    "mask": (*FLOATING, torch.bool),
}

TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton kernels run on CPU tensors in this process, through Triton's interpreter."""


class Observer(TorchDispatchMode):
    """A dispatch mode that looks on and changes nothing: `generate()` decodes under it as it does without."""


def define(schema: str, fake: Callable, *, triton: str | None = None) -> dict[str, OpOverload]:
    """Define a raw op and return the overload that each backend implements: `{"cpu": ..., "cuda": ..., "triton": ...}`.

    The native libraries implement the default overload, for the CPU and the CUDA dispatch key. Raw ops have no autograd
    of their own: a registered formula would slow down every call, also those that need no gradient. They raise a
    RuntimeError for tensors on several devices, and increment the version counters of tensors that they write to.

    Args:
        schema: `name(arguments) -> results`, as in `native_functions.yaml`. Functional: fresh contiguous results.
        fake: the op on tensors without data; same signature as the schema.
        triton: module holding a function `name` with the schema's signature, imported on the first call; it becomes the
            overload `.triton`.
    """
    name, signature = schema.split("(", 1)
    LIBRARY.define(schema)
    packet = getattr(torch.ops.fuseopt, name)
    overloads = {"cpu": packet.default, "cuda": packet.default}
    if triton is not None:
        LIBRARY.define(f"{name}.triton({signature}")
        function = _TRITON_FUNCTIONS[name] = _imported_on_first_call(triton, name)
        overloads["triton"] = packet.triton
        run = _checking_tensors(packet.triton, lambda *arguments: function()(*arguments))
        for key in ("CUDA", "CPU") if TRITON_INTERPRETED else ("CUDA",):
            LIBRARY.impl(packet.triton, run, key)
    for overload in {*overloads.values()}:
        torch.library.register_fake(overload, _fake_on_one_device(overload, fake), lib=LIBRARY)
        if overload._schema.is_mutable:
            LIBRARY.impl(overload, _counting_versions_up(overload), "ADInplaceOrView", with_keyset=True)
    return overloads


def _tensors_of(op: OpOverload) -> list[tuple[int, str]]:
    """(index, name) of each argument of `op` that is a tensor or a list of tensors."""
    return [(place, a.name) for place, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type)]


def _fake_on_one_device(op: OpOverload, fake: Callable) -> Callable:
    """`fake`, with a RuntimeError for tensors on several devices.

    torch calls the fake even if only one of the tensors is on the meta device; without the check, its result on the
    other device would be uninitialised memory.
    """

    takes = _tensors_of(op)

    def run(*arguments: Any) -> Any:
        devices = {}
        for place, name in takes:
            argument = arguments[place] if place < len(arguments) else None
            for tensor in argument if isinstance(argument, list) else [argument]:
                if tensor is not None:
                    devices[tensor.device] = name
        if len(devices) > 1:
            found = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise RuntimeError(f"{op}: all tensors must be on one device, not {found}")
        return fake(*arguments)

    return run


def _checking_tensors(op: OpOverload, function: Callable) -> Callable:
    """`function` for `op`, with a RuntimeError for tensors on several devices or of a wrong dtype."""
    takes = [(place, name, _TAKES.get(name, FLOATING)) for place, name in _tensors_of(op)]

    def run(*arguments: Any) -> Any:
        first = None
        for place, name, dtypes in takes:
            tensor = arguments[place] if place < len(arguments) else None
            if tensor is None:
                continue
            if tensor.dtype not in dtypes:
                wanted = " or ".join(map(str, dtypes))
                raise RuntimeError(f"{op}: {name} must be {wanted}, not {tensor.dtype}")
            device = tensor.get_device()
            if device != first and first is not None:
                raise RuntimeError(f"{op}: all tensors must be on one device, not {name} on {tensor.device}")
            first = device
        return function(*arguments)

    return run


def _counting_versions_up(op: OpOverload) -> Callable:
    """The ADInplaceOrView kernel of an in-place op: runs it, then increments the version counters of what it wrote.

    A backward through a tensor that was saved before then raises, as with torch's in-place ops.
    """
    written = [index for index, argument in enumerate(op._schema.arguments) if argument.is_write]

    def run(keyset: torch._C.DispatchKeySet, *arguments: Any, **named: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments, **named)
        for index in written:
            changed = arguments[index]
            increment_version(changed if isinstance(changed, list) else (changed,))
        return result

    return run


def triton_function(op: OpOverload) -> Callable:
    """The function behind an op's overload `.triton`, which imports triton."""
    return _TRITON_FUNCTIONS[op._opname]()


def _imported_on_first_call(module: str, name: str) -> Callable[[], Callable]:
    @functools.cache
    def function() -> Callable:
        package, *_ = module.rpartition(".")
        if package:
            # First: a thread in it would wait for a module that another one holds, which waits for the package.
            importlib.import_module(package)
        return getattr(importlib.import_module(module), name)

    return function


def define_node(schema: str, function: Callable) -> functools.partial[Any]:
    """Define an op that is `function`, and return it: what to call while Dynamo traces.

    It is one node of Dynamo's graph, and AOT Autograd traces what it does. Of an `autograd.Function` itself Dynamo
    traces forward and backward too, anew for every call.

    Args:
        schema: `name(arguments) -> results` of `function`, without defaults. A hash of the file that `function` is in
            goes ahead of the arguments: caches of compiled graphs know of a node no more than its arguments.
        function: of tensors and scalars; of an `autograd.Function`, its `apply`.

    Returns:
        A `functools.partial` of the op's overload, by which a node is known.
    """
    name, signature = schema.split("(", 1)
    run = functools.partial(apply, function) if isinstance(function, type) else function
    LIBRARY.define(f"{name}(str source, {signature}")
    LIBRARY.impl(name, lambda source, *args: run(*args), "CompositeImplicitAutograd")
    source = hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()
    return functools.partial(getattr(torch.ops.fuseopt, name).default, source)


def needs_autograd(*tensors: Tensor | None) -> bool:
    """Whether a call has to go through its `autograd.Function`; where it has not, the raw op alone is cheaper.

    Inside `torch.func` transforms `requires_grad` is no guide (a batched tensor hides it), and forward-mode AD never
    sets it; a raw op would silently drop the gradient.
    """
    if in_forward_mode():
        return True
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return torch._C._are_functorch_transforms_active()


def in_forward_mode() -> bool:
    """Whether forward-mode AD is on, as in `torch.func.jvp`, `jacfwd` and `hessian`."""
    return forward_ad._current_level >= 0


def is_unobserved() -> bool:
    """Whether nothing but the results counts of operations that run here: no gradient, trace, transform or mode."""
    return not (
        torch.is_grad_enabled()
        or in_forward_mode()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or not all(isinstance(mode, Observer) for mode in _get_current_dispatch_mode_stack())
    )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, without what that spends on binding `args` to a signature: 12 of 21 us a call."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def is_differentiated_again() -> bool:
    """In a `backward`: whether its result may itself be differentiated (`create_graph=True`).

    While compiling the answer is no: AOT Autograd differentiates a graph once, and refuses a second time by itself.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def reference_vjp(
    reference: Callable, grad_output: Tensor | tuple[Tensor, ...], inputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients of `reference(*inputs)` for each input, differentiable once more; None for an input that is None."""
    present = [index for index, tensor in enumerate(inputs) if tensor is not None]

    def of_present(*tensors: Tensor) -> Tensor:
        arguments = dict(zip(present, tensors, strict=True))
        return reference(*(arguments.get(index) for index in range(len(inputs))))

    _, pull_back = torch.func.vjp(of_present, *(inputs[index] for index in present))
    gradients = dict(zip(present, pull_back(grad_output), strict=True))
    return tuple(gradients.get(index) for index in range(len(inputs)))


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of an op's arithmetic: float64 where a tensor has it, else float32."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """float32 for an op that CUDA's autocast runs in float32, where it would; None for `input`'s own dtype.

    CPU's autocast leaves these ops in `input`'s dtype.
    """
    is_half = input.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_half and input.is_cuda and torch.is_autocast_enabled("cuda") else None


def float32_under_autocast(input: Tensor) -> torch.dtype:
    """The result's dtype of an op that CUDA's autocast runs in float32."""
    return autocast_dtype(input) or input.dtype


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Autocast switched off on `tensor`'s device, for an op with precision rules of its own."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast(tensor) else contextlib.nullcontext()


def is_autocast(tensor: Tensor) -> bool:
    """Whether autocast is on where `tensor` is."""
    # torch 2.11 cannot compile torch.amp.is_autocast_available. The meta device has no autocast to ask about.
    device_type = tensor.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def broadcasts(size: int, to: int) -> bool:
    """Whether a dimension does; Dynamo takes `size in (1, to)` for false wherever one of the two changes."""
    return bool(size == 1 or size == to)


def check_shape(name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless `tensor` has `shape`: kernels read it without broadcasting."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(tensor.shape)}")
