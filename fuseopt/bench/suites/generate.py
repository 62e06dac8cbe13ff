"""`fuseopt bench generate`: microseconds per new token of `generate()`, stock and under several configs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from fuseopt.bench.harness.bytes_floor import cache_bytes, read_bandwidth, weight_bytes
from fuseopt.bench.harness.generate_rows import CPU_ROWS, GENERATION, GPU_ROWS, NO_GENERATION, Row
from fuseopt.bench.harness.measure import against_stock, measure
from fuseopt.bench.harness.records import STATIC, Record, Results
from fuseopt.bench.harness.workloads import FusionConfig, ModelCase, dtype_name, limited
from fuseopt.bench.suites.first_call import FirstCall

CONFIGS: dict[str, FusionConfig] = {
    "preset without generation": NO_GENERATION,
    "generation": GENERATION,
    "preset inference": "inference",
}
_STATIC_CACHE = {"static_cache": True}  # of `Row.work`
# A first-token sample is the mean of this many calls: the first call after another model's finds cold caches.
_FIRST_TOKENS = 4
# Rounds for first-token calls and for whole calls. A first token is bound by the host, which other processes slow down
# for 0.1 s to seconds at a time, so it takes more samples.
_FIRST_TOKEN_ROUNDS, _ROUNDS = 15, 3


@dataclass(frozen=True)
class _RowCase:
    """One row as two cases: a call for one token, and a call for all tokens."""

    row: Row
    dtype: torch.dtype
    configs: Mapping[str, FusionConfig]
    first: ModelCase
    whole: ModelCase

    @property
    def name(self) -> str:
        return self.whole.name


def run(
    *,
    device: torch.device,
    rows: Sequence[Row] = (),
    dtype: torch.dtype | None = None,
    configs: Mapping[str, FusionConfig] | None = None,
    compile: bool | None = None,
    first_calls: bool = False,
    compile_seconds: float = 60.0,
) -> Results:
    """Times whole calls, host time included.

    Args:
        rows: `GPU_ROWS` by default, `CPU_ROWS` on a CPU.
        dtype: of rows that name none; bfloat16 by default, float32 on a CPU.
        configs: `CONFIGS` by default; JSON types only, because first calls run in another process.
        compile: also time transformers' static cache with torch.compile, which compiles for up to 20 s per row on a
            GPU, where that is the default, and for minutes on a CPU.
        compile_seconds: a call with the static cache that takes longer, which it does to compile, is not timed.
        first_calls: also time the first call of a fresh process, for every row of the table.

    Raises:
        ConfigError: a model is no architecture by name, folder with a config.json or model id.
    """
    on_gpu = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    rows = rows or (GPU_ROWS if on_gpu else CPU_ROWS)
    compile = on_gpu if compile is None else compile
    limit = compile_seconds if compile else None
    cases = [_case(row, dtype, device, CONFIGS if configs is None else configs, limit) for row in rows]
    bandwidth = read_bandwidth(device)
    records = measure(cases, lambda case: _records(case, device, bandwidth))
    was_interrupted = {case.name for case in cases} != {record.case for record in records}
    if first_calls and not was_interrupted:
        records = _with_first_calls(records, cases, device)
    return Results.measured_here("generate", records, unit="us")


def _case(
    row: Row,
    dtype: torch.dtype,
    device: torch.device,
    configs: Mapping[str, FusionConfig],
    compile_seconds: float | None = None,
) -> _RowCase:
    """A row's cases, with the static cache and torch.compile if they have a time limit."""
    dtype = row.dtype_in(dtype)
    model = functools.cache(functools.partial(row.random_model, device, dtype))

    def case(name: str, new: int, rounds: int, calls: int) -> ModelCase:
        others = {}
        if compile_seconds is not None and row.beams == 1:  # transformers compiles no beam search
            others[STATIC] = limited(row.work(device, new, **_STATIC_CACHE), compile_seconds)
        work = row.work(device, new)
        return ModelCase(
            name,
            model,
            work,
            configs,
            rounds=rounds,
            warm_up=1,
            calls_per_sample=calls,
            others=others,
            steps=new,
        )

    name = row.name(dtype)  # plans show both speed-ups, each under its case's name
    first = case(f"the first token alone, {name}", 1, _FIRST_TOKEN_ROUNDS, _FIRST_TOKENS)
    return _RowCase(row, dtype, configs, first, case(name, row.new, _ROUNDS, 1))


def _records(case: _RowCase, device: torch.device, bandwidth: float) -> list[Record]:
    row, model = case.row, case.whole.model()
    records, first_tokens = against_stock(case.whole, device), against_stock(case.first, device)
    cache = cache_bytes(model, row.batch, row.beams, row.prefix + row.prompt, row.new)
    floor = (weight_bytes(model) + cache) / bandwidth
    complete = []
    for first, record in zip(first_tokens, records, strict=True):
        if record.milliseconds is not None and first.milliseconds is not None:
            seconds = record.milliseconds[1] / 1e3
            record = replace(
                record,
                first_token_us=first.milliseconds[1] * 1e3,
                tokens=row.batch,
                of_floor=floor / seconds,
            )
        complete.append(record)
    return complete


@dataclass(frozen=True)
class _FirstCallCase:
    """The first call of one system for one row."""

    record: Record
    row: _RowCase

    @property
    def name(self) -> str:
        return f"the first call of {self.record.variant}, {self.record.case}"

    def records(self, device: torch.device) -> list[Record]:
        record, row = self.record, self.row
        if record.milliseconds is None:
            return [record]
        request = {
            "row": asdict(row.row),
            "config": row.configs.get(record.variant.split(" [")[0]),
            "options": _STATIC_CACHE if record.variant == STATIC else {},
            "dtype": dtype_name(row.dtype),
            "device": str(device),
        }
        measured = FirstCall.measured(request)
        if isinstance(measured, str):
            return [replace(record, note="; ".join(filter(None, (record.note, measured))))]
        return [replace(record, first_seconds=measured.seconds, peak_mib=measured.peak_mib)]


def _with_first_calls(records: Sequence[Record], rows: Sequence[_RowCase], device: torch.device) -> list[Record]:
    """The records with `first_seconds` filled in; after an interruption, the remaining records stay as they were."""
    row_of = {row.name: row for row in rows}
    cases = [_FirstCallCase(record, row_of[record.case]) for record in records]
    done = measure(cases, lambda case: case.records(device), is_more=True)
    return [*done, *records[len(done) :]]
