"""StackRunner: which calls of a stack run all blocks at once, with what result, and what is left to the blocks."""

import copy
import functools
import pickle
import sys
import threading
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

import fuseopt
from fuseopt.blocks import stack_runner
from fuseopt.blocks.stack_runner import StackRunner, StackWork
from tests import tiny
from tests.changes import edit, replace
from tests.pairs import stock_and_fused

CONFIG = {"kernel_fusion": {"custom_cuda_kernels": ["FusedBlock"], "jit": False}}
LAYERS = 2


@pytest.fixture(autouse=True)
def runners_on_each_device(each_device, monkeypatch):
    """On a CPU the works run on the same static tensors, only that they are not captured."""
    monkeypatch.setattr(stack_runner, "DEVICE_TYPES", ("cpu", "cuda"))


def runner_of(model):
    return model.transformer.forward.runner


def replays_of(run, *args):
    """How often what was captured gives a result in `run(*args)`, and what that returns."""
    results = []

    def counted(runner, *args):
        output = replay(runner, *args)
        results.extend([] if output is None else [output])
        return output

    with mock.patch.object(StackRunner, "_replayed", autospec=True, side_effect=counted):
        result = run(*args)
    return len(results), result


replay = StackRunner._replayed


def forward(model, ids=None, **options):
    ids = tiny.inputs(model)["input_ids"] if ids is None else ids
    with torch.no_grad():
        return model(input_ids=ids, **options)


def meet(model, ids=None, **options):
    """Has the size come as often as it has to before it is captured."""
    for _ in range(2):
        count, _ = replays_of(lambda: forward(model, ids, **options))
        assert count == 0


def assert_run_at_once(expected, stock, fused, ids=None, **options):
    count, outputs = replays_of(lambda: forward(fused, ids, **options))
    assert count == expected
    torch.testing.assert_close(outputs.logits, forward(stock, ids, **options).logits, rtol=1e-5, atol=1e-5)
    return outputs


@pytest.mark.parametrize(
    "options", [{}, {"n_inner": 20}, {"activation_function": "gelu"}, {"scale_attn_weights": False}]
)
def test_a_size_runs_at_once_when_it_comes_for_the_third_time(options):
    stock, fused = stock_and_fused(tiny.gpt2(**options), CONFIG)
    for expected in (0, 0, 1, 1):
        assert_run_at_once(expected, stock, fused)
    ids = tiny.inputs(stock, length=5)["input_ids"]
    assert_run_at_once(0, stock, fused, ids)
    assert_run_at_once(1, stock, fused)
    assert "1 captured sizes" in fuseopt.report(fused).since[0]


def test_another_prompt_of_the_size_and_results_that_stay():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    kept = []
    for seed in range(4):
        ids = tiny.inputs(stock, seed=seed)["input_ids"]
        kept.append((assert_run_at_once(1, stock, fused, ids), forward(stock, ids)))
    for got, expected in kept:
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-5)
        for layer, wanted in zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close((layer.keys, layer.values), (wanted.keys, wanted.values), rtol=1e-5, atol=1e-5)


def test_tokens_alone_pass_by_the_stack_s_own_forward():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    assert_run_at_once(1, stock, fused)
    labels = tiny.inputs(stock)["input_ids"]
    positions = torch.arange(7)[None]
    modeling = sys.modules[type(stock).__module__]
    for passed_by, options in (
        (True, {}),
        (True, {"labels": labels, "output_attentions": False}),
        (True, {"logits_to_keep": 1, "return_dict": True}),
        (True, {"use_cache": True}),
        (True, {"return_dict": False}),
        (False, {"position_ids": positions}),
        (False, {"attention_mask": torch.ones_like(labels)}),
        (False, {"token_type_ids": torch.ones_like(labels)}),
        (False, {"is_causal": True}),
    ):
        with mock.patch.object(modeling, "create_causal_mask", wraps=modeling.create_causal_mask) as masks:
            got = forward(fused, **options)
        assert (masks.call_count == 0) is passed_by, options
        expected = forward(stock, **options)
        assert type(got) is type(expected)
        if isinstance(got, tuple):
            got, expected = got[:1], expected[:1]
        else:
            assert list(got) == list(expected)
            assert type(got.past_key_values) is type(expected.past_key_values)
            got, expected = (got.logits, got.loss), (expected.logits, expected.loss)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_stock_refuses_or_warns_of():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    assert_run_at_once(1, stock, fused)
    ids = tiny.inputs(stock)["input_ids"]
    for model in (stock, fused):
        model.config.pad_token_id = int(ids[0, 0])
        with mock.patch.object(transformers.modeling_utils.logger, "warning_once") as warning:
            forward(model, ids)
        assert warning.call_count == 1 and "attention_mask" in warning.call_args.args[0]
    if ids.device.type == "cpu":
        for model in (stock, fused):
            with pytest.raises(IndexError):
                forward(model, ids + tiny.VOCAB)


@pytest.mark.parametrize("cache", [False, True])
def test_prompts_padded_on_either_side_run_as_captured_and_equal_stock(cache):
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    ids = tiny.inputs(stock, batch=3)["input_ids"]
    masks = [torch.ones_like(ids) for _ in range(2)]
    masks[0][0, :3] = 0
    masks[1][2, :5] = 0
    meet(fused, ids, attention_mask=masks[0], use_cache=cache)
    for mask in masks:
        count, outputs = replays_of(lambda mask=mask: forward(fused, ids, attention_mask=mask, use_cache=cache))
        expected = forward(stock, ids, attention_mask=mask, use_cache=cache).logits
        assert count == 1 and (outputs.past_key_values is not None) is cache
        torch.testing.assert_close(outputs.logits[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)
    # All ones are no mask to transformers.
    assert_run_at_once(0, stock, fused, ids, attention_mask=torch.ones_like(ids), use_cache=cache)


def test_a_cache_goes_on_where_the_runner_has_left_it():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    ids = tiny.inputs(stock)["input_ids"]
    meet(fused, ids[:, :4])
    start = assert_run_at_once(1, stock, fused, ids[:, :4])
    count, end = replays_of(lambda: forward(fused, ids[:, 4:], past_key_values=start.past_key_values))
    assert count == 0
    torch.testing.assert_close(end.logits, forward(stock, ids).logits[:, 4:], rtol=1e-5, atol=1e-5)


def test_prompts_of_transformers_own_generate():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    ids = tiny.inputs(stock)["input_ids"]
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for expected in (0, 0, 1):
        count, tokens = replays_of(lambda: fused.generate(ids, **arguments))
        assert count == expected and torch.equal(tokens, stock.generate(ids, **arguments))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_in_half_precision_is_no_larger_than_stock(dtype, padded):
    model = tiny.gpt2()
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, : 3 * padded] = 0
    exact = forward(copy.deepcopy(model).double(), attention_mask=mask).logits[mask.bool()]
    stock = forward(model.to(dtype), attention_mask=mask).logits[mask.bool()]
    fuseopt.initialize(model, CONFIG)
    meet(model, attention_mask=mask)
    count, outputs = replays_of(lambda: forward(model, attention_mask=mask))
    assert count == 1
    allowed = (stock.double() - exact).norm()
    error = (outputs.logits[mask.bool()].double() - exact).norm()
    assert error <= 1.15 * allowed + torch.finfo(dtype).eps * exact.norm()


def test_a_block_that_is_called_by_itself_does_its_own_work():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    assert_run_at_once(1, stock, fused)
    hidden = torch.randn(2, 7, 24)
    with torch.no_grad():
        for block, wanted in zip(fused.transformer.h, stock.transformer.h, strict=True):
            count, result = replays_of(block, hidden)
            assert count == 0
            hidden = wanted(hidden)
            torch.testing.assert_close(result, hidden, rtol=1e-5, atol=1e-5)


def test_inference_mode_and_no_grad_take_turns():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    ids = tiny.inputs(stock)["input_ids"]
    expected = forward(stock, ids).logits
    for call in range(6):
        with torch.inference_mode(call % 2 == 0), torch.no_grad():
            count, outputs = replays_of(lambda: fused(ids))
        assert count == (call > 1)
        torch.testing.assert_close(outputs.logits, expected, rtol=1e-5, atol=1e-5)


def exchange_a_parameter(model):
    norm = model.transformer.h[1].ln_2
    norm.weight = nn.Parameter(norm.weight.detach() * 3)


def exchange_an_activation(model):
    model.transformer.h[1].mlp.act = nn.Tanh().eval()


def set_a_constant(model):
    model.transformer.h[1].ln_1.eps = 0.5


def look_ahead(model):
    for block in model.transformer.h:
        block.attn.is_causal = False


def remove_a_block(model):
    del model.transformer.h[1]


def shorten_the_stack(model):
    model.transformer.h = nn.ModuleList(list(model.transformer.h)[1:]).eval()


@pytest.mark.parametrize(
    "change",
    [
        edit,
        replace,
        exchange_a_parameter,
        exchange_an_activation,
        set_a_constant,
        look_ahead,
        remove_a_block,
        shorten_the_stack,
    ],
    ids=lambda change: change.__name__,
)
def test_what_changes_between_calls_shows(change):
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    before = assert_run_at_once(1, stock, fused).logits
    for model in (stock, fused):
        change(model)
    if change is not edit:
        assert_run_at_once(0, stock, fused)
        assert_run_at_once(0, stock, fused)
    after = assert_run_at_once(1, stock, fused).logits
    assert not torch.allclose(after, before, rtol=1e-3, atol=1e-3)


def train(model):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def hook_a_block(model):
    model.transformer.h[1].register_forward_hook(lambda module, args, output: output + 1)


def hook_a_linear_layer(model):
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda module, args, output: output + 1)


def wrap_a_block_s_forward(model):
    """As accelerate's hooks do."""
    block = model.transformer.h[1]
    forward = block.forward
    block.forward = functools.update_wrapper(functools.partial(forward), forward)


def attend_eagerly(model):
    model.set_attn_implementation("eager")


def exchange_a_block(model):
    model.transformer.h[1] = tiny.gpt2(seed=5).transformer.h[1]


@pytest.mark.parametrize(
    "change",
    [train, hook_a_block, hook_a_linear_layer, attend_eagerly, wrap_a_block_s_forward, exchange_a_block],
    ids=lambda change: change.__name__,
)
def test_what_is_left_to_the_blocks(change):
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    assert_run_at_once(1, stock, fused)
    for model in (stock, fused):
        change(model)
    for _ in range(4):
        assert_run_at_once(0, stock, fused)


@pytest.mark.parametrize("options", [{"is_causal": False}, {"output_hidden_states": True}], ids=str)
def test_arguments_that_are_left_to_the_blocks(options):
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    for _ in range(4):
        outputs = assert_run_at_once(0, stock, fused, **options)
    if "output_hidden_states" in options:
        expected = forward(stock, **options).hidden_states
        torch.testing.assert_close(outputs.hidden_states, expected, rtol=1e-5, atol=1e-5)


def test_gradients_are_left_to_the_blocks():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    ids = tiny.inputs(stock)
    gradients = []
    for model in (stock, fused):
        count, outputs = replays_of(lambda model=model: model(**ids, labels=ids["input_ids"]))
        assert count == 0
        outputs.loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    tiny.assert_same_gradients(*reversed(gradients))


def test_sizes_that_come_seldom_do_not_drive_out_others(monkeypatch):
    monkeypatch.setattr(stack_runner, "_MOST_GRAPHS", 2)
    monkeypatch.setattr(stack_runner, "_CALLS_KEPT", 5)
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    prompts = [tiny.inputs(stock, length=length)["input_ids"] for length in (3, 4, 5)]
    for ids in prompts:
        meet(fused, ids)
    for ids, expected in zip(prompts, (1, 1, 0), strict=True):
        assert_run_at_once(expected, stock, fused, ids)
    assert "sizes are in use" in fuseopt.report(fused).since[0]
    for _ in range(6):
        assert_run_at_once(1, stock, fused, prompts[1])
    assert_run_at_once(1, stock, fused, prompts[2])
    assert_run_at_once(0, stock, fused, prompts[0])
    assert len(runner_of(fused)._works) == 2


def test_many_tokens_are_left_to_the_blocks(set_tuned):
    set_tuned("stack_graph_max_tokens", 13)
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    for _ in range(4):
        assert_run_at_once(0, stock, fused)


@pytest.mark.parametrize("each_device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_what_cannot_be_captured_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(stack_runner, "_CALLS_KEPT", 0)
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    with mock.patch.object(StackWork, "capture", side_effect=torch.OutOfMemoryError("no memory")):
        assert_run_at_once(0, stock, fused)
    assert "could not be captured" in fuseopt.report(fused).since[0]
    meet(fused)
    assert_run_at_once(1, stock, fused)
    assert "could not" not in fuseopt.report(fused).since[0]


@pytest.mark.parametrize("each_device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_several_streams_share_the_tensors_of_a_size():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    prompts = [tiny.inputs(stock, seed=seed)["input_ids"] for seed in range(8)]
    expected = [forward(stock, ids).logits for ids in prompts]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for place, ids in enumerate(prompts):
        with torch.cuda.stream(streams[place % 3]):
            results.append(forward(fused, ids).logits)
    torch.cuda.synchronize()
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


def test_threads_get_their_own_results(each_device):
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    prompts = [tiny.inputs(stock, seed=seed)["input_ids"] for seed in range(4)]
    expected = [forward(stock, ids).logits for ids in prompts]
    results = [[] for _ in prompts]

    def work(place):
        with torch.device(each_device):
            for _ in range(20):
                results[place].append(forward(fused, prompts[place]).logits)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, wanted in zip(results, expected, strict=True):
        assert len(got) == 20
        for logits in got:
            torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def test_copies_and_pickles_begin_anew():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    assert_run_at_once(1, stock, fused)
    others = copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))
    edit(fused)
    for other in others:
        assert runner_of(other).stack is other.transformer
        meet(other)
        assert_run_at_once(1, stock, other)


def test_restore_drops_the_runner():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    meet(fused)
    assert_run_at_once(1, stock, fused)
    fuseopt.restore(fused)
    assert "forward" not in fused.transformer.__dict__
    assert torch.equal(forward(fused).logits, forward(stock).logits)


@pytest.mark.slow
def test_torch_compile_sees_one_graph():
    stock, fused = stock_and_fused(tiny.gpt2(), CONFIG)
    torch._dynamo.reset()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(forward(compiled).logits, forward(stock).logits, rtol=1e-5, atol=1e-5)


def test_a_stack_by_itself_and_other_heads():
    from transformers import GPT2ForSequenceClassification, GPT2Model

    stock = tiny.gpt2().transformer
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIG, strict=True)
    assert isinstance(stock, GPT2Model) and isinstance(fused.forward.runner, StackRunner)
    ids = torch.arange(3, 10)[None]
    for expected in (0, 0, 1):
        count, outputs = replays_of(forward, fused, ids)
        assert count == expected
        wanted = forward(stock, ids).last_hidden_state
        torch.testing.assert_close(outputs.last_hidden_state, wanted, rtol=1e-5, atol=1e-5)
    head = GPT2ForSequenceClassification(copy.deepcopy(tiny.gpt2().config)).eval()
    head.config.pad_token_id = 0
    fused = fuseopt.initialize(copy.deepcopy(head), CONFIG, strict=True)
    for expected in (0, 0, 1):
        assert_run_at_once(expected, head, fused, ids)


def test_without_cuda_graphs():
    kernels = [{"name": "FusedBlock", "cuda_graphs": False}]
    stock = tiny.gpt2()
    fused = copy.deepcopy(stock)
    fuseopt.initialize(fused, {"kernel_fusion": {"custom_cuda_kernels": kernels, "jit": False}})
    for _ in range(4):
        with mock.patch.object(stack_runner, "run_blocks", wraps=stack_runner.run_blocks) as at_once:
            assert_run_at_once(0, stock, fused)
        assert at_once.call_count == 1


def test_training_steps_that_are_compiled_and_evaluations_in_between():
    memory_efficient = {"backend": "aot_eager"}
    fusion = {"custom_cuda_kernels": ["FusedBlock"], "memory_efficient_fusion": memory_efficient}
    no_dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    stock = tiny.gpt2(**no_dropout)
    fused = fuseopt.initialize(copy.deepcopy(stock), {"kernel_fusion": fusion}, strict=True)
    ids = tiny.inputs(stock)["input_ids"]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (stock, fused)]
    for replays in (0, 0, 1, 1):
        assert_run_at_once(replays, stock, fused)
        for model, optimizer in zip((stock, fused), optimizers, strict=True):
            model.train()
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()


def test_a_stack_whose_blocks_have_other_forwards_stays_as_it_is():
    norms = {"name": "FusedLayerNorm", "fuse_residual": True}
    config = {"kernel_fusion": {"custom_cuda_kernels": [norms, "FusedBlock"], "jit": False}}
    model = tiny.gpt2()
    rows = {row.paths[0]: row for row in fuseopt.plan(model, config).rows if row.target.startswith("GPT2")}
    reason = "it needs transformer.h.0.forward, which GPT2BlockForward by strategy kernels has"
    assert not rows["transformer.forward"].replaced and rows["transformer.forward"].reason == reason
    fused = fuseopt.initialize(copy.deepcopy(model), config)
    assert "forward" not in fused.transformer.__dict__
    torch.testing.assert_close(tiny.logits(fused), tiny.logits(model), rtol=1e-5, atol=1e-5)
