"""A result file as a bar chart: one group of bars per case, one bar per variant."""

from __future__ import annotations

import os
from typing import Any

from fuseopt.bench.harness.records import Results
from fuseopt.errors import ConfigError


def check_available() -> None:
    """
    Raises:
        ConfigError: there is no matplotlib.
    """
    _pyplot()


def save(results: Results, path: str | os.PathLike[str]) -> None:
    """Draws all medians into a file whose suffix chooses the format; lower is better.

    Raises:
        ConfigError: there is no matplotlib, or the file cannot be written.
    """
    pyplot = _pyplot()
    rows = [row for row in results.rows if row.milliseconds is not None]
    cases, variants = (list(dict.fromkeys(names)) for names in zip(*((r.case, r.variant) for r in rows), strict=True))
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.25 * len(rows)), layout="constrained")
    height = 0.8 / len(variants)
    for index, variant in enumerate(variants):
        mine = [row for row in rows if row.variant == variant]
        places = [cases.index(row.case) + index * height for row in mine]
        times = [row.milliseconds[1] * (1000 if results.unit == "us" else 1) for row in mine if row.milliseconds]
        axes.bar_label(axes.barh(places, times, height, label=variant), fmt="%.4g", fontsize="small")
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(cases))], cases, fontsize="small")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(results.unit)
    axes.legend()
    place = results.machine["gpu"] if results.machine["gpu"] != "none" else results.machine["cpu"]
    axes.set_title(
        f"{results.benchmark}: {place}, {results.date}, commit {results.commit or 'unknown'}", fontsize="small"
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'fuseopt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
