"""Times the contenders of one op in turns, beside a copy of as many bytes, after checking their results."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch._dynamo.exc import TorchDynamoException

from fuseopt.bench.harness.cuda_graph import calls_per_graph, graph_of, set_count, stay_in_cache
from fuseopt.bench.harness.measure import not_compiled
from fuseopt.bench.harness.op_cases import Contender, Float64Reference, OpCase, Work, auto_choice, contenders
from fuseopt.bench.harness.records import COPY, Record
from fuseopt.bench.harness.workloads import failed
from fuseopt.errors import BackendError
from fuseopt.runtime.timer import Call, Spread, Timing, device_seconds, host_seconds, time_in_turns, wall_seconds

ROUNDS = 11
SECONDS_PER_SAMPLE = {"cuda": 0.5e-3, "cpu": 4e-3}
# A case ends after this long, once each of its contenders has been timed three times.
SECONDS_PER_CASE = 2.0
PAGE = 4096
# One sample of `wall_us` and `host_us` is the mean of this many calls in a row, or of fewer slow ones, down to one. The
# first call after another contender's finds cold processor caches, unlike a caller in a loop.
PLAIN_CALLS = 200
SECONDS_OF_PLAIN_CALLS = 10e-3
# Factor on the error allowed to other contenders than fuseopt: they round more often than fuseopt's reference.
LENIENCE = 8


def time_op(case: OpCase, device: torch.device, *, compile: bool) -> list[Record]:
    """One record per contender; a wrong result or an exception gives a note instead of a time.

    On CUDA times are device times: calls are captured as a CUDA graph over several sets of arguments, which together
    exceed the L2 cache. `host_us` and `wall_us` come from eager calls. On a CPU all times come from eager calls on one
    set of arguments.
    """
    on_cuda = device.type == "cuda"
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else contextlib.nullcontext()
    # By default a compiled backward may overwrite what its forward saved, so it could not run again.
    run_again = torch._functorch.config.patch(donated_buffer=False)
    try:
        with stream, torch.set_grad_enabled(case.backward), run_again:
            return _time_op(case, device, compile)
    finally:
        if on_cuda:
            torch.cuda.empty_cache()


def _time_op(case: OpCase, device: torch.device, compile: bool) -> list[Record]:
    torch.manual_seed(0)
    work = Work.of(case, device)
    offered = contenders(case, device, compile)
    auto = auto_choice(case, device)
    functions, errors, notes = _verified(case, work, offered)
    try:
        moved = work.moved_bytes(functions.get(auto, case.op.reference))
    except Exception as error:
        if functions.pop(auto, None) is None:
            raise
        notes[auto] = failed(error)
        moved = work.moved_bytes(case.op.reference)
    arguments, flops = work.sample.args, case.benchmark.flops
    operations = None if flops is None else flops(arguments, case.backward)
    runs, raised = _runs(case, work, functions, moved, device)
    notes |= raised
    del work
    plain_calls = {name: run.calls[0] for name, run in runs.items()}
    timings, wall, host = _on_cuda(runs, plain_calls) if device.type == "cuda" else _on_cpu(runs)
    over_torch = {} if case.backward or "torch" not in host else _host_speed_ups(host)

    others = [name for name, c in offered.items() if isinstance(c, Contender) and not c.own and name in timings]
    baseline = timings[_fastest(others, timings)] if others else None
    if auto in timings:
        # Contenders that are not fuseopt's appear in the speed-up already.
        fastest = _fastest([name for name in timings if name not in (*others, COPY)], timings)
        gain = timings[fastest].speed_up_over(timings[auto])
        faster = [f"{fastest} is {gain.median:.3f}x as fast"] if gain.low > 1 else []
        if auto in over_torch and over_torch[auto].high < 1:
            faster.append(f"torch keeps the host for {over_torch[auto].median:.3f} of the time")
        if faster:
            notes[auto] = "; ".join(faster)
    if device.type == "cuda" and stay_in_cache(moved, device):
        notes[COPY] = "all in the L2 cache"
    return [
        Record.of(
            case.name,
            name,
            timings[name],
            None if name == COPY or name in others else baseline,
            difference=f"{errors[name]:.1e}" if name in errors else None,
            note=notes.get(name),
            wall_us=_microseconds(wall.get(name)),
            host_us=_microseconds(host.get(name)),
            host_speed_up=over_torch[name].scaled(1) if name in over_torch else None,
            bytes=moved,
            flops=None if name == COPY else operations,
            of_copy=timings[name].speed_up_over(timings[COPY]).median,
            auto=name == auto,
        )
        if name in timings
        else Record(case.name, name, note=notes[name], auto=name == auto)
        for name in (*offered, COPY)
    ]


def _verified(
    case: OpCase, work: Work, offered: Mapping[str, Contender | str]
) -> tuple[dict[str, Callable], dict[str, float], dict[str, str]]:
    """Functions and errors of the contenders with right results, and notes on the others."""
    reference = Float64Reference(case, work)
    functions, errors, notes = {}, {}, {}
    for name, contender in offered.items():
        if isinstance(contender, str):
            notes[name] = contender
            continue
        try:
            error = reference.error(work.results(contender.function))
        except TorchDynamoException as failure:
            notes[name] = not_compiled(failure)
            continue
        except BackendError as refusal:  # of this call, by the backend's `supports`
            notes[name] = str(refusal).rpartition("\n")[2].strip()
            continue
        except Exception as error_of_call:
            notes[name] = failed(error_of_call)
            continue
        allowed = reference.allowed * (1 if contender.own else LENIENCE)
        if error <= allowed:
            functions[name], errors[name] = contender.function, error
        else:
            notes[name] = f"WRONG: differs from float64 by {error:.1e}, allowed {allowed:.1e}"
    return functions, errors, notes


@dataclass
class _Run:
    """Calls that run one after the other, or a CUDA graph of them."""

    calls: Sequence[Call]
    graph: torch.cuda.CUDAGraph | None = None
    graph_calls: int = 0
    repetitions: int = 1

    @property
    def count(self) -> int:
        return self.repetitions * (1 if self.graph is None else self.graph_calls)

    def __call__(self) -> None:
        for _ in range(self.repetitions):
            if self.graph is None:
                self.calls[0]()
            else:
                self.graph.replay()

    def lengthen(self, seconds: float, now: float) -> None:
        """Sets the number of repetitions so that a run lasts `seconds`, given that one repetition takes `now`."""
        self.repetitions = min(max(math.ceil(seconds / now), 1), 1000)


def _runs(
    case: OpCase, work: Work, functions: Mapping[str, Callable], moved: int, device: torch.device
) -> tuple[dict[str, _Run], dict[str, str]]:
    """The runs to time, and a note for each contender that raised an exception during preparation."""
    sets = set_count(moved, device) if device.type == "cuda" else 1
    works = [work, *(Work.of(case, device) for _ in range(sets - 1))]
    count = calls_per_graph(moved, sets) if device.type == "cuda" else 0
    runs: dict[str, _Run] = {}
    notes: dict[str, str] = {}
    for name, function in functions.items():
        try:
            runs[name] = _run([work.prepare(function) for work in works], count)
        except Exception as error:
            notes[name] = failed(error)
    # Whole pages: the driver copies other sizes at 2/3 of the speed.
    pages = math.ceil(moved / 2 / PAGE)
    pairs = [torch.zeros(2, pages * PAGE // 4, device=device) for _ in works]
    runs[COPY] = _run([functools.partial(target.copy_, source) for target, source in pairs], count)
    if device.type == "cuda":
        # For some sizes a kernel copies faster than the driver. The faster of the two is the reference.
        by_kernel = _run([functools.partial(torch.neg, source, out=target) for target, source in pairs], count)
        runs[COPY] = min(runs[COPY], by_kernel, key=functools.partial(device_seconds, repetitions=5, ahead=1))
    return runs, notes


def _run(calls: Sequence[Call], graph_calls: int) -> _Run:
    """A run of `calls`, each called once as a warm-up; as a CUDA graph of `graph_calls` calls unless that is 0."""
    for call in calls:
        call()
    return _Run(calls, graph_of(calls, graph_calls), graph_calls) if graph_calls else _Run(calls)


def _on_cuda(
    runs: Mapping[str, _Run], plain_calls: Mapping[str, Call]
) -> tuple[dict[str, Timing], dict[str, Timing], dict[str, Timing]]:
    """Device times, wall times and host times."""
    for run in runs.values():
        run()
        run.lengthen(SECONDS_PER_SAMPLE["cuda"], device_seconds(run))
    sample = functools.partial(device_seconds, ahead=1)
    timings = _timed(runs, sample)
    slowest = max(timing.seconds.median for timing in timings.values())
    count = min(max(round(SECONDS_OF_PLAIN_CALLS / slowest), 1), PLAIN_CALLS)
    until_done = functools.partial(wall_seconds, repetitions=count)
    wall = time_in_turns(plain_calls, until_done, rounds=ROUNDS, seconds=SECONDS_PER_CASE / 4)
    enqueue = functools.partial(host_seconds, repetitions=count)
    host = time_in_turns(plain_calls, enqueue, rounds=ROUNDS, seconds=SECONDS_PER_CASE / 4)
    return timings, wall, host


def _on_cpu(runs: Mapping[str, _Run]) -> tuple[dict[str, Timing], dict[str, Timing], dict[str, Timing]]:
    for run in runs.values():
        run()
        run.lengthen(SECONDS_PER_SAMPLE["cpu"], host_seconds(run))
    return _timed(runs, host_seconds), {}, {}


def _timed(runs: Mapping[str, _Run], sample: Callable[[Call], float]) -> dict[str, Timing]:
    timings = time_in_turns(runs, sample, rounds=ROUNDS, seconds=SECONDS_PER_CASE)
    return {name: timing.per(runs[name].count) for name, timing in timings.items()}


def _host_speed_ups(host: Mapping[str, Timing]) -> dict[str, Spread]:
    """Host speed-ups over torch's own operation, for all other contenders but the copy."""
    return {name: timing.speed_up_over(host["torch"]) for name, timing in host.items() if name not in ("torch", COPY)}


def _microseconds(timing: Timing | None) -> float | None:
    return None if timing is None else timing.seconds.median * 1e6


def _fastest(names: Sequence[str], timings: Mapping[str, Timing]) -> str:
    return min(names, key=lambda name: timings[name].seconds.median)
