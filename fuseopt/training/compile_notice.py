"""CompileNotice: two lines in the log for each compilation of a training step: before it, and its time and reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

_ON_CPU = (
    ": on a CPU that takes 1 to 2 minutes and pays only after thousands of steps; without memory_efficient_fusion "
    "nothing is compiled"
)


class CompileNotice:
    """Says, as warnings of this module's logger, that a step of one model is compiled. The level makes them visible.

    Args:
        model: name of the model's class.
    """

    def __init__(self, model: str) -> None:
        self._model, self._is_due, self._is_begun = model, False, False
        self._shapes: dict[str, tuple[int, ...]] = {}

    def begin(self, on_cpu: bool) -> None:
        """Logs the first line, unless the current call has logged it.

        Args:
            on_cpu: whether the step runs on a CPU.
        """
        if not self._is_begun:
            self._is_begun = True
            logger.warning("fuseopt: compiling a training step of %s%s", self._model, _ON_CPU if on_cpu else "")

    def compiling(self, on_cpu: bool) -> None:
        """To be called when a step is being compiled; arguments as for `begin`."""
        self.begin(on_cpu)
        self._is_due = True

    def done(self, arguments: Mapping[str, Any], seconds: float) -> None:
        """Logs the second line if the call that has ended compiled a step.

        Args:
            arguments: of the call, by name.
            seconds: that the call took.
        """
        self._is_begun = False
        if not self._is_due:
            return
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        shapes, before = {name: tuple(tensor.shape) for name, tensor in tensors.items()}, self._shapes
        self._shapes, self._is_due = shapes, False
        reason = "its first step"
        if before:
            changed = [name for name in shapes if shapes[name] != before.get(name)]
            reason = "another combination of arguments, dtypes, modes, hooks or frozen parameters"
            if changed and shapes.keys() == before.keys():
                name = changed[0]
                sizes = f"{name} {list(before[name])} became {list(shapes[name])}"
                reason = f"{sizes}, and a size that has changed is dynamic from now on"
        logger.warning("fuseopt: compiled a training step of %s in %.1f s (%s)", self._model, seconds, reason)
