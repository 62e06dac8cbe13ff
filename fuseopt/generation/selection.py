"""Selection: from logits to the next token of every row, and whether the row goes on, without the host."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from fuseopt.generation.device_processors import DeviceProcessor
from fuseopt.generation.state import DecodeState


class Selection:
    """Call: a DecodeState -> nothing; processes `logits` to `scores`, picks `tokens`, and appends them to `ids`.

    Upstream: the loop of `GenerationMixin._sample` from the logits on; random numbers are drawn as there, from torch's
    default generator.

    Args:
        processors: in transformers' order.
        do_sample: draw from the distribution, or take the likeliest token.
        eos: token ids [any] after which a row is padded, or None.
    """

    def __init__(self, processors: tuple[DeviceProcessor, ...], do_sample: bool, eos: Tensor | None) -> None:
        self.processors, self.do_sample, self.eos = processors, do_sample, eos
        self.key: Hashable = (
            do_sample,
            None if eos is None else eos.shape,
            *(processor.key for processor in processors),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = () if self.eos is None else (self.eos,)
        return (*own, *(tensor for processor in self.processors for tensor in processor.tensors))

    def load(self, other: Selection) -> None:
        """Takes over the values of another Selection with an equal `key`."""
        for tensor, value in zip(self.tensors, other.tensors, strict=True):
            tensor.copy_(value)

    def __call__(self, state: DecodeState) -> None:
        scores = state.logits
        for processor in self.processors:
            scores = processor(state, scores)
        state.scores.copy_(scores)
        if self.do_sample:
            tokens = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self.eos is not None:
            tokens = tokens * state.unfinished + state.pad * (1 - state.unfinished)
            # torch.isin sorts when there are many ids, which waits for the device.
            ended = (tokens[:, None] == self.eos).any(1)
            state.unfinished.mul_(~ended)
            torch.eq(state.unfinished.max(), 0, out=state.done[0])
        state.tokens.copy_(tokens)
        state.ids.index_copy_(1, state.length, tokens[:, None])
        state.length += 1
