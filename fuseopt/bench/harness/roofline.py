"""The roofs of a roofline plot, measured: bandwidth of a large copy, and rate of a matmul in each dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuseopt.bench.harness.flops import matmul_timing
from fuseopt.bench.harness.records import COPY, PEAK, Record
from fuseopt.bench.harness.workloads import dtype_name
from fuseopt.runtime.timer import time_in_turns, work_seconds

# Elements of a side of the matmul, and bytes of the tensor that is copied: as large as reaches the peak.
_MATMUL = {"cuda": 8192, "cpu": 1024}
_COPIED = {"cuda": 2**29, "cpu": 2**27}


def peaks(device: torch.device, dtypes: Sequence[torch.dtype]) -> list[Record]:
    """Rows of a copy and of a matmul in each dtype and float32, without TF32 there."""
    source = torch.zeros(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    call = {COPY: lambda: target.copy_(source)}
    copy = time_in_turns(call, lambda run: work_seconds(run, device, repetitions=3), rounds=7)[COPY]
    found = [Record.of(f"{PEAK}{COPY}", COPY, copy, None, bytes=2 * source.numel())]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for dtype in dict.fromkeys((*dtypes, torch.float32)):
            size = _MATMUL[device.type]
            timing = matmul_timing(size, device, dtype)
            found.append(Record.of(f"{PEAK}matmul, {dtype_name(dtype)}", "torch", timing, None, flops=2 * size**3))
    finally:
        torch.set_float32_matmul_precision(precision)
    return found
