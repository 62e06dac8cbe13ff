"""DDP and FSDP2 over two processes take the steps that one process takes over both halves of the batch."""

import gc
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fuseopt
from fuseopt.training import partitioner
from fuseopt.training.forward import not_supported_reasons
from tests import tiny
from tests.ops.cases import Graphs
from tests.strategies import combined
from tests.training_steps import capture_on_cpu
from tests.two_processes import start_two

KERNELS = {
    "custom_cuda_kernels": ["FusedLayerNorm", "FusedGELU"],
    "triton_kernels": ["FusedLinearCrossEntropy"],
    "jit": False,
}
WITHOUT_DROPOUT = {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STEPS = 3


def memory(device: str) -> dict[str, dict[str, object]]:
    return {"memory_efficient_fusion": {"backend": "inductor" if device == "cuda" else "aot_eager"}}


def captured(device: str) -> dict[str, object]:
    return {"memory_efficient_fusion": {**memory(device)["memory_efficient_fusion"], "cuda_graphs": True}}


def replicated(model: nn.Module) -> nn.Module:
    # Buckets of a few parameters each, by which torch.compile would cut the graph.
    return DistributedDataParallel(model, bucket_cap_mb=0.01)


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def sharded_by_block(model: nn.Module) -> nn.Module:
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


# How the model is spread, what is fused, and how many graphs a process compiles.
CASES = {
    "ddp": (replicated, memory, 1),
    "ddp, captured": (replicated, captured, 1),
    "fsdp": (sharded, memory, 1),
    "fsdp, kernels": (sharded_by_block, lambda device: KERNELS, 0),
}


# Family and block of which one step's gradients are averaged by DDP; those of every block in slow runs.
EVERY_AVERAGED = [
    ("gpt2", "kernels-jit"),
    ("t5", "kernels-jit"),
    ("gpt2", "kernels-head"),
    ("t5", "kernels-head"),
    ("gpt2", "kernels-head-memory"),
    ("t5", "budget"),
]
AVERAGED = [("t5", "kernels-head"), ("gpt2", "kernels-head-memory")]


def stock_model(device: str) -> nn.Module:
    return tiny.gpt2(**WITHOUT_DROPOUT).to(device).train()


def train(model: nn.Module, ids: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def averaged_step(family: str, block: str, rank: int) -> tuple[dict[str, torch.Tensor], int]:
    """The gradients of one step, and how many graphs were compiled for it."""
    model = combined.fused_copy(combined.stock_model(family, **combined.ONE_LAYER[family]), block)
    spread = DistributedDataParallel(model, find_unused_parameters="head" in block).train()
    with mock.patch.object(partitioner, "compile_graph", wraps=partitioner.compile_graph) as compile_graph:
        if block != "budget":
            compile_graph.side_effect = lambda graph, inputs, **_: Graphs().compiled(graph, inputs)
        spread(**combined.batch_of(model, seed=rank)).loss.backward()
    return combined.gradients_of(model), compile_graph.call_count


def _train_in_process(rank: int, folder: str, device: str, averaged: list[tuple[str, str]]) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, f"file://{folder}/rendezvous", timedelta(minutes=3), rank=rank, world_size=2)
    if averaged:
        steps = [averaged_step(family, block, rank) for family, block in averaged]
        torch.save(steps, f"{folder}/averaged-{rank}.pt")
    compile_graph, compiled = partitioner.compile_graph, []

    def counted(*arguments: object, **options: object) -> object:
        compiled.append(arguments)
        return compile_graph(*arguments, **options)

    partitioner.compile_graph = counted
    found = {}
    for name, (spread, fusion, _) in CASES.items():
        torch._dynamo.reset()
        compiled.clear()
        model = fuseopt.initialize(stock_model(device), {"kernel_fusion": fusion(device)})
        ids = tiny.inputs(model, batch=4)["input_ids"][2 * rank : 2 * rank + 2]
        with pytest.MonkeyPatch.context() as patch:
            events = capture_on_cpu(patch) if fusion is captured and device == "cpu" else []
            losses = train(spread(model), ids)
            assert events.count("replayed") == (STEPS - 1 if events else 0)
            assert ("in CUDA graphs" in str(fuseopt.report(model).since)) == (fusion is captured)
        found[name] = losses, len(compiled), not_supported_reasons(model)
        # Whatever holds on to the group has to be gone by now: freed later it may wait for the other process forever.
        del model
        gc.collect()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("device", "averaged"),
    [
        pytest.param("cpu", AVERAGED, marks=pytest.mark.slow),
        pytest.param("cpu", EVERY_AVERAGED, marks=pytest.mark.slow),
        pytest.param("cuda", [], marks=pytest.mark.multigpu),
    ],
)
def test_two_processes_have_the_losses_and_the_gradients_of_one(device, averaged, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    start_two(_train_in_process, (str(tmp_path), device, averaged))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    stock = stock_model(device)
    expected = train(stock, tiny.inputs(stock, batch=4)["input_ids"])
    assert expected[-1] < 0.99 * expected[0]
    for name, (spread, _, graphs) in CASES.items():
        (first, compiled, reasons), (second, _, _) = (of_rank[name] for of_rank in found)
        assert first != second and compiled == graphs, name
        assert any("fully_shard shards its submodules separately" in reason for reason in reasons) == (
            spread is sharded_by_block
        )
        averages = [sum(losses) / 2 for losses in zip(first, second, strict=True)]
        assert averages == pytest.approx(expected, rel=1e-5 if device == "cpu" else 1e-4), name
    if averaged:
        assert_averaged(averaged, *(torch.load(tmp_path / f"averaged-{rank}.pt") for rank in (0, 1)))


def assert_averaged(averaged: list[tuple[str, str]], *of_ranks: list[tuple[dict[str, torch.Tensor], int]]) -> None:
    for (family, block), *steps in zip(averaged, *of_ranks, strict=True):
        stock = combined.stock_model(family, **combined.ONE_LAYER[family])
        first, second = (combined.training_step(stock, seed) for seed in (0, 1))
        average = {name: (first[name] + second[name]) / 2 for name in first}
        assert combined.difference(first, average) > 1e-3
        for gradients, compiled in steps:
            tiny.assert_same_gradients(gradients, average)
            assert compiled == (block in ("kernels-memory", "kernels-head-memory", "budget"))


@pytest.mark.gpu
def test_steps_are_captured_beside_nccl(tmp_path):
    losses = {}
    dist.init_process_group("nccl", f"file://{tmp_path}/rendezvous", timedelta(minutes=3), rank=0, world_size=1)
    try:
        for fusion in (memory, captured):
            torch._dynamo.reset()
            model = fuseopt.initialize(stock_model("cuda"), {"kernel_fusion": fusion("cuda")}, strict=True)
            losses[fusion] = train(replicated(model), tiny.inputs(model, batch=4)["input_ids"])
            assert ("in CUDA graphs" in str(fuseopt.report(model).since)) == (fusion is captured)
            del model
            gc.collect()
    finally:
        dist.destroy_process_group()
    assert losses[captured] == pytest.approx(losses[memory], rel=1e-5)
