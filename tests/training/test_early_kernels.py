"""Triton ops of a step are compiled beforehand, in processes or threads, once a layout; everything else is not."""

import contextlib
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import fuseopt
from fuseopt.ops.layout import Layout
from fuseopt.training import early_kernels
from tests import tiny

TRITON = torch.ops.fuseopt.rms_norm_fwd.triton
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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


class Processes:
    """Inductor's, which do a job when it is asked of them, as they do: pickled."""

    def __init__(self, are_ready=True):
        self.are_ready, self.returned = are_ready, []

    def use_process_pool(self):
        return self.are_ready

    def process_pool(self):
        return self

    def submit(self, function, *arguments):
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        # In a thread, which the modes of this one do not reach.
        with ThreadPoolExecutor() as other:
            self.returned.append(other.submit(function, *arguments))
        return self.returned[-1]


@pytest.fixture
def begun(monkeypatch):
    """What has been run, by the name of the thread; in this process, unless there are `processes`."""
    monkeypatch.setattr(early_kernels, "AsyncCompile", Processes(are_ready=False))
    seen = []

    def run(op, arguments):
        seen.append((threading.current_thread().name.rsplit("_", 1)[0], op, arguments))

    monkeypatch.setattr(early_kernels, "_run", run)
    return seen


@pytest.fixture
def processes(monkeypatch, begun):
    pytest.importorskip("triton")
    found = Processes()
    monkeypatch.setattr(early_kernels, "AsyncCompile", found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("fuseopt.ops.triton.rows._multiprocessors", lambda index: 132)
    return found


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
    layout = Layout.of(torch.empty(3, 4, dtype=torch.float16).t())
    early_kernels._run(lambda *arguments: given.extend(arguments), (layout, None, 0.5))
    zeros, *others = given
    assert zeros.stride() == (1, 4) and zeros.dtype is torch.float16 and not zeros.any() and others == [None, 0.5]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_processes_leave_in_the_cache_what_a_call_launches(begun, processes, monkeypatch, tmp_path):
    from triton import knobs

    from fuseopt.ops.triton.compile_only import compile_only

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seen = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, cache_hit, **_: seen.append((src.name, cache_hit))
    )
    graph = graph_of((TRITON, [fake(8, 64), fake(64)], (1e-6, 1, 1.0)))
    # As in a trace, where new tensors have no data either.
    with early_kernels.pool(), FakeTensorMode():
        early_kernels.begin(graph)
    assert [job.result() for job in processes.returned] == [["rms_norm_fwd_kernel"]]
    assert [op for _, op, _ in begun] == [TRITON]

    # Another one would look there too; in this process, on other addresses and a size for which the same is compiled.
    rows = torch.empty(24, 64, dtype=torch.bfloat16, device="meta")
    module = sys.modules["fuseopt.ops.triton.rms_norm"]
    with compile_only(90, multiprocessors=132) as kernels:
        module.rms_norm_fwd_kernel.device_caches.clear()
        module.rms_norm_fwd(rows, rows[0], 1e-6, 1, 1.0)
    assert len(kernels) == 1 and seen == [("rms_norm_fwd_kernel", False), ("rms_norm_fwd_kernel", True)]


def attention_of(length, device="cuda"):
    """The non-tensor arguments and the tensors of a `relative_attention` call for a padded batch of GPT-2."""
    heads = [torch.empty(4, length, 2, 16, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(3)]
    return [*heads, torch.empty(4, 1, 1, length, device=device)], (0.25, 0.0, True)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_a_length_that_changes_is_compiled_for_as_many_kernels_as_there_are(begun, processes, monkeypatch, tmp_path):
    from triton import knobs

    from fuseopt.ops.triton.compile_only import compile_only

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shapes = ShapeEnv()
    symbol = shapes.create_symbol(24, source=ConstantSource("length"), dynamic_dim=DimDynamic.DYNAMIC)
    size = shapes.create_symintnode(symbol, hint=24)
    graph = fx.Graph()
    graph.placeholder("length").meta["val"] = size
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True):
        tensors, scalars = attention_of(size)
    nodes = [graph.placeholder(f"input_{place}") for place in range(len(tensors))]
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["val"] = tensor
    query, key, value, mask = nodes
    op = torch.ops.fuseopt.relative_attention_fwd.triton
    graph.call_function(op, (query, key, value, None, mask, None, *scalars))
    with early_kernels.pool(), FakeTensorMode():
        early_kernels.begin(graph)
    assert [job.exception() for job in processes.returned] == [None] * 4
    assert [arguments[0].shape for _, _, arguments in begun] == [(4, 2, 24, 16)]

    seen = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, cache_hit, **_: seen.append(cache_hit))
    module = sys.modules["fuseopt.ops.triton.relative_attention"]
    module.relative_attention_fwd_kernel.device_caches.clear()
    with compile_only(90, multiprocessors=132):
        for length in (16, 24, 9, 31, 64, 17, 40, 11, 32, 96, 128, 192, 1024):
            query, key, value, mask = attention_of(length, "meta")[0]
            module.relative_attention_fwd(query, key, value, None, mask, None, *scalars)
    assert seen and all(seen)


def test_what_processes_cannot_compile_is_run_all_the_same(begun, processes):
    with early_kernels.pool():
        early_kernels.begin(graph_of((TRITON, [fake(8, 64), fake(64)], ())))
    assert [type(job.exception()) for job in processes.returned] == [TypeError] and len(begun) == 1


def test_what_fails_is_left_to_the_step_and_waited_for(begun, monkeypatch):
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


def test_processes_and_a_hash_in_a_thread_are_started(monkeypatch):
    seen, hashed = [], threading.Event()
    monkeypatch.setattr(early_kernels, "HAS_TRITON", True)
    monkeypatch.setattr(early_kernels, "maybe_warm_pool", lambda: seen.append("processes"))
    monkeypatch.setattr(
        early_kernels, "triton_key", lambda: (seen.append(threading.current_thread().name), hashed.set())
    )
    early_kernels.start()
    assert hashed.wait(10) and seen == ["processes", "fuseopt-triton-key"]


def test_what_takes_time_to_start_does_before_the_trace(monkeypatch):
    seen = []
    monkeypatch.setattr(early_kernels, "start", lambda: seen.append("started"))
    monkeypatch.setattr(early_kernels, "pool", lambda: seen.append("compiled") or contextlib.nullcontext())
    for backend, expected in (("inductor", ["started", "compiled"]), ("aot_eager", ["compiled"])):
        torch._dynamo.reset()
        seen.clear()
        model = torch.nn.Linear(4, 4)
        fuseopt.initialize(model, {"kernel_fusion": {"memory_efficient_fusion": {"backend": backend}}}, strict=True)
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        assert seen == expected


@pytest.mark.gpu
def test_the_first_step_compiles_no_kernel_of_its_own(monkeypatch, tmp_path):
    from triton import knobs

    from fuseopt.ops.triton.cross_entropy_grad import cross_entropy_grad_kernel

    cross_entropy_grad_kernel.device_caches.clear()
    # Not by switching caches off, for which Inductor has a folder for Triton too, of its own and for a time.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    AsyncCompile.wait_pool_ready()
    compiled = []

    def listen(*, src, cache_hit, **_):
        compiled.append((src.name, threading.current_thread().name, cache_hit))

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    torch._dynamo.reset()
    model = tiny.gpt2().cuda().train()
    fuseopt.initialize(model, "training", strict=True)
    ids = torch.randint(0, model.config.vocab_size, (3, 16), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    found = [(thread, hit) for name, thread, hit in compiled if name == "cross_entropy_grad_kernel"]
    assert found and all(thread.startswith("fuseopt-kernels") and hit for thread, hit in found)
