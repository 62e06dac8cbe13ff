"""The call that "auto" times: a forward, a training step, or generate()."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt import apply, verify_inputs, verify_runs
from fuseopt.errors import InputsError, shown


class Kind(enum.Enum):
    FORWARD = "forward"
    TRAINING = "training step"
    GENERATE = "generate()"


@dataclass(frozen=True)
class Work:
    """One call of a model, to be timed; made by `of`.

    Attributes:
        inputs: keyword arguments of the forward, complete.
        prompt: those that the user gave.
        generate: further keyword arguments of `generate()`; None for a forward or a training step.
        defaults: those settings of the model's `generation_config` that are not transformers' own.
    """

    kind: Kind
    inputs: Mapping[str, Any]
    prompt: Mapping[str, Any]
    generate: Mapping[str, Any] | None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, generate: Any) -> Work:
        """
        Raises:
            InputsError: an argument is missing or wrong, or does not fit the model's mode.
        """
        if inputs is None:
            raise InputsError(
                "inputs: 'auto' measures on your inputs; pass inputs=dict(tokenizer('...', return_tensors='pt')), with "
                "labels to measure training steps of a model in training mode, or with generate={'max_new_tokens': 64}"
            )
        if generate is not None and model.training:
            raise InputsError("generate: the model is in training mode; call model.eval() first")
        trains, takes_labels = model.training, "labels" in verify_inputs.forward_parameters(model)
        if trains and takes_labels and isinstance(inputs, Mapping) and inputs.get("labels") is None:
            raise InputsError(
                "inputs: the model is in training mode, whose steps need labels; add 'labels' to the dict (for a "
                "causal language model the input_ids), or call model.eval() to measure forwards"
            )
        try:
            given = verify_inputs.checked(model, inputs, None, trains)
            options = verify_inputs.generation(model, given, generate, by_default=False)
        except InputsError as error:
            raise InputsError(str(error).replace("pass train=False", "call model.eval()")) from None
        kind = Kind.TRAINING if trains else Kind.FORWARD if options is None else Kind.GENERATE
        config: Any = getattr(model, "generation_config", None)
        defaults = config.to_diff_dict() if kind is Kind.GENERATE and hasattr(config, "to_diff_dict") else {}
        return cls(kind, given, verify_inputs.prompt(inputs), options, defaults)

    @property
    def name(self) -> str:
        given = self.inputs if self.generate is None else {**self.prompt, **self.generate}
        return f"{self.kind.value} of {', '.join(f'{name} {_described(value)}' for name, value in given.items())}"

    @property
    def key(self) -> str:
        """Everything that the times of a call depend on: kind, shapes, dtypes, other values, autocast."""
        given = [*self.inputs.items(), *(self.generate or {}).items(), *sorted(self.defaults.items())]
        tensors = [value for _, value in given if isinstance(value, Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        values = [(name, _described(value)) for name, value in given]
        return repr((self.kind.value, values, [tensor.dtype for tensor in tensors], autocast))

    def __call__(self, model: nn.Module) -> None:
        if self.kind is Kind.TRAINING:
            model.zero_grad(set_to_none=True)
            with torch.enable_grad():
                _loss(model(**self.inputs)).backward()
            return
        with torch.no_grad():
            if self.generate is None:
                model(**self.inputs)
            else:
                torch.manual_seed(0)
                # Calls of the search have equal prompts, later calls other ones: time without cached keys and values.
                apply.forget_prompts(model)
                model.generate(**self.prompt, **self.generate)  # type: ignore[operator]


def _described(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else shown(value)


def _loss(output: Any) -> Tensor:
    """The loss of a forward's output; of a model that returns none, the sum of its outputs."""
    loss: Tensor | None = getattr(output, verify_runs.LOSS, None)
    if loss is not None:
        return loss
    tensors = (tensor for _, tensor in verify_runs.floating_tensors("output", output) if tensor.requires_grad)
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()
