"""Forward for attentions with rotary position embeddings (Llama's and similar), which rotates with one op.

The attention module keeps its class, because transformers records attentions by class. Only its `forward` is set on the
instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fuseopt import ops
from fuseopt.blocks.attention_functions import attention_function
from fuseopt.runtime.references import code_of_forward, weak_attribute


class RotaryAttentionForward:
    """Forward of one attention, in which `ops.rotary_embedding` rotates queries and keys.

    Calls the same modules in the same order as the class's own forward: projections, norms, rotation, cache, and the
    attention function that the config names.

    Belongs to one attention, and is copied and pickled with it. Does not work with torch.nn.DataParallel, whose
    replicas keep the first device's forward, and raise.

    Args:
        attention: a module of a class in `models/rotary_attentions.py`, which also has the options below.
        backend: of `ops.rotary_embedding`.
        packed: one projection `qkv_proj` holds queries, keys and values, in this order.
        norms: where `q_norm` and `k_norm` apply: "projections", to [batch, length, heads, dim]; "heads", to
            [batch, heads, length, dim]; None, nowhere.
        passes: further keyword arguments of the attention function: name -> attribute of the attention, or of its
            config ("config.sliding_window"; None if the config lacks it).
    """

    attention = weak_attribute("attention")
    __code__ = code_of_forward("attention")

    def __init__(
        self,
        attention: nn.Module,
        *,
        backend: str = "auto",
        packed: bool = False,
        norms: str | None = None,
        passes: Mapping[str, str] | None = None,
    ) -> None:
        self.attention, self.backend, self.packed, self.norms = attention, backend, packed, norms
        self.passes = dict(passes or {})
        # `attention.__class__` may be set later, to a class with another forward.
        self._source = type(attention)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if type(self.attention).forward is self._source.forward:
            return self._forward(*args, **kwargs)
        output: tuple[Tensor, Tensor | None] = type(self.attention).forward(self.attention, *args, **kwargs)
        return output

    def _forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        attention: Any = self.attention
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        query, key, value = (projected.view(shape) for projected in self._project(hidden_states))
        if self.norms == "projections":
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.norms == "heads":
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = ops.rotary_embedding(query, key, *position_embeddings, backend=self.backend)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        output, weights = attention_function(attention, attention.config)(
            attention,
            query,
            key,
            value,
            attention_mask,
            dropout=attention.attention_dropout if attention.training else 0.0,
            scaling=attention.scaling,
            **{name: self._attribute(path) for name, path in self.passes.items()},
            **kwargs,
        )
        return attention.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _project(self, hidden_states: Tensor) -> Sequence[Tensor]:
        attention: Any = self.attention
        if not self.packed:
            return attention.q_proj(hidden_states), attention.k_proj(hidden_states), attention.v_proj(hidden_states)
        packed = attention.qkv_proj(hidden_states)
        of_keys = attention.num_key_value_heads * attention.head_dim
        return packed.split((packed.shape[-1] - 2 * of_keys, of_keys, of_keys), dim=-1)

    def _attribute(self, path: str) -> Any:
        owner, _, name = path.rpartition(".")
        return getattr(self.attention.config, name, None) if owner else getattr(self.attention, name)
