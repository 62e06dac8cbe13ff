"""`FusedRotaryEmbedding` in models: the attentions stay, what they compute is transformers' own, and the op runs."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import fuseopt
from fuseopt import ops
from fuseopt.errors import PlanError
from tests import tiny
from tests.pairs import stock_and_fused

pytestmark = pytest.mark.usefixtures("each_device")
CONFIG = {"kernel_fusion": {"triton_kernels": ["FusedRotaryEmbedding"], "jit": False}}
LAYERS = 2
# the model, and what is particular about it
FAMILIES = {
    "llama": (tiny.llama, {"num_key_value_heads": 1}),
    "gemma": (tiny.gemma, {}),
    "phi3": (tiny.phi3, {"num_key_value_heads": 1}),
    "phi3, part of a head": (tiny.phi3, {"partial_rotary_factor": 0.5}),
    "mistral": (tiny.mistral, {"sliding_window": 4}),
    "qwen2": (tiny.qwen2, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": (tiny.qwen3, {}),
    "gemma3": (tiny.gemma3, {"sliding_window": 4}),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_implementation = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


def make(family="llama", implementation="sdpa", **options):
    build, particular = FAMILIES[family]
    return build(**{**particular, "attn_implementation": implementation, **options})


def counted():
    return mock.patch.object(ops, "rotary_embedding", wraps=ops.rotary_embedding)


def step(model, **kwargs):
    """Loss and gradients of one step, and how often the op ran."""
    model.zero_grad()
    ids = tiny.inputs(model)["input_ids"]
    with counted() as op:
        loss = model(ids, labels=ids, **{"use_cache": False, **kwargs}).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, op.call_count


@every_family
@every_implementation
def test_loss_and_gradients_are_stock_s(family, implementation):
    stock, fused = (model.train() for model in stock_and_fused(make(family, implementation), CONFIG, strict=False))
    (expected, expected_gradients, none), (loss, gradients, count) = step(stock), step(fused)
    assert (none, count) == (0, LAYERS)
    assert torch.equal(loss, expected)
    tiny.assert_same_gradients(gradients, expected_gradients)


@every_family
def test_generate_gives_stock_s_tokens(family, each_device):
    stock, fused = stock_and_fused(make(family), CONFIG, strict=False)
    ids = tiny.inputs(stock, length=6)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    # With a static cache transformers compiles on a GPU.
    static = [{"cache_implementation": "static"}] if each_device.type == "cpu" else []
    for options in ({}, {"num_beams": 2}, *static):
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, **options}
        with counted() as op:
            tokens = fused.generate(ids, **options)
        assert op.call_count >= LAYERS
        assert torch.equal(tokens, stock.generate(ids, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_in_half_precision_and_under_autocast(dtype, each_device):
    stock, fused = stock_and_fused(make(), CONFIG, strict=False)
    with torch.autocast(each_device.type, dtype):
        torch.testing.assert_close(tiny.logits(fused), tiny.logits(stock), rtol=0, atol=0)
    torch.testing.assert_close(tiny.logits(fused.to(dtype)), tiny.logits(stock.to(dtype)), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("each_device", ["cuda"], indirect=True)
def test_on_a_gpu_the_triton_op_runs():
    _, fused = stock_and_fused(make(), CONFIG, strict=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(fused.train())
    names = [event.key for event in profile.key_averages()]
    assert "fuseopt::rotary_embedding_fwd" in names and "fuseopt::rotary_embedding_bwd" in names


@pytest.mark.gpu
@pytest.mark.parametrize("each_device", ["cuda"], indirect=True)
def test_flash_attention_takes_what_the_op_returns():
    stock, fused = (model.to(torch.bfloat16) for model in stock_and_fused(make(head_dim=64), CONFIG, strict=False))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        torch.testing.assert_close(tiny.logits(fused, use_cache=False), tiny.logits(stock, use_cache=False))


@pytest.mark.gpu
@pytest.mark.parametrize("each_device", ["cuda"], indirect=True)
def test_a_captured_forward_replayed_on_other_tokens():
    stock, fused = stock_and_fused(make(), CONFIG, strict=False)
    ids = tiny.inputs(fused)["input_ids"]
    with torch.no_grad():
        fused(ids, use_cache=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = fused(ids, use_cache=False).logits
        ids.copy_(ids.flip(1))
        graph.replay()
        # While a graph is captured transformers gives attention a mask.
        torch.testing.assert_close(logits, stock(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_attentions_stay_of_their_class_and_are_recorded_and_hooked():
    stock, fused = stock_and_fused(make(implementation="eager"), CONFIG, strict=False)
    attentions = [layer.self_attn for layer in fused.model.layers]
    assert all(type(attention) is LlamaAttention for attention in attentions)
    seen = []
    attentions[0].register_forward_hook(lambda module, args, output: seen.append(output[0].shape))
    with counted() as op:
        output = fused(**tiny.inputs(fused), output_attentions=True, output_hidden_states=True)
    expected = stock(**tiny.inputs(stock), output_attentions=True, output_hidden_states=True)
    assert op.call_count == LAYERS == len(output.attentions) and len(seen) == 1
    torch.testing.assert_close(output.attentions, expected.attentions)
    torch.testing.assert_close(output.hidden_states, expected.hidden_states)


def test_an_attention_implementation_set_later_counts():
    stock, fused = stock_and_fused(make(implementation="eager"), CONFIG, strict=False)
    for model in (stock, fused):
        model.set_attn_implementation("sdpa")
    assert torch.equal(tiny.logits(fused), tiny.logits(stock))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_calls_the_op_again_and_keeps_gradients(use_reentrant):
    _, fused = stock_and_fused(make(), CONFIG, strict=False)
    expected, expected_gradients, _ = step(fused.train())
    fused.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    fused.enable_input_require_grads()
    loss, gradients, count = step(fused)
    assert count == 2 * LAYERS
    torch.testing.assert_close(loss, expected)
    tiny.assert_same_gradients(gradients, expected_gradients)


def test_a_compiled_training_step_is_one_graph():
    torch._dynamo.reset()
    stock, fused = (model.train() for model in stock_and_fused(make(num_hidden_layers=1), CONFIG, strict=False))
    ids = tiny.inputs(fused)["input_ids"]
    compiled = torch.compile(lambda ids: fused(ids, labels=ids, use_cache=False), backend="aot_eager", fullgraph=True)
    loss = compiled(ids).loss
    loss.backward()
    expected, expected_gradients, _ = step(stock)
    torch.testing.assert_close(loss, expected)
    tiny.assert_same_gradients({name: p.grad for name, p in fused.named_parameters()}, expected_gradients)


@pytest.mark.slow
def test_beside_memory_efficient_fusion_and_fused_norms(graphs):
    both = {
        "kernel_fusion": {
            **CONFIG["kernel_fusion"],
            "memory_efficient_fusion": True,
            "custom_cuda_kernels": ["FusedRMSNorm", "FusedSwiGLU"],
        }
    }
    stock, fused = (model.train() for model in stock_and_fused(make("qwen3", num_hidden_layers=1), both, strict=False))
    expected, expected_gradients, _ = step(stock)
    ids = tiny.inputs(fused)["input_ids"]
    loss = fused(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    tiny.assert_same_gradients({name: p.grad for name, p in fused.named_parameters()}, expected_gradients)
    assert (graphs.compiled, graphs.calls) == (1, 1)


def test_restore_copies_and_pickles():
    stock, fused = stock_and_fused(make(), CONFIG, strict=False)
    expected = tiny.logits(stock)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        for layer in other.model.layers:
            assert layer.self_attn.forward.attention is layer.self_attn
        with counted() as op:
            assert torch.equal(tiny.logits(other), expected)
        assert op.call_count == LAYERS
    model = make()
    before, keys = tiny.snapshot(model), list(model.state_dict())
    fuseopt.initialize(model, CONFIG)
    assert list(model.state_dict()) == keys
    tiny.logits(model)
    fuseopt.restore(model)
    assert tiny.snapshot(model) == before
    with counted() as op:
        assert torch.equal(tiny.logits(model), expected)
    assert op.call_count == 0


def test_adapters_put_on_its_projections_later_take_part():
    peft = pytest.importorskip("peft")
    losses = []
    for model in stock_and_fused(make(), CONFIG, strict=False):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        with counted() as op:
            losses.append(adapted(**tiny.inputs(model)).logits)
    assert op.call_count == LAYERS
    torch.testing.assert_close(*losses)


def rows(model):
    return fuseopt.plan(model, CONFIG).rows


def test_the_plan_names_each_attention_and_why_not(each_device):
    model = make()
    backend = "triton" if each_device.type == "cuda" else "reference"
    for number, row in enumerate(rows(model)):
        assert row.paths == (f"model.layers.{number}.self_attn.forward",)
        assert (row.source, row.target) == ("LlamaAttention.forward", "RotaryAttentionForward")
        assert row.replaced and row.backend == backend
    assert len(rows(model)) == LAYERS
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    assert all(row.replaced for row in rows(model))
    model.model.layers[0].self_attn.forward = model.model.layers[0].self_attn.forward
    model.model.layers[1].self_attn.__class__ = type("MyAttention", (LlamaAttention,), {})
    assert [(row.replaced, row.reason) for row in rows(model)] == [
        (False, "its forward has been replaced on the instance"),
        (False, "it is a subclass of LlamaAttention, so its forward may differ"),
    ]


def test_attentions_that_rotate_otherwise_are_left_with_the_reason():
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(intermediate_size=40, **sizes))
    reason = "it has a rotary embedding, but its class is not known to compute what Llama's does"
    found = rows(model)
    assert len(found) == 2 and all((row.replaced, row.reason) == (False, reason) for row in found)
    with pytest.warns(UserWarning, match=f"FusedRotaryEmbedding.*{reason}"):
        fuseopt.initialize(model, CONFIG)
    with pytest.raises(PlanError, match="no module that it replaces"):
        fuseopt.initialize(tiny.gpt2(), CONFIG, strict=True)
