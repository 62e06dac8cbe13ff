"""`FusedRelativeAttention` in models: T5 trains as with its own attention, and no matrix of biases is made."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from transformers import StaticCache

import fuseopt
from fuseopt import ops
from fuseopt.blocks.relative_attention import FusedRelativeAttention
from tests import tiny
from tests.pairs import stock_and_fused
from tests.training_steps import assert_slope, norms_in_float64

pytestmark = pytest.mark.usefixtures("each_device")
CONFIG = {"kernel_fusion": {"triton_kernels": ["FusedRelativeAttention"], "jit": False}}
every_family = pytest.mark.parametrize("family", ["t5", "t5_gated", "mt5"])
every_implementation = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
LAYERS = 6  # two in the encoder, and two with cross-attention in the decoder
# Where tracing takes long, the decoder alone hands its numbers on.
ENCODER_OF_ONE = {"num_layers": 1, "num_decoder_layers": 2}


def model_of(family="t5", implementation="sdpa", **options):
    # Set later, older transformers do not tell the stacks.
    options = {"dropout_rate": 0.0, "attn_implementation": implementation, **options}
    model = tiny.FAMILIES[family](**options).train()
    assert model.decoder.config._attn_implementation == implementation
    return model


def batch_of(model, length=11, padding=(), decoder_padding=()):
    """Arguments of a training step; the second row has that much padding."""
    batch = tiny.inputs(model, batch=3, length=length)
    for name, sides in (("attention_mask", padding), ("decoder_attention_mask", decoder_padding)):
        if sides:
            mask = torch.ones(3, length if name == "attention_mask" else length - 1, dtype=torch.long)
            mask[1, slice(*sides)] = 0
            batch[name] = mask
    labels = batch["decoder_input_ids"].clone()
    if decoder_padding:
        labels[batch["decoder_attention_mask"] == 0] = -100
    return {**batch, "labels": labels}


def counted():
    return mock.patch.object(ops, "relative_attention", wraps=ops.relative_attention)


def step(model, batch=None, **kwargs):
    """Loss and gradients of one step, and how often the op ran."""
    model.zero_grad()
    with counted() as op:
        loss = model(**(batch or batch_of(model)), **kwargs).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, op.call_count


def assert_same_step(stock, fused, batch=None, calls=LAYERS, **kwargs):
    expected, expected_gradients, none = step(stock, batch, **kwargs)
    loss, gradients, count = step(fused, batch, **kwargs)
    assert (none, count) == (0, calls)
    torch.testing.assert_close(loss, expected)
    tiny.assert_same_gradients(gradients, expected_gradients)


@every_family
@every_implementation
def test_loss_and_gradients_are_stock_s(family, implementation):
    stock, fused = stock_and_fused(model_of(family, implementation), CONFIG, strict=False)
    for padding, decoder_padding in (((), ()), ((6, 11), ()), ((0, 3), (7, 10)), ((6, 11), (0, 4))):
        batch = batch_of(stock, padding=padding, decoder_padding=decoder_padding)
        assert_same_step(stock, fused, batch, use_cache=False)
    assert_same_step(stock, fused, use_cache=True)


@every_implementation
def test_lengths_beyond_the_last_bucket(implementation):
    stock, fused = stock_and_fused(
        model_of(implementation=implementation, relative_attention_num_buckets=8, relative_attention_max_distance=12),
        CONFIG,
        strict=False,
    )
    assert_same_step(stock, fused, batch_of(stock, length=40))


def test_training_only_leaves_evaluation_to_stock():
    stock, fused = stock_and_fused(model_of(), CONFIG, strict=False)
    for module in fused.modules():
        if isinstance(module, FusedRelativeAttention):
            module.training_only = True
    for padding, decoder_padding in (((), ()), ((6, 11), ()), ((0, 3), (7, 10))):
        batch = batch_of(stock, padding=padding, decoder_padding=decoder_padding)
        for training, calls in ((True, LAYERS), (False, 0)):
            stock.train(training), fused.train(training)
            assert_same_step(stock, fused, batch, calls=calls)


def test_the_preset_takes_it_in_training_on_a_gpu(each_device):
    device = each_device.type
    rows = [row for row in fuseopt.plan(tiny.t5(), "training").rows if row.strategy == "triton"]
    reasons = {row.reason for row in rows if row.target in ("FusedRelativeAttention", "RelativeStackForward")}
    if device == "cuda":
        assert "all self-attentions of its stack are replaced, in training" in reasons
    else:
        assert reasons == {"it is faster on a GPU only"}


@pytest.mark.gpu
@pytest.mark.parametrize("each_device", ["cuda"], indirect=True)
def test_on_a_gpu_the_triton_op_runs():
    stock, fused = stock_and_fused(model_of(), CONFIG, strict=False)
    batch = batch_of(fused, padding=(6, 11))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert_same_step(stock, fused, batch)
    names = [event.key for event in profile.key_averages()]
    assert "fuseopt::relative_attention_fwd" in names and "fuseopt::relative_attention_bwd" in names


def test_attentions_are_told_what_the_masks_of_their_stack_say():
    _, fused = stock_and_fused(model_of(), CONFIG, strict=False)
    for padding, decoder_padding in (((), ()), ((6, 11), ()), ((0, 3), (7, 10))):
        batch = batch_of(fused, padding=padding, decoder_padding=decoder_padding)
        with counted() as op:
            fused(**batch)
        given = [
            (call.kwargs["causal"], None if call.kwargs["mask"] is None else tuple(call.kwargs["mask"].shape))
            for call in op.call_args_list
        ]
        encoder, decoder = (
            (3, 1, 1, size) if sides else None for size, sides in ((11, padding), (10, decoder_padding))
        )
        assert given == [(False, encoder)] * 2 + [(True, decoder), (False, encoder)] * 2


def test_masks_of_four_dimensions_are_read_as_they_are():
    stock, fused = stock_and_fused(model_of(), CONFIG, strict=False)
    batch = batch_of(fused)
    distance = torch.arange(10) - torch.arange(10)[:, None]
    batch["decoder_attention_mask"] = ((distance <= 0) & (distance > -4)).expand(3, 1, 10, 10)
    expected, expected_gradients, _ = step(stock, batch)
    with counted() as op:
        loss = fused(**batch).loss
        loss.backward()
    assert sum(call.kwargs["mask"] is batch["decoder_attention_mask"] for call in op.call_args_list) == 2
    torch.testing.assert_close(loss, expected)
    tiny.assert_same_gradients({name: p.grad for name, p in fused.named_parameters()}, expected_gradients)


def test_layers_hand_a_number_a_distance_on():
    _, fused = stock_and_fused(model_of(), CONFIG, strict=False)
    shapes = []
    for block in (*fused.encoder.block, *fused.decoder.block):
        block.layer[0].register_forward_hook(lambda module, args, output: shapes.append(tuple(output[1].shape)))
    step(fused)
    assert shapes == [(3, 2 * fused.config.relative_attention_max_distance + 1)] * 4


def test_gradients_with_dropout_are_those_of_the_masks_drawn():
    # The family without ReLU's kinks.
    _, fused = stock_and_fused(model_of("t5_gated", dropout_rate=0.2), CONFIG, strict=False)
    norms_in_float64(fused).double()
    batch = batch_of(fused, padding=(6, 11))
    assert_slope(fused, lambda: fused(**batch).loss)
    torch.manual_seed(0)
    first = fused(**batch).loss
    assert fused(**batch).loss != first
    torch.manual_seed(0)
    assert fused(**batch).loss == first


@every_family
def test_eval_mode_and_generate(family):
    stock, fused = (model.eval() for model in stock_and_fused(model_of(family, dropout_rate=0.1), CONFIG, strict=False))
    batch = batch_of(fused, padding=(6, 11))
    with torch.no_grad(), counted() as op:
        torch.testing.assert_close(fused(**batch).logits, stock(**batch).logits, rtol=1e-5, atol=5e-5)
    assert op.call_count == LAYERS
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": batch["attention_mask"]}
    tokens = fused.generate(batch["input_ids"], **options)
    assert torch.equal(tokens, stock.generate(batch["input_ids"], **options))


def test_a_generation_step_takes_the_attention_for_what_it_is():
    model = tiny.t5()
    ids = tiny.inputs(model)["input_ids"]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    fuseopt.initialize(model, {**CONFIG, "generation": {"enable": True}})
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert "T0" in str(fuseopt.report(model))


def test_attentions_that_are_asked_for_come_from_the_source_s_forward():
    stock, fused = stock_and_fused(model_of(implementation="eager"), CONFIG, strict=False)
    batch = batch_of(fused)
    with counted() as op:
        output, expected = (model(**batch, output_attentions=True) for model in (fused, stock))
    assert op.call_count == 0 and len(output.encoder_attentions) == 2
    torch.testing.assert_close(output.decoder_attentions, expected.decoder_attentions)
    fused.config.output_attentions = stock.config.output_attentions = True
    for part in (fused.encoder, fused.decoder, stock.encoder, stock.decoder):
        part.config.output_attentions = True
    assert_same_step(stock, fused, calls=0)


def test_caches_that_hold_tokens_and_static_ones_are_left_to_the_source():
    stock, fused = (model.eval() for model in stock_and_fused(model_of(), CONFIG, strict=False))
    batch = tiny.inputs(fused)
    ids = batch["decoder_input_ids"]
    logits = []
    for model in (stock, fused):
        with torch.no_grad(), counted() as op:
            first = model(batch["input_ids"], decoder_input_ids=ids[:, :4])
            last = model(
                encoder_outputs=(first.encoder_last_hidden_state,),
                decoder_input_ids=ids[:, 4:],
                past_key_values=first.past_key_values,
            )
        logits.append((first.logits, last.logits))
    assert op.call_count == LAYERS
    torch.testing.assert_close(logits[1], logits[0])
    outputs = []
    for model in (stock, fused):
        cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=8)
        with torch.no_grad(), counted() as op:
            outputs.append(model.decoder(ids, past_key_values=cache, use_cache=True).last_hidden_state)
    assert op.call_count == 0
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_draws_the_same_masks_again(use_reentrant):
    _, fused = stock_and_fused(model_of(dropout_rate=0.3), CONFIG, strict=False)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            fused.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            fused.enable_input_require_grads()
        torch.manual_seed(3)
        results.append(step(fused, use_cache=False))
    assert results[1][2] == 2 * LAYERS
    torch.testing.assert_close(results[1][0], results[0][0])
    tiny.assert_same_gradients(results[1][1], results[0][1])


def test_a_compiled_training_step_is_one_graph():
    torch._dynamo.reset()
    stock, fused = stock_and_fused(model_of(**ENCODER_OF_ONE), CONFIG, strict=False)
    compiled = torch.compile(lambda **batch: fused(**batch, use_cache=False), backend="aot_eager", fullgraph=True)
    batch = batch_of(fused, padding=(6, 11))
    loss = compiled(**batch).loss
    torch.testing.assert_close(loss, stock(**batch).loss)
    loss.backward()
    _, expected, _ = step(stock, batch)
    tiny.assert_same_gradients({name: p.grad for name, p in fused.named_parameters()}, expected)


@pytest.mark.slow
def test_beside_memory_efficient_fusion_and_fused_residual_adds():
    torch._dynamo.reset()
    for more in (
        {"memory_efficient_fusion": {"backend": "aot_eager"}},
        {"custom_cuda_kernels": [{"name": "FusedRMSNorm", "fuse_residual": True}]},
    ):
        stock, fused = stock_and_fused(
            model_of(**ENCODER_OF_ONE), {"kernel_fusion": {**CONFIG["kernel_fusion"], **more}}, strict=False
        )
        loss = fused(**batch_of(fused)).loss
        loss.backward()
        expected, expected_gradients, _ = step(stock)
        torch.testing.assert_close(loss, expected)
        tiny.assert_same_gradients({name: p.grad for name, p in fused.named_parameters()}, expected_gradients)


def test_restore_copies_and_pickles():
    _, fused = stock_and_fused(model_of(), CONFIG, strict=False)
    expected, _, _ = step(fused)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        loss, _, count = step(other)
        assert count == LAYERS and torch.equal(loss, expected)
    model = tiny.t5().train()
    before, keys = tiny.snapshot(model), list(model.state_dict())
    fuseopt.initialize(model, CONFIG)
    assert list(model.state_dict()) == keys
    step(model)
    model.zero_grad(set_to_none=True)
    fuseopt.restore(model)
    assert tiny.snapshot(model) == before


def test_adapters_put_on_its_projections_later_take_part():
    peft = pytest.importorskip("peft")
    losses = []
    for model in stock_and_fused(model_of(), CONFIG, strict=False):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False))
        with counted() as op:
            losses.append(adapted(**batch_of(model)).loss)
    assert op.call_count == LAYERS
    torch.testing.assert_close(*losses)


def rows(model, config=CONFIG):
    return [row for row in fuseopt.plan(model, config).rows if row.target == FusedRelativeAttention.__name__]


def test_the_plan_takes_all_self_attentions_of_a_stack_or_none():
    model = tiny.t5()
    names = ("encoder.block.{}.layer.0.Self", "decoder.block.{}.layer.0.Self", "decoder.block.{}.layer.1.EncDec")
    assert sorted(path for row in rows(model) if row.replaced for path in row.paths) == sorted(
        f"{name.format(i)}Attention" for name in names for i in range(2)
    )
    model.encoder.block[1].layer[0].SelfAttention.register_forward_hook(lambda *_: None)
    found = {row.paths[0]: (row.replaced, row.reason) for row in rows(model)}
    assert found["encoder.block.1.layer.0.SelfAttention"] == (
        False,
        "it carries hooks, which expect the module they were registered on",
    )
    assert found["encoder.block.0.layer.0.SelfAttention"] == (
        False,
        "encoder.block.1.layer.0.SelfAttention cannot be replaced, and passes the position bias on as a matrix",
    )
    assert found["decoder.block.0.layer.0.SelfAttention"][0]
    with pytest.warns(UserWarning, match="FusedRelativeAttention"):
        fuseopt.initialize(tiny.umt5(), CONFIG)


def test_the_softmax_inside_is_then_left_alone():
    model = tiny.t5(attn_implementation="eager")
    both = {"kernel_fusion": {"triton_kernels": ["FusedSoftmax", "FusedRelativeAttention"], "jit": False}}
    assert all(row.replaced for row in rows(model, both))
    fused = fuseopt.initialize(copy.deepcopy(model).train(), both)
    assert step(fused)[2] == LAYERS
