"""Stacks of Llama and families like it without gradients: which calls run all blocks at once, and with what result."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.blocks import stack_runner
from fuseopt.blocks.llama_inference import LlamaInferenceForward
from tests import tiny
from tests.changes import edit, replace
from tests.pairs import stock_and_fused

CONFIG = {"kernel_fusion": {"custom_cuda_kernels": ["FusedBlock"], "jit": False}}
LAYERS = 2
FAMILIES = {
    "llama": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": None},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def at_once_everywhere(each_device, monkeypatch):
    """On a CPU works run on the same static tensors, but are not captured."""
    monkeypatch.setattr(stack_runner, "DEVICE_TYPES", ("cpu", "cuda"))


def model_of(family="llama", **options):
    """With weights and biases of norms and projections that are neither 0 nor 1."""
    model = tiny.decoder(family, **FAMILIES[family] | options)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def forward(model, **options):
    with torch.no_grad():
        return model(**{**tiny.inputs(model, batch=3), **options})


def assert_runs(blocks, replays, stock, fused, run=forward):
    """So many blocks run past the modules inside, and so many results come from what was captured."""
    replayed = mock.patch.object(stack_runner.StackRunner, "_replayed", autospec=True, side_effect=_replayed)
    passed = mock.patch.object(LlamaInferenceForward, "run", autospec=True, side_effect=_run)
    with passed as ran, replayed as replay:
        outputs = run(fused)
    assert (ran.call_count, replay.call_count) == (blocks, replays)
    torch.testing.assert_close(outputs.logits, run(stock).logits, rtol=1e-5, atol=5e-5)
    return outputs


_run, _replayed = LlamaInferenceForward.run, stack_runner.StackRunner._replayed


@every_family
@pytest.mark.parametrize("config", [CONFIG, "inference"], ids=["alone", "preset"])
def test_a_size_runs_at_once_and_from_the_third_time_on_as_it_was_captured(family, config, each_device):
    stock = model_of(family)
    fused = fuseopt.initialize(copy.deepcopy(stock), config)
    # Where nothing is captured, a replay runs the blocks; measuring algorithms before a capture runs them once more.
    on_cpu = each_device.type == "cpu"
    assert_runs(LAYERS, 0, stock, fused)
    assert_runs(LAYERS, 0, stock, fused)
    if on_cpu:
        assert_runs(LAYERS, 1, stock, fused)
    else:
        forward(fused)
    assert_runs(LAYERS if on_cpu else 0, 1, stock, fused)
    assert "1 captured sizes" in str(fuseopt.report(fused))


@every_family
def test_padding_positions_and_caches(family):
    stock, fused = stock_and_fused(model_of(family), CONFIG)
    ids = tiny.inputs(stock, batch=3)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = torch.arange(ids.shape[1], device=ids.device).flip(0)[None]

    def padded(model):
        outputs = forward(model, attention_mask=mask)
        outputs.logits = outputs.logits[mask.bool()]
        return outputs

    assert_runs(LAYERS, 0, stock, fused, padded)
    assert_runs(LAYERS, 0, stock, fused, lambda model: forward(model, position_ids=positions))

    def in_two(model):
        first = forward(model, input_ids=ids[:, :4], use_cache=True)
        return forward(model, input_ids=ids[:, 4:], past_key_values=first.past_key_values)

    # A cache that is not empty is left to the class's own forward.
    outputs = assert_runs(LAYERS, 0, stock, fused, in_two)
    for ours, theirs in zip(outputs.past_key_values.layers, in_two(stock).past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=5e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("use_cache", [False, True])
def test_tokens_of_a_captured_size_skip_the_stack_s_own_forward(use_cache):
    stock, fused = stock_and_fused(model_of(), CONFIG)

    def run(model):
        return forward(model, use_cache=use_cache)

    for _ in range(3):
        run(fused)
    with mock.patch.object(type(fused.model), "forward", side_effect=AssertionError):
        outputs = run(fused)
    expected = run(stock)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-5, atol=5e-5)
    assert (outputs.past_key_values is None) is (expected.past_key_values is None)
    if use_cache:
        assert outputs.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_in_half_precision_is_no_larger_than_stock_s(family, dtype):
    model = model_of(family)
    exact = forward(copy.deepcopy(model).double()).logits
    stock = forward(model.to(dtype)).logits
    fused = forward(fuseopt.initialize(model, CONFIG)).logits
    assert fused.dtype == stock.dtype
    allowed = (stock.double() - exact).norm()
    assert (fused.double() - exact).norm() <= 1.15 * allowed + torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_activations_other_than_silu(activation):
    stock, fused = stock_and_fused(model_of(hidden_act=activation), CONFIG)
    assert_runs(LAYERS, 0, stock, fused)


def add_hook(model):
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def train_a_block(model):
    model.model.layers[1].train()


def exchange_activation(model):
    model.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU())


def attend_eagerly(model):
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [add_hook, train_a_block, exchange_activation, attend_eagerly])
def test_what_changes_a_block_is_left_to_the_class_s_own_forward(change):
    stock, fused = stock_and_fused(model_of(), CONFIG)
    assert_runs(LAYERS, 0, stock, fused)
    for model in (stock, fused):
        change(model)
    assert_runs(0, 0, stock, fused)


@pytest.mark.parametrize("change", [edit, replace])
def test_changed_weights_show_after_the_capture(change):
    stock, fused = stock_and_fused(model_of(), CONFIG)
    for _ in range(4):
        forward(fused)
    for model in (stock, fused):
        change(model)
    torch.testing.assert_close(forward(fused).logits, forward(stock).logits, rtol=1e-5, atol=5e-5)


def test_recorded_hidden_states_are_stock_s():
    stock, fused = stock_and_fused(model_of(), CONFIG)
    outputs, expected = (forward(model, output_hidden_states=True) for model in (fused, stock))
    torch.testing.assert_close(outputs.hidden_states, expected.hidden_states, rtol=1e-5, atol=5e-5)


def test_gradients_come_from_the_class_s_own_forward():
    stock, fused = stock_and_fused(model_of(), CONFIG)
    for model in (stock, fused):
        model(**tiny.labelled(stock)).loss.backward()
    for ours, theirs in zip(fused.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ],
)
def test_sliding_windows_are_refused_in_the_plan(family, options):
    model = model_of(family, **options)
    (reason,) = fuseopt.plan(model, CONFIG).unmet
    assert "its attention has a sliding window" in reason


@every_family
def test_generate_keeps_its_tier_and_tokens(family):
    stock = model_of(family)
    fused = fuseopt.initialize(copy.deepcopy(stock), "inference")
    ids = tiny.inputs(stock)["input_ids"]
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fused.generate(ids, **arguments), stock.generate(ids, **arguments))
    assert "T0" in str(fuseopt.report(fused))
