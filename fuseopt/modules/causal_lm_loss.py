"""transformers' causal language model loss without a float32 copy of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt import ops


class FusedCausalLMLoss:
    """Stands in for `transformers.loss.loss_utils.ForCausalLMLoss` as a model's `loss_function`.

    Computes the same with `ops.cross_entropy`, which reads the logits and writes their gradient in their own dtype.
    `source` runs for logits that are not a plain tensor, such as LazyLogits, and for labels of another dtype or shape.

    Args:
        source: the function that it replaces.
        backend: option of `ops.cross_entropy`.
    """

    def __init__(self, source: Callable[..., Any], backend: str = "auto") -> None:
        self.source, self.backend = source, backend

    def __call__(
        self,
        logits: Any,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mean over labels other than `ignore_index`, or their sum divided by `num_items_in_batch`: [], float32.

        Args:
            logits: [batch, length, vocab_size], any floating dtype.
            labels: [batch, length], int64: the token at each position; shifted here by one.
            shift_labels: [batch, length], int64: the next token at each position; used instead of `labels`.
        """
        targets: Any = labels if shift_labels is None else shift_labels
        if not _is_plain(logits, targets, vocab_size):
            rest = (num_items_in_batch, ignore_index, shift_labels)
            result: Tensor = self.source(logits, labels, vocab_size, *rest, **kwargs)
            return result
        if shift_labels is None:
            targets = F.pad(targets, (0, 1), value=ignore_index)[..., 1:].contiguous()
        loss = ops.cross_entropy(
            logits.view(-1, vocab_size),
            targets.view(-1).to(logits.device),
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            backend=self.backend,
        ).float()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _is_plain(logits: Any, targets: Any, vocab_size: int) -> bool:
    if type(logits) is not Tensor or type(targets) is not Tensor or targets.dtype != torch.int64:
        return False
    return logits.shape == (*targets.shape, vocab_size)
