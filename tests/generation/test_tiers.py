"""Which calls go to transformers' own decoding method, and what the report says of it."""

import copy
import functools
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GPT2DoubleHeadsModel,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

import fuseopt
from fuseopt.errors import PlanError
from fuseopt.generation.tiers import Tier
from fuseopt.ops.library import Observer
from tests import tiny

GENERATION = {"generation": {"enable": True, "max_batch": 5, "max_length": 32}}
pytestmark = pytest.mark.usefixtures("each_device")


class Passive(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class LooksOn(Observer):
    __torch_dispatch__ = Passive.__torch_dispatch__


class MyNGram(NoRepeatNGramLogitsProcessor):
    pass


class Doubled(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores * 2


class TwoTokens(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9, device=input_ids.device)


class Streamer:
    def __init__(self):
        self.puts, self.ended = [], False

    def put(self, tokens):
        self.puts.append(tokens.tolist())

    def end(self):
        self.ended = True


def generate(model, **kwargs):
    inputs = tiny.inputs(model, batch=2)["input_ids"]
    torch.manual_seed(0)
    given = {"inputs": inputs, "attention_mask": torch.ones_like(inputs), "max_new_tokens": 6, **kwargs}
    return model.generate(**given)


def served(model):
    return model.generate.calls[-1]


# On a GPU transformers would compile what has a static cache.
STOCK_CALLS = {
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is set"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is set"),
    "a cache left open": ({"use_cache": None}, "use_cache is None"),
    "static cache by name": (
        {"cache_implementation": "static", "disable_compile": True},
        "cache_implementation selects",
    ),
    "batch": ({"num_return_sequences": 3, "do_sample": True}, "6 rows are more than max_batch, 5"),
    "length": ({"max_new_tokens": 40}, "cache slots are more than max_length, 32"),
    "token types": ({"token_type_ids": torch.zeros(2, 7, dtype=torch.long)}, "token_type_ids is passed to the model"),
}


@pytest.mark.parametrize("case", STOCK_CALLS)
def test_calls_that_transformers_decodes(case, each_device):
    model = tiny.gpt2()
    if case == "attentions":
        model.set_attn_implementation("eager")
    kwargs, reason = STOCK_CALLS[case]
    kwargs = {name: value.to(each_device) if torch.is_tensor(value) else value for name, value in kwargs.items()}
    stock = generate(model, **kwargs)
    fuseopt.initialize(model, GENERATION)
    fused = generate(model, **kwargs)
    assert type(fused) is type(stock)
    if torch.is_tensor(stock):
        assert torch.equal(fused, stock)
    assert served(model).tier is Tier.STOCK and reason in served(model).reason
    assert reason in "\n".join(fuseopt.report(model).since)


@pytest.mark.parametrize("case", ["prompt", "prompts that are long", "new tokens"])
def test_max_length_bounds_both_caches(case):
    """`max_length` counts slots of the encoder's output and of the decoder."""
    model = fuseopt.initialize(tiny.t5(), GENERATION)
    lengths = {"prompt": (32, 33), "prompts that are long": (32, 40), "new tokens": (7, 7)}[case]
    new_tokens = (32, 33) if case == "new tokens" else (3, 3)
    for length, new, wanted in zip(lengths, new_tokens, ("", "cache slots are more than max_length, 32"), strict=True):
        inputs = tiny.inputs(model, length=length)["input_ids"]
        arguments = {"max_new_tokens": new, "attention_mask": torch.ones_like(inputs)}
        tokens = model.generate(inputs, **arguments)
        assert torch.equal(tokens, type(model).generate(model, inputs, **arguments))
        assert served(model).reason.endswith(wanted) and bool(served(model).reason) == bool(wanted)


@pytest.mark.parametrize("each_device", ["cpu"], indirect=True)
def test_a_model_s_last_position_is_used_and_none_after_it():
    """The last token is not an input, so it needs no position."""
    model = fuseopt.initialize(tiny.gpt2(n_positions=12), GENERATION)
    inputs = tiny.inputs(model)["input_ids"]
    arguments = {"attention_mask": torch.ones_like(inputs), "eos_token_id": -1}
    tokens = model.generate(inputs, max_new_tokens=6, **arguments)
    assert torch.equal(tokens, type(model).generate(model, inputs, max_new_tokens=6, **arguments))
    assert tokens.shape[1] == 13 and served(model).tier is Tier.DEVICE_LOOP
    with pytest.raises(IndexError):
        type(model).generate(model, inputs, max_new_tokens=7, **arguments)
    with pytest.raises(IndexError):
        model.generate(inputs, max_new_tokens=7, **arguments)
    assert served(model).reason == "13 tokens are more than the model's 12 positions"
    early_prefill = model.generate.early_prefill
    assert early_prefill._expected_sizes({"max_new_tokens": 6}, inputs)[1] == 6
    assert early_prefill._expected_sizes({"max_new_tokens": 7}, inputs) is None


def test_hooks_that_transformers_leaves_behind_cost_nothing():
    model = tiny.gpt2()
    generate(model, output_hidden_states=True, return_dict_in_generate=True)
    assert model.transformer.h[0]._forward_hooks
    fuseopt.initialize(model, GENERATION)
    generate(model)
    assert served(model).tier is Tier.DEVICE_LOOP


def test_assisted_decoding_is_transformers_own():
    model = tiny.gpt2()
    ids = tiny.inputs(model, batch=1)["input_ids"]
    calls = ({"prompt_lookup_num_tokens": 2}, {"assistant_model": tiny.gpt2(seed=1)})
    stock = [model.generate(ids, max_new_tokens=5, **kwargs) for kwargs in calls]
    fuseopt.initialize(model, GENERATION)
    for kwargs, wanted in zip(calls, stock, strict=True):
        assert torch.equal(model.generate(ids, max_new_tokens=5, **kwargs), wanted)
        assert served(model).tier is Tier.STOCK and "assisted decoding" in served(model).reason


def test_a_cache_of_another_kind(each_device):
    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    generate(model, past_key_values=StaticCache(config=model.config, max_cache_len=20), disable_compile=True)
    assert served(model).reason == "the cache is a StaticCache, not the one that transformers makes"
    generate(model, past_key_values=DynamicCache())
    assert served(model).tier is Tier.DEVICE_LOOP


def train(model):
    model.train()


def hook(model):
    model.transformer.h[1].mlp.register_forward_hook(lambda module, args, output: output * 1.1)


def leaf(model):
    class Mine(torch.nn.LayerNorm):
        pass

    model.transformer.ln_f.__class__ = Mine


def parametrize(model):
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)


def forward(model):
    attention = model.transformer.h[0].attn
    attention.forward = functools.partial(attention.forward)


def prompt_learning(model):
    """As peft does it for prefixes and prompts that it learns."""
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation


def offload(model):
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model.transformer.h[1], model.device)


STOCK_MODELS = {
    offload: "is dispatched or offloaded by accelerate",
    prompt_learning: "the model's prepare_inputs_for_generation has been replaced",
    train: "is in training mode",
    hook: "transformer.h.1.mlp carries hooks",
    leaf: "transformer.ln_f is a Mine, which the decode step does not know",
    parametrize: "lm_head is a ParametrizedLinear",
    forward: "transformer.h.0.attn has had its forward replaced",
}


@pytest.mark.parametrize("change", STOCK_MODELS, ids=lambda change: change.__name__)
def test_models_that_transformers_decodes(change, each_device):
    """The change comes after initialize: what is looked at is the model as it is in each call."""
    model, stock = fuseopt.initialize(tiny.gpt2(), GENERATION), tiny.gpt2()
    generate(model)
    assert served(model).tier is Tier.DEVICE_LOOP
    change(model), change(stock)
    assert torch.equal(generate(model), generate(stock))
    assert served(model).tier is Tier.STOCK and STOCK_MODELS[change] in served(model).reason


@contextmanager
def global_hook():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    yield
    handle.remove()


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (Passive, "a torch dispatch or function mode is active"),
        (LooksOn, ""),
        (lambda: torch.autocast("cpu", torch.bfloat16), "autocast is on"),
        (global_hook, "global module hooks are registered"),
        (torch.get_default_device, ""),
        (nullcontext, ""),
    ],
)
def test_surroundings_that_transformers_decodes_in(context, reason, each_device):
    if each_device.type != "cpu" and "autocast" in reason:
        pytest.skip("autocast for the CPU does not concern a GPU")
    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    with context():
        generate(model)
    assert served(model).reason.startswith(reason) and (served(model).tier is Tier.STOCK) == bool(reason)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"logits_processor": [MyNGram(2)]}, "MyNGram runs on the host"),
        ({"logits_processor": [Doubled()]}, "Doubled runs on the host"),
        ({"stopping_criteria": [TwoTokens()]}, "TwoTokens runs on the host"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [3, 4, 5 + row]}, "PrefixConstrainedLogitsProcessor runs on"),
    ],
)
def test_processors_and_criteria_of_the_caller_run_between_steps(kwargs, reason):
    lists = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}
    kwargs = {name: lists[name](value) if name in lists else value for name, value in kwargs.items()}
    model = tiny.gpt2()
    stock = generate(model, **kwargs)
    fuseopt.initialize(model, GENERATION)
    assert torch.equal(generate(model, **kwargs), stock)
    assert served(model).tier is Tier.FAST_FORWARD and reason in served(model).reason


def test_the_caller_s_shorter_length_counts():
    model = tiny.gpt2()
    criteria = StoppingCriteriaList([MaxLengthCriteria(10)])
    stock = generate(model, stopping_criteria=criteria)
    fuseopt.initialize(model, GENERATION)
    assert torch.equal(generate(model, stopping_criteria=criteria), stock)
    assert stock.shape[1] == 10 and served(model).tier is Tier.DEVICE_LOOP


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_new_tokens": -1},
        {"temperature": -1.0, "do_sample": True},
        {"no_such_argument": 3},
        {"num_beams": 2, "streamer": Streamer()},
        {"num_return_sequences": 2},
        {"stop_strings": ["x"]},
        {"penalty_alpha": 0.5, "top_k": 4},
        {"max_length": 3, "max_new_tokens": None},
        {"inputs": torch.ones(1, 2, dtype=torch.long), "input_ids": torch.ones(1, 2, dtype=torch.long)},
    ],
    ids=" ".join,
)
def test_bad_arguments_are_refused_in_transformers_own_words(kwargs):
    messages = []
    for model in (tiny.gpt2(), fuseopt.initialize(tiny.gpt2(), GENERATION)):
        with pytest.raises((ValueError, TypeError)) as raised:
            generate(model, **kwargs)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


# What to call, and how it was served; None where transformers refuses it before it decodes.
ODD_CALLS = {
    "beam groups in words": (tiny.gpt2, {"num_beam_groups": "2"}, "num_beam_groups asks for group beam search"),
    "a streamer and beams in words": (tiny.gpt2, {"num_beams": "2", "streamer": Streamer()}, None),
    "no beams": (tiny.gpt2, {"num_beams": 0}, "num_beams is 0"),
    "less than no beams": (tiny.t5, {"num_beams": -1}, "num_beams is -1"),
    "a list of padding": (
        tiny.gpt2,
        {"num_beams": 2, "pad_token_id": torch.tensor([4], device="cpu")},
        "pad_token_id is not a single id",
    ),
    "a criterion beyond the length": (
        tiny.gpt2,
        {"num_beams": 2, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(20)])},
        "longer than max_length, 13",
    ),
    "fewer positions than tokens": (tiny.gpt2, {"position_ids": torch.arange(6, device="cpu").repeat(2, 1)}, "raised"),
    "positions for all rows": (tiny.gpt2, {"position_ids": torch.arange(3, 10, device="cpu")[None]}, "T0"),
    "positions of more rows than tokens": (
        tiny.gpt2,
        {"position_ids": torch.arange(7, device="cpu").repeat(3, 1)},
        "position_ids has 3 rows, the prompt 2",
    ),
    "positions of more rows, which nothing reads": (
        tiny.t5,
        {"position_ids": torch.arange(7, device="cpu").repeat(3, 1)},
        "position_ids has 3 rows, the prompt 2",
    ),
    "embeddings of more rows than tokens": (
        tiny.gpt2,
        {"inputs_embeds": torch.linspace(-1, 1, 3 * 7 * 24, device="cpu").view(3, 7, 24)},
        "inputs_embeds has 3 rows, the prompt 2",
    ),
    "embeddings without a row": (
        tiny.gpt2,
        {"inputs_embeds": torch.linspace(-1, 1, 7 * 24, device="cpu").view(7, 24)},
        None,
    ),
    "a mask of all that is there": (
        tiny.gpt2,
        {"attention_mask": torch.tensor([[0] * 12, [1] * 12], device="cpu")},
        "the attention mask excludes a whole prompt and",
    ),
    "logits of another shape": (tiny.gpt2, {"logits_to_keep": None}, "logits_to_keep is not an int"),
    "a length with a point": (tiny.gpt2, {"max_new_tokens": 2.0}, "no integer maximal length"),
    "a length of NumPy's": (tiny.t5, {"max_new_tokens": np.int64(2)}, "T0"),
    "a length of NumPy's for beams": (tiny.t5, {"max_new_tokens": np.int64(2), "num_beams": 2}, "T1"),
    "tokens between the numbers": (
        tiny.gpt2,
        {"inputs": torch.full((2, 7), 3.5, device="cpu")},
        "input_ids are torch.float32",
    ),
    "tokens between the numbers, behind embeddings": (
        tiny.gpt2,
        {
            "inputs": torch.full((2, 7), 3.5, device="cpu"),
            "inputs_embeds": torch.linspace(-1, 1, 2 * 7 * 24, device="cpu").view(2, 7, 24),
        },
        "input_ids are torch.float32",
    ),
    "positions between the numbers": (
        tiny.gpt2,
        {"position_ids": torch.arange(7, dtype=torch.float32, device="cpu").repeat(2, 1)},
        "raised",
    ),
    "a cache for an encoder that is not there": (
        tiny.gpt2,
        {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())},
        "the cache is a EncoderDecoderCache, not the one that transformers makes",
    ),
    "a cache of a decoder alone": (
        tiny.t5,
        {"past_key_values": DynamicCache()},
        "the cache is a DynamicCache, not the one that transformers makes",
    ),
    "more layers than the cache": (
        lambda: tiny.t5(num_layers=1, num_decoder_layers=2),
        {},
        "the cache has 1 layers, the decoder 2",
    ),
    "fewer layers than the cache": (
        lambda: tiny.t5(num_decoder_layers=1),
        {"decoder_input_ids": torch.tensor([[0, 3], [0, 4]], device="cpu")},
        "T0",
    ),
    "a mask for all rows": (
        tiny.t5,
        {"num_beams": 2, "decoder_attention_mask": torch.tensor([[1]], device="cpu")},
        "decoder_attention_mask has 2 rows, the prompt 4",
    ),
    "a mask of the tokens alone, where embeddings are more": (
        tiny.gpt2,
        {
            "attention_mask": torch.tensor([[0] + [1] * 6, [1] * 7], device="cpu"),
            "inputs_embeds": torch.linspace(-1, 1, 2 * 9 * 24, device="cpu").view(2, 9, 24),
            "position_ids": torch.arange(9, device="cpu").repeat(2, 1),
        },
        "a mask of 7 tokens is shorter than the prompt",
    ),
    "a mask shorter than the prompt": (
        tiny.t5,
        {
            "decoder_input_ids": torch.tensor([[0, 4], [0, 5]], device="cpu"),
            "decoder_attention_mask": torch.tensor([[0], [0]], device="cpu"),
        },
        "a mask of 1 tokens is shorter than the prompt",
    ),
}


@pytest.mark.parametrize("case", ODD_CALLS)
def test_odd_calls_come_to_what_they_do_in_transformers(case, each_device):
    make, kwargs, reason = ODD_CALLS[case]
    outcomes = []
    for model in (make(), fuseopt.initialize(make(), GENERATION)):
        try:
            own = copy.deepcopy(kwargs)
            own = {name: value.to(each_device) if torch.is_tensor(value) else value for name, value in own.items()}
            outcomes.append(generate(model, **own).tolist())
        except Exception as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[1] == outcomes[0]
    assert reason is None or reason in str(served(model)), served(model)


def test_the_report_keeps_the_last_calls_only():
    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    for _ in range(20):
        generate(model, max_new_tokens=1)
    lines = fuseopt.report(model).since
    assert lines[0].startswith("generate(): T0 device loop: ") and lines[0].endswith(" (8 calls)")
    assert len(fuseopt.report(model).generate_calls) == 8 and not any("T0 device loop" in line for line in lines[1:])
    assert fuseopt.report(model).to_dict()["since"] == list(lines)


def test_the_report_has_equal_calls_in_a_row_as_one_line():
    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    for attentions in (True, True, False, True):
        generate(model, max_new_tokens=1, output_attentions=attentions, return_dict_in_generate=True)
    attentions, loop, again = fuseopt.report(model).since[:3]
    assert attentions.endswith("T2 stock transformers: output_attentions is set (2 calls)")
    assert "T0 device loop" in loop and "calls" not in loop
    assert again.endswith("T2 stock transformers: output_attentions is set")


def test_models_without_a_step_are_skipped():
    class Mine(GPT2LMHeadModel):
        pass

    for model, reason in (
        (tiny.longt5(), "no decode step is written for LongT5ForConditionalGeneration"),
        (Mine(tiny.gpt2().config), "no decode step is written for"),
        (GPT2DoubleHeadsModel(tiny.gpt2().config), "no decode step is written for GPT2DoubleHeadsModel"),
        (torch.nn.Linear(2, 2), "Linear has no generate() of transformers"),
    ):
        with pytest.raises(PlanError, match=reason.replace("(", r"\(").replace(")", r"\)")):
            fuseopt.initialize(model, GENERATION, strict=True)
        assert "generate" not in model.__dict__
