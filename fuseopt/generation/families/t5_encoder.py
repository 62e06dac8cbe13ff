"""T5Encoder: the encoder of T5ForConditionalGeneration (v1.0 and v1.1) for prompts of tokens, on its own Parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt.generation.engine.graphs import PromptWork, StepGraphs
from fuseopt.generation.engine.layers import embedded, normalised
from fuseopt.generation.engine.low_rank import LowRankUpdates
from fuseopt.generation.engine.residual_stream import ResidualStream
from fuseopt.generation.engine.state import prompt_length_for
from fuseopt.generation.families.spec_step import add_feed_forward
from fuseopt.generation.families.step_interface import EncoderStep
from fuseopt.generation.families.t5_layers import feed_forward_of, norm_of, self_attention_of

# Longer prompts run by transformers: the bias of a layer's scores has heads x length x length numbers.
_LONGEST_PROMPT = 1024


class EncoderState:
    """The static tensors of one number of items and length class.

    `ids` [items, length] int64 and `keep` [items, length] bool are read up to slot `last` [1] int64; `encoded` is
    [items, length, hidden]. `buckets` [length, length] int64 are those of the relative positions.
    """

    def __init__(self, items: int, buckets: Tensor, width: int, dtype: torch.dtype) -> None:
        length = len(buckets)
        self.sizes, self.device, self.buckets = ("encoder", items, length), buckets.device, buckets
        # A tensor made in inference mode could not be written to outside it later.
        with torch.inference_mode(False):
            self.ids = torch.zeros(items, length, dtype=torch.int64, device=self.device)
            self.keep = torch.ones(items, length, dtype=torch.bool, device=self.device)
            self.slots = torch.arange(length, device=self.device)
            self.last = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.encoded = torch.zeros(items, length, width, dtype=dtype, device=self.device)

    @property
    def bytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


class T5Encoder(EncoderStep):
    """What `encode` computes is `T5Stack.forward` of the encoder in eval mode; weights are read where they are."""

    def __init__(self, model: nn.Module) -> None:
        encoder = model.encoder
        self.token_embedding = encoder.embed_tokens.weight
        self.layers = [(self_attention_of(block.layer[0]), feed_forward_of(block.layer[1])) for block in encoder.block]
        linears = (part for own, after in self.layers for part in (own.qkv, own.out, after.up, after.down))
        self.low_rank = LowRankUpdates(linear.low_rank for linear in linears)
        self.lora_layers = self.low_rank.layers
        self.final_norm = norm_of(encoder.final_layer_norm)
        attention = encoder.block[0].layer[0].SelfAttention
        self.heads = attention.n_heads
        self.relative_bias = attention.relative_attention_bias.weight
        self.bucket_of, self.buckets = attention._relative_position_bucket, self.constants(model)

    @staticmethod
    def constants(model: nn.Module) -> tuple[int, int]:
        """What it takes from the model beside modules' weights and the constants that a survey looks at."""
        attention = model.encoder.block[0].layer[0].SelfAttention
        return attention.relative_attention_num_buckets, attention.relative_attention_max_distance

    def state_for(self, graphs: StepGraphs, items: int, length: int) -> EncoderState | None:
        """What prompts of this class run in; None where a call would gain nothing."""
        padded = prompt_length_for(items, length, self.token_embedding.device)
        if padded is None or padded > _LONGEST_PROMPT:
            return None
        return graphs.state(("encoder", items, padded), lambda: self._state(items, padded))

    def __call__(
        self, graphs: StepGraphs, state: EncoderState, input_ids: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, str]:
        """Runs as a CUDA graph from the second time on that prompts of this length class come.

        Args:
            state: of this size.
            input_ids: [items, length] int64.
            keep: attention mask of the same shape, nonzero where a token counts, or None where all do.

        Returns:
            The encoder's output [items, length, hidden], valid until the next call, and why it could not be captured,
            or nothing.
        """
        length = input_ids.shape[1]
        self.low_rank.fill()
        state.ids[:, :length] = input_ids
        state.last.fill_(length - 1)
        if keep is not None:
            state.keep[:, :length] = keep.bool()
        note = graphs.run_prompt(PromptWork(self.encode, state, len(state.slots), keep is not None))
        return state.encoded[:, :length], note

    def encode(self, state: EncoderState, length: int, masked: bool) -> None:
        """Fills `encoded`.

        Padding after a prompt repeats its last token with that token's relative positions. No token of the prompt
        attends to it, but attention multiplies its values by 0, so they must be finite if the prompt's own are.
        """
        self.low_rank.begin_step()
        items = len(state.ids)
        in_prompt, source = state.slots <= state.last, torch.minimum(state.slots, state.last)
        # PyTorch's fast attention kernels take no bias of other strides.
        buckets = state.buckets.index_select(0, source)
        bias = F.embedding(buckets, self.relative_bias).permute(2, 0, 1).contiguous()[None]
        if masked:
            bias = torch.where(state.keep[:, None, None], bias, torch.finfo(bias.dtype).min)
        # A prompt whose tokens are all masked attends to itself, but not to the padding after it.
        bias = torch.where(in_prompt, bias, -torch.inf).expand(items, -1, -1, -1)
        tokens = state.ids.index_select(1, source).flatten()
        stream = ResidualStream(embedded(tokens, self.token_embedding), clamps_float16=True)
        for attention, feed_forward in self.layers:
            qkv = stream.linear(attention.qkv, attention.norm)
            query, keys, values = qkv.view(items, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
            # A token alone attends to itself, for which PyTorch has no fast kernel.
            attended = values
            if length > 1:
                attended = F.scaled_dot_product_attention(
                    query, keys, values, bias.to(query.dtype), scale=attention.scale
                )
            stream.add(attended.transpose(1, 2).reshape(items * length, -1), attention.out)
            add_feed_forward(stream, feed_forward)
        state.encoded.copy_(normalised(stream.total(), self.final_norm).view_as(state.encoded))

    def _state(self, items: int, length: int) -> EncoderState:
        slots = torch.arange(length, device=self.token_embedding.device)
        num_buckets, max_distance = self.buckets
        buckets = self.bucket_of(slots - slots[:, None], True, num_buckets, max_distance)
        weight = self.final_norm.weight
        return EncoderState(items, buckets, weight.shape[0], weight.dtype)
