"""The rows of `bench generate` and `bench kernels`: which `generate()` calls are timed, on which models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig

from fuseopt.bench.harness.architectures import load_config, random_model
from fuseopt.bench.harness.lora import with_lora
from fuseopt.bench.harness.workloads import Work, beams_name, dtype_name, generate, random_features, random_tokens
from fuseopt.errors import ConfigError

_CPU_COMPILER = "inductor"
GENERATION = {"generation": {"enable": True}}
NO_GENERATION = {"preset": "inference", "generation": {"enable": False}}
"""The preset's kernels behind transformers' decode loop."""
PREFIX_CACHE = {"preset": "inference", "generation": {"prefix_cache_mib": 1024}}


@dataclass(frozen=True)
class Row:
    """One kind of `generate()` call on one model.

    Attributes:
        model: an architecture by name, a folder with a config.json, or a model id; weights are random.
        batch: prompts.
        prompt: tokens per prompt; with an encoder, positions of its input, which are the audio frames halved for
            Whisper.
        new: tokens generated per prompt.
        beams: number of beams; 1 means greedy or sampled decoding.
        ngram: `no_repeat_ngram_size`; 0 means no ban.
        sampling: `temperature`, `top_k`, `top_p`, as generate() takes them; None means greedy decoding.
        eos: whether generation has an EOS token, as most models do. It is the last id of the vocabulary, which random
            weights hardly ever choose.
        dtype: name of the model's dtype; "" means that of the run.
        lora: rank of LoRA adapters on all linear layers but the head, of random weights; 0 means none. Needs peft.
        merged: the adapters are merged into the weights.
        prefix: tokens before `prompt` that all calls share; the tokens of `prompt` then differ between calls. 0 means
            no prefix, and the same prompts in all calls.
    """

    model: str
    batch: int
    prompt: int = 128
    new: int = 128
    beams: int = 1
    ngram: int = 0
    sampling: Mapping[str, float] | None = field(default=None, hash=False)
    eos: bool = False
    dtype: str = ""
    lora: int = 0
    merged: bool = False
    prefix: int = 0

    def random_model(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model, in a run with this dtype.

        Raises:
            ConfigError: `model` is no architecture by name, folder with a config.json or model id; peft is missing.
        """
        model = random_model(self.model, device, self.dtype_in(dtype))
        return with_lora(model, self.lora, merged=self.merged) if self.lora else model

    def dtype_in(self, dtype: torch.dtype) -> torch.dtype:
        """The model's dtype in a run with this one."""
        return getattr(torch, self.dtype) if self.dtype else dtype

    def name(self, dtype: torch.dtype) -> str:
        how = [beams_name(self.beams) if self.sampling is None or self.beams > 1 else ""]
        if self.sampling is not None:
            how.append(" ".join(["sampled", *(f"{name}={value:g}" for name, value in self.sampling.items())]))
        how += [
            f"ngram {self.ngram}" if self.ngram else "",
            "eos" if self.eos else "",
            f"LoRA {self.lora}{' merged' if self.merged else ''}" if self.lora else "",
            f"prefix {self.prefix}" if self.prefix else "",
            dtype_name(self.dtype_in(dtype)),
        ]
        sizes = f"{self.batch} x ({self.prompt} + {self.new})"
        return f"a token of {self.model} generate, {sizes}, {', '.join(filter(None, how))}"

    def work(self, device: torch.device, new: int, *, static_cache: bool = False, **others: Any) -> Work:
        """The `generate()` call to time, for `new` tokens per prompt; `others` are further arguments of it.

        Args:
            static_cache: with transformers' static cache and torch.compile, which on a CPU has to be asked for.

        Raises:
            ConfigError: the model has an encoder, and the row a prefix.
        """
        options: dict[str, Any] = {"num_beams": self.beams, "do_sample": self.sampling is not None}
        if self.ngram:
            options["no_repeat_ngram_size"] = self.ngram
        config = load_config(self.model)
        if self.prefix and config.is_encoder_decoder:
            raise ConfigError(f"--prefix: {self.model} has an encoder, so it has no prefix cache; name other models")
        if self.eos:
            options["eos_token_id"] = config.vocab_size - 1
        if hasattr(config, "num_mel_bins"):
            # The encoder halves the number of frames.
            prompts = random_features(device, self.batch, config.num_mel_bins, 2 * self.prompt)
        else:
            prompts = random_tokens(device, config.vocab_size, self.batch, self.prefix + self.prompt)
            if self.prefix:
                options["new_tokens_from"] = self.prefix
        if static_cache:
            options["cache_implementation"] = "static"
            if device.type == "cpu":
                options["compile_config"] = CompileConfig(backend=_CPU_COMPILER, mode="default")
                options["compile_config"]._compile_all_devices = True
        return generate(prompts, max_new_tokens=new, **{**options, **(self.sampling or {}), **others})


_SAMPLINGS = ({"top_k": 50}, {"top_k": 0, "top_p": 0.95})
# Float32, which models have by default, and settings of sampling that are common in chats.
_DEFAULTS = (
    Row("gpt2", 1, dtype="float32"),
    Row("gpt2", 8, dtype="float32"),
    Row("t5-base", 1, new=64, dtype="float32"),
    Row("t5-base", 8, new=64, dtype="float32"),
    Row("t5-base", 32, beams=4, dtype="float32"),
    *(Row("gpt2", batch, sampling=sampling) for batch in (1, 8, 64) for sampling in _SAMPLINGS),
)
# Rows for a GPU. Sampled ones have a greedy one of the same sizes.
GPU_ROWS = (
    Row("gpt2", 1),
    Row("gpt2", 8),
    Row("gpt2", 64),
    Row("gpt2", 64, ngram=3),
    Row("gpt2-xl", 1),
    Row("t5-base", 1),
    Row("t5-base", 32, ngram=3),
    Row("t5-base", 32, ngram=3, beams=4),
    Row("t5-base", 256, prompt=1, new=19, ngram=3),
    *_DEFAULTS,
)
FAMILY_ROWS = (
    *(
        Row(model, 1, new=64)
        for model in (
            *("llama-3.2-1b", "qwen3-0.6b", "qwen2.5-0.5b", "gemma-3-1b", "smollm2-360m", "pythia-410m"),
            *("opt-125m", "opt-350m", "olmo-1b", "olmo2-1b", "stablelm-2-1.6b", "granite-3-2b", "gemma-2b"),
            *("gemma-2-2b", "smollm3-3b", "phi-3-mini", "starcoder2-3b"),
            *("mistral-7b-6-layers", "gpt-j-6b-4-layers", "aya-expanse-8b-4-layers"),
            *("bart-base", "mbart-large", "pegasus-large", "opus-mt", "mt5-base", "umt5-base"),
        )
    ),
    Row("whisper-small", 1, prompt=1500, new=64),
)
"""A row for each family whose decode step is not GPT-2's or T5's, at the smallest size of a checkpoint that is typical.

Mistral, GPT-J and Cohere have no small checkpoint: their rows have the first layers of the smallest.
"""
CPU_ROWS = (Row("gpt2", 1, prompt=32, new=8), Row("t5-base", 1, prompt=32, new=8))
