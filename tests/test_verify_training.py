"""verify of training steps: wrong losses and gradients are found and named, and what it is given is checked."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, T5Config
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

import fuseopt
from fuseopt import cli, modules
from fuseopt.build import loader
from fuseopt.errors import InputsError
from tests import tiny

GELU = {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "backend": "reference", "jit": False}}
NORM = {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"], "jit": False}}
LOSS = {"kernel_fusion": {"triton_kernels": ["FusedCrossEntropy"], "jit": False}}


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    return BertForMaskedLM(BertConfig(vocab_size=tiny.VOCAB, **sizes))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**tiny._LLAMA_SIZES, attention_dropout=0.1))


MODELS = {"gpt2": tiny.gpt2, "t5": tiny.t5, "bert": bert, "llama": llama}


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, tiny.VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


def training_preset() -> dict:
    """The preset, compiled with PyTorch's own kernels: nothing to compile, a second instead of ten."""
    config = fuseopt.Config.load("training").to_dict()
    config["kernel_fusion"]["memory_efficient_fusion"]["backend"] = "aot_eager"
    return config


@pytest.mark.filterwarnings("ignore:fuseopt. .* matches nothing in the model")
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        # Traces take seconds, and compiled steps of other families are compared with stock's in tests/strategies.
        pytest.param(name, preset, marks=[pytest.mark.slow] * (preset == "training" and name != "gpt2"))
        for name in MODELS
        for preset in ("inference", "training", "reference")
    ],
)
def test_presets_train_as_stock_does(name, preset, ids):
    model = MODELS[name]()
    found = fuseopt.verify(model, training_preset() if preset == "training" else preset, {"input_ids": ids}, labels=ids)
    assert found.ok, found
    assert found.replaced > 1
    assert found.gradients == len(list(model.parameters()))
    assert 0 < found.gradient.stock_error < 1e-3
    assert 0 < found.loss.stock_error < 1e-4
    assert any("dropout: rates of up to 0.1" in line for line in found.not_run)
    assert not any("compiled training steps" in line for line in found.not_run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(ids, dtype):
    found = fuseopt.verify(tiny.gpt2().to(dtype), GELU, {"input_ids": ids}, labels=ids)
    assert found.ok, found
    assert found.gradient.stock_error > 0
    assert found.gradient.tolerance >= 4 * found.gradient.stock_error


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [True, False])
def test_a_bfloat16_llama_trains_as_stock_does(tied, set_tuned):
    """With grouped queries, measured products, layers compiled in regions, and four chunks of the head's rows."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    others = {"head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 1024, "tie_word_embeddings": tied}
    others["num_hidden_layers"] = 5
    model = tiny.llama(**sizes, **others).cuda().bfloat16()
    set_tuned("linear_cross_entropy_chunk_bytes", 1024 * 4096 * 2)
    ids = torch.randint(3, 4096, (4, 1024), device="cuda")
    found = fuseopt.verify(model, "training", {"input_ids": ids}, labels=ids)
    assert found.ok, found
    assert found.gradients == len(list(model.parameters()))
    assert not any("compiled training steps" in line for line in found.not_run)


class _WrongBackward(torch.autograd.Function):
    """A tanh GELU whose gradient is 0.1% too large."""

    @staticmethod
    def forward(context, input):
        context.save_for_backward(input)
        return F.gelu(input, approximate="tanh")

    @staticmethod
    def backward(context, gradient):
        (input,) = context.saved_tensors
        return 1.001 * torch.ops.aten.gelu_backward(gradient, input, approximate="tanh")


def test_a_wrong_gradient_is_found_and_its_parameter_named(ids, monkeypatch):
    monkeypatch.setattr(modules.FusedGELU, "forward", lambda self, input: _WrongBackward.apply(input))
    inputs = {"input_ids": ids}
    assert fuseopt.verify(tiny.gpt2(), GELU, inputs).ok
    found = fuseopt.verify(tiny.gpt2(), GELU, inputs, labels=ids)
    assert not found.ok
    assert found.loss.ok
    assert found.gradient.name.startswith(("transformer.h.0", "transformer.h.1"))
    assert found.gradient.fused_error > found.gradient.tolerance > found.gradient.stock_error
    assert f"the worst of {found.gradient.name}" in str(found)


def test_a_wrong_backward_of_an_op_is_found(ids, monkeypatch):
    state = loader.load("cpu")
    if state.status != "loaded":
        pytest.skip(state.reason)
    op = sys.modules["fuseopt.ops.rms_norm"]._RMSNorm
    backward = op.backward

    def wrong(context, *gradients):
        backend, input, weight, *others = backward(context, *gradients)
        return backend, input, 1.001 * weight, *others

    monkeypatch.setattr(op, "backward", staticmethod(wrong))
    found = fuseopt.verify(llama(), NORM, {"input_ids": ids}, labels=ids)
    assert not found.ok
    assert found.gradient.name.endswith("norm.weight")
    assert found.loss.ok


def test_a_gradient_of_one_parameter_is_named(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(approximate="tanh"), nn.Linear(8, 8))
    monkeypatch.setattr(modules.FusedGELU, "forward", lambda self, input: F.gelu(input, approximate="tanh").detach())
    found = fuseopt.verify(model, GELU, {"input": torch.randn(3, 8)}, train=True)
    assert not found.ok
    assert found.gradient.name in ("0.weight", "0.bias")
    assert found.gradients == 4


def test_a_wrong_loss_is_found(ids, monkeypatch):
    call = modules.FusedCausalLMLoss.__call__
    monkeypatch.setattr(
        modules.FusedCausalLMLoss, "__call__", lambda self, *args, **kwargs: 1e-4 + call(self, *args, **kwargs)
    )
    found = fuseopt.verify(tiny.gpt2(), LOSS, {"input_ids": ids}, labels=ids)
    assert not found.ok
    assert not found.loss.ok
    assert found.gradient.ok


@pytest.mark.parametrize("config", ["training", LOSS], ids=["preset", "kernel"])
def test_a_config_for_training_needs_labels(ids, config):
    model = tiny.gpt2()
    with pytest.raises(InputsError, match=r"labels: the training step of GPT2LMHeadModel .*labels=inputs"):
        fuseopt.verify(model, config, {"input_ids": ids})
    found = fuseopt.verify(model, config, {"input_ids": ids}, train=False)
    assert found.loss is None
    assert found.gradient is None
    assert any(line.startswith("training steps: pass labels") for line in found.not_run)


def test_what_was_not_run_is_named(ids):
    config = {"kernel_fusion": {"triton_kernels": ["FusedDropoutAdd"], "jit": False}, "generation": {"enable": True}}
    found = fuseopt.verify(tiny.gpt2(), config, {"input_ids": ids}, labels=ids, generate=False)
    assert found.ok, found
    lines = str(found).splitlines()
    assert "  not run: generate(): not called; pass generate={'max_new_tokens': 16} to compare tokens" in lines
    assert sum("generate" in line for line in found.not_run) == 1
    assert "  not run: GPT2DropoutAddForward x 2, such as transformer.h.0.forward: not called" in lines
    found = fuseopt.verify(tiny.gpt2(), config, {"input_ids": ids}, labels=ids, generate={"max_new_tokens": 3})
    assert found.tokens_agree
    assert not any("generate" in line for line in found.not_run)


def test_a_config_with_generation_generates_by_default(ids, monkeypatch):
    config, asked = {"generation": {"enable": True}}, []
    generate = type(tiny.gpt2()).generate
    monkeypatch.setattr(
        type(tiny.gpt2()), "generate", lambda *args, **options: asked.append(options) or generate(*args, **options)
    )
    found = fuseopt.verify(tiny.gpt2(), config, {"input_ids": ids})
    assert found.ran and found.tokens_agree
    assert {options["max_new_tokens"] for options in asked} == {16}
    assert str(found).startswith("verify: ok, generate() by the decode loop\n")
    del asked[:]
    model = tiny.gpt2()
    positions = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    short = {"input_ids": torch.ones(1, model.config.n_positions - 15, dtype=torch.long)}
    for inputs, options in (({"input_ids": ids}, {"generate": False}), (positions, {}), (short, {})):
        found = fuseopt.verify(model, config, inputs, **options)
        assert not found.ran and found.tokens_agree is None
        assert str(found).startswith("verify: ok, generate() by the decode loop; nothing that was replaced ran\n")
    assert fuseopt.verify(tiny.gpt2(), GELU, {"input_ids": ids}).tokens_agree is None
    assert not asked


def test_modules_that_a_block_forward_computes_are_named(ids):
    found = fuseopt.verify(tiny.gpt2(), "inference", {"input_ids": ids}, generate=False)
    assert (
        "FusedLayerNorm x 2, such as transformer.h.0.ln_2: not called: GPT2InferenceForward, the forward of the block "
        "around it, computes it"
    ) in found.not_run
    assert (
        "FusedLogitsProcessors x 1, such as _get_logits_processor: not called; pass generate={'max_new_tokens': 16} to "
        "compare tokens"
    ) in found.not_run


def test_arguments_are_those_of_the_bound_forward():
    class Unusual(nn.Linear):
        def forward(this, input):
            return F.gelu(super().forward(input), approximate="tanh")

    model, given = Unusual(8, 8), {"input": torch.randn(3, 8)}
    assert fuseopt.verify(model, "reference", given).ok
    with pytest.raises(InputsError, match="the forward of Unusual needs input too"):
        fuseopt.verify(model, "reference", {})
    with pytest.raises(InputsError, match=r"takes no 'other'; it takes input$"):
        fuseopt.verify(model, "reference", {**given, "other": 1})


def test_a_replacement_that_no_forward_reaches_is_named(monkeypatch):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.GELU(approximate="tanh"), nn.GELU(approximate="tanh")
            self.linear = nn.Linear(8, 8)

        def forward(self, input):
            return self.used(self.linear(input))

    found = fuseopt.verify(Half(), GELU, {"input": torch.randn(3, 8)})
    assert "FusedGELU x 1, such as idle: not called" in found.not_run


@pytest.mark.filterwarnings("ignore:fuseopt. the training step of")
def test_a_step_that_cannot_be_compiled_is_named(ids):
    class Branches(type(tiny.gpt2())):
        def forward(self, input_ids=None, labels=None, **kwargs):
            assert input_ids.sum().item() > 0
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    model = tiny.gpt2()
    model.__class__ = Branches
    config = {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager"}, "jit": False}}
    found = fuseopt.verify(model, config, {"input_ids": ids}, labels=ids)
    assert any("compiled training steps: the stock forward ran instead" in line for line in found.not_run), found


def test_decoder_inputs_are_built(ids):
    model = tiny.t5()
    found = fuseopt.verify(model, "reference", {"input_ids": ids}, generate={"max_new_tokens": 3})
    assert found.ok, found
    assert found.tokens_agree
    model.config.decoder_start_token_id = model.config.bos_token_id = None
    model.generation_config.decoder_start_token_id = model.generation_config.bos_token_id = None
    with pytest.raises(InputsError, match="pass decoder_input_ids, or labels"):
        fuseopt.verify(model, "reference", {"input_ids": ids})
    assert isinstance(model, T5ForConditionalGeneration)
    assert isinstance(model.config, T5Config)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([1, 2], {}, "inputs: expected a dict"),
        ({"input_idss": torch.ones(2, 3, dtype=torch.long)}, {}, "no 'input_idss'; did you mean 'input_ids'"),
        ({"input_ids": torch.full((2, 3), tiny.VOCAB)}, {}, "input_ids: 61 is no token id .* 0 to 60"),
        ({"input_ids": torch.full((2, 3), -1)}, {}, "input_ids: -1 is no token id"),
        ({"input_ids": torch.ones(0, 3, dtype=torch.long)}, {}, r"input_ids: shape \(0, 3\) has no elements"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long, device="meta")}, {}, "it is on meta and the model on cpu"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, {"generate": 3}, "generate: expected a dict"),
        ({1: torch.ones(2)}, {}, "keys must be names"),
        ({"input_ids": torch.ones(2, 3).long()}, {"labels": torch.full((2, 3), -100)}, "labels: all are -100"),
        ({"input_ids": torch.ones(2, 3).long()}, {"labels": torch.full((2, 3), 99)}, "labels: 99 is no token id"),
        ({"input_ids": torch.ones(2, 3).long()}, {"labels": [1, 2]}, "labels: expected a tensor, got list"),
        ({"input_ids": torch.ones(2, 3).long()}, {"train": 1}, "train: expected True, False or None"),
        ({"labels": torch.ones(2, 3).long()}, {"labels": torch.ones(2, 3).long()}, "labels: given twice"),
    ],
)
def test_bad_inputs_are_refused_before_anything_changes(inputs, options, message):
    model = fuseopt.initialize(tiny.gpt2(), GELU)
    before = dict(model.named_modules())
    with pytest.raises(InputsError, match=message):
        fuseopt.verify(model, GELU, inputs, **options)
    assert all(module is before[path] for path, module in model.named_modules())


def test_models_that_cannot_train_are_refused(ids):
    frozen = tiny.gpt2().requires_grad_(False)
    with pytest.raises(InputsError, match="no parameter requires a gradient"):
        fuseopt.verify(frozen, GELU, {"input_ids": ids}, labels=ids)
    hooked = tiny.gpt2()
    hooked.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(InputsError, match=r"transformer.wte.weight has a hook"):
        fuseopt.verify(hooked, GELU, {"input_ids": ids}, labels=ids)


class _Noisy(nn.Linear):
    def forward(self, input):
        return F.dropout(super().forward(input), 0.5, self.training)


def test_a_step_that_stays_random_is_refused():
    model = nn.Sequential(_Noisy(8, 8), nn.GELU(approximate="tanh"))
    with pytest.raises(InputsError, match="depends on random numbers although every dropout rate is 0"):
        fuseopt.verify(model, GELU, {"input": torch.randn(3, 8)}, train=True)


def _observe(block: nn.Module, args: tuple, output: torch.Tensor) -> None:
    """Moves the statistics of a BatchNorm in every training step."""
    block.statistics(output.detach().flatten(0, 1))


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("fused_before", [False, True])
def test_the_model_is_left_as_found(ids, monkeypatch, fused_before, broken):
    model = tiny.gpt2()
    model.transformer.h[1].eval()
    model.transformer.h[0].add_module("statistics", nn.BatchNorm1d(24))
    model.transformer.h[0].register_forward_hook(_observe)
    retained = model.transformer.wpe.weight.grad = torch.randn_like(model.transformer.wpe.weight)
    if fused_before:
        fuseopt.initialize(model, GELU)
    kept = retained.clone()
    found_modules = dict(model.named_modules())
    flags = {path: module.training for path, module in found_modules.items()}
    rates = {path: module.p for path, module in found_modules.items() if isinstance(module, nn.Dropout)}
    config = model.config.to_dict()
    state = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    if broken:
        monkeypatch.setattr(modules.FusedGELU, "forward", lambda self, input: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fuseopt.verify(model, GELU, {"input_ids": ids}, labels=ids)
    else:
        assert fuseopt.verify(model, GELU, {"input_ids": ids}, labels=ids).ok

    assert torch.equal(torch.rand(1), expected)
    assert model.transformer.wpe.weight.grad is retained
    assert torch.equal(retained, kept)
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["transformer.wpe.weight"]
    assert all(module is found_modules[path] for path, module in model.named_modules())
    assert {path: module.training for path, module in model.named_modules()} == flags
    assert {p: module.p for p, module in model.named_modules() if isinstance(module, nn.Dropout)} == rates
    assert 0.1 in rates.values()
    assert json.dumps(model.config.to_dict(), default=str) == json.dumps(config, default=str)
    for name, value in model.state_dict(keep_vars=True).items():
        assert id(value) == state[name][0]
        assert torch.equal(value, state[name][1])
    assert bool(fuseopt.report(model).replaced) is fused_before


def test_on_the_command_line(capsys, tmp_path, monkeypatch):
    model, config = str(tmp_path / "model"), tmp_path / "config.json"
    tiny.gpt2().save_pretrained(model)
    config.write_text(json.dumps(GELU))
    command = ["verify", model, "--device", "cpu", "--length", "7", "--config", str(config)]
    assert cli.main([*command, "--train", "--generate", "3"]) == 0
    out, err = capsys.readouterr()
    assert "random weights" not in out + err
    assert "gradients of 28 parameters" in out
    assert "tokens: the same" in out

    monkeypatch.setattr(modules.FusedGELU, "forward", lambda self, input: _WrongBackward.apply(input))
    assert cli.main(command) == 0
    assert "not run: training steps: pass --train to compare" in capsys.readouterr().out
    assert cli.main([*command, "--train"]) == 1
    assert "verify: FAILED" in capsys.readouterr().out
    assert cli.main(["verify", "gtp2", "--device", "cpu"]) == 2
    assert "did you mean 'gpt2'" in capsys.readouterr().err
    assert cli.main(["verify", "gpt2-tiny", "--device", "cpu", "--config", "training.json"]) == 2


def test_hints_on_the_command_line_are_options(capsys, tmp_path):
    config = tmp_path / "ngram.json"
    ngram = {"custom_cuda_kernels": ["FusedNoRepeatNGram"], "backend": "reference", "jit": False}
    config.write_text(json.dumps({"kernel_fusion": ngram}))
    assert cli.main(["verify", "gpt2-tiny", "--device", "cpu", "--length", "5", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert re.search("verify: ok, .*NoRepeatNGram set on the model; nothing that was replaced ran\n", out)
    assert "_get_logits_processor: not called; pass --generate 16 to compare tokens" in out
    assert "{" not in out and "..." not in out


def test_on_the_command_line_with_random_weights(capsys):
    assert cli.main(["verify", "t5-tiny", "--device", "cpu", "--config", "reference", "--length", "7"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("verify: ok, ") and "t5-tiny: random weights\n" in printed.err
