"""FusedLinearCrossEntropy: a language model's head, whose training loss is computed without storing the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt.modules.base import FusedModule, runs_untouched
from fuseopt.modules.lazy_logits import LazyLogits, LinearOutput
from fuseopt.modules.lm_head import linear
from fuseopt.ops.library import define_node, in_forward_mode, is_recorded
from fuseopt.ops.linear_cross_entropy import linear_dtype


def _logits(input: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return F.linear(input, weight, bias)


HEAD_ARGUMENTS = "Tensor input, Tensor weight, Tensor? bias, str backend"
LOGITS = define_node(f"head_logits({HEAD_ARGUMENTS}) -> Tensor", _logits)
"""F.linear of a head as one node of Dynamo's graph, with the backend for its loss.

Used if Dynamo cannot follow `LazyLogits` to the loss; `fuseopt.training.passes.drop_logits` finds the node.
"""


class FusedLinearCrossEntropy(FusedModule, nn.Linear):
    """Replaces the torch.nn.Linear that computes the logits; remains a Linear to `isinstance`.

    In training mode with gradients enabled it returns `LazyLogits`; `ops.linear_cross_entropy` computes their loss and
    gradients at once. It returns the logits themselves

    - in eval mode and without gradients, as in `generate()`;
    - if hooks are registered on it, which expect a tensor;
    - if its weight is parametrised or a Tensor subclass;
    - in replicas of torch.nn.DataParallel, torch.func's transforms, forward-mode AD and torch.export.

    forward: `input` [..., in_features] -> [..., out_features], in the dtype of F.linear.

    Options:
        traces: whether Dynamo can follow lazy logits to the model's loss. It can for F.cross_entropy, but treats a
            torch.nn.CrossEntropyLoss as a call on tensors. A model with the latter computes its logits under
            torch.compile; under memory_efficient_fusion `fuseopt.training.passes.drop_logits` removes them.
        backend: option of `ops.linear_cross_entropy`.
    """

    def _configure(self, *, traces: bool = True, backend: str = "auto") -> None:  # type: ignore[override]
        self.traces, self.backend = traces, backend

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        if not source.weight.is_floating_point():
            return [f"its weight is {source.weight.dtype}"]
        return []

    def forward(self, input: Tensor) -> Tensor:
        if not self._is_training_step():
            return linear(input, self.weight, self.bias)
        if torch.compiler.is_compiling() and not self.traces:
            return LOGITS(input, self.weight, self.bias, self.backend)
        # F.linear casts its input under autocast as well. The gradient that comes back has the same dtype.
        input = input.to(linear_dtype(input, self.weight))
        output = LinearOutput(input, self.weight, self.bias, self.backend)
        shape = (*input.shape[:-1], self.weight.shape[0])
        return LazyLogits(output, input.dtype, shape)  # type: ignore[return-value]

    def _is_training_step(self) -> bool:
        is_plain = runs_untouched(self, self._fused_class) and not in_forward_mode()
        if not self.training or not torch.is_grad_enabled() or not is_plain:
            return False
        if is_recorded():
            return False
        return not getattr(self, "_is_replica", False) and not torch._C._are_functorch_transforms_active()
