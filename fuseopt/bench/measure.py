"""From cases to records: prepare, compare, time, one case after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm import tqdm

from fuseopt.bench.records import STOCK, Record
from fuseopt.bench.timer import Call, time_in_turns
from fuseopt.bench.workloads import Case, difference

# No case is timed for longer, once each of its calls has been timed three times.
SECONDS_PER_CASE = 12.0


def measure(cases: Sequence[Case], device: torch.device) -> list[Record]:
    """Runs every call of every case once for its result, then times them in turns; shows a progress bar on stderr."""
    records = []
    with tqdm(cases, unit="case", dynamic_ncols=True) as progress:
        for case in progress:
            progress.set_postfix_str(case.name)
            records += _measure(case, device)
    return records


def _measure(case: Case, device: torch.device) -> list[Record]:
    offered = case.calls()
    calls: dict[str, Call] = {name: call for name, call in offered.items() if not isinstance(call, str)}
    stock = calls[STOCK]()
    differences = {name: difference(call(), stock) for name, call in calls.items()}
    del stock
    peaks = {name: _peak_mib(call, device) for name, call in calls.items()}
    timings = time_in_turns(
        calls,
        device,
        rounds=case.rounds,
        calls_per_sample=case.calls_per_sample,
        warm_up=1 if device.type == "cuda" else 0,
        seconds=SECONDS_PER_CASE,
    )
    return [
        Record(case.name, name, note=call)
        if isinstance(call, str)
        else Record.of(case.name, name, timings[name], timings[STOCK], differences[name], peaks[name])
        for name, call in offered.items()
    ]


def _peak_mib(call: Call, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
