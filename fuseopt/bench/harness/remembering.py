"""Keeps what a benchmark measured of a model beside what "auto" measures, so that plans say the gain."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

import fuseopt
from fuseopt.auto import remembered
from fuseopt.auto.choices import effective
from fuseopt.bench.harness import progress
from fuseopt.bench.harness.records import STOCK
from fuseopt.bench.harness.workloads import ModelCase
from fuseopt.build.library_cache import CacheError
from fuseopt.measurements import MeasuredChoice, Measurements
from fuseopt.runtime import measured_files
from fuseopt.runtime.timer import Timing


def remember(case: object, timings: Mapping[str, Timing], device: torch.device) -> None:
    """Keeps the speed-up of each config of a `ModelCase` over stock, if its model is one of transformers.

    Args:
        timings: by the names of the case's calls, which are those of its configs with the backends that ran.
    """
    if not isinstance(case, ModelCase) or STOCK not in timings or not measured_files.is_wanted():
        return
    model, stock = case.model(), timings[STOCK]
    if not isinstance(model, PreTrainedModel):
        return
    choices = [MeasuredChoice(STOCK, stock.seconds.median, 1.0)]
    for label, timing in timings.items():
        name = label.partition(" [")[0]
        if name in case.configs:
            config = effective(fuseopt.plan(model, case.configs[name])).to_dict()
            speed_up = timing.speed_up_over(stock).median
            choices.append(MeasuredChoice(name, timing.seconds.median, speed_up, config=config))
    place, date = measured_files.device_name(device.type), datetime.date.today().isoformat()
    measured = Measurements(type(model).__name__, case.name, place, date, 0.0, 0.0, tuple(choices), "bench")
    try:
        remembered.save(model, f"bench {case.name}", measured)
    except (CacheError, OSError) as error:
        progress.say(f"what was measured is not kept for plans: {error}")
