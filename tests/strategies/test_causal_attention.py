"""`FusedAttention` in models: padded batches train as with SDPA and its matrix of masks, and nothing else changes."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import fuseopt
from fuseopt import ops
from fuseopt.blocks.causal_attention import fused_attention
from tests import tiny
from tests.pairs import stock_and_fused
from tests.training_steps import assert_slope

pytestmark = pytest.mark.usefixtures("each_device")
CONFIG = {"kernel_fusion": {"triton_kernels": ["FusedAttention"], "jit": False}}
OPTIONS = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {},
    "llama_gqa": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
}
every_family = pytest.mark.parametrize("family", OPTIONS)
PADDING = {"left": (0, 4), "right": (6, 11), "in between": (3, 6), "all": (0, 11)}


def model_of(family="gpt2", **options):
    make = getattr(tiny, family.removesuffix("_gqa"))
    return make(**{**OPTIONS[family], "attn_implementation": "sdpa", **options}).train()


def batch_of(model, padding=(), length=11):
    """The second of three rows has that much padding, which takes no part in the loss."""
    ids = tiny.inputs(model, batch=3, length=length)["input_ids"]
    if not padding:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[1, slice(*padding)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model, batch):
    """Loss, logits and gradients of one step."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), output.logits.detach(), gradients


def assert_same(found, expected):
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-5)
    tiny.assert_same_gradients(found[2], expected[2])


def assert_same_step(stock, fused, batch, calls):
    with mock.patch.object(ops, "relative_attention", wraps=ops.relative_attention) as op:
        expected = step(stock, batch)
        assert op.call_count == 0
        assert_same(step(fused, batch), expected)
    assert op.call_count == calls


@every_family
@pytest.mark.parametrize("side", PADDING)
def test_padded_batches_give_the_loss_logits_and_gradients_of_stock(family, side):
    """Logits of padding too, which SDPA computes of no key as of zeros."""
    stock, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    assert_same_step(stock, fused, batch_of(stock, PADDING[side]), calls=2)


@every_family
def test_autocast_has_the_dtypes_of_sdpa(family):
    """Queries and keys that were normed or rotated are in float32 before."""
    stock, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    batch = batch_of(stock, PADDING["left"])
    seen = []

    def keep(*arguments, attend=ops.relative_attention, **options):
        seen.append({tensor.dtype for tensor in arguments})
        return attend(*arguments, **options)

    device = batch["input_ids"].device.type
    with mock.patch.object(ops, "relative_attention", keep), torch.autocast(device, torch.bfloat16):
        losses = [model(**batch, use_cache=False).loss for model in (fused, stock)]
    assert seen == [{torch.bfloat16}] * 2
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)


@every_family
def test_whole_rows_and_other_calls_stay_on_sdpa(family):
    stock, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    whole = batch_of(stock)
    assert_same_step(stock, fused, whole, calls=0)
    assert_same_step(stock, fused, {**whole, "attention_mask": torch.ones_like(whole["input_ids"])}, calls=0)
    square = torch.ones(11, 11, dtype=torch.bool).tril()[None, None].expand(3, 1, 11, 11).clone()
    square[0, 0, 5:, :3] = False
    assert_same_step(stock, fused, {**whole, "attention_mask": square}, calls=0)
    padded = batch_of(stock, PADDING["left"])
    for model in (stock, fused):
        model.config.is_causal = False
    assert_same_step(stock, fused, padded, calls=0)
    for model in (stock, fused):
        model.config.is_causal = True
        model.eval()
    assert_same_step(stock, fused, padded, calls=0)
    generated = [model.generate(padded["input_ids"], max_new_tokens=3, do_sample=False) for model in (stock, fused)]
    assert torch.equal(*generated)
    for model in (stock, fused):
        model.train().set_attn_implementation("eager")
    assert_same_step(stock, fused, padded, calls=0)


def test_tokens_in_a_cache_are_seen():
    stock, fused = stock_and_fused(model_of(), CONFIG, strict=False)
    batch = batch_of(stock, PADDING["left"])
    outputs = []
    for model in (stock, fused):
        cache = model(batch["input_ids"][:, :6], attention_mask=batch["attention_mask"][:, :6]).past_key_values
        rest = model(batch["input_ids"][:, 6:], attention_mask=batch["attention_mask"], past_key_values=cache)
        outputs.append(rest.logits)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_cross_attention_is_left_alone():
    stock, fused = stock_and_fused(model_of(add_cross_attention=True), CONFIG, strict=False)
    batch = batch_of(stock, PADDING["right"])
    batch["encoder_hidden_states"] = torch.randn(3, 11, stock.config.n_embd)
    assert_same_step(stock, fused, batch, calls=2)
    skipped = {row.reason for row in fuseopt.report(fused).rows if not row.replaced}
    assert "cross-attention is not causal" in skipped


def test_windows_are_left_to_sdpa():
    _, fused = stock_and_fused(model_of("llama"), CONFIG, strict=False)
    window = mock.Mock(wraps=ops.relative_attention)
    query = torch.randn(1, 3, 5, 8)
    with mock.patch.object(ops, "relative_attention", window):
        mask, key_mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(), torch.zeros(1, 1, 1, 5)
        attention = fused.model.layers[0].self_attn
        for options in ({"sliding_window": 2}, {"is_causal": False}):
            fused_attention(attention, query, query, query, mask, key_mask=key_mask, **options)
        assert window.call_count == 0
        output, _ = fused_attention(attention, query, query, query, mask, key_mask=key_mask, sliding_window=None)
        assert window.call_count == 1
    expected = F.scaled_dot_product_attention(query, query, query, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_gradients_with_dropout_are_those_of_the_masks_drawn():
    _, fused = stock_and_fused(model_of(attn_pdrop=0.4), CONFIG, strict=False)
    fused.double()
    batch = batch_of(fused, PADDING["left"])
    del batch["labels"]  # of which a float32 loss would be made
    assert_slope(fused, lambda: fused(**batch).logits.square().mean())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_calls_the_op_again_and_trains_as_stock(use_reentrant):
    stock, fused = stock_and_fused(model_of(), CONFIG, strict=False)
    for model in (stock, fused):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_same_step(stock, fused, batch_of(stock, PADDING["right"]), calls=4)


@pytest.mark.parametrize(
    ("family", "layers"), [("gpt2", "n_layer"), pytest.param("llama_gqa", "num_hidden_layers", marks=pytest.mark.slow)]
)
def test_a_compiled_training_step_is_one_graph_without_sdpa(family, layers):
    fusion = {"triton_kernels": ["FusedAttention"], "memory_efficient_fusion": {"backend": "aot_eager"}}
    stock, fused = stock_and_fused(model_of(family, **{layers: 1}), {"kernel_fusion": fusion}, strict=False)
    torch._dynamo.reset()
    for side in ("left", "right"):
        batch = batch_of(stock, PADDING[side])
        with torch.profiler.profile() as profile:
            found = step(fused, batch)
        assert not any("scaled_dot_product" in event.key for event in profile.key_averages())
        assert_same(found, step(stock, batch))


def test_restore_copies_and_pickles():
    stock, fused = stock_and_fused(model_of(), CONFIG, strict=False)
    batch = batch_of(stock, PADDING["left"])
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        attention = twin.transformer.h[1].attn
        assert (
            attention.config.attention is attention and twin.transformer.__dict__["forward"].stack is twin.transformer
        )
        assert_same_step(stock, twin, batch, calls=2)
    assert fused.config._attn_implementation == "sdpa"
    before = tiny.snapshot(stock)
    fuseopt.restore(fuseopt.initialize(stock, CONFIG))
    assert tiny.snapshot(stock) == before
    assert_same_step(stock, fused, batch, calls=2)


def test_beside_blocks_of_the_preset_inference():
    config = {
        "kernel_fusion": {"triton_kernels": ["FusedAttention"], "custom_cuda_kernels": ["FusedBlock"], "jit": False}
    }
    stock, fused = stock_and_fused(model_of("gpt2"), config, strict=False)
    assert_same_step(stock, fused, batch_of(stock, PADDING["left"]), calls=2)


def rows(model, config=CONFIG):
    return [(row.paths[0], row.target, row.reason) for row in fuseopt.plan(model, config).rows]


def test_the_plan_says_what_is_exchanged_and_why_not():
    model = tiny.gpt2(attn_implementation="sdpa")
    assert [row[:2] for row in rows(model)] == [
        ("transformer.h.0.attn.config", "FusedAttention"),
        ("transformer.h.1.attn.config", "FusedAttention"),
        ("transformer.forward", "CausalStackForward"),
    ]
    eager = tiny.gpt2(attn_implementation="eager")
    assert all("attention runs as 'eager'" in reason for *_, reason in rows(eager))
    wide = rows(tiny.llama(head_dim=136, attn_implementation="sdpa"))
    assert {reason for *_, reason in wide} == {"its head size is 136, and the kernel takes at most 128"}
    model.transformer.forward = model.transformer.forward
    assert {reason for *_, reason in rows(model)} == {
        "its stack cannot pass the padding mask on",
        "its forward has been replaced on the instance",
    }


def test_the_preset_takes_it_on_a_gpu(each_device):
    def reasons(**options):
        model = tiny.llama(attn_implementation="sdpa", **options)
        return {row.reason for row in fuseopt.plan(model, "training").rows if row.target == "FusedAttention"}

    if each_device.type == "cuda":
        for size in (64, 128):
            assert "attention runs as SDPA, which cannot use a flash kernel with a padding mask" in reasons(
                head_dim=size
            )
    else:
        assert reasons() == {"it is faster on a GPU only"}
