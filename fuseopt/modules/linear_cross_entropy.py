"""FusedLinearCrossEntropy: the head of a language model whose training loss does without the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt.modules.base import FusedModule, runs_untouched
from fuseopt.modules.lazy_logits import LazyLogits, LinearOutput
from fuseopt.modules.lm_head import linear
from fuseopt.ops.library import define_node, in_forward_mode
from fuseopt.ops.linear_cross_entropy import linear_dtype


def _logits(input: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return F.linear(input, weight, bias)


HEAD_ARGUMENTS = "Tensor input, Tensor weight, Tensor? bias, str backend"
LOGITS = define_node(f"head_logits({HEAD_ARGUMENTS}) -> Tensor", _logits)
"""F.linear of a head, with the backend that `ops.linear_cross_entropy` is to use for its loss.

Node that Dynamo traces where the loss cannot follow `LazyLogits`; `fuseopt.training.passes.drop_logits` finds it.
"""


class FusedLinearCrossEntropy(FusedModule, nn.Linear):
    """Stands in for the torch.nn.Linear that makes the logits; remains one to `isinstance`.

    In training mode with gradients on, its output is `LazyLogits`, of whose cross-entropy `ops.linear_cross_entropy`
    computes loss and gradients at once. Elsewhere it is the logits: in eval mode; without gradients, as in
    `generate()`; where hooks are registered on it, which expect a tensor, or its weight is parametrised or of a
    subclass of Tensor; in torch.nn.DataParallel's replicas, in torch.func's transforms and in forward-mode AD; in
    torch.export.

    `traces` says whether Dynamo can follow the lazy logits to the loss. It takes a torch.nn.CrossEntropyLoss, unlike
    F.cross_entropy, for a call on tensors; a model that calls one has the logits computed inside torch.compile, but for
    that of memory_efficient_fusion, where `fuseopt.training.passes.drop_logits` takes them out of the graph.

    forward: `input` [..., in_features] -> [..., out_features], in the dtype of F.linear.
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
        # As F.linear does under autocast. What comes back for logits that nobody looks at takes as many bytes.
        input = input.to(linear_dtype(input, self.weight))
        output = LinearOutput(input, self.weight, self.bias, self.backend)
        shape = (*input.shape[:-1], self.weight.shape[0])
        return LazyLogits(output, input.dtype, shape)  # type: ignore[return-value]

    def _is_training_step(self) -> bool:
        is_plain = runs_untouched(self, self._fused_class) and not in_forward_mode()
        if not self.training or not torch.is_grad_enabled() or not is_plain:
            return False
        # torch.export traces without Dynamo. In older ones is_exporting() is true under torch.compile, too.
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            return False
        return not getattr(self, "_is_replica", False) and not torch._C._are_functorch_transforms_active()
