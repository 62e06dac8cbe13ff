"""Every decoder of transformers that can be built small is what it was, with all that a config can ask for."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import fuseopt
from fuseopt.kernel_table import CUSTOM, TRITON, listed
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CONFIGS = (
    "inference",
    {"kernel_fusion": {"triton_kernels": list(listed(TRITON))}},
    {"generation": {"enable": True}, "kernel_fusion": {"custom_cuda_kernels": list(listed(CUSTOM))}},
)
LARGEST = 3_000_000  # parameters
# What configs and models raise at sizes that do not go together.
UNFIT = (
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
# Families that can be built small in every supported version: a skip of one of these would hide a fault.
ALWAYS_SMALL = {
    "bart",
    "bert",
    "bloom",
    "cohere",
    "electra",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "granite",
    "granitemoe",
    "helium",
    "llama",
    "mamba",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "opt",
    "pegasus",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "stablelm",
    "starcoder2",
    "whisper",
    "xglm",
}
# What families call their sizes. A config takes those that it has.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "vocab_size": 97,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
    return model


def small(model_type: str) -> nn.Module:
    try:
        config_class = CONFIG_MAPPING[model_type]
        default = config_class()
        if default.get_text_config() is not default:
            pytest.skip("it is made of several models")
        config = config_class(**{name: size for name, size in SIZES.items() if hasattr(default, name)})
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
            assert model_type not in ALWAYS_SMALL
            pytest.skip("it has other names for its sizes")
        torch.manual_seed(0)
        model = without_dropout(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval())
        tiny.logits(model)
        step(copy.deepcopy(model))
    except UNFIT as error:
        if model_type in ALWAYS_SMALL:
            raise
        pytest.skip(f"it takes no sizes that are as small as this: {error}")
    model.generation_config.eos_token_id = None
    return model


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of one training step; routers and sparse attentions may draw."""
    torch.manual_seed(0)
    batch = tiny.inputs(model.train())
    model(**batch, labels=batch["input_ids"]).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_families_that_are_always_small_are_gone_through():
    assert {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} >= ALWAYS_SMALL


# In transformers 5.17 Falcon-H1 takes all of 24 GiB for a sequence of seven tokens.
@pytest.mark.parametrize("model_type", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {"falcon_h1"}))
def test_logits_gradients_and_tokens_are_stock_s_and_restore_is_exact(model_type):
    stock = small(model_type)
    logits, gradients = tiny.logits(stock), step(copy.deepcopy(stock))
    arguments = {"max_new_tokens": 6, "do_sample": False}
    tokens = stock.generate(tiny.inputs(stock)["input_ids"], **arguments) if stock.can_generate() else None
    for config in CONFIGS:
        model = copy.deepcopy(stock)
        before = tiny.snapshot(model)
        fuseopt.initialize(model, config)
        torch.testing.assert_close(tiny.logits(model), logits, rtol=2e-4, atol=2e-4)
        if tokens is not None:
            assert torch.equal(model.generate(tiny.inputs(model)["input_ids"], **arguments), tokens)
        found = step(copy.deepcopy(model))
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() <= 2e-3 * gradient.norm() + 1e-6, name
        fuseopt.restore(model)
        assert torch.equal(tiny.logits(model), logits)
        assert tiny.snapshot(model) == before
