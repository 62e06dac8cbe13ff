"""Helpers of all op files: defining raw ops under `torch.ops.fuseopt`, and when a call needs autograd."""

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
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

LIBRARY = torch.library.Library("fuseopt", "DEF")

# By raw op: returns the function that implements its overload `.triton`, imported on the first call.
_TRITON_FUNCTIONS: dict[str, Callable[[], Callable]] = {}

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Name of a tensor in the schemas of Triton ops -> its allowed dtypes. Tensors with other names are floating point.
_TAKES = {
    "target": (torch.int64,),
    "seed": (torch.int64,),
    "in_range": (torch.bool,),
    "mask": (*FLOATING, torch.bool),
    "values": (torch.int8, torch.int32),
    "zeros": (torch.uint8,),
}

TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton kernels run on CPU tensors in this process, in Triton's interpreter."""


class Observer(TorchDispatchMode):
    """A dispatch mode that only observes. `generate()` decodes in the same way with it as without."""


def define(schema: str, fake: Callable, *, triton: str | None = None) -> dict[str, OpOverload]:
    """Defines a raw op and returns the overload of each backend: `{"cpu": ..., "cuda": ..., "triton": ...}`.

    The native libraries implement the default overload for the CPU and CUDA dispatch keys. Raw ops have no autograd
    formula, because a registered one would slow down every call, even those without gradient. They raise RuntimeError
    for tensors on several devices, and increment the version counters of tensors that they write to.

    Args:
        schema: `name(arguments) -> results`, as in `native_functions.yaml`. Results are new and contiguous.
        fake: the op on tensors without data, called with all arguments by position.
        triton: name of a module, imported on the first call, whose function `name` has the schema's signature. It
            becomes the overload `.triton`.
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


def no_result(*arguments: object) -> None:
    """The fake of a raw op that only writes to its arguments."""


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
            if changed is not None:
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
            # The package first: otherwise two threads could each hold an import lock that the other one waits for.
            importlib.import_module(package)
        return getattr(importlib.import_module(module), name)

    return function


def define_node(schema: str, function: Callable) -> functools.partial[Any]:
    """Defines an op that calls `function`, and returns what to call instead of `function` while Dynamo traces.

    The call is one node in Dynamo's graph; AOT Autograd then traces `function`. Without it, Dynamo would trace the
    forward and backward of an `autograd.Function` again at every call.

    Args:
        schema: `name(arguments) -> results` of `function`, without defaults. The op gets one more argument in front, a
            hash of the file of `function`: caches of compiled graphs identify a node by its op and arguments alone.
        function: takes tensors and scalars; or an `autograd.Function`, whose `apply` is called.

    Returns:
        A `functools.partial` of the op's overload, which identifies the node.
    """
    name, signature = schema.split("(", 1)
    run = functools.partial(apply, function) if isinstance(function, type) else function
    LIBRARY.define(f"{name}(str source, {signature}")
    LIBRARY.impl(name, lambda source, *args: run(*args), "CompositeImplicitAutograd")
    source = hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()
    return functools.partial(getattr(torch.ops.fuseopt, name).default, source)


def needs_autograd(*tensors: Tensor | None) -> bool:
    """Whether a call must go through its `autograd.Function`. If not, calling the raw op directly is cheaper.

    True inside `torch.func` transforms, where a batched tensor hides `requires_grad`, and in forward-mode AD, which
    never sets it. There a raw op would silently drop the gradient.
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
    """Whether forward-mode AD is active, as in `torch.func.jvp`, `jacfwd` and `hessian`."""
    return forward_ad._current_level >= 0


def is_recorded() -> bool:
    """Whether torch.jit.trace or torch.export records operations, for programs without fuseopt as well."""
    # Inside Dynamo, older versions of torch say that they export under torch.compile too, but do not set this flag.
    return torch.compiler._is_exporting_flag or (not is_dynamo_compiling() and torch.jit.is_tracing())


def is_unobserved() -> bool:
    """True if no gradient mode, tracer, compiler, transform or dispatch mode observes the operations that run here."""
    return not (
        torch.is_grad_enabled()
        or in_forward_mode()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or not all(isinstance(mode, Observer) for mode in _get_current_dispatch_mode_stack())
    )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)` without binding `args` to a signature, which takes 12 of its 21 us per call."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def is_differentiated_again() -> bool:
    """In a `backward`: whether its result may be differentiated again (`create_graph=True`).

    False while compiling: AOT Autograd differentiates a graph once, and raises an error itself the second time.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def reference_vjp(
    reference: Callable, grad_output: Tensor | tuple[Tensor, ...], inputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradient of `reference(*inputs)` for each input, itself differentiable; None for an input that is None."""
    present = [index for index, tensor in enumerate(inputs) if tensor is not None]

    def of_present(*tensors: Tensor) -> Tensor:
        arguments = dict(zip(present, tensors, strict=True))
        return reference(*(arguments.get(index) for index in range(len(inputs))))

    _, pull_back = torch.func.vjp(of_present, *(inputs[index] for index in present))
    gradients = dict(zip(present, pull_back(grad_output), strict=True))
    return tuple(gradients.get(index) for index in range(len(inputs)))


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of an op's arithmetic: float64 if any tensor has it, else float32."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """float32 if CUDA's autocast is on and `input` is a half-precision CUDA tensor; None, for `input`'s dtype, if not.

    For ops that CUDA's autocast runs in float32. The CPU's autocast leaves these in `input`'s dtype.
    """
    is_half = input.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_half and input.is_cuda and torch.is_autocast_enabled("cuda") else None


def float32_under_autocast(input: Tensor) -> torch.dtype:
    """The result dtype of an op that CUDA's autocast runs in float32."""
    return autocast_dtype(input) or input.dtype


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """A context without autocast on `tensor`'s device, for an op with its own precision rules."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast(tensor) else contextlib.nullcontext()


def is_autocast(tensor: Tensor) -> bool:
    """Whether autocast is active on `tensor`'s device."""
    # torch 2.11 cannot compile torch.amp.is_autocast_available. The meta device has no autocast to ask about.
    device_type = tensor.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def broadcasts(size: int, to: int) -> bool:
    """Whether a dimension of `size` broadcasts to `to`. Dynamo takes `size in (1, to)` for False if one is dynamic."""
    return bool(size == 1 or size == to)


def check_shape(name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raises ValueError unless `tensor` has `shape`; kernels do not broadcast."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(tensor.shape)}")
