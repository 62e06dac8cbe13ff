"""What `torch.ops` has of a user's op: the op, and `name__backend` for each backend, with fakes and gradients.

Calls that torch has to see come here: under torch.compile, modes, profilers, and from `torch.ops` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import operator_schemas

from fuseopt.errors import BackendError, OpError
from fuseopt.extend import compile_caches, gradients
from fuseopt.extend.backends import COMPILE, REFERENCE, noting
from fuseopt.extend.signature import arguments_of, as_results, tensors_of, without_autocast_for
from fuseopt.ops.library import in_forward_mode

if TYPE_CHECKING:
    from fuseopt.extend.own_op import Op

# Of every device, and of calls without tensors.
_KEY = "CompositeExplicitAutograd"


class TorchOp:
    """`torch.ops.<namespace>.<name>`, which is backend "auto", and `<name>__<backend>` for each backend.

    They are ops of their own, not overloads: torch cannot take away two overloads of one op.

    Raises:
        OpError: torch has an op of that name already, from elsewhere.
    """

    def __init__(self, op: Op) -> None:
        self._op = op
        self._namespace, _, self._name = op.name.partition("::")
        self._check_free(op.name)
        self._library = torch.library.Library(self._namespace, "FRAGMENT")
        self._overloads: dict[str, OpOverload] = {}
        self._natives: dict[str, OpOverload] = {}
        self._backward = self._define_backward()

    def overload(self, backend: str) -> OpOverload:
        """What runs `backend`.

        Raises:
            BackendError: the op has none of that name.
        """
        if backend not in self._overloads:
            raise BackendError(f"{self._op.name} has no backend {backend!r}; it has {', '.join(self._overloads)}")
        return self._overloads[backend]

    def define(self, backend: str) -> None:
        """Define what runs a backend, unless it is there."""
        if backend in self._overloads:
            return
        name = self._name if backend == "auto" else f"{self._name}__{backend}"
        overload = self._overloads[backend] = self._defined(f"{name}{self._op.signature.schema}")
        qualified = f"{self._namespace}::{name}"
        self._library.impl(overload, functools.partial(self._run, backend), _KEY)
        torch.library.register_fake(qualified, self.run_fake, lib=self._library)
        save = functools.partial(self._save, backend)
        torch.library.register_autograd(qualified, self._differentiate, setup_context=save, lib=self._library)

    def define_native(self, name: str) -> OpOverload:
        """What a library has registered as `name`, with the op's schema."""
        if name not in self._natives:
            self._natives[name] = self._defined(name + self._op.signature.schema.replace("SymInt", "int"))
        return self._natives[name]

    def close(self) -> None:
        """Take it out of `torch.ops`."""
        self._library._destroy()
        # torch.fx remembers signatures by name, and another op may get the name.
        for overload in (self._backward, *self._overloads.values()):
            remembered = getattr(operator_schemas, "_SCHEMA_TO_SIGNATURE_CACHE", {})
            remembered.pop((overload._schema.name, overload._schema.overload_name), None)

    def _check_free(self, name: str) -> None:
        present = torch._C._jit_get_schemas_for_operator(name)
        if present:
            raise OpError(f"{name} is taken: there is {present[0]}, of another op or package; use another name")

    def _defined(self, schema: str) -> OpOverload:
        self._check_free(f"{self._namespace}::{schema.partition('(')[0]}")
        self._library.define(schema)
        return getattr(getattr(torch.ops, self._namespace), schema.partition("(")[0]).default

    def _run(self, backend: str, *given: Any, **named: Any) -> Any:
        op, arguments = self._op, self._bound(given, named)
        device = next((tensor.device.type for tensor in tensors_of(arguments)), "cpu")
        without = COMPILE if backend == "auto" else None  # which would not compile here
        return op.calls.run(op.eager_kernel(op.calls.chosen(backend, device, arguments, without=without)), arguments)

    def run_fake(self, *given: Any, **named: Any) -> Any:
        """The op on tensors without data."""
        op, arguments = self._op, self._bound(given, named)
        compile_caches.tag(op.name, op.calls.digest)
        if op.fake_function is not None:
            with noting(f"the fake of {op.name}"):
                return op.fake_function(*arguments)
        with torch.no_grad(), without_autocast_for(arguments):
            output = op.calls.checked(op.function(*arguments), REFERENCE)
        empty = [torch.empty(r.shape, dtype=r.dtype, device=r.device) for r in as_results(output)]
        return empty[0] if isinstance(output, Tensor) else type(output)(empty)

    def _bound(self, given: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
        return self._op.signature.bind(self._op.name, given, named)

    def _save(self, backend: str, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        # A formula may be that of one backend, so "auto" is resolved before it is known what to save.
        if backend == "auto":
            device = next((tensor.device.type for tensor in tensors_of(inputs)), "cpu")
            backend = self._op.calls.chosen("auto", device, inputs).backend
        gradients.save(ctx, self._op, backend, inputs, output)

    def _differentiate(self, ctx: Any, *grads: Any) -> Any:
        op = self._op
        arguments, outputs = gradients.saved(ctx)
        if op.signature.results is None:
            (grads,) = grads
        given = len(ctx.needs_input_grad)  # arguments at their defaults are not, if they are the last
        needed = []
        for argument, asked in zip(arguments[:given], ctx.needs_input_grad, strict=True):
            pairs = zip(argument, asked, strict=True) if isinstance(asked, (list, tuple)) else [(argument, asked)]
            needed += [needs for item, needs in pairs if isinstance(item, Tensor)]
        opaque = functools.partial(self._call_backward, ctx.backend)
        following = iter(gradients.gradients(op, ctx.backend, arguments, outputs, grads, needed, formula=opaque))

        def gradient(argument: Any) -> Any:
            if isinstance(argument, list) and any(True for _ in tensors_of((argument,))):
                return [gradient(item) for item in argument]
            return next(following) if isinstance(argument, Tensor) else None

        return tuple(map(gradient, arguments[:given]))

    def _define_backward(self) -> OpOverload:
        """Define the op that a formula given for the gradient is to torch.compile: its fake is all that it sees."""
        op, name = self._op, f"{self._name}__backward"
        listed = ", ".join(["str backend", *arguments_of(op.signature.schema), "Tensor[] results", "Tensor[] grads"])
        overload = self._defined(f"{name}({listed}, bool[] needed) -> Tensor[]")

        def run(backend: str, *given: Any) -> list[Tensor]:
            *arguments, outputs, grads, needed = given
            formula = op.formula(backend)
            assert formula is not None
            with torch.no_grad():
                found = gradients.by_formula(op, formula, arguments, outputs, grads, needed)
            return unshared([g for g in found if g is not None], [*tensors_of(arguments), *outputs, *grads])

        def fake(backend: str, *given: Any) -> list[Tensor]:
            *arguments, _, _, needed = given
            pairs = zip(tensors_of(arguments), needed, strict=True)
            return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t, needs in pairs if needs]

        self._library.impl(overload, run, _KEY)
        torch.library.register_fake(f"{self._namespace}::{name}", fake, lib=self._library)
        return overload

    def _call_backward(
        self, backend: str, arguments: Sequence[Any], outputs: Sequence[Tensor], grads: Sequence[Any], needed: Any
    ) -> list[Tensor]:
        return self._backward(backend, *arguments, list(outputs), list(grads), list(needed))


def unshared(output: Any, inputs: Iterable[Tensor]) -> Any:
    """`output` with a copy of each tensor that shares memory with an input or with a result before it.

    torch.compile counts on none doing so.
    """
    taken, fresh = {tensor.untyped_storage()._cdata for tensor in inputs}, []
    for result in as_results(output):
        if result.untyped_storage()._cdata in taken:
            result = result.clone()
        taken.add(result.untyped_storage()._cdata)
        fresh.append(result)
    return _like_output(fresh, output)


def unshared_views(output: Any, inputs: Iterable[Tensor]) -> Any:
    """`unshared` where the memory of tensors is hidden, as from Dynamo and in transforms; results are contiguous.

    Dynamo knows which tensor is a view of which. To it, results of `detach` and of a dropout that drops nothing are new
    tensors, which are not copied. In transforms all results are copied.
    """
    is_transformed = in_forward_mode() or torch._C._are_functorch_transforms_active()
    taken, fresh = [_viewed(tensor) for tensor in inputs], []
    for result in as_results(output):
        memory = _viewed(result)
        if is_transformed or any(memory is other for other in taken):
            result = result.clone(memory_format=torch.contiguous_format)
        taken.append(memory)
        fresh.append(result.contiguous())
    return _like_output(fresh, output)


def _viewed(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _like_output(results: list[Tensor], output: Any) -> Any:
    if isinstance(output, Tensor):
        return results[0]
    return results if isinstance(output, list) else tuple(results)
