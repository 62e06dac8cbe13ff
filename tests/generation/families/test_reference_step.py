"""ReferenceDecoder against transformers, token by token in float32; and the kernels' step against it."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gemma2 import modeling_gemma2

from fuseopt.generation.engine.layers import Linear, Norm, linear_of
from fuseopt.generation.engine.state import DecodeState, Sizes
from fuseopt.generation.families import gpt2, t5
from fuseopt.generation.families.decoder_spec import (
    DecoderSpec,
    FeedForward,
    Layer,
    RotaryPositions,
    SelfAttention,
    not_built_reasons,
)
from fuseopt.generation.families.reference_step import KeyValueCache, ReferenceDecoder, attend
from fuseopt.generation.families.spec_step import SpecStep
from tests import tiny

SIZES = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "attn_implementation": "eager",
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def llama_spec(model: nn.Module, norm_kind: str = "rms_norm", **fields: object) -> DecoderSpec:
    """Of Llama and families with its names of modules."""
    body, config = model.model, model.config

    def norm(module: nn.Module | None) -> Norm | None:
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        return None if module is None else Norm(norm_kind, module.weight, None, eps)

    def layer(block: nn.Module) -> Layer:
        own, mlp = block.self_attn, block.mlp
        attention = SelfAttention(
            norm(block.input_layernorm),
            linear_of(own.q_proj, own.k_proj, own.v_proj),
            linear_of(own.o_proj),
            own.scaling,
            q_norm=norm(getattr(own, "q_norm", None)),
            k_norm=norm(getattr(own, "k_norm", None)),
            window=getattr(config, "sliding_window", None),
        )
        up = linear_of(mlp.gate_proj, mlp.up_proj)
        return Layer(
            attention, FeedForward(norm(block.post_attention_layernorm), up, mlp.act_fn, linear_of(mlp.down_proj))
        )

    return DecoderSpec(
        token_embedding=body.embed_tokens.weight,
        rotary=RotaryPositions(body.rotary_emb.inv_freq, body.rotary_emb.attention_scaling),
        layers=tuple(layer(block) for block in body.layers),
        final_norm=norm(body.norm),
        head=linear_of(model.lm_head),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_length=config.max_position_embeddings,
        **fields,
    )


def neox_spec(model: nn.Module) -> DecoderSpec:
    """Parallel residuals, LayerNorms and biases, and a rotation of a part of each head."""
    body, config = model.gpt_neox, model.config

    def norm(module: nn.Module) -> Norm:
        return Norm("layer_norm", module.weight, module.bias, module.eps)

    def layer(block: nn.Module) -> Layer:
        own, mlp, dim = block.attention, block.mlp, config.hidden_size // config.num_attention_heads
        # transformers has queries, keys and values of each head side by side.
        weight, bias = own.query_key_value.weight, own.query_key_value.bias
        weights = weight.unflatten(0, (-1, 3, dim)).transpose(0, 1).flatten(1, 2).unbind()
        biases = bias.unflatten(0, (-1, 3, dim)).transpose(0, 1).flatten(1, 2).unbind()
        return Layer(
            SelfAttention(norm(block.input_layernorm), Linear(weights, biases), linear_of(own.dense), own.scaling),
            FeedForward(
                norm(block.post_attention_layernorm),
                linear_of(mlp.dense_h_to_4h),
                mlp.act,
                linear_of(mlp.dense_4h_to_h),
            ),
        )

    return DecoderSpec(
        token_embedding=body.embed_in.weight,
        rotary=RotaryPositions(body.rotary_emb.inv_freq),
        layers=tuple(layer(block) for block in body.layers),
        final_norm=norm(body.final_layer_norm),
        head=linear_of(model.get_output_embeddings()),
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        parallel_residual=True,
    )


def randomised(model: nn.Module) -> nn.Module:
    """Weights whose attention, norms and biases all show in the logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * scale)
    return model.eval()


def neox() -> nn.Module:
    sizes = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    rotary = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes | {"hidden_size": 48}, rope_parameters=rotary))


FAMILIES = {
    "gpt2": (tiny.gpt2, gpt2.spec_of),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)), llama_spec),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)), llama_spec),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3)), llama_spec),
    "gemma": (
        lambda: GemmaForCausalLM(GemmaConfig(**SIZES, hidden_activation="gelu_pytorch_tanh")),
        lambda model: llama_spec(model, "gemma_rms_norm", embedding_scale=24**0.5),
    ),
    "gpt_neox": (neox, neox_spec),
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_prompt_and_then_single_tokens_give_what_transformers_does(family: str) -> None:
    """Whose tokens are all run at once; rows are padded on the left."""
    make, spec_of = FAMILIES[family]
    model = randomised(make())
    ids = torch.randint(3, tiny.VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    wanted = model(ids, attention_mask=mask, position_ids=positions).logits
    decoder, cache = ReferenceDecoder(spec_of(model)), KeyValueCache()
    got = [decoder(cache, ids[:, :5], positions[:, :5], mask[:, :5])]
    for token in range(5, 9):
        got.append(decoder(cache, ids[:, token : token + 1], positions[:, token : token + 1]))
    assert cache.length == 9
    torch.testing.assert_close(torch.cat(got, 1)[mask.bool()], wanted[mask.bool()], **CLOSE)
    assert wanted.std() > 0.1


@pytest.mark.parametrize("make", [tiny.t5, tiny.t5_gated])
@torch.no_grad()
def test_a_decoder_behind_an_encoder_gives_what_transformers_does(make: object) -> None:
    model = randomised(make())
    generator = torch.Generator().manual_seed(1)
    ids, tokens = (torch.randint(3, tiny.VOCAB, size, generator=generator) for size in ((2, 6), (2, 140)))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    encoded = model.encoder(ids, attention_mask=mask)[0]
    wanted = model(encoder_outputs=(encoded,), attention_mask=mask, decoder_input_ids=tokens).logits
    decoder, cache = ReferenceDecoder(t5.spec_of(model)), KeyValueCache()
    decoder.encode(cache, encoded, mask)
    # Further than the last bucket of the relative bias begins.
    got = [decoder(cache, part) for part in tokens.split([1, 1, 132, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(got, 1), wanted, **CLOSE)


def test_capped_scores_are_transformers() -> None:
    query, keys, values = (torch.randn(2, heads, 5, 8) for heads in (6, 2, 2))
    module = nn.Module()
    module.num_key_value_groups, module.training = 3, False
    wanted, _ = modeling_gemma2.eager_attention_forward(
        module, query, keys, values, None, scaling=0.7, softcap=2.0, dropout=0.0
    )
    torch.testing.assert_close(attend(query, keys, values, None, 0.7, 2.0), wanted.flatten(2))
    assert not torch.allclose(attend(query, keys, values, None, 0.7), wanted.flatten(2))


@torch.no_grad()
def test_capped_logits() -> None:
    model, cap = randomised(tiny.gpt2()), 0.5
    spec, tokens = gpt2.spec_of(model), torch.tensor([[3, 4, 5]])
    plain = ReferenceDecoder(spec)(KeyValueCache(), tokens)
    capped = ReferenceDecoder(copy.copy(spec).__class__(**{**vars(spec), "head_softcap": cap}))(KeyValueCache(), tokens)
    torch.testing.assert_close(capped, cap * torch.tanh(plain / cap))


def reference_logits(spec: DecoderSpec, prompt: Tensor, tokens: Tensor, encoded: Tensor | None) -> list[Tensor]:
    decoder, cache = ReferenceDecoder(spec), KeyValueCache()
    if encoded is not None:
        decoder.encode(cache, encoded)
    logits = [decoder(cache, prompt)[:, -1]]
    return logits + [decoder(cache, tokens[:, i : i + 1])[:, 0] for i in range(tokens.shape[1])]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["gpt2", "t5", "t5_gated"])
@torch.no_grad()
def test_the_step_gives_what_the_reference_does(family: str, rows: int, each_device: torch.device) -> None:
    """On a GPU by the kernels."""
    model = randomised(tiny.FAMILIES[family]())
    module = gpt2.GPT2Step if family == "gpt2" else t5.T5Step
    generator = torch.Generator().manual_seed(2)
    with torch.device("cpu"):
        prompt, tokens = (torch.randint(3, tiny.VOCAB, (rows, n), generator=generator) for n in (5, 4))
        encoded = None
        if family != "gpt2":
            prompt, encoded = prompt[:, :1], torch.randn(rows, 7, 24, generator=generator).to(each_device)
    prompt, tokens = prompt.to(each_device), tokens.to(each_device)
    wanted = reference_logits(module.spec_of(model), prompt, tokens, encoded)

    step = module(model)
    state = DecodeState(Sizes(rows, 16, 8 if encoded is not None else 0), step.shape, step.vocab)
    step.begin()
    if encoded is None:
        state.load_prompt(prompt, None, None)
        step.prefill(state, 5, False)
    else:
        state.encoded[:, :7] = encoded
        state.load_cross(7, None)
        state.begin(0)
        state.tokens.copy_(prompt[:, 0])
        step.prefill(state, 7, False)
    got = [state.logits.clone()]
    for token in tokens.unbind(1):
        state.tokens.copy_(token)
        got.append(step(state).logits())
        state.counters += 1
    torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("family", "reasons"),
    [
        ("gpt2", []),
        (
            "llama",
            [
                "6 heads share 2 heads of keys and values",
                "queries and keys are rotated",
                "a norm is rms_norm",
                "weights of queries, keys and values have different widths",
            ],
        ),
        ("qwen3", [..., "weights of queries, keys and values have different widths"]),
        ("gpt_neox", ["queries and keys are rotated", "attention and feed-forward are parallel"]),
        ("gemma", [..., "embeddings are scaled", "a norm is gemma_rms_norm", ...]),
    ],
)
def test_what_the_kernels_cannot_do_yet_is_refused_with_reasons(family: str, reasons: list) -> None:
    make, spec_of = FAMILIES[family]
    model = make()
    found = list(not_built_reasons(spec_of(model)))
    if ... in reasons:
        assert {reason for reason in reasons if reason is not ...} < set(found)
    else:
        assert found == reasons
    step = type("Step", (SpecStep,), {"spec_of": staticmethod(spec_of)})
    if reasons:
        with pytest.raises(ValueError, match=f"no decode step can run this {type(model).__name__}: .*{found[-1]}"):
            step(model)
    else:
        step(model)


def test_each_thing_that_is_not_built_is_named_by_itself() -> None:
    spec = gpt2.spec_of(tiny.gpt2())
    (layer, *others), attention = spec.layers, spec.layers[0].self_attention
    norm, gated = attention.norm, layer.feed_forward._replace(up=Linear((torch.zeros(2, 2),) * 2))

    def changed(**fields: object) -> list[str]:
        return list(not_built_reasons(DecoderSpec(**{**vars(spec), **fields})))

    def with_attention(**fields: object) -> list[str]:
        return changed(layers=(layer._replace(self_attention=attention._replace(**fields)), *others))

    assert changed(head_softcap=3.0) == ["logits are capped"]
    assert changed(final_norm=norm._replace(kind="t5_rms_norm")) == [
        "norms are of several kinds: layer_norm, t5_rms_norm"
    ]
    assert with_attention(window=3) == ["attention sees 3 keys"]
    assert with_attention(softcap=3.0) == ["scores are capped"]
    assert with_attention(q_norm=norm) == with_attention(k_norm=norm) == ["queries or keys are normalised"]
    assert changed(layers=(layer._replace(feed_forward=gated), *others)) == ["a feed-forward is gated by gelu_tanh"]
    cross = t5.spec_of(tiny.t5()).layers[0].cross_attention
    mixed = changed(layers=(layer, *(other._replace(cross_attention=cross) for other in others)))
    assert mixed[-1] == "some layers have cross-attention and some do not"
