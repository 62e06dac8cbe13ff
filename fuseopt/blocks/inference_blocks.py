"""What the blocks of a family have in common that run without gradients past the forwards of the modules inside."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.blocks.attention_functions import attention_function
from fuseopt.blocks.stack_runner import StackRunner
from fuseopt.modules.base import BlockForward
from fuseopt.modules.children import Children, unexpected_modules
from fuseopt.ops.tuned_matmul import ACTIVATIONS, is_fast
from fuseopt.runtime.module_watch import ModuleSnapshot, modules_below
from fuseopt.runtime.references import refer, weak_attribute

HALVES = (torch.float16, torch.bfloat16)


class InferenceForward(BlockForward):
    """A block in eval mode without gradients: a few operations on its weights as they are.

    Not plain, beside training and gradients, is whatever a module inside may do beyond its class's forward, as
    adapters, quantised leaves and hooks do; autocast, torch.compile and tracing; torch.func's transforms; dispatch
    modes; weights of several dtypes.

    Args:
        block: a module of the class that the subclass is written for.
        children: the classes that the modules inside must have, see `fuseopt.modules.children`.
        runner: runs all blocks of the stack at once; referred to weakly.
    """

    needs_runner: ClassVar[bool] = False
    """Whether that is the only way it runs."""

    read: tuple[str, ...] = ()

    def __init__(
        self,
        block: nn.Module,
        backend: str = "auto",
        *,
        children: Children,
        runner: StackRunner | None = None,
    ) -> None:
        super().__init__(block, backend)
        self.children, self._runner = children, refer(runner)
        self._snapshot: ModuleSnapshot | None = None
        self._is_known = False

    def __getstate__(self) -> dict[str, Any]:
        # What there is to compare with would be of the modules that are copied.
        return {**self.__dict__, "_snapshot": None}

    @property
    def runner(self) -> StackRunner | None:
        """The runner, which the stack's forward holds; None once that is gone."""
        runner: StackRunner | None = self._runner()
        return runner

    @classmethod
    def backend_reasons(cls, block: nn.Module, backend: str) -> list[str]:
        """Why `block`, where it is, gains nothing by this on that backend; empty when it does."""
        return []

    def settings(self) -> Hashable:
        assert self.runner is not None
        config: Any = self.runner.stack.config
        return config._attn_implementation, attention_function(self.block, config)

    def constants(self, hidden_states: Tensor) -> Any:
        return None

    def total(self, hidden_states: Tensor, added: Tensor) -> Tensor:
        return hidden_states + added

    def _product(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        """`activation(input @ weight + bias)`, [rows, in] x [in, out].

        Args:
            activation: a name in `tuned_matmul.ACTIVATIONS`; in half precision on a GPU of a sum that was not rounded.
        """
        if self.backend != "reference" and is_fast(input):
            return ops.tuned_matmul(input, weight, bias, activation=activation)
        if activation == "gelu_tanh" and bias is not None and input.is_cuda and input.dtype in HALVES:
            # The GELU is the tanh approximation on CUDA.
            return torch._addmm_activation(bias, input, weight, use_gelu=True)
        output = torch.mm(input, weight) if bias is None else torch.addmm(bias, input, weight)
        return ACTIVATIONS[activation](output) if activation else output

    def _is_untouched(self) -> bool:
        """Whether calling the block means no more than the forwards of its class, and of known classes inside."""
        if self._snapshot is None or not self._snapshot.is_unchanged():
            self._snapshot = ModuleSnapshot(modules_below(self.block))
            self._is_known = not unexpected_modules(self.block, self.children) and not any(
                "forward" in state for state in self._snapshot.states
            )
        # Hooks on the block itself run around its forward, whichever that is.
        if not self._is_known or self.block.training:
            return False
        return not self._snapshot.inner_trains_or_has_hooks() or self._only_captures()

    def _only_captures(self) -> bool:
        """Whether hooks inside are none but those that `run` calls."""
        return False

    def _is_of_one_dtype(self, hidden_states: Tensor) -> bool:
        """Whether all weights are plain Parameters in the dtype of the stream."""
        assert self._snapshot is not None
        dtype = hidden_states.dtype
        return (
            type(hidden_states) is Tensor
            and not torch.is_autocast_enabled(hidden_states.device.type)
            and all(
                parameter is None or (type(parameter) is nn.Parameter and parameter.dtype is dtype)
                for state in (self.block.__dict__, *self._snapshot.states)
                for parameter in state["_parameters"].values()
            )
        )


class StackForward:
    """The `forward` of a stack whose blocks are chained: the class's own, during which the runner may run them.

    A call with tokens and little else, of a size that has been captured, passes that forward by, which waits for the
    GPU to learn what is in the masks.

    It belongs to one stack and is copied and pickled with it.
    """

    stack = weak_attribute("stack")
    tensors: frozenset[str] = frozenset()
    """Names of arguments beside tokens that `_of_tokens` takes."""

    def __init__(self, stack: nn.Module, runner: StackRunner) -> None:
        self.stack, self.runner, self._source = stack, runner, type(stack)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._class_forward(*args, **kwargs)
        if type(self.stack) is self._source and self._are_captured_tokens(*args, **kwargs):
            outputs = self._of_tokens(*args, **kwargs)
            if outputs is not None:
                return outputs
        with self.runner.in_stack():
            return self._class_forward(*args, **kwargs)

    def report_lines(self) -> tuple[str, ...]:
        """What the report says of the runner."""
        return self.runner.report_lines()

    def _class_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.stack).forward(self.stack, *args, **kwargs)

    def _are_captured_tokens(
        self,
        input_ids: Any = None,
        *args: Any,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> bool:
        """Whether a call has no other arguments than `tensors` and tokens of a size that has been captured."""
        if type(input_ids) is not Tensor or input_ids.dim() != 2 or not self.runner.has_captured(*input_ids.shape):
            return False
        given = {name for name, value in kwargs.items() if value is not None}
        if args or output_attentions or output_hidden_states or not given <= self.tensors:
            return False
        config: Any = self.stack.config
        return (
            (config.return_dict if return_dict is None else return_dict)
            and getattr(config, "is_causal", None) is None
            and not (config.output_attentions or config.output_hidden_states)
        )

    def _of_tokens(self, input_ids: Tensor, *, use_cache: bool | None = None, **kwargs: Any) -> Any:
        """What the class's forward returns, or None where that has to run."""
        raise NotImplementedError
