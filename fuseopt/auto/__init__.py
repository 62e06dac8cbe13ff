"""The config "auto": measured on the user's inputs. `decide` is what `initialize(model, "auto", inputs=...)` calls."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Mapping
from time import monotonic
from typing import Any

import torch
from torch import nn

from fuseopt import apply
from fuseopt.apply import Applied
from fuseopt.auto import remembered
from fuseopt.auto.search import Search
from fuseopt.auto.work import Work
from fuseopt.build import loader
from fuseopt.build.library_cache import CacheError
from fuseopt.config import Config
from fuseopt.errors import InputsError, shown
from fuseopt.measurements import Measurements
from fuseopt.plan import build_plan
from fuseopt.runtime import measured_files
from fuseopt.strategies import STRATEGIES

TIME_LIMIT = 180.0
"""Seconds after which a search begins no choice, by default."""


def decide(
    model: nn.Module, written: Mapping[str, Any], inputs: Any, generate: Any, time_limit: float | None
) -> tuple[Config, Applied | None, Measurements]:
    """The fastest config for the model and the inputs, the record that puts it in, and what was measured.

    The caller holds the model's lock, and the model is restored before the return. The record is None for an earlier
    result and for stock.

    Args:
        written: the blocks beside the preset "auto".
        inputs, generate, time_limit: as for `initialize`.

    Raises:
        InputsError: one of the arguments is wrong or missing.
    """
    limit = TIME_LIMIT if time_limit is None else time_limit
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise InputsError(f"time_limit: expected a number of seconds above 0, got {shown(time_limit)}")
    stock = apply.stock_view(model)
    work = Work.of(stock, inputs, generate)
    key = repr((work.key, sorted(written.items())))
    found = remembered.load(stock, key)
    if found is not None and (found.is_complete or limit <= found.time_limit):
        return Config.load(found.kept.config), None, found
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise InputsError(
            "config: 'auto' measures in one process, as several could choose differently; run it in a process of its "
            "own, and pass its fuseopt.report(model).config here"
        )
    for preset in ("inference", "training"):
        loader.load_all(build_plan(stock, Config.load(preset), STRATEGIES).native_libraries)
    start = monotonic()
    search = Search(model, work, written, limit)
    best = search.run()
    device = measured_files.device_name("cuda" if search.device.type == "cuda" else "cpu")
    measured = Measurements(
        type(model).__name__,
        work.name,
        device,
        datetime.date.today().isoformat(),
        monotonic() - start,
        limit,
        tuple(search.rows.values()),
        noise=search.noise,
    )
    try:
        remembered.save(apply.stock_view(model), key, measured)
    except (CacheError, OSError) as error:
        warnings.warn(f"fuseopt: what 'auto' measured is not kept for later calls: {error}", stacklevel=4)
    if best.record is not None:
        apply.forget_calls(best.record)
    return best.choice.config, best.record, measured
