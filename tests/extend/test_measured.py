""" "auto" takes the backend that `bench` measured as the fastest on this machine."""

import os
import re
import time

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.extend import measured


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEOPT_MEASURED", "1")
    return tmp_path / "cache"


def made(delay: float = 0.002) -> tuple[fuseopt.Op, list[str]]:
    """An op with a kernel that is slower than its function, and what ran."""
    ran = []

    @fuseopt.op("mine::doubled")
    def doubled(a: Tensor) -> Tensor:
        ran.append("reference")
        return a * 2

    @doubled.kernel("cpu")
    def _(a):
        ran.append("cpu")
        time.sleep(delay)
        return a * 2

    @doubled.samples
    def _(device, dtype):
        yield torch.randn(8, 16, device=device, dtype=dtype)

    return doubled, ran


def runs_on(op: fuseopt.Op, ran: list[str], *arguments) -> str:
    for _ in range(3):  # the first call, and direct ones
        ran.clear()
        op(*arguments)
    assert ran == [op.choose(*arguments).backend]
    return ran[0]


def test_calls_of_the_measured_kind_take_the_fastest():
    op, ran = made()
    small, other = torch.randn(8, 16), torch.randn(80, 16)
    assert runs_on(op, ran, small) == "cpu" and op.choose(small).measured == ""
    op.bench(["8x16"], ["float32"], device="cpu", compile=False)
    assert runs_on(op, ran, small) == runs_on(op, ran, torch.randn(9, 15)) == "reference"
    assert runs_on(op, ran, other) == runs_on(op, ran, small.double()) == "cpu"
    choice = op.choose(small)
    assert re.fullmatch(r"reference [\d.]+ us, cpu \d{4,}\.\d us", choice.measured)
    assert "cpu" not in choice.refused
    assert op.choose(small, backend="cpu").backend == "cpu"
    assert runs_on(op, ran, small.clone().requires_grad_()) == "reference"
    assert sorted(op.backends_on("cpu")[0]) == ["cpu", "reference"]


def test_another_process_finds_the_times_until_a_source_changes(own_cache):
    op, ran = made()
    small = torch.randn(8, 16)
    op.bench(["8x16"], ["float32"], device="cpu", compile=False)
    fuseopt.unregister("mine::doubled")
    op, ran = made()
    assert runs_on(op, ran, small) == "reference"
    op.kernel("cpu")(lambda a: ran.append("cpu") or a + a)
    assert runs_on(op, ran, small) == "cpu" and op.choose(small).measured == ""


@pytest.mark.parametrize("what", ["variable", "damaged", "writable", "not remembered"])
def test_times_that_are_not_wanted_or_not_trusted_are_left_aside(own_cache, monkeypatch, what):
    op, ran = made()
    small = torch.randn(8, 16)
    op.bench(["8x16"], ["float32"], device="cpu", compile=False, remember=what != "not remembered")
    files = list((own_cache / "measured").glob("*.json"))
    assert len(files) == (what != "not remembered")
    if what == "variable":
        monkeypatch.setenv("FUSEOPT_MEASURED", "0")
    elif what == "damaged":
        files[0].write_text(files[0].read_text().replace("reference", "referente"))
    elif what == "writable":
        os.chmod(files[0], 0o666)
    fuseopt.unregister("mine::doubled")
    op, ran = made()
    assert runs_on(op, ran, small) == "cpu" and op.choose(small).measured == ""


def test_a_kernel_that_refuses_a_call_is_passed_over():
    op, ran = made(0.0)

    @op.kernel("triton")
    def _(a):
        raise AssertionError

    kind = "torch.float32", measured.size_class(128), False
    op.calls = op.calls.remember("cpu", {kind: {"cpu": 30.0, "reference": 10.0}})
    assert runs_on(op, ran, torch.randn(128)) == "reference"
    op.supports(lambda a: len(a) > 128, "cpu")
    op.calls = op.calls.remember("cpu", {kind: {"cpu": 10.0, "reference": 30.0}})
    assert runs_on(op, ran, torch.randn(128)) == "reference"
    assert op.choose(torch.randn(128)).refused["cpu"] == ["its `supports` says no to these arguments"]


def test_less_than_five_percent_changes_nothing():
    op, ran = made(0.0)
    kind = "torch.float32", measured.size_class(128), False
    op.calls = op.calls.remember("cpu", {kind: {"cpu": 10.4, "reference": 10.0}})
    assert runs_on(op, ran, torch.randn(128)) == "cpu"
    assert op.choose(torch.randn(128)).measured == "reference 10.0 us, cpu 10.4 us"


def test_torch_compile_is_not_steered():
    op, _ = made(0.0)
    kind = "torch.float32", measured.size_class(128), False
    op.calls = op.calls.remember("cpu", {kind: {"cpu": 30.0, "reference": 10.0}})
    graphs = []

    def backend(module, inputs):
        graphs.append(str(module.graph))
        return module.forward

    torch.compile(lambda a: op(a), fullgraph=True, backend=backend)(torch.randn(128))
    assert "mine.doubled" in graphs[0]
