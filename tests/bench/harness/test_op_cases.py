"""What is timed of an op: arguments, bytes, contenders, and the float64 reference that they are checked against."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fuseopt.bench.harness import op_timing
from fuseopt.bench.harness.op_cases import Float64Reference, OpCase, Work, auto_choice, contenders
from fuseopt.bench.harness.op_timing import time_op
from fuseopt.ops import registry
from fuseopt.ops.registry import Backend, Benchmark, Op, SampleInput

CPU = torch.device("cpu")


def op_case(name: str, shape: str, dtype: torch.dtype = torch.float32, backward: bool = False) -> OpCase:
    op = registry.get(name)
    return OpCase(op, op.benchmarks[0], shape, dtype, backward)


def small(shape: str) -> str:
    return "x".join(str(min(int(size), 40)) for size in shape.split("x"))


BENCHMARKS = [
    pytest.param(op, benchmark, id=f"{op.name} {benchmark.variant}")
    for op in map(registry.get, registry.names())
    for benchmark in op.benchmarks
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("op", "timed"), BENCHMARKS)
def test_every_contender_for_every_op_is_right(op: Op, timed: Benchmark, dtype: torch.dtype):
    meta = [timed.make(torch.device("meta"), dtype, *map(int, s.split("x"))) for s in timed.shapes]
    assert all(argument.is_meta for sample in meta for argument in sample.args if isinstance(argument, torch.Tensor))
    for backward in (False, True):
        case = OpCase(op, timed, small(timed.shapes[0]), dtype, backward)
        if backward and not any(getattr(argument, "requires_grad", False) for argument in case.sample(CPU).args):
            continue
        torch.manual_seed(0)
        work, offered = Work.of(case, CPU), contenders(case, CPU, compile=False)
        with torch.set_grad_enabled(backward):
            functions, errors, notes = op_timing._verified(case, work, offered)
        assert not notes
        assert set(functions) == set(errors) == set(offered)


def test_bytes_are_counted_once_a_tensor():
    rows, columns = 6, 8
    forward, backward = (op_case("rms_norm", f"{rows}x{columns}", torch.bfloat16, b) for b in (False, True))
    input, weight, rstd = rows * columns * 2, columns * 2, rows * 4
    function = forward.op.function
    with torch.no_grad():
        assert Work.of(forward, CPU).moved_bytes(function) == input + weight + input
    # Incoming gradient, what the forward saved, both gradients.
    assert Work.of(backward, CPU).moved_bytes(function) == input + (input + weight + rstd) + (input + weight)


def test_a_broadcast_tensor_moves_what_it_has_in_memory():
    mask = torch.zeros(1, 8).expand(6, 8)
    work = Work(SampleInput((torch.zeros(6, 8), mask)))
    assert work.moved_bytes(torch.add) == 4 * (6 * 8 + 8 + 6 * 8)


def test_contenders_are_those_of_the_device():
    assert list(contenders(op_case("rms_norm", "4x8"), CPU, compile=False)) == ["cpu", "reference", "eager", "torch"]
    assert list(contenders(op_case("layer_norm", "4x8"), CPU, compile=True)) == [
        "cpu",
        "reference",
        "torch",
        "torch.compile",
    ]
    encoder = contenders(op_case("encoder_no_repeat_ngram", "2x9x2x40"), CPU, compile=True)
    assert list(encoder) == ["cpu", "reference", "eager"]
    assert auto_choice(op_case("rms_norm", "4x8"), CPU) == "cpu"


def double(input: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    return input * (3 if backend == "wrong" else 2)


class Refusing(Backend):
    def not_supported_reasons(self, device, dtypes, *, may_build=False):
        return ["it never can", "and will not"]


def make(device: torch.device, dtype: torch.dtype, *shape: int) -> SampleInput:
    return SampleInput((torch.randn(shape, device=device, dtype=dtype, requires_grad=True),))


def test_an_op_from_outside_is_timed_and_what_is_wrong_is_not():
    timed: list[str] = []

    def eager(input):
        timed.append("eager")
        return input + input

    def misshapen(input):
        timed.append("torch")
        return input[:1] * 2

    op = Op(
        "double",
        double,
        lambda input: input * 2,
        lambda device, dtype, requires_grad: iter(()),
        (Refusing("refusing"), Backend("wrong"), Backend("reference")),
    )
    case = OpCase(op, Benchmark(make, ("4x8",), eager=eager, torch=misshapen), "4x8", torch.float32, backward=False)
    refusing, wrong, reference, eagerly, torchs, copy = time_op(case, CPU, compile=False)
    assert (refusing.variant, refusing.milliseconds) == ("refusing", None)
    assert refusing.note == "it never can; and will not"
    assert wrong.milliseconds is None and wrong.note.startswith("WRONG: differs from float64 by 5.0e-01")
    assert wrong.auto and not reference.auto
    assert torchs.note.startswith("WRONG: differs from float64 by inf")
    assert timed.count("torch") == 1 < timed.count("eager")
    assert reference.case == "double fwd, 4x8, float32"
    assert reference.speed_up is not None and eagerly.speed_up is None and copy.speed_up is None
    assert reference.bytes == eagerly.bytes == copy.bytes == 2 * 4 * 8 * 4
    assert copy.of_copy == 1.0
    assert reference.difference == "0.0e+00"


def test_a_backward_is_timed_against_the_same_gradient():
    records = time_op(op_case("rms_norm", "16x32", torch.bfloat16, backward=True), CPU, compile=False)
    assert [record.variant for record in records] == ["cpu", "reference", "eager", "torch", "copy"]
    assert all(record.milliseconds is not None for record in records)
    assert records[0].case == "rms_norm bwd, 16x32, bfloat16"
    assert records[0].auto


def test_auto_is_told_when_another_is_faster():
    def slow(input, *, backend="auto"):
        if backend == "slow":
            for _ in range(100):
                input.sum()
        return input * 2

    op = Op("double", slow, lambda x: x * 2, lambda *_: iter(()), (Backend("slow"), Backend("reference")))
    case = OpCase(op, Benchmark(make, ("4x8",)), "4x8", torch.float32, backward=False)
    slowly, reference, _ = time_op(case, CPU, compile=False)
    assert slowly.auto and slowly.note.startswith("reference is ") and slowly.note.endswith("x as fast")
    assert reference.note is None and reference.speed_up is None


def test_the_reference_tells_rounding_from_error():
    case = op_case("layer_norm", "16x32", torch.bfloat16)
    work = Work.of(case, CPU)
    with torch.no_grad():
        reference = Float64Reference(case, work)
        right = work.results(case.op.function)
    assert reference.error(right) <= reference.allowed < 0.1
    assert reference.error([torch.full_like(right[0], float("nan"))]) == float("inf")
    assert reference.error([right[0].float() + 1]) > reference.allowed
    assert reference.error([right[0][:1]]) == float("inf")


def test_infinities_have_to_be_where_they_belong():
    case = op_case("no_repeat_ngram", "64x400x50")
    work = Work.of(case, CPU)
    reference = Float64Reference(case, work)
    banned = reference.exact[0].isinf()
    assert banned.any()
    assert reference.error(reference.exact) == 0
    assert reference.error([reference.exact[0].masked_fill(banned, 0.0)]) == float("inf")


def test_what_cannot_be_compiled_is_said(monkeypatch):
    def unsupported(input, *_):
        torch._dynamo.graph_break()
        return F.layer_norm(input, (8,))

    case = op_case("layer_norm", "4x8")
    case = replace(case, benchmark=replace(case.benchmark, torch=unsupported))
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compile(function, dynamic=dynamic, fullgraph=True))
    compiled = time_op(case, CPU, compile=True)[-2]
    assert (compiled.variant, compiled.milliseconds) == ("torch.compile", None)
    assert compiled.note.startswith("cannot be compiled: ")
