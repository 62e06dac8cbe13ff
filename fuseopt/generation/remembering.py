"""RememberingModel: what transformers' generate() is given as the model, so that a call asks only what may be new."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt.generation.state import to_device

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Whose forwards say which arguments generate() takes.
_PARTS = ("encoder", "decoder")


class RememberingModel:
    """Passes for a model in `GenerationMixin.generate`, called as a function of its class.

    All that this asks of the model is the model's own. Only, a question that has been answered is not asked again as
    long as all is the same that the answer depends on; and ids of special tokens are checked before they go to the
    device, where every look at one is a wait.
    """

    # Which must be those of the model's class.
    METHODS = frozenset(
        (
            "_prepare_generation_config",
            "_validate_model_kwargs",
            "_supports_logits_to_keep",
            "_prepare_special_tokens",
        )
    )

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._config_values: dict[str, Any] = {}
        self._forwards: tuple[Any, ...] = ()
        self._forward: Any = None
        self._logits_to_keep = False
        self._accepted: set[Hashable] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def forward(self) -> Any:
        """The model's, for whoever looks at its signature."""
        self._forget_other_forwards()
        return self._forward

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        config = _Instead(self.model.config, _get_generation_parameters=self._generation_parameters)
        return type(self.model)._prepare_generation_config(_Instead(self.model, config=config), *args, **kwargs)

    def _generation_parameters(self) -> dict[str, Any]:
        """Those that do not belong into a model's config: none, or generate() raises."""
        values, seen = vars(self.model.config), self._config_values
        if values.keys() == seen.keys() and all(map(operator.is_, values.values(), seen.values())):
            return {}
        found = self.model.config._get_generation_parameters()
        self._config_values = {} if found else dict(values)
        return found

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        self._forget_other_forwards()
        given = frozenset(name for name, value in model_kwargs.items() if value is not None)
        if given not in self._accepted:
            type(self.model)._validate_model_kwargs(self.model, model_kwargs)
            self._accepted.add(given)

    def _supports_logits_to_keep(self) -> bool:
        self._forget_other_forwards()
        return self._logits_to_keep

    def _prepare_special_tokens(self, generation_config: Any, *args: Any, device: Any, **kwargs: Any) -> None:
        on_host = all(_is_plain(getattr(generation_config, name)) for name in _SPECIAL_TOKENS)
        prepare = type(self.model)._prepare_special_tokens
        prepare(self.model, generation_config, *args, device="cpu" if on_host else device, **kwargs)
        if on_host and torch.device(device).type != "cpu":
            for name, value in vars(generation_config).items():
                if name.endswith("_token_tensor") and isinstance(value, Tensor):
                    setattr(generation_config, name, to_device(value, device))

    def _forget_other_forwards(self) -> None:
        modules = (self.model, *map(self.model._modules.get, _PARTS))
        forwards = tuple(None if module is None else vars(module).get("forward", type(module)) for module in modules)
        if self._forwards != forwards:
            self._forwards, self._accepted = forwards, set()
            self._forward = _Instead(self.model.forward, __signature__=inspect.signature(self.model.forward))
            self._logits_to_keep = type(self.model)._supports_logits_to_keep(self.model)


class _Instead:
    """`source` with other attributes."""

    def __init__(self, source: Any, **attributes: Any) -> None:
        vars(self).update(attributes, _source=source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._source(*args, **kwargs)


def _is_plain(token_ids: Any) -> bool:
    """Whether there is no id that transformers has to look at on the device, or to warn of."""
    ids = token_ids if isinstance(token_ids, list) else [token_ids]
    return all(token is None or (type(token) is int and token >= 0) for token in ids)
