"""Measurements: what `initialize(model, "auto")` timed, as a table and as JSON types."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fuseopt.errors import printable

STOCK, COMPILED, KEPT, NOT_MEASURED = "stock", "torch.compile", "kept", "not measured: "
_WIDTH, _LONGEST_NAME, _MOST_LINES = 118, 48, 3
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


@dataclass(frozen=True)
class MeasuredChoice:
    """One way to run the model.

    Attributes:
        name: "stock", "torch.compile", or what its config fuses.
        seconds: median time of a call; None if it was not measured.
        speed_up: median over the rounds of stock's time divided by the time in the same round; None as `seconds`.
        note: "kept", or why the choice was not kept, or not measured.
        config: as JSON types; None for torch.compile, which no config has.
    """

    name: str
    seconds: float | None = None
    speed_up: float | None = None
    note: str = ""
    config: Mapping[str, Any] | None = None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        time = "" if self.seconds is None else duration(self.seconds)
        return self.name, time, "" if self.speed_up is None else f"{self.speed_up:.2f}x", self.note


@dataclass(frozen=True)
class Measurements:
    """What was measured for one model and one kind of call.

    Attributes:
        model: name of its class.
        work: the call, with the shapes of its inputs.
        device: the GPU, or the processor with its threads.
        date: day of the measurement, as YYYY-MM-DD.
        seconds: how long the measurement took.
        time_limit: in seconds.
        choices: in the order in which they were measured, stock first.
        source: "auto", or "bench" for a benchmark, which keeps nothing and has no time limit.
        noise: by what part stock timed against itself differs, so that a smaller gain is none; 0 if that is unknown.
        remembered: whether an earlier call measured this, whose result was read from the cache folder.
    """

    model: str
    work: str
    device: str
    date: str
    seconds: float
    time_limit: float
    choices: tuple[MeasuredChoice, ...]
    source: str = "auto"
    remembered: bool = False
    noise: float = 0.0

    @property
    def kept(self) -> MeasuredChoice:
        return next(choice for choice in self.choices if choice.note == KEPT)

    @property
    def is_complete(self) -> bool:
        """Whether every choice was measured before the time limit."""
        return not any(choice.note.startswith(NOT_MEASURED) for choice in self.choices)

    @property
    def summary(self) -> str:
        kept = self.kept
        outcome = "stock is the fastest" if kept.name == STOCK else f"{kept.name}, {kept.speed_up:.2f} times as fast"
        count = sum(choice.seconds is not None for choice in self.choices)
        when = f"on {self.date}" if self.remembered else f"in {self.seconds:.0f} s"
        return f"auto: {outcome}; {self.work}; {count} choices measured {when}"

    @property
    def heading(self) -> str:
        return f"measured {self.date} on {self.device}: {self.work}"

    def cells(self) -> list[tuple[str, str, str, str]]:
        """A table: its header, and a line for each choice."""
        noise = f"noise {self.noise:.0%}" if self.noise else ""
        return [("choice", "a call", "gain", noise), *(choice.cells for choice in self.choices)]

    def lines(self) -> Iterator[str]:
        """The heading and the table, at most 118 columns wide. Long texts are wrapped, to at most 3 lines."""
        yield from _wrapped(printable(self.heading), _WIDTH)
        table = [[printable(cell) for cell in line] for line in self.cells()]
        width = min(_LONGEST_NAME, max(len(name) for name, *_ in table))
        for name, time, gain, note in table:
            names = _wrapped(name, width)
            notes = textwrap.wrap(note, _WIDTH - width - 21, max_lines=_MOST_LINES, break_on_hyphens=False)
            for part, remark in itertools.zip_longest(names, notes, fillvalue=""):
                yield f"  {part:<{width}}  {time:>7}  {gain:>6}  {remark}".rstrip()
                time = gain = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; `from_dict` of it is equal."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Measurements:
        """
        Raises:
            TypeError, KeyError: it is no result of `to_dict`.
        """
        choices = tuple(MeasuredChoice(**choice) for choice in content["choices"])
        return cls(**{**content, "choices": choices})


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", max_lines=_MOST_LINES, break_on_hyphens=False)


def duration(seconds: float) -> str:
    """With three digits and the unit that fits: "1.14 s", "12.3 ms", "470 us"."""
    scale, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds / scale:.3g} {unit}"
