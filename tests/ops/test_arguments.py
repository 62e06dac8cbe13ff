"""Raw ops with each tensor on another device, of another dtype or strides give the right result or a clear error."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fuseopt.build import loader
from fuseopt.ops import registry
from fuseopt.ops.library import TRITON_INTERPRETED
from tests.ops.cases import tensors
from tests.ops.recorded_calls import TARGETS, Call, Target, laid_out_alike, recorded

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)


def not_contiguous(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def kernels(target: Target) -> set[str]:
    """The raw ops with a kernel of their own."""
    overload = ".triton" if target.backend == "triton" else ""
    return {
        name
        for name in RAW_OPS
        if torch._C._dispatch_has_kernel(name + overload)
        and torch._C._dispatch_has_kernel_for_dispatch_key(name + overload, target.device.upper())
    }


RAW_OPS = sorted({schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fuseopt::")})
# A call of an attention's backward takes half a second to interpret.
every_raw_op = pytest.mark.parametrize(
    "raw",
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.startswith("fuseopt::relative_attention_bwd"))
        for name in RAW_OPS
    ],
)


MARKS = {"interpreted": [pytest.mark.interpreter], "cuda": [pytest.mark.gpu]}
MARKS["triton"] = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in TARGETS], scope="module")
def target(request: pytest.FixtureRequest) -> Target:
    if (request.param == "interpreted") != TRITON_INTERPRETED:
        pytest.skip("the interpreter has a process of its own")
    target = TARGETS[request.param]
    if target.backend in loader.KINDS:
        state = loader.load(target.backend)
        assert state.status == "loaded", state.reason
    return target


def calls_of(name: str, target: Target) -> list[Call]:
    return recorded(target).get(name) or pytest.skip("no kernel for this device")


def test_every_kernel_is_called(target: Target) -> None:
    assert kernels(target) <= recorded(target).keys()


def describe(call: Call, name: str, change: str) -> str:
    return f"{call.op}: {name} {change}"


def check(
    call: Call, changed: Call, what: str, *, named: str | None = None, wanted: list[Tensor] | None = None
) -> None:
    """Asserts that `changed` gives the result of `call`, or raises an error that names op or argument `named`.

    Args:
        wanted: the result of `call`, where it is known.
    """
    try:
        actual = changed.run()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        text = str(error)
        assert "CUDA error" not in text and "CUDA failed" not in text, f"{what}: {text}"
        if named is not None and changed.op._overloadname != "triton":
            assert named in text or "fuseopt::" in text, f"{what}: {text}"
        return
    tolerance = 16 * max(coarseness(tensor.dtype) for each in (call, changed) for _, _, tensor in each.tensor_places())
    for value, expected in zip(actual, call.run() if wanted is None else wanted, strict=True):
        value, expected = value.double(), expected.double()
        scale = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else 1.0
        torch.testing.assert_close(
            value, expected, rtol=0, atol=tolerance * max(float(scale), 1e-2), equal_nan=True, msg=what
        )


def coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


@every_raw_op
def test_a_tensor_on_another_device_is_refused(raw: str, target: Target) -> None:
    elsewhere = "cpu" if target.device == "cuda" else "meta"
    for call in calls_of(raw, target):
        places = list(call.tensor_places())
        for name, place, tensor in places if len(places) > 1 else ():
            with pytest.raises(RuntimeError, match=f"{name} must be|tensors must be on one device|same device"):
                call.replaced(place, tensor.to(elsewhere)).run()


@every_raw_op
def test_another_dtype_gives_the_same_or_is_refused(raw: str, target: Target) -> None:
    for call in calls_of(raw, target):
        for name, place, tensor in call.tensor_places():
            for dtype in DTYPES:
                is_other_kind_of_mask = (
                    "relative_attention" in raw and name == "mask" and not tensor.is_floating_point()
                )
                if dtype == tensor.dtype or is_other_kind_of_mask:
                    continue
                # With values that both dtypes can represent.
                changed = tensor.to(dtype)
                same = call.replaced(place, changed.to(tensor.dtype))
                what = describe(call, name, f"of {dtype}")
                check(same, call.replaced(place, changed), what, named=name)


@every_raw_op
def test_an_unaligned_view_gives_the_same_or_is_refused(raw: str, target: Target) -> None:
    for call in calls_of(raw, target):
        wanted = call.run()
        for name, place, tensor in call.tensor_places():
            changed = call.replaced(place, laid_out_alike(tensor, offset=1))
            check(call, changed, describe(call, name, "unaligned"), wanted=wanted)


@every_raw_op
def test_a_view_that_is_not_contiguous_gives_the_same_or_is_refused(raw: str, target: Target) -> None:
    for call in calls_of(raw, target):
        wanted = call.run()
        for name, place, tensor in call.tensor_places():
            if tensor.numel() > 1:
                changed = call.replaced(place, not_contiguous(tensor))
                check(call, changed, describe(call, name, "not contiguous"), wanted=wanted)


IN_PLACE = [name for name in RAW_OPS if getattr(torch.ops.fuseopt, name.split("::")[1]).default._schema.is_mutable]


@pytest.mark.parametrize("raw", IN_PLACE)
def test_versions_of_what_is_written_to_are_counted_up(raw: str, target: Target) -> None:
    for call in calls_of(raw, target):
        assert_counts_versions_up(call._replace(arguments=tree_map_only(Tensor, laid_out_alike, call.arguments)))


def assert_counts_versions_up(call: Call) -> None:
    tensors_before = {place: tensor._version for _, place, tensor in call.tensor_places()}
    call.op(*call.arguments)
    written = {argument.name for argument in call.op._schema.arguments if argument.is_write}
    for name, place, tensor in call.tensor_places():
        assert tensor._version - tensors_before[place] == (name in written), name


@pytest.mark.parametrize("raw", IN_PLACE)
def test_versions_are_counted_up_whatever_the_kernel(raw: str) -> None:
    """By the schema, for a device that has no kernel of the op yet."""
    op = getattr(torch.ops.fuseopt, raw.split("::")[1]).default
    if torch._C._dispatch_has_kernel_for_dispatch_key(raw, "CPU"):
        pytest.skip("its own kernel is loaded, and tested above")
    values = {"Tensor": torch.zeros(1), "List[Tensor]": [torch.zeros(1), torch.zeros(1)], "int": 0, "float": 0.0}
    values |= {"bool": False, "str": ""}

    def value_of(argument: torch.Argument) -> Any:
        value = values[
            str(argument.type).removeprefix("Optional[").removesuffix("]" * ("Optional" in str(argument.type)))
        ]
        return tree_map_only(Tensor, torch.clone, value)

    result = torch.zeros(1) if op._schema.returns else None
    with torch.library._scoped_library("fuseopt", "IMPL") as library:
        library.impl(raw.split("::")[1], lambda *arguments: result, "CPU")
        assert_counts_versions_up(Call(op, tuple(value_of(argument) for argument in op._schema.arguments)))
        with torch.inference_mode():  # whose tensors have no versions
            op(*(value_of(argument) for argument in op._schema.arguments))


@pytest.mark.parametrize("name", [name for name in registry.names() if registry.get(name).in_place])
def test_versions_are_counted_up_by_the_reference(name: str) -> None:
    op = registry.get(name)
    for sample in op.sample_inputs(torch.device("cpu"), torch.float32, False):
        before = [(tensor, tensor.clone()) for tensor in tensors(sample)]
        op.function(*sample.args, **sample.kwargs, backend="reference")
        assert all(tensor._version > 0 for tensor, old in before if not torch.equal(tensor, old))


def test_a_backward_through_what_was_written_over_raises() -> None:
    assert loader.load("cpu").status == "loaded"
    scores = torch.randn(2, 8, requires_grad=True)
    probabilities = scores.softmax(-1)
    with torch.no_grad():
        torch.ops.fuseopt.process_logits_(torch.randint(0, 8, (2, 5)), probabilities, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probabilities.sum().backward()
