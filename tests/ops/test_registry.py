import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseopt import native, ops
from fuseopt.errors import BackendError
from fuseopt.ops import registry
from tests.ops import test_contract as contract
from tests.ops.cases import Case, RawCalls

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
    monkeypatch.setattr(registry, "_PICKED", {})
    backends = (Buildable("buildable", (torch.float32,)), registry.REFERENCE)
    return registry.register(registry.Op("square", square, torch.square, square_samples, backends))


def test_an_op_from_outside_keeps_the_contract(toy: registry.Op) -> None:
    assert registry.get("square") is toy and "square" in registry.names()
    case = Case(toy, "reference", CPU)
    contract.test_output_and_gradients_against_float64(case, torch.bfloat16)
    contract.test_gradcheck_and_gradgradcheck(case)
    contract.test_compiles_into_one_graph(case)


def test_auto_passes_over_what_cannot_run_and_says_why(toy: registry.Op) -> None:
    assert toy.choose("auto", CPU, [torch.float32]) == registry.Choice("reference", {"buildable": ["is not built yet"]})
    assert toy.choose("auto", CPU, [torch.float32], may_build=True) == registry.Choice("buildable", {})
    assert toy.choose("auto", CPU, [torch.float16], may_build=True).refused == {
        "buildable": ["does not take torch.float16"]
    }


def test_a_named_backend_that_cannot_run_raises(toy: registry.Op) -> None:
    with pytest.raises(BackendError, match=r"square cannot run on cpu with torch.float32.*\n  buildable: is not built"):
        square(torch.ones(2), backend="buildable")
    with pytest.raises(BackendError, match="no backend 'cdua'; it has auto, buildable, reference"):
        square(torch.ones(2), backend="cdua")
    with pytest.raises(BackendError, match=r"(?s)buildable: does not.*reference: does not take torch.int64"):
        square(torch.ones(2, dtype=torch.int64))


WIDE = "rows are wider than 4"


class Cubing(registry.Backend):
    """Wrong, so that its results tell where it ran."""


class Absent(registry.Backend):
    def not_supported_reasons(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> list[str]:
        return ["is not installed"]


def sizes_of_power(input: Tensor) -> str:
    return WIDE if input.shape[-1] > 4 else ""


def power(input: Tensor, *, backend: str = "auto") -> Tensor:
    chosen = registry.pick("power", backend, input.device, (input.dtype,), sizes_of_power(input))
    return input**3 if chosen == "cubing" else input**2


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> registry.Op:
    """An op with preferences, for one test."""
    monkeypatch.setattr(registry, "_OPS", dict(registry._OPS))
    monkeypatch.setattr(registry, "_PICKED", {})
    cubing, absent = Cubing("cubing"), Absent("absent")
    return registry.register(
        registry.Op(
            "power",
            power,
            torch.square,
            square_samples,
            (registry.REFERENCE, cubing, absent),
            sizes=sizes_of_power,
            preferences=(
                registry.Preference(absent, WIDE, device_type="cpu"),
                registry.Preference(cubing, WIDE, (torch.float32,), "cpu"),
                registry.Preference(cubing, "", device_type="cuda"),
            ),
        )
    )


def test_auto_follows_a_preference_at_its_sizes_and_nowhere_else(sized: registry.Op) -> None:
    narrow, wide = torch.full((2, 3), 2.0), torch.full((2, 5), 2.0)
    assert torch.equal(power(narrow), narrow**2)
    assert torch.equal(power(wide), wide**3)
    assert torch.equal(power(wide, backend="reference"), wide**2)
    assert torch.equal(power(wide.double()), wide.double() ** 2)
    choice = sized.choose("auto", CPU, [torch.float32], WIDE)
    assert choice == registry.Choice("cubing", {"absent": ["is not installed"]})
    assert sized.choose("auto", CPU, [torch.float32]).backend == "reference"
    assert sized.choose("auto", torch.device("meta"), [torch.float32], WIDE).backend == "reference"


def test_a_plan_names_the_preferences_that_will_be_followed(sized: registry.Op) -> None:
    (preference,) = sized.preferred(CPU, [torch.float32])
    assert str(preference) == "cubing where rows are wider than 4: measured faster"
    assert sized.preferred(CPU, [torch.float64]) == []
    assert str(registry.Preference(registry.REFERENCE, WIDE)).startswith("torch's own operation where rows are")


@pytest.mark.parametrize(("name", "small", "large"), [("gelu", (4, 8), (1024, 1024)), ("softmax", (2, 8), (64, 2**18))])
def test_sizes_are_no_guards_of_a_graph(name: str, small: tuple[int, ...], large: tuple[int, ...]) -> None:
    op = registry.get(name)
    assert op.sizes(torch.empty(small, device="meta")) != op.sizes(torch.empty(large, device="meta"))
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(op.function, fullgraph=True, backend=count, dynamic=True)
    for shape in (small, large):
        compiled(torch.empty(shape, device="meta"))
    assert len(graphs) == 1


def test_a_settled_choice_is_looked_up_once(sized: registry.Op, monkeypatch: pytest.MonkeyPatch) -> None:
    native.load("cpu")
    overloads = {"cubing": torch.ops.aten.neg.default}
    direct = registry.Direct("power", overloads)
    assert direct["auto", CPU, torch.float32, WIDE] is overloads["cubing"]._op
    assert direct["auto", CPU, torch.float32, ""] is None
    monkeypatch.setattr(registry, "pick", lambda *_: pytest.fail("asked again"))
    assert direct["auto", CPU, torch.float32, ""] is None
    # A preferred backend is missing, and may come yet.
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        direct["auto", CPU, torch.float32, WIDE]


@pytest.mark.parametrize("op", [registry.get(name) for name in registry.names()], ids=lambda op: op.name)
def test_every_preference_is_one_that_the_op_can_follow(op: registry.Op) -> None:
    torch.manual_seed(0)
    for preference in op.preferences:
        assert preference.backend in op.backends
        assert preference.sizes
    for sample in op.sample_inputs(CPU, torch.float32, False):
        assert op.sizes(*sample.args, **sample.kwargs) in {"", *(p.sizes for p in op.preferences)}


def first_choice(name: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> str:
    op = registry.get(name)
    return op.candidates("auto", torch.device("cuda"), [dtype], op.sizes(*args, **kwargs))[0].name


@pytest.mark.parametrize(
    ("dtype", "shape", "kwargs", "expected"),
    [
        (torch.float32, (64, 2**18), {}, "triton"),
        (torch.float32, (2, 64, 2**18), {}, "triton"),
        (torch.float32, (2**18, 64), {"dim": 0}, "triton"),
        (torch.bfloat16, (64, 2**18), {}, "cuda"),
        (torch.float32, (63, 2**18), {}, "cuda"),
        (torch.float32, (129, 2**18), {}, "cuda"),
        (torch.float32, (65, 2**18 - 1), {}, "cuda"),
        (torch.float32, (), {}, "cuda"),
        (torch.float32, (5, 0), {}, "cuda"),
    ],
)
def test_where_triton_s_softmax_is_preferred_on_a_gpu(
    dtype: torch.dtype, shape: tuple[int, ...], kwargs: dict[str, Any], expected: str
) -> None:
    assert first_choice("softmax", dtype, torch.empty(shape, device="meta"), **kwargs) == expected


def test_where_torch_s_gelu_is_preferred_on_a_gpu() -> None:
    few, many = torch.empty(64, 4096, device="meta"), torch.empty(64, 4097, device="meta")
    assert first_choice("gelu", torch.float16, few) == "reference"
    assert first_choice("gelu", torch.float16, few, approximate="tanh") == "reference"
    for others in ((many,), (few, few[0]), (few.t(),)):
        assert first_choice("gelu", torch.float16, *others) == "cuda"
    assert first_choice("gelu", torch.float64, few) == "cuda"
    assert first_choice("gelu", torch.float16, few, output_dtype=torch.float32) == "cuda"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_torch_s_gelu_runs_where_it_is_preferred(monkeypatch: pytest.MonkeyPatch, approximate: str) -> None:
    gelu = sys.modules["fuseopt.ops.gelu"]
    preference = registry.Preference(registry.REFERENCE, gelu._FEW, device_type="cpu")
    op = dataclasses.replace(registry.get("gelu"), preferences=(preference,))
    monkeypatch.setattr(registry, "_OPS", registry._OPS | {"gelu": op})
    monkeypatch.setattr(registry, "_PICKED", {})
    monkeypatch.setattr(gelu, "_DIRECT", registry.Direct("gelu", gelu.FWD, gelu._torch_op))
    input = torch.randn(3, 8)
    for requires_grad in (False, True):
        with RawCalls() as raw:
            output = ops.gelu(input.clone().requires_grad_(requires_grad), approximate=approximate)
        assert raw.calls == []
        assert torch.equal(output, torch.nn.functional.gelu(input, approximate=approximate))


@pytest.mark.parametrize("op", [registry.get(name) for name in registry.names()], ids=lambda op: op.name)
def test_every_op_says_why_it_cannot_run_on_another_device(op: registry.Op) -> None:
    first = op.backends[0].name
    assert first in ("cuda", "triton")
    with pytest.raises(BackendError, match=f"{first}: runs on cuda tensors, not on cpu"):
        op.choose(first, CPU, [torch.float32])
    assert op.choose("auto", torch.device("meta"), [torch.float32]).backend == "reference"


def test_names_are_taken_once(toy: registry.Op) -> None:
    with pytest.raises(ValueError, match="'square' is registered already"):
        registry.register(toy)
    with pytest.raises(KeyError, match=r"no op named 'sqare'; registered: .*square"):
        registry.get("sqare")


def test_auto_takes_up_a_native_library_loaded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.load("cpu").status != "loaded":
        pytest.skip(f"no native library: {native.load('cpu').reason}")
    monkeypatch.setattr(registry, "_PICKED", {})
    gelu = sys.modules["fuseopt.ops.gelu"]
    monkeypatch.setattr(gelu, "_DIRECT", registry.Direct("gelu", gelu.FWD))
    absent = native.LibraryState("cpu", "absent", None, None, "hidden by this test", 0.0)
    input = torch.randn(2, 8)
    with monkeypatch.context() as hidden:
        hidden.setattr(native, "load", lambda kind, *, build=True: absent)
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
    monkeypatch.setattr(registry, "_PICKED", {})
    gelu = sys.modules["fuseopt.ops.gelu"]
    monkeypatch.setattr(gelu, "_DIRECT", registry.Direct("gelu", gelu.FWD))
    asked = []

    def load(kind: str, *, build: bool = True) -> native.LibraryState:
        asked.append((kind, build))
        return native.LibraryState(kind, "buildable", None, None, None, 0.0)

    monkeypatch.setattr(native, "load", load)
    for _ in range(3):
        ops.gelu(torch.randn(2, 8))
    assert asked == [("cpu", False)]


def test_import_is_light() -> None:
    heavy = ("triton", "transformers", "torch._dynamo")
    program = f"import sys, fuseopt.ops; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
