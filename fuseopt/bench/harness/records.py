"""Result files: rows with machine, versions, date and commit, and the table made from them."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseopt.errors import ConfigError
from fuseopt.tables import WIDTH, clipped

if TYPE_CHECKING:
    from fuseopt.runtime.timer import Timing

_LONGEST_NAME = 100  # in a table
_PATH = re.compile(r"[^\s,;|]*/[^\s,;|]*")
_SHORTEST_PATH = 20

STOCK = "stock"
COPY = "copy"
PEAK = "peak of "
FAILED = "failed: "
STATIC = "static cache and torch.compile"
CONTROLS = frozenset({STOCK, STATIC, "reference", "eager", "torch", "torch.compile", COPY})
"""Variants without fuseopt's code. If they become slower, the machine did."""


@dataclass(frozen=True)
class Record:
    """The result of one variant of one case.

    Attributes:
        case: the work, with model or op, shapes and dtype.
        variant: the way it was done; "stock" is plain transformers.
        milliseconds: [lower quartile, median, upper quartile] of the time; None if it was not run.
        speed_up: the same quartiles of the speed-up over the case's baseline, round by round; None for the baseline.
        difference: of the result from stock's, such as "1.2e-06", the largest absolute difference, or "tokens equal".
            For an op: from its float64 reference, relative to the largest value.
        peak_mib: peak GPU memory of a call in MiB, above what was allocated before it.
        note: why a variant was not run, or another remark.
        wall_us: median time of one call on an idle GPU until its result is ready.
        host_us: median time until the call returns to the host.
        host_speed_up: for a forward, the quartiles of the speed-up of `host_us` over torch's own operation.
        bytes: bytes that a call must move at least; each tensor counts once.
        flops: floating-point operations of a call.
        of_copy: the time of a copy of as many bytes, divided by this time.
        auto: whether `backend: auto` takes this variant.
        tokens: tokens that a call processes or generates.
        of_floor: the lower bound on the time, divided by this time. The bound is the matmuls at their peak rate for
            training, and the reading of weights and caches for generate(), at the speed of a copy on a GPU and
            of a sum on a CPU.
        first_seconds: time of the first call, compilation included; for generate(), in a fresh process.
        first_token_us: median time of a call for one token.
        launches: launches of a kernel in a profiled step.
        kernel_us: median time from a kernel's start to its end. Kernels may overlap.
        share: share of all profiled time.
        largest_batch: rows of the largest batch that was tried and fits.
        weights_mib: memory of the parameters and of quantised copies of them.
        kl: Kullback-Leibler divergence of the next-token distribution from stock's over a text, in nats a token.
        same_top: share of the text's tokens whose most probable prediction is stock's.
        perplexity: of the text.
    """

    case: str
    variant: str
    milliseconds: tuple[float, float, float] | None = None
    speed_up: tuple[float, float, float] | None = None
    rounds: int = 0
    difference: str | None = None
    peak_mib: float | None = None
    note: str | None = None
    wall_us: float | None = None
    host_us: float | None = None
    host_speed_up: tuple[float, float, float] | None = None
    bytes: int | None = None
    flops: int | None = None
    of_copy: float | None = None
    auto: bool = False
    tokens: int | None = None
    of_floor: float | None = None
    first_seconds: float | None = None
    first_token_us: float | None = None
    launches: float | None = None
    kernel_us: float | None = None
    share: float | None = None
    largest_batch: int | None = None
    weights_mib: float | None = None
    kl: float | None = None
    same_top: float | None = None
    perplexity: float | None = None

    @classmethod
    def of(cls, case: str, variant: str, timing: Timing, baseline: Timing | None, **others: Any) -> Record:
        """The record of a timing, with its speed-up over `baseline` if there is one."""
        speed_up = None if baseline is None else timing.speed_up_over(baseline).scaled(1)
        return cls(case, variant, timing.seconds.scaled(1e3), speed_up, len(timing.samples), **others)

    @property
    def failed(self) -> bool:
        """Whether the call raised an exception, which the note names."""
        return self.note is not None and self.note.startswith(FAILED)

    @property
    def gigabytes_per_second(self) -> float | None:
        if self.bytes is None or self.milliseconds is None:
            return None
        return self.bytes / self.milliseconds[1] / 1e6

    @property
    def gigaflops_per_second(self) -> float | None:
        if self.flops is None or self.milliseconds is None:
            return None
        return self.flops / self.milliseconds[1] / 1e6

    @property
    def tokens_per_second(self) -> float | None:
        if self.tokens is None or self.milliseconds is None:
            return None
        return self.tokens / self.milliseconds[1] * 1e3


@dataclass(frozen=True)
class Results:
    """Content of a file under benchmarks/results. `unit` is the unit of times in the table, "ms" or "us"."""

    benchmark: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    date: str
    commit: str | None
    rows: tuple[Record, ...]
    unit: str = "ms"

    @classmethod
    def measured_here(cls, benchmark: str, rows: Sequence[Record], unit: str = "ms") -> Results:
        """Results measured today, on this machine and checkout."""
        from fuseopt.bench.harness import machine

        today = datetime.date.today().isoformat()
        return cls(benchmark, machine.machine(), machine.versions(), today, machine.commit(), tuple(rows), unit)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the results as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            Path(path).write_text(self._to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Reads what `save` wrote.

        Raises:
            ConfigError: no such file, or not a result file.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = tuple(Record(**row) for row in content.pop("rows"))
            return cls(rows=rows, **content)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a result file of fuseopt: {error}") from error

    def of_auto(self) -> Results:
        """The rows that `backend: auto` takes, one per case of an op's benchmark, with a note on what is faster."""
        rows = tuple(replace(row, note=_faster_than_auto(row, self.rows) or None) for row in self.rows if row.auto)
        return replace(self, rows=rows)

    def for_terminal(self) -> str:
        """`to_markdown` with long paths cut in the middle to fit the terminal, or 120 columns without a terminal."""
        return self.to_markdown(shutil.get_terminal_size((WIDTH, 0)).columns)

    def to_markdown(self, width: int | None = None) -> str:
        """`origin`, then a table that is aligned for reading as plain text.

        Args:
            width: most columns of text; long paths are cut in the middle to fit. None sets no limit.
        """
        cases = "".join(f"\n- {line}" for line in self.slower_auto)
        listed = f"\n\nCases where `backend: auto` is not the fastest:\n{cases}" if cases else ""
        return f"{self.origin}\n\n{_aligned(_with_short_paths(self.columns(), width))}{listed}"

    @property
    def origin(self) -> str:
        """Machine, versions, date and commit as one sentence."""
        on_gpu = self.machine["gpu"] != "none"
        place = self.machine["gpu"] if on_gpu else "{cpu}, {threads} thread".format_map(self.machine)
        place += "s" * (not on_gpu and self.machine["threads"] != "1")
        versions = ", ".join(f"{name} {self.versions[name]}" for name in ("torch", "transformers", "python"))
        return f"{place}; {versions}; {self.date}, commit {self.commit or 'unknown'}."

    @property
    def shown_unit(self) -> str:
        """The unit that fits the times: `unit`, but ms if none is below 1 ms, and us if all are."""
        times = [row.milliseconds[1] for row in self.rows if row.milliseconds is not None]
        if not times:
            return self.unit
        return "ms" if min(times) >= 1 else "us" if max(times) < 1 else self.unit

    def columns(self) -> dict[str, list[str]]:
        """The cells of the table by column, one for each row; only columns that say something."""
        return _columns(self.rows, self.shown_unit, self.machine["gpu"] != "none")

    @property
    def slower_auto(self) -> list[str]:
        """A line for each row that `backend: auto` takes although something else is faster."""
        said = ((row, _faster_than_auto(row, self.rows)) for row in self.rows if row.auto)
        return [f"{row.case}: {row.variant}; {faster}" for row, faster in said if "x as fast" in faster]

    def __str__(self) -> str:
        return self.to_markdown()

    def plot(self, path: str | os.PathLike[str], what: str = "times") -> None:
        """Draw the rows into a file whose suffix chooses the format.

        Args:
            what: "times"; "bandwidth" at each size of an op's benchmark, below that of a copy; or "roofline", of an op
                that gives its operations.

        Raises:
            ConfigError: there is no matplotlib, no such plot, nothing to draw, or the file cannot be written.
        """
        plots = importlib.import_module("fuseopt.bench.harness.plot")  # by name: it imports this module
        drawings = {"times": plots.save, "bandwidth": plots.save_bandwidth, "roofline": plots.save_roofline}
        if what not in drawings:
            raise ConfigError(f"a plot shows {' or '.join(drawings)}, not {what!r}")
        drawings[what](self, path)

    def _to_json(self) -> str:
        """JSON with one line per row; empty fields are left out."""
        head = json.dumps({**asdict(self), "rows": []}, indent=1)
        rows = ({key: value for key, value in asdict(row).items() if value not in (None, False)} for row in self.rows)
        listed = ",\n  ".join(map(json.dumps, rows))
        return head.replace('"rows": []', f'"rows": [\n  {listed}\n ]')


def shortened(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name cut in the middle if it is long, as names of kernels are."""
    return name if len(name) <= longest else f"{name[: longest // 2]} ... {name[-longest // 2 :]}"


def _columns(rows: Sequence[Record], unit: str, on_gpu: bool) -> dict[str, list[str]]:
    columns = {
        "work": [row.case for row in rows],
        "variant": [shortened(row.variant) + (" (auto)" if row.auto else "") for row in rows],
        unit: [_time(row, unit) for row in rows],
        "launches": [_number(row.launches) for row in rows],
        "start to end us": [_number(row.kernel_us) for row in rows],
        "share": ["" if row.share is None else f"{row.share:.2f}" for row in rows],
        f"first token {unit}": [_number(_in(unit, row.first_token_us, "us")) for row in rows],
        "wall us": [_number(row.wall_us) for row in rows],
        "host us": [_number(row.host_us) for row in rows],
        **_bandwidth(rows, on_gpu),
        "GFLOP/s": [_number(row.gigaflops_per_second) for row in rows],
        "of copy": ["" if row.of_copy is None else f"{row.of_copy:.2f}" for row in rows],
        "tokens/s": ["" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}" for row in rows],
        "of floor": ["" if row.of_floor is None else f"{row.of_floor:.2f}" for row in rows],
        "largest batch": ["" if row.largest_batch is None else str(row.largest_batch) for row in rows],
        "first s": [_number(row.first_seconds) for row in rows],
        "speed-up": [_speed_up(row) for row in rows],
        "over static cache": [_over_static_cache(row, rows) for row in rows],
        "weights MiB": [_number(row.weights_mib) for row in rows],
        "KL": [_number(row.kl) for row in rows],
        "same top": ["" if row.same_top is None else f"{row.same_top:.3f}" for row in rows],
        "perplexity": ["" if row.perplexity is None else f"{row.perplexity:.4g}" for row in rows],
        "peak MiB": ["" if row.peak_mib is None or row.tokens else f"{row.peak_mib:.0f}" for row in rows],
        "peak GiB": [f"{row.peak_mib / 1024:.2f}" if row.peak_mib is not None and row.tokens else "" for row in rows],
        "difference": ["; ".join(filter(None, (row.difference, row.note))) for row in rows],
    }
    always, times = {"work", "variant", "difference"}, {unit, "speed-up"}
    if any(row.milliseconds is not None for row in rows):
        always |= times
    else:
        columns = {name: cells for name, cells in columns.items() if name not in times}
    shown = {name: cells for name, cells in columns.items() if name in always or any(cells)}
    cases = shown["work"]
    shown["work"] = ["" if i and case == cases[i - 1] else case for i, case in enumerate(cases)]
    return shown


def _with_short_paths(shown: dict[str, list[str]], width: int | None) -> dict[str, list[str]]:
    """The cells with paths cut to the greatest common length at which the table is at most `width` wide."""
    longest = max((len(path) for cells in shown.values() for cell in cells for path in _PATH.findall(cell)), default=0)
    found = shown
    while width is not None and longest > _SHORTEST_PATH and sum(_widths(found)) + 3 * len(found) + 1 > width:
        longest -= 1
        found = {name: [_cut_paths(cell, longest) for cell in cells] for name, cells in shown.items()}
    return found


def _cut_paths(text: str, width: int) -> str:
    return _PATH.sub(lambda path: clipped(path[0], width), text)


def _widths(shown: Mapping[str, Sequence[str]]) -> list[int]:
    return [max(map(len, (name, *cells))) for name, cells in shown.items()]


def _aligned(shown: Mapping[str, Sequence[str]]) -> str:
    widths = _widths(shown)
    lines = [tuple(shown), tuple("-" * width for width in widths), *zip(*shown.values(), strict=True)]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _bandwidth(rows: Sequence[Record], on_gpu: bool) -> dict[str, list[str]]:
    """A column in TB/s, or for a CPU in GB/s."""
    rates = [row.gigabytes_per_second for row in rows]
    unit, size = ("TB/s", 1000) if on_gpu else ("GB/s", 1)
    return {unit: [_number(None if rate is None else rate / size) for rate in rates]}


def _faster_than_auto(row: Record, rows: Sequence[Record]) -> str:
    """A note on what is faster than this row in at least 3 of 4 rounds, by however little."""
    note = row.note or ""
    others = {
        other.milliseconds[1]: other.variant
        for other in rows
        if other.case == row.case and other.variant != COPY and other.speed_up is None and other.milliseconds
    }
    if not others or row.speed_up is None or row.speed_up[2] >= 1:
        return note
    fastest = others[min(others)]
    if f"{fastest} is" in note:  # as in files from when the timing said so
        return note
    return "; ".join(filter(None, (f"{fastest} is {1 / row.speed_up[1]:.3f}x as fast", note)))


def _time(row: Record, unit: str) -> str:
    if row.milliseconds is None:
        return "not run" if row.perplexity is None else ""
    return _number(_in(unit, row.milliseconds[1], "ms"))


def _in(unit: str, time: float | None, given: str) -> float | None:
    """A time in `given`, "ms" or "us", converted to `unit`."""
    if time is None or unit == given:
        return time
    return time * 1000 if unit == "us" else time / 1000


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _speed_up(row: Record) -> str:
    if row.speed_up is None:
        return ""
    low, median, high = row.speed_up
    return f"{median:.2f}x" + (" (within noise)" if low <= 1 <= high else "")


def _over_static_cache(row: Record, rows: Sequence[Record]) -> str:
    """Speed-up, by medians, over transformers' static cache with torch.compile."""
    static = next((other for other in rows if other.case == row.case and other.variant == STATIC), None)
    if static is None or static.milliseconds is None or row.milliseconds is None or row is static:
        return ""
    return f"{static.milliseconds[1] / row.milliseconds[1]:.2f}x"
