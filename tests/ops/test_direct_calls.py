"""`DirectCalls` of csrc/python: what the overload gives, for plain calls; NotImplemented for all others."""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuseopt import ops
from fuseopt.build import loader
from fuseopt.errors import BackendError
from fuseopt.ops import registry
from tests.ops.cases import RawCalls

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OF_DIRECT_CALLS = ("gelu", "softmax", "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "gated_activation")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    state = loader.load(request.param)
    assert state.status == "loaded", state.reason
    assert loader.python_library() is not None, loader.state("python").reason
    return request.param


def direct_calls(choose: Callable) -> Any:
    library = loader.python_library()
    assert library is not None
    return library.DirectCalls(choose)


def direct(name: str, device: str) -> Callable:
    calls = direct_calls(lambda *_: pytest.fail("it is settled"))
    calls.settle("auto", device, f"fuseopt::{name}", "")
    return functools.partial(calls, "auto")


def test_what_an_overload_gives(device: str) -> None:
    gelu = direct("gelu_fwd", device)
    input, bias = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    for arguments in ((), (True,), (False, bias), (True, bias, torch.bfloat16), (True, None, torch.float64)):
        expected = torch.ops.fuseopt.gelu_fwd.default(input, *arguments)
        output = gelu(input, *arguments)
        assert output.dtype == expected.dtype and torch.equal(output, expected)
        assert not output.requires_grad and output._version == 0
    parameter = nn.Parameter(input)
    with torch.no_grad():
        assert torch.equal(gelu(parameter), gelu(input))


def test_several_results_are_a_tuple(device: str) -> None:
    input, weight = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    outputs = direct("rms_norm_fwd", device)(input, weight, 1e-6)
    expected = torch.ops.fuseopt.rms_norm_fwd(input, weight, 1e-6)
    assert type(outputs) is tuple and len(outputs) == len(expected) == 2
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_written_to_counts_its_version_up(device: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        ids, scores = torch.tensor([[1, 2, 1]], device=device), torch.zeros(1, 4, device=device)
        assert direct("process_logits_", device)(ids, scores, 2) is None
        assert scores.tolist() == [[0, 0, float("-inf"), 0]]
        if not inference:
            assert (scores._version, ids._version) == (1, 0)


class Subclass(Tensor):
    pass


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_calls_that_are_not_plain_are_left_alone(device: str) -> None:
    gelu, norm, edit = (direct(name, device) for name in ("gelu_fwd", "rms_norm", "process_logits_"))
    input = torch.randn(3, 8, device=device)
    with RawCalls() as raw:
        for arguments in (
            (None,),
            (1,),
            (input.tolist(),),
            (input.as_subclass(Subclass),),
            (input.clone().requires_grad_(),),
            (input, False, torch.ones(8, device=device, requires_grad=True)),
            (input, 1),
            (input, False, torch.ones(8, device="meta")),
            (input, True, None, 5),
            (input, True, None, None, None),
        ):
            assert gelu(*arguments) is NotImplemented, arguments
        assert norm(input, None, 1) is NotImplemented  # an int where a float belongs
        assert edit(torch.ones(3, 2, dtype=torch.int64, device=device), input, True) is NotImplemented
        assert edit(torch.ones(3, 2, dtype=torch.int64, device=device), input, 2**64) is NotImplemented
        with SeesFunctions():
            assert gelu(input) is NotImplemented
        with forward_ad.dual_level():
            assert gelu(forward_ad.make_dual(input, input)) is NotImplemented
        with FakeTensorMode() as fake:
            assert gelu(fake.from_tensor(input)) is NotImplemented
    assert raw.names() == []
    inside = []
    torch.func.vmap(lambda row: inside.append(gelu(row)) or row)(input)
    torch.func.grad(lambda x: inside.append(gelu(x)) or x.sum())(input)
    assert inside == [NotImplemented, NotImplemented]


def test_what_the_op_refuses_is_left_alone(device: str) -> None:
    gelu = direct("gelu_fwd", device)
    input = torch.randn(3, 8, device=device)
    assert gelu(input.int()) is NotImplemented
    assert gelu(input, False, torch.ones(7, device=device)) is NotImplemented
    assert gelu(input, False, torch.ones(8)) is NotImplemented or device == "cpu"


class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LookupError(f"refused {func}")


def test_dispatch_modes_see_the_op_and_their_errors_come_through(device: str) -> None:
    gelu = direct("gelu_fwd", device)
    input = torch.randn(3, 8, device=device)
    with RawCalls() as raw:
        gelu(input)
    assert raw.names() == ["gelu_fwd.default"]
    with Refuses(), pytest.raises(LookupError, match=r"refused fuseopt\.gelu_fwd\.default"):
        gelu(input)


def test_traces_of_fx_hold_the_op_and_those_of_torchscript_torchs_own(device: str) -> None:
    gelu = direct("gelu_fwd", device)
    input, other = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device)
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: ops.gelu(x), input)
        graph = make_fx(lambda x: ops.gelu(x))(input)  # traces under a __torch_function__ mode
    assert "aten::gelu" in str(traced.graph) and "fuseopt::" not in str(traced.graph)
    assert torch.ops.fuseopt.gelu_fwd.default in {node.target for node in graph.graph.nodes}
    assert torch.equal(graph(other), gelu(other))
    torch.testing.assert_close(traced(other), gelu(other))


def test_tensors_that_stand_for_other_numbers_than_they_hold(device: str) -> None:
    gelu = direct("gelu_fwd", device)
    input = torch.randn(3, 8, device=device)
    assert torch.equal(gelu(torch._neg_view(input)), gelu(-input))
    assert torch.equal(gelu(torch._efficientzerotensor((3, 8), device=device)), torch.zeros_like(input))


def test_the_profiler_sees_the_op(device: str) -> None:
    gelu = direct("gelu_fwd", device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gelu(torch.randn(3, 8, device=device))
    assert "fuseopt::gelu_fwd" in {event.name for event in profile.events()}


def test_types_that_raw_ops_do_not_have_are_refused() -> None:
    loader.load("cpu")
    calls = direct_calls(print)
    with pytest.raises(RuntimeError, match=r"no arguments of type int\[\], as dim"):
        calls.settle("auto", "cpu", "aten::sum", "dim_IntList")
    with pytest.raises(RuntimeError, match="no results but tensors"):
        calls.settle("auto", "cpu", "aten::item", "")
    with pytest.raises(RuntimeError, match="nonsense"):
        calls.settle("auto", "cpu", "fuseopt::nonsense", "")
    with pytest.raises(RuntimeError, match="nonsense"):
        calls.settle("auto", "nonsense", "fuseopt::gelu_fwd", "")


def test_what_is_not_settled_is_chosen(device: str) -> None:
    chosen: list[Any] = []

    def choose(*arguments: Any) -> str:
        chosen.append(arguments)
        return "chosen"

    calls = direct_calls(choose)
    calls.settle("auto", device, "fuseopt::gelu_fwd", "")
    calls.settle("auto", device, "fuseopt::softmax_fwd", "")  # as by another thread: the first stays
    input = torch.randn(3, 8, device=device)
    expected = torch.ops.fuseopt.gelu_fwd(input)
    assert torch.equal(calls("auto", input), expected)
    assert torch.equal(calls("".join(["au", "to"]), input), expected)
    assert chosen == []
    assert calls("cpu", input, 1) == "chosen" == calls("auto", input.to("meta"))
    assert [arguments[0] for arguments in chosen] == ["cpu", "auto"]
    assert chosen[0][1] is input and chosen[0][2] == 1
    calls.settle("cpu", device, "fuseopt::gelu_fwd", "")
    assert torch.equal(calls("cpu", input), expected)

    def fails(*arguments: Any) -> None:
        raise LookupError("no choice")

    with pytest.raises(LookupError, match="no choice"):
        direct_calls(fails)("auto", input)
    for arguments, keywords in (((), {}), (("auto",), {}), ((None, input), {}), (("auto", input), {"tanh": True})):
        with pytest.raises(TypeError, match="expected a backend, a tensor and the other arguments"):
            calls(*arguments, **keywords)


def test_threads_run_at_the_same_time(device: str) -> None:
    gelu = direct("gelu_fwd", device)
    input = torch.randn(64, 512, device=device)
    expected = gelu(input)
    failed = []

    def work() -> None:
        for _ in range(50):
            if not torch.equal(gelu(input), expected):
                failed.append(threading.current_thread())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[..., registry.Direct]:
    """`_DIRECT` of an op's module, or another attribute, as if the op had not been called yet."""

    def make(name: str, attribute: str = "_DIRECT") -> registry.Direct:
        module = sys.modules[f"fuseopt.ops.{name}"]
        calls = getattr(module, attribute)
        monkeypatch.setattr(module, attribute, registry.Direct(name, calls._overloads, calls._autocasts))
        return getattr(module, attribute)

    return make


@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize("name", OF_DIRECT_CALLS)
def test_ops_call_directly_for_all_their_samples(
    device: str, backend: str, name: str, fresh: Callable[..., registry.Direct], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fresh(name)
    op = registry.get(name)
    function = functools.partial(op.function, backend=device if backend == "native" else "auto")
    samples = list(op.sample_inputs(torch.device(device), torch.float32, False))
    function(*samples[0].args, **samples[0].kwargs)
    direct = calls.run
    assert type(direct).__name__ == "DirectCalls"
    monkeypatch.setattr(registry, "pick", lambda *_: pytest.fail("chosen again"))
    results = []

    def remembering(*arguments: Any) -> Any:
        results.append(direct(*arguments))
        return results[-1]

    calls.run = remembering
    for sample in samples:
        if name == "layer_norm" and len(sample.args[1]) > 1:
            continue  # several normalised dimensions are made one, on the road for all
        output = function(*sample.args, **sample.kwargs)
        (result,) = results
        results.clear()
        # A softmax over another dimension than the last transposes what the call gives.
        assert result is output or (sample.kwargs.get("dim", -1) != -1 and torch.equal(result.mT, output))


def test_what_a_kernel_refuses_is_said_by_the_op(device: str, fresh: Callable[..., registry.Direct]) -> None:
    calls = fresh("softmax")
    input = torch.arange(6, device=device).view(2, 3)
    ops.softmax(input.float())
    assert type(calls.run).__name__ == "DirectCalls"
    with pytest.raises(BackendError, match=r"does not take torch\.int64"):
        ops.softmax(input)
    with RawCalls() as raw:
        torch.testing.assert_close(ops.softmax(input.float(), backend="reference"), input.float().softmax(-1))
    assert raw.names() == []


def test_without_the_library_the_overload_is_called_until_it_comes(
    device: str, monkeypatch: pytest.MonkeyPatch, fresh: Callable[..., registry.Direct]
) -> None:
    calls = fresh("gelu")
    input = torch.randn(3, 8, device=device)
    expected = torch.ops.fuseopt.gelu_fwd(input)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_python_library", None)
        with RawCalls() as raw:
            assert torch.equal(ops.gelu(input), expected)
        assert raw.names() == ["gelu_fwd.default"] and calls.run == calls._choose_and_call
        assert calls.run("auto", input.clone().requires_grad_()) is NotImplemented
        assert calls.run("auto", input, False, torch.ones(7, device=device)) is NotImplemented
        assert calls.run("auto", input.to("meta")) is NotImplemented
        edited = torch.zeros(1, 4, device=device)
        ban = fresh("no_repeat_ngram", "_IN_PLACE")
        ops.no_repeat_ngram(torch.tensor([[1, 2, 1]], device=device), edited, 2, inplace=True)
        assert edited._version == 1 and edited[0, 2] == float("-inf")
        assert ban.run == ban._choose_and_call
    assert torch.equal(ops.gelu(input), expected)
    assert type(calls.run).__name__ == "DirectCalls"


@pytest.mark.parametrize(
    ("name", "arguments", "is_concerned"),
    [("gelu", (), False), ("softmax", (None, 1.0), True), ("layer_norm", (None, None, 1e-5), True)],
)
@pytest.mark.parametrize("has_library", [True, False])
def test_autocast_refuses_calls_of_ops_that_it_concerns(
    device: str,
    name: str,
    arguments: tuple[Any, ...],
    is_concerned: bool,
    has_library: bool,
    fresh: Callable[..., registry.Direct],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_library:
        monkeypatch.setattr(loader, "_python_library", None)
    calls, input = fresh(name), torch.randn(3, 5, device=device, dtype=torch.bfloat16)
    # The first call settles the choice.
    for _ in range(2):
        assert calls.run("auto", input, *arguments) is not NotImplemented
        # Not by torch.autocast, which switches itself off where there is no GPU.
        torch.set_autocast_enabled("cuda", True)
        try:
            assert (calls.run("auto", input, *arguments) is NotImplemented) == is_concerned
        finally:
            torch.set_autocast_enabled("cuda", False)
