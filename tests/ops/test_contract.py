"""The contract that every registered op keeps on each of its backends.

The judge is the op's plain reference in float64; how far off a backend may be is measured by how far off that reference
is when it runs in the low precision itself. With TRITON_INTERPRET=1, `-m interpreter` takes the Triton kernels through
all of it on CPU tensors.
"""

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.library import TRITON_INTERPRETED
from tests.ops.cases import (
    DTYPES,
    Case,
    Graphs,
    RawCalls,
    answers_a_question,
    cases,
    differentiable_cases,
    error,
    functional_names,
    gradients,
    kernel_cases,
    map_tensors,
    results,
    tensors,
    to_float64,
)
from tests.ops.contract import (
    assert_accurate,
    assert_derivatives,
    assert_one_graph,
    of_tensors,
    random_gradients,
    rounding,
    total,
)
from tests.ops.variations import broadcast, every_second, laid_out, transposed

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
# Of wrappers that all Triton kernels have in common, and of references, which are torch's to differentiate and compile:
# quick runs have one op's on a CPU.
OF_ANY_KERNEL = (
    "test_compiled_training_runs_the_raw_backward",
    "test_compiles_into_one_graph",
    "test_gradcheck_and_gradgradcheck",
    "test_gradients_of_torch_func_equal_the_reference_s",
    "test_gradients_through_checkpointing_are_the_same_bits",
    "test_vmap_gives_the_stacked_results",
)
OPCHECK_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case` is any op, `differentiable_case` one with gradients, `differentiable_kernel` such a one's kernel."""
    choices = {
        "case": cases,
        "differentiable_case": differentiable_cases,
        "differentiable_kernel": lambda: kernel_cases(differentiable_cases()),
    }
    for name in choices.keys() & set(metafunc.fixturenames):
        parameters = choices[name]()
        if metafunc.function.__name__ in OF_ANY_KERNEL:
            parameters = [_slow_unless_it_stands_for_others(parameter) for parameter in parameters]
        metafunc.parametrize(name, parameters)


def _slow_unless_it_stands_for_others(parameter: Any) -> Any:
    """The parameter, marked as slow if it is interpreted or a reference on a CPU, but for those of one op."""
    case = parameter.values[0]
    if case.backend == "cpu" or case.device.type != "cpu" or case.op.name == "layer_norm":
        return parameter
    return pytest.param(case, id=parameter.id, marks=[*parameter.marks, pytest.mark.slow])


def forward_names(name: str, overload: str) -> tuple[str, ...]:
    """What raw ops a forward may call: the last, and ahead of it one that a bias takes."""
    return f"{name}_line.{overload}", f"{name}_fwd.{overload}"


def backward_names(name: str, overload: str) -> tuple[str, ...]:
    """What a raw backward may be called: with a bias it may be an op of its own."""
    return f"{name}_bwd.{overload}", f"{name}_bias_bwd.{overload}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradients_against_float64(case: Case, dtype: torch.dtype) -> None:
    for sample in case.samples(dtype, requires_grad=True):
        assert_accurate(case, sample)


@pytest.mark.parametrize("layout", [every_second, transposed, broadcast])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_layout_of_inputs(case: Case, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> None:
    for sample in case.samples(dtype, requires_grad=True):
        if layout is broadcast and sample.args[0].dim() == 1:
            continue  # a row of one value: its variance is rounding and nothing else
        if layout is broadcast and case.op.name == "linear_cross_entropy":
            continue  # classes of one weight: their gradients cancel, and what rounding leaves is the input's
        assert_accurate(case, laid_out(sample, layout))


@pytest.mark.parametrize("layout", [every_second, transposed, broadcast])
def test_any_layout_of_gradients(differentiable_kernel: Case, layout: Callable[[Tensor], Tensor]) -> None:
    case = differentiable_kernel
    for sample in case.differentiable_samples(torch.float32):
        output = case(*sample.args, **sample.kwargs)
        grad_outputs = [layout(grad_output) for grad_output in random_gradients(output)]
        expected = gradients(case.op.reference, sample, grad_outputs)
        assert error(gradients(case, sample, grad_outputs), expected) <= 1e-5


def test_samples_include_empty_tensors(case: Case) -> None:
    assert any(tensor.numel() == 0 for sample in case.samples(case.dtype) for tensor in tensors(sample))


def test_the_backend_named_is_the_one_that_runs(case: Case) -> None:
    with RawCalls() as raw:
        for sample in case.samples(case.dtype, requires_grad=True):
            output = total(case(*sample.args, **sample.kwargs))
            if output.requires_grad:
                output.backward()
    if case.backend == "reference":
        assert raw.calls == []
        return
    overload = "triton" if case.backend == "triton" else "default"
    assert raw.calls and {name.split(".")[1] for name in raw.names()} == {overload}
    if case.is_differentiable():
        names = set(raw.names())
        forward, backward = (set(of(case.op.name, overload)) for of in (forward_names, backward_names))
        assert names <= forward | backward and f"{case.op.name}_fwd.{overload}" in names and names & backward


def test_outputs_are_contiguous(case: Case) -> None:
    for sample in case.samples(torch.float32):
        strided = map_tensors(transposed, sample)
        for output in results(case(*strided.args, **strided.kwargs)):
            is_new = all(output is not tensor for tensor in tensors(strided))
            if is_new and case.backend != "reference" and "dim" not in sample.kwargs:
                if case.op.name in ("relative_attention", "rotary_embedding"):
                    output = output.transpose(1, 2)  # heads are neighbours, as the projection after it wants them
                assert output.is_contiguous()


def test_inputs_and_incoming_gradients_are_not_written(case: Case) -> None:
    for sample in case.samples(torch.float32, requires_grad=True):
        before = [tensor.detach().clone() for tensor in tensors(sample)]
        versions = [tensor._version for tensor in tensors(sample)]
        outputs = results(case(*sample.args, **sample.kwargs))
        if outputs[0].requires_grad:
            grad_outputs = random_gradients(tuple(outputs))
            grads_before = [grad_output.clone() for grad_output in grad_outputs]
            torch.autograd.backward(outputs, grad_outputs)
            for grad_output, grad_before in zip(grad_outputs, grads_before, strict=True):
                assert torch.equal(grad_output, grad_before) and grad_output._version == 0
        for tensor, value, version in zip(tensors(sample), before, versions, strict=True):
            assert torch.equal(tensor, value) and tensor._version == version


def test_gradcheck_and_gradgradcheck(differentiable_case: Case) -> None:
    assert_derivatives(differentiable_case)


def test_a_gradient_only_where_one_is_required(differentiable_case: Case) -> None:
    case = differentiable_case
    for sample in case.differentiable_samples(torch.float32):
        for chosen in (tensor for tensor in tensors(sample) if tensor.requires_grad):
            only = map_tensors(lambda tensor, chosen=chosen: tensor.detach().requires_grad_(tensor is chosen), sample)
            (input,) = (tensor for tensor in tensors(only) if tensor.requires_grad)
            total(case(*only.args, **only.kwargs)).backward()
            assert input.grad is not None and input.grad.shape == input.shape
            assert all(tensor.grad is None for tensor in tensors(only) if tensor is not input)


def signature(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that opcheck can tell calls apart by: no rule of an op depends on the numbers in a tensor."""
    leaves = tree_leaves(args)
    return op, *((v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v for v in leaves)


def raw_calls(case: Case, dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...]]]:
    """One call of each kind that the raw ops of `case` are given by its samples, with and without gradients."""
    with RawCalls() as raw:
        for sample in case.samples(dtype, requires_grad=True):
            if any(tensor.shape[-1] == 0 for tensor in tensors(sample)):
                continue  # the statistics of no columns are NaN, which opcheck holds unequal to itself
            output = total(case(*sample.args, **sample.kwargs))
            if output.requires_grad:
                output.backward()
            with torch.no_grad():  # where other raw ops may run
                case(*sample.args, **sample.kwargs)
    calls = {signature(op, args): (op, tree_map_only(Tensor, Tensor.detach, args)) for op, args in raw.calls}
    return list(calls.values())


def test_raw_ops_pass_torch_s_opcheck(case: Case) -> None:
    checked: Counter[Any] = Counter()
    for op, args in raw_calls(case, torch.float32):
        checked[op] += 1
        # Of an interpreted kernel two calls: opcheck runs each several times.
        if not TRITON_INTERPRETED or checked[op] <= 2:
            # The answer to a question may depend on addresses, which tensors of a trace do not have. A trace takes
            # a third of a second, and depends on little but which tensors there are.
            is_traced = checked[op] <= 2 and not answers_a_question(op)
            tests = OPCHECK_TESTS if is_traced else ("test_schema", "test_faketensor")
            torch.library.opcheck(op, args, test_utils=tests)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_fakes_have_the_dtypes_of_what_kernels_return(case: Case, dtype: torch.dtype) -> None:
    """Of statistics too, whose dtype is not the input's in half precision."""
    for op, args in raw_calls(case, dtype):
        torch.library.opcheck(op, args, test_utils="test_faketensor")


def test_compiles_into_one_graph(case: Case) -> None:
    assert_one_graph(case)


def test_compiled_training_runs_the_raw_backward(differentiable_case: Case) -> None:
    case = differentiable_case
    for sample in case.differentiable_samples(torch.float32)[: 1 if case.backend == "reference" else 2]:
        torch._dynamo.reset()
        graphs = Graphs()
        compiled = torch.compile(case.op.function, fullgraph=True, backend=graphs.compiled)
        grad_outputs = random_gradients(case(*sample.args, **sample.kwargs))

        def pinned(*args: Any, compiled: Callable = compiled, **kwargs: Any) -> Tensor:
            return compiled(*args, **kwargs, backend=case.backend)

        assert error(gradients(pinned, sample, grad_outputs), gradients(case, sample, grad_outputs)) <= 1e-5
        if case.backend != "reference":
            overload = "triton" if case.backend == "triton" else "default"
            *_, last = names = forward_names(case.op.name, overload)
            assert graphs.forward in ([last], list(names))
            assert graphs.backward in [[name] for name in backward_names(case.op.name, overload)]


@pytest.mark.slow
def test_compiles_with_inductor(case: Case) -> None:
    for sample in case.samples(torch.float32, requires_grad=True)[:2]:
        torch._dynamo.reset()
        compiled = torch.compile(case.op.function, fullgraph=True)
        output = compiled(*sample.args, **sample.kwargs, backend=case.backend)
        torch.testing.assert_close(output, case(*sample.args, **sample.kwargs))
        if total(output).requires_grad:
            total(output).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast_gives_what_the_reference_gives(case: Case, dtype: torch.dtype) -> None:
    """And that is no further from float64 than autocast's dtype rounds."""
    for sample in case.samples(dtype):
        judge = map_tensors(to_float64, sample)
        with torch.autocast(case.device.type, torch.bfloat16):
            outputs = results(case(*sample.args, **sample.kwargs))
            plains = results(case.op.reference(*sample.args, **sample.kwargs))
        exacts = results(case.op.reference(*judge.args, **judge.kwargs))
        unrounded = results(case.op.reference(*sample.args, **sample.kwargs))
        for output, plain, exact, other in zip(outputs, plains, exacts, unrounded, strict=True):
            assert output.dtype == plain.dtype
            # Sums are in another order.
            assert error([output], [plain]) <= 4 * rounding(output.dtype)
            assert error([output], [exact]) <= 2 * error([other], [exact]) + rounding(torch.bfloat16)


def variants(tensor: Tensor) -> Tensor:
    """[3, *shape]: the tensor and two others of its values."""
    return torch.stack([tensor, tensor.flip(-1), tensor.roll(1, -1)])


def test_vmap_gives_the_stacked_results(case: Case) -> None:
    for sample in case.samples(torch.float32):
        function, inputs = of_tensors(case, sample)
        if any(tensor.numel() == 0 for tensor in inputs):
            continue
        for batched in {(True,) * len(inputs), (True,) + (False,) * (len(inputs) - 1)}:
            values = [variants(t) if is_batched else t for t, is_batched in zip(inputs, batched, strict=True)]
            in_dims = tuple(0 if is_batched else None for is_batched in batched)
            expected = [
                function(*(value if dim is None else value[i] for value, dim in zip(values, in_dims, strict=True)))
                for i in range(3)
            ]
            try:
                output = torch.func.vmap(function, in_dims)(*values)
            except BackendError:
                assert case.op.name not in {parameter.values[0].op.name for parameter in differentiable_cases()}
            else:
                # Of a batch a matrix product adds up in another order, on some processors also in other pieces.
                stacked = map(torch.stack, zip(*map(results, expected), strict=True))
                assert error(results(output), list(stacked)) <= 8 * rounding(torch.float32)


def test_gradients_of_torch_func_equal_the_reference_s(differentiable_kernel: Case) -> None:
    case = differentiable_kernel
    for sample in case.differentiable_samples(torch.float64):
        function, inputs = of_tensors(case, sample)
        if any(tensor.numel() == 0 for tensor in inputs):
            continue
        plain, _ = of_tensors(Case(case.op, "reference", case.device), sample)
        values = [variants(tensor.detach()) for tensor in inputs]
        every_input = tuple(index for index, tensor in enumerate(inputs) if tensor.is_floating_point())

        def waves(output: Tensor | tuple[Tensor, ...]) -> Tensor:
            return total(tuple(tensor.sin() for tensor in results(output)))

        def grad_in_vmap(f: Callable, argnums: tuple[int, ...] = every_input) -> Callable:
            return torch.func.vmap(torch.func.grad(lambda *x: waves(f(*x)), argnums))

        def vmap_in_grad(f: Callable, argnums: tuple[int, ...] = every_input) -> Callable:
            return torch.func.grad(lambda *x: waves(torch.func.vmap(f)(*x)), argnums)

        for transform in (grad_in_vmap, vmap_in_grad):
            torch.testing.assert_close(transform(function)(*values), transform(plain)(*values))


def test_forward_mode_runs_the_reference_of_ops_with_gradients(differentiable_case: Case) -> None:
    case = differentiable_case
    plain = Case(case.op, "reference", case.device)
    for sample in case.differentiable_samples(torch.float64):
        function, inputs = of_tensors(case, sample)
        reference, _ = of_tensors(plain, sample)
        directions = [torch.randn_like(tensor) if tensor.is_floating_point() else None for tensor in inputs]

        def tangents(function: Callable, inputs: Any = inputs, directions: Any = directions) -> list[Tensor | None]:
            with torch.no_grad(), forward_ad.dual_level():
                pairs = zip(inputs, directions, strict=True)
                duals = [value if d is None else forward_ad.make_dual(value, d) for value, d in pairs]
                return [forward_ad.unpack_dual(output).tangent for output in results(function(*duals))]

        def forwards(*values: Tensor, reference: Callable = reference) -> tuple[Tensor, ...]:
            return tuple(results(reference(*values)))

        found = tangents(function)
        # By two backward passes, which no forward-mode formula has part in.
        _, expected = (
            torch.autograd.functional.jvp(
                forwards,
                inputs,
                tuple(torch.zeros_like(v) if d is None else d for v, d in zip(inputs, directions, strict=True)),
            )
            if all(tensor.is_floating_point() for tensor in inputs)
            else (None, tangents(reference))
        )
        assert all(tangent is not None for tangent in found)
        assert error(found, results(expected)) <= 1e-9


def test_forward_mode_is_refused_by_kernels_without_gradients(case: Case) -> None:
    if case.op.name in {parameter.values[0].op.name for parameter in differentiable_cases()}:
        pytest.skip("it has gradients")
    sample = (case.samples(torch.float64) or case.samples(case.dtype))[0]
    function, inputs = of_tensors(case, sample)
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) if t.is_floating_point() else t for t in inputs]
        if case.backend == "reference":
            function(*duals)
        else:
            with pytest.raises(BackendError):
                function(*duals)


def test_inference_mode_gives_the_same_values(case: Case) -> None:
    for sample in case.samples(torch.float32, requires_grad=True):
        with torch.inference_mode():
            outputs = results(case(*sample.args, **sample.kwargs))
        for output, expected in zip(outputs, results(case(*sample.args, **sample.kwargs)), strict=True):
            assert not output.requires_grad
            torch.testing.assert_close(output.clone(), expected.detach())


def test_gradients_through_checkpointing_are_the_same_bits(differentiable_case: Case) -> None:
    case = differentiable_case
    for sample in case.differentiable_samples(torch.float32):
        grad_outputs = random_gradients(case(*sample.args, **sample.kwargs))

        def rematerialised(*args: Any, **kwargs: Any) -> Tensor:
            return checkpoint(case, *args, use_reentrant=False, **kwargs)

        expected = gradients(case, sample, grad_outputs)
        assert error(gradients(rematerialised, sample, grad_outputs), expected) == 0


def test_function_can_be_pickled_and_copied(case: Case) -> None:
    assert pickle.loads(pickle.dumps(case.op.function)) is case.op.function
    assert copy.deepcopy(case.op.function) is case.op.function


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.slow),
        pytest.param(torch.float64, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shape_and_dtype_on_the_meta_device(dtype: torch.dtype) -> None:
    checked = 0
    for name in functional_names():
        op = registry.get(name)
        (reference,) = op.candidates("reference")
        for sample in op.sample_inputs(torch.device("cpu"), dtype, False) if dtype in reference.dtypes else ():
            on_meta = map_tensors(lambda tensor: tensor.to("meta"), sample)
            expecteds = results(op.reference(*sample.args, **sample.kwargs))
            outputs = results(op.function(*on_meta.args, **on_meta.kwargs))
            for output, expected in zip(outputs, expecteds, strict=True):
                assert (output.shape, output.dtype, output.device.type) == (expected.shape, expected.dtype, "meta")
                checked += 1
    assert checked > 50
