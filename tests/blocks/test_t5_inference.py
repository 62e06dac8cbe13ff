"""T5's stacks without gradients: which calls run all blocks at once, with what result, and what the class does."""

import copy
import functools
import pickle
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    T5EncoderModel,
    T5ForSequenceClassification,
)

import fuseopt
from fuseopt.blocks import stack_runner, t5_inference
from fuseopt.blocks.stack_runner import StackRunner
from tests import tiny
from tests.changes import edit, replace
from tests.pairs import stock_and_fused

CONFIG = {"kernel_fusion": {"custom_cuda_kernels": ["FusedBlock"], "jit": False}}
every_family = pytest.mark.parametrize("family", ["t5", "t5_gated", "mt5"])


@pytest.fixture(autouse=True)
def at_once_everywhere(each_device, monkeypatch):
    """On a CPU attention keeps all scores, and works run on the same static tensors, but are not captured."""
    monkeypatch.setattr(stack_runner, "DEVICE_TYPES", ("cpu", "cuda"))
    if each_device.type == "cpu":
        monkeypatch.setattr(t5_inference, "has_kernel", lambda *_: True)


def forward(model, **options):
    with torch.no_grad():
        return model(**{**tiny.inputs(model, batch=3), **options})


def counted(run, *args):
    """How many stacks run their blocks at once in `run(*args)`, how many from what was captured, and what comes."""
    replays = []

    def replayed(runner, *args):
        output = replay(runner, *args)
        replays.extend([] if output is None else [output])
        return output

    with (
        mock.patch.object(stack_runner, "run_blocks", wraps=stack_runner.run_blocks) as passes,
        mock.patch.object(StackRunner, "_replayed", autospec=True, side_effect=replayed),
    ):
        result = run(*args)
    return (passes.call_count, len(replays)), result


replay = StackRunner._replayed


def assert_runs(expected, stock, fused, run=forward):
    """`expected` stacks run eagerly, and from what was captured, and the logits are stock's."""
    found, outputs = counted(run, fused)
    assert found == expected
    torch.testing.assert_close(outputs.logits, run(stock).logits, rtol=1e-5, atol=5e-5)
    return outputs


def meet(stock, fused, run=forward):
    """Has the sizes come as often as they have to before they are captured."""
    for _ in range(2):
        assert_runs((2, 0), stock, fused, run)


@every_family
@pytest.mark.parametrize("config", [CONFIG, "inference"], ids=["alone", "preset"])
def test_both_stacks_run_at_once_and_from_the_third_time_on_as_they_were_captured(family, config):
    stock, fused = stock_and_fused(tiny.FAMILIES[family](), config)
    meet(stock, fused)
    for seed in range(3):
        ids = tiny.inputs(stock, batch=3, seed=seed)
        assert_runs((0, 2), stock, fused, functools.partial(forward, **ids))
    lines = fuseopt.report(fused).since
    assert any("encoder blocks: 1 captured" in line for line in lines)
    assert any("decoder blocks: 1 captured" in line for line in lines)
    longer = functools.partial(forward, **tiny.inputs(stock, length=9))
    assert_runs((2, 0), stock, fused, longer)


@pytest.mark.parametrize("each_device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("family", ["t5", "t5_gated"])
def test_on_a_gpu_the_triton_op_is_captured(family):
    stock, fused = stock_and_fused(tiny.FAMILIES[family](), CONFIG)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        meet(stock, fused)
    assert "fuseopt::relative_attention_fwd" in [event.key for event in profile.key_averages()]
    assert_runs((0, 2), stock, fused)
    for part in (fused.encoder, fused.decoder):
        assert all(work.graph is not None for work in part.forward.runner._works.values())


def masked(model, sides, decoder_sides):
    """Arguments of a call whose second row has that much padding; "ones": the masks are given and mask nothing."""
    batch = tiny.inputs(model, batch=3, length=9)
    for name, ids, span in (
        ("attention_mask", "input_ids", sides),
        ("decoder_attention_mask", "decoder_input_ids", decoder_sides),
    ):
        if span is not None:
            batch[name] = torch.ones_like(batch[ids])
            batch[name][1, slice(*span)] = 0
    return batch


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize(
    ("sides", "decoder_sides"),
    [((0, 0), None), ((0, 0), (0, 0)), ((6, 9), (5, 8)), ((0, 4), (0, 3)), ((0, 9), None), (None, (0, 8))],
)
def test_calls_with_any_masks_run_as_captured_and_equal_stock(sides, decoder_sides, cache):
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    for call in range(4):
        # Other rows of the same sizes have it in the end.
        batch = masked(stock, sides, decoder_sides)
        if call == 3:
            batch = {name: tensor.flip(0) for name, tensor in batch.items()}
        found, outputs = counted(lambda batch=batch: forward(fused, **batch, use_cache=cache))
        assert found == ((2, 0) if call < 2 else (0, 2))
        seen = batch.get("decoder_attention_mask", torch.ones_like(batch["decoder_input_ids"])).bool()
        kept = torch.ones(len(seen), dtype=torch.bool, device=seen.device)
        if stock.device.type == "cuda" and sides == (0, 9):
            # Of a row without a key, transformers' lowest number overflows in PyTorch's kernels for a GPU.
            kept[1] = False
        expected = forward(stock, **batch, use_cache=cache)
        seen = seen & kept[:, None]
        torch.testing.assert_close(outputs.logits[seen], expected.logits[seen], rtol=1e-5, atol=5e-5)
        encoded, wanted = outputs.encoder_last_hidden_state[kept], expected.encoder_last_hidden_state[kept]
        torch.testing.assert_close(encoded, wanted, rtol=1e-5, atol=5e-5)


def tensors(cache):
    return [
        tensor
        for part in (cache.self_attention_cache, cache.cross_attention_cache)
        for layer in part.layers
        for tensor in (layer.keys, layer.values)
    ]


def test_caches_are_filled_and_go_on():
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    ids = tiny.inputs(stock)["decoder_input_ids"]
    start = functools.partial(forward, **{**tiny.inputs(stock), "decoder_input_ids": ids[:, :4]})
    kept = []
    for call in range(4):
        expected = start(stock)
        found, outputs = counted(start, fused)
        assert found == ((2, 0) if call < 2 else (0, 2))
        cache, wanted = outputs.past_key_values, expected.past_key_values
        assert type(cache) is EncoderDecoderCache and cache.is_updated == wanted.is_updated == {0: True, 1: True}
        torch.testing.assert_close(tensors(cache), tensors(wanted), rtol=1e-5, atol=1e-5)
        assert all(tensor.is_contiguous() for tensor in tensors(cache))
        kept.append((outputs, expected))
    for outputs, expected in kept:
        ends = []
        for model, first in ((fused, outputs), (stock, expected)):
            states = (first.encoder_last_hidden_state,)
            arguments = {"encoder_outputs": states, "decoder_input_ids": ids[:, 4:], "input_ids": None}
            found, end = counted(
                lambda model=model, first=first, arguments=arguments: forward(
                    model, **arguments, past_key_values=first.past_key_values
                )
            )
            assert found == (0, 0)
            ends.append(end.logits)
        torch.testing.assert_close(*ends, rtol=1e-5, atol=5e-5)


def test_captured_sizes_pass_by_the_stacks_own_forwards():
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    modeling = sys.modules[type(stock).__module__]
    ones = {"attention_mask": torch.ones_like(tiny.inputs(stock, batch=3)["input_ids"])}
    for options in ({}, {"use_cache": False}, ones):
        for call in range(4):
            with mock.patch.object(
                modeling, "create_bidirectional_mask", wraps=modeling.create_bidirectional_mask
            ) as m:
                found, outputs = counted(lambda options=options: forward(fused, **options))
            assert (m.call_count == 0) is (call == 3 or options != {})
            expected = forward(stock, **options)
            assert type(outputs) is type(expected) and list(outputs) == list(expected)
            torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-5, atol=5e-5)
    found, outputs = counted(lambda: forward(fused, return_dict=False))
    expected = forward(stock, return_dict=False)
    assert found == (0, 2) and type(outputs) is tuple and len(outputs) == len(expected)
    torch.testing.assert_close(outputs[0], expected[0], rtol=1e-5, atol=5e-5)


def test_stacks_by_themselves():
    config, ids = tiny.t5().config, torch.arange(3, 10)[None].repeat(2, 1)
    torch.manual_seed(0)
    for stock in (T5EncoderModel(copy.deepcopy(config)).eval(), tiny.t5().encoder, tiny.t5().decoder):
        fused = fuseopt.initialize(copy.deepcopy(stock), CONFIG, strict=True)
        for call in range(4):
            found, outputs = counted(forward_of_ids, fused, ids)
            assert found == ((1, 0) if call < 2 else (0, 1))
            expected = forward_of_ids(stock, ids)
            assert list(outputs) == list(expected)
            torch.testing.assert_close(outputs.last_hidden_state, expected.last_hidden_state, rtol=1e-5, atol=5e-5)
        found, outputs = counted(lambda fused=fused: forward_of_ids(fused, ids, return_dict=False))
        assert found == (0, 1) and type(outputs) is tuple
        torch.testing.assert_close(outputs[0], expected.last_hidden_state, rtol=1e-5, atol=5e-5)
    # An encoder has no use for what another one has made.
    states = torch.randn(2, 7, 24)
    stock = tiny.t5().encoder
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIG, strict=True)
    found, outputs = counted(lambda: forward_of_ids(fused, ids, encoder_hidden_states=states))
    assert found == (1, 0)
    torch.testing.assert_close(outputs[0], forward_of_ids(stock, ids)[0], rtol=1e-5, atol=5e-5)


def test_a_classification_head_runs_as_captured_and_equals_stock():
    config, ids = tiny.t5().config, torch.arange(3, 10)[None].repeat(2, 1)
    ids[:, -1] = config.eos_token_id
    stock = T5ForSequenceClassification(copy.deepcopy(config)).eval()
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIG, strict=True)
    for call in range(3):
        assert_runs((2, 0) if call < 2 else (0, 2), stock, fused, functools.partial(forward_of_ids, ids=ids))


def forward_of_ids(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options)


def test_a_decoder_with_a_cache_for_one_kind_of_attention_is_left_to_the_class():
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    ids, states = tiny.inputs(stock)["decoder_input_ids"], torch.randn(2, 7, 24)
    for model, expected in ((fused, (1, 0)), (stock, (0, 0))):
        with torch.no_grad():
            found, _ = counted(lambda model=model: model.decoder(ids, past_key_values=DynamicCache(), use_cache=True))
        assert found == expected
    with torch.no_grad():
        found, _ = counted(lambda: fused.decoder(ids, encoder_hidden_states=states, past_key_values=DynamicCache()))
    assert found == (0, 0)


@pytest.mark.parametrize("generation", [{}, {"generation": {"enable": True}}], ids=["transformers", "loop"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_generate_gives_the_tokens_of_stock(options, generation):
    stock, fused = stock_and_fused(tiny.t5(), {**CONFIG, **generation})
    ids = tiny.inputs(stock)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **options}
    for call in range(3):
        found, tokens = counted(lambda: fused.generate(ids, **arguments))
        assert generation or found == ((2, 0) if call < 2 else (0, 2))
        assert torch.equal(tokens, stock.generate(ids, **arguments))
    if generation:
        assert "T0" in str(fuseopt.report(fused))


def exchange_a_parameter(model):
    for stack in (model.encoder, model.decoder):
        norm = stack.block[1].layer[1].layer_norm
        norm.weight = nn.Parameter(norm.weight.detach() * 3)


def exchange_an_activation(model):
    for stack in (model.encoder, model.decoder):
        stack.block[1].layer[-1].DenseReluDense.act = nn.Tanh().eval()


def set_a_constant(model):
    for stack in (model.encoder, model.decoder):
        stack.block[1].layer[0].layer_norm.variance_epsilon = 0.5


def shorten_the_reach(model):
    for stack in (model.encoder, model.decoder):
        stack.block[0].layer[0].SelfAttention.relative_attention_num_buckets = 8
        stack.block[0].layer[0].SelfAttention.relative_attention_max_distance = 5


def look_ahead(model):
    for block in model.decoder.block:
        block.layer[0].SelfAttention.is_causal = False


def remove_the_last_blocks(model):
    for stack in (model.encoder, model.decoder):
        del stack.block[1]


def remove_the_first_blocks(model):
    for stack in (model.encoder, model.decoder):
        stack.block = nn.ModuleList(list(stack.block)[1:]).eval()


@pytest.mark.parametrize(
    ("change", "stacks"),
    [
        (edit, 0),
        (replace, 2),
        (exchange_a_parameter, 2),
        (exchange_an_activation, 2),
        (set_a_constant, 2),
        (shorten_the_reach, 2),
        (look_ahead, 1),
        (remove_the_last_blocks, 2),
        (remove_the_first_blocks, 2),
    ],
    ids=lambda change: getattr(change, "__name__", None),
)
def test_what_changes_between_calls_shows(change, stacks):
    run = functools.partial(forward, use_cache=False)
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    meet(stock, fused, run)
    before = assert_runs((0, 2), stock, fused, run).logits
    for model in (stock, fused):
        change(model)
    for expected in ((stacks, 2 - stacks), (stacks, 2 - stacks), (0, 2)):
        after = assert_runs(expected, stock, fused, run).logits
    assert not torch.allclose(after, before, rtol=1e-3, atol=1e-3)


def train(model):
    model.train()


def hook_blocks(model):
    for stack in (model.encoder, model.decoder):
        stack.block[1].register_forward_hook(lambda module, args, output: (output[0] + 1, *output[1:]))


def hook_linear_layers(model):
    for stack in (model.encoder, model.decoder):
        stack.block[1].layer[-1].DenseReluDense.wo.register_forward_hook(lambda module, args, output: output + 1)


def wrap_forwards(model):
    """As accelerate's hooks do."""
    for stack in (model.encoder, model.decoder):
        block = stack.block[1]
        inner = block.forward
        block.forward = functools.update_wrapper(functools.partial(inner), inner)


def attend_eagerly(model):
    model.set_attn_implementation("eager")
    for part in (model.encoder, model.decoder):
        part.config._attn_implementation = "eager"


def exchange_blocks(model):
    other = fuseopt.initialize(tiny.t5(seed=5), CONFIG)
    model.encoder.block[1], model.decoder.block[1] = other.encoder.block[1], other.decoder.block[1]


def exchange_linear_layers(model):
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    for stack in (model.encoder, model.decoder):
        stack.block[1].layer[0].SelfAttention.o.__class__ = Doubled


def keep_some_weights_wider(model):
    """As transformers does when it loads float16."""
    model.half()
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            block.layer[-1].DenseReluDense.wo.float()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        train,
        hook_blocks,
        hook_linear_layers,
        wrap_forwards,
        attend_eagerly,
        exchange_blocks,
        exchange_linear_layers,
        keep_some_weights_wider,
    ],
    ids=lambda change: change.__name__,
)
def test_what_is_left_to_the_class(change, late):
    stock, fused = stock_and_fused(tiny.t5(dropout_rate=0.0), CONFIG)
    if late:
        meet(stock, fused)
        assert_runs((0, 2), stock, fused)
    for model in (stock, fused):
        change(model)
    for _ in range(2):
        assert_runs((0, 0), stock, fused)


def test_adapters_put_on_later_send_calls_through_the_stock_forward():
    peft = pytest.importorskip("peft")
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    meet(stock, fused)
    assert_runs((0, 2), stock, fused)
    config = peft.LoraConfig(r=2, target_modules=["q", "wo"], init_lora_weights=False)
    adapted = []
    for model in (stock, fused):
        torch.manual_seed(0)
        adapted.append(peft.get_peft_model(model, config).eval())
    with torch.no_grad():
        found, outputs = counted(lambda: adapted[1](**tiny.inputs(stock)))
        torch.testing.assert_close(outputs.logits, adapted[0](**tiny.inputs(stock)).logits, rtol=1e-5, atol=5e-5)
    assert found == (0, 0)


def test_masks_of_more_dimensions_are_left_to_the_class():
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    distance = torch.arange(6) - torch.arange(6)[:, None]
    mask = ((distance <= 0) & (distance > -4)).expand(3, 1, 6, 6)
    assert_runs((1, 0), stock, fused, functools.partial(forward, decoder_attention_mask=mask))
    # So are those of more keys than there are, which it refuses.
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 4:] = 0
    errors = []
    for model in (stock, fused):
        with pytest.raises(RuntimeError) as error:
            forward(model, attention_mask=mask)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_hidden_states_and_attentions_that_are_asked_for():
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    meet(stock, fused)
    assert_runs((0, 2), stock, fused)
    outputs = assert_runs((0, 0), stock, fused, functools.partial(forward, output_hidden_states=True))
    expected = forward(stock, output_hidden_states=True)
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        torch.testing.assert_close(outputs[name], expected[name], rtol=1e-5, atol=5e-5)


def test_gradients_autocast_and_modes_are_left_to_the_class():
    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    meet(stock, fused)
    gradients = []
    for model in (stock, fused):
        batch = tiny.inputs(model, batch=3)
        found, outputs = counted(lambda model=model, batch=batch: model(**batch, labels=batch["decoder_input_ids"]))
        assert found == (0, 0)
        outputs.loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    tiny.assert_same_gradients(*reversed(gradients))
    with Looks():
        assert_runs((0, 0), stock, fused)
    with torch.autocast(fused.device.type, torch.bfloat16):
        found, outputs = counted(forward, fused)
        assert found == (0, 0) and torch.equal(outputs.logits, forward(stock).logits)


@pytest.mark.slow
def test_torch_compile_sees_one_graph():
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    torch._dynamo.reset()
    compiled = torch.compile(functools.partial(fused, use_cache=False), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        logits = compiled(**tiny.inputs(stock, batch=3)).logits
    torch.testing.assert_close(logits, forward(stock).logits, rtol=1e-5, atol=5e-5)


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_in_half_precision_is_no_larger_than_stock(family, dtype):
    stock, fused = stock_and_fused(tiny.FAMILIES[family](), CONFIG)
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[0, :3] = 0
    exact = forward(copy.deepcopy(stock).double(), attention_mask=mask).logits
    allowed = (forward(stock.to(dtype), attention_mask=mask).logits.double() - exact).norm()
    fused.to(dtype)
    for expected in ((2, 0), (2, 0), (0, 2)):
        found, outputs = counted(lambda: forward(fused, attention_mask=mask))
        assert found == expected and outputs.logits.dtype == dtype
        error = (outputs.logits.double() - exact).norm()
        assert error <= 1.15 * allowed + torch.finfo(dtype).eps * exact.norm()


def test_sums_of_float16_are_clamped_where_stock_s_are():
    stock, fused = (model.half() for model in stock_and_fused(tiny.t5(), CONFIG))
    with torch.no_grad():
        for model in (stock, fused):
            for stack in (model.encoder, model.decoder):
                # A sum of each sublayer in turn overflows, beginning with the first.
                stack.block[0].layer[0].SelfAttention.o.weight.mul_(60000.0)
                stack.block[0].layer[1].layer_norm.weight.mul_(100.0)
                stack.block[1].layer[-1].DenseReluDense.wo.weight.mul_(30000.0)
    for expected in ((2, 0), (2, 0), (0, 2)):
        found, outputs = counted(forward, fused)
        wanted = forward(stock)
        assert found == expected and wanted.logits.isfinite().all()
        torch.testing.assert_close(outputs.logits, wanted.logits, rtol=2e-2, atol=2e-2)
        states = outputs.encoder_last_hidden_state, wanted.encoder_last_hidden_state
        torch.testing.assert_close(*states, rtol=2e-2, atol=2e-2)


def test_copies_and_pickles_begin_anew():
    stock, fused = stock_and_fused(tiny.t5(), CONFIG)
    meet(stock, fused)
    assert_runs((0, 2), stock, fused)
    others = copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))
    edit(fused)
    for other in others:
        assert other.decoder.forward.runner.stack is other.decoder
        assert_runs((2, 0), stock, other)


def test_structure_stays_and_restore_gives_every_object_back():
    stock, fused = stock_and_fused(tiny.t5(), "inference")
    meet(stock, fused)
    assert_runs((0, 2), stock, fused)
    fuseopt.restore(fused)
    assert torch.equal(forward(fused).logits, forward(stock).logits)
    model = tiny.t5()
    before, classes = tiny.snapshot(model), [type(module) for module in model.modules()]
    fuseopt.initialize(model, CONFIG, strict=True)
    assert [type(module) for module in model.modules()] == classes
    fuseopt.restore(model)
    assert tiny.snapshot(model) == before


def test_without_cuda_graphs_nothing_is_captured():
    kernels = [{"name": "FusedBlock", "cuda_graphs": False}]
    stock, fused = stock_and_fused(tiny.t5(), {"kernel_fusion": {"custom_cuda_kernels": kernels, "jit": False}})
    for _ in range(4):
        assert_runs((2, 0), stock, fused)


def test_beside_relative_attention_of_its_own():
    both = {"custom_cuda_kernels": ["FusedBlock"], "triton_kernels": ["FusedRelativeAttention"], "jit": False}
    stock, fused = stock_and_fused(tiny.t5(), {"kernel_fusion": both}, strict=False)
    reasons = {row.target: row.reason for row in fuseopt.report(fused).skipped}
    assert "T5StackForward" in reasons["RelativeStackForward"]
    meet(stock, fused)
    assert_runs((0, 2), stock, fused)
    # In training the attentions are still handed the masks.
    with mock.patch.object(fuseopt.ops, "relative_attention", wraps=fuseopt.ops.relative_attention) as op:
        fused(**masked(stock, (6, 9), (5, 8)))
    shapes = [tuple(call.kwargs["mask"].shape) for call in op.call_args_list]
    assert shapes == [(3, 1, 1, 9)] * 2 + [(3, 1, 1, 8), (3, 1, 1, 9)] * 2


def reasons(model, config=CONFIG, target="T5InferenceForward"):
    return {
        path: row.reason
        for row in fuseopt.plan(model, config).rows
        for path in row.paths
        if row.target == target and not row.replaced
    }


def test_blocks_that_cannot_run_at_once_say_why(monkeypatch):
    residual = {"custom_cuda_kernels": [{"name": "FusedRMSNorm", "fuse_residual": True}, "FusedBlock"], "jit": False}
    found = reasons(tiny.t5(), {"kernel_fusion": residual})
    assert len(found) == 4 and all("T5BlockForward" in reason for reason in found.values())
    model = tiny.t5()
    model.encoder.block[1].layer[0].SelfAttention.o = nn.Bilinear(2, 2, 2)
    model.decoder.forward = model.decoder.forward
    found = reasons(model)
    assert "SelfAttention.o (Bilinear)" in found["encoder.block.1.forward"]
    assert "block 1 of its stack cannot be replaced" in found["encoder.block.0.forward"]
    assert "its stack cannot be replaced: its forward has been replaced" in found["decoder.block.0.forward"]
    stacks = reasons(model, target="T5StackForward")
    assert "its block 1 cannot be replaced" in stacks["encoder.forward"]
    assert "replaced on the instance" in stacks["decoder.forward"]
    monkeypatch.undo()
    if model.device.type == "cpu":
        assert all("on a GPU" in reason for reason in reasons(tiny.t5()).values()) and len(reasons(tiny.t5())) == 4
        monkeypatch.setattr(stack_runner, "DEVICE_TYPES", ("cpu",))
    found = reasons(tiny.t5(), "reference").values()
    assert len(found) == 4 and all("avoids storing the scores" in reason for reason in found)
    with pytest.raises(fuseopt.errors.PlanError, match="FusedBlock"):
        fuseopt.initialize(tiny.umt5(), CONFIG, strict=True)
