"""Each reason for a slower tier is needed: with it taken out, some call differs from transformers."""

import re
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    DynamicCache,
    GenerationConfig,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import utils
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import fuseopt
from fuseopt.generation import tiers
from tests import tiny
from tests.generation.reasons import all_reasons, without
from tests.generation.same_calls import used_cache

GENERATION = {"generation": {"enable": True}}


def talkative():
    """A GPT-2 with larger weights; with its initial ones it repeats one token."""
    model = tiny.gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20 if parameter.dim() > 1 else 1)
    return model


class Call(SimpleNamespace):
    """A call of generate() of a stock model or a fused one.

    Attributes:
        arguments: a function of the model that gives arguments beside the prompt.
        make: the model.
        change: what is done to it after initialize.
        around: a context, given what the call is to be observed by.
        not_wrong: why taking the reason out does no harm here; the reason then is about something else.
    """

    def __init__(self, arguments=lambda model, seen: {}, **others):
        given = {"make": talkative, "change": lambda model: None, "around": lambda model, seen: nullcontext()}
        super().__init__(arguments=arguments, **given | {"not_wrong": ""} | others)

    def outcome(self, fused):
        model, seen = self.make(), []
        if fused:
            fuseopt.initialize(model, GENERATION)
        self.change(model)
        inputs = tiny.inputs(model, batch=2)["input_ids"]
        torch.manual_seed(0)
        try:
            given = {"inputs": inputs, "attention_mask": torch.ones_like(inputs), "max_new_tokens": 6}
            given |= self.arguments(model, seen)
            with self.around(model, seen):
                output = model.generate(**given)
        except Exception as error:
            return (type(error).__name__, str(error)), model
        if not torch.is_tensor(output):
            parts = (output.get(name) for name in ("attentions", "hidden_states"))
            output = output.sequences, [None if part is None else len(part) for part in parts]
        else:
            output = output.tolist() if output.device.type != "meta" else tuple(output.shape)
        return (str(output), seen), model


class Counts(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Twice(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.roll(1, dims=1)


class Third(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9, device=input_ids.device)


class Streamer:
    def __init__(self, seen):
        self.put = lambda tokens: seen.append(tokens.tolist())
        self.end = lambda: seen.append("end")


def attend_twice(module, query, key, value, *args, **kwargs):
    output, weights = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    return 2 * output, weights


class Tokenizer:
    """The parts of a tokenizer that transformers requires."""

    def __init__(self, seen):
        self.seen = seen

    def __getattr__(self, name):
        self.seen.append(name)
        raise AttributeError(name)


def assistant(model, seen):
    other = tiny.gpt2(seed=1)
    other.register_forward_hook(lambda *args: seen.append("assisted"))
    return {"assistant_model": other, "inputs": tiny.inputs(model, batch=1)["input_ids"], "attention_mask": None}


def decoded(model, seen):
    return {"custom_generate": lambda model, input_ids, **kwargs: input_ids.flip(1)}


class Mine(GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.roll(1, dims=-1)
        return output


@contextmanager
def global_hook(model, seen):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: seen.append(1))
    yield
    handle.remove()


@contextmanager
def patched(owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@contextmanager
def two_processes(model, seen):
    """Whose model DeepSpeed shares out, so that no process may stop before the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        patch.setattr(utils, "is_deepspeed_zero3_enabled", lambda: True)
        yield


def compiled(model):
    model._compiled_call_impl = lambda *args, **kwargs: Mine.forward(model, *args, **kwargs)


def other_inputs(model):
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda ids, **kwargs: prepare(ids.flip(0), **kwargs)


def own_methods(model):
    model._prepare_generation_config = type(model)._prepare_generation_config.__get__(model)


def attention(model):
    AttentionInterface.register("attend_twice", attend_twice)
    model.config._attn_implementation = "attend_twice"


def no_eos(model):
    model.generation_config.eos_token_id = None


def own_cache(model, seen):
    class Counted(DynamicCache):
        def update(self, keys, *args, **kwargs):
            seen.append(keys.shape)
            return super().update(keys, *args, **kwargs)

    return {"past_key_values": Counted()}


def in_config(**settings):
    config = GenerationConfig(**settings, return_dict_in_generate=True, eos_token_id=2)
    return lambda model, seen: {"generation_config": config}


def ends(*starts):
    criteria = [EosTokenCriteria(list(range(start, tiny.VOCAB, 3))) for start in starts]
    return lambda model, seen: {"stopping_criteria": StoppingCriteriaList(criteria)}


# Reasons that may be taken out without harm, because another reason is found later.
NO_LOCK = "nor does such a call take the lock, which the report would name"
PASSED_ON = "transformers also passes it on as an argument of the forward"
CASES = {
    "custom_generate replaces the decoding method": Call(decoded),
    "assistant_model asks for assisted decoding": Call(assistant),
    "num_beam_groups asks for group beam search": Call(lambda model, seen: {"num_beam_groups": 2, "num_beams": 2}),
    "beam search takes no streamer": Call(lambda model, seen: {"num_beams": 2, "streamer": Streamer(seen)}),
    "the model overrides preparation methods, which may need the tokenizer of stop_strings": Call(
        lambda model, seen: {"stop_strings": ["a"], "tokenizer": Tokenizer(seen)}, change=own_methods
    ),
    "synced_gpus synchronises several processes": Call(lambda model, seen: {"synced_gpus": True}),
    "cache_implementation selects a class of caches": Call(
        lambda model, seen: {"cache_implementation": "static", "disable_compile": True},
        not_wrong="the class of the cache tells as much, but only after the prompt has run for nothing",
    ),
    "torch.compile is tracing the call": Call(
        around=lambda model, seen: patched(torch.compiler, "is_compiling", lambda: True),
        not_wrong=NO_LOCK,
    ),
    "a torch dispatch or function mode is active and has to see every operation": Call(
        around=lambda model, seen: Counts(seen), not_wrong=NO_LOCK
    ),
    "FSDP or DeepSpeed ZeRO-3 shards the model over several processes": Call(around=two_processes),
    "{} asks for {}": Call(lambda model, seen: {"penalty_alpha": 0.5, "top_k": 4}),
    "{} is not exactly {}": Call(
        change=lambda model: setattr(model, "__class__", Mine),
        not_wrong="the check of the modules finds it as well; what comes between reads the attributes of the class",
    ),
    "attn_implementation is {}": Call(change=attention),
    "the model is compiled by model.compile()": Call(change=compiled),
    "global module hooks are registered": Call(around=global_hook),
    "the model's {} has been replaced": Call(change=other_inputs),
    "output_attentions is set": Call(
        in_config(output_attentions=True),
        change=lambda model: model.set_attn_implementation("eager"),
        not_wrong=PASSED_ON,
    ),
    "output_hidden_states is set": Call(in_config(output_hidden_states=True), not_wrong=PASSED_ON),
    "is_assistant is set": Call(
        lambda model, seen: {
            "is_assistant": True,
            "assistant_confidence_threshold": 0.0,
            "past_key_values": used_cache(model, tiny.inputs(model)["input_ids"]),
        },
        not_wrong="a few tokens with a cache of the caller's, whose copies cost more than the steps",
    ),
    "num_beams is {}": Call(lambda model, seen: {"num_beams": 0}),
    "use_cache is {}": Call(lambda model, seen: {"use_cache": None}),
    "logits_to_keep is not an int": Call(lambda model, seen: {"logits_to_keep": None}),
    "no integer maximal length bounds the cache": Call(lambda model, seen: {"max_new_tokens": 2.0}),
    "input_ids are {}": Call(lambda model, seen: {"inputs": torch.full((2, 7), 3.5)}),
    "the cache is a {}, not the one that transformers makes": Call(own_cache),
    "{} is passed to the model's forward": Call(
        lambda model, seen: {"token_type_ids": torch.full((2, 7), 5)},
    ),
    "{} has {} dimensions": Call(lambda model, seen: {"position_ids": torch.arange(7)}),
    "{} has {} rows, the prompt {}": Call(
        lambda model, seen: {"num_beams": 2, "decoder_attention_mask": torch.tensor([[1]])}, make=tiny.t5
    ),
    "there are several stopping criteria besides the length": Call(ends(1, 0)),
    "there is no pad token": Call(ends(0), change=no_eos),
    "pad_token_id is not a single id": Call(
        lambda model, seen: {"num_beams": 2, "pad_token_id": torch.tensor([4]), "eos_token_id": list(range(0, 60, 2))}
    ),
    "{} runs on the host": Call(lambda model, seen: {"logits_processor": LogitsProcessorList([Twice()])}),
    "{} runs on the host ": Call(
        lambda model, seen: {"stopping_criteria": StoppingCriteriaList([Third()]), "pad_token_id": 0}, change=no_eos
    ),
}
REASONS = list(all_reasons())


def case_of(reason):
    """Two reasons have the same text, one for processors and one for criteria."""
    same = [other for other in REASONS if other.text == reason.text]
    return CASES[reason.text + " " * same.index(reason)]


def test_every_reason_has_a_case():
    assert {id(case_of(reason)) for reason in REASONS} == set(map(id, CASES.values()))


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.text)
def test_a_call_with_a_reason_is_served_as_transformers_serves_it(reason):
    case = case_of(reason)
    stock, _ = case.outcome(fused=False)
    fused, model = case.outcome(fused=True)
    assert fused == stock
    words = re.escape(reason.text).replace(re.escape("{}"), ".+")
    assert re.search(words, model.generate.calls[-1].reason), model.generate.calls[-1]


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.text)
def test_without_a_reason_something_goes_wrong(reason, monkeypatch):
    case = case_of(reason)
    stock, _ = case.outcome(fused=False)
    monkeypatch.setattr(tiers, reason.function, without(reason))
    fused, _ = case.outcome(fused=True)
    assert (fused == stock) == bool(case.not_wrong)
