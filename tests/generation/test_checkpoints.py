"""generate() on the shipped checkpoints: real text, peaked distributions, and the tokens of stock transformers."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    StoppingCriteriaList,
    StopStringCriteria,
)

import fuseopt
from tests.axes import thinned
from tests.ops.cases import launched_kernels

CHECKPOINTS = Path(__file__).parents[2] / "examples" / "checkpoints"
PROMPTS = [line for line in (CHECKPOINTS / "prompts.txt").read_text().splitlines() if line]
MODES = {
    "greedy": {},
    "no repeated 3-gram": {"no_repeat_ngram_size": 3},
    "sampling": {"do_sample": True, "top_k": 40, "temperature": 0.8},
    "sampling without repeats": {"do_sample": True, "no_repeat_ngram_size": 2, "num_return_sequences": 2},
    "beams": {"num_beams": 4},
    "beams without repeats": {"num_beams": 3, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 3},
}
CONFIGS = {
    "generation": {"generation": {"enable": True}},
    "inference": "inference",
    "jit": {"kernel_fusion": {"enable": True}},
    "folded bias": {"kernel_fusion": {"custom_cuda_kernels": [{"name": "FusedGELU", "fold_bias": True}]}},
}
# The one exchanges the decode loop, the other logits processors. The rest exchanges modules alone, and what decoding
# shows these is rows of prompts, or rows of beams whose caches are reordered.
OF_DECODING = ("generation", "inference")
OF_MODULES = ("greedy", "beams without repeats")
pytestmark = [
    pytest.mark.usefixtures("each_device"),
    pytest.mark.filterwarnings("ignore:fuseopt. .* matches nothing in the model"),
]


NAMES = ["gpt2-kjv", "llama-kjv", "t5-kjv"]


@pytest.fixture(params=NAMES)
def checkpoint(request, each_device):
    auto = AutoModelForSeq2SeqLM if request.param.startswith("t5") else AutoModelForCausalLM
    model = auto.from_pretrained(CHECKPOINTS / request.param, attn_implementation="eager").to(each_device).eval()
    return model, AutoTokenizer.from_pretrained(CHECKPOINTS / request.param)


def generate(model, tokenizer, prompts, /, **kwargs):
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    torch.manual_seed(7)
    output = model.generate(**batch, max_new_tokens=20, output_scores=True, return_dict_in_generate=True, **kwargs)
    return output, batch


@thinned(3, checkpoint=NAMES, mode=list(MODES), indirect=["checkpoint"])
def test_float32_tokens_are_stock_s(checkpoint, mode):
    model, tokenizer = checkpoint
    prompts = sorted(PROMPTS, key=len)[5:55:10]
    stock, batch = generate(model, tokenizer, prompts, **MODES[mode])
    assert not batch["attention_mask"].all(), "prompts of one length would leave padding untested"
    for name, config in CONFIGS.items():
        if name not in OF_DECODING and mode not in OF_MODULES:
            continue
        with fuseopt.fused(model, config):
            assert fuseopt.report(model).replaced
            fused, _ = generate(model, tokenizer, prompts, **MODES[mode])
        assert type(fused) is type(stock)
        assert tokenizer.batch_decode(fused.sequences) == tokenizer.batch_decode(stock.sequences), name
        assert torch.equal(fused.sequences, stock.sequences)
        for got, wanted in zip(fused.scores, stock.scores, strict=True):
            assert torch.equal(got.isinf(), wanted.isinf()), name
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2-kjv", "t5-kjv"])
@pytest.mark.parametrize(("rows", "kernel"), [(3, "decode_linear_fma_kernel"), (20, "decode_linear_tiles_kernel")])
def test_float32_steps_run_on_kernels_for_float32(name, rows, kernel):
    """No layer of a step falls back to the kernel for any dtype."""
    auto = AutoModelForSeq2SeqLM if name.startswith("t5") else AutoModelForCausalLM
    model = auto.from_pretrained(CHECKPOINTS / name).to("cuda").eval()
    ids = torch.randint(5, 4000, (rows, 9), device="cuda")
    with fuseopt.fused(model, CONFIGS["generation"]):
        ran = launched_kernels(lambda: model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False))
    assert sum(kernel in launched for launched in ran) >= 4 * 3
    assert not any("decode_linear_plain_kernel" in launched for launched in ran)


@thinned(3, checkpoint=NAMES, mode=["greedy", "sampling", "beams"], indirect=["checkpoint"])
def test_stop_strings_end_generation_where_transformers_ends_it(checkpoint, mode):
    model, tokenizer = checkpoint
    prompts = PROMPTS[:4]
    kwargs = {**MODES[mode], "stop_strings": ["the", "and "], "tokenizer": tokenizer}
    stock, _ = generate(model, tokenizer, prompts, **kwargs)
    longer, _ = generate(model, tokenizer, prompts, **MODES[mode])
    assert stock.sequences.shape != longer.sequences.shape or not torch.equal(stock.sequences, longer.sequences)
    with fuseopt.fused(model, CONFIGS["generation"]):
        fused, _ = generate(model, tokenizer, prompts, **kwargs)
        assert str(model.generate.calls[-1]).startswith("T1 fast forward")
        with pytest.raises(ValueError, match="tokenizer"):
            generate(model, tokenizer, prompts, stop_strings=["the"])
    assert torch.equal(fused.sequences, stock.sequences)


def in_a_config(tokenizer):
    config = GenerationConfig(stop_strings=["the", "and "])
    return {"generation_config": config, "tokenizer": tokenizer}, "T1 fast forward"


def in_a_criterion(tokenizer):
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, ["the", "and "])])
    return {"stop_strings": ["of"], "tokenizer": tokenizer, "stopping_criteria": criteria}, "T1 fast forward"


def for_nothing(tokenizer):
    return {"tokenizer": tokenizer}, "T0 device loop"


@thinned(
    3,
    checkpoint=NAMES,
    case={case.__name__: case for case in (in_a_config, in_a_criterion, for_nothing)},
    indirect=["checkpoint"],
)
def test_a_tokenizer_goes_where_transformers_wants_it(checkpoint, case):
    model, tokenizer = checkpoint
    kwargs, tier = case(tokenizer)
    stock, _ = generate(model, tokenizer, PROMPTS[:2], **kwargs)
    with fuseopt.fused(model, CONFIGS["generation"]):
        fused, _ = generate(model, tokenizer, PROMPTS[:2], **kwargs)
        assert str(model.generate.calls[-1]).startswith(tier)
    assert torch.equal(fused.sequences, stock.sequences)


def test_stop_strings_of_a_model_with_methods_of_its_own(checkpoint):
    model, tokenizer = checkpoint
    model._validate_model_kwargs = model._validate_model_kwargs
    kwargs = {"stop_strings": ["the", "and "], "tokenizer": tokenizer}
    stock, _ = generate(model, tokenizer, PROMPTS[:2], **kwargs)
    with fuseopt.fused(model, CONFIGS["generation"]):
        fused, _ = generate(model, tokenizer, PROMPTS[:2], **kwargs)
        assert "overrides preparation methods" in model.generate.calls[-1].reason
    assert torch.equal(fused.sequences, stock.sequences)


def test_what_is_wrong_with_stop_strings_is_said_when_transformers_comes_to_it(checkpoint):
    model, tokenizer = checkpoint
    with fuseopt.fused(model, CONFIGS["generation"]), pytest.raises(ValueError, match="max_length"):
        model.generate(**tokenizer(PROMPTS[0], return_tensors="pt"), max_length=1, stop_strings=[], tokenizer=tokenizer)


def test_verify_agrees_on_real_text(checkpoint):
    model, tokenizer = checkpoint
    inputs = dict(tokenizer(PROMPTS[:4], return_tensors="pt", padding=True).to(model.device))
    generate = {"max_new_tokens": 16, "no_repeat_ngram_size": 3}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.zeros_like(inputs["input_ids"][:, :1])
    checked = fuseopt.verify(model, "inference", inputs, generate=generate)
    assert checked.ok and checked.tokens_agree, checked
