"""Fused modules with all else that a model is run with: torch.compile, autocast, checkpointing, CUDA graphs."""

import copy
from collections import Counter

import pytest
import torch

import fuseopt
from fuseopt.training import partitioner
from tests import tiny
from tests.ops.cases import Graphs, RawCalls
from tests.strategies.combined import (
    BLOCKS,
    ONE_LAYER,
    WITHOUT_DROPOUT,
    difference,
    fused_copy,
    gradients_of,
    stock_model,
    training_step,
)

pytestmark = [
    # A block asks for every kernel, and no model has a place for all of them.
    pytest.mark.filterwarnings("ignore:fuseopt. .* matches nothing in the model:UserWarning"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"),
]

families = pytest.mark.parametrize("family", WITHOUT_DROPOUT)
on_each_device = pytest.mark.usefixtures("each_device")


@on_each_device
@pytest.mark.parametrize(
    ("family", "block"),
    [
        pytest.param("gpt2", "kernels", marks=pytest.mark.slow),
        ("t5", "kernels-jit"),
        pytest.param("t5_gated", "kernels-jit", marks=pytest.mark.slow),
    ],
)
def test_one_graph_holds_every_op_under_torch_compile(family, block):
    torch._dynamo.reset()
    graphs = Graphs()
    stock = stock_model(family, **ONE_LAYER[family]).train()
    # Of a named backend: what "auto" prefers at some sizes, it does not in a graph.
    fused = fused_copy(stock, block, backend=stock.device.type)
    compiled_copy = copy.deepcopy(fused)
    compiled = torch.compile(compiled_copy, fullgraph=True, backend=graphs.compiled)
    # GPT-2's own loss logs a warning, which no graph can hold.
    batch = tiny.inputs(stock)
    with RawCalls() as raw:
        fused(**batch, use_cache=False).logits.square().mean().backward()
    for model in (stock, compiled):
        model(**batch, use_cache=False).logits.square().mean().backward()
    tiny.assert_same_gradients(gradients_of(compiled_copy), gradients_of(stock))
    assert Counter(graphs.forward + graphs.backward) == Counter(raw.names())
    assert any("_fwd" in name for name in graphs.forward) and any("_bwd" in name for name in graphs.backward)


@on_each_device
@families
@pytest.mark.parametrize("block", ["kernels-jit", "kernels-head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast_is_no_worse_than_stock(family, dtype, block):
    stock = stock_model(family)
    fused = fused_copy(stock, block)
    exact = training_step(copy.deepcopy(stock).double())
    with torch.autocast(stock.device.type, dtype), RawCalls() as raw:
        errors = [difference(training_step(model), exact) for model in (fused, stock)]
    assert any("_bwd" in name for name in raw.names())
    size = sum(gradient.square().sum().item() for gradient in exact.values()) ** 0.5
    assert errors[0] <= 1.25 * errors[1] + torch.finfo(dtype).eps * size


@on_each_device
@families
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_fused_ops(family, reentrant):
    stock = stock_model(family)
    expected = training_step(stock)
    model = fused_copy(stock, "kernels-jit")

    def counted() -> Counter[str]:
        with RawCalls() as raw:
            tiny.assert_same_gradients(training_step(model), expected)
        return Counter(raw.names())

    without = counted()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    recomputed = counted() - without
    assert recomputed and not any("_bwd" in name for name in recomputed)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5_gated", marks=pytest.mark.slow)])
def test_every_mechanism_at_once(family, monkeypatch):
    torch._dynamo.reset()
    graphs = Graphs()
    monkeypatch.setattr(partitioner, "compile_graph", lambda graph, inputs, **_: graphs.compiled(graph, inputs))
    stock = stock_model(family, **ONE_LAYER[family])
    expected = training_step(stock)
    model = fused_copy(stock, "kernels-jit-head-memory")
    tiny.assert_same_gradients(training_step(model), expected)
    assert any("_fwd" in name for name in graphs.forward) and any("_bwd" in name for name in graphs.backward)
    rows = fuseopt.report(model).replaced
    assert {"kernels", "triton", "memory_efficient"} <= {row.strategy for row in rows}
    with RawCalls() as raw:
        torch.testing.assert_close(tiny.logits(model.eval()), tiny.logits(stock.eval()), rtol=1e-5, atol=1e-5)
    assert raw.calls


def with_prepared_masks(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With eager attention's masks: transformers makes them by a copy from the CPU, which no graph takes."""
    ids = batch.get("decoder_input_ids", batch["input_ids"])
    length = ids.shape[1]
    causal = torch.full((length, length), torch.finfo(torch.float32).min, device=ids.device).triu(1)
    causal = causal.expand(ids.shape[0], 1, length, length)
    if "decoder_input_ids" not in batch:
        return batch | {"attention_mask": causal}
    everything = torch.zeros(ids.shape[0], 1, 1, batch["input_ids"].shape[1], device=ids.device)
    return batch | {"attention_mask": everything, "decoder_attention_mask": causal}


@pytest.mark.gpu
@families
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_forward_captured_in_a_cuda_graph(family, attention):
    model = stock_model(family, attention).cuda()
    fuseopt.initialize(model, {"kernel_fusion": BLOCKS["kernels-jit"]})
    ids = tiny.inputs(model)
    batch = {**(with_prepared_masks(ids) if attention == "eager" else ids), "use_cache": False}
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), RawCalls() as raw:
            before = [model(**batch).logits for _ in range(3)][-1]
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(**batch).logits
        for tokens in ids.values():
            tokens.copy_(tokens.flip(0) + 1)
        graph.replay()
        after = model(**batch).logits
    assert raw.calls and not torch.equal(after, before)
    torch.testing.assert_close(captured, after)
