"""FusedGenerate: stands in for `generate` on one model instance."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch import nn

from fuseopt.config import GenerationOptions
from fuseopt.generation import tiers
from fuseopt.generation.engine.device_constants import KeptTensors
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.families.step_interface import DecodeStep, StepName, decode_step_class
from fuseopt.generation.hf.caching_proxy import RememberingModel
from fuseopt.generation.hf.fingerprint import Survey, survey
from fuseopt.generation.loop import DecodeLoop, Looked
from fuseopt.generation.prompt.early_prefill import HeadStart, Started
from fuseopt.generation.tiers import Call, Tier

_CALLS_KEPT = 8


class FusedGenerate:
    """Call: `generate()`'s arguments -> its result, errors and warnings, by the fastest tier that is exact for them.

    transformers' own generate() runs, with all of its preparation and validation; only the decoding method is
    exchanged (https://huggingface.co/docs/transformers/en/generation_strategies). Every call checks the model for
    changes, if possible while the device works. Deepcopy and pickle rebind it to the copy, without captured steps.

    The model holds this object, which refers to the model weakly, so `del model` frees both at once. If a caller has
    kept only the method (`load().generate(...)`), `model` is a new module of the same class with the same attributes.

    Args:
        model: an instance of the step's `model_class`.
        step: a class that fulfils DecodeStep, or its dotted path.
    """

    def __init__(self, model: nn.Module, step: StepName, options: GenerationOptions) -> None:
        self.__setstate__({"model": model, "step": step, "options": options})
        self._let_go(model)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "step": self._step_name, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has no attributes yet, so it is held strongly up to its first call, which reads them.
        self._held: nn.Module | None = state["model"]
        self._parts: dict[str, Any] = {}
        self._step_name: StepName = state["step"]
        self._step_class = decode_step_class(self._step_name)
        self.options: GenerationOptions = state["options"]
        self.graphs = StepGraphs(self.options.max_graphs)
        self._bind(state["model"])
        self._kept = KeptTensors()
        self.calls: deque[Call] = deque(maxlen=_CALLS_KEPT)
        self._lock = threading.Lock()
        functools.update_wrapper(self, type(self.model).generate, updated=())
        self.__signature__ = inspect.signature(type(self.model).generate.__get__(self.model))
        parameters = self.__signature__.parameters.values()
        # Of the rest generate() passes on to whom it may concern.
        self._names = tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            model = self._held = object.__new__(self._class)
            vars(model).update(self._parts)
            model.training = any(child.training for child in model.children())
            self._bind(model)
        return model

    @property
    def __self__(self) -> nn.Module:
        return self.model

    def _bind(self, model: nn.Module) -> None:
        self._model, self._class = weakref.ref(model), type(model)
        self._head_start = HeadStart(model, self.graphs, self.options.max_batch, self.options.max_length)
        self._remembering = RememberingModel(model)
        self._step: DecodeStep | None = None
        self._key: tuple[Hashable, ...] = ()
        self._survey: Survey | None = None

    def _let_go(self, model: nn.Module) -> None:
        """Holds the model's attributes instead of the model, except fuseopt's own objects, which may hold the model."""
        self._held = None
        self._parts = {
            name: part for name, part in vars(model).items() if not type(part).__module__.startswith("fuseopt.")
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        self._let_go(model)
        stock = type(model).generate
        given = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names) or not given.keys().isdisjoint(kwargs):
            return stock(model, *args, **kwargs)  # which has its own words for it
        given |= kwargs
        # Not waited for: what runs inside generate(), such as a criterion, may call it again.
        is_free = tiers.runs_unseen() and self._lock.acquire(blocking=False)
        try:
            reason, output = self._serve(stock, given, is_free)
        finally:
            if is_free:
                # Of the caller's tensors, nothing that is still to run may read any: they may be gone by then.
                if self._step is not None:
                    self.graphs.join(self._step.shape.device)
                self._lock.release()
        if not reason:
            return output
        self.calls.append(Call(Tier.STOCK, reason))
        return stock(model, *args, **kwargs)

    def _serve(self, stock: Any, given: dict[str, Any], is_free: bool) -> tuple[str, Any]:
        """Why the call has to be transformers' own, or nothing, and else what it comes to."""
        others = {name: value for name, value in given.items() if name not in self._names}
        is_in_place = is_free and self._is_in_place()
        guess = None
        if is_in_place and self._step is not None:
            guess = self._head_start.guess(self._step, given, others)
        reason = next(tiers.argument_reasons(self.model, given), None)
        reason = reason or next(tiers.model_reasons(self.model, self._step_class), None)
        if reason is None and not is_free:
            reason = "another call of generate() was running on this model"
        if reason is not None:
            return reason, None
        look = self._look if is_in_place else None
        if look is None:
            reason = self._look().reason
            if reason:
                return reason, None
        assert self._step is not None
        started = self._head_start(self._step, given, others, guess, looks=look is None)
        return "", self._decode(self._step, stock, given, started, look)

    def _decode(
        self, step: DecodeStep, stock: Any, given: dict[str, Any], started: Started, look: Callable[[], Looked] | None
    ) -> Any:
        options = self.options
        loop = DecodeLoop(
            self.model,
            step,
            self.graphs,
            self._kept,
            options.max_batch,
            options.max_length,
            given.get("streamer"),
            started,
            look,
        )
        own_methods = RememberingModel.METHODS.isdisjoint(vars(self.model))
        self._remembering.full_mask = given.get("attention_mask") if started.is_whole else None
        self._remembering.device = step.shape.device
        model = self._remembering if own_methods else self.model
        try:
            return stock(model, **{**given, **started.others, "custom_generate": loop})
        finally:
            self._head_start.remember(started.likeness, loop.plan)
            self._remembering.full_mask = None
            self.calls.append(replace(loop.served, note=loop.served.note or loop.started.note))

    def _is_in_place(self) -> bool:
        """Whether there is a step whose weights are where they were: it can run, though what it makes may be void."""
        return self._step is not None and self._survey is not None and self._survey.is_in_place()

    def _look(self) -> Looked:
        """Looks at what a step stands on, and makes one, and drops all graphs, where that has changed."""
        step_class, before, key = self._step_class, self._survey, self._key
        found = self._survey = survey(self.model, step_class.roots(self.model), step_class.children, before)
        if found.reason is not None:
            return Looked(self._step, found.reason)
        self._key = (*found.key, *step_class.constants(self.model))
        step, is_another = self._step, self._key != key
        if step is None or is_another:
            self.graphs.clear()
            step = self._step = step_class(self.model)
        is_confirmed = self._head_start.is_confirmed(step)
        return Looked(step, is_as_before=found is before and not is_another and is_confirmed)

    def report_lines(self) -> tuple[str, ...]:
        """What the report says of the last calls and of what is kept."""
        graphs = self.graphs
        size = f"{graphs.bytes / 2**20:.1f} MiB of static tensors"
        kept = f"{graphs.steps} captured steps and {graphs.prompts} captured prompts, {size}"
        return (*(f"generate(): {call}" for call in self.calls), f"generate(): {kept}")
