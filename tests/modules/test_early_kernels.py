"""Triton ops of a step are run beforehand, in threads, once for each layout; everything else is not."""

import threading

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fuseopt
from fuseopt.modules import early_kernels, partitioner
from tests import tiny

TRITON = torch.ops.fuseopt.rms_norm_fwd.triton


def graph_of(*calls) -> fx.Graph:
    """Of `(op, inputs without data, other arguments)`."""
    graph = fx.Graph()
    for op, tensors, others in calls:
        nodes = []
        for tensor in tensors:
            nodes.append(graph.placeholder(f"input_{len(graph.nodes)}"))
            nodes[-1].meta["val"] = tensor
        graph.call_function(op, (*nodes, *others))
    return graph


def fake(*shape, device="cuda", dtype=torch.bfloat16):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(shape, dtype=dtype, device=device)


@pytest.fixture
def begun(monkeypatch):
    """What has been run, by the name of the thread."""
    seen = []

    def run(op, arguments):
        seen.append((threading.current_thread().name.rsplit("_", 1)[0], op, arguments))

    monkeypatch.setattr(early_kernels, "_run", run)
    return seen


def test_each_layout_is_run_once(begun):
    rows, weight, others = fake(8, 64), fake(64), (1e-6, 1, 1.0)
    with early_kernels.pool():
        early_kernels.begin(
            graph_of(
                (TRITON, [rows, weight], others),
                (TRITON, [fake(8, 64), weight], others),
                (TRITON, [fake(64, 8).t(), weight], others),
                (TRITON, [rows, weight], (1e-5, 1, 1.0)),
            )
        )
    assert [(thread, op) for thread, op, _ in begun] == [("fuseopt-kernels", TRITON)] * 3
    layouts = {(arguments[0].strides, arguments[2]) for _, _, arguments in begun}
    assert layouts == {((64, 1), 1e-6), ((1, 8), 1e-6), ((64, 1), 1e-5)}


def test_other_ops_and_devices_are_not(begun):
    others = (1e-6, 1, 1.0)
    with early_kernels.pool():
        early_kernels.begin(
            graph_of(
                (torch.ops.fuseopt.rms_norm_fwd.default, [fake(8, 64), fake(64)], others),
                (torch.ops.aten.mm.default, [fake(8, 64), fake(64, 8)], ()),
                (TRITON, [fake(8, 64, device="cpu"), fake(64, device="cpu")], others),
                (TRITON, [fake(8, 64), None], others),
            )
        )
    assert begun == []


def test_an_op_is_given_zeros_of_its_layouts():
    given = []
    layout = early_kernels._layout(torch.empty(3, 4, dtype=torch.float16).t())
    early_kernels._run(lambda *arguments: given.extend(arguments), (layout, None, 0.5))
    zeros, *others = given
    assert zeros.stride() == (1, 4) and zeros.dtype is torch.float16 and not zeros.any() and others == [None, 0.5]


def test_what_fails_is_left_to_the_step_and_waited_for(monkeypatch):
    started, failed = threading.Event(), []

    def run(op, arguments):
        started.wait(10)
        failed.append(op)
        raise RuntimeError("no room")

    monkeypatch.setattr(early_kernels, "_run", run)
    with early_kernels.pool():
        early_kernels.begin(graph_of((TRITON, [fake(8, 64), fake(64)], (1e-6, 1, 1.0))))
        assert not failed
        started.set()
    assert failed == [TRITON]


def test_the_graph_of_a_step_is_looked_at(monkeypatch):
    seen = []
    monkeypatch.setattr(early_kernels, "begin", seen.append)
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 4)
    fuseopt.initialize(model, {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager"}}}, strict=True)
    model(torch.randn(2, 4)).sum().backward()
    assert len(seen) == 1 and seen[0].find_nodes(op="call_function", target=torch.ops.aten.mm.default)


@pytest.mark.gpu
def test_the_first_step_compiles_no_kernel_of_its_own(monkeypatch):
    from triton import knobs

    from fuseopt.ops.triton.cross_entropy import cross_entropy_grad_kernel

    cross_entropy_grad_kernel.device_caches.clear()
    compiled = []

    def listen(*, src, **_):
        compiled.append((src.name, threading.current_thread().name))

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    torch._dynamo.reset()
    model = tiny.gpt2().cuda().train()
    fuseopt.initialize(model, "training", strict=True)
    ids = torch.randint(0, model.config.vocab_size, (3, 16), device="cuda")
    with torch.autocast("cuda", torch.bfloat16), partitioner.inductor_config.patch(force_disable_caches=True):
        model(input_ids=ids, labels=ids).loss.backward()
    threads = {thread for name, thread in compiled if name == "cross_entropy_grad_kernel"}
    assert threads and all(thread.startswith("fuseopt-kernels") for thread in threads)
