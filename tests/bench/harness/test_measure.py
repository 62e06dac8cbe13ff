"""From a case to records: what is run, what is compared, and what is said of a config that matches nothing."""

from __future__ import annotations

import functools
import time
from types import SimpleNamespace

import pytest
import torch

import fuseopt
from fuseopt import api
from fuseopt.bench.harness.architectures import random_model
from fuseopt.bench.harness.measure import against_stock, measure, peak_mib
from fuseopt.bench.harness.records import STOCK, Record
from fuseopt.bench.harness.workloads import ModelCase, difference, forward, parameter_sharing_copy
from fuseopt.errors import CompileError, ConfigError

CPU = torch.device("cpu")
MIB = 2**20
REFERENCE_GELU = {
    "kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "backend": "reference", "jit": False},
}
NORM = {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"], "jit": False}}


def test_a_case_becomes_a_row_a_variant():
    model = random_model("gpt2-tiny", CPU, torch.float32)
    work = forward(input_ids=torch.arange(8)[None])
    case = ModelCase("tiny", lambda: model, work, {"FusedGELU": REFERENCE_GELU, "FusedRMSNorm": NORM}, rounds=4)
    stock, fused, nowhere = measure([case], functools.partial(against_stock, device=CPU))
    assert (stock.variant, stock.rounds, stock.speed_up, stock.difference) == ("stock", 4, None, None)
    assert fused.variant == "FusedGELU [reference]"
    assert 0 < float(fused.difference) < 1e-5
    low, median, high = fused.milliseconds
    assert 0 < low <= median <= high
    assert (nowhere.variant, nowhere.milliseconds) == ("FusedRMSNorm", None)
    assert "matches nothing in the model" in nowhere.note


def test_a_step_that_cannot_be_compiled_is_a_row_that_says_why():
    def refused(model):
        raise CompileError("no graph: no code today")

    model = random_model("gpt2-tiny", CPU, torch.float32)
    work = forward(input_ids=torch.arange(8)[None])
    others = {"refused": refused, "another": work}
    case = ModelCase("tiny", lambda: model, work, {}, rounds=2, others=others, warm_up=1)
    stock, refused_row, another = measure([case], functools.partial(against_stock, device=CPU))
    assert (refused_row.variant, refused_row.milliseconds) == ("refused", None)
    assert refused_row.note == "no graph: no code today"
    assert stock.milliseconds is not None is not another.milliseconds and another.difference == "0.0e+00"


def test_sizes_of_earlier_cases_are_forgotten():
    compiled = []

    def backend(graph, inputs):
        compiled.append(any(not isinstance(size, int) for size in inputs[-1].shape))
        return graph

    step = torch.compile(lambda x: x.sin(), backend=backend)

    def records(case):
        step(torch.ones(case.size))
        return []

    measure([SimpleNamespace(name="size", size=size) for size in (3, 4, 5)], records)
    assert compiled == [False] * 3


def test_a_copy_shares_parameters_and_nothing_else():
    model = random_model("gpt2-tiny", CPU, torch.float32)
    twin = parameter_sharing_copy(model)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    assert not {id(m) for m in twin.modules()} & {id(m) for m in model.modules()}
    twin.set_attn_implementation("eager")
    assert model.config._attn_implementation != "eager"


@pytest.mark.parametrize(
    ("result", "stock", "expected"),
    [
        ([1.0, 2.5], [1.0, 2.0], "5.0e-01"),
        ([-float("inf"), 1.0], [-float("inf"), 1.0], "0.0e+00"),
        ([1, 2, 3], [1, 2, 3], "tokens equal"),
        ([1, 2, 4], [1, 2, 3], "1 of 3 tokens"),
        ([1, 2], [1, 2, 3], "shape [2], not [3]"),
    ],
)
def test_a_difference_is_the_largest_one_or_how_many_tokens_are_others(result, stock, expected):
    assert difference(torch.tensor(result), torch.tensor(stock)) == expected


def test_nan_is_a_difference():
    assert difference(torch.tensor([float("nan")]), torch.tensor([1.0])) == "nan"


def test_models_are_made_when_a_case_is_prepared():
    made = []
    model = functools.cache(lambda: made.append(1) or random_model("t5-tiny", CPU, torch.float32))
    ids = torch.arange(8)[None]
    case = ModelCase("tiny", model, forward(input_ids=ids, decoder_input_ids=ids), {"preset": "reference"}, rounds=1)
    assert not made
    records = measure([case, case], functools.partial(against_stock, device=CPU))
    assert [record.variant for record in records] == ["stock", "preset [reference]"] * 2
    assert made == [1]


def test_what_cannot_be_compiled_is_a_row_that_says_why():
    def compiled(module):
        return torch.compile(lambda: torch._dynamo.graph_break() or work(module), fullgraph=True)()

    model = random_model("gpt2-tiny", CPU, torch.float32)
    work = forward(input_ids=torch.arange(8)[None])
    case = ModelCase("tiny", lambda: model, work, {"preset": "reference"}, rounds=1, others={"compiled": compiled})
    stock, other, fused = against_stock(case, CPU)
    assert stock.milliseconds and fused.milliseconds and other.milliseconds is None
    assert other.variant == "compiled" and other.note.startswith("cannot be compiled: ") and "\n" not in other.note


def test_stock_may_reach_the_same_end_by_other_work_and_a_step_is_a_part_of_a_call():
    model = random_model("gpt2-tiny", CPU, torch.float32)

    def slow(module):
        time.sleep(0.1)
        return work(module)

    work = forward(input_ids=torch.arange(8)[None])
    case = ModelCase("tiny", lambda: model, work, {"preset": "reference"}, rounds=3, stock_work=slow, steps=10)
    stock, fused = against_stock(case, CPU)
    assert 10 <= stock.milliseconds[1] < 100
    assert fused.milliseconds[1] < 10


def test_what_was_measured_is_kept_when_the_rest_is_interrupted(capsys):
    def records_of(case):
        if case.name == "third":
            raise KeyboardInterrupt
        return [Record(case.name, STOCK)]

    cases = [SimpleNamespace(name=name) for name in ("first", "second", "third", "fourth")]
    assert [record.case for record in measure(cases, records_of)] == ["first", "second"]
    assert "third and what comes after it is left out" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        measure(cases[2:], records_of)
    assert measure(cases[2:], records_of, is_more=True) == []


def test_a_case_that_raises_is_a_row_and_the_next_one_is_measured(capsys):
    def records_of(case):
        yield Record(case.name, STOCK)
        if case.name == "second":
            raise ValueError("no such size\nin two lines")

    cases = [SimpleNamespace(name=name) for name in ("first", "second", "third")]
    records = measure(cases, records_of)
    assert [(record.case, record.variant) for record in records] == [
        ("first", STOCK),
        ("second", STOCK),
        ("second", "every variant"),
        ("third", STOCK),
    ]
    assert [record.failed for record in records] == [False, False, True, False]
    assert records[2].note == "failed: ValueError: no such size"
    assert "Traceback" in capsys.readouterr().err


def test_a_config_that_is_wrong_is_an_error_before_anything_is_measured():
    def records_of(case):
        if case.name == "wrong":
            raise ConfigError("no such model")
        return [Record(case.name, STOCK)]

    wrong, right = (SimpleNamespace(name=name) for name in ("wrong", "right"))
    with pytest.raises(ConfigError):
        measure([wrong, right], records_of)
    assert [record.failed for record in measure([right, wrong, right], records_of)] == [False, True, False]


@pytest.mark.parametrize("where", ["call", "initialize"])
def test_a_way_to_run_a_model_that_raises_leaves_the_others(monkeypatch, where):
    def refused(model):
        raise RuntimeError("out of order")

    model = random_model("gpt2-tiny", CPU, torch.float32)
    work = forward(input_ids=torch.arange(8)[None])
    if where == "call":
        case = ModelCase("tiny", lambda: model, work, {"preset": "reference"}, rounds=1, others={"refused": refused})
    else:
        initialize = api.initialize_silently
        monkeypatch.setattr(
            api,
            "initialize_silently",
            lambda twin, config, strict: refused(twin) if config == "x" else initialize(twin, config, strict),
        )
        case = ModelCase("tiny", lambda: model, work, {"refused": "x", "preset": "reference"}, rounds=1)
    stock, other, fused = measure([case], functools.partial(against_stock, device=CPU))
    assert stock.milliseconds and fused.milliseconds
    assert (other.variant, other.milliseconds, other.note) == ("refused", None, "failed: RuntimeError: out of order")


def test_stock_that_raises_is_a_row_too():
    def no_memory(model):
        raise torch.OutOfMemoryError("no memory for stock")

    model = random_model("gpt2-tiny", CPU, torch.float32)
    work = forward(input_ids=torch.arange(8)[None])
    configs = {"preset": "reference", "FusedGELU": REFERENCE_GELU}
    case = ModelCase("tiny", lambda: model, work, configs, rounds=2, stock_work=no_memory)
    stock, first, second = measure([case], functools.partial(against_stock, device=CPU))
    assert stock.failed and stock.note.endswith("no memory for stock")
    assert first.milliseconds and first.speed_up is None and first.difference is None
    assert second.milliseconds and second.speed_up is None and float(second.difference) < 1e-5


def test_a_call_that_raises_while_it_is_timed_is_a_row():
    calls = []

    def third_time_unlucky(model):
        calls.append(1)
        if len(calls) == 3:  # after its result and the first round
            raise RuntimeError("worn out")
        return work(model)

    model = random_model("gpt2-tiny", CPU, torch.float32)
    work = forward(input_ids=torch.arange(8)[None])
    case = ModelCase("tiny", lambda: model, work, {}, rounds=3, others={"fragile": third_time_unlucky, "firm": work})
    device = torch.device("cpu")
    stock, fragile, firm = measure([case], functools.partial(against_stock, device=device))
    assert (fragile.milliseconds, fragile.note) == (None, "failed: RuntimeError: worn out")
    assert stock.rounds == firm.rounds == 3 and firm.speed_up


def test_memory_of_dead_graphs_is_not_what_a_call_frees(monkeypatch):
    """On a device of which this says how much is taken: pools of graphs that are gone, until the cache is emptied."""
    dead, taken, peak = [500 * MIB], [7 * MIB], [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", dead.clear)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: sum(taken))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: max(*peak, sum(taken)))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.clear())
    segment = {"device": 0, "allocated_size": 0, "segment_pool_id": (0, 1)}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{**segment, "total_size": size} for size in dead])

    def call():
        torch.cuda.empty_cache()  # as captures begin
        taken.append(3 * MIB)
        peak.append(sum(taken) + 2 * MIB)

    assert peak_mib(call, torch.device("cuda")) == 5
    assert peak_mib(call, torch.device("cuda"), above=0) == 7 + 3 + 3 + 2
    assert peak_mib(call, CPU) is None


@pytest.mark.gpu
def test_a_call_that_captures_a_graph_while_another_is_dead():
    device = torch.device("cuda", torch.cuda.current_device())
    graphs = []

    def capture(mib):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = torch.empty(mib * MIB, dtype=torch.uint8, device=device).zero_()
        graphs.append((graph, result))

    capture(256)
    graphs.clear()
    peak = peak_mib(lambda: capture(64), device)
    assert peak is not None and 64 <= peak < 128


def test_what_was_measured_is_what_plans_expect(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEOPT_MEASURED", "1")
    monkeypatch.setattr("fuseopt.runtime.measured_files.library_cache.folder", lambda: tmp_path / "cache")
    model = random_model("gpt2-tiny", CPU, torch.float32)
    work = forward(input_ids=torch.arange(8)[None])
    case = ModelCase("tiny forward", lambda: model, work, {"FusedGELU": REFERENCE_GELU, "FusedRMSNorm": NORM}, rounds=3)
    _, fused, _ = measure([case], functools.partial(against_stock, device=CPU))
    (line,) = fuseopt.plan(random_model("gpt2-tiny", CPU, torch.float32), REFERENCE_GELU).expected
    assert line.startswith(f"expected: {fused.speed_up[1]:.2f} times as fast as stock; tiny forward; bench, 20")
    assert fuseopt.plan(model, "inference").expected == fuseopt.plan(model, NORM).expected == ()
