"""What a config may say, and what each wrong one is told."""

import builtins
import json
from dataclasses import replace

import pytest
import torch

from fuseopt import config as config_module
from fuseopt.config import (
    Config,
    GenerationOptions,
    JitOptions,
    KernelFusion,
    KernelRequest,
    MemoryEfficientOptions,
    beside_auto,
    extended,
)
from fuseopt.errors import ConfigError
from fuseopt.kernel_table import CUSTOM, PRESETS, TRITON, listed, preset_block

OSLO = {
    "kernel_fusion": {
        "enable": True,
        "memory_efficient_fusion": False,
        "custom_cuda_kernels": ["FusedRMSNorm", "FusedNoRepeatNGram"],
    }
}


def test_oslo_block_is_valid_verbatim():
    fusion = Config.load(OSLO).kernel_fusion
    assert fusion.enable and not fusion.memory_efficient_fusion
    assert [request.name for request in fusion.custom_cuda_kernels] == ["FusedRMSNorm", "FusedNoRepeatNGram"]


def test_enable_alone_means_jit():
    assert Config.load({"kernel_fusion": {"enable": True}}).kernel_fusion.jit == JitOptions("torchscript")


def test_memory_efficient_fusion_takes_the_place_of_jit_unless_asked_for():
    assert Config.load({"kernel_fusion": {"memory_efficient_fusion": True}}).kernel_fusion.jit is None
    both = {"kernel_fusion": {"memory_efficient_fusion": True, "jit": True}}
    assert Config.load(both).kernel_fusion.jit == JitOptions("torchscript")


def test_memory_efficient_fusion_takes_options():
    def options(value):
        return Config.load({"kernel_fusion": {"memory_efficient_fusion": value}}).kernel_fusion.memory_efficient_fusion

    assert options(False) is None
    assert options(True) == options({}) == MemoryEfficientOptions(budget=1.0, backend="inductor")
    assert options({"budget": 0}) == MemoryEfficientOptions(budget=0.0)
    assert options({"backend": "aot_eager"}).backend == "aot_eager"
    assert options({"cuda_graphs": True}) == MemoryEfficientOptions(cuda_graphs=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_load_and_say_their_name(preset):
    assert Config.load(preset).preset == preset


def test_none_is_the_inference_preset():
    assert Config.load(None) == Config.load("inference")


@pytest.mark.parametrize(
    "source",
    [
        OSLO,
        "inference",
        "training",
        "reference",
        {"kernel_fusion": {"jit": {"backend": "inductor"}}},
        {"kernel_fusion": {"memory_efficient_fusion": {"budget": 0.25, "backend": "aot_eager"}}},
        {"generation": {"enable": True, "max_graphs": 2}},
        {"generation": {"enable": False}, **OSLO},
        {"preset": "training", "generation": {"max_batch": 4}, "kernel_fusion": {"only": ["a.*"], "exclude": ["a.b"]}},
    ],
)
def test_to_dict_loads_back(source):
    config = Config.load(source)
    assert Config.load(config.to_dict()) == Config.load(config.to_json()) == config


@pytest.mark.parametrize("key", ["generation", "kernel_fusion"])
@pytest.mark.parametrize("beside", [{}, {"preset": "inference"}])
@pytest.mark.parametrize("value", [False, True])
def test_a_bool_switches_a_block_as_its_enable_does(key, beside, value):
    assert Config.load({**beside, key: value}) == Config.load({**beside, key: {"enable": value}})


def test_a_bool_beside_auto_keeps_what_a_choice_has_in_that_block():
    written = beside_auto({"preset": "auto", "kernel_fusion": True, "generation": False})
    base = {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "jit": False}, "generation": {"max_batch": 4}}
    config = extended(base, written)
    assert [request.name for request in config.kernel_fusion.custom_cuda_kernels] == ["FusedGELU"]
    assert config.kernel_fusion.jit is None and config.generation == GenerationOptions(enable=False, max_batch=4)


@pytest.mark.parametrize("key", ["weights", "cache_dtype"])
def test_false_quantises_nothing_as_null_does(key):
    assert Config.load({"generation": {key: False}}) == Config.load({"generation": {key: None}})


def test_generation_alone_asks_for_no_fusion():
    config = Config.load({"generation": {"max_batch": 8}})
    assert config.kernel_fusion == KernelFusion() and config.generation == GenerationOptions(max_batch=8)


def test_the_path_of_a_json_file_loads_as_its_dict(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(OSLO))
    assert Config.load(path) == Config.load(str(path)) == Config.load(OSLO)


@pytest.mark.parametrize(
    ("name", "option"),
    [("FusedGELU", "fold_bias"), ("FusedLayerNorm", "fuse_residual"), ("FusedRMSNorm", "fuse_residual")],
)
def test_kernel_with_options(name, option):
    entry = {"name": name, option: True}
    (request,) = Config.load({"kernel_fusion": {"custom_cuda_kernels": [entry]}}).kernel_fusion.custom_cuda_kernels
    assert request.options == {option: True} and request.to_dict() == entry


WRONG = {
    "empty dict": ({}, "empty"),
    "empty block": ({"kernel_fusion": {}}, "empty"),
    "block of another type": ({"kernel_fusion": 1}, "kernel_fusion: expected true, false or a dict such as"),
    "a list for a block": ({"kernel_fusion": ["FusedGELU"]}, "{'custom_cuda_kernels': ['FusedGELU']}"),
    "key of a block at the top": ({"jit": False}, "it is a key of kernel_fusion: {'kernel_fusion': {'jit': ...}}"),
    "key of a block inside, at the top": (
        {"cuda_graphs": False},
        "{'kernel_fusion': {'memory_efficient_fusion': {'cuda_graphs': ...}}}",
    ),
    "key of another block": ({"generation": {"jit": False}}, "generation.jit: unknown key; it is a key of kernel_fus"),
    "key of a dict in the block": ({"generation": {"bits": 4}}, "{'generation': {'weights': {'bits': ...}}}"),
    "key of two blocks": (
        {"exclude": ["lm_head"]},
        "it is a key of kernel_fusion: {'kernel_fusion': {'exclude': ...}} and of generation.weights: {'generation': "
        "{'weights': {'exclude': ...}}}; ",
    ),
    "key that another block has for itself": (
        {"generation": {"weights": {"bits": 4, "enable": False}}},
        "generation.weights.enable: unknown key; known keys here: 'bits'",
    ),
    "enable at the top": ({"enable": True}, "kernel_fusion: {'kernel_fusion': {'enable': ...}} and of generation: {"),
    "a size as a bool": ({"generation": {"prefix_cache_mib": True}}, "prefix_cache_mib: expected an integer"),
    "a name for a list": ({"kernel_fusion": {"custom_cuda_kernels": "FusedGELU"}}, "got str; write ['FusedGELU']"),
    "a bool for a list": ({"kernel_fusion": {"triton_kernels": True}}, "got bool; write [] for none"),
    "unknown top-level key": ({"kernel_fusoin": {"enable": True}}, "did you mean 'kernel_fusion'"),
    "unknown key": ({"kernel_fusion": {"enabel": True}}, "kernel_fusion.enabel: unknown key; did you mean 'enable'"),
    "key that is no string": ({"kernel_fusion": {1: True}}, "kernel_fusion.1: unknown key"),
    "enable of another type": ({"kernel_fusion": {"enable": "yes"}}, "kernel_fusion.enable: expected true or false"),
    "enable as a number": ({"kernel_fusion": {"enable": 1}}, "expected true or false, got 1 (int)"),
    "jit of another type": (
        {"kernel_fusion": {"jit": "torchscript"}},
        "kernel_fusion.jit: expected true, false or a dict",
    ),
    "jit backend": ({"kernel_fusion": {"jit": {"backend": "inducto"}}}, "did you mean 'inductor'"),
    "jit key": ({"kernel_fusion": {"jit": {"backnd": "inductor"}}}, "did you mean 'backend'"),
    "backend": ({"kernel_fusion": {"backend": "gpu"}}, "'gpu' is not one of auto, cuda"),
    "kernels of another type": ({"kernel_fusion": {"custom_cuda_kernels": "FusedGELU"}}, "expected a list"),
    "kernel of another type": (
        {"kernel_fusion": {"custom_cuda_kernels": [3]}},
        "custom_cuda_kernels[0]: expected the name",
    ),
    "unknown kernel": ({"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNrom"]}}, "did you mean 'FusedRMSNorm'"),
    "kernel twice": ({"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU", "FusedGELU"]}}, "listed 2 times"),
    "kernel dict without name": ({"kernel_fusion": {"custom_cuda_kernels": [{"fold_bias": True}]}}, "needs a name"),
    "kernel option": (
        {"kernel_fusion": {"custom_cuda_kernels": [{"name": "FusedGELU", "fold_bais": True}]}},
        "did you mean 'fold_bias'",
    ),
    "kernel option of another type": (
        {"kernel_fusion": {"custom_cuda_kernels": [{"name": "FusedGELU", "fold_bias": 1}]}},
        "expected true or false",
    ),
    "kernel without options": (
        {"kernel_fusion": {"custom_cuda_kernels": [{"name": "FusedSoftmax", "eps": 1}]}},
        "FusedSoftmax takes no options",
    ),
    "kernel not built yet": ({"kernel_fusion": {"custom_cuda_kernels": ["FusedAttention"]}}, "write it under triton"),
    "triton kernel not built yet": (
        {"kernel_fusion": {"triton_kernels": ["FusedBlock"]}},
        "not built yet for this list",
    ),
    "compile not built yet": ({"kernel_fusion": {"compile": True}}, "kernel_fusion.compile: not built yet"),
    "generation of another type": ({"generation": None}, "generation: expected true, false or a dict such as"),
    "empty generation": ({"generation": {}}, "generation: the block is empty"),
    "generation key": ({"generation": {"max_bacth": 8}}, "generation.max_bacth: unknown key; did you mean 'max_batch'"),
    "generation batch": (
        {"generation": {"max_batch": 0}},
        "at least 1 and at most 2147483647, got 0 (int)",
    ),
    "generation length": ({"generation": {"max_length": "long"}}, "at most 2147483647, got 'long' (str)"),
    "generation graphs": ({"generation": {"max_graphs": True}}, "at least 0 and at most 2147483647, got True (bool)"),
    "memory budget below 0": (
        {"kernel_fusion": {"memory_efficient_fusion": {"budget": -0.1}}},
        "kernel_fusion.memory_efficient_fusion.budget: expected a number from 0 to 1, got -0.1 (float)",
    ),
    "memory budget in percent": (
        {"kernel_fusion": {"memory_efficient_fusion": {"budget": 50}}},
        "expected a number from 0 to 1, got 50 (int)",
    ),
    "memory budget of another type": (
        {"kernel_fusion": {"memory_efficient_fusion": {"budget": True}}},
        "expected a number from 0 to 1, got True (bool)",
    ),
    "memory budget that is no number": (
        {"kernel_fusion": {"memory_efficient_fusion": {"budget": float("nan")}}},
        "expected a number from 0 to 1, got nan (float)",
    ),
    "memory backend": (
        {"kernel_fusion": {"memory_efficient_fusion": {"backend": "inducter"}}},
        "kernel_fusion.memory_efficient_fusion.backend: 'inducter' is not one of inductor, aot_eager; did you mean",
    ),
    "cuda_graphs": (
        {"kernel_fusion": {"memory_efficient_fusion": {"cuda_graphs": 1}}},
        "kernel_fusion.memory_efficient_fusion.cuda_graphs: expected true or false, or 'auto', got 1 (int)",
    ),
    "memory key": ({"kernel_fusion": {"memory_efficient_fusion": {"buget": 0.5}}}, "did you mean 'budget'"),
    "memory of another type": (
        {"kernel_fusion": {"memory_efficient_fusion": 0.5}},
        "kernel_fusion.memory_efficient_fusion: expected true, false or a dict such as {'budget': 0.5}, got float",
    ),
    "OSLO model parallelism": ({"model_parallelism": {"enable": True}, **OSLO}, "tp_plan='auto'"),
    "OSLO checkpointing": ({"activation_checkpointing": {"enable": True}}, "gradient_checkpointing_enable()"),
    "unknown preset": (
        {"preset": "inferense"},
        "preset: 'inferense' is not one of inference, training, reference, auto; did",
    ),
    "preset of another type": ({"preset": ["inference"]}, "preset: ['inference'] is not one of"),
    "empty block beside a preset": ({"preset": "inference", "kernel_fusion": {}}, "kernel_fusion: the block is empty"),
    "paths at the top": ({"only": ["encoder.*"]}, "only: unknown key; it is a key of kernel_fusion: {'kernel_fusion'"),
    "paths of another type": ({"kernel_fusion": {"exclude": "encoder.*"}}, "kernel_fusion.exclude: expected a list of"),
    "a path of another type": ({"kernel_fusion": {"only": ["a", 3]}}, "kernel_fusion.only[1]: expected a module path"),
    "no paths": (
        {"kernel_fusion": {"only": []}},
        "kernel_fusion.only: the list is empty, so nothing",
    ),
    "everything excluded": (
        {"kernel_fusion": {"exclude": ["a", "*"]}},
        "'*' excludes everything that `only` names",
    ),
    "paths that contradict each other": (
        {"kernel_fusion": {"only": ["b", "encoder.block.*"], "exclude": ["encoder*"]}},
        "kernel_fusion.exclude: 'encoder*' excludes everything that `only` names by 'encoder.block.*'; remove one",
    ),
    "a number": (3, "expected a dict, a path to a JSON file, a preset"),
    "a list": ([OSLO], "got list"),
    "a preset misspelt": ("inferense", "did you mean 'inference'"),
    "a missing file": ("no/such/file.json", "neither a file nor a preset"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_configs_are_told_what_where_and_the_fix(case):
    source, message = WRONG[case]
    with pytest.raises(ConfigError) as error:
        Config.load(source)
    assert message in str(error.value)


def test_broken_json_names_line_and_column(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{\n  "kernel_fusion": {"enable": true,}\n}')
    with pytest.raises(ConfigError, match=r"broken.json: not valid JSON at line 2, column 3\d"):
        Config.load(path)


@pytest.mark.parametrize(("content", "message"), [(b"[1]", "expected a JSON object"), (b"\xff\xfe", "not UTF-8")])
def test_json_that_is_no_config(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Config.load(path)


def test_the_tables_of_earlier_versions_are_given_with_a_warning():
    with pytest.warns(DeprecationWarning, match="fuseopt.kernel_table"):
        assert config_module.PRESETS["training"]["kernel_fusion"] == preset_block("training")
    with pytest.warns(DeprecationWarning, match="fuseopt.kernel_table"):
        assert config_module.CUSTOM_KERNELS["FusedGELU"] == ("fold_bias",)
    with pytest.warns(DeprecationWarning, match="fuseopt.kernel_table"):
        assert list(config_module.TRITON_KERNELS) == list(listed(TRITON))
    with pytest.raises(AttributeError, match="has no attribute 'KERNELS'"):
        _ = config_module.KERNELS


def test_a_preset_that_names_every_kernel_stays_complete():
    assert {r.name for r in Config.load("inference").kernel_fusion.custom_cuda_kernels} == set(listed(CUSTOM))


DEEP = "[" * 100_000 + "]" * 100_000
FROM_OUTSIDE = {
    "deep nesting": (b'{"kernel_fusion": ' + DEEP.encode() + b"}", "nested too deeply"),
    "a number of 5,000 digits": (b'{"generation": {"max_batch": ' + b"9" * 5000 + b"}}", "a number of 5000 digits"),
    "a number of 4,000 digits": (b'{"generation": {"max_batch": ' + b"9" * 4000 + b"}}", "a number of 4000 digits"),
    "a large number": (b'{"generation": {"max_batch": 99999999999}}', "at most 2147483647, got 99999999999 (int)"),
    "infinity": (b'{"generation": {"max_batch": 1e999}}', "got inf (float)"),
    "a key twice": (b'{"generation": {"max_batch": 1, "max_batch": 2}}', "the key 'max_batch' is there twice"),
    "a block twice": (
        b'{"generation": {"max_batch": 1}, "generation": {"max_length": 2}}',
        "'generation' is there twice",
    ),
    "an array of blocks": (b'{"kernel_fusion": [{"enable": true}]}', "got list; list kernels by name as in"),
    "arrays for values": (b'{"kernel_fusion": {"enable": [true]}}', "expected true or false, got [True] (list)"),
    "an array of kernels in one": (
        b'{"kernel_fusion": {"custom_cuda_kernels": [["FusedGELU"]]}}',
        "expected the name of a kernel, got list",
    ),
    "a key with control characters": (
        b'{"kernel_fusion": {"\\u001b[31m\\nenable": true}}',
        "kernel_fusion.\\x1b[31m\\nenable: unknown key",
    ),
    "a long key": (b'{"kernel_fusion": {"' + b"x" * 10**6 + b'": true}}', "unknown key"),
    "a long value": (b'{"kernel_fusion": {"backend": "' + b"x" * 10**6 + b'"}}', "is not one of auto"),
    "a lone surrogate": (b'{"kernel_fusion": {"\\ud800": true}}', "kernel_fusion.\\ud800: unknown key"),
}


def assert_short(error: pytest.ExceptionInfo[ConfigError], message: str) -> None:
    text = str(error.value)
    assert message in text and len(text) < 600 and text.isprintable()
    text.encode()


@pytest.mark.parametrize("case", FROM_OUTSIDE)
def test_a_file_from_outside_is_refused_in_a_few_words(case, tmp_path):
    content, message = FROM_OUTSIDE[case]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        Config.load(path)
    assert_short(error, message)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


DEEP_LIST: list = []
for _ in range(100_000):
    DEEP_LIST = [DEEP_LIST]
VALUES = {
    "a number too long to write": 10**5000,
    "a list of them": [10**5000],
    "a list nested deeply": DEEP_LIST,
    "a long text": "x\n" * 10**6,
    "what has no repr": Unspeakable(),
    "a tensor": torch.zeros(100, 100),
    "an array": torch.zeros(100, 100).numpy(),
    "a dict": {"a": 1},
}
PLACES = {
    "enable": lambda value: {"kernel_fusion": {"enable": value}},
    "jit": lambda value: {"kernel_fusion": {"jit": {"backend": value}}},
    "backend": lambda value: {"kernel_fusion": {"backend": value}},
    "kernels": lambda value: {"kernel_fusion": {"custom_cuda_kernels": [value]}},
    "kernel option": lambda value: {"kernel_fusion": {"triton_kernels": [{"name": "FusedGELU", "fold_bias": value}]}},
    "budget": lambda value: {"kernel_fusion": {"memory_efficient_fusion": {"budget": value}}},
    "cuda_graphs": lambda value: {"kernel_fusion": {"memory_efficient_fusion": {"cuda_graphs": value}}},
    "max_batch": lambda value: {"generation": {"max_batch": value}},
    "block": lambda value: {"generation": [value]},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", VALUES)
def test_any_value_anywhere_is_refused_in_a_few_words(place, value):
    with pytest.raises(ConfigError) as error:
        Config.load(PLACES[place](VALUES[value]))
    assert_short(error, "")


def test_json_text_loads_as_its_dict():
    assert Config.load(f"  {json.dumps(OSLO)}") == Config.load(OSLO)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[{json.dumps(OSLO)}]", "config: expected a JSON object at the top level, got list"),
        (DEEP, "config: nested too deeply"),
        ('{"generation": {"enable": yes}}', "config: not valid JSON at line 1, column 27"),
        ('{"generation": 1, "generation": 2}', "config: the key 'generation' is there twice"),
    ],
)
def test_json_text_is_refused_as_a_file_is(text, message):
    with pytest.raises(ConfigError) as error:
        Config.load(text)
    assert_short(error, message)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("{}")

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(ConfigError) as error:
        Config.load(path)
    assert_short(error, "config.json: cannot be read: Permission denied")


@pytest.mark.parametrize("name", ["folder", "x" * 5000, "a\0b", "a\x1b[31m\n.json", "\ud800"])
def test_paths_that_are_no_files(tmp_path, name):
    (tmp_path / "folder").mkdir()
    for source in (str(tmp_path / name), tmp_path / name):
        with pytest.raises(ConfigError) as error:
            Config.load(source)
        assert_short(error, "is neither a file nor a preset")


def test_a_dict_extends_a_preset():
    written = {"preset": "inference", "generation": {"max_batch": 8}, "kernel_fusion": {"jit": False}}
    preset, config = Config.load("inference"), Config.load(written)
    assert config.preset == "inference" and config.generation == GenerationOptions(max_batch=8)
    assert config.kernel_fusion == replace(preset.kernel_fusion, jit=None)
    assert Config.load({"preset": "inference"}) == preset


def test_lists_and_options_replace_those_of_the_preset():
    fusion = {"triton_kernels": ["FusedGELU"], "memory_efficient_fusion": {"budget": 0.5}}
    config = Config.load({"preset": "training", "kernel_fusion": fusion})
    assert config.kernel_fusion.triton_kernels == (KernelRequest("FusedGELU"),)
    assert config.kernel_fusion.memory_efficient_fusion == MemoryEfficientOptions(budget=0.5)
    assert config.kernel_fusion.jit is None and config.generation is None


def test_only_the_preset_inference_has_the_decode_loop():
    assert {preset: Config.load(preset).generation for preset in PRESETS} == {
        "inference": GenerationOptions(),
        "training": None,
        "reference": None,
    }


@pytest.mark.parametrize("key", ["cache_dtype", "weights", "prefix_cache_mib"])
def test_false_leaves_an_option_of_generation_out(key):
    assert Config.load({"generation": {key: False}}) == Config.load({"generation": True})
