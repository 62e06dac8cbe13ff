"""Result files and the table made of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from fuseopt.bench.harness.records import STATIC, Record, Results
from fuseopt.errors import ConfigError
from fuseopt.runtime.timer import Timing

STOCK = Timing((0.2, 0.2, 0.22))
ROWS = (
    Record.of("gpt2 forward", "stock", STOCK, None),
    Record.of("gpt2 forward", "FusedGELU [cpu]", Timing((0.1, 0.1, 0.1)), STOCK, difference="1.8e-07"),
    Record.of("gpt2 forward", "jit", Timing((0.19, 0.21, 0.22)), STOCK, difference="0.0e+00"),
    Record("gpt2 forward", "FusedSoftmax", note="attention runs as 'sdpa'"),
)


@pytest.fixture
def results() -> Results:
    return Results(
        "demo",
        {"cpu": "a processor", "gpu": "none", "threads": "2"},
        {"torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.7"},
        "2026-11-20",
        "0123456789ab",
        ROWS,
    )


def test_a_file_gives_the_same_table(results, tmp_path):
    path = tmp_path / "demo.json"
    results.save(path)
    assert Results.load(path).to_markdown() == results.to_markdown()
    assert list(json.loads(path.read_text())) == ["benchmark", "machine", "versions", "date", "commit", "rows", "unit"]


def test_long_paths_are_cut_to_the_width_of_the_terminal_but_not_in_the_file(results, tmp_path, monkeypatch):
    folder = "/a/folder/of/" + "models/" * 20 + "gpt2-own"
    rows = tuple(replace(row, case=f"{folder}, 8 x 128, float32") for row in ROWS)
    long, path = replace(results, rows=rows), tmp_path / "long.json"
    assert len(long.to_markdown().splitlines()[2]) > 200 and folder in long.to_markdown()
    for columns, width in ((None, 120), ("132", 132)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        _, table = long.for_terminal().split("\n\n")
        assert {len(line) for line in table.splitlines()} == {width}
        cell = table.splitlines()[2].split("|")[1]
        assert re.fullmatch(r" /a/fold.*\.\.\..*gpt2-own, 8 x 128, float32 ", cell)
    long.save(path)
    assert {row.case for row in Results.load(path).rows} == {row.case for row in rows}
    monkeypatch.setenv("COLUMNS", "20")  # too narrow for the numbers: a path stays legible
    assert " /a/folde.../gpt2-own, 8 x 128, float32 " in long.for_terminal()
    assert results.for_terminal() == results.to_markdown()


def test_a_row_is_a_line_that_says_what_there_is_to_say(results, tmp_path):
    path = tmp_path / "demo.json"
    results.save(path)
    line = next(line for line in path.read_text().splitlines() if "FusedSoftmax" in line)
    assert json.loads(line) == {
        "case": "gpt2 forward",
        "variant": "FusedSoftmax",
        "note": "attention runs as 'sdpa'",
    }


def test_measured_here_knows_where_it_is():
    here = Results.measured_here("demo", ROWS)
    assert here.machine["cores"] != "none"
    assert here.versions["torch"].startswith("2.")
    assert here.rows == ROWS


def test_where_nothing_is_timed_there_are_no_columns_for_it(results):
    rows = (Record("gpt2, 500 steps", "stock", note="3 seeds"), Record("gpt2, 500 steps", "training", note="inside"))
    table = replace(results, rows=rows).to_markdown().splitlines()[2:]
    assert [cell.strip() for cell in table[0].strip("|").split("|")] == ["work", "variant", "difference"]
    assert table[3].rstrip(" |").endswith("inside")


def test_the_table_shows_gains_and_that_there_is_none(results):
    head, table = results.to_markdown().split("\n\n")
    assert head == (
        "a processor, 2 threads; torch 2.13.0, transformers 5.23.0, python 3.11.7; 2026-11-20, commit 0123456789ab."
    )
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len({len(line) for line in table.splitlines()}) == 1
    assert lines[0] == ["work", "variant", "ms", "speed-up", "difference"]
    assert lines[2:] == [
        ["gpt2 forward", "stock", "200", "", ""],
        ["", "FusedGELU [cpu]", "100", "2.00x", "1.8e-07"],
        ["", "jit", "210", "1.00x (within noise)", "0.0e+00"],
        ["", "FusedSoftmax", "not run", "", "attention runs as 'sdpa'"],
    ]


def test_peak_memory_has_a_column_where_it_was_measured(results):
    rows = (replace(ROWS[0], peak_mib=1234.5), ROWS[1])
    table = replace(results, rows=rows).to_markdown()
    assert "| peak MiB |" in table
    assert "| 1234     |" in table


def test_what_was_measured_of_an_op_has_columns(results):
    milliseconds = (0.00123, 0.00125, 0.0013)
    rows = (
        Record("gelu", "cuda", milliseconds, bytes=2_500_000, wall_us=9.876, host_us=4.321, of_copy=0.954, auto=True),
        Record("gelu", "torch", milliseconds),
    )
    _, table = replace(results, rows=rows, unit="us").to_markdown().split("\n\n")
    header, _, cuda, torch = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert header == ["work", "variant", "us", "wall us", "host us", "GB/s", "of copy", "speed-up", "difference"]
    assert cuda == ["gelu", "cuda (auto)", "1.25", "9.88", "4.32", "2000", "0.95", "", ""]
    assert torch == ["", "torch", "1.25", "", "", "", "", "", ""]


def test_a_training_step_has_columns(results):
    rows = (
        Record("gpt2 training step", "stock", (100.0, 100.0, 100.0), tokens=16384, peak_mib=24269, of_floor=0.1519),
        Record("gpt2 training step", "fused", (50.0, 50.0, 50.0), tokens=16384, peak_mib=6144.0, first_seconds=23.44),
    )
    _, table = replace(results, rows=rows).to_markdown().split("\n\n")
    header, _, stock, fused = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    columns = ["work", "variant", "ms", "tokens/s", "of floor", "first s", "speed-up", "peak GiB", "difference"]
    assert header == columns
    assert stock[2:] == ["100", "163,840", "0.15", "", "", "23.70", ""]
    assert fused[2:] == ["50", "327,680", "", "23.4", "", "6.00", ""]


def test_what_was_measured_of_generate_has_columns(results):
    row = Record("gpt2", "generation", (0.1, 0.125, 0.13), first_seconds=1.234, first_token_us=1450.0)
    row = replace(row, tokens=1, of_floor=0.456, peak_mib=2048.0)
    _, table = replace(results, rows=(row,), unit="us").to_markdown().split("\n\n")
    header, _, cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert dict(zip(header, cells, strict=True)) == {
        "work": "gpt2",
        "variant": "generation",
        "us": "125",
        "first token us": "1450",
        "tokens/s": "8,000",
        "of floor": "0.46",
        "first s": "1.23",
        "speed-up": "",
        "peak GiB": "2.00",
        "difference": "",
    }


def test_what_a_static_cache_is_timed_beside_is_held_against_it(results):
    rows = (
        Record("gpt2", "stock", (9.0, 10.0, 11.0)),
        Record("gpt2", STATIC, (1.9, 2.0, 2.1), (4.0, 5.0, 6.0)),
        Record("gpt2", "generation", (0.1, 0.125, 0.13), (70.0, 80.0, 90.0)),
        Record("gpt2, 4 beams", "stock", (9.0, 10.0, 11.0)),
        Record("gpt2, sampled", STATIC, note="torch._dynamo.exc.Unsupported"),
        Record("gpt2, sampled", "generation", (0.1, 0.125, 0.13), (70.0, 80.0, 90.0)),
    )
    _, table = replace(results, rows=rows, unit="us").to_markdown().split("\n\n")
    header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    column = header.index("over static cache")
    assert [line[column] for line in lines] == ["0.20x", "", "16.00x", "", "", ""]


def test_where_auto_is_not_the_fastest_it_is_said_again_at_the_end(results):
    rows = (
        Record("gelu", "cuda", (1.0, 1.0, 1.0), auto=True, difference="1e-3", note="torch is 1.20x as fast"),
        Record("gelu", "triton", note="cannot"),
        Record("softmax", "cuda", (1.0, 1.0, 1.0), auto=True),
    )
    _, table, title, listed = replace(results, rows=rows).to_markdown().split("\n\n")
    assert "1e-3; torch is 1.20x as fast" in table
    assert [row.case for row in replace(results, rows=rows).of_auto().rows] == ["gelu", "softmax"]
    assert title == "Cases where `backend: auto` is not the fastest:"
    assert listed == "- gelu: cuda; torch is 1.20x as fast"


@pytest.mark.parametrize(
    ("speed_up", "note", "said"),
    [
        ((0.99, 0.992, 0.999), None, "torch.compile is 1.008x as fast"),
        ((0.99, 0.992, 1.0), None, None),
        ((0.99, 0.992, 1.0), "timed by a script", None),
        ((1.1, 1.2, 1.3), "triton is 1.020x as fast", "triton is 1.020x as fast"),
        ((0.98, 0.99, 0.99), "triton is 1.020x as fast", "torch.compile is 1.010x as fast; triton is 1.020x as fast"),
        ((0.98, 0.99, 0.99), "torch.compile is 1.01x as fast", "torch.compile is 1.01x as fast"),
    ],
)
def test_auto_is_behind_where_three_rounds_of_four_say_so(speed_up, note, said, results):
    rows = (
        Record("gelu", "cuda", (1.0, 1.0, 1.0), speed_up, auto=True, note=note),
        Record("gelu", "torch", (1.4, 1.5, 1.6)),
        Record("gelu", "torch.compile", (0.9, 0.99, 1.0)),
        Record("gelu", "copy", (0.5, 0.5, 0.5)),
        Record("softmax", "torch", (0.1, 0.1, 0.1)),
    )
    _, _, *listed = replace(results, rows=rows).to_markdown().split("\n\n")
    assert listed[1:] == ([] if said is None else [f"- gelu: cuda; {said}"])


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"rows": [{"case": "x", "colour": 1}]}'])
def test_what_is_no_result_file_is_refused(content, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="not a result file"):
        Results.load(path)


def test_a_missing_file_is_refused(tmp_path, results):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Results.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        results.save(tmp_path / "none" / "demo.json")
