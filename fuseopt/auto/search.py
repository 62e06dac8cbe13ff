"""Search: times stock and the choices of a model, and finds the fastest that is right.

Greedy, not exhaustive: the presets, their parts and each kernel alone are timed against stock; the fastest of them is
then changed in one place at a time, each change timed against the best so far and taken if it is faster. So the number
of choices grows with the number of kernels, not with the number of their combinations; two changes that only gain
together are not found. The best is timed again; if it is not faster then, the next-fastest of the starts is, and so on.

All of them run on the user's model, which is switched between records (`fuseopt.apply.put`): two are timed in turns, so
that a machine that slows down slows both.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import nn

from fuseopt import api, apply, verify_runs
from fuseopt.apply import Applied
from fuseopt.auto import progress
from fuseopt.auto.choices import NOTHING, Choice, Choices
from fuseopt.auto.work import Kind, Work
from fuseopt.measurements import COMPILED, KEPT, NOT_MEASURED, STOCK, MeasuredChoice
from fuseopt.runtime import announcements, timer
from fuseopt.runtime.timer import Spread, Timing
from fuseopt.verify import References

LEAST_GAIN = 1.02
"""The median speed-up that a choice needs; the lower quartile of its rounds must be above 1 too."""

_ROUNDS = 9
_ROUNDS_SHARE = 0.05  # of the time limit: after it no round of a choice begins but the first three
_SLOW = 1.5  # a choice that takes so many times its baseline's time in the first round gets no others
# Samples of short calls repeat the call, more often while stock timed against itself differs by the least gain.
_SAMPLE_SECONDS, _LONGEST_SAMPLE_SECONDS = 0.02, 0.08
_SHORT_SECONDS = 0.5  # a longer call is not timed against itself, which would take half a minute
# Untimed calls before a choice is timed: on a GPU later calls are captured as CUDA graphs.
_WARM_UP = {"cuda": 4}
_COMPILE_SECONDS = 60.0


@dataclass(frozen=True)
class Best:
    """The fastest choice so far: the record that puts it into the model, and its speed-up over stock."""

    choice: Choice
    record: Applied | None
    speed_up: float = 1.0


@dataclass(frozen=True)
class _Way:
    """The work, run with the replacements of one record in the model."""

    model: nn.Module
    record: Applied | None
    work: Callable[[], None]

    def __call__(self) -> None:
        apply.put(self.model, self.record)
        self.work()


class Search:
    """One search. Inside `run` the model changes; afterwards it is as it was.

    Args:
        model: locked, on any device.
        written: the blocks beside the preset "auto".
        time_limit: in seconds. No choice is begun after it, or if its compiler would take longer than is left.

    Attributes:
        device: of the model's first parameter; a CPU if it has none.
        rows: what was measured, by name of the choice.
        noise: by what part stock timed against itself differs; a smaller gain is none. 0 if the call is long.
    """

    def __init__(self, model: nn.Module, work: Work, written: Mapping[str, Any], time_limit: float) -> None:
        self._model, self._work, self._written, self._limit = model, work, written, time_limit
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._warm_up, self._repetitions = _WARM_UP.get(self.device.type, 1), 1
        self._references: References | None = None
        self._starts: list[Choice] = []
        self.rows: dict[str, MeasuredChoice] = {}
        self.noise = 0.0

    def run(self) -> Best:
        """The fastest choice that is right; stock if none is faster than it beyond the noise.

        Raises:
            InputsError: the model cannot be compared with a float64 copy; see `fuseopt.verify`.
        """
        self._start = monotonic()
        with apply.as_found_after(self._model), progress.bar(self._limit) as self._bar, progress.quiet():
            if self._bar.disable:
                limit = f"no further choice is timed after {self._limit:g} s"
                announcements.announce(f"auto: measuring {self._work.name}; {limit}")
            apply.put(self._model, None)
            with verify_runs.state_kept(self._model):
                return self._found()

    def _found(self) -> Best:
        best = stock = self._timed_stock()
        choices = Choices(self._model, self._work.kind, self._written)
        for choice in choices.starts():
            best = self._better(choice, stock, best)
            self._starts.append(choice)
        if best is not stock:
            start = best
            slower = {name for name, row in self.rows.items() if (row.speed_up or 1.0) < 1 / LEAST_GAIN}
            for what, edit in choices.edits(start.choice, slower):
                changed = choices.edited(best.choice, what, edit)
                if changed is not None:
                    best = self._better(changed, best, best)
            best = self._confirmed(best, stock) or self._next_confirmed(stock)
        self._time_compiled(stock, best)
        self._note(best, KEPT)
        return best

    def _timed_stock(self) -> Best:
        way = self._way(None)
        try:
            for _ in range(self._warm_up):
                way()
            seconds = timer.work_seconds(way, self.device)
            self._repetitions = max(1, math.ceil(_SAMPLE_SECONDS / seconds))
            seconds = statistics.median(self._sample(way) for _ in range(3))
            if seconds < _SHORT_SECONDS:
                self._find_noise(way, seconds)
        except Exception as error:
            error.add_note("auto: raised by the stock model, before anything was replaced; check the inputs")
            raise
        self.rows[STOCK] = MeasuredChoice(STOCK, seconds, 1.0, config=NOTHING.to_dict())
        return Best(Choice(STOCK, NOTHING), None)

    def _find_noise(self, stock: _Way, seconds: float) -> None:
        """Sets `noise`, and more repetitions if they make it less than the least gain."""
        while True:
            _, spread = self._raced(stock, Best(Choice(STOCK, NOTHING), None))
            self.noise = max(abs(spread.median - 1), (spread.high - spread.low) / 2)
            if self.noise < LEAST_GAIN - 1 or 2 * self._repetitions * seconds > _LONGEST_SAMPLE_SECONDS:
                return
            self._repetitions *= 2

    def _is_faster(self, spread: Spread) -> bool:
        return spread.low > 1 and spread.median >= max(LEAST_GAIN, 1 + self.noise)

    def _better(self, choice: Choice, baseline: Best, best: Best) -> Best:
        """The choice, timed in turns with `baseline`, if it is faster than both and right; else `best`."""
        self._show(choice.name)
        row = MeasuredChoice(choice.name, config=choice.config.to_dict())
        self.rows[choice.name] = self._unmeasured(row, choice.compile_seconds) or row
        if self.rows[choice.name].note:
            return best
        try:
            record = self._built(choice)
            seconds, spread = self._raced(self._way(record), baseline)
        except Exception as error:
            self.rows[choice.name] = dataclasses.replace(row, note=_failed(error))
            return best
        finally:
            apply.put(self._model, None)
        found = Best(choice, record, baseline.speed_up * spread.median)
        is_within = spread.high >= 1 and not self._is_faster(spread)
        note = f"within noise of {baseline.choice.name}" if is_within else ""
        self.rows[choice.name] = dataclasses.replace(row, seconds=seconds, speed_up=found.speed_up, note=note)
        if self._is_faster(spread) and found.speed_up > best.speed_up and self._is_right(found):
            return found
        return best

    def _built(self, choice: Choice) -> Applied | None:
        """The record that puts the choice into the model. A step that cannot be compiled raises under it."""
        self._forget()
        apply.apply_plan(self._model, api.plan_with_libraries(self._model, choice.config))
        apply.be_strict(self._model, True)
        return apply.applied_to(self._model)

    def _forget(self) -> None:
        """Frees the GPU memory of a choice that was not kept."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _way(self, record: Applied | None) -> _Way:
        return _Way(self._model, record, functools.partial(self._work, self._model))

    def _raced(self, way: _Way, baseline: Best) -> tuple[float, Spread]:
        """Median seconds of `way`, and its speed-up over `baseline` round by round."""
        for _ in range(self._warm_up):
            way()
        calls = {"baseline": self._way(baseline.record), "choice": way}
        race = functools.partial(timer.time_in_turns, calls, self._sample, warm_up=0)  # type: ignore[arg-type]
        first, more = race(rounds=1), None
        if first["choice"].speed_up_over(first["baseline"]).median > 1 / _SLOW:
            more = race(rounds=_ROUNDS - 1, seconds=_ROUNDS_SHARE * self._limit)
        timings = {name: Timing(taken.samples + (more[name].samples if more else ())) for name, taken in first.items()}
        return timings["choice"].seconds.median, timings["choice"].speed_up_over(timings["baseline"])

    def _sample(self, way: _Way) -> float:
        """Seconds of a call under the way's record; the model has been switched to it before the clock starts."""
        apply.put(self._model, way.record)
        if self._repetitions > 1:
            way.work()
        return timer.work_seconds(way.work, self.device, self._repetitions)

    def _is_right(self, found: Best) -> bool:
        """Whether `found` is as exact as `verify` demands; else its row says what is not."""
        apply.put(self._model, None)
        if self._references is None:
            work = self._work
            trains = work.kind is Kind.TRAINING
            self._references = References(self._model, work.inputs, trains, work.prompt, work.generate)
        try:
            apply.put(self._model, found.record)
            checked = self._references.compared(self._model)
            problem = None if checked.ok else f"not right: {checked.problem}"
        except Exception as error:
            problem = _failed(error)
        finally:
            apply.put(self._model, None)
        if problem is not None:
            self._note(found, problem)
        return problem is None

    def _confirmed(self, best: Best, stock: Best) -> Best | None:
        """`best` timed against stock itself; None if it is not faster."""
        seconds, spread = self._raced(self._way(best.record), stock)
        row = dataclasses.replace(self.rows[best.choice.name], seconds=seconds, speed_up=spread.median)
        self.rows[best.choice.name] = row
        if self._is_faster(spread):
            return dataclasses.replace(best, speed_up=spread.median)
        self._note(best, "within noise of stock when timed again")
        return None

    def _next_confirmed(self, stock: Best) -> Best:
        """The fastest start that is right and faster than stock when timed again; stock if none is.

        Starts are built again, since their records were not kept: those would take up GPU memory.
        """
        # A note says why a start did not win: it failed, was not right, or was within the noise of stock.
        won = [start for start in self._starts if not (row := self.rows[start.name]).note and (row.speed_up or 0) > 1]
        for choice in sorted(won, key=lambda start: self.rows[start.name].speed_up or 0, reverse=True):
            row = self.rows[choice.name]
            if self._unmeasured(row, choice.compile_seconds):
                continue
            self._show(choice.name)
            try:
                found = Best(choice, self._built(choice))
                confirmed = self._confirmed(found, stock) if self._is_right(found) else None
            except Exception as error:
                self.rows[choice.name] = dataclasses.replace(row, note=_failed(error))
                continue
            finally:
                apply.put(self._model, None)
            if confirmed is not None:
                return confirmed
        return stock

    def _time_compiled(self, stock: Best, best: Best) -> None:
        """A row for torch.compile of the stock model, which no config has: the user can call it."""
        self._show(COMPILED)
        row = MeasuredChoice(COMPILED)
        work, model = self._work, self._model
        if work.generate is not None:
            work = dataclasses.replace(work, generate={**work.generate, **self._compiled_generate()})
            if self._beams > 1:
                row = dataclasses.replace(row, note="transformers does not compile beam search")
        row = self._unmeasured(row, _COMPILE_SECONDS) or row
        if not row.note:
            attributes = set(vars(model))
            try:
                compiled: Any = model if work.generate is not None else torch.compile(model)
                seconds, spread = self._raced(_Way(model, None, functools.partial(work, compiled)), stock)
                note = "no config can select it: call torch.compile(model)" if spread.median > best.speed_up else ""
                row = dataclasses.replace(row, seconds=seconds, speed_up=spread.median, note=note)
            except Exception as error:
                row = dataclasses.replace(row, note=_failed(error))
            finally:
                for name in set(vars(model)) - attributes:  # transformers stores its compiled call on the model
                    delattr(model, name)
        self.rows[COMPILED] = row

    @property
    def _beams(self) -> int:
        settings = self._model.generation_config.to_dict() | (self._work.generate or {})  # type: ignore[union-attr,operator]
        return settings.get("num_beams") or 1

    def _compiled_generate(self) -> dict[str, Any]:
        """Arguments of `generate()` that make transformers compile the forward, on a CPU too."""
        if self.device.type != "cpu":
            return {"cache_implementation": "static"}
        from transformers import CompileConfig

        compiler = CompileConfig(backend="inductor", mode="default")
        compiler._compile_all_devices = True
        return {"cache_implementation": "static", "compile_config": compiler}

    def _show(self, name: str) -> None:
        """Moves the bar to the elapsed time, and names the choice that is begun."""
        self._bar.set_postfix_str(name, refresh=False)
        self._bar.update(min(self._passed(), self._limit) - self._bar.n)

    def _passed(self) -> float:
        return monotonic() - self._start

    def _unmeasured(self, row: MeasuredChoice, seconds: float) -> MeasuredChoice | None:
        """The row of a choice that takes at least `seconds`, if the time limit leaves less."""
        left = self._limit - self._passed()
        if left > seconds:
            return None
        why = "after the time limit" if left <= 0 else "the compiler needs more time than is left"
        return dataclasses.replace(row, note=row.note or f"{NOT_MEASURED}{why} ({self._limit:g} s)")

    def _note(self, best: Best, note: str) -> None:
        self.rows[best.choice.name] = dataclasses.replace(self.rows[best.choice.name], note=note)


def _failed(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"failed: {type(error).__name__}: {first}"
