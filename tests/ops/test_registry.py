import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fuseopt import ops
from fuseopt.build import loader
from fuseopt.errors import BackendError
from fuseopt.ops import registry
from tests.ops.cases import Case, RawCalls
from tests.ops.contract import assert_accurate, assert_derivatives, assert_one_graph

CPU = torch.device("cpu")


class Buildable(registry.Backend):
    """A backend that has to be built first."""

    def not_supported_reasons(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> list[str]:
        return super().not_supported_reasons(device, dtypes) or ([] if may_build else ["is not built yet"])


def square(input: Tensor, *, backend: str = "auto") -> Tensor:
    chosen = registry.pick("square", backend, input.device, (input.dtype,))
    return input * input if chosen == "buildable" else input.square()


def square_samples(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    for shape in ((3, 4), (0, 4)):
        yield registry.SampleInput((torch.randn(shape, device=device, dtype=dtype, requires_grad=requires_grad),))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> registry.Op:
    """An op registered from outside the package, for one test."""
    monkeypatch.setattr(registry, "_OPS", dict(registry._OPS))
    monkeypatch.setattr(registry, "_CHOSEN", {})
    backends = (Buildable("buildable", (torch.float32,)), registry.REFERENCE)
    return registry.register(registry.Op("square", square, torch.square, square_samples, backends))


def test_an_op_from_outside_keeps_the_contract(toy: registry.Op) -> None:
    assert registry.get("square") is toy and "square" in registry.names()
    case = Case(toy, "reference", CPU)
    for sample in case.samples(torch.bfloat16, requires_grad=True):
        assert_accurate(case, sample)
    assert_derivatives(case)
    assert_one_graph(case)


def test_auto_passes_over_what_cannot_run_and_says_why(toy: registry.Op) -> None:
    assert toy.choose("auto", CPU, [torch.float32]) == registry.Choice("reference", {"buildable": ["is not built yet"]})
    assert toy.choose("auto", CPU, [torch.float32], may_build=True) == registry.Choice("buildable", {})
    assert toy.choose("auto", CPU, [torch.float16], may_build=True).refused == {
        "buildable": ["does not take torch.float16"]
    }


def test_a_named_backend_that_cannot_run_raises(toy: registry.Op) -> None:
    with pytest.raises(BackendError, match=r"square cannot run on cpu with torch.float32 by buildable: is not built"):
        square(torch.ones(2), backend="buildable")
    with pytest.raises(BackendError, match="no backend 'cdua'; it has auto, buildable, reference"):
        square(torch.ones(2), backend="cdua")
    with pytest.raises(BackendError, match=r"(?s)buildable: does not.*reference: does not take torch.int64"):
        square(torch.ones(2, dtype=torch.int64))


class Absent(registry.Backend):
    """For the CPU, and not installed."""

    def not_supported_reasons(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> list[str]:
        return ["is not installed"]


def test_a_settled_choice_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loader.load("cpu")
    monkeypatch.setattr(registry, "_OPS", dict(registry._OPS))
    monkeypatch.setattr(registry, "_CHOSEN", {})
    kernel, absent = registry.Backend("kernel"), Absent("absent")
    for name, backends in (("settled", (kernel, absent)), ("open", (absent, kernel))):
        registry.register(registry.Op(name, torch.square, torch.square, square_samples, backends))
    overloads = {"kernel": torch.ops.aten.neg.default}
    settled, still_open = (registry.Direct(name, overloads) for name in ("settled", "open"))
    for direct in (settled, still_open):
        assert direct.run("auto", torch.ones(2)).tolist() == [-1, -1]
    monkeypatch.setattr(registry, "pick", lambda *_: pytest.fail("asked again"))
    assert settled.run("auto", torch.ones(2)).tolist() == [-1, -1]
    # A better backend is missing, and may come yet.
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        still_open.run("auto", torch.ones(2))


@pytest.mark.parametrize("op", [registry.get(name) for name in registry.names()], ids=lambda op: op.name)
def test_every_op_says_why_it_cannot_run_on_another_device(op: registry.Op) -> None:
    first = op.backends[0].name
    own, other = ("cpu", torch.device("cuda")) if first == "cpu" else ("cuda", CPU)
    with pytest.raises(BackendError, match=f"{first}: runs on {own} tensors, not on {other.type}"):
        op.choose(first, other, [torch.float32])
    assert op.choose("auto", torch.device("meta"), [torch.float32]).backend == "reference"


def test_an_op_without_a_kernel_for_a_backend_falls_through_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader.load("cpu").status == "loaded"
    monkeypatch.setattr(registry, "_OPS", dict(registry._OPS))
    monkeypatch.setattr(registry, "_CHOSEN", {})
    with torch.library._scoped_library("fuseopt", "FRAGMENT") as library:
        library.define("cube(Tensor input) -> Tensor")

        def cube(input: Tensor, *, backend: str = "auto") -> Tensor:
            chosen = registry.pick("cube", backend, input.device, (input.dtype,))
            return input**3 if chosen == "reference" else torch.ops.fuseopt.cube(input)

        def reference(input: Tensor) -> Tensor:
            return input**3

        op = registry.Op("cube", cube, reference, square_samples, (registry.CPU, registry.REFERENCE))
        registry.register(op)
        reason = "its native library has no kernel of cube"
        assert op.choose("auto", CPU, [torch.float32]) == registry.Choice("reference", {"cpu": [reason]})
        assert cube(torch.full((2,), 2.0)).tolist() == [8, 8]
        with pytest.raises(BackendError, match=f"cpu: {reason}"):
            cube(torch.ones(2), backend="cpu")
        library.impl("cube", lambda input: input**3 + 1, "CPU")
        assert op.choose("auto", CPU, [torch.float32]).backend == "cpu"


@pytest.mark.parametrize("op", [registry.get(name) for name in registry.names()], ids=lambda op: op.name)
def test_the_raw_ops_that_an_op_names_exist(op: registry.Op) -> None:
    names = op.raw or (op.name,)
    has_native = any(isinstance(backend, registry.NativeBackend) for backend in op.backends)
    assert not has_native or all(torch._C._dispatch_has_kernel(f"fuseopt::{name}") for name in names)


def test_names_are_taken_once(toy: registry.Op) -> None:
    with pytest.raises(ValueError, match="'square' is registered already"):
        registry.register(toy)
    with pytest.raises(KeyError, match=r"no op named 'sqare'; registered: .*square"):
        registry.get("sqare")


def test_auto_takes_up_a_native_library_loaded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    if loader.load("cpu").status != "loaded":
        pytest.skip(f"no native library: {loader.load('cpu').reason}")
    monkeypatch.setattr(registry, "_CHOSEN", {})
    gelu = sys.modules["fuseopt.ops.gelu"]
    monkeypatch.setattr(gelu, "_DIRECT", registry.Direct("gelu", gelu.FWD))
    absent = loader.LibraryState("cpu", "absent", None, None, "hidden by this test", 0.0)
    input = torch.randn(2, 8)
    with monkeypatch.context() as hidden:
        hidden.setattr(loader, "load", lambda kind, *, build=True: absent)
        with RawCalls() as raw:
            ops.gelu(input)
        assert raw.names() == []
        with pytest.raises(BackendError, match="hidden by this test"):
            ops.gelu(input, backend="cpu")
    monkeypatch.setattr(torch.ops, "loaded_libraries", torch.ops.loaded_libraries | {"another"})
    with RawCalls() as raw:
        ops.gelu(input)
    assert raw.names() == ["gelu_fwd.default"]


def test_auto_never_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CHOSEN", {})
    gelu = sys.modules["fuseopt.ops.gelu"]
    monkeypatch.setattr(gelu, "_DIRECT", registry.Direct("gelu", gelu.FWD))
    asked = []

    def load(kind: str, *, build: bool = True) -> loader.LibraryState:
        asked.append((kind, build))
        return loader.LibraryState(kind, "buildable", None, None, None, 0.0)

    monkeypatch.setattr(loader, "load", load)
    for _ in range(3):
        ops.gelu(torch.randn(2, 8))
    assert set(asked) == {("cpu", False)} and len(asked) <= 2  # once for each way that a call asks in
