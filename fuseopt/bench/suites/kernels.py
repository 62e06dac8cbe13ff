"""`fuseopt bench kernels`: the time each kernel adds to a decode step, the bytes it reads, and the GPU's idle time."""

from __future__ import annotations

import functools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.utils._pytree import tree_leaves

from fuseopt.bench.harness.architectures import load_config, random_model
from fuseopt.bench.harness.bytes_floor import cache_bytes, copy_bandwidth, weight_bytes
from fuseopt.bench.harness.generate_rows import GENERATION, GPU_ROWS, Row
from fuseopt.bench.harness.machine import needs_gpu
from fuseopt.bench.harness.measure import measure
from fuseopt.bench.harness.records import Record, Results
from fuseopt.bench.harness.workloads import FusionConfig, fuse
from fuseopt.ops.library import Observer
from fuseopt.runtime.timer import Call, Spread

ALL = "all of a step"
IDLE = "no kernel runs"
_WARM_UP = 3
# Ops that read all of their arguments: caches up to the filled slots. A step ends with one of
# `_LAST`.
_READING = ("decode_linear", "decode_softmax_linear", "decode_attention", "decode_qkv_attention")
# Ops that run the kernels of another op, and are counted as calls of it.
_BY_KERNELS_OF = dict.fromkeys(("decode_linear_partials", "decode_linear_of_sum"), "decode_linear")
_CACHES = ("key_cache", "value_cache", "key_scales", "value_scales")
_LAST = ("decode_select", "decode_sample", "decode_beams")
# An op that runs the kernels of two ops, with the arguments that the first one reads.
_HEAD, _OF_HEAD = "decode_head_select", ("input", "split_k_partials", "weight", "norm_weight", "norm_bias")


@dataclass(frozen=True)
class Launch:
    """A kernel or a copy that a GPU ran; times in microseconds from a common start."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Read:
    """A call of one of fuseopt's ops in a step: the name, without the underscore of in-place ops, and its bytes."""

    op: str
    bytes: int | None


def run(
    *,
    device: torch.device,
    rows: Sequence[Row] = (),
    dtype: torch.dtype | None = None,
    configs: Mapping[str, FusionConfig] | None = None,
) -> Results:
    """Profiles whole calls of `generate()`. Steps in the middle of a call all run the same kernels.

    Args:
        device: a GPU.
        rows: `GPU_ROWS` by default.
        dtype: of rows that name none; bfloat16 by default.
        configs: generation alone by default.

    Raises:
        ConfigError: `device` is no GPU; a model is no architecture by name, folder with a config.json or model id.
    """
    if device.type != "cuda":
        raise needs_gpu("bench kernels", device)
    bandwidth = copy_bandwidth(device)
    cases = [
        _Case(row, row.dtype_in(dtype or torch.bfloat16), name, config)
        for row in rows or GPU_ROWS
        for name, config in (configs or {"generation": GENERATION}).items()
    ]
    return Results.measured_here("kernels", measure(cases, lambda case: case.records(device, bandwidth)), unit="us")


@dataclass(frozen=True)
class _Case:
    row: Row
    dtype: torch.dtype
    config_name: str
    config: FusionConfig

    @property
    def name(self) -> str:
        return f"{self.row.name(self.dtype)}, {self.config_name}"

    def records(self, device: torch.device, bandwidth: float) -> list[Record]:
        row, model = self.row, random_model(self.row.model, device, self.dtype)
        _, unmet = fuse(model, self.config_name, self.config)
        if unmet:
            return [Record(self.name, ALL, note=unmet)]
        # Average over the profiled steps.
        filled = row.new // 2 + (0 if load_config(row.model).is_encoder_decoder else row.prompt)
        with Reads(filled) as reads:
            row.work(device, 2)(model)
        call = functools.partial(row.work(device, row.new), model)
        for _ in range(_WARM_UP):
            call()
        read = weight_bytes(model) + cache_bytes(model, row.batch, row.beams, row.prompt, row.new)
        return list(records_of(self.name, launches_of(call), reads.of_a_step(), read, bandwidth))


class Reads(Observer):
    """Records the raw ops that run inside the context. It sees nothing of a replayed CUDA graph.

    Args:
        filled: number of filled cache slots, for ops that write into the cache.
    """

    def __init__(self, filled: int) -> None:
        super().__init__()
        self.filled = filled
        self.calls: list[Read] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fuseopt":
            names = (argument.name for argument in func._schema.arguments)
            arguments = dict(zip(names, args, strict=False))
            op = func._schema.name.removeprefix("fuseopt::").rstrip("_")
            op = _BY_KERNELS_OF.get(op, op)
            if op == _HEAD:
                head = {name: arguments[name] for name in _OF_HEAD}
                self.calls += Read("decode_linear", self._bytes("decode_linear", head)), Read("decode_select", None)
            else:
                self.calls.append(Read(op, self._bytes(op, arguments)))
        return func(*args, **(kwargs or {}))

    def _bytes(self, op: str, arguments: dict[str, Any]) -> int | None:
        if op not in _READING:
            return None
        arguments.pop("prefetch", None)  # weights of other layers
        caches = [arguments.pop(name) for name in _CACHES if arguments.get(name) is not None]
        filled = int(arguments["lengths"].max()) if "lengths" in arguments else self.filled
        others = tree_leaves(list(arguments.values()))
        tensors = [*(cache[:, :, :filled] for cache in caches), *others]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))

    def of_a_step(self) -> list[Read]:
        """The calls after the first selection of a token, up to and including the second."""
        ends = [i for i, call in enumerate(self.calls) if call.op in _LAST]
        return self.calls[ends[0] + 1 : ends[1] + 1] if len(ends) > 1 else []


def launches_of(call: Call) -> list[Launch]:
    """Kernels and copies that a call runs on the GPU, from PyTorch's profiler, ordered by start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    launches = [Launch(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(launches, key=lambda launch: launch.start)


def records_of(
    case: str, launches: Sequence[Launch], reads: Sequence[Read], step_bytes: int, bandwidth: float
) -> Iterator[Record]:
    """One row for a step, one for each kernel and number of bytes read, and one for idle time.

    With programmatic dependent launch kernels overlap. A kernel's time here is what it adds to the step: from the
    latest end of an earlier kernel to its own end. So idle time before a kernel counts towards it. Copies to the host,
    such as of flags every few steps, count as idle time.

    Args:
        launches: of a whole call, ordered by start.
        reads: of one step.
        step_bytes: bytes that a step must read.
        bandwidth: bytes per second of a copy.
    """
    launches = [launch for launch in launches if not launch.name.startswith("Memcpy DtoH")]
    starts = steady_steps(launches)
    if not starts:
        yield Record(case, ALL, note="no two steps in the middle of the call ran the same kernels")
        return
    steps = [launches[start : start + starts.step] for start in starts]
    names = [launch.name for launch in steps[0]]
    read = bytes_of(names, reads)
    added: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    own: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    idle, totals = [], []
    end = launches[starts[0] - 1].end
    for step in steps:
        before, idle_in_step = end, 0.0
        for place, launch in enumerate(step):
            key = launch.name, read[place]
            idle_in_step += max(0.0, launch.start - end)
            added[key].append(max(0.0, launch.end - end))
            own[key].append(launch.end - launch.start)
            end = max(end, launch.end)
        totals.append(end - before)
        idle.append(idle_in_step)

    def record(variant: str, microseconds: list[float], read: int | None = None, **others: Any) -> Record:
        spread = Spread.of(microseconds)
        of_floor = None if read is None else read / bandwidth / (spread.median * 1e-6)
        share = sum(microseconds) / sum(totals)
        return Record(
            case, variant, spread.scaled(1e-3), None, len(steps), bytes=read, of_floor=of_floor, share=share, **others
        )

    yield record(ALL, totals, step_bytes, launches=float(len(names)))
    for key in sorted(added, key=lambda key: -sum(added[key])):
        yield record(
            short_name(key[0]) + (f", {key[1] / 1e6:.3g} MB" if key[1] else ""),
            added[key],
            key[1],
            launches=len(added[key]) / len(steps),
            kernel_us=statistics.median(own[key]),
        )
    yield record(IDLE, idle, note="counted above too, with the next kernel")


def steady_steps(launches: Sequence[Launch]) -> range:
    """Indices where steps begin in the middle half of a call; the range's `step` is the number of launches per step.

    Launches one step apart have the same names. In a short call, steps queued early may end within the second quarter;
    then only the third quarter is used. Empty if launches do not repeat.
    """
    end = 3 * len(launches) // 4
    for first in (max(1, len(launches) // 4), max(1, len(launches) // 2)):
        names = [launch.name for launch in launches[first:end]]
        for period in range(1, len(names) // 2 + 1):
            if names[period:] == names[:-period]:
                return range(first, end - period + 1, period)
    return range(0)


def bytes_of(names: Sequence[str], reads: Sequence[Read]) -> list[int | None]:
    """For each kernel of a step, the bytes that its op reads, or None if the op cannot be told.

    A kernel's name contains the name of its op. The two lists may begin at different points of a step; an op that runs
    once per step aligns them.
    """
    times = Counter(read.op for read in reads)
    launched = {op: [place for place, name in enumerate(names) if op in name] for op in times}
    found: list[int | None] = [None] * len(names)
    once = [op for op, places in launched.items() if times[op] == len(places) == 1]
    if not once:
        return found
    place = launched[once[0]][0]
    call = next(i for i, read in enumerate(reads) if read.op == once[0])
    in_order = [*reads[call:], *reads[:call]]
    for op, places in launched.items():
        if times[op] == len(places):
            behind = [*(p for p in places if p >= place), *(p for p in places if p < place)]
            for p, read in zip(behind, (read for read in in_order if read.op == op), strict=True):
                found[p] = read.bytes
    return found


def short_name(kernel: str) -> str:
    """A kernel's C++ name without return type, namespaces and arguments."""
    name = re.sub(r"^void |\(anonymous namespace\)::|\bfuseopt::|\bat::native::", "", kernel)
    name = name.replace("__nv_bfloat16", "bfloat16").replace("__half", "float16")
    depth = 0
    for place, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            return name[:place]
    return name
