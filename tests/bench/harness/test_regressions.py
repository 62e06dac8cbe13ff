"""What counts as slower than an earlier result file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuseopt.bench.harness.records import Record, Results
from fuseopt.bench.harness.regressions import compare
from fuseopt.errors import ConfigError

MACHINE = {"cpu": "a processor", "gpu": "a GPU"}


def results(*rows: Record) -> Results:
    return Results("ops", MACHINE, {}, "2026-11-20", None, rows, "us")


def row(variant: str, median: float, spread: float = 0.0, case: str = "gelu") -> Record:
    return Record(case, variant, (median - spread / 2, median, median + spread / 2))


@pytest.mark.parametrize(
    ("before", "after", "slower"),
    [
        (row("cuda", 1.0), row("cuda", 1.0), 0),
        (row("cuda", 1.0), row("cuda", 1.001), 1),
        (row("cuda", 1.0, 0.1), row("cuda", 1.15, 0.1), 0),
        (row("cuda", 1.0, 0.1), row("cuda", 1.25, 0.1), 1),
        (row("cuda", 1.0), row("cuda", 0.5), 0),
        (row("eager", 1.0), row("eager", 2.0), 0),
        (row("cuda", 1.0), Record("gelu", "cuda", note="WRONG"), 0),
    ],
)
def test_slower_is_beyond_the_noise_of_both(before, after, slower):
    comparison = compare(results(after), results(before))
    assert len(comparison.slower) == slower
    assert comparison.compared == (after.milliseconds is not None)


def test_a_slower_machine_is_no_regression_of_its_case():
    before = results(row("cuda", 1.0), row("copy", 1.0), row("eager", 4.0), row("cuda", 1.0, case="softmax"))
    after = results(row("cuda", 1.2), row("copy", 1.25), row("eager", 5.0), row("cuda", 1.2, case="softmax"))
    (line,) = compare(after, before).slower
    assert line.startswith("softmax: cuda: 1000 -> 1200 us, 20.0% more")


def test_rows_that_are_gone_are_counted():
    comparison = compare(results(row("cuda", 1.0)), results(row("cuda", 1.0), row("triton", 1.0)))
    assert str(comparison) == (
        "1 rows compared, 0 slower beyond the noise; 1 rows of the earlier file were not timed now"
    )


def test_another_benchmark_and_another_machine_are_refused():
    now = results(row("cuda", 1.0))
    for earlier, message in (
        (replace(now, benchmark="demo"), "another benchmark .* 'ops' now, 'demo' earlier"),
        (replace(now, machine={**MACHINE, "gpu": "another"}), "another machine"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare(now, earlier)
    assert not compare(now, replace(now, machine={**MACHINE, "cpu": "another"})).slower
