"""`FusedCrossEntropy` in models: the loss of causal language models is stock's, and no float32 logits are made."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from transformers.loss.loss_utils import LOSS_MAPPING

import fuseopt
from fuseopt import ops
from fuseopt.modules import FusedCausalLMLoss
from tests import tiny

pytestmark = [pytest.mark.usefixtures("each_device"), pytest.mark.filterwarnings("ignore:.*loss_type=None")]
CONFIG = {"kernel_fusion": {"triton_kernels": ["FusedCrossEntropy"], "jit": False}}
STOCK = LOSS_MAPPING["ForCausalLM"]


def step(model, batch):
    """Loss, gradients, and how often the op ran."""
    model.zero_grad()
    with mock.patch.object(ops, "cross_entropy", wraps=ops.cross_entropy) as op:
        loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, op.call_count


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("items", [None, 5, torch.tensor(5, device="cpu")])
def test_loss_and_gradients_are_stock_s(family, items):
    stock = getattr(tiny, family)()
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIG)
    batch = tiny.inputs(stock)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, :3] = -100
    if items is not None:
        batch["num_items_in_batch"] = items
    loss, gradients, once = step(fused, batch)
    expected, expected_gradients, none = step(stock, batch)
    assert (once, none) == (1, 0) and loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected)
    tiny.assert_same_gradients(gradients, expected_gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_loss_of_any_dtype_is_as_exact_as_stock_s_and_its_gradient_in_that_dtype(dtype):
    torch.manual_seed(0)
    logits = (3 * torch.randn(3, 9, 50)).to(dtype).requires_grad_()
    labels = torch.randint(50, (3, 9))
    for arguments in ({"labels": labels}, {"labels": None, "shift_labels": labels}):
        loss = FusedCausalLMLoss(STOCK)(logits=logits, vocab_size=50, **arguments)
        exact = STOCK(logits=logits, vocab_size=50, **arguments)
        assert loss.dtype == exact.dtype == torch.float32
        torch.testing.assert_close(loss, exact, rtol=1e-5, atol=0)
        gradients = [torch.autograd.grad(each, logits)[0] for each in (loss, exact)]
        assert gradients[0].dtype == dtype
        torch.testing.assert_close(*gradients)


def test_what_the_op_does_not_take_is_left_to_stock():
    logits, labels = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    loss = FusedCausalLMLoss(STOCK)
    with mock.patch.object(ops, "cross_entropy") as op:
        for wrong in (labels.int(), labels[:1], labels[:, :3], labels.float()):
            with pytest.raises((ValueError, RuntimeError)) as expected:
                STOCK(logits, wrong, 11)
            with pytest.raises(type(expected.value)) as raised:
                loss(logits, wrong, 11)
            assert str(raised.value) == str(expected.value)
    assert op.call_count == 0


def test_all_labels_ignored_give_nan_as_stock():
    logits, labels = torch.randn(2, 5, 11), torch.full((2, 5), -100)
    assert STOCK(logits, labels, 11).isnan() and FusedCausalLMLoss(STOCK)(logits, labels, 11).isnan()


def test_a_compiled_training_step_is_one_graph_and_restore_gives_the_loss_back():
    fusion = {"triton_kernels": ["FusedCrossEntropy"], "memory_efficient_fusion": {"backend": "aot_eager"}}
    stock = tiny.gpt2(n_layer=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
    before = tiny.snapshot(stock)
    fused = fuseopt.initialize(copy.deepcopy(stock), {"kernel_fusion": fusion})
    torch._dynamo.reset()
    batch = tiny.inputs(stock)
    batch["labels"] = batch["input_ids"]
    for model in (fused, pickle.loads(pickle.dumps(fused))):
        assert type(model.loss_function) is FusedCausalLMLoss
        torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    fuseopt.restore(fuseopt.initialize(stock, {"kernel_fusion": fusion}))
    assert tiny.snapshot(stock) == before


def test_beside_a_head_without_logits():
    kernels = ["FusedCrossEntropy", "FusedLinearCrossEntropy"]
    stock = tiny.llama().train()
    fused = fuseopt.initialize(copy.deepcopy(stock), {"kernel_fusion": {"triton_kernels": kernels, "jit": False}})
    batch = tiny.inputs(stock)
    batch["labels"] = batch["input_ids"]
    with mock.patch.object(ops, "linear_cross_entropy", wraps=ops.linear_cross_entropy) as op:
        torch.testing.assert_close(fused(**batch).loss, stock(**batch).loss)
    assert op.call_count == 1


def test_the_plan_takes_no_other_loss():
    assert not fuseopt.plan(tiny.t5(), CONFIG).replacements
    model = tiny.llama()
    (row,) = fuseopt.plan(model, CONFIG).rows
    assert (row.paths, row.source, row.target) == (("loss_function",), "ForCausalLMLoss", "FusedCausalLMLoss")
    model.loss_function = lambda **_: 0
    assert not fuseopt.plan(model, CONFIG).replacements
