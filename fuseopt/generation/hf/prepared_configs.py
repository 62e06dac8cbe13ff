"""PreparedConfigs: cache of the GenerationConfigs that transformers derives from the settings of a call."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig
from transformers.utils import logging

# Immutable classes: the same object still has the same value.
PLAIN = frozenset((type(None), bool, int, float, str))
_MAX_CONFIGS = 16

Prepared = tuple[GenerationConfig, dict[str, Any]]


class _Entry(NamedTuple):
    """Settings and result of an earlier call.

    Attributes:
        sources: attributes of the model's generation config, and of the caller's if one was passed.
        values: attributes of the resulting config.
        unused: names of the arguments that are no settings.
    """

    sources: tuple[dict[str, Any], ...]
    values: dict[str, Any]
    unused: tuple[str, ...]


class PreparedConfigs:
    """Call: as `GenerationMixin._prepare_generation_config`, which copies some seventy settings several times.

    Returns a cached result if an earlier call had the same argument names, the same plain values, and the same values
    in the model's generation config and the caller's, and if none of them can be edited in place. Warnings about
    settings need no repetition: transformers gives them once in a process.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __call__(
        self,
        prepare: Callable[..., Prepared],
        model: Any,
        given: GenerationConfig | None,
        arguments: Mapping[str, Any],
    ) -> Prepared:
        """A new GenerationConfig, and the arguments that are no settings.

        Args:
            prepare: transformers' method, called with `model`, `given` and `arguments`.
            given: the caller's config, or None.
        """
        defaults = model.generation_config
        configs = (defaults,) if given is None else (defaults, given)
        if any(type(config) is not GenerationConfig for config in configs):
            return prepare(model, given, **arguments)
        values = ((name, type(value), value if type(value) in PLAIN else None) for name, value in arguments.items())
        key = (prepare, logging.get_verbosity(), given is None, *values)
        known = self._entries.get(key)
        if known is not None and all(map(_are_the_same, map(vars, configs), known.sources)):
            self._entries.move_to_end(key)
            config = GenerationConfig.__new__(GenerationConfig)
            vars(config).update(known.values)
            return config, {name: arguments[name] for name in known.unused}
        sources = tuple(dict(vars(config)) for config in configs)
        config, unused = prepare(model, given, **arguments)
        made = dict(vars(config))
        is_unchanged = all(name in arguments and arguments[name] is value for name, value in unused.items())
        if type(config) is GenerationConfig and is_unchanged and all(map(_are_plain, (*sources, made))):
            self._entries[key] = _Entry(sources, made, tuple(unused))
            if len(self._entries) > _MAX_CONFIGS:
                self._entries.popitem(last=False)
        return config, unused


def _are_the_same(values: Mapping[str, Any], seen: Mapping[str, Any]) -> bool:
    return values.keys() == seen.keys() and all(map(operator.is_, values.values(), map(seen.__getitem__, values)))


def _are_plain(values: Mapping[str, Any]) -> bool:
    return PLAIN.issuperset(map(type, values.values()))
