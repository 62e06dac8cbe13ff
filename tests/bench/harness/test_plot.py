"""A result file as a picture."""

import dataclasses
import sys

import pytest

from fuseopt.bench.harness import plot
from fuseopt.bench.harness.bars import bars
from fuseopt.bench.harness.records import Record, Results
from fuseopt.cli import main
from fuseopt.errors import ConfigError

RESULTS = Results(
    "generate",
    {"cpu": "a processor", "gpu": "none", "threads": "2"},
    {"torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.7"},
    "2026-11-20",
    "0123456789ab",
    (
        Record("gpt2", "stock", (4.0, 4.6, 5.0)),
        Record("gpt2", "generation", (0.1, 0.13, 0.2), (30.0, 35.0, 40.0)),
        Record("gpt2", "static cache", note="cannot"),
        Record("t5", "stock", (9.0, 9.3, 10.0)),
        Record("t5", "generation", (9.0, 18.6, 20.0), (0.4, 0.5, 0.6)),
    ),
    "us",
)


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'fuseopt\[plot\]'"):
        plot.save(RESULTS, tmp_path / "a.png")
    # Before anything is timed, by every benchmark.
    for benchmark in ("ops", "tutorial", "generate", "kernels", "train", "forward", "scaling", "curves", "capacity"):
        assert main(["bench", benchmark, "--device", "cpu", "--plot", str(tmp_path / "a.png")]) == 2
        assert "a plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.gif", "a", "none/a.png"])
def test_a_file_that_cannot_be_a_plot_is_refused(name, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["bench", "train", "--plot", str(tmp_path / name)])
    wrong = "in a folder that does not exist" if "/" in name else "should end in .png, .svg or .pdf"
    assert wrong in capsys.readouterr().err


def test_what_was_timed_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "results.json", tmp_path / "picture.svg"
    RESULTS.save(results)
    assert main(["bench", "show", str(results), "--plot", str(picture)]) == 0
    assert f"drawn in {picture}" in capsys.readouterr().out
    drawn = picture.read_text()
    for text in ("gpt2", "t5", "stock", "generation", "1.00x, 4600 us", "35.00x, 130 us", "0.50x", "a processor"):
        assert f"<!-- {text}" in drawn or text in drawn
    assert "static cache" not in drawn
    assert main(["bench", "show", str(results), "--plot", str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        plot.save(RESULTS, tmp_path / "picture.what")


def test_bars_are_speed_ups_from_zero_on_a_linear_axis(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(plot, "_write", lambda figure, path: figures.append(figure))
    plot.save(RESULTS, tmp_path / "a.png")
    (axes,) = figures[0].axes
    assert axes.get_xscale() == "linear" and axes.get_xlim()[0] == 0
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 1), (0, 35), (0, 1), (0, 0.5)]


def test_no_variant_has_the_color_of_stock():
    colors = plot.colors_of(["stock", *map(str, range(20)), "stock"])
    assert len(colors) == 21 and len(set(colors.values())) == 10
    assert [name for name, color in colors.items() if color == colors["stock"]] == ["stock"]


@pytest.mark.parametrize(
    ("rows", "axis", "lengths"),
    [
        ([Record("a", "stock", (1.0, 2.0, 3.0)), Record("b", "x", (4.0, 5.0, 6.0))], "ms;", [2.0, 5.0]),
        ([Record("a", "stock", (0.1, 0.2, 0.3)), Record("b", "x", note="no")], "us;", [200.0]),
        ([Record("a", "stock", largest_batch=7), Record("a", "x", largest_batch=21)], "largest batch", [7, 21]),
        ([Record("a", "stock", difference="1.5e-03"), Record("a", "x", difference="tokens equal")], "diff", [1.5e-3]),
    ],
)
def test_without_speed_ups_bars_are_what_there_is(rows, axis, lengths):
    drawn = bars(dataclasses.replace(RESULTS, rows=tuple(rows)))
    assert drawn.axis.startswith(axis) and drawn.baseline is None
    assert [bar.length for bar in drawn.bars] == lengths


def test_without_a_number_there_is_nothing_to_draw(tmp_path):
    results = dataclasses.replace(RESULTS, rows=(Record("a", "stock", note="no"),))
    assert bars(results) is None
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot.save(results, tmp_path / "a.png")


def test_controls_of_an_op_are_compared_with_the_fastest_of_them():
    rows = (
        Record("op", "eager", (3.0, 4.0, 5.0)),
        Record("op", "torch", (1.0, 2.0, 3.0)),
        Record("op", "cuda", (0.5, 1.0, 2.0), (1.0, 2.0, 3.0)),
    )
    assert [bar.length for bar in bars(dataclasses.replace(RESULTS, rows=rows)).bars] == [0.5, 1.0, 2.0]


def test_bandwidth_is_drawn_below_that_of_a_copy(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        Record(f"mine::op {way}, {shape}, float32", variant, (time, time, time), bytes=size, of_copy=0.5)
        for way in ("fwd", "bwd")
        for shape, size in (("8x16", 1024), ("8x32", 2048))
        for variant, time in (("triton", 2.0), ("copy", 1.0))
    ]
    results = dataclasses.replace(RESULTS, rows=(*rows, Record(rows[0].case, "compile", note="not run")))
    results.plot(tmp_path / "picture.svg", "bandwidth")
    drawn = (tmp_path / "picture.svg").read_text()
    for text in (
        "mine::op fwd, float32",
        "mine::op bwd, float32",
        "8x16",
        "8x32",
        "triton",
        "copy",
        "GB/s",
        "a processor",
    ):
        assert f"<!-- {text}" in drawn or text in drawn
    assert "compile" not in drawn


def test_a_roofline_is_drawn_below_the_peaks_that_were_measured(tmp_path):
    pytest.importorskip("matplotlib")
    rows = (
        Record("mine::op fwd, 8x16, float32", "triton", (2.0, 2.0, 2.0), bytes=1024, flops=4096),
        Record("mine::op fwd, 8x16, float32", "copy", (1.0, 1.0, 1.0), bytes=1024),
        Record("peak of copy", "copy", (1.0, 1.0, 1.0), bytes=123_000_000),
        Record("peak of matmul, float32", "torch", (1.0, 1.0, 1.0), flops=4_567_000_000),
    )
    results, picture = dataclasses.replace(RESULTS, rows=rows), tmp_path / "roofline.svg"
    assert rows[0].gigaflops_per_second == pytest.approx(4096 / 2e-3 / 1e9)
    results.plot(picture, "roofline")
    drawn = picture.read_text()
    for text in ("copy, 123 GB/s", "matmul, float32: 4567 GFLOP/s", "triton", "FLOP / byte"):
        assert f"<!-- {text}" in drawn
    plot.save_bandwidth(results, picture)
    assert "peak" not in picture.read_text()


def test_a_roofline_needs_operations(tmp_path):
    with pytest.raises(ConfigError, match=r"give the op its operations by .flops"):
        plot.save_roofline(RESULTS, tmp_path / "roofline.svg")


def test_a_plot_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="shows times or bandwidth or roofline, not 'memory'"):
        RESULTS.plot(tmp_path / "picture.svg", "memory")
