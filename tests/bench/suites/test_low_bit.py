"""bench low-bit: times and bytes of quantised steps, stock and torchao, and their predictions of a text."""

import math
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fuseopt.bench.harness import torchao_weights
from fuseopt.bench.harness.bytes_floor import cache_bytes, weight_bytes
from fuseopt.bench.harness.generate_rows import Row
from fuseopt.bench.suites import low_bit
from fuseopt.bench.suites.demo import default_checkpoints
from fuseopt.cli import main
from fuseopt.generation.engine.layers import Linear
from fuseopt.generation.engine.low_bit import LowBitChoice, LowBitWeights
from fuseopt.ops import quantize

CPU = torch.device("cpu")
SIZES = {"prompt": 5, "new": 3}
INT8 = {"int8": {"generation": {"weights": "int8"}}}


@pytest.fixture
def torchao(monkeypatch):
    """A stand-in for torchao that rounds weights in place; records the weights that it was given."""
    seen = {}

    def quantize_(model, config, filter_fn):
        if config == "unsupported":
            raise ImportError("Requires mslk >= 1.0.0\nand more")
        for path, module in model.named_modules():
            if filter_fn(module, path):
                module.weight = nn.Parameter(module.weight.detach().round(decimals=3))
                seen[path] = module

    library = types.ModuleType("torchao.quantization")
    library.quantize_ = quantize_
    library.Int8WeightOnlyConfig = lambda set_inductor_config: "int8"
    library.Int4WeightOnlyConfig = lambda group_size, set_inductor_config: "unsupported"
    package = types.ModuleType("torchao")
    package.__spec__ = object()
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.quantization", library)
    return seen


def of(results, variant):
    return next(row for row in results.rows if row.variant.split(" [")[0] == variant)


def test_a_model_is_timed_in_each_way(torchao, monkeypatch):
    monkeypatch.setattr(low_bit, "read_bandwidth", lambda device: 1e9)
    row = Row("t5-tiny", 2, **SIZES)
    results = low_bit.run(device=CPU, rows=[row], configs={"generation": low_bit.CONFIGS["generation"], **INT8})
    assert (results.benchmark, results.unit) == ("low-bit", "us")
    assert [row.variant.split(" [")[0] for row in results.rows] == ["stock", "generation", "int8", *low_bit.TORCHAO]
    assert {row.case for row in results.rows} == {"a token of t5-tiny generate, 2 x (5 + 3), greedy, float32"}
    model = row.random_model(CPU, torch.float32)
    plain, quantised = of(results, "generation"), of(results, "int8")
    assert plain.difference == "tokens equal" and plain.bytes == weight_bytes(model) + cache_bytes(model, 2, 1, 5, 3)
    mib = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    assert of(results, "stock").weights_mib == plain.weights_mib == pytest.approx(mib)
    # A byte for each weight of the decoder's linear layers and the head, and 4 for each of their outputs.
    layers = [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not path.startswith("encoder.") and path[-17:-1] != "EncDecAttention."
    ]
    layers += [block.layer[1].EncDecAttention.get_submodule(name) for block in model.decoder.block for name in "qo"]
    own = sum(layer.weight.numel() + 4 * layer.out_features for layer in layers)
    assert quantised.weights_mib - mib == pytest.approx(own / 2**20)
    assert plain.bytes - quantised.bytes == sum(layer.weight.nbytes for layer in layers) - own
    assert quantised.of_floor == pytest.approx(quantised.bytes / 1e9 / quantised.milliseconds[1] * 1e3)
    theirs, missing = of(results, "torchao int8 weights"), of(results, "torchao int4 weights")
    assert theirs.milliseconds and theirs.weights_mib > mib and theirs.of_floor is None
    assert "lm_head" in torchao and not any(path.startswith("encoder.") for path in torchao)
    assert missing.note == "torchao cannot quantise the model: Requires mslk >= 1.0.0" and not missing.failed


def test_a_model_without_layers_for_torchao_is_said(torchao):
    model = Row("gpt2-tiny", 1).random_model(CPU, torch.float32)
    reason = "torchao quantises no layer: none is a torch.nn.Linear with inputs in whole groups of 128"
    assert torchao_weights.quantised(model, 4) == reason and not torchao
    assert isinstance(torchao_weights.quantised(model, 8), nn.Module) and list(torchao) == ["lm_head"]


def test_an_error_of_torchao_without_a_message_is_said_by_its_class(torchao, monkeypatch):
    def fail(*given, **named):
        raise AssertionError

    monkeypatch.setattr(sys.modules["torchao.quantization"], "quantize_", fail)
    model = Row("gpt2-tiny", 1).random_model(CPU, torch.float32)
    assert torchao_weights.quantised(model, 8) == "torchao cannot quantise the model: AssertionError"


def test_a_checkpoint_predicts_texts(monkeypatch):
    monkeypatch.setattr(torchao_weights.importlib.util, "find_spec", lambda name: None)
    folder = default_checkpoints() / "llama-kjv"
    monkeypatch.setattr(low_bit, "_MOST_LINES", 3)
    monkeypatch.setitem(low_bit._LINES_AT_A_TIME, "cpu", 2)
    results = low_bit.run(device=CPU, rows=[Row(str(folder), 1, **SIZES)], configs=INT8)
    cases = list(dict.fromkeys(row.case for row in results.rows))
    assert cases[0].startswith("a token of llama-kjv generate, 1 x (5 + 3)")
    assert cases[1:] == [f"llama-kjv predicts {name}, float32" for name in ("held-out.txt", "prompts.txt")]
    # The same by one forward of stock over the lines.
    lines = (default_checkpoints() / "held-out.txt").read_text().splitlines()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = [tokenizer(line, add_special_tokens=False).input_ids for line in lines]
    rows = torch.tensor([line[:24] for line in ids if len(line) >= 24][:3])
    with torch.no_grad():
        logits = model(rows).logits[:, 7:-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 8:].flatten()).item()
    stock, quantised, *theirs = (row for row in results.rows if row.case == cases[1])
    assert stock.perplexity == pytest.approx(math.exp(loss), rel=1e-4) and stock.kl is None
    assert 1e-6 < quantised.kl < 1e-2 and 0.9 < quantised.same_top <= 1 and quantised.note is None
    assert 0 < abs(quantised.perplexity / stock.perplexity - 1) < 0.05
    assert {row.note for row in theirs} == {"torchao is not installed"}
    columns = results.columns()
    assert columns["perplexity"][0] == "" and columns[results.shown_unit][5] == ""
    assert "not run" in columns[results.shown_unit]


def test_models_of_a_row_are_freed_before_the_next_row(monkeypatch):
    monkeypatch.setattr(low_bit, "TORCHAO", {})
    made, random_model = [], Row.random_model

    def recorded(*arguments):
        assert not [each for each in made if each() is not None]
        model = random_model(*arguments)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(Row, "random_model", recorded)
    rows = [Row("gpt2-tiny", batch, **SIZES) for batch in (1, 2)]
    results = low_bit.run(device=CPU, rows=rows, configs=INT8)
    assert len(results.rows) == 4 and not any(row.failed for row in results.rows) and len(made) == 2


def test_a_checkpoint_is_loaded_once_and_a_text_of_short_lines_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(low_bit, "TORCHAO", {})
    loaded, saved_model = [], low_bit.saved_model
    monkeypatch.setattr(low_bit, "saved_model", lambda *given: loaded.append(given) or saved_model(*given))
    monkeypatch.setattr(low_bit, "read_bandwidth", lambda device: loaded.append("all cases are listed") or 1e9)
    (tmp_path / "held-out.txt").write_text("In the beginning\n")
    row = Row(str(default_checkpoints() / "llama-kjv"), 1, **SIZES)
    *times, text = low_bit.run(device=CPU, rows=[row], configs={}, checkpoints=tmp_path).rows
    assert loaded[0] == "all cases are listed" and len(loaded) == 2
    assert [row.variant for row in times] == ["stock"] and text.note == "no line of 24 tokens" and not text.failed


def test_no_checkpoint_was_trained_on_the_held_out_text():
    """GPT-2 and T5 hold these chapters out, and Llama learned others."""
    held_out = (default_checkpoints() / "held-out.txt").read_text()
    prompts = (default_checkpoints() / "prompts.txt").read_text().splitlines()
    assert len(held_out.splitlines()) == 63 and not [line for line in prompts if line and f"\n{line}" in held_out]


def test_weights_that_are_not_quantised_are_said(monkeypatch):
    monkeypatch.setattr(low_bit, "TORCHAO", {})
    nothing = {"nothing": {"generation": {"weights": {"bits": 8, "exclude": ["*", "*.*"]}}}}
    limited = {"limited": {"generation": {"weights": "int8", "max_length": 4}}}
    results = low_bit.run(device=CPU, rows=[Row("gpt2-tiny", 1, **SIZES)], configs={**nothing, **limited})
    assert of(results, "nothing").note == "no weights were quantised"
    assert of(results, "limited").note.startswith("transformers decoded: ")


def test_rows_that_read_unquantised_weights_are_said(monkeypatch):
    """As on a GPU, where products of many rows read the Parameters."""
    monkeypatch.setattr(low_bit, "TORCHAO", {})
    monkeypatch.setattr(LowBitWeights, "most_rows", 3)
    rows = [Row("gpt2-tiny", batch, **SIZES) for batch in (3, 4)]
    few, many = (row for row in low_bit.run(device=CPU, rows=rows, configs=INT8).rows if row.variant != "stock")
    assert few.note is None and many.note == "some products of more than 3 rows read unquantised weights"


def test_products_of_more_rows_than_quantised_weights_take_save_nothing():
    weight = quantize(torch.randn(32, 64), bits=8)
    layers = [Linear((torch.randn(32, 64),), low_bit=(weight,), has_unquantised=has) for has in (True, False)]
    for layer in layers:
        vars(layer)["most_low_bit_rows"] = 3
    weights = LowBitWeights(None)
    weights._choice = LowBitChoice(layers, (), {})
    saved = 32 * 64 * 4 - weight.nbytes
    assert [weights.saved_bytes(rows) for rows in (3, 4)] == [2 * saved, saved]


def test_the_command_line_makes_the_rows(monkeypatch, capsys, tmp_path):
    seen = []
    monkeypatch.setattr(low_bit, "run", lambda **given: seen.append(given) or low_bit.Results.measured_here("", []))
    command = ["bench", "low-bit", "--device", "cpu"]
    assert main([*command, "--checkpoints", str(tmp_path)]) == 0
    given = ["--model", "gpt2-tiny", "--batch", "1", "4", "--new", "6", "--dtype", "float16", "--no-compile"]
    assert main([*command, *given, "--config", "inference"]) == 0
    assert seen[0]["rows"] == [] and seen[0]["checkpoints"] == tmp_path and seen[0]["configs"] is None
    assert seen[1]["rows"] == [Row("gpt2-tiny", batch, new=6) for batch in (1, 4)]
    assert (seen[1]["dtype"], seen[1]["compile"], list(seen[1]["configs"])) == (torch.float16, False, ["inference"])
    assert main([*command, "--new", "6"]) == 2
    assert "also name a model, such as --model gpt2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_static_cache_is_compiled(torchao, monkeypatch):
    from fuseopt.bench.harness import generate_rows

    compiled = []

    def compiler(graph, inputs):
        compiled.append(torch._inductor.config.coordinate_descent_tuning)
        return graph

    monkeypatch.setattr(generate_rows, "_CPU_COMPILER", compiler)
    results = low_bit.run(device=CPU, rows=[Row("gpt2-tiny", 1, **SIZES)], configs={}, compile=True)
    assert compiled == [False, True] and of(results, low_bit.STATIC).difference == "tokens equal"
    timed = [row.variant for row in results.rows if row.milliseconds]
    assert timed == ["stock", low_bit.STATIC, f"torchao int8 weights, {low_bit.STATIC}"]
