"""CachingModelProxy: stands for the model in transformers' generate() and caches answers that do not change."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from fuseopt.generation.engine.device_constants import device_and_stream, to_device
from fuseopt.generation.hf.prepared_configs import PreparedConfigs
from fuseopt.runtime.references import weak_attribute

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Children whose forwards, with the model's, determine which arguments generate() accepts.
_PARTS = ("encoder", "decoder")
_MAX_SPECIAL_TOKENS = 32


class CachingModelProxy:
    """Proxy of a model for `GenerationMixin.generate`, called as a function of the model's class.

    Every attribute is the model's, but for the methods in `METHODS`. Each of those returns a cached answer while
    everything that the answer depends on is the same objects; else it calls the model's method. Ids of special tokens
    are checked on the host, before they are copied to the device, since reading one there waits for the device.

    Attributes:
        full_mask: the caller's attention mask, if it is known to be all ones; else None.
        device: the model's, since `model.device` searches the modules.
    """

    # A model that overrides any of these on the instance must not be given this proxy.
    METHODS = frozenset(
        (
            "_extract_generation_mode_kwargs",
            "_prepare_generation_config",
            "_prepare_cache_for_generation",
            "_validate_model_kwargs",
            "_maybe_prepare_encoder_kwargs_for_generation",
            "_supports_logits_to_keep",
            "_supports_mm_encoder_outputs",
            "_prepare_special_tokens",
            "_prepare_position_ids_for_generation",
        )
    )

    device: torch.device
    model = weak_attribute("model")

    @classmethod
    def stands_in_for(cls, model: nn.Module) -> bool:
        """Whether `generate` is that of transformers' GenerationMixin, and no method of the proxy's is overridden."""
        return getattr(type(model), "generate", None) is GenerationMixin.generate and cls.METHODS.isdisjoint(
            vars(model)
        )

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.full_mask: Tensor | None = None
        self._names_without_mode_arguments: set[Hashable] = set()
        self._prepared_configs = PreparedConfigs()
        self._config_values: dict[str, Any] = {}
        self._generation_parameters: dict[str, Any] = {}
        self._text_configs: dict[bool | None, Any] = {}
        self._special_tokens: dict[Hashable, dict[str, Tensor | None]] = {}
        self._forwards: list[Any] = []
        self._signature: inspect.Signature | None = None
        self._supported: dict[str, bool] = {}
        self._accepted: set[Hashable] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def forward(self) -> Any:
        """The model's forward, with a cached `__signature__`."""
        self._forget_other_forwards()
        return _Override(self.model.forward, __signature__=self._signature)

    def _extract_generation_mode_kwargs(self, custom_generate: Any, kwargs: dict[str, Any], *others: Any) -> Any:
        """The arguments that are parameters of the decoding method; finding them inspects two signatures.

        Includes the caller's tokenizer, which transformers drops for a `custom_generate`, although it needs the
        tokenizer to make the criterion of stop strings.
        """
        tokenizer = kwargs.get("tokenizer")
        names = (type(custom_generate), frozenset(kwargs), *(other is None for other in others))
        if names in self._names_without_mode_arguments:
            return {}
        found = type(self.model)._extract_generation_mode_kwargs(self.model, custom_generate, kwargs, *others)
        if not found and kwargs.keys() == names[1]:
            self._names_without_mode_arguments.add(names)
        return found if tokenizer is None else {**found, "tokenizer": tokenizer}

    def _prepare_generation_config(self, generation_config: Any = None, **kwargs: Any) -> Any:
        self._forget_other_config()
        config = _Override(self.model.config, _get_generation_parameters=lambda: self._generation_parameters)
        prepare, model = type(self.model)._prepare_generation_config, _Override(self.model, config=config)
        if self._generation_parameters:
            return prepare(model, generation_config, **kwargs)
        return self._prepared_configs(prepare, model, generation_config, kwargs)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Gives transformers one cached text config, where the model's config would build one for every cache."""
        self._forget_other_config()
        config = _Override(self.model.config, get_text_config=self._get_text_config)
        return type(self.model)._prepare_cache_for_generation(_Override(self.model, config=config), *args, **kwargs)

    def _get_text_config(self, decoder: bool | None = None) -> Any:
        if decoder not in self._text_configs:
            config = self.model.config.get_text_config(decoder=decoder)
            own_proxy = weakref.proxy(self)
            own: dict[str, Any] = {"get_text_config": lambda decoder=None: own_proxy._get_text_config(decoder)}
            if hasattr(config, "per_layer_config"):
                layers = list(config.per_layer_config)
                cached = {id(layer): _CachedAttributes(layer) for layer in layers}
                own["per_layer_config"] = [cached[id(layer)] for layer in layers]
            self._text_configs[decoder] = _CachedAttributes(config, **own)
        return self._text_configs[decoder]

    def _forget_other_config(self) -> None:
        values, seen = vars(self.model.config), self._config_values
        if values.keys() != seen.keys() or not all(map(operator.is_, values.values(), seen.values())):
            # Generation settings in the model's config, for which generate() raises.
            self._generation_parameters = self.model.config._get_generation_parameters()
            self._config_values, self._text_configs = dict(values), {}

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        self._forget_other_forwards()
        given = frozenset(name for name, value in model_kwargs.items() if value is not None)
        if given not in self._accepted:
            type(self.model)._validate_model_kwargs(self.model, model_kwargs)
            self._accepted.add(given)

    def _supports_logits_to_keep(self) -> bool:
        return self._supports("_supports_logits_to_keep")

    def _maybe_prepare_encoder_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """With this proxy as self, so that its only question, the next method, is cached too."""
        return type(self.model)._maybe_prepare_encoder_kwargs_for_generation(self, *args, **kwargs)

    def _supports_mm_encoder_outputs(self) -> bool:
        return self._supports("_supports_mm_encoder_outputs")

    def _supports(self, question: str) -> bool:
        self._forget_other_forwards()
        if question not in self._supported:
            self._supported[question] = getattr(type(self.model), question)(self.model)
        return self._supported[question]

    def _prepare_special_tokens(
        self, generation_config: Any, kwargs_has_attention_mask: Any = None, device: Any = None, batch_size: Any = None
    ) -> None:
        prepare = type(self.model)._prepare_special_tokens
        ids = [getattr(generation_config, name) for name in _SPECIAL_TOKENS]
        on_host = all(map(_is_plain, ids))
        where = torch.device(device) if on_host else device
        # transformers warns of nothing then. Otherwise it may warn in every call.
        is_quiet = on_host and (kwargs_has_attention_mask or generation_config.pad_token_id is not None)
        key = (
            (prepare, device_and_stream(where), *(tuple(i) if isinstance(i, list) else i for i in ids))
            if is_quiet
            else ()
        )
        known = self._special_tokens.get(key, {})
        if not known or any(tensor._version for tensor in known.values() if tensor is not None):
            prepare(
                self.model,
                generation_config,
                kwargs_has_attention_mask,
                device="cpu" if on_host else device,
                batch_size=batch_size,
            )
            known = {name: value for name, value in vars(generation_config).items() if name.endswith("_token_tensor")}
            if on_host and where.type != "cpu":
                with torch.inference_mode(False):
                    known = {name: None if ids is None else to_device(ids, where) for name, ids in known.items()}
            if is_quiet and not any(tensor is not None and tensor.is_inference() for tensor in known.values()):
                if len(self._special_tokens) >= _MAX_SPECIAL_TOKENS:
                    self._special_tokens.clear()
                self._special_tokens[key] = known
        vars(generation_config).update(known)

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        mask = self.full_mask
        if mask is not model_kwargs.get("attention_mask") or mask is None:
            return type(self.model)._prepare_position_ids_for_generation(self.model, inputs_tensor, model_kwargs)
        return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)

    def _forget_other_forwards(self) -> None:
        model = self.model
        modules = (model, *map(model._modules.get, _PARTS))
        forwards = [None if module is None else vars(module).get("forward", type(module)) for module in modules]
        if self._forwards != forwards:
            self._forwards, self._accepted, self._supported = forwards, set(), {}
            self._signature = inspect.signature(model.forward)


class _Override:
    """Proxy of `source` with some attributes overridden."""

    def __init__(self, source: Any, **attributes: Any) -> None:
        vars(self).update(attributes, _source=source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._source(*args, **kwargs)


class _CachedAttributes(_Override):
    """Proxy of `source` that reads each attribute once, missing ones included."""

    def __init__(self, source: Any, **attributes: Any) -> None:
        super().__init__(source, **attributes, _missing=set())

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(name)
        try:
            vars(self)[name] = value = getattr(self._source, name)
        except AttributeError:
            self._missing.add(name)
            raise
        return value


def _is_plain(token_ids: Any) -> bool:
    """Whether `token_ids` are None or non-negative ints: neither device tensors nor ids that transformers warns of."""
    ids = token_ids if isinstance(token_ids, list) else [token_ids]
    return all(token is None or (type(token) is int and token >= 0) for token in ids)
