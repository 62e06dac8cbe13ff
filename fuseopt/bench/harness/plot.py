"""Result files as plots: a bar chart, an op's bandwidth below that of a copy, and a roofline."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from fuseopt.bench.harness.bars import bars
from fuseopt.bench.harness.records import COPY, PEAK, Results, shortened
from fuseopt.errors import ConfigError

_LONGEST_NAME = 44


def check_available() -> None:
    """
    Raises:
        ConfigError: there is no matplotlib.
    """
    _pyplot()


def save(results: Results, path: str | os.PathLike[str]) -> None:
    """Draws a bar for each row into a file whose suffix chooses the format, such as .png or .svg.

    The bars are what `bars` chooses. They start at zero on a linear axis, so their lengths can be compared.

    Raises:
        ConfigError: there is no matplotlib, no row has such a number, or the file cannot be written.
    """
    drawn = bars(results)
    if drawn is None:
        raise ConfigError("there is nothing to draw: no row has a time, a batch size or a difference; see the table")
    pyplot = _pyplot()
    cases = list(dict.fromkeys(bar.row.case for bar in drawn.bars))
    names = [bar.row.variant.split(" [")[0] for bar in drawn.bars]
    colors = colors_of(names)
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.28 * (len(drawn.bars) + len(cases))), layout="constrained")
    longest = max(bar.length for bar in drawn.bars)
    place, ticks = 0, []
    for case in cases:
        axes.text(0, place, case, fontsize="small", fontweight="bold", verticalalignment="center")
        place += 1
        for bar in (bar for bar in drawn.bars if bar.row.case == case):
            axes.barh(place, bar.length, 0.8, color=colors[bar.row.variant.split(" [")[0]])
            axes.text(bar.length + longest / 100, place, bar.label, fontsize="small", verticalalignment="center")
            ticks.append((place, shortened(bar.row.variant, _LONGEST_NAME)))
            place += 1
    axes.set_yticks(*map(list, zip(*ticks, strict=True)), fontsize="small")
    axes.set(ylim=(place - 0.4, -0.6), xlim=(0, 1.25 * longest or 1), xlabel=drawn.axis)
    if drawn.baseline is not None:
        axes.axvline(drawn.baseline, color="gray", linestyle="--", linewidth=1)
    axes.set_title(_origin(results), fontsize="small")
    _write(figure, path)


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """Name -> one of matplotlib's ten colors. No other name has the color of the first, which is stock.

    Args:
        names: at least one.
    """
    first, *others = dict.fromkeys(names)
    return {first: "C0", **{name: f"C{1 + index % 9}" for index, name in enumerate(others)}}


def save_bandwidth(results: Results, path: str | os.PathLike[str]) -> None:
    """Draws the bandwidth of an op's variants at each size; a copy of as many bytes is the roof.

    One pair of axes for each op, direction and dtype.

    Raises:
        ConfigError: there is no matplotlib, or the file cannot be written.
    """
    pyplot = _pyplot()
    groups: dict[str, dict[str, dict[str, float]]] = {}  # op, direction and dtype -> variant -> size -> GB/s
    for row in results.rows:
        if row.gigabytes_per_second is not None and not row.case.startswith(PEAK):
            op, size, dtype = row.case.split(", ")
            groups.setdefault(f"{op}, {dtype}", {}).setdefault(row.variant, {})[size] = row.gigabytes_per_second
    figure, grid = pyplot.subplots(len(groups), figsize=(8, 0.5 + 3 * len(groups)), layout="constrained", squeeze=False)
    for axes, (name, variants) in zip(grid[:, 0], groups.items(), strict=True):
        for variant, points in variants.items():
            style = {"color": "black", "linestyle": "--"} if variant == COPY else {}
            axes.plot(list(points), list(points.values()), label=variant, marker="o", **style)
        axes.set(yscale="log", ylabel="GB/s")
        axes.set_title(name, fontsize="small")
        axes.legend(fontsize="small")
    figure.suptitle(_origin(results), fontsize="small")
    _write(figure, path)


def save_roofline(results: Results, path: str | os.PathLike[str]) -> None:
    """Draws floating-point operations per second against operations per byte, below the rates measured on the machine.

    The roofs are the rows that `peaks` (`fuseopt.bench.harness.roofline`) measured: a large copy's bandwidth, and the
    rate of a matmul in each dtype. In float32 the latter is that of fused multiply-adds, which elementwise kernels use.

    Raises:
        ConfigError: no row has operations, the roofs are not there, there is no matplotlib, or the file cannot be
            written.
    """
    points = [row for row in results.rows if row.flops and row.bytes and row.milliseconds]
    roofs = {row.case: row.gigaflops_per_second for row in results.rows if row.case.startswith(PEAK) and row.flops}
    copies = [row.gigabytes_per_second for row in results.rows if row.case.startswith(PEAK) and row.variant == COPY]
    if not points or not roofs or not copies or copies[0] is None:
        raise ConfigError("there is no roofline to draw: give the op its operations by .flops(...), then .bench() it")
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 6), layout="constrained")
    bandwidth = copies[0]
    places = [row.flops / row.bytes for row in points if row.flops and row.bytes]
    edges = [min(places) / 4, 4 * max(*places, max(rate or 0 for rate in roofs.values()) / bandwidth)]
    axes.plot(edges, [edge * bandwidth for edge in edges], color="black", label=f"copy, {bandwidth:.0f} GB/s")
    for case, rate in roofs.items():
        axes.axhline(rate, linestyle="--", color="gray")
        axes.annotate(f"{case.removeprefix(PEAK)}: {rate:.0f} GFLOP/s", (edges[0], rate), fontsize="x-small")
    for variant in dict.fromkeys(row.variant for row in points):
        mine = [row for row in points if row.variant == variant]
        intensity = [row.flops / row.bytes for row in mine if row.flops and row.bytes]
        axes.scatter(intensity, [row.gigaflops_per_second for row in mine], label=variant)
    axes.set(xscale="log", yscale="log", xlabel="FLOP / byte", ylabel="GFLOP/s", xlim=edges)
    axes.legend(fontsize="small")
    axes.set_title(_origin(results), fontsize="small")
    _write(figure, path)


def _origin(results: Results) -> str:
    place = results.machine["gpu"] if results.machine["gpu"] != "none" else results.machine["cpu"]
    return f"{results.benchmark}: {place}, {results.date}, commit {results.commit or 'unknown'}"


def _write(figure: Any, path: str | os.PathLike[str]) -> None:
    """Save the figure, whose suffix chooses the format, and close it."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    finally:
        _pyplot().close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'fuseopt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
