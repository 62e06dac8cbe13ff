"""ReferenceDecoder against transformers, token by token in float32; and the kernels' step against it."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2

import fuseopt
from fuseopt.errors import PlanError
from fuseopt.generation.engine.state import Sizes
from fuseopt.generation.families import gpt2, t5
from fuseopt.generation.families.decoder_spec import DecoderSpec, not_built_reasons
from fuseopt.generation.families.reference_step import KeyValueCache, ReferenceDecoder, attend_heads
from fuseopt.generation.families.spec_step import SpecStep
from tests import tiny
from tests.generation.families.tiny_decoders import (
    DECODERS,
    ENCODER_DECODERS,
    gpt_neox,
    grouped,
    opt,
    randomised,
    scaled,
    stablelm,
    step_of,
)
from tests.generation.same_calls import GENERATION
from tests.ops.cases import RawCalls, error

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_a_prompt_and_then_single_tokens_give_what_transformers_does(family: str) -> None:
    """Whose tokens are all run at once; rows are padded on the left."""
    model = randomised(DECODERS[family]())
    ids = torch.randint(3, tiny.VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    wanted = model(ids, attention_mask=mask, position_ids=positions).logits
    decoder, cache = ReferenceDecoder(step_of(model).spec_of(model)), KeyValueCache()
    got = [decoder(cache, ids[:, :5], positions[:, :5], mask[:, :5])]
    for token in range(5, 9):
        got.append(decoder(cache, ids[:, token : token + 1], positions[:, token : token + 1]))
    assert cache.length == 9
    torch.testing.assert_close(torch.cat(got, 1)[mask.bool()], wanted[mask.bool()], **CLOSE)
    assert wanted.std() > 0.1


@pytest.mark.parametrize("family", ENCODER_DECODERS)
@torch.no_grad()
def test_a_decoder_behind_an_encoder_gives_what_transformers_does(family: str) -> None:
    model = randomised(ENCODER_DECODERS[family]())
    generator = torch.Generator().manual_seed(1)
    # Further than the last bucket of a relative bias begins, or nearly as many as there are positions.
    lengths = [1, 1, 132, 1, 5] if "t5" in family else [1, 1, 50, 1, 5]
    ids, tokens = (torch.randint(3, tiny.VOCAB, size, generator=generator) for size in ((2, 6), (2, sum(lengths))))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    encoded = model.get_encoder()(ids, attention_mask=mask)[0]
    wanted = model(encoder_outputs=(encoded,), attention_mask=mask, decoder_input_ids=tokens).logits
    decoder, cache = ReferenceDecoder(step_of(model).spec_of(model)), KeyValueCache()
    decoder.encode(cache, encoded, mask)
    got = [decoder(cache, part) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(torch.cat(got, 1), wanted, **CLOSE)


def test_capped_scores_are_transformers() -> None:
    query, keys, values = (torch.randn(2, heads, 5, 8) for heads in (6, 2, 2))
    module = nn.Module()
    module.num_key_value_groups, module.training = 3, False
    wanted, _ = modeling_gemma2.eager_attention_forward(
        module, query, keys, values, None, scaling=0.7, softcap=2.0, dropout=0.0
    )
    torch.testing.assert_close(attend_heads(query, keys, values, None, 0.7, 2.0), wanted.flatten(2))
    assert not torch.allclose(attend_heads(query, keys, values, None, 0.7), wanted.flatten(2))


@torch.no_grad()
def test_capped_logits() -> None:
    model, cap = randomised(tiny.gpt2()), 0.5
    spec, tokens = gpt2.spec_of(model), torch.tensor([[3, 4, 5]])
    plain = ReferenceDecoder(spec)(KeyValueCache(), tokens)
    capped = ReferenceDecoder(copy.copy(spec).__class__(**{**vars(spec), "head_softcap": cap}))(KeyValueCache(), tokens)
    torch.testing.assert_close(capped, cap * torch.tanh(plain / cap))


def reference_logits(
    spec: DecoderSpec, prompt: Tensor, tokens: Tensor, encoded: Tensor | None, stored: torch.dtype | None
) -> list[Tensor]:
    decoder, cache = ReferenceDecoder(spec), KeyValueCache(stored_dtype=stored)
    if encoded is not None:
        decoder.encode(cache, encoded)
    logits = [decoder(cache, prompt)[:, -1]]
    return logits + [decoder(cache, tokens[:, i : i + 1])[:, 0] for i in range(tokens.shape[1])]


def step_logits(
    model: nn.Module, prompt: Tensor, tokens: Tensor, encoded: Tensor | None, stored: torch.dtype | None
) -> list[Tensor]:
    step, rows = step_of(model)(model), len(prompt)
    step.shape = replace(step.shape, stored_dtype=stored)
    state = step.new_state(Sizes(rows, 16, 8 if encoded is not None else 0))
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
    return got


@pytest.mark.parametrize(("rows", "stored"), [(1, None), (3, None), (1, torch.int8), (3, torch.float8_e4m3fn)])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
@torch.no_grad()
def test_the_step_gives_what_the_reference_does(
    family: str,
    rows: int,
    stored: torch.dtype | None,
    each_device: torch.device,
    set_tuned: Callable[[str, int], None],
) -> None:
    """On a GPU by the kernels; `stored` for keys and values in 8 bits."""
    set_tuned("decode_attention_8_bit_bytes", 0)
    model = randomised((DECODERS | ENCODER_DECODERS)[family]())
    step_class, encodes = step_of(model), model.config.is_encoder_decoder
    generator = torch.Generator().manual_seed(2)
    with torch.device("cpu"):
        prompt, tokens = (torch.randint(3, tiny.VOCAB, (rows, n), generator=generator) for n in (5, 4))
        encoded = None
        if encodes:
            prompt, encoded = prompt[:, :1], torch.randn(rows, 7, 24, generator=generator).to(each_device)
    prompt, tokens = prompt.to(each_device), tokens.to(each_device)
    wanted = reference_logits(step_class.spec_of(model), prompt, tokens, encoded, stored)

    got = step_logits(model, prompt, tokens, encoded, stored)
    if stored is None:
        torch.testing.assert_close(got, wanted, **CLOSE)
        return
    # A number between two of 8 bits may be rounded to the other one: of most elements the step has the same one.
    unrounded = reference_logits(step_class.spec_of(model), prompt, tokens, encoded, None)
    off, rounding = (
        torch.stack([(a - b).abs().sum() for a, b in zip(ours, wanted, strict=True)]).sum() for ours in (got, unrounded)
    )
    assert off < 0.25 * rounding


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "make",
    [
        partial(grouped, "llama", head_dim=16),
        partial(grouped, "gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=4),
        partial(tiny.gpt2, n_embd=48, n_head=3),
        partial(tiny.t5, d_kv=16),
    ],
    ids=["llama", "gemma3", "gpt2", "t5"],
)
@torch.no_grad()
def test_kernels_read_a_cache_in_8_bits(
    make: Callable[[], nn.Module], stored: torch.dtype, set_tuned: Callable[[str, int], None]
) -> None:
    """In bfloat16, whose own rounding of the other numbers is as large as that to 8 bits."""
    set_tuned("decode_attention_8_bit_bytes", 0)
    model = randomised(make()).cuda().bfloat16()
    prompt, tokens = torch.randint(3, tiny.VOCAB, (3, 5)).cuda(), torch.randint(3, tiny.VOCAB, (3, 4)).cuda()
    encoded = None
    if model.config.is_encoder_decoder:
        prompt, encoded = prompt[:, :1], torch.randn(3, 7, model.config.d_model).cuda().bfloat16()
    with RawCalls() as raw:
        got = step_logits(model, prompt, tokens, encoded, stored)
    assert raw.names().count("decode_attention_.default") >= 2 * tokens.shape[1]
    plain = reference_logits(step_of(model).spec_of(model), prompt, tokens, encoded, stored)
    exact_model = copy.deepcopy(model).double()
    wide = None if encoded is None else encoded.double()
    exact = reference_logits(step_of(exact_model).spec_of(exact_model), prompt, tokens, wide, stored)
    assert error(got, exact) <= 2 * error(plain, exact) + 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (scaled("dynamic", factor=4.0), "rope_type is 'dynamic', whose frequencies depend on the length"),
        (
            scaled("longrope", factor=4.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4),
            "rope_type is 'longrope', whose frequencies depend on the length",
        ),
        (
            lambda: opt(layer_norm_elementwise_affine=False),
            "layer_norm_elementwise_affine leaves its LayerNorms without weights",
        ),
        *(
            (partial(grouped, family, use_bidirectional_attention=True), "use_bidirectional_attention lets tokens")
            for family in ("gemma", "gemma2", "gemma3_text")
        ),
        (partial(stablelm, qk_layernorm=True), "qk_layernorm has a norm of its own for each head"),
        (partial(grouped, "cohere", use_qk_norm=True), "use_qk_norm has a norm of its own for each head"),
        (partial(grouped, "olmo", clip_qkv=1.0), "clip_qkv bounds queries, keys and values"),
    ],
)
def test_what_a_spec_cannot_say_is_refused_with_a_reason(make: object, reason: str) -> None:
    """By the plan; and by each call, if the config is changed later."""
    model = make()
    (skip,) = fuseopt.plan(model, GENERATION).skips
    assert skip.target == "FusedGenerate" and skip.reason.startswith(reason)
    with pytest.raises(PlanError, match=re.escape(reason)):
        fuseopt.initialize(model, GENERATION, strict=True)
    assert "generate" not in vars(model)


def test_a_call_after_a_change_of_the_config_is_refused_with_a_reason() -> None:
    model = fuseopt.initialize(grouped("gemma"), GENERATION)
    model.config.use_bidirectional_attention = True
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=2)
    assert model.generate.calls[-1].reason == "use_bidirectional_attention lets tokens attend to later ones"


def test_each_thing_that_is_not_built_is_named_by_itself() -> None:
    def with_first(spec: DecoderSpec, fields: dict[str, object], **of_spec: object) -> list[str]:
        """The reasons, with these fields of the first layer's attention."""
        (layer, *others), attention = spec.layers, spec.layers[0].self_attention
        layers = (layer._replace(self_attention=attention._replace(**fields)), *others)
        return list(not_built_reasons(DecoderSpec(**{**vars(spec), "layers": layers, **of_spec})))

    spec, encoder = gpt2.spec_of(tiny.gpt2()), t5.spec_of(tiny.t5())
    bias, neox = encoder.layers[0].self_attention.relative_bias, gpt_neox()
    assert with_first(spec, {}) == with_first(encoder, {}) == []
    assert with_first(spec, {}, final_norm=None, head_scale=2.0) == [
        "the head's input is scaled without a norm before it"
    ]
    assert with_first(spec, {"relative_bias": bias}, kv_heads=1) == [
        "a bias by distance, with heads that share keys and values"
    ]
    assert with_first(step_of(neox).spec_of(neox), {}, kv_heads=1) == [
        "queries, keys and values lie head by head, with heads that share keys and values"
    ]
    assert with_first(spec, {"sum_norm": spec.final_norm}, parallel_residual=True) == [
        "parallel layers with cross-attention or norms after them"
    ]
    (layer, *others), cross = spec.layers, encoder.layers[0].cross_attention
    mixed = [layer, *(other._replace(cross_attention=cross) for other in others)]
    changed = DecoderSpec(**{**vars(spec), "layers": mixed})
    assert list(not_built_reasons(changed)) == ["some layers have cross-attention and some do not"]
    step = type("Step", (SpecStep,), {"spec_of": staticmethod(lambda model: changed)})
    with pytest.raises(ValueError, match="no decode step can run this Linear: some layers"):
        step(nn.Linear(1, 1))
