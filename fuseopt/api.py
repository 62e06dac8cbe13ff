"""`fuseopt.initialize` and the functions beside it, which the package re-exports."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import nn

from fuseopt import apply
from fuseopt.build import loader
from fuseopt.config import Config, as_written, beside_auto
from fuseopt.errors import InputsError, NotAModelError, printable
from fuseopt.plan import Plan, build_plan
from fuseopt.report import Report
from fuseopt.runtime import announcements
from fuseopt.strategies import STRATEGIES
from fuseopt.verify import Verification, verify

if TYPE_CHECKING:
    from fuseopt.auto.planned import AutoPlan

__all__ = [
    "Config",
    "Plan",
    "Report",
    "Verification",
    "fused",
    "initialize",
    "plan",
    "report",
    "restore",
    "verify",
]

ModelT = TypeVar("ModelT", bound=nn.Module)
ConfigSource = Config | Mapping[str, Any] | str | os.PathLike[str] | None

announcements.install()


def initialize(
    model: ModelT,
    config: ConfigSource = None,
    *,
    strict: bool = False,
    inputs: Mapping[str, Any] | None = None,
    generate: Mapping[str, Any] | None = None,
    time_limit: float | None = None,
) -> ModelT:
    """Replaces parts of `model` by faster ones, in place, as `config` says, and returns the model.

    The model keeps its class, Parameters, state_dict keys, config, hooks and `generate()` arguments. Called again with
    an equal config it changes nothing; with another one it restores the model first. Native libraries that the plan
    needs are built here, once per machine, and never later. The logger "fuseopt" says in a line what was done.

    With the config "auto" it measures stock, torch.compile, the presets, the decode loop, each kernel alone, and then
    changes of the best of them, on `inputs`. It keeps what is faster than stock beyond the noise and as exact as
    `verify` demands, or leaves the model stock. What is measured is a forward without gradients; for a model in
    training mode a training step, without the optimizer, which needs labels in `inputs`; with `generate` a call of
    `generate()`. An autocast context around the call holds. The report has the times, and its `config` the config,
    which can be passed to other calls. Results are kept in the cache folder, for this machine, versions, model and
    shapes; with the environment variable FUSEOPT_MEASURED=0 they are neither read nor kept.

    Args:
        model: any nn.Module; transformers models gain the most. On any device.
        config: a dict, JSON text or the path of a JSON file, a preset ("inference", "training", "reference"), a Config,
            or None for the preset "inference". "auto" measures; in a dict, as {"preset": "auto", ...}, the other keys
            hold for everything that is measured.
        strict: raise if something the config names cannot be done, instead of warning and reporting it. A training step
            is compiled when it is first called; if that fails, the call raises CompileError.
        inputs: for "auto": keyword arguments of the model's forward, on its device, such as a tokenizer returns.
        generate: for "auto": keyword arguments of `model.generate` besides `inputs`, such as {"max_new_tokens": 64}.
        time_limit: for "auto": no choice is begun after so many seconds, by default 180, and none whose compiler would
            take longer than is left. The report says what was not measured.

    Raises:
        NotAModelError: `model` is no nn.Module.
        ConfigError: `config` is wrong; the message names the key and the fix.
        InputsError: `inputs`, `generate` or `time_limit` is wrong, missing for "auto" or given without it.
        PlanError: under `strict`, something asked for by name cannot be done.
        ApplyError: a replacement failed. After any of these the model is as it was.
    """
    source = as_written(config)
    written = beside_auto(source)
    if written is not None:
        return _initialize_auto(model, written, strict, inputs, generate, time_limit)
    for name, value in (("inputs", inputs), ("generate", generate), ("time_limit", time_limit)):
        if value is not None:
            raise InputsError(f"{name}: only the config 'auto' measures; leave it out, or pass config='auto'")
    done = initialize_silently(model, source, strict)
    if done is not None and done.replacements:
        announcements.announce(f"{done.summary}; fuseopt.report(model) says more")
    return model


def _initialize_auto(
    model: ModelT, written: Mapping[str, Any], strict: bool, inputs: Any, generate: Any, time_limit: float | None
) -> ModelT:
    from fuseopt import auto

    _check_model(model)
    with apply.lock(model):
        before = apply.applied_to(model)
        try:
            config, record, measured = auto.decide(model, written, inputs, generate, time_limit)
            if record is None:
                initialize_silently(model, config, strict)
                record = apply.applied_to(model)
            assert record is not None
            apply.put(model, replace(record, report=replace(record.report, measured=measured)), stacklevel=4)
            apply.be_strict(model, strict)
        except BaseException:
            apply.put(model, before)
            raise
    lines = () if measured.remembered else measured.lines()
    done = f"{measured.summary}; {report(model).summary}; fuseopt.report(model) says more"
    announcements.announce("\n".join((*lines, done)))
    return model


def initialize_silently(model: nn.Module, config: ConfigSource, strict: bool) -> Plan | None:
    """`initialize` without its line; returns the plan that was applied, None if the model was fused like that."""
    wanted = Config.load(config)
    _check_model(model)
    with apply.lock(model):
        before = apply.applied_to(model)
        if before is not None and before.report.config == wanted:
            if strict:
                plan(model, wanted).check_strict()
            apply.be_strict(model, strict)
            return None
        try:
            apply.put(model, None, stacklevel=4)
            decided = plan_with_libraries(model, wanted)
            if strict:
                decided.check_strict()
            apply.apply_plan(model, decided)
            apply.be_strict(model, strict)
            _warn_unmet(decided)
        except BaseException:
            apply.put(model, before)
            raise
    return decided


@overload
def plan(  # type: ignore[overload-overlap]
    model: nn.Module, config: Literal["auto"], *, verbose: bool = ...
) -> AutoPlan: ...


@overload
def plan(model: nn.Module, config: ConfigSource = ..., *, verbose: bool = ...) -> Plan: ...


def plan(model: nn.Module, config: ConfigSource = None, *, verbose: bool = False) -> Plan | AutoPlan:
    """What `initialize(model, config)` would do, without doing it; works on the meta device too.

    A model that is fused already is planned as it was before. If `verbose`, the plan prints every candidate and every
    reason. If "auto" or a benchmark has measured this config for such a model here, the plan says the gain. For "auto",
    as the config or as the preset of a dict, it lists what would be measured and what was measured on this machine.

    Raises:
        NotAModelError, ConfigError: as `initialize`.
    """
    source = as_written(config)
    written = beside_auto(source)
    wanted = Config.load(source if written is None else None)
    _check_model(model)
    from fuseopt.auto import remembered
    from fuseopt.auto.planned import AutoPlan

    with apply.lock(model):
        if written is not None:
            return AutoPlan.of(apply.stock_view(model), written, verbose=verbose)
        stock = apply.stock_view(model)
        decided = build_plan(stock, wanted, STRATEGIES)
        return replace(decided, expected=tuple(remembered.expected(stock, decided)), verbose=verbose)


def report(model: nn.Module, *, verbose: bool = False) -> Report:
    """What was done to `model`; an empty Report when nothing was. If `verbose`, it prints every reason.

    Raises:
        NotAModelError: `model` is no nn.Module.
    """
    _check_model(model)
    applied = apply.applied_to(model)
    return replace(Report(type(model).__name__) if applied is None else applied.report_now(model), verbose=verbose)


def restore(model: ModelT) -> ModelT:
    """Puts every original object back and returns the model. A model that is not fused is left alone.

    Raises:
        NotAModelError: `model` is no nn.Module.
    """
    _check_model(model)
    with apply.lock(model):
        apply.put(model, None)
    return model


@contextmanager
def fused(model: ModelT, config: ConfigSource = None, *, strict: bool = False) -> Iterator[ModelT]:
    """`initialize` for the length of a with block; at its end the model is as it was at its start, fused or not.

    Raises:
        As `initialize`.
    """
    _check_model(model)
    with apply.as_found_after(model):
        initialize_silently(model, config, strict)
        yield model


def plan_with_libraries(model: nn.Module, config: Config) -> Plan:
    decided = build_plan(model, config, STRATEGIES)
    states = loader.load_all(decided.native_libraries)
    if all(state.status == "loaded" for state in states):
        return decided
    # A library that could not be had is now known to be absent, with its reason: decide again without it.
    return build_plan(model, config, STRATEGIES)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise NotAModelError(
            f"expected a torch.nn.Module, such as a transformers model, got {type(model).__name__}; "
            "load one with AutoModelForCausalLM.from_pretrained(...) first"
        )


def _warn_unmet(decided: Plan) -> None:
    for message in decided.unmet:
        warnings.warn(f"fuseopt: {printable(message)}", stacklevel=4)
