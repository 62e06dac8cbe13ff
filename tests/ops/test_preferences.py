"""The backend that "auto" takes where an op prefers another one for that size, counted in the raw ops that run."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseopt import ops
from fuseopt.bench.harness.op_cases import OpCase, auto_choice
from fuseopt.build import loader
from fuseopt.ops import registry
from fuseopt.ops.preferences import Preference, by_size
from tests.ops.cases import Graphs, RawCalls, error

CPU = torch.device("cpu")
PREFERENCES = [(op, preference) for op in map(registry.get, registry.names()) for preference in op.preferences]
of_every_preference = pytest.mark.parametrize(
    ("op", "preference"),
    PREFERENCES,
    ids=[f"{op.name}, {preference}, {preference.dtype}" for op, preference in PREFERENCES],
)


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., registry.Op]:
    """`prefer(*preferences)`: those of `rms_norm`, for one test, on any device."""
    monkeypatch.setattr(registry, "_OPS", dict(registry._OPS))
    monkeypatch.setattr(registry, "_CHOSEN", {})
    monkeypatch.setattr(Preference, "holds_on", lambda self, device: True)
    module = sys.modules["fuseopt.ops.rms_norm"]
    monkeypatch.setattr(module, "_DIRECT", registry.Direct("rms_norm", module.INFERENCE))

    def make(*preferences: Preference) -> registry.Op:
        op = dataclasses.replace(registry.get("rms_norm"), preferences=preferences)
        registry._OPS["rms_norm"] = op
        return op

    return make


def ran(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    with RawCalls() as raw:
        function(*arguments, **options)
    return raw.names()


def test_limits_are_inclusive_and_each_direction_has_its_own() -> None:
    limits = [Preference("triton", backward, torch.float32, (4, 8), 24).limits for backward in (False, True)]
    assert by_size("cuda", limits, torch.Size((3, 8))) == ("triton", "triton")
    assert by_size("cuda", limits, torch.Size((2, 3, 4))) == ("triton", "triton")
    for shape in ((8, 3), (3, 9), (5, 4)):
        assert by_size("cuda", limits, torch.Size(shape)) == ("cuda", "cuda")
    assert by_size("cuda", limits[1:], torch.Size((3, 8))) == ("cuda", "triton")
    assert by_size("cuda", limits[:1], torch.Size((3, 8))) == ("triton", "cuda")
    assert by_size("cuda", limits, torch.Size(())) == ("cuda", "cuda")


def test_it_holds_on_the_gpus_that_it_was_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    preference = Preference("triton", True, torch.bfloat16, (768, 768), 2**24)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert preference.holds_on(torch.device("cuda:1")) and not preference.holds_on(CPU)
    assert dataclasses.replace(preference, gpu="H100").holds_on(torch.device("cuda"))
    assert not dataclasses.replace(preference, gpu="H200").holds_on(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not preference.holds_on(torch.device("cuda"))


def test_other_dtypes_and_backends_that_cannot_run_are_not_preferred(prefer: Callable[..., registry.Op]) -> None:
    half = Preference("reference", False, torch.bfloat16, (1, 8), 1)
    op = prefer(half, Preference("cuda", True, torch.bfloat16, (1, 8), 1))
    assert op.preferred("auto", CPU, [torch.bfloat16] * 2) == [half]  # "cuda" runs on no CPU
    assert op.preferred("auto", CPU, [torch.bfloat16, torch.float32]) == []
    assert op.preferred("reference", CPU, [torch.bfloat16]) == []


@pytest.mark.interpreter
def test_a_preferred_library_may_be_loaded_later(
    prefer: Callable[..., registry.Op], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process Triton's interpreter comes first on a CPU."""
    assert loader.load("cpu").status == "loaded"
    prefer(Preference("cpu", True, torch.float32, (8, 8), 1))
    absent = loader.LibraryState("cpu", "absent", None, None, "hidden by this test", 0.0)
    asked = ("rms_norm", "auto", CPU, (torch.float32,), torch.Size((4, 8)))
    with monkeypatch.context() as hidden:
        hidden.setattr(loader, "load", lambda kind, *, build=True: absent)
        assert registry.pick_by_size(*asked)[1] != "cpu"
    monkeypatch.setattr(torch.ops, "loaded_libraries", torch.ops.loaded_libraries | {"another"})
    assert registry.pick_by_size(*asked)[1] == "cpu"


def test_a_forward_by_size(prefer: Callable[..., registry.Op], monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader.load("cpu").status == "loaded"
    prefer(Preference("reference", False, torch.float32, (8, 8), 32))
    weight = torch.ones(8)
    own = ["rms_norm.default"]
    few, many, narrow = torch.randn(3, 8), torch.randn(4, 8), torch.randn(40, 4)
    for _ in range(2):  # the first calls settle what the next ones go by
        assert ran(ops.rms_norm, few, weight) == own
        assert ran(ops.rms_norm, many, weight) == []
        assert ran(ops.rms_norm, many, weight, backend="cpu") == own
        assert ran(ops.rms_norm, many.bfloat16(), weight.bfloat16()) == own
        assert ran(ops.rms_norm, narrow) == own
    torch.testing.assert_close(ops.rms_norm(many, weight), ops.rms_norm(many, weight, backend="cpu"))
    monkeypatch.setattr(registry, "pick_by_size", lambda *_: pytest.fail("chosen again"))
    assert ran(ops.rms_norm, few, weight) == own
    assert ran(ops.rms_norm, many, weight, backend="cpu") == own


def test_a_forward_by_size_without_the_library_for_python(
    prefer: Callable[..., registry.Op], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(Preference("reference", False, torch.float32, (8, 8), 32))
    monkeypatch.setattr(loader, "_python_library", None)
    assert ran(ops.rms_norm, torch.randn(3, 8)) == ["rms_norm.default"]
    assert ran(ops.rms_norm, torch.randn(4, 8)) == []
    assert ran(ops.rms_norm, torch.randn(5, 4, 4)) == ["rms_norm.default"]


def test_a_compiled_call_by_size(prefer: Callable[..., registry.Op]) -> None:
    prefer(Preference("reference", False, torch.float32, (8, 8), 32))
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(ops.rms_norm, backend=graphs.compiled, fullgraph=True, dynamic=True)
    for rows, names in ((3, ["rms_norm.default"]), (4, []), (5, []), (2, [])):
        input = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(input), ops.rms_norm(input, backend="reference"))
        # A graph for each side of the limit, whatever else changes.
        assert graphs.forward == names
        graphs.forward.clear()


def test_the_bench_marks_what_auto_takes(prefer: Callable[..., registry.Op]) -> None:
    op = prefer(
        Preference("reference", False, torch.float32, (8, 8), 32),
        Preference("reference", True, torch.float32, (4, 4), 8),
    )
    timed = op.benchmarks[0]
    marked = {
        (shape, backward): auto_choice(OpCase(op, timed, shape, torch.float32, backward), CPU)
        for shape in ("3x8", "4x8", "2x4")
        for backward in (False, True)
    }
    taken = [case for case, backend in marked.items() if backend == "reference"]
    assert taken == [("4x8", False), ("2x4", True)]


def gradients(rows: int, backend: str = "auto") -> list[Tensor]:
    torch.manual_seed(0)
    input, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    output = ops.rms_norm(input, weight, backend=backend)
    return list(torch.autograd.grad(output, (input, weight), torch.randn_like(output)))


@pytest.mark.interpreter
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_forward_and_backward_by_different_backends(prefer: Callable[..., registry.Op], backward: bool) -> None:
    """In this process Triton's interpreter comes first on a CPU."""
    assert loader.load("cpu").status == "loaded"
    prefer(Preference("cpu", backward, torch.float32, (8, 8), 32))
    by_triton = ["rms_norm_fwd.triton", "rms_norm_bwd.triton"]
    by_both = list(by_triton)
    by_both[backward] = by_both[backward].replace("triton", "default")
    assert ran(gradients, 3) == by_triton
    assert ran(gradients, 4) == by_both
    assert ran(gradients, 4, backend="triton") == by_triton
    assert error(gradients(4), gradients(4, backend="reference")) <= 1e-6
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(ops.rms_norm, backend=graphs.compiled, fullgraph=True)
    output = compiled(torch.randn(4, 8, requires_grad=True), torch.randn(8))
    output.sum().backward()
    assert [*graphs.forward, *graphs.backward] == by_both


@pytest.mark.gpu
@of_every_preference
def test_preferences_are_honoured(op: registry.Op, preference: Preference) -> None:
    device = torch.device("cuda", 0)
    if not preference.holds_on(device):
        pytest.skip(f"measured on GPUs of compute capability {preference.capability}, {preference.gpu or 'any'}")

    def last_ran(elements: int, backend: str) -> str:
        rows = -(-elements // preference.columns[0])
        sample = op.benchmarks[0].make(device, preference.dtype, rows, preference.columns[0])
        with torch.set_grad_enabled(preference.backward), RawCalls() as raw:
            output = op.function(*sample.args, **sample.kwargs, backend=backend)
            if preference.backward:
                output.sum().backward()
        return raw.names()[-1].rpartition(".")[2]

    overload = {"triton": "triton"}.get(preference.backend, "default")
    assert last_ran(preference.elements, "auto") == overload
    assert last_ran(preference.elements, op.backends[0].name) == "default"
    assert last_ran(preference.elements - preference.columns[0], "auto") == "default"
