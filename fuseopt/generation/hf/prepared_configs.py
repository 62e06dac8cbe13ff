"""PreparedConfigs: what transformers made of the settings of earlier calls of generate()."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig
from transformers.utils import logging

# Of which two that are the same object are the same, whatever happens in between.
PLAIN = frozenset((type(None), bool, int, float, str))
_KEPT = 16

Prepared = tuple[GenerationConfig, dict[str, Any]]


class _Remembered(NamedTuple):
    """`sources` are the settings that the call found, `values` those that it came to, `unused` the names of
    arguments that are no settings."""

    sources: tuple[dict[str, Any], ...]
    values: dict[str, Any]
    unused: tuple[str, ...]


class PreparedConfigs:
    """Call: as `GenerationMixin._prepare_generation_config`, which copies some seventy settings several times over.

    It is asked again unless the arguments' names, their values where they are settings, and all that the model's
    generation config and the caller's hold are as they were in an earlier call, and none of it can be edited in place.
    What it warns of it does once in a process.
    """

    def __init__(self) -> None:
        self._remembered: OrderedDict[Hashable, _Remembered] = OrderedDict()

    def __call__(
        self,
        prepare: Callable[..., Prepared],
        model: Any,
        given: GenerationConfig | None,
        arguments: Mapping[str, Any],
    ) -> Prepared:
        """Settings that are nobody else's, and the arguments that are none.

        Args:
            prepare: transformers' own method, for `model`, `given` and `arguments`.
        """
        defaults = model.generation_config
        configs = (defaults,) if given is None else (defaults, given)
        if any(type(config) is not GenerationConfig for config in configs):
            return prepare(model, given, **arguments)
        values = ((name, type(value), value if type(value) in PLAIN else None) for name, value in arguments.items())
        key = (prepare, logging.get_verbosity(), given is None, *values)
        known = self._remembered.get(key)
        if known is not None and all(map(_are_the_same, map(vars, configs), known.sources)):
            self._remembered.move_to_end(key)
            config = GenerationConfig.__new__(GenerationConfig)
            vars(config).update(known.values)
            return config, {name: arguments[name] for name in known.unused}
        sources = tuple(dict(vars(config)) for config in configs)
        config, unused = prepare(model, given, **arguments)
        made = dict(vars(config))
        is_settled = all(name in arguments and arguments[name] is value for name, value in unused.items())
        if type(config) is GenerationConfig and is_settled and all(map(_are_plain, (*sources, made))):
            self._remembered[key] = _Remembered(sources, made, tuple(unused))
            if len(self._remembered) > _KEPT:
                self._remembered.popitem(last=False)
        return config, unused


def _are_the_same(values: Mapping[str, Any], seen: Mapping[str, Any]) -> bool:
    return values.keys() == seen.keys() and all(map(operator.is_, values.values(), map(seen.__getitem__, values)))


def _are_plain(values: Mapping[str, Any]) -> bool:
    return PLAIN.issuperset(map(type, values.values()))
