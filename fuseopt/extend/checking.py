"""`fuseopt.check`: the contract of a user's op, tried on every kernel that can run here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.gradcheck import GradcheckError

from fuseopt.errors import OpError
from fuseopt.extend.backends import PLAIN, REFERENCE, compiling_with
from fuseopt.extend.check_report import (
    CheckReport,
    Row,
    Wrong,
    check_close,
    described,
    first_line,
    is_same,
    place_of,
    with_strides,
)
from fuseopt.extend.inputs import Arguments, copied, resized, to_dtype, variants
from fuseopt.extend.own_op import Op
from fuseopt.extend.signature import arguments_of, as_results, kind_of, tensors_of, with_tensors
from fuseopt.ops.library import without_autocast

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class _DoesNotApply(Exception):
    """The check has no meaning for this op or this machine; the message says why."""


def check(
    op: Op,
    *,
    device: str | torch.device | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    same_bits: bool = True,
) -> CheckReport:
    """Try an op's contract with its samples, on every kernel that can run here.

    Values and gradients are held against the function in float64, in the samples' sizes and odd ones, with gaps,
    swapped strides and NaN around them, broadcast, empty, 0-d, with other numbers, and with and without optional
    tensors, where the function takes such arguments. A kernel that does not take them must say so in `supports`. Values
    may be 4 times as far from float64 as the function's own in the same dtype are. What a kernel makes of NaN is not
    checked.

    Args:
        op: with samples.
        device: where; by default a GPU if there is one.
        dtypes: of the samples.
        same_bits: False where two runs may differ in their last bits, as those of kernels that add by atomics.

    Raises:
        OpError: the op has no samples.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not isinstance(op, Op):
        raise OpError(f"fuseopt.check takes an op made by fuseopt.op or fuseopt.elementwise, not {type(op).__name__}")
    torch.manual_seed(0)
    # Of the `compile` backend, the trace is tried with all arguments, and Inductor, which takes seconds, with one.
    with torch.random.fork_rng(), torch.enable_grad(), compiling_with("aot_eager"):
        samples = {dtype: list(op.sample_arguments(where, dtype)) for dtype in dtypes}
        backends, refused = op.backends_on(where.type)
        rows = [Row(backend, "runs here", "-", "; ".join(reasons)) for backend, reasons in refused.items()]
        if (place := _written_by_function(op, next(iter(samples.values()))[0])) is not None:
            detail = f"the function writes into tensor {place} of its arguments; let it make a new one"
            rows.insert(0, Row("function", "writes no input", "FAIL", detail))
        for backend in backends:
            rows += _Checks(op, backend, where, samples, same_bits).rows()
    return CheckReport(op.name, str(where), tuple(rows))


class _Checks:
    """The checks of one backend."""

    def __init__(
        self, op: Op, backend: str, device: torch.device, samples: dict[torch.dtype, list[Arguments]], same_bits: bool
    ) -> None:
        self.op, self.backend, self.device, self.samples, self.same_bits = op, backend, device, samples, same_bits
        self.first = next(iter(samples.values()))[0]
        self.called_with: Sequence[Any] = ()
        self.optional = [argument.startswith("Tensor?") for argument in arguments_of(op.signature.schema)]

    def rows(self) -> Iterator[Row]:
        for dtype, samples in self.samples.items():
            kinds = dict.fromkeys(kind for sample in samples for kind, _ in variants(sample, self.optional))
            for kind in kinds:
                yield self._row(f"{kind}, {_SHORT.get(dtype, str(dtype))}", self._values, kind, dtype)
        for dtype in self.samples:
            yield self._row(f"gradient, {_SHORT.get(dtype, str(dtype))}", self._gradient, dtype)
        for name, run in (
            ("gradcheck", self._gradcheck),
            ("second derivative", self._second_derivative),
            ("fake", self._fake),
            ("writes no input", self._writes),
            ("same bits again", self._repeats),
            ("new values, same memory", self._reads_again),
            ("opcheck", self._opcheck),
            ("torch.compile, fullgraph", self._compiles),
            ("autocast", self._autocast),
            ("vmap", self._vmap),
            ("CUDA graph", self._captures),
        ):
            yield self._row(name, run)

    def _row(self, name: str, run: Callable, *arguments: Any) -> Row:
        try:
            return Row(self.backend, name, "ok", run(*arguments) or "")
        except _DoesNotApply as reason:
            return Row(self.backend, name, "-", str(reason))
        except Wrong as error:
            return Row(self.backend, name, "FAIL", str(error))
        except Exception as error:  # whatever a user's kernel raises is a finding
            hint = "" if self.backend in PLAIN else "; if the kernel is not for these, refuse them in `supports`"
            detail = f"{type(error).__name__}: {first_line(error)}{place_of(error)}"
            return Row(self.backend, name, "FAIL", f"{detail}, called with {described(self.called_with)}{hint}")

    def _call(self, arguments: Sequence[Any]) -> Any:
        self.called_with = arguments
        return self.op(*arguments, backend=self.backend)

    def _takes(self, arguments: Sequence[Any]) -> str | None:
        """Why the backend's `supports` refuses the call; None if it takes it."""
        self.called_with = arguments
        return self.op.calls.refusal(self.backend, arguments)

    def _values(self, kind: str, dtype: torch.dtype) -> str:
        taken, reasons = 0, []
        for sample in self.samples[dtype]:
            for name, arguments in variants(sample, self.optional):
                if name != kind:
                    continue
                wanted = _in_float64(self.op, arguments)
                if isinstance(wanted, str):
                    reasons.append(f"the function does not take it: {wanted}")
                elif (refusal := self._takes(arguments)) is not None:
                    reasons.append(f"not taken: {refusal}")
                else:
                    taken += 1
                    self._compare(arguments, wanted)
        if not taken:
            raise _DoesNotApply(reasons[0] if reasons else "the samples have none")
        return ""

    def _compare(self, arguments: Arguments, wanted: Sequence[Tensor]) -> None:
        own = as_results(self.op.function(*arguments))
        given = as_results(self._call(arguments))
        shapes = described(arguments)
        for place, (found, reference, exact) in enumerate(zip(given, own, wanted, strict=True)):
            which = f"result {place}" if len(given) > 1 else "the result"
            if (found.shape, found.dtype) != (reference.shape, reference.dtype):
                gave = f"its {self.backend} kernel gave {kind_of(found)}, the function gives {kind_of(reference)}"
                raise Wrong(f"{which} of {shapes}: {gave}")
            check_close(found, reference, exact, f"{which} of {shapes}")

    def _differentiable(self, arguments: Arguments, only: int | None = None) -> tuple[Arguments, list[Tensor]]:
        """The arguments, with tensors that require gradients: all that can, or the one at the place `only`."""
        varied = [
            t.detach().requires_grad_(only in (None, place)) if t.is_floating_point() else t
            for place, t in enumerate(tensors_of(arguments))
        ]
        if not any(tensor.requires_grad for tensor in varied):
            raise _DoesNotApply("no argument is floating point")
        return with_tensors(arguments, varied), [tensor for tensor in varied if tensor.requires_grad]

    def _gradient(self, dtype: torch.dtype) -> str:
        done = False
        for sample in self.samples[dtype]:
            for kind, arguments in variants(sample, self.optional):
                if isinstance(_in_float64(self.op, arguments), str) or self._takes(arguments) is not None:
                    continue
                self._compare_gradients(arguments, kind)
                done = True
            self._compare_gradients_one_by_one(sample)
        if not done:
            raise _DoesNotApply("the backend takes none of the samples")
        return ""

    def _compare_gradients_one_by_one(self, sample: Arguments) -> None:
        """As a formula may leave out the gradients that are not needed."""
        places = [place for place, tensor in enumerate(tensors_of(sample)) if tensor.is_floating_point()]
        if self._takes(sample) is not None or isinstance(_in_float64(self.op, sample), str) or len(places) == 1:
            return
        for place in places:
            # Without a gradient by this tensor there is nothing to compare.
            with contextlib.suppress(_DoesNotApply):
                self._compare_gradients(copied(sample), "if no other is needed", place)

    def _compare_gradients(self, arguments: Arguments, kind: str, only: int | None = None) -> None:
        given, inputs = self._differentiable(arguments, only)
        outputs = {place: r for place, r in enumerate(as_results(self._call(given))) if r.requires_grad}
        if not outputs:
            raise _DoesNotApply("no result has a gradient")
        cotangents = {place: torch.randn_like(output) for place, output in outputs.items()}
        self._compare_with(cotangents, outputs, inputs, arguments, kind, only)
        expanded = {place: torch.randn_like(o[:1]).expand_as(o) for place, o in outputs.items() if o.dim() > 1}
        if len(expanded) == len(outputs):  # as those of a sum over rows are
            kind += ", from a gradient with strides of 0"
            self._compare_with(expanded, outputs, inputs, arguments, kind, only)

    def _compare_with(
        self,
        cotangents: Mapping[int, Tensor],
        outputs: Mapping[int, Tensor],
        inputs: list[Tensor],
        arguments: Arguments,
        kind: str,
        only: int | None,
    ) -> None:
        """Compare gradients from `cotangents` of `outputs`, both by the places of the results."""
        given = list(cotangents.values())
        found = torch.autograd.grad(list(outputs.values()), inputs, given, allow_unused=True, retain_graph=True)
        own = self._gradients_of_function(arguments, cotangents, only)
        exact = self._gradients_of_function(to_dtype(arguments, torch.float64, "cpu"), cotangents, only)
        names = self._varied_names(arguments, only)
        for name, one, reference, precise in zip(names, found, own, exact, strict=True):
            if one is None:
                one = torch.zeros_like(reference)
            check_close(one, reference, precise, f"the gradient of {name} ({kind})")

    def _varied_names(self, arguments: Arguments, only: int | None) -> list[str]:
        """The names of the tensors that `_differentiable` varies; those of a list with their index."""
        named = [
            (name if isinstance(argument, Tensor) else f"{name}[{index}]", tensor)
            for name, argument in zip(self.op.signature.names, arguments, strict=True)
            for index, tensor in enumerate(tensors_of([argument]))
        ]
        return [
            name for place, (name, tensor) in enumerate(named) if tensor.is_floating_point() and only in (None, place)
        ]

    def _gradients_of_function(
        self, arguments: Arguments, cotangents: Mapping[int, Tensor], only: int | None
    ) -> list[Tensor]:
        given, inputs = self._differentiable(arguments, only)
        with without_autocast(inputs[0]):
            results = as_results(self.op.function(*given))
        # Of the op, all results have a gradient if one does.
        outputs = {place: result for place, result in enumerate(results) if result.requires_grad}
        if not outputs:
            return [torch.zeros_like(tensor) for tensor in inputs]
        same = [cotangents[place].to(o.device, o.dtype) for place, o in outputs.items()]
        return list(torch.autograd.grad(list(outputs.values()), inputs, same, materialize_grads=True))

    def _tiny(self) -> tuple[Arguments, list[Tensor]]:
        tiny = to_dtype(resized(self.first, lambda size: min(size, 3)), torch.float64)
        if isinstance(reason := _in_float64(self.op, tiny), str):
            tiny = to_dtype(self.first, torch.float64)
            if sum(tensor.numel() for tensor in tensors_of(tiny)) > 4096:
                raise _DoesNotApply(f"the samples are large, and the function does not take smaller ones: {reason}")
        if (refusal := self._takes(tiny)) is not None:
            raise _DoesNotApply(f"not taken in float64: {refusal}")
        return self._differentiable(tiny)

    def _gradcheck(self) -> str:
        arguments, _ = self._tiny()
        try:
            torch.autograd.gradcheck(self._of_given, arguments, nondet_tol=1e-9)
        except GradcheckError as error:
            raise Wrong(self._of_gradcheck(error)) from error
        return ""

    def _second_derivative(self) -> str:
        arguments, _ = self._tiny()
        try:
            torch.autograd.gradgradcheck(self._of_given, arguments, nondet_tol=1e-9)
        except GradcheckError as error:
            raise Wrong(self._of_gradcheck(error)) from error
        except RuntimeError as error:
            raise _DoesNotApply(f"no second derivative: {first_line(error)}") from error
        return ""

    def _of_gradcheck(self, error: GradcheckError) -> str:
        hint = "; the kernel takes float64 but may compute in float32; refuse it in `supports`"
        return first_line(error).rstrip(",") + hint * (self.backend not in PLAIN)

    def _of_given(self, *arguments: Any) -> Any:
        return tuple(r for r in as_results(self._call(arguments)) if r.is_floating_point())

    def _taken(self) -> Arguments:
        for samples in self.samples.values():
            for sample in samples:
                if self._takes(sample) is None:
                    return copied(sample)
        raise _DoesNotApply("the backend takes none of the samples")

    def _fake(self) -> str:
        for kind, arguments in variants(self._taken(), self.optional):
            if isinstance(_in_float64(self.op, arguments), str) or self._takes(arguments) is not None:
                continue
            real = as_results(self._call(arguments))
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(tensor) for tensor in tensors_of(arguments)]
                fake = as_results(self.op.overload(self.backend)(*with_tensors(arguments, fakes)))
            for place, (one, other) in enumerate(zip(fake, real, strict=True)):
                if (one.shape, one.dtype, one.stride()) != (other.shape, other.dtype, other.stride()):
                    kinds = f"{with_strides(one)}, the real one is {with_strides(other)}"
                    raise Wrong(f"the fake of result {place} is {kinds} ({kind})")
        return ""

    def _writes(self) -> str:
        arguments, _ = self._differentiable(self._taken())
        before = [tensor.detach().clone() for tensor in tensors_of(arguments)]
        outputs = [result for result in as_results(self._call(arguments)) if result.requires_grad]
        self._check_unwritten(arguments, before, "the call")
        if outputs:
            grads = [torch.randn_like(output) for output in outputs]
            kept, results = [g.clone() for g in grads], [o.detach().clone() for o in outputs]
            inputs = [tensor for tensor in tensors_of(arguments) if tensor.requires_grad]
            torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
            self._check_unwritten((*arguments, *grads, *outputs), [*before, *kept, *results], "the backward")
        return ""

    def _check_unwritten(self, arguments: Sequence[Any], before: Sequence[Tensor], who: str) -> None:
        for place, (tensor, kept) in enumerate(zip(tensors_of(arguments), before, strict=True)):
            if not is_same(tensor, kept):
                raise Wrong(f"{who} writes into tensor {place} of its inputs")

    def _repeats(self) -> str:
        if not self.same_bits:
            raise _DoesNotApply("not asked for")
        arguments = self._taken()
        inputs = [t.requires_grad_() for t in tensors_of(arguments) if t.is_floating_point()]
        runs = []
        for _ in range(2):
            results = as_results(self._call(arguments))
            outputs = [result for result in results if result.requires_grad]
            grads = list(map(torch.ones_like, outputs))
            found = torch.autograd.grad(outputs, inputs, grads, materialize_grads=True) if outputs else ()
            runs.append({"results": results, "gradients": found})
        for what, first in runs[0].items():
            if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, runs[1][what], strict=True)):
                raise Wrong(f"the {what} of two runs differ; pass same_bits=False if they may")
        return ""

    def _reads_again(self) -> str:
        arguments = self._taken()
        with torch.no_grad():
            self._call(arguments)
            for tensor in tensors_of(arguments):
                tensor.copy_(tensor.flip(0) if tensor.dim() else tensor)
            wanted = _in_float64(self.op, arguments)
            if isinstance(wanted, str):
                raise _DoesNotApply(f"the function does not take it: {wanted}")
            self._compare(arguments, wanted)
        return ""

    def _opcheck(self) -> str:
        arguments, _ = self._differentiable(self._taken())
        found = torch.library.opcheck(self.op.overload(self.backend), arguments, raise_exception=False)
        for name, result in found.items():
            if result != "SUCCESS":
                raise Wrong(f"{name}: {first_line(result)}")
        return ""

    def _compiles(self) -> str:
        arguments, inputs = self._differentiable(self._taken())
        # The reference is the function of the `compile` backend.
        how = "inductor" if self.device.type == "cuda" and self.backend != REFERENCE else "aot_eager"
        torch._dynamo.reset()
        compiled = torch.compile(lambda *given: self._of_given(*given), fullgraph=True, backend=how)
        found, wanted = compiled(*arguments), self._of_given(*arguments)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
        outputs = [output for output in wanted if output.requires_grad]
        if outputs:
            cotangents = [torch.randn_like(output) for output in outputs]
            compiled_outputs = [output for output in found if output.requires_grad]
            pairs = zip(
                torch.autograd.grad(compiled_outputs, inputs, cotangents, materialize_grads=True),
                torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True),
                strict=True,
            )
            for one, other in pairs:
                torch.testing.assert_close(one, other, equal_nan=True)
        return how

    def _autocast(self) -> str:
        arguments = self._taken()
        with torch.no_grad():
            wanted = as_results(self._call(arguments))
            with torch.autocast(self.device.type, torch.bfloat16):
                found = as_results(self._call(arguments))
        for one, other in zip(found, wanted, strict=True):
            if one.dtype != other.dtype:
                raise Wrong(f"under autocast the result is {one.dtype}, without it {other.dtype}")
        return ""

    def _vmap(self) -> str:
        arguments = self._taken()
        stacked = with_tensors(arguments, [torch.stack((t, t)) for t in tensors_of(arguments)])
        if self.op.signature.has_lists:
            raise _DoesNotApply("vmap is not tried for lists of tensors")
        dims = tuple(0 if isinstance(argument, Tensor) else None for argument in arguments)
        if not any(dim == 0 for dim in dims):
            raise _DoesNotApply("no argument is a tensor")
        try:
            with torch.no_grad():
                mapped = as_results(torch.vmap(lambda *given: self._call(given), in_dims=dims)(*stacked))
        except RuntimeError as error:
            raise _DoesNotApply(f"refused: {first_line(error)}") from error
        for one, other in zip(mapped, as_results(self.op.function(*arguments)), strict=True):
            torch.testing.assert_close(one[1], other)
        return "by the function"

    def _captures(self) -> str:
        if self.device.type != "cuda":
            raise _DoesNotApply("needs a GPU")
        arguments = to_dtype(self._taken(), next(iter(self.samples)))
        with torch.no_grad():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                self._call(arguments)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                captured = as_results(self._call(arguments))
            for tensor in tensors_of(arguments):
                tensor.copy_(tensor.flip(0) if tensor.dim() else tensor)
            graph.replay()
            torch.cuda.synchronize()
            wanted = as_results(self._call(arguments))
        for one, other in zip(captured, wanted, strict=True):
            if not torch.equal(one.nan_to_num(), other.nan_to_num()):
                raise Wrong("a captured call gives another result when it is replayed with new values")
        return ""


def _written_by_function(op: Op, sample: Arguments) -> int | None:
    """Which of the sample's tensors the op's function writes into, whereby every other check fails; None if none."""
    given = copied(sample)
    if isinstance(_results(op, given), str):
        return None
    pairs = zip(tensors_of(given), tensors_of(sample), strict=True)
    return next((place for place, pair in enumerate(pairs) if not is_same(*pair)), None)


def _in_float64(op: Op, arguments: Arguments) -> list[Tensor] | str:
    """The function's results in float64 on the CPU, or why it does not take these arguments."""
    return _results(op, to_dtype(arguments, torch.float64, "cpu"))


def _results(op: Op, arguments: Arguments) -> list[Tensor] | str:
    try:
        with torch.no_grad():
            return list(as_results(op.function(*arguments)))
    except Exception as error:  # whatever a user's function raises
        return first_line(error)
