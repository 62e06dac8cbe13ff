"""`fuseopt bench generate --samplings`: settings of sampling beside greedy decoding, all in the decode loop."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fuseopt.bench.harness.generate_rows import GENERATION, Row
from fuseopt.bench.harness.measure import SECONDS_PER_CASE, measure
from fuseopt.bench.harness.records import Record, Results
from fuseopt.bench.harness.workloads import fuse, parameter_sharing_copy
from fuseopt.runtime.timer import Timing, time_in_turns, work_seconds

GREEDY = "greedy"
# Without `top_k`, generate() takes 50.
SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    "sampled": {"top_k": 0},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_k": 0, "top_p": 0.95},
    "temperature 0.7, top-k 50, top-p 0.95": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"top_k": 0, "min_p": 0.05},
    "typical-p 0.9": {"top_k": 0, "typical_p": 0.9},
    "repetition penalty 1.2, top-k 50": {"top_k": 50, "repetition_penalty": 1.2},
    "top-k 2000": {"top_k": 2000},
}
ROWS = tuple(Row("gpt2", batch) for batch in (1, 8, 64))
# Calls before the first sample: the loop's steps are captured in the first ones.
_WARM_UP, _ROUNDS = 3, 9
_FIRST = ", one token"


@dataclass(frozen=True)
class _Case:
    row: Row
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.row.name(self.dtype)} or sampled"


def run(*, device: torch.device, rows: Sequence[Row] = (), dtype: torch.dtype | None = None) -> Results:
    """Times whole calls per new token, and calls for one token; notes say what a setting's steps take over greedy's.

    A step is a whole call without one for one token, divided by the remaining tokens. Notes are medians of the rounds.

    Args:
        rows: greedy ones; `ROWS` by default.
        dtype: of the weights; bfloat16 by default, float32 on a CPU.

    Raises:
        ConfigError: a model is no architecture by name, folder with a config.json or model id.
    """
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    cases = [_Case(row, row.dtype_in(dtype)) for row in rows or ROWS]
    return Results.measured_here("generate", measure(cases, functools.partial(_records, device=device)), unit="us")


def _records(case: _Case, device: torch.device) -> list[Record]:
    row, model = case.row, case.row.random_model(device, case.dtype)
    calls: dict[str, Callable[[], object]] = {}
    for name, sampling in {GREEDY: None, **SAMPLINGS}.items():
        twin = parameter_sharing_copy(model)
        fuse(twin, "generation", GENERATION)
        sampled = replace(row, sampling=sampling)
        calls[name] = functools.partial(sampled.work(device, row.new), twin)
        calls[name + _FIRST] = functools.partial(sampled.work(device, 1), twin)
    timings = time_in_turns(
        calls,
        functools.partial(work_seconds, device=device),
        rounds=_ROUNDS,
        warm_up=_WARM_UP,
        seconds=SECONDS_PER_CASE,
    )
    steps = {name: _steps(timings[name], timings[name + _FIRST], row.new) for name in (GREEDY, *SAMPLINGS)}
    records = []
    for name, of_steps in steps.items():
        over = [own - greedy for own, greedy in zip(of_steps, steps[GREEDY], strict=True)]
        note = None if name == GREEDY else f"{statistics.median(over) * 1e6:+.1f} us a step over greedy"
        first = timings[name + _FIRST].seconds.median * 1e6
        timing = timings[name].per(row.new)
        records.append(Record.of(case.name, name, timing, None, tokens=row.batch, first_token_us=first, note=note))
    return records


def _steps(whole: Timing, first: Timing, new: int) -> list[float]:
    """Seconds of a step in each round; of a call for one token there is none but the first."""
    pairs = zip(whole.samples, first.samples, strict=True)
    return [(all_tokens - one) / max(new - 1, 1) for all_tokens, one in pairs]
