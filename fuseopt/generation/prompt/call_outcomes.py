"""CallOutcomes: how earlier calls of generate() ended, by their arguments, to speculate on the next such call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fuseopt.generation.engine.state import Sizes
from fuseopt.generation.hf.prepared_configs import PLAIN

_MAX_OUTCOMES = 16


class CallOutcome(NamedTuple):
    """How a call ended whose prompt was queued early.

    Attributes:
        is_unmasked: no token of its prompts was masked.
        step_key: key of its captured step; None if the next such call may speculate on its prompt alone. The step may
            have been evicted since.
        pad: id that finished rows were given, [] int64, or None.
        steps: tokens generated a row, which bounds how many steps are worth queuing.
    """

    is_unmasked: bool
    step_key: Hashable = None
    pad: Tensor | None = None
    steps: int = 0


class CallOutcomes:
    """The last outcomes by `call_key`, at most 16. Holds on to neither graphs nor states nor the caller's objects."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[Hashable, CallOutcome] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outcomes)

    def get(self, key: Hashable) -> CallOutcome | None:
        return self._outcomes.get(key)

    def record(self, key: Hashable, outcome: CallOutcome | None) -> None:
        """Replaces the outcome of such calls; None removes it."""
        self._outcomes.pop(key, None)
        if key is not None and outcome is not None:
            self._outcomes[key] = outcome
            if len(self._outcomes) > _MAX_OUTCOMES:
                self._outcomes.popitem(last=False)


def call_key(sizes: Sizes, arguments: Mapping[str, Any]) -> Hashable:
    """Key of the calls that are expected to end alike.

    Args:
        sizes: of the state that the call will decode in.
        arguments: of generate(), by name. Plain values count by value, other objects by identity; tensors, dicts and
            streamers, which are usually new in each call, by class.
    """
    return sizes, *map(_argument_key, sorted(arguments.items()))


def _argument_key(argument: tuple[Hashable, Any]) -> Hashable:
    name, value = argument
    if isinstance(value, (list, tuple)):
        return name, type(value), *map(_argument_key, enumerate(value))
    if isinstance(value, (Tensor, dict)) or name == "streamer":
        return name, type(value)
    return name, type(value), value if type(value) in PLAIN else id(value)
