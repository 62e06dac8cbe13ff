"""`fuseopt bench tutorial`: T5 generates under an n-gram ban, as in OSLO's tutorial, with its three kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from fuseopt.bench.harness.architectures import load_config, random_model
from fuseopt.bench.harness.generate_rows import NO_GENERATION
from fuseopt.bench.harness.measure import against_stock, measure
from fuseopt.bench.harness.records import Results
from fuseopt.bench.harness.workloads import FusionConfig, ModelCase, dtype_name, generate, random_tokens
from fuseopt.bench.suites.demo_cases import NGRAM

NEW_TOKENS = 19
KERNELS = ["FusedRMSNorm", "FusedNoRepeatNGram", "FusedGELU"]
CONFIGS: dict[str, FusionConfig] = {
    "three kernels": {"kernel_fusion": {"custom_cuda_kernels": KERNELS, "jit": False}},
    "preset without generation": NO_GENERATION,
    "preset inference": "inference",
}


class PerRowNoRepeatNGram(LogitsProcessor):
    """n-gram bans by a loop over rows on the host, as in transformers when OSLO measured its speed-up of 2.63.

    At every step each row and its last tokens are copied to the host, the row's n-grams are tabulated again, and the
    bans are written row by row.
    """

    def __init__(self, ngram_size: int) -> None:
        self.ngram_size = ngram_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """As `NoRepeatNGramLogitsProcessor`: `input_ids` [rows, length], `scores` [rows, vocab], a new tensor."""
        length, prefix_length = input_ids.shape[1], self.ngram_size - 1
        scores = scores.clone()
        if length < self.ngram_size:
            return scores
        banned = []
        for row in input_ids:
            tokens = row.tolist()
            followers: dict[tuple[int, ...], list[int]] = {}
            for start in range(length - prefix_length):
                end = start + prefix_length
                followers.setdefault(tuple(tokens[start:end]), []).append(tokens[end])
            banned.append(followers.get(tuple(row[length - prefix_length :].tolist()), []))
        for index, followers_of_prefix in enumerate(banned):
            scores[index, followers_of_prefix] = float("-inf")
        return scores


def run(
    *,
    device: torch.device,
    name: str = "t5-base",
    batch: int | None = None,
    length: int = 1,
    new: int = NEW_TOKENS,
) -> Results:
    """Times greedy `generate()` per new token, in float32 and bfloat16. The default sizes are those of the tutorial.

    The baseline is today's transformers and, in further rows, transformers with `PerRowNoRepeatNGram`.

    Args:
        name: an architecture by name, a folder with a config.json, or a model id; weights are random.
        batch: prompts; 256 by default, 8 on a CPU.
        length: tokens per prompt; for a T5, of the encoder's input.
        new: new tokens per prompt.
    """
    batch = batch or (256 if device.type == "cuda" else 8)
    sizes = (batch, length, new)
    cases = [case for dtype in (torch.float32, torch.bfloat16) for case in _cases(name, sizes, dtype, device)]
    records = measure(cases, functools.partial(against_stock, device=device))
    return Results.measured_here("tutorial", records, unit="us")


def _cases(name: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[ModelCase]:
    batch, length, new = sizes
    model = functools.cache(functools.partial(random_model, name, device, dtype))
    prompts = random_tokens(device, load_config(name).vocab_size, batch, length)
    arguments: dict[str, Any] = {"max_new_tokens": new, "num_beams": 1}
    work = generate(prompts, no_repeat_ngram_size=NGRAM, **arguments)

    def old_work(stock: nn.Module) -> Tensor:
        processors = LogitsProcessorList([PerRowNoRepeatNGram(NGRAM)])
        return generate(prompts, logits_processor=processors, **arguments)(stock)

    title = f"a token of {name} generate, {batch} x ({length} + {new}), ngram {NGRAM}, {dtype_name(dtype)}"
    return [
        ModelCase(title, model, work, CONFIGS, steps=new),
        ModelCase(f"{title}, stock with n-gram bans row by row", model, work, CONFIGS, stock_work=old_work, steps=new),
    ]
