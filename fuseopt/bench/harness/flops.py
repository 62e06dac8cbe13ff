"""Lower bound on the time of a model's matmuls: their floating-point operations, and the rate the device reaches."""

from __future__ import annotations

import re

import torch
from torch.utils.flop_counter import FlopCounterMode

from fuseopt.bench.harness.architectures import load_config, weightless
from fuseopt.runtime.timer import Timing, time_in_turns, work_seconds


def forward_flops(model: str, batch: int, length: int) -> int:
    """Floating-point operations of a forward's matmuls; causal attention counts half. A training step has 3x as many.

    Args:
        model: an architecture by name, a folder with a config.json, or a model id.
        length: tokens per row; of a T5, for encoder and decoder each.
    """
    # With eager attention, bmm is used for attention and nothing else in these models.
    config = load_config(model, attn_implementation="eager")
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        weightless(config, torch.device("meta"))(**inputs)
    counts = counter.get_flop_counts()
    causal = re.compile(r"\.decoder\..*\.SelfAttention$" if config.is_encoder_decoder else "^Global$")
    attention = sum(operations.get(torch.ops.aten.bmm, 0) for path, operations in counts.items() if causal.search(path))
    return sum(counts["Global"].values()) - attention // 2


def matmul_timing(size: int, device: torch.device, dtype: torch.dtype) -> Timing:
    """Timing of a matmul of `size` x `size` x `size`, which is 2 * size**3 operations."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    call = {"matmul": lambda: torch.mm(left, right, out=out)}
    return time_in_turns(call, lambda mm: work_seconds(mm, device, repetitions=5), rounds=9, warm_up=2)["matmul"]
