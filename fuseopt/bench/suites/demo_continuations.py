"""First part of the demo: small trained checkpoints continue real text, stock and fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import fuseopt
from fuseopt.bench.harness.architectures import load_config

CONFIG = "inference"
DECODINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling, seed 0": {"do_sample": True, "top_k": 50},
    "4 beams": {"do_sample": False, "num_beams": 4},
}
NGRAM = 3


def show(folder: Path, prompts: Sequence[str], new_tokens: int, device: torch.device) -> None:
    """Prints the plan for a checkpoint, a prompt with its continuations, and whether stock and fused tokens agree."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = _load(folder).to(device)
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(device)
    print(f"\n{fuseopt.plan(model, CONFIG)}\n")

    stock = _generate_all(model, inputs, new_tokens)
    with fuseopt.fused(model, CONFIG):
        fused = _generate_all(model, inputs, new_tokens)

    print(f"  prompt  {prompts[0]}")
    for name, tokens in (("stock", stock["greedy"]), ("fused", fused["greedy"])):
        start = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        print(f"  {name}   {' '.join(tokenizer.decode(tokens[0, start:], skip_special_tokens=True).split())}")
    for name in DECODINGS:
        agree = "same tokens as stock" if torch.equal(stock[name], fused[name]) else "OTHER TOKENS THAN STOCK"
        print(f"  {f'{name}, no_repeat_ngram_size {NGRAM}':<43} {len(prompts)} prompts x {new_tokens} tokens: {agree}")


def _load(folder: Path) -> PreTrainedModel:
    logging.disable_progress_bar()
    auto = AutoModelForSeq2SeqLM if load_config(str(folder)).is_encoder_decoder else AutoModelForCausalLM
    return auto.from_pretrained(folder, local_files_only=True).eval()


def _generate_all(model: PreTrainedModel, inputs: Mapping[str, Tensor], new_tokens: int) -> dict[str, Tensor]:
    tokens = {}
    for name, kwargs in DECODINGS.items():
        torch.manual_seed(0)
        tokens[name] = model.generate(
            **inputs,
            max_new_tokens=new_tokens,
            no_repeat_ngram_size=NGRAM,
            **kwargs,
        )
    return tokens
