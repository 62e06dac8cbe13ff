"""The demo's cases: what is timed, on which architectures, at which sizes, under which configs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor
from transformers.activations import NewGELUActivation
from transformers.models.t5.modeling_t5 import T5LayerNorm

from fuseopt.bench.harness.architectures import dropout_rates, load_config, random_model
from fuseopt.bench.harness.workloads import (
    Case,
    FusionConfig,
    ModelCase,
    ProcessorCase,
    beams_name,
    call,
    dtype_name,
    forward,
    generate,
    parameter_sharing_copy,
    random_tokens,
    training_step,
)
from fuseopt.generation.select.logits_processors import FusedEncoderNoRepeatNGram, FusedNoRepeatNGram

NGRAM = 3


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; (batch, length) unless stated otherwise.

    Attributes:
        ngram: (rows, length, vocabulary) of the logits processor alone.
        encoder_ngram: (batch, beams, encoder length, vocabulary) of its encoder variant.
        tokens: rows of an activation or a norm alone.
        greedy: (prompt length, new tokens) of one row, decoded greedily.
        gpt2_generate, t5_generate: (batch, prompt length, new tokens, beams).
        t5_forward: (batch, encoder length, decoder length).
        training: None leaves the training step out.
        inductor: whether to compile with Inductor too.
        rounds: samples of each way to run a model.
    """

    gpt2: str
    t5: str
    dtype: torch.dtype
    ngram: tuple[int, int, int]
    encoder_ngram: tuple[int, int, int, int]
    tokens: int
    gpt2_forward: tuple[int, int]
    gpt2_eager_attention: tuple[int, int]
    greedy: tuple[int, int]
    gpt2_generate: tuple[int, int, int, int]
    t5_forward: tuple[int, int, int]
    t5_generate: tuple[int, int, int, int]
    training: tuple[int, int] | None
    inductor: bool
    rounds: int = 7


CPU = Sizes(
    gpt2="gpt2",
    t5="t5-base",
    dtype=torch.float32,
    ngram=(8, 1024, 50257),
    encoder_ngram=(8, 4, 128, 32128),
    tokens=1024,
    gpt2_forward=(2, 128),
    gpt2_eager_attention=(1, 256),
    greedy=(16, 24),
    gpt2_generate=(2, 128, 12, 4),
    t5_forward=(2, 128, 64),
    t5_generate=(2, 64, 12, 4),
    # Compiling it takes minutes on two cores.
    training=None,
    inductor=True,
)
GPU = Sizes(
    gpt2="gpt2",
    t5="t5-base",
    dtype=torch.bfloat16,
    ngram=(256, 1024, 32128),
    encoder_ngram=(64, 4, 128, 32128),
    tokens=16384,
    gpt2_forward=(8, 1024),
    gpt2_eager_attention=(8, 1024),
    greedy=(128, 64),
    gpt2_generate=(64, 128, 32, 1),
    t5_forward=(32, 512, 128),
    t5_generate=(256, 1, 19, 1),
    training=(8, 512),
    inductor=True,
)
QUICK = Sizes(
    gpt2="gpt2-tiny",
    t5="t5-tiny",
    dtype=torch.float32,
    ngram=(4, 64, 512),
    encoder_ngram=(2, 2, 16, 512),
    tokens=16,
    gpt2_forward=(2, 16),
    gpt2_eager_attention=(2, 16),
    greedy=(8, 6),
    gpt2_generate=(2, 8, 6, 2),
    t5_forward=(2, 16, 8),
    t5_generate=(2, 8, 6, 2),
    training=None,
    inductor=False,
    rounds=3,
)


def demo_cases(sizes: Sizes, device: torch.device) -> list[Case]:
    """All cases of the demo at these sizes. A model is made when a case first needs it."""
    return [*_processors(sizes, device), *_modules(sizes, device), *_gpt2(sizes, device), *_t5(sizes, device)]


def _processors(sizes: Sizes, device: torch.device) -> list[Case]:
    rows, length, vocab = sizes.ngram
    batch, beams, encoder_length, encoder_vocab = sizes.encoder_ngram
    encoder_ids = random_tokens(device, encoder_vocab, batch, encoder_length)
    return [
        ProcessorCase(
            f"no-repeat-ngram processor, {rows} x {length}, vocabulary {vocab}",
            "no_repeat_ngram",
            NoRepeatNGramLogitsProcessor(NGRAM),
            FusedNoRepeatNGram(NGRAM),
            random_tokens(device, vocab, rows, length),
            torch.randn(rows, vocab, device=device),
        ),
        ProcessorCase(
            f"its encoder variant, {batch} x {encoder_length}, {beams} beams, vocabulary {encoder_vocab}",
            "encoder_no_repeat_ngram",
            EncoderNoRepeatNGramLogitsProcessor(NGRAM, encoder_ids),
            FusedEncoderNoRepeatNGram(NGRAM, encoder_ids),
            encoder_ids.repeat_interleave(beams, dim=0),
            torch.randn(batch * beams, encoder_vocab, device=device),
        ),
    ]


def _modules(sizes: Sizes, device: torch.device) -> list[Case]:
    def case(name: str, module: nn.Module, width: int, configs: Mapping[str, FusionConfig]) -> ModelCase:
        model = nn.Sequential(module).to(device, sizes.dtype)
        input = torch.randn(sizes.tokens, width, device=device, dtype=sizes.dtype)
        title = f"{name}, {sizes.tokens} x {width}, {dtype_name(sizes.dtype)}"
        return ModelCase(title, lambda: model, call(input), configs, rounds=25, calls_per_sample=4)

    return [
        case("gelu_new alone", NewGELUActivation(), 3072, {"FusedGELU": _kernel("FusedGELU"), **_jits(sizes.inductor)}),
        case(
            "T5LayerNorm alone",
            T5LayerNorm(768),
            768,
            {"FusedRMSNorm": _kernel("FusedRMSNorm"), **_triton("FusedRMSNorm", device)},
        ),
        case(
            "LayerNorm alone",
            nn.LayerNorm(768),
            768,
            {"FusedLayerNorm": _kernel("FusedLayerNorm"), **_triton("FusedLayerNorm", device)},
        ),
    ]


def _gpt2(sizes: Sizes, device: torch.device) -> list[Case]:
    name, dtype = sizes.gpt2, dtype_name(sizes.dtype)
    model = functools.cache(functools.partial(random_model, name, device, sizes.dtype))
    model_case = functools.partial(ModelCase, rounds=sizes.rounds)
    tokens = functools.partial(random_tokens, device, load_config(name).vocab_size)
    batch, prompt, new, beams = sizes.gpt2_generate
    greedy_prompt, greedy_new = sizes.greedy
    cases: list[Case] = [
        model_case(
            f"{name} generate, 1 x ({greedy_prompt} + {greedy_new}), greedy, {dtype}",
            model,
            generate(tokens(1, greedy_prompt), max_new_tokens=greedy_new),
            {"generation": {"generation": {"enable": True}}},
        ),
        model_case(
            f"{name} forward, {_by(sizes.gpt2_forward)}, {dtype}",
            model,
            forward(input_ids=tokens(*sizes.gpt2_forward)),
            {
                "FusedGELU": _kernel("FusedGELU"),
                "FusedGELU with bias": _kernel({"name": "FusedGELU", "fold_bias": True}),
                "FusedLayerNorm": _kernel("FusedLayerNorm"),
                **_jits(sizes.inductor),
                "preset inference": "inference",
            },
        ),
        model_case(
            f"{name} forward with eager attention, {_by(sizes.gpt2_eager_attention)}, {dtype}",
            functools.partial(_with_eager_attention, model),
            forward(input_ids=tokens(*sizes.gpt2_eager_attention)),
            {"FusedSoftmax": _kernel("FusedSoftmax"), **_triton("FusedSoftmax", device)},
        ),
        model_case(
            f"{name} generate, {batch} x ({prompt} + {new}), {beams_name(beams)}, ngram {NGRAM}, {dtype}",
            model,
            generate(tokens(batch, prompt), max_new_tokens=new, num_beams=beams, no_repeat_ngram_size=NGRAM),
            {"FusedNoRepeatNGram": _kernel("FusedNoRepeatNGram"), "preset inference": "inference"},
        ),
    ]
    if sizes.training is not None:
        # Without dropout, so that stock and fused compute the same.
        dropout = dropout_rates(name, 0.0)
        cases.append(
            model_case(
                f"{name} training step, {_by(sizes.training)}, {dtype} autocast",
                functools.partial(random_model, name, device, torch.float32, use_cache=False, **dropout),
                training_step(tokens(*sizes.training), sizes.dtype),
                {
                    "memory_efficient_fusion": {"kernel_fusion": {"memory_efficient_fusion": True}},
                    **_jits(sizes.inductor),
                },
            )
        )
    return cases


def _t5(sizes: Sizes, device: torch.device) -> list[Case]:
    name, dtype = sizes.t5, dtype_name(sizes.dtype)
    model = functools.cache(functools.partial(random_model, name, device, sizes.dtype))
    model_case = functools.partial(ModelCase, rounds=sizes.rounds)
    tokens = functools.partial(random_tokens, device, load_config(name).vocab_size)
    batch, encoder_length, decoder_length = sizes.t5_forward
    rows, prompt, new, beams = sizes.t5_generate
    return [
        model_case(
            f"{name} forward, {batch} x ({encoder_length} + {decoder_length}), {dtype}",
            model,
            forward(input_ids=tokens(batch, encoder_length), decoder_input_ids=tokens(batch, decoder_length)),
            {
                "FusedRMSNorm": _kernel("FusedRMSNorm"),
                **_triton("FusedRMSNorm", device),
                **_jits(inductor=False),
                "preset inference": "inference",
            },
        ),
        model_case(
            f"{name} generate, {rows} x ({prompt} + {new}), {beams_name(beams)}, ngram {NGRAM}, {dtype}",
            model,
            generate(tokens(rows, prompt), max_new_tokens=new, num_beams=beams, no_repeat_ngram_size=NGRAM),
            {
                "FusedNoRepeatNGram": _kernel("FusedNoRepeatNGram"),
                "FusedRMSNorm": _kernel("FusedRMSNorm"),
                "preset inference": "inference",
            },
        ),
    ]


def _kernel(request: str | Mapping[str, Any]) -> FusionConfig:
    return {"kernel_fusion": {"custom_cuda_kernels": [request], "jit": False}}


def _triton(name: str, device: torch.device) -> Mapping[str, FusionConfig]:
    if device.type != "cuda":
        return {}
    return {f"{name} in Triton": {"kernel_fusion": {"triton_kernels": [name], "jit": False}}}


def _jits(inductor: bool) -> Mapping[str, FusionConfig]:
    backends = ("torchscript", "inductor") if inductor else ("torchscript",)
    return {f"jit {backend}": {"kernel_fusion": {"jit": {"backend": backend}}} for backend in backends}


def _with_eager_attention(model: Any) -> nn.Module:
    twin = parameter_sharing_copy(model())
    twin.set_attn_implementation("eager")
    return twin


def _by(shape: tuple[int, int]) -> str:
    return " x ".join(map(str, shape))
