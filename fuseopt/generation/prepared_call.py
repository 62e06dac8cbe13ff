"""PreparedCall: what transformers hands to a decoding method once it has prepared a call of generate()."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.utils import GENERATION_MODES_MAPPING

from fuseopt.generation.engine.state import Sizes


class PreparedCall(NamedTuple):
    """The arguments of `GenerationMixin._sample` and `_beam_search`, with the names that they have there shortened.

    Attributes:
        input_ids: [rows, length]; rows include beams and returned sequences.
        processors: LogitsProcessorList.
        criteria: StoppingCriteriaList.
        config: GenerationConfig.
        model_kwargs: of the model's forward, `past_key_values` among them.
        streamer: the caller's, which transformers does not pass to a `custom_generate`.
        returns_cache: whether an output class contains the cache.
    """

    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    model_kwargs: dict[str, Any]
    streamer: Any
    returns_cache: bool = True

    @property
    def bounds(self) -> tuple[int, int]:
        """Length of the prompts, and the length at which all sequences end; 0 if unbounded."""
        return self.input_ids.shape[1], length_limit(self.criteria) or 0

    @property
    def decoder_cache(self) -> Any:
        """The cache of the decoder's self-attention."""
        cache = self.model_kwargs["past_key_values"]
        return getattr(cache, "self_attention_cache", cache)

    @property
    def has_user_cache(self) -> bool:
        """Whether the caller passed the cache, and may read it afterwards."""
        return bool(getattr(self.model_kwargs["past_key_values"], "_is_user_defined", False))

    def sizes(self) -> Sizes:
        """Rows and slots that the call needs; with a cache of the caller's, an upper bound of the slots."""
        rows, (length, limit) = self.input_ids.shape[0], self.bounds
        embeds, encoded = self.model_kwargs.get("inputs_embeds"), self.model_kwargs.get("encoder_outputs")
        prompt = length if embeds is None else max(length, embeds.shape[1])
        past = self.model_kwargs["past_key_values"].get_seq_length()
        forwards = max(0, limit - length - 1)
        capacity = past + prompt + forwards
        beams = self.config.num_beams or 1
        if encoded is None:
            return Sizes(rows, capacity, beams=beams)
        # transformers has repeated each item of the encoder's output so often. A caller's cache may hold anything.
        repeated = max(beams, self.config.num_return_sequences or 1)
        cache = self.model_kwargs["past_key_values"].cross_attention_cache
        return Sizes(rows, capacity, encoded[0].shape[1], 1 if cache.get_seq_length() else repeated, beams)

    def without_encoder_mask(self) -> PreparedCall:
        """The call itself, or that of a model with an encoder without `attention_mask`."""
        if self.model_kwargs.get("encoder_outputs") is None:
            return self
        others = {name: value for name, value in self.model_kwargs.items() if name != "attention_mask"}
        return self._replace(model_kwargs=others)

    def cached(self) -> PreparedCall:
        """The call itself, or for `use_cache=False` the call with a cache, whose tokens are the same."""
        if self.config.use_cache:
            return self
        config = copy.copy(self.config)
        config.use_cache = True
        encodes = self.model_kwargs.get("encoder_outputs") is not None
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if encodes else DynamicCache()
        model_kwargs = {**self.model_kwargs, "use_cache": True, "past_key_values": cache}
        return self._replace(config=config, model_kwargs=model_kwargs, returns_cache=False)

    def run_encoder(self, model: Any, ids: Tensor, mask: Tensor | None) -> None:
        """Replaces `encoder_outputs` by what the model's encoder makes of prompts [items, length] now."""
        encoded = model.get_encoder()(
            input_ids=ids,
            attention_mask=mask,
            output_attentions=self.config.output_attentions,
            output_hidden_states=self.config.output_hidden_states,
            return_dict=True,
        )
        copies = self.input_ids.shape[0] // ids.shape[0]
        _, expanded = model._expand_inputs_for_generation(copies, True, encoder_outputs=encoded)
        self.model_kwargs.update(expanded)

    def run_decoding_method(self, model_class: Any, model: Any) -> Any:
        """Runs the decoding method of `model_class` that transformers would have called, with `model` as self."""
        mode = self.config.get_generation_mode(None)
        # Not every decoding method has the parameter.
        streamer = {} if self.streamer is None else {"streamer": self.streamer}
        return getattr(model_class, GENERATION_MODES_MAPPING[mode])(
            model,
            self.input_ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            synced_gpus=False,
            **streamer,
            **self.model_kwargs,
        )


def length_limit(criteria: Sequence[Any]) -> int | None:
    """The length at which all sequences have ended; None if no criterion gives one as an integer."""
    limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    try:
        return min(map(operator.index, limits), default=None)
    except TypeError:
        return None
