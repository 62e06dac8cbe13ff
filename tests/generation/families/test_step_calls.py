"""The ops that a step of GPT-2 and of T5 calls, in order, at sizes of real models, for each set of kernels."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fuseopt.bench.harness.architectures import load_config
from fuseopt.generation.families import spec_step
from tests.generation.families.step_recorder import as_recorded, recording, state_of
from tests.generation.families.tiny_decoders import step_of

LAYERS = 2
CLAMP = ["isinf", "any", "where", "neg", "clamp"]
# What launches nothing, and the masks of attention without kernels.
VIEWS = ("unflatten", "__getitem__", "permute", "unbind", "split", "transpose", "flatten", "view", "unsqueeze")
NOT_COUNTED = {*VIEWS, "__len__", "numel", "stride", "to", "add"}


def model_of(name: str, dtype: torch.dtype) -> torch.nn.Module:
    layers = ("num_layers", "num_decoder_layers", "n_layer", "num_hidden_layers")
    known = {layer for layer in layers if hasattr(load_config(name), layer)}
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            config = load_config(name, **dict.fromkeys(known, LAYERS))
            model = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return as_recorded(model)


def short(call: str) -> str | None:
    """ "decode_linear [1, 768] c_attn ln_1 +residual": op, first shape, weights by their modules, what else it does."""
    op, _, rest = call.partition("(")
    if op in NOT_COUNTED:
        return None
    arguments = rest.partition(", prefetch=")[0]
    modules: list[str] = []
    for module in re.findall(r"(\w+)\.(?:weight|bias)(?:\.T)?\[", arguments):
        modules += [module] if module not in modules else []
    extras = [
        f"+{name}"
        for name in ("residual", "bias", "gelu_tanh", "relu", "silu", "rotary")
        if re.search(rf"(?<![._]){name}(?!\[)", arguments)
    ]
    extras += ["+gated"] if "gated=True" in arguments else []
    return " ".join([op, re.search(r"\[[\d, ]*\]", arguments)[0], *modules, *extras])


def calls_of(name: str, kernels: str, rows: int, beams: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    model = model_of(name, dtype)
    encodes = model.config.is_encoder_decoder
    with recording(model, kernels, [spec_step]) as calls:
        step = step_of(model)(model)
        state = state_of(step, rows, beams, encodes)
        calls.clear()
        step(state).logits()
    return [call for call in map(short, calls) if call is not None]


GPT2_SIZES = [("gpt2-tiny", 64, 2), ("gpt2", 768, 12), ("gpt2-xl", 1600, 25)]
T5_SIZES = [("t5-tiny", 64, 2), ("t5-small", 512, 8), ("t5-base", 768, 12)]
ROWS = [(1, 1), (8, 1), (4, 4)]


@pytest.mark.parametrize(("name", "width", "heads"), GPT2_SIZES)
@pytest.mark.parametrize(("rows", "beams"), ROWS)
def test_gpt2(name: str, width: int, heads: int, rows: int, beams: int) -> None:
    """With all kernels a layer is five launches, as split-K sums end in the next norm. The first layer's are four: it
    reads a stored stream, so without beams it attends where it projects."""
    x, inner = f"[{rows}, {width}]", f"[{rows}, {4 * width}]"
    attend = f"decode_attention_ [{rows}, {heads}, {width // heads}]"
    project = f"decode_linear {x} c_attn ln_1"
    attend_first = [f"decode_qkv_attention_ {x} c_attn ln_1"] if beams == 1 else [project, attend]
    rest = [
        f"decode_linear {x} c_proj +residual",
        f"decode_linear {x} c_fc ln_2 +gelu_tanh",
    ]
    assert calls_of(name, "fused", rows, beams) == [
        f"decode_embedding [{rows}] wte wpe",
        *attend_first,
        *rest,
        f"decode_linear_partials {inner} c_proj",
        f"decode_linear_of_sum {x} c_attn ln_1",
        attend,
        *rest,
        f"decode_linear_partials {inner} c_proj",
        f"decode_linear_of_sum {x} wte ln_f",
    ]
    layer = [project, attend, *rest, f"decode_linear {inner} c_proj +residual"]
    assert calls_of(name, "plain", rows, beams) == [
        f"decode_embedding [{rows}] wte wpe",
        *layer * LAYERS,
        f"decode_linear {x} wte ln_f",
    ]


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
@pytest.mark.parametrize(("rows", "beams"), ROWS)
def test_llama_like(name: str, rows: int, beams: int) -> None:
    """Five launches a layer: norms of the queries and rotation are inside attention."""
    config = load_config(name)
    x, attended = f"[{rows}, {config.hidden_size}]", config.num_attention_heads * config.head_dim
    norms = "" if name.startswith("llama") else " q_norm k_norm"
    layer = [
        f"decode_linear {x} q_proj k_proj v_proj input_layernorm",
        f"decode_attention_ [{rows}, {config.num_attention_heads}, {config.head_dim}]{norms} +rotary",
        f"decode_linear [{rows}, {attended}] o_proj +residual",
        f"decode_linear {x} gate_proj up_proj post_attention_layernorm +silu +gated",
        f"decode_linear [{rows}, {config.intermediate_size}] down_proj +residual",
    ]
    begin, end = f"decode_embedding [{rows}] embed_tokens", f"decode_linear {x} embed_tokens norm"
    assert calls_of(name, "fused", rows, beams) == [begin, *layer * LAYERS, end]


@pytest.mark.parametrize(("name", "width", "heads"), T5_SIZES)
@pytest.mark.parametrize(("rows", "beams"), ROWS)
def test_t5(name: str, width: int, heads: int, rows: int, beams: int) -> None:
    """A single item's cross-attention is absorbed: two launches instead of three."""
    config = load_config(name)
    inner, x = heads * config.d_kv, f"[{rows}, {width}]"
    own = [
        f"decode_linear {x} q k v layer_norm",
        f"decode_attention_ [{rows}, {heads}, {config.d_kv}] +bias",
        f"decode_linear [{rows}, {inner}] o +residual",
    ]
    cross = [
        f"decode_linear {x} q layer_norm",
        f"decode_attention [{rows}, {heads}, {config.d_kv}]",
        f"decode_linear [{rows}, {inner}] o +residual",
    ]
    absorbed = [
        f"decode_linear {x} layer_norm +residual",
        f"decode_softmax_linear [{rows}, {128 * heads}] +residual",
    ]
    feed_forward = [
        f"decode_linear {x} wi layer_norm +relu",
        f"decode_linear [{rows}, {config.d_ff}] wo +residual",
    ]
    one_item = rows // beams == 1
    begin, end = f"decode_embedding [{rows}] shared", f"decode_linear {x} shared"
    layer = [*own, *(absorbed if one_item else cross), *feed_forward]
    assert calls_of(name, "fused", rows, beams) == [begin, *layer * LAYERS, end]
    assert calls_of(name, "plain", rows, beams) == [begin, *[*own, *cross, *feed_forward] * LAYERS, end]


def test_t5_gated() -> None:
    calls = calls_of("t5-v1_1-base", "plain", 8)
    assert calls.count("decode_linear [8, 768] wi_0 wi_1 layer_norm +gelu_tanh +gated") == LAYERS
    assert calls[-1] == "decode_linear [8, 768] shared final_layer_norm"


def test_t5_clamps_each_sum_in_float16() -> None:
    plain = calls_of("t5-small", "plain", 8)
    calls = calls_of("t5-small", "plain", 8, dtype=torch.float16)
    sums = [index for index, call in enumerate(calls) if call.endswith("+residual")]
    assert len(sums) == 3 * LAYERS
    for index in sums:
        assert [call.partition(" ")[0] for call in calls[index + 1 : index + 6]] == CLAMP
    assert [call for call in calls if call.startswith("decode")] == plain


@pytest.mark.parametrize("rows", [8, 64])
def test_without_kernels(rows: int) -> None:
    """By the BLAS library and PyTorch's attention, with norms that take in the sum before them."""
    x, inner, cache = f"[{rows}, 768]", f"[{rows}, 3072]", f"[{rows}, 12, 128, 64]"
    attention = [f"index_copy_ {cache}"] * 2 + [f"scaled_dot_product_attention [{rows}, 12, 1, 64]"]
    rest = [
        f"linear {x} c_attn",
        *attention,
        f"linear {x} c_proj",
        f"add_layer_norm {x} ln_2",
        "_addmm_activation [3072] c_fc",
        f"linear {inner} c_proj",
    ]
    calls = calls_of("gpt2", "none", rows)
    assert calls[:3] == [f"embedding [{rows}] wte", f"embedding [{rows}] wpe", f"layer_norm {x} ln_1"]
    assert calls[3:-4] == [*rest, f"add_layer_norm {x} ln_1", *rest]
    assert calls[-4:] == [f"layer_norm {x} ln_f", f"new_empty {x}", *[f"mm {x}"] * 2]
