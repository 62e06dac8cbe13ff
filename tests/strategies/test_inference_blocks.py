"""`FusedBlock`: when blocks run past the forwards of the modules inside, with what result, and when they do not."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

import fuseopt
from fuseopt import ops
from fuseopt.blocks.gpt2_inference import GPT2InferenceForward
from tests import tiny
from tests.pairs import stock_and_fused

pytestmark = pytest.mark.usefixtures("each_device")

CONFIG = {"kernel_fusion": {"custom_cuda_kernels": ["FusedBlock"], "jit": False}}
LAYERS = 2


def blocks_run(model, run=tiny.logits):
    """How many blocks run past the forwards inside during `run(model)`, and what that returns."""
    with (
        mock.patch.object(GPT2InferenceForward, "run", autospec=True, side_effect=_run) as blocks,
        mock.patch.object(GPT2Attention, "forward", autospec=True, side_effect=_attention) as attentions,
    ):
        result = run(model)
    assert not (blocks.call_count and attentions.call_count)
    return blocks.call_count, result


_run, _attention = GPT2InferenceForward.run, GPT2Attention.forward


def assert_runs(expected, stock, fused, run=tiny.logits):
    count, result = blocks_run(fused, run)
    assert count == expected
    torch.testing.assert_close(result, run(stock), rtol=1e-5, atol=1e-5)


def no_grad(**options):
    def run(model):
        with torch.no_grad():
            return model(**tiny.inputs(model), **options)

    return run


@pytest.mark.parametrize("config", [CONFIG, "inference"], ids=["alone", "preset"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_inner": 20},
        {"activation_function": "relu"},
        {"activation_function": "gelu"},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"attn_implementation": "eager"},
        {"add_cross_attention": True},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_logits_are_stock_s(config, options):
    stock = tiny.gpt2(**options)
    fused = fuseopt.initialize(copy.deepcopy(stock), config)
    assert_runs(LAYERS, stock, fused)


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("padded", [False, True])
def test_lengths_masks_and_positions(length, padded):
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    torch.manual_seed(length)
    ids = torch.randint(3, tiny.VOCAB, (3, length))
    mask = torch.ones(3, length, dtype=torch.int64)
    if padded:
        mask[0, : length // 2] = 0

    def run(model):
        with torch.inference_mode():
            logits = model(ids, attention_mask=mask, position_ids=torch.arange(length).flip(0)[None]).logits
        return logits[mask.bool()]

    assert_runs(LAYERS, stock, fused, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_in_half_precision_is_no_larger_than_stock(dtype):
    model = tiny.gpt2()
    exact = tiny.logits(copy.deepcopy(model).double())
    stock = tiny.logits(model.to(dtype))
    count, fused = blocks_run(fuseopt.initialize(model, CONFIG))
    assert count == LAYERS and fused.dtype == stock.dtype
    allowed = (stock.double() - exact).norm()
    assert (fused.double() - exact).norm() <= 1.15 * allowed + torch.finfo(dtype).eps * exact.norm()


def test_float64_is_stock_s():
    stock, fused = (model.double() for model in stock_and_fused(tiny.gpt2(), CONFIG))
    count, logits = blocks_run(fused)
    assert count == LAYERS
    torch.testing.assert_close(logits, tiny.logits(stock), rtol=1e-12, atol=1e-12)


def test_the_cache_is_transformers_own_and_goes_on():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    ids = tiny.inputs(stock)["input_ids"]

    def run(model):
        with torch.no_grad():
            start = model(ids[:, :4], use_cache=True)
            end = model(ids[:, 4:], past_key_values=start.past_key_values)
        assert end.past_key_values is start.past_key_values
        cache = end.past_key_values
        return end.logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))

    assert_runs(2 * LAYERS, stock, fused, run)
    _, (_, *tensors) = blocks_run(fused, run)
    assert len(tensors) == 2 * LAYERS and all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_generate_runs_fused_blocks_and_gives_the_tokens_of_stock(options):
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    ids = tiny.inputs(stock)["input_ids"]
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with mock.patch.object(GPT2InferenceForward, "run", autospec=True, side_effect=_run) as blocks:
        tokens = fused.generate(ids, **arguments, **options)
    assert blocks.call_count >= 2 * LAYERS
    assert torch.equal(tokens, stock.generate(ids, **arguments, **options))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_captured_hidden_states_and_attentions_are_stock_s(implementation):
    stock, fused = stock_and_fused(tiny.gpt2(attn_implementation=implementation), CONFIG)
    ask = no_grad(output_hidden_states=True, output_attentions=True)
    expected = ask(stock)
    with mock.patch.object(GPT2InferenceForward, "run", autospec=True, side_effect=_run) as blocks:
        got = ask(fused)
    assert blocks.call_count == LAYERS and list(got) == list(expected)
    assert len(got.hidden_states) == LAYERS + 1 and len(got.attentions or ()) == len(expected.attentions or ())
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.attentions, expected.attentions, rtol=1e-5, atol=1e-5)
    # The hooks that did that stay.
    assert_runs(LAYERS, stock, fused)


def test_attention_that_looks_ahead():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    for model in (stock, fused):
        for block in model.transformer.h:
            block.attn.is_causal = False
    assert_runs(LAYERS, stock, fused)
    assert not torch.allclose(tiny.logits(fused), tiny.logits(tiny.gpt2()))


def test_weights_and_modules_that_change_show():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    for model in (stock, fused):
        tiny.logits(model)
        torch.manual_seed(0)
        block = model.transformer.h[0]
        with torch.no_grad():
            block.mlp.c_fc.weight.mul_(2.0)
        block.attn.c_proj.bias = nn.Parameter(torch.randn_like(block.attn.c_proj.bias))
        block.mlp.act = nn.Tanh().eval()
        block.ln_2.eps = 0.1
    assert_runs(LAYERS, stock, fused)


def train(model):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def sample_with_dropout(model):
    for block in model.transformer.h:
        block.mlp.dropout.train()
        block.mlp.dropout.p = 1.0


def hook_an_inner_module(model):
    for block in model.transformer.h:
        block.attn.c_proj.register_forward_hook(lambda module, args, output: 2 * output)


def replace_a_forward(model):
    for block in model.transformer.h:
        linear = block.mlp.c_proj
        linear.forward = lambda input, linear=linear: 2 * type(linear).forward(linear, input)


def exchange_a_linear_layer(model):
    class Doubled(type(model.transformer.h[0].mlp.c_fc)):
        def forward(self, input):
            return 2 * super().forward(input)

    for block in model.transformer.h:
        block.mlp.c_fc.__class__ = Doubled


def parametrize(model):
    for block in model.transformer.h:
        nn.utils.parametrizations.weight_norm(block.mlp.c_fc)


@pytest.mark.parametrize(
    "change",
    [
        train,
        sample_with_dropout,
        hook_an_inner_module,
        replace_a_forward,
        exchange_a_linear_layer,
        parametrize,
    ],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("late", [False, True])
def test_blocks_that_are_not_plain_run_their_class_s_forward(change, late):
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    if late:
        assert_runs(LAYERS, stock, fused)
    for model in (stock, fused):
        change(model)
    assert_runs(0, stock, fused)


def test_weights_of_several_dtypes_raise_what_stock_does():
    errors = []
    for model in stock_and_fused(tiny.gpt2(), CONFIG):
        model.transformer.h[1].mlp.c_proj.double()
        with pytest.raises(RuntimeError) as error:
            tiny.logits(model)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_adapters_send_blocks_through_the_stock_forward_until_merged():
    peft = pytest.importorskip("peft")
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    assert_runs(LAYERS, stock, fused)
    config = peft.LoraConfig(r=2, target_modules=["c_fc"], init_lora_weights=False, fan_in_fan_out=True)
    adapted = []
    for model in (stock, fused):
        torch.manual_seed(0)
        adapted.append(peft.get_peft_model(model, config).eval())
    assert_runs(0, *adapted)
    merged = [model.merge_and_unload() for model in adapted]
    assert merged[1] is fused
    assert_runs(LAYERS, *merged)


def test_a_hook_on_every_module_sees_every_module():
    _, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        count, _ = blocks_run(fused)
    finally:
        handle.remove()
    assert count == 0 and seen.count("GPT2Attention") == LAYERS


def test_hooks_on_a_block_run_around_it():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    for model in (stock, fused):
        model.transformer.h[0].register_forward_hook(lambda module, args, output: output + 1)
    assert_runs(LAYERS, stock, fused)


def test_a_dispatch_mode_sees_the_class_s_forward():
    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    with Looks():
        assert_runs(0, stock, fused)


def test_gradients_autocast_and_transforms_are_left_to_the_class_s_forward():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    gradients = []
    for model in (stock, fused):
        ids = tiny.inputs(model)
        count, loss = blocks_run(model, lambda model, ids=ids: model(**ids, labels=ids["input_ids"]).loss)
        assert count == 0
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    tiny.assert_same_gradients(*reversed(gradients))
    with torch.autocast(fused.device.type, torch.bfloat16):
        count, logits = blocks_run(fused)
        assert count == 0 and torch.equal(logits, tiny.logits(stock))
    embeddings = torch.randn(3, 1, 4, 24)

    def batched(model):
        with torch.no_grad():
            block = model.transformer.h[0]
            return torch.func.vmap(lambda hidden: block(hidden))(embeddings)

    count, result = blocks_run(fused, batched)
    assert count == 0
    torch.testing.assert_close(result, batched(stock), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_torch_compile_sees_one_graph():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    torch._dynamo.reset()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(no_grad()(compiled).logits, tiny.logits(stock), rtol=1e-5, atol=1e-5)


def test_loss_and_tuples():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    labels = tiny.inputs(stock)["input_ids"]
    assert_runs(LAYERS, stock, fused, lambda model: no_grad(labels=labels)(model).loss)
    assert_runs(LAYERS, stock, fused, lambda model: no_grad(return_dict=False, use_cache=False)(model)[0])
    assert type(no_grad()(fused)) is type(no_grad()(stock))


def test_copies_and_pickles_run_their_own_blocks():
    _, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    expected = tiny.logits(fused)
    others = copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.add_(1.0)
    for other in others:
        count, logits = blocks_run(other)
        assert count == LAYERS and torch.equal(logits, expected)


def test_structure_stays_and_restore_gives_every_object_back():
    model = tiny.gpt2()
    before = tiny.snapshot(model)
    classes = [type(module) for module in model.modules()]
    fuseopt.initialize(model, CONFIG, strict=True)
    assert [type(module) for module in model.modules()] == classes
    fuseopt.restore(model)
    assert tiny.snapshot(model) == before


def test_blocks_that_cannot_be_exchanged_say_why():
    model = tiny.gpt2()
    model.transformer.h[0].mlp.c_fc = nn.Linear(24, 96)
    model.transformer.h[1].forward = model.transformer.h[1].forward
    with pytest.warns(UserWarning, match="FusedBlock"):
        fuseopt.initialize(model, CONFIG)
    reasons = [row.reason for row in fuseopt.report(model).skipped if row.target == "GPT2InferenceForward"]
    assert "mlp.c_fc (Linear)" in reasons[0] and "replaced on the instance" in reasons[1]


def test_other_heads_of_gpt2_have_the_same_blocks():
    from transformers import GPT2ForSequenceClassification

    torch.manual_seed(0)
    stock = GPT2ForSequenceClassification(copy.deepcopy(tiny.gpt2().config)).eval()
    stock.config.pad_token_id = 0
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIG, strict=True)
    assert_runs(LAYERS, stock, fused)


@pytest.mark.parametrize("each_device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_sequences_without_a_mask_have_their_own_attention(dtype):
    stock, fused = (model.to(dtype) for model in stock_and_fused(tiny.gpt2(), CONFIG))
    calls = {(2, 7, 0): LAYERS, (200, 7, 0): LAYERS, (2, 32, 0): LAYERS, (2, 33, 0): 0, (2, 1, 0): 0, (2, 7, 3): 0}
    for (batch, length, masked), expected in calls.items():
        ids = tiny.inputs(stock, batch, length)["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, :masked] = 0
        with mock.patch.object(ops, "short_attention", wraps=ops.short_attention) as attention, torch.no_grad():
            logits = fused(ids, attention_mask=mask).logits[mask.bool()]
            assert attention.call_count == expected
            expected_logits = stock(ids, attention_mask=mask).logits[mask.bool()]
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(logits, expected_logits, rtol=tolerance, atol=tolerance)
