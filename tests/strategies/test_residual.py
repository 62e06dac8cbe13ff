"""`fuse_residual`: which blocks run their residual adds inside norms, with what result, and when their own forward."""

import copy
import pickle
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt import ops
from fuseopt.blocks.residual import GPT2BlockForward, T5BlockForward
from fuseopt.modules import FusedLayerNorm
from tests import tiny
from tests.pairs import stock_and_fused

pytestmark = pytest.mark.usefixtures("each_device")


def config(kernel):
    return {"kernel_fusion": {"custom_cuda_kernels": [{"name": kernel, "fuse_residual": True}], "jit": False}}


GPT2, T5 = config("FusedLayerNorm"), config("FusedRMSNorm")
# family -> config, the fused op, its calls in a forward: T5 has one a layer of the encoder and two of the decoder
CASES = {
    "gpt2": (GPT2, "add_layer_norm", 2),
    "t5": (T5, "add_rms_norm", 2 * 1 + 2 * 2),
    "t5_gated": (T5, "add_rms_norm", 6),
    "mt5": (T5, "add_rms_norm", 6),
}
every_family = pytest.mark.parametrize("family", CASES)


def calls(family, model, run=tiny.logits):
    """How often the fused op runs in `run(model)`, and what that returns."""
    name = CASES[family][1]
    with mock.patch.object(ops, name, wraps=getattr(ops, name)) as called:
        result = run(model)
    return called.call_count, result


def with_backend(family, backend):
    return {"kernel_fusion": CASES[family][0]["kernel_fusion"] | {"backend": backend}}


@every_family
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_every_inner_add_goes_through_the_op(family, backend):
    model = tiny.FAMILIES[family]()
    expected = tiny.logits(model)
    fuseopt.initialize(model, with_backend(family, backend))
    count, logits = calls(family, model)
    assert count == CASES[family][2]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@every_family
def test_the_sum_and_the_norm_are_those_of_two_steps_to_the_bit(family):
    """On the reference backend there is nothing but the source's arithmetic."""
    model = tiny.FAMILIES[family]()
    for dtype in (torch.float32, torch.bfloat16):
        stock = tiny.logits(model.to(dtype))
        fuseopt.initialize(model, with_backend(family, "reference"))
        assert torch.equal(tiny.logits(model), stock)
        fuseopt.restore(model)


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_in_half_precision_is_no_larger_than_stock(family, dtype):
    model = tiny.FAMILIES[family]()
    exact = tiny.logits(copy.deepcopy(model).double())
    stock = tiny.logits(model.to(dtype))
    fused = tiny.logits(fuseopt.initialize(model, CASES[family][0]))
    assert fused.dtype == stock.dtype
    allowed = (stock.double() - exact).norm()
    assert (fused.double() - exact).norm() <= 1.15 * allowed + torch.finfo(dtype).eps * exact.norm()


@every_family
def test_autocast_keeps_the_stream_in_float32(family):
    stock, fused = stock_and_fused(tiny.FAMILIES[family](), CASES[family][0])
    with torch.autocast(fused.device.type, torch.bfloat16):
        expected = tiny.logits(stock)
        count, logits = calls(family, fused)
    assert count == CASES[family][2] and logits.dtype == expected.dtype
    torch.testing.assert_close(logits, expected, rtol=3e-2, atol=3e-2)


@every_family
def test_gradients_are_stock_s(family):
    gradients = []
    for model in stock_and_fused(tiny.FAMILIES[family](), CASES[family][0]):
        batch = tiny.inputs(model)
        model(**batch, labels=batch.get("decoder_input_ids", batch["input_ids"])).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    stock, fused = gradients
    tiny.assert_same_gradients(fused, stock)


@every_family
def test_dropout_draws_the_same_numbers(family):
    rate = {"resid_pdrop": 0.3, "attn_pdrop": 0.0} if family == "gpt2" else {"dropout_rate": 0.3}
    stock, fused = stock_and_fused(tiny.FAMILIES[family](**rate), CASES[family][0])
    logits = []
    for model in (stock.train(), fused.train()):
        torch.manual_seed(5)
        logits.append(tiny.logits(model))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@every_family
def test_a_float16_stream_of_t5_is_clamped_by_the_block_s_own_forward(family):
    stock, fused = (model.half() for model in stock_and_fused(tiny.FAMILIES[family](), CASES[family][0]))
    if family == "gpt2":
        assert calls(family, fused)[0] == 2
        return
    with torch.no_grad():
        for model in (stock, fused):
            for block in model.decoder.block:
                block.layer[0].SelfAttention.o.weight.mul_(1e5)
    count, logits = calls(family, fused)
    expected = tiny.logits(stock)
    assert count == 0
    assert torch.equal(logits.isnan(), expected.isnan())


def test_t5_in_half_precision_with_wo_in_float32_adds_to_a_float32_stream():
    stock, fused = stock_and_fused(tiny.t5(), CASES["t5"][0])
    for model in (stock, fused):
        model.half()
        for module in model.modules():
            if hasattr(module, "wo"):
                module.wo.float()
    count, logits = calls("t5", fused)
    assert count == 1 + 2  # all blocks but the first of each stack, where the stream is float16 still
    torch.testing.assert_close(logits, tiny.logits(stock), rtol=2e-2, atol=2e-2)


@every_family
def test_generate_and_its_cache(family):
    stock, fused = stock_and_fused(tiny.FAMILIES[family](), CASES[family][0])
    batch = {"input_ids": tiny.inputs(stock)["input_ids"], "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    for options in ({}, {"num_beams": 3}):
        arguments = {**batch, **options, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        count, tokens = calls(family, fused, lambda model, arguments=arguments: model.generate(**arguments))
        assert count > 0
        assert torch.equal(tokens, stock.generate(**arguments))


@every_family
def test_captured_hidden_states_and_attentions_are_stock_s(family):
    stock, fused = (
        model(**tiny.inputs(model), output_hidden_states=True, output_attentions=True)
        for model in stock_and_fused(tiny.FAMILIES[family](attn_implementation="eager"), CASES[family][0])
    )
    assert list(fused) == list(stock)
    for name in stock:
        if "hidden_states" in name or "attentions" in name:
            assert len(fused[name]) == len(stock[name])
            torch.testing.assert_close(fused[name], stock[name], rtol=1e-5, atol=1e-5)


def test_cross_attention_of_gpt2():
    stock, fused = stock_and_fused(tiny.gpt2(add_cross_attention=True), CASES["gpt2"][0])
    states = torch.randn(2, 5, 24)

    def run(model):
        with torch.no_grad():
            return model(**tiny.inputs(model), encoder_hidden_states=states).logits

    count, logits = calls("gpt2", fused, run)
    assert count == 4
    torch.testing.assert_close(logits, run(stock), rtol=1e-5, atol=1e-5)
    assert calls("gpt2", fused)[0] == 2


def test_cross_attention_that_is_not_there_is_refused_in_transformers_words():
    _, fused = stock_and_fused(tiny.gpt2(), CASES["gpt2"][0])
    with pytest.raises(ValueError, match="cross-attention layers"):
        fused(**tiny.inputs(fused), encoder_hidden_states=torch.randn(2, 5, 24))


@every_family
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(family, reentrant):
    gradients = []
    no_dropout = (
        {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else {"dropout_rate": 0.0}
    )
    for model in stock_and_fused(tiny.FAMILIES[family](**no_dropout), CASES[family][0]):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        seen = Counter()
        attention = model.transformer.h[0].attn if family == "gpt2" else model.decoder.block[0].layer[0].SelfAttention
        attention.register_forward_hook(lambda *_, seen=seen: seen.update(["attention"]))
        batch = tiny.inputs(model)
        labels = batch.get("decoder_input_ids", batch["input_ids"])
        model(**batch, labels=labels, use_cache=False).loss.backward()
        assert seen["attention"] == 2
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    stock, fused = gradients
    tiny.assert_same_gradients(fused, stock)


@every_family
def test_structure_stays_and_restore_gives_every_object_back(family):
    model = tiny.FAMILIES[family]()
    before = tiny.snapshot(model)
    classes = {path: type(module) for path, module in model.named_modules()}
    fuseopt.initialize(model, CASES[family][0], strict=True)
    for path, module in model.named_modules():
        assert type(module) is classes[path] or "Norm" in classes[path].__name__
    fuseopt.restore(model)
    assert tiny.snapshot(model) == before


@every_family
def test_copies_and_pickles_run_their_own_blocks(family):
    _, fused = stock_and_fused(tiny.FAMILIES[family](), CASES[family][0])
    expected = tiny.logits(fused)
    others = copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.add_(1.0)
    for other in others:
        count, logits = calls(family, other)
        assert count == CASES[family][2] and torch.equal(logits, expected)


@every_family
def test_hooks_on_a_norm_or_layer_send_the_block_to_its_own_forward(family):
    stock, fused = stock_and_fused(tiny.FAMILIES[family](), CASES[family][0])
    seen = []
    if family == "gpt2":
        fused.transformer.h[0].ln_2.register_forward_hook(lambda *_: seen.append("norm"))
        left = 1
    else:
        fused.encoder.block[0].layer[1].layer_norm.register_forward_hook(lambda *_: seen.append("norm"))
        fused.decoder.block[0].layer[1].register_forward_pre_hook(lambda *_: seen.append("layer"))
        left = 1 + 2
    count, logits = calls(family, fused)
    assert count == left
    assert seen == (["norm"] if family == "gpt2" else ["norm", "layer"])
    torch.testing.assert_close(logits, tiny.logits(stock), rtol=1e-5, atol=1e-5)


def test_hooks_on_the_block_run_around_the_fused_forward():
    _, fused = stock_and_fused(tiny.gpt2(), CASES["gpt2"][0])
    seen = []
    fused.transformer.h[0].register_forward_hook(lambda *_: seen.append("block"))
    assert calls("gpt2", fused)[0] == 2 and seen == ["block"]


def test_a_norm_put_in_later_is_called():
    _, fused = stock_and_fused(tiny.gpt2(), CASES["gpt2"][0])
    fused.transformer.h[1].ln_2 = nn.Identity()
    assert isinstance(fused.transformer.h[0].ln_2, FusedLayerNorm)
    assert calls("gpt2", fused)[0] == 1


def rows(model, config, replaced):
    plan = fuseopt.plan(model, config)
    target = (GPT2BlockForward.__name__, T5BlockForward.__name__, "ResidualForward")
    return [row for row in plan.rows if row.replaced is replaced and row.target in target]


def test_the_plan_shows_the_blocks():
    blocks = rows(tiny.gpt2(), GPT2, True)
    assert [row.paths for row in blocks] == [("transformer.h.0.forward",), ("transformer.h.1.forward",)]
    assert {(row.source, row.target) for row in blocks} == {("GPT2Block.forward", "GPT2BlockForward")}
    assert len(rows(tiny.t5(), T5, True)) == 4
    assert rows(tiny.gpt2(), GPT2, False) == []
    plain = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False}}
    assert rows(tiny.gpt2(), plain, True) == []


def skip_reason(model, config):
    (row,) = {row.reason: row for row in rows(model, config, False)}.values()
    return row.reason


def test_what_stays_and_why():
    assert "policy 't5' names no block" in skip_reason(tiny.umt5(), T5)
    assert "policy 'gpt2' names no block" in skip_reason(tiny.gpt2(), T5)

    model = tiny.gpt2()
    model.transformer.h[1].ln_2.register_forward_hook(lambda *_: None)
    assert skip_reason(model, GPT2).startswith("its ln_2: it carries hooks")
    model = tiny.gpt2()
    model.transformer.h[1].ln_2 = nn.Identity()
    assert "its ln_2 is a Identity" in skip_reason(model, GPT2)
    model = tiny.gpt2()
    model.transformer.h[0].forward = model.transformer.h[0].forward
    assert "replaced on the instance" in skip_reason(model, GPT2)
    model = tiny.t5()
    model.encoder.block[0].layer[1].register_forward_hook(lambda *_: None)
    assert "its layer.1: it carries hooks" in skip_reason(model, T5)


def test_a_backend_that_has_no_such_op_is_replaced_with_the_reason():
    model = tiny.t5()
    expected = tiny.logits(model)
    fuseopt.initialize(model, with_backend("t5", "triton"))
    count, logits = calls("t5", model)
    assert count == 6
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    row = next(row for row in fuseopt.report(model).replaced if row.target == "T5BlockForward")
    assert row.backend != "triton" and "add_rms_norm has no backend 'triton'" in row.reason


def test_a_subclass_of_the_block_stays():
    model = tiny.gpt2()
    block = model.transformer.h[0]
    block.__class__ = type("MyBlock", (type(block),), {})
    assert "subclass of GPT2Block" in skip_reason(model, GPT2)


@every_family
def test_compiles_into_one_graph(family):
    torch._dynamo.reset()
    _, fused = stock_and_fused(
        tiny.FAMILIES[family](**{"n_layer" if family == "gpt2" else "num_layers": 1}), CASES[family][0]
    )
    batch = tiny.inputs(fused)
    forward = fused.transformer if family == "gpt2" else fused.encoder
    batch = {"input_ids": batch["input_ids"]}
    with torch.no_grad():
        expected = forward(**batch, use_cache=False).last_hidden_state
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**batch, use_cache=False).last_hidden_state, expected)
