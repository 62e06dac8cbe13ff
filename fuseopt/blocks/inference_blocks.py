"""Base classes for block and stack forwards that compute on weights and bypass the modules inside."""

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
from fuseopt.runtime.references import code_of_forward, refer, weak_attribute

HALVES = (torch.float16, torch.bfloat16)


class InferenceForward(BlockForward):
    """Forward of a block in eval mode without gradients, as a few operations on its weights.

    The class's own forward runs if any submodule has hooks, adapters or quantised weights; under autocast,
    torch.compile, tracing, torch.func's transforms or dispatch modes; and if weights have several dtypes.

    Args:
        block: a module of the class that the subclass is written for.
        children: allowed classes of the modules inside, see `fuseopt.modules.children`.
        runner: runs all blocks of the stack at once; referenced weakly.
    """

    needs_runner: ClassVar[bool] = False
    """Whether the block runs only as part of its `StackRunner`, never by itself."""

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
        # The snapshot describes the original's modules, not the copy's.
        return {**self.__dict__, "_snapshot": None}

    @property
    def runner(self) -> StackRunner | None:
        """The runner, which the stack's forward owns; None once that has been freed."""
        runner: StackRunner | None = self._runner()
        return runner

    @classmethod
    def backend_reasons(cls, block: nn.Module, backend: str) -> list[str]:
        """Why `block` gains nothing from this forward on its device with `backend`; empty if it does."""
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
            activation: a name in `tuned_matmul.ACTIVATIONS`. In half precision on a GPU it reads the sum before
                rounding.
        """
        if self.backend != "reference" and is_fast(input):
            return ops.tuned_matmul(input, weight, bias, activation=activation)
        if activation == "gelu_tanh" and bias is not None and input.is_cuda and input.dtype in HALVES:
            # On CUDA this GELU is the tanh form.
            return torch._addmm_activation(bias, input, weight, use_gelu=True)
        output = torch.mm(input, weight) if bias is None else torch.addmm(bias, input, weight)
        return ACTIVATIONS[activation](output) if activation else output

    def _is_untouched(self) -> bool:
        """Whether the block and its submodules have known classes, no replaced forwards and no hooks, in eval mode."""
        if self._snapshot is None or not self._snapshot.is_unchanged():
            self._snapshot = ModuleSnapshot(modules_below(self.block))
            self._is_known = not unexpected_modules(self.block, self.children) and not any(
                "forward" in state for state in self._snapshot.states
            )
        # Hooks on the block itself run around any forward, so they are not checked.
        if not self._is_known or self.block.training:
            return False
        return not self._snapshot.inner_trains_or_has_hooks() or self._only_captures()

    def _only_captures(self) -> bool:
        """Whether the only hooks inside are those that `run` calls itself."""
        return False

    def _is_of_one_dtype(self, hidden_states: Tensor) -> bool:
        """Whether all weights are plain Parameters with the dtype of `hidden_states`."""
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


def additive_mask(hidden_states: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as numbers in the dtype of `hidden_states` that attention adds to its scores, or None."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    # PyTorch would convert a boolean mask in every layer.
    return hidden_states.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)


class StackForward:
    """Forward of a stack whose blocks a `StackRunner` runs; the class's own forward does the rest.

    A call with tokens and few other arguments, of a captured size, skips the class's own forward, which reads mask
    values or position ids on the host and waits for the GPU to do so.

    Belongs to one stack, and is copied and pickled with it.
    """

    stack = weak_attribute("stack")
    __code__ = code_of_forward("stack")
    class_forward: ClassVar[type[Any]]
    """Called with a stack, makes the class's own forward, which also passes masks to the attentions."""
    tensors: frozenset[str] = frozenset()
    """Names of tensor arguments, besides tokens, that `_run_tokens` takes."""

    def __init__(self, stack: nn.Module, runner: StackRunner) -> None:
        self.stack, self.runner, self._source = stack, runner, type(stack)
        self._class_forward = type(self).class_forward(stack)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._class_forward(*args, **kwargs)
        if type(self.stack) is self._source and self._are_captured_tokens(*args, **kwargs):
            outputs = self._run_tokens(*args, **kwargs)
            if outputs is not None:
                return outputs
        with self.runner.in_stack():
            return self._class_forward(*args, **kwargs)

    def report_lines(self) -> tuple[str, ...]:
        """The runner's lines in the report."""
        return self.runner.report_lines()

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
        """Whether the call has only `tensors` and tokens of a captured size as arguments."""
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

    def _run_tokens(self, input_ids: Tensor, *, use_cache: bool | None = None, **kwargs: Any) -> Any:
        """What the class's forward returns, or None if that has to run."""
        raise NotImplementedError
