"""A fused model is freed with its last reference, and copies and pickles have what was set on it."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.blocks import stack_runner
from fuseopt.runtime.references import weak_attribute
from tests import tiny
from tests.axes import covering

TRITON = ["FusedRotaryEmbedding", "FusedRelativeAttention", "FusedDropoutAdd", "FusedCrossEntropy", "FusedAttention"]
RESIDUAL = [{"name": name, "fuse_residual": True} for name in ("FusedLayerNorm", "FusedRMSNorm")]
# With the attention implementation that they are for.
CONFIGS = {
    "inference": ("inference", "sdpa"),
    "reference": ("reference", "eager"),
    "jit": ({"kernel_fusion": {"enable": True}}, "sdpa"),
    "residual": ({"kernel_fusion": {"jit": False, "custom_cuda_kernels": RESIDUAL}}, "sdpa"),
    "triton": ({"kernel_fusion": {"jit": False, "triton_kernels": [*TRITON, "FusedLinearCrossEntropy"]}}, "sdpa"),
}
AOT = {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager"}, "triton_kernels": TRITON}}
NO_DROPOUT = {"gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0), "t5": {"dropout_rate": 0.0}}
pytestmark = [
    pytest.mark.usefixtures("each_device"),
    pytest.mark.filterwarnings("ignore:fuseopt. .* matches nothing in the model"),
]
families = pytest.mark.parametrize("family", ["gpt2", "t5", "llama"])


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def train(model: nn.Module) -> None:
    ids = tiny.inputs(model)
    labels = ids.get("decoder_input_ids", ids["input_ids"])
    model.train()(**ids, labels=labels).loss.backward()
    model.eval()


def assert_freed_at_once(models: list[nn.Module]) -> None:
    """Drops the last references to the models."""
    modules = [weakref.ref(module) for model in models for module in model.modules()]
    tensors = [weakref.ref(parameter) for model in models for parameter in model.parameters()]
    with no_garbage_collector():
        models.clear()
        assert [type(ref()).__name__ for ref in modules if ref() is not None] == []
        assert not any(ref() is not None for ref in tensors)


@families
@pytest.mark.parametrize("config", CONFIGS)
def test_a_fused_model_is_freed_without_the_garbage_collector(family, config):
    source, attention = CONFIGS[config]
    model = tiny.FAMILIES[family](attn_implementation=attention)
    fuseopt.initialize(model, source)
    assert fuseopt.report(model).replaced
    for _ in range(2):
        tiny.logits(model)
    train(model)
    models = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for duplicate in models[1:]:
        if "generate" in vars(duplicate):
            # A copy with the decode loop is held by that until its first call, so that `load().generate(...)` works.
            duplicate.generate(tiny.inputs(duplicate)["input_ids"], max_new_tokens=2)
    del model, duplicate
    assert_freed_at_once(models)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_model_with_a_compiled_training_step_is_freed_without_the_garbage_collector(family):
    model = fuseopt.initialize(tiny.FAMILIES[family](), AOT)
    train(model)
    models = [model]
    del model
    assert_freed_at_once(models)


def test_a_model_whose_blocks_run_at_once_is_freed_without_the_garbage_collector(monkeypatch):
    """As on a GPU, where sizes that come often are captured."""
    device = torch.get_default_device().type
    monkeypatch.setattr(stack_runner, "DEVICE_TYPES", (device,))
    runs = []
    work = stack_runner.StackWork
    monkeypatch.setattr(stack_runner, "StackWork", lambda *arguments: runs.append(1) or work(*arguments))
    blocks = {"kernel_fusion": {"custom_cuda_kernels": ["FusedBlock"], "backend": "reference", "jit": False}}
    model = fuseopt.initialize(tiny.gpt2(), blocks)
    stock = tiny.logits(fuseopt.restore(copy.deepcopy(model)))
    for _ in range(4):
        torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-4, atol=1e-5)
    assert runs
    models = [model, copy.deepcopy(model)]
    del model
    assert_freed_at_once(models)


def test_a_restored_model_is_freed_without_the_garbage_collector():
    model = tiny.gpt2()
    with fuseopt.fused(model, "reference"), fuseopt.fused(model, "inference"):
        tiny.logits(model)
    models = [model]
    del model
    assert_freed_at_once(models)


def test_what_was_set_on_a_copy_calls_the_copy():
    model = fuseopt.initialize(tiny.gpt2(), CONFIGS["residual"][0])
    other = pickle.loads(pickle.dumps(model))
    block = other.transformer.h[0]
    assert block.forward.block is block and model.transformer.h[0].forward.block is not block
    alone = copy.deepcopy(model.transformer.h[1])
    assert alone.forward.block is alone


def test_a_forward_keeps_what_it_needs_of_its_module_as_a_bound_method_does():
    stock = tiny.gpt2()
    model = fuseopt.initialize(copy.deepcopy(stock), CONFIGS["residual"][0])
    forward, hidden = model.transformer.h[0].forward, torch.randn(1, 5, 24)
    of = weakref.ref(model.transformer.h[0])
    del model
    with no_garbage_collector():
        assert of() is None
        torch.testing.assert_close(forward(hidden), stock.transformer.h[0](hidden))


def test_an_attribute_whose_object_is_gone_says_so():
    class Holder:
        to = weak_attribute("to")

    holder = Holder()
    holder.to = Holder()
    with pytest.raises(ReferenceError, match="keep a reference to the model"):
        _ = holder.to


SHALLOW = {"copy": copy.copy, "deepcopy": lambda model: copy.copy(copy.deepcopy(model))}


@covering(family=["gpt2", "t5", "llama"], config=["inference", "reference", "jit"], copied=SHALLOW)
def test_a_shallow_copy_outlives_the_model(family, config, copied):
    check_shallow_copy(family, CONFIGS[config][0], copied)


@pytest.mark.parametrize(
    ("family", "copied"),
    [
        ("gpt2", "copy"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in itertools.product(["t5", "llama"], SHALLOW)),
        pytest.param("gpt2", "deepcopy", marks=pytest.mark.slow),
    ],
)
def test_a_shallow_copy_outlives_the_model_with_a_compiled_training_step(family, copied):
    check_shallow_copy(family, AOT, SHALLOW[copied])


def check_shallow_copy(family, source, copied):
    stock = tiny.FAMILIES[family](**NO_DROPOUT.get(family, {}))
    model = fuseopt.initialize(copy.deepcopy(stock), source)
    of, other = weakref.ref(model), copied(model)
    del model
    gc.collect()
    assert of() is None
    arguments = {"max_new_tokens": 6, "do_sample": False, "no_repeat_ngram_size": 2, "pad_token_id": 0}
    ids = tiny.inputs(stock)["input_ids"]
    assert torch.equal(other.generate(ids, **arguments), stock.generate(ids, **arguments))
    torch.testing.assert_close(tiny.logits(other), tiny.logits(stock), rtol=1e-4, atol=1e-5)
    for each in (other, stock):
        train(each)
    tiny.assert_same_gradients(*({n: p.grad for n, p in each.named_parameters()} for each in (other, stock)))
    assert torch.equal(fuseopt.restore(other).generate(ids, **arguments), stock.generate(ids, **arguments))


@pytest.mark.gpu
@families
def test_a_fused_models_memory_on_a_gpu_is_freed_at_once(family, each_device):
    if each_device.type != "cuda":
        pytest.skip("of a GPU's memory")
    with torch.device("cuda"):
        warm = fuseopt.initialize(tiny.FAMILIES[family](), "inference")
        for _ in range(5):
            tiny.logits(warm)
        models = [warm]
        del warm
        assert_freed_at_once(models)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model = fuseopt.initialize(tiny.FAMILIES[family](), "inference")
        for _ in range(5):
            tiny.logits(model)
        model.generate(tiny.inputs(model)["input_ids"], max_new_tokens=4, no_repeat_ngram_size=2)
        assert torch.cuda.memory_allocated() > before
        models = [model]
        del model
        assert_freed_at_once(models)
        assert torch.cuda.memory_allocated() <= before
