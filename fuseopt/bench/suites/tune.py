"""`fuseopt bench tune`: measures again the numbers in `tuning/` at which one kernel or backend overtakes another.

For each number a kernel and its alternative are timed over a few sizes, in turns, as CUDA graphs over several sets of
arguments. Only what a run can force is measured: limits between kernels inside the native library are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt import ops
from fuseopt.bench.harness.cuda_graph import graph_of
from fuseopt.bench.harness.machine import needs_gpu
from fuseopt.bench.harness.measure import measure
from fuseopt.bench.harness.records import Record, Results
from fuseopt.runtime.timer import Call, Timing, time_in_turns, work_seconds
from fuseopt.tuning import BASE, tuned, write

_DTYPE = torch.bfloat16
_ROUNDS, _SETS, _CALLS = 7, 4, 64
KERNEL, ALTERNATIVE = "kernel", "alternative"


@dataclass(frozen=True)
class Threshold:
    """A number up to which (or from which on) a kernel is faster than its alternative.

    Attributes:
        name: in `tuning/`.
        sizes: to measure at, in the number's unit, ascending.
        calls: from a size and a device to `{KERNEL: ..., ALTERNATIVE: ...}`, on arguments of their own.
        is_minimum: the kernel is faster from the number on, and not up to it.
    """

    name: str
    sizes: tuple[int, ...]
    calls: Callable[[int, torch.device], dict[str, Call]]
    is_minimum: bool = False

    def value(self, is_faster: Sequence[bool]) -> int | None:
        """The number, from whether the kernel is faster at each of `sizes`; None if it is at none of them.

        The kernel has to be faster at each size on its side of the number.
        """
        in_order = list(zip(self.sizes, is_faster, strict=True))
        if self.is_minimum:
            in_order.reverse()
        found = None
        for size, faster in in_order:
            if not faster:
                break
            found = size
        return found


Sampler = Callable[[Call], float]
"""Seconds that a call takes."""


def run(
    *,
    device: torch.device,
    thresholds: Sequence[Threshold] | None = None,
    save: bool = False,
    sample: Sampler | None = None,
) -> Results:
    """Measures each threshold on `device`.

    Args:
        thresholds: `THRESHOLDS` by default.
        save: write the values into the file of the GPU's compute capability.
        sample: takes the place of the device's clock; for tests.

    Returns:
        The times of kernel and alternative at each size, and a row with the number as it is and as proposed.

    Raises:
        ConfigError: `device` is no GPU, and there is no `sample`.
    """
    if device.type != "cuda" and sample is None:
        raise needs_gpu("bench tune", device)
    proposed: dict[str, int] = {}

    def records_of(threshold: Threshold) -> Iterator[Record]:
        is_faster = []
        for size in threshold.sizes:
            timings = _timings(threshold, size, device, sample)
            is_faster.append(timings[KERNEL].speed_up_over(timings[ALTERNATIVE]).median > 1)
            yield Record.of(f"{threshold.name} at {size}", KERNEL, timings[KERNEL], timings[ALTERNATIVE])
            yield Record.of(f"{threshold.name} at {size}", ALTERNATIVE, timings[ALTERNATIVE], None)
        before, value = tuned(threshold.name, device), threshold.value(is_faster)
        if value is None:
            yield Record(threshold.name, "value", note=f"{before}: the kernel is not faster at any end")
        else:
            proposed[threshold.name] = value
            yield Record(threshold.name, "value", note=f"{before} -> {value}")

    records = measure(THRESHOLDS if thresholds is None else thresholds, records_of)
    results = Results.measured_here("tune", records, unit="us")
    if save and proposed:
        found = f"`fuseopt bench tune`, {results.machine['gpu']}, {results.date}, commit {results.commit}."
        write(torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else BASE, proposed, found)
    return results


def _timings(threshold: Threshold, size: int, device: torch.device, sample: Sampler | None) -> Mapping[str, Timing]:
    sets = [threshold.calls(size, device) for _ in range(_SETS if sample is None else 1)]
    if sample is not None:
        return time_in_turns(sets[0], sample, rounds=_ROUNDS)
    with torch.cuda.stream(torch.cuda.Stream(device)), torch.no_grad():
        graphs = {name: _graph([calls[name] for calls in sets]) for name in sets[0]}
        timings = time_in_turns(
            {name: graph.replay for name, graph in graphs.items()},
            functools.partial(work_seconds, device=device),
            rounds=_ROUNDS,
        )
    return {name: timing.per(_CALLS) for name, timing in timings.items()}


def _graph(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    graph = graph_of(calls, _CALLS)
    assert graph is not None, "neither kernels nor alternatives wait for the device"
    return graph


def _many_rows(k: int, n: int, has_norm: bool, work: int, device: torch.device) -> dict[str, Call]:
    """A layer of `work // (k * n)` rows by `decode_linear`, and by PyTorch's kernels."""
    x, weight, bias = _random(device, work // (k * n), k), _random(device, n, k) * k**-0.5, _random(device, n)
    norm_weight, norm_bias = _random(device, k), _random(device, k)
    norm = {"norm": "layer_norm", "norm_weight": norm_weight, "norm_bias": norm_bias} if has_norm else {}

    def alternative() -> Tensor:
        return F.linear(F.layer_norm(x, (k,), norm_weight, norm_bias) if has_norm else x, weight, bias)

    return {
        KERNEL: lambda: ops.decode_linear(x, weight, bias, **norm, pdl=True, backend="cuda"),
        ALTERNATIVE: alternative,
    }


def _normalised_rows(rows: int, device: torch.device) -> dict[str, Call]:
    k, n = 768, 768
    x, weight = _random(device, rows, k), _random(device, n, k) * k**-0.5
    norm = {"norm_weight": _random(device, k), "norm_bias": _random(device, k)}

    def alternative() -> Tensor:
        normalised = ops.layer_norm(x, (k,), *norm.values())
        return ops.decode_linear(normalised, weight, pdl=True, backend="cuda")

    return {
        KERNEL: lambda: ops.decode_linear(x, weight, norm="layer_norm", **norm, pdl=True, backend="cuda"),
        ALTERNATIVE: alternative,
    }


def _qkv_attention(k: int, device: torch.device) -> dict[str, Call]:
    heads, filled, capacity = k // 64, 192, 256
    x, weight, bias = _random(device, 1, k), (_random(device, k, 3 * k) * k**-0.5).T, _random(device, 3 * k)
    keys, values = (_random(device, 1, heads, capacity, 64) for _ in range(2))
    positions = torch.full((1,), filled, device=device)
    norm = {"norm": "layer_norm", "norm_weight": _random(device, k), "norm_bias": _random(device, k)}

    def alternative() -> Tensor:
        qkv = ops.decode_linear(x, weight, bias, **norm, pdl=True, backend="cuda")
        query, key, value = qkv.view(-1, 3, heads, 64).unbind(1)
        return ops.decode_attention_(query, key, value, keys, values, positions, scale=0.125, pdl=True)

    return {
        KERNEL: lambda: ops.decode_qkv_attention_(
            x, weight, bias, keys, values, positions, scale=0.125, **norm, pdl=True, backend="cuda"
        ),
        ALTERNATIVE: alternative,
    }


def _prompt_attention(length: int, device: torch.device) -> dict[str, Call]:
    rows, heads = 4, 12
    qkv = _random(device, rows, length, 3, heads, 64)
    keys, values = (_random(device, rows, heads, length, 64) for _ in range(2))

    def alternative() -> Tensor:
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        keys.copy_(key), values.copy_(value)
        attended = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=0.125)
        return attended.transpose(1, 2)

    return {
        KERNEL: lambda: ops.prompt_attention_(qkv, keys, values, 0.125, pdl=True, backend="cuda"),
        ALTERNATIVE: alternative,
    }


def _prefix_attention(length: int, device: torch.device) -> dict[str, Call]:
    heads, kv_heads = 32, 8
    query = _random(device, 1, length, heads, 64)
    keys, values = (_random(device, 1, kv_heads, length, 64) for _ in range(2))

    def alternative() -> Tensor:
        heads_first = query.transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            heads_first, keys, values, is_causal=True, scale=0.125, enable_gqa=True
        )
        return attended.transpose(1, 2)

    return {
        KERNEL: lambda: ops.prefix_attention(query, keys, values, 0.125, pdl=True, backend="cuda"),
        ALTERNATIVE: alternative,
    }


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=_DTYPE)


_ROWS = (24, 32, 48, 64, 96, 128, 192, 256)
THRESHOLDS = (
    Threshold(
        "decode_linear_max_work",
        tuple(rows * 768 * 3072 for rows in _ROWS),
        functools.partial(_many_rows, 768, 3072, True),
    ),
    Threshold(
        "decode_linear_max_long_work",
        tuple(rows * 4096 * 1024 for rows in _ROWS),
        functools.partial(_many_rows, 4096, 1024, False),
    ),
    Threshold("decode_linear_max_rows_to_normalise", (32, 64, 96, 128, 160, 192, 256), _normalised_rows),
    Threshold("qkv_attention_min_columns", (512, 768, 1024, 1280, 1536), _qkv_attention, is_minimum=True),
    Threshold("prefix_attention_max_length", (32, 64, 128, 256, 512, 1024), _prefix_attention),
    Threshold("prompt_attention_max_length", (32, 64, 128, 256, 512, 1024), _prompt_attention),
)
