"""State of the fallback to the class's own forward, for training steps that cannot be compiled."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fuseopt.errors import CompileError

_ADVICE = (
    "The model's state is untouched: to train it as it was, initialize without strict=True, leave "
    "memory_efficient_fusion out of the config, or call fuseopt.restore(model)"
)


class StockFallback:
    """Records whether and why the training steps of one model run its class's own forward.

    Args:
        model: name of the model's class, for messages.
        backend: compiler backend, for messages.
        strict: raise instead of falling back.

    Attributes:
        reason: why the first failed step could not be compiled; empty if none has failed.
    """

    def __init__(self, model: str, backend: str, strict: bool) -> None:
        self.strict, self.reason = strict, ""
        self._model, self._backend = model, backend

    def begin(self, reason: str, cause: Exception | None) -> None:
        """Records the failure of a step, so that later steps fall back too; warns the first time.

        Raises:
            CompileError: with `strict`, from `cause`.
        """
        what = f"the training step of {self._model} cannot be compiled as one graph with {self._backend!r}: {reason}"
        if self.strict:
            raise CompileError(f"{what}. {_ADVICE}") from cause
        if not self.reason:
            self.reason = reason
            warnings.warn(f"fuseopt: {what}. From now on training steps run the model's own forward", stacklevel=3)

    def report_lines(self) -> tuple[str, ...]:
        if not self.reason:
            return ()
        return (f"training steps: the model's own forward, as {self._backend!r} cannot compile it: {self.reason}",)


def root_of(error: Exception) -> Exception:
    """The innermost exception of an error that Dynamo has wrapped."""
    while inner := getattr(error, "inner_exception", None):
        error = inner
    return error


def reason_of(error: Exception) -> str:
    """Class name and first line of the message of `root_of(error)`."""
    root = root_of(error)
    lines = (line.strip() for line in str(root).splitlines())
    return f"{type(root).__name__}: {next(filter(None, lines), '')}".rstrip(": ")


@contextlib.contextmanager
def rng_restored_on_error(inputs: Iterable[object]) -> Iterator[None]:
    """Restores the states of random generators if the with block raises.

    Args:
        inputs: inputs of the step. The generators are those of the CPU and of the GPUs of these tensors.
    """
    devices = {value.device for value in inputs if isinstance(value, Tensor) and value.is_cuda}
    host, states = torch.get_rng_state(), {device: torch.cuda.get_rng_state(device) for device in devices}
    try:
        yield
    except BaseException:
        torch.set_rng_state(host)
        for device, state in states.items():
            torch.cuda.set_rng_state(state, device)
        raise
