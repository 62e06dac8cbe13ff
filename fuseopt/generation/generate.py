"""FusedGenerate, which stands in for `generate` on a model instance and keeps what is reused from call to call.

Each call makes a `GenerateCall` (call.py), which has the stages of the call in order.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from collections import deque
from typing import Any

from torch import nn

from fuseopt.config import GenerationOptions
from fuseopt.generation import tiers
from fuseopt.generation.call import GenerateCall
from fuseopt.generation.engine.device_constants import DeviceConstantCache
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.engine.low_bit import LowBitWeights
from fuseopt.generation.engine.parked_weights import fetch_all
from fuseopt.generation.engine.quantised_cache import CACHE_DTYPES
from fuseopt.generation.families.step_interface import StepName, decode_step_class
from fuseopt.generation.hf.caching_proxy import CachingModelProxy
from fuseopt.generation.hf.checked_step import CheckedStep
from fuseopt.generation.prompt.early_prefill import EarlyPrefill
from fuseopt.generation.prompt.prefix_cache import PrefixCache
from fuseopt.generation.tiers import CallRecord, Tier
from fuseopt.runtime.references import Remembered

_MAX_RECORDS = 8


class FusedGenerate:
    """Call: `generate()`'s arguments -> its result, errors and warnings, by the fastest tier that is exact for them.

    transformers' own generate() runs, with all of its preparation and validation; only the decoding method is
    exchanged (https://huggingface.co/docs/transformers/en/generation_strategies). Deepcopy and pickle rebind this
    object to the copy of the model, without captured steps.

    The model holds this object, which references the model weakly, so `del model` frees both at once. If a caller has
    kept only the method (`load().generate(...)`), `model` is a new module of the same class with the same attributes.

    Args:
        model: an instance of the step's `model_class`.
        step: a class that fulfils DecodeStep, or its dotted path.

    Attributes:
        calls: records of the last calls.
        graphs, checked, early_prefill, constants, proxy: what is kept from call to call.
    """

    def __init__(self, model: nn.Module, step: StepName, options: GenerationOptions) -> None:
        self.__setstate__({"model": model, "step": step, "options": options})
        self._release(model)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "step": self._step_name, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A deepcopy or unpickled model has no attributes yet. It is held strongly until its first call can read them.
        self._held: nn.Module | None = state["model"]
        self._step_name: StepName = state["step"]
        self.options: GenerationOptions = state["options"]
        self.graphs = StepGraphs(self.options.max_graphs)
        self.constants = DeviceConstantCache()
        self.calls: deque[CallRecord] = deque(maxlen=_MAX_RECORDS)
        self._lock = threading.Lock()
        self._bind(state["model"])
        functools.update_wrapper(self, type(self.model).generate, updated=())
        self.__signature__ = inspect.signature(type(self.model).generate.__get__(self.model))
        parameters = self.__signature__.parameters.values()
        # All other arguments are generation settings, or are passed on to the model.
        self._names = tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            model = self._held = self._remembered.module()
            self._bind(model)
        return model

    @property
    def __self__(self) -> nn.Module:
        return self.model

    def _bind(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        step_class, options, cache_dtype = decode_step_class(self._step_name), self.options, None
        low_bit = LowBitWeights(options.weights) if step_class.takes_low_bit else None
        if step_class.takes_quantised_cache and options.cache_dtype is not None:
            cache_dtype = CACHE_DTYPES[options.cache_dtype]
        self.checked = CheckedStep(model, step_class, self.graphs, low_bit, cache_dtype)
        # Also for an encoder-decoder, which leaves it empty: an unpickled model has no config here.
        if options.prefix_cache_mib and step_class.takes_prefix:
            self.graphs.prefixes = PrefixCache(options.prefix_cache_mib, self.checked.weight_versions)
        self.early_prefill = EarlyPrefill(self.checked, self.graphs, self.options.max_batch, self.options.max_length)
        self.proxy = CachingModelProxy(model)

    def _release(self, model: nn.Module) -> None:
        """Holds the model's attributes instead of the model."""
        self._held, self._remembered = None, Remembered(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        self._release(model)
        stock = type(model).generate
        # 1. Arguments by name, and the lock. transformers words the errors for arguments that cannot be named.
        arguments = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names) or not arguments.keys().isdisjoint(kwargs):
            return stock(model, *args, **kwargs)
        arguments |= kwargs
        extra = {name: value for name, value in arguments.items() if name not in self._names}
        # Without waiting, since code that generate() calls, such as a stopping criterion, may call it again.
        has_lock = tiers.is_unobserved() and self._lock.acquire(blocking=False)
        try:
            call = GenerateCall(self, model, arguments, extra)
            reason = call.prepare(has_lock)
            if reason is None:
                return call.run(stock)
        finally:
            if has_lock:
                # Queued work reads the caller's tensors, which may be freed from here on.
                if self.checked.is_built:
                    self.graphs.join(self.checked.step.shape.device)
                self._lock.release()
        self.calls.append(CallRecord(Tier.STOCK, reason))
        return stock(model, *args, **kwargs)

    @property
    def quantised(self) -> str:
        """How weights are quantised, such as "int8"; "" if none is, or none yet."""
        return "" if self.checked.low_bit is None else self.checked.low_bit.made_as

    @property
    def cache_dtype(self) -> str:
        """How the last call quantised keys and values, "int8" or "fp8"; "" if it did not."""
        return self.calls[-1].cache_dtype if self.calls else ""

    def forget_prompts(self) -> None:
        """Empties the prefix cache."""
        if self.graphs.prefixes is not None:
            self.graphs.prefixes.forget()

    def fetch_parameters(self) -> None:
        """Moves Parameters from host memory back to the model's device."""
        fetch_all(self.model)

    def call_records(self) -> tuple[dict[str, str], ...]:
        """The last calls, as `Report.generate_calls` has them."""
        return tuple(
            {"tier": c.tier.value, "reason": c.reason, "steps": c.steps, "note": c.note, "cache": c.cache}
            for c in self.calls
        )

    def report_lines(self) -> tuple[str, ...]:
        """Lines of the report: tier and reason of the last calls, and what is kept from call to call.

        Consecutive calls with equal lines share one line with their number.
        """
        runs = ((line, sum(1 for _ in equal)) for line, equal in itertools.groupby(map(str, self.calls)))
        calls = (f"{line} ({count} calls)" if count > 1 else line for line, count in runs)
        lines = (*calls, *self.checked.notes, *self.graphs.report_lines())
        return tuple(f"generate(): {line}" for line in lines)
