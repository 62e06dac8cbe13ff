"""An argument with the value that it has anyway changes neither tier nor tokens, nor does `use_cache=False`."""

import inspect

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import fuseopt
from fuseopt.generation.prompt.early_prefill import EarlyPrefill
from fuseopt.generation.tiers import Tier
from tests import tiny
from tests.generation.same_calls import prompt, used_cache

GENERATION = {"generation": {"enable": True}}
# None is not their default: transformers raises for it, or runs the whole prompt in each step for `use_cache`.
REQUIRED = {"num_beams", "num_return_sequences", "use_cache"}
OTHERS = (
    *({"use_cache": True}, {"cache_implementation": "dynamic"}, {"synced_gpus": False}, {"num_beam_groups": 1}),
    *({"output_attentions": False}, {"output_hidden_states": False}, {"generation_config": GenerationConfig()}),
    *({"logits_processor": LogitsProcessorList()}, {"stopping_criteria": StoppingCriteriaList()}),
)


class Doubled(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores * 2


def defaults(model):
    """Each keyword of generate(), of GenerationConfig and of the model's forward, with its default value."""
    for name, parameter in inspect.signature(type(model).generate).parameters.items():
        if name not in ("self", "inputs") and parameter.kind is not parameter.VAR_KEYWORD:
            yield {name: parameter.default}
    settings = [*vars(GenerationConfig()).items(), *GenerationConfig._get_default_generation_params().items()]
    for name, value in settings:
        is_given = name in ("max_new_tokens", "transformers_version") or (value is None and name in REQUIRED)
        if not (is_given or name.startswith("_") or (name == "decoder_start_token_id" and value is None)):
            yield {name: value}
    for name, parameter in inspect.signature(type(model).forward).parameters.items():
        is_given = name in ("self", "input_ids", "attention_mask", "return_dict") or name in REQUIRED
        if not is_given and parameter.kind is not parameter.VAR_KEYWORD:
            yield {name: parameter.default}
    yield {"head_mask": None}


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.usefixtures("as_on_gpu")
def test_defaults_that_are_spelled_out(family, noted):
    """Nor does the prompt start later. p: it is queued early."""
    seen, note = noted
    note(EarlyPrefill, "_queue", "p")
    model = fuseopt.initialize(tiny.FAMILIES[family](), GENERATION)
    given = {**prompt(model, 2, 6, 0), "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": 2}
    wanted = type(model).generate(model, **given)
    model.generate(**given)
    count = 0
    for arguments in (*defaults(model), *OTHERS):
        seen.clear()
        tokens = model.generate(**{**arguments, **given})
        record = model.generate.calls[-1]
        assert record.tier is Tier.DEVICE_LOOP, (arguments, record)
        # Some versions of transformers do not run the encoder for encoder_outputs=None.
        assert torch.equal(tokens, wanted) and (seen == ["p"] or "encoder_outputs" in arguments), arguments
        count += 1
    assert count > 80


WITHOUT = {
    "greedy": {},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "return_dict_in_generate": True},
    "a processor": {"logits_processor": LogitsProcessorList([Doubled()]), "return_dict_in_generate": True},
    "a processor and beams": {"logits_processor": LogitsProcessorList([Doubled()]), "num_beams": 2},
}


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_call_without_a_cache_is_served_with_one(family, name, each_device):
    stock, fused = tiny.FAMILIES[family](), fuseopt.initialize(tiny.FAMILIES[family](), GENERATION)
    given = {**prompt(stock, 3, 6, 0), "max_new_tokens": 9, "pad_token_id": 0, "use_cache": False, **WITHOUT[name]}
    outputs = []
    for model in (stock, fused):
        torch.manual_seed(0)
        outputs.append(model.generate(**given))
    assert type(outputs[0]) is type(outputs[1])
    if not torch.is_tensor(outputs[0]):
        assert outputs[0].keys() == outputs[1].keys() and "past_key_values" not in outputs[1]
        outputs = [output.sequences for output in outputs]
    assert torch.equal(*outputs)
    assert fused.generate.calls[-1].tier is (Tier.FAST_FORWARD if "processor" in name else Tier.DEVICE_LOOP)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("a used cache", "a cache is passed"),
        ("an empty cache", "a cache is passed"),
        ("a longer mask", "attention_mask does not have the shape of the prompt"),
        ("chunks", "prefill_chunk_size is set"),
        ("more positions", "position_ids does not have the shape of the prompt"),
    ],
)
def test_a_call_without_a_cache_whose_tokens_a_cache_changes(other, reason):
    def outcome(model):
        ids = prompt(model, 2, 5, 0, padded=False)["input_ids"]
        arguments = {
            "a used cache": lambda: {"past_key_values": used_cache(model, ids)},
            "an empty cache": lambda: {"past_key_values": DynamicCache()},
            "a longer mask": lambda: {"attention_mask": (torch.arange(9) > 0).long().repeat(2, 1)},
            "chunks": lambda: {"prefill_chunk_size": 2},
            "more positions": lambda: {"position_ids": torch.arange(9).repeat(2, 1)},
        }[other]()
        try:
            return model.generate(ids, max_new_tokens=6, pad_token_id=0, use_cache=False, **arguments).tolist()
        except (ValueError, RuntimeError, KeyError, AttributeError) as error:
            return str(error)

    fused = fuseopt.initialize(tiny.gpt2(), GENERATION)
    assert outcome(fused) == outcome(tiny.gpt2())
    assert fused.generate.calls[-1].tier is Tier.STOCK and reason in fused.generate.calls[-1].reason
