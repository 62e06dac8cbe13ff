"""Triton ops of a step are compiled and run beforehand, once for each layout; everything else is not."""

import os
import pkgutil
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

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

    def run(call, compiler):
        assert call in compiler.result()
        seen.append((threading.current_thread().name.rsplit("_", 1)[0], *call))

    monkeypatch.setattr(early_kernels, "_compile_elsewhere", list)
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
    call = early_kernels._Call(lambda *arguments: given.extend(arguments), (layout, None, 0.5))
    started = Future()
    started.set_result(None)
    early_kernels._run(call, started)
    zeros, *others = given
    assert zeros.stride() == (1, 4) and zeros.dtype is torch.float16 and not zeros.any() and others == [None, 0.5]


def test_what_fails_is_left_to_the_step_and_waited_for(monkeypatch):
    compiler = subprocess.Popen([sys.executable, "-c", "input(); raise SystemExit(1)"], stdin=subprocess.PIPE)
    failed = []

    def op(*_):
        failed.append(compiler.poll())
        raise RuntimeError("no room")

    run = early_kernels._run
    monkeypatch.setattr(early_kernels, "_compile_elsewhere", lambda _: compiler)
    monkeypatch.setattr(early_kernels, "_run", lambda call, compiler: run(early_kernels._Call(op, ()), compiler))
    with early_kernels.pool():
        early_kernels.begin(graph_of((TRITON, [fake(8, 64), fake(64)], (1e-6, 1, 1.0))))
        assert not failed
        compiler.communicate(b"\n")
    assert failed == [1]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_what_another_process_compiles_is_found_on_disk(tmp_path, monkeypatch):
    from triton import knobs

    from fuseopt.ops.triton import rms_norm_fwd
    from fuseopt.ops.triton.compile_only import compile_only
    from fuseopt.ops.triton.rms_norm import rms_norm_fwd_kernel

    gpu, ended = SimpleNamespace(major=9, minor=0, multi_processor_count=132), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(early_kernels, "_run", lambda _, compiler: ended.append(compiler.result().wait()))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # The first has no such weight.
    sizes = [(9, 7), (768, 768), (64, 64)]
    calls = [(TRITON, [fake(300, columns), fake(weights)], (1e-6, 1, 1.0)) for columns, weights in sizes]
    with FakeTensorMode(), early_kernels.pool():
        early_kernels.begin(graph_of(*calls))
    assert ended == [0] * 3
    found = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit))
    rms_norm_fwd_kernel.device_caches.clear()
    with compile_only(90, 132):
        for _, tensors, others in calls[1:]:
            rms_norm_fwd(*(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors), *others)
    assert found == [True, True]


def test_the_graph_of_a_step_is_looked_at(monkeypatch):
    seen = []
    monkeypatch.setattr(early_kernels, "begin", seen.append)
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 4)
    fuseopt.initialize(model, {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager"}}}, strict=True)
    model(torch.randn(2, 4)).sum().backward()
    assert len(seen) == 1 and seen[0].find_nodes(op="call_function", target=torch.ops.aten.mm.default)


@pytest.mark.gpu
def test_the_first_step_compiles_no_kernel_of_its_own(tmp_path, monkeypatch):
    from triton import knobs
    from triton.runtime.jit import JITFunction

    from fuseopt.ops import triton as ops

    for module in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
        for member in vars(sys.modules.get(module.name, ops)).values():
            if isinstance(member, JITFunction):
                member.device_caches.clear()
    compiled = []

    def listen(*, src, cache_hit, **_):
        if src.fn.module.startswith(ops.__name__):
            compiled.append((src.name, threading.current_thread().name.rsplit("_", 1)[0], cache_hit))

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model = tiny.t5().cuda().train()
    fusion = {"memory_efficient_fusion": True, "triton_kernels": ["FusedRelativeAttention"]}
    fuseopt.initialize(model, {"kernel_fusion": fusion}, strict=True)
    ids = torch.randint(0, model.config.vocab_size, (3, 16), device="cuda")
    with torch.autocast("cuda", torch.bfloat16), partitioner.inductor_config.patch(force_disable_caches=True):
        model(input_ids=ids, labels=ids).loss.backward()
    assert {name for name, *_ in compiled} >= {"relative_attention_fwd_kernel", "relative_attention_bwd_bias_kernel"}
    assert {tuple(how) for _, *how in compiled} == {("fuseopt-kernels", True)}, compiled
