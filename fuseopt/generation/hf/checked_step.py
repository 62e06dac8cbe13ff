"""CheckedStep: the decode step of one model, checked against the model in every call and rebuilt when that changed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.engine.low_bit import LowBitWeights
from fuseopt.generation.engine.parked_weights import fetch_all
from fuseopt.generation.engine.quantised_cache import no_8_bit_cache_reason
from fuseopt.generation.families.step_interface import DecodeStep, EncoderStep
from fuseopt.generation.hf.fingerprint import ModelFingerprint, fingerprint
from fuseopt.modules.lora import described
from fuseopt.modules.quantised import UnreadableWeight
from fuseopt.runtime.memory import is_out_of_memory
from fuseopt.runtime.references import weak_attribute
from fuseopt.runtime.written_values import ReadSamples, Samples, WeightVersions


class ModelCheck(NamedTuple):
    """Result of comparing a model with what its decode step was built from.

    Attributes:
        reason: why no decode step computes what the model's forward does; None if the step does.
        is_unchanged: whether the step, and the encoder's if this call uses it, are the same objects as before the
            check. If so, whatever they have run in this call is valid.
    """

    reason: str | None
    is_unchanged: bool = False


class ModelChanged(Exception):
    """The model is not what the work already queued for this call was built on.

    Attributes:
        reason: why transformers has to decode the call; None if the rebuilt step can.
    """

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


class CheckedStep:
    """The decode step of a model, its encoder's step, and the fingerprints of the modules that they replace.

    A full check takes the host up to a few hundred microseconds. A call may therefore queue work on the GPU first, if
    `is_in_place`: the work reads no freed memory, and is discarded if the check finds any other change. Such a call
    says `defer`, and `confirm` before it does anything that can be observed from outside.

    Args:
        model: an instance of the step's `model_class`; referenced weakly.
        graphs: cleared when a step is rebuilt.
        low_bit: the low-bit weights, for a step that takes them; None to read the model's.
        cache_dtype: int8 or float8_e4m3fn for keys and values, for a step that takes them; None for the model's dtype.

    Attributes:
        step: built from `model` by the first check that finds no reason against it; unset before.
        is_built: whether there is a `step`.
        encoder: the step of the model's encoder; None before its first use and for decoder-only models.
    """

    model = weak_attribute("model")
    step: DecodeStep

    def __init__(
        self,
        model: nn.Module,
        step_class: type[DecodeStep],
        graphs: StepGraphs,
        low_bit: LowBitWeights | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.step_class, self.graphs, self.low_bit = model, step_class, graphs, low_bit
        self._cache_dtype = cache_dtype
        self.is_built = False
        self.encoder: EncoderStep | None = None
        self._fingerprint: ModelFingerprint | None = None
        self._encoder_fingerprint: ModelFingerprint | None = None
        self._sampled: ModelFingerprint | None = None
        self._reading: ReadSamples | None = None
        self._key: tuple[Hashable, ...] = ()
        self._encoder_key: tuple[Hashable, ...] = ()
        self._unread: str | None = None
        self._encoder_unread: str | None = None
        self._is_deferred = self._is_encoder_deferred = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What the last check found, for the report."""
        layers = {} if self._fingerprint is None else self._fingerprint.lora.layers
        quantised = () if self.low_bit is None else self.low_bit.report_lines()
        return (*((described(layers),) if layers else ()), *quantised)

    def is_in_place(self) -> bool:
        """Whether there is a step and its weights have their addresses, so that it can run before a check."""
        return self.is_built and self._fingerprint is not None and self._fingerprint.is_in_place()

    def is_encoder_in_place(self) -> bool:
        """As `is_in_place`, of the encoder's step."""
        return self._encoder_fingerprint is not None and self._encoder_fingerprint.is_in_place()

    def defer(self) -> None:
        """Leaves this call's check to `confirm`."""
        self._is_deferred, self._is_encoder_deferred = True, False

    def confirm(self) -> None:
        """Makes the check of this call if it was deferred and has not been made.

        Raises:
            ModelChanged: what this call has queued is invalid; `step` is the one to decode with.
        """
        if not self._is_deferred:
            return
        check = self.check()
        if not check.is_unchanged:
            raise ModelChanged(check.reason)

    def check(self) -> ModelCheck:
        """Compares the model with its fingerprint; rebuilds the step and drops all captured graphs if it changed."""
        self._is_deferred = False
        step_class, before, key = self.step_class, self._fingerprint, self._key
        found = self._fingerprint = self._fingerprint_of(step_class.roots(self.model), before)
        adapters, ranks = found.lora.look()
        reason = found.reason or adapters
        if reason is not None:
            return ModelCheck(reason)
        own = (*found.key, *step_class.constants(self.model), *ranks)
        is_rebuilt = not self.is_built or (*own, *self._versions()) != key
        if is_rebuilt:
            self.graphs.clear()
            self.is_built = False
            try:
                self.step = self._new_step()
            except UnreadableWeight as error:
                return ModelCheck(error.said_of(self.model))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return ModelCheck("there was no memory for quantised weights")
            self.is_built = True
            if self.low_bit is not None and self.low_bit.parked_bytes:
                found = self._fingerprint = self._fingerprint_of(step_class.roots(self.model), None)
                own = (*found.key, *step_class.constants(self.model), *ranks)
            self._key = (*own, *self._versions())
            self._unread = _unread_adapter(found, self.step, self.model)
        if self._unread is not None:
            return ModelCheck(self._unread)
        encoder_is_unchanged = self._confirm_encoder()
        return ModelCheck(None, found is before and not is_rebuilt and encoder_is_unchanged)

    def _new_step(self) -> DecodeStep:
        fetch_all(self.model)
        step = self.step_class(self.model)
        if self.low_bit is not None:
            step.quantise(self.model, self.low_bit)
        shape = step.shape
        if self._cache_dtype and no_8_bit_cache_reason(shape.device, shape.dtype, shape.head_dim) is None:
            step.shape = replace(shape, stored_dtype=self._cache_dtype)
        return step

    def _versions(self) -> tuple[Hashable, ...]:
        return () if self.low_bit is None else self.low_bit.versions()

    def weight_versions(self) -> WeightVersions | None:
        """Versions and samples of the weights, and the active adapters; None if a weight has no version.

        `check` finds other changes.
        """
        found = self._fingerprint
        assert found is not None, "there is a step"
        if self._sampled is not found:
            is_inference = any(parameter.is_inference() for parameter in found.parameters)
            self._sampled, self._reading = found, None if is_inference else ReadSamples(Samples(found.parameters))
        reading = self._reading
        if reading is None:
            return None
        if reading.runs == 1 and reading.state.device.type == "cuda" and self.graphs.max_graphs:
            # A graph of the one kernel that reads the samples takes the host less time than their views.
            self.graphs.record(reading, (), "a read of the weights")
        versions = [parameter._version for parameter in found.parameters]
        return WeightVersions((*versions, *found.lora.versions()), reading.start())

    def use_encoder(self, *, check_now: bool) -> str | None:
        """Prepares `encoder` for this call.

        Args:
            check_now: make the full check now, instead of in `check` if the encoder's weights are in place.

        Returns:
            why the model's own encoder has to run; None if `encoder` can.
        """
        self._is_encoder_deferred = not check_now and self.is_encoder_in_place()
        return None if self._is_encoder_deferred else self._check_encoder()

    def _confirm_encoder(self) -> bool:
        if not self._is_encoder_deferred:
            return True
        self._is_encoder_deferred, before = False, self.encoder
        return self._check_encoder() is None and self.encoder is before

    def _check_encoder(self) -> str | None:
        found = self._encoder_fingerprint = self._fingerprint_of(
            (self.model.encoder,), self._encoder_fingerprint, is_encoder=True
        )
        adapters, ranks = found.lora.look()
        if found.reason or adapters:
            return found.reason or adapters
        encoder_class = self.step_class.encoder_class
        assert encoder_class is not None
        key = (*found.key, *encoder_class.constants(self.model), *ranks)
        if self.encoder is None or key != self._encoder_key:
            self.graphs.clear()
            self.encoder, self._encoder_key = encoder_class(self.model), key
            self._encoder_unread = _unread_adapter(found, self.encoder)
        return self._encoder_unread

    def _fingerprint_of(
        self, roots: Sequence[nn.Module], before: ModelFingerprint | None, *, is_encoder: bool = False
    ) -> ModelFingerprint:
        step_class = self.step_class
        takes_low_bit = step_class.takes_low_bit and not is_encoder
        takes = {"takes_lora": step_class.takes_lora, "takes_low_bit": takes_low_bit}
        return fingerprint(self.model, roots, step_class.children, before, **takes)


def _unread_adapter(
    found: ModelFingerprint, step: DecodeStep | EncoderStep, model: nn.Module | None = None
) -> str | None:
    """Why a step computes something else than the modules: it does not read one of their adapters.

    Args:
        model: whose encoder another step or transformers runs.
    """
    if not found.lora.layers:
        return None
    read = {id(layer) for layer in step.lora_layers}
    if model is not None and model.config.is_encoder_decoder:
        read |= {id(module) for module in model.get_encoder().modules()}
    unread = (path for path, layer in found.lora.layers.items() if id(layer) not in read)
    return next((f"{path} is a LoRA layer where the decode step reads none" for path in unread), None)
