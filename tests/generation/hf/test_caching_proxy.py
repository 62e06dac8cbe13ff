"""What transformers' generate() is not asked again, and that it is where the answer may be another."""

import copy
import inspect
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

import fuseopt
from fuseopt.generation.hf.caching_proxy import CachingModelProxy
from tests import tiny
from tests.generation.same_calls import GENERATION, assert_same, generate, prompt

pytestmark = pytest.mark.usefixtures("each_device")


@pytest.fixture(params=["gpt2", "t5"])
def model(request, each_device):
    return tiny.FAMILIES[request.param]()


# What transformers asks models without an encoder alone.
OF_DECODERS = ("_supports_mm_encoder_outputs", "_prepare_position_ids_for_generation")


@pytest.fixture
def asked(model, monkeypatch):
    """How often each question has been answered by transformers."""
    counts = {}

    def count(owner, name):
        answer = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return answer(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(type(model), "_validate_model_kwargs")
    count(type(model), "_supports_logits_to_keep")
    if hasattr(model, OF_DECODERS[0]):
        count(type(model), OF_DECODERS[0])
    count(type(model.config), "_get_generation_parameters")
    return counts


def test_a_second_call_asks_nothing_again(model, asked):
    inputs = prompt(model, 2, 6, 0)
    wanted = generate(model, inputs, max_new_tokens=4)
    stock = dict(asked)
    assert len(stock) >= 3
    fuseopt.initialize(model, GENERATION)
    for _ in range(3):
        assert_same(generate(model, inputs, max_new_tokens=4), wanted)
    assert all(times == stock.get(question, 0) + 1 for question, times in asked.items())


def test_what_a_cache_is_made_for_is_read_once(model, monkeypatch):
    """Attributes of a config are slow, and of each layer's several are read, whether it has them or not."""
    read, get = [], type(model.config).__getattribute__
    monkeypatch.setattr(
        type(model.config), "__getattribute__", lambda config, name: read.append(name) or get(config, name)
    )
    inputs = prompt(model, 2, 6, 0)
    fuseopt.initialize(model, GENERATION)
    generate(model, inputs, max_new_tokens=4)
    assert "sliding_window" in read
    read.clear()
    generate(model, inputs, max_new_tokens=4)
    assert not {"sliding_window", "layer_types", "num_hidden_layers"} & {*read}
    model.config = copy.deepcopy(model.config)
    generate(model, inputs, max_new_tokens=4)
    assert "sliding_window" in read


def test_arguments_of_other_names_are_looked_at(model, asked):
    inputs = prompt(model, 2, 6, 0)
    fuseopt.initialize(model, GENERATION)
    generate(model, inputs, max_new_tokens=4)
    for _ in range(2):
        with pytest.raises(ValueError, match="no_such_argument"):
            generate(model, inputs, max_new_tokens=4, no_such_argument=1)
    generate(model, inputs, max_new_tokens=4, no_such_argument=None)
    assert asked["_validate_model_kwargs"] == 3


def test_a_config_that_is_changed_is_looked_at(model, asked):
    inputs = prompt(model, 2, 6, 0)
    fuseopt.initialize(model, GENERATION)
    generate(model, inputs, max_new_tokens=4)
    model.config.repetition_penalty = 1.5
    for _ in range(2):
        with pytest.raises(ValueError, match="modified the pretrained model configuration"):
            generate(model, inputs, max_new_tokens=4)
    del model.config.repetition_penalty
    generate(model, inputs, max_new_tokens=4)
    model.config = copy.deepcopy(model.config)
    model.config.top_k = 3
    with pytest.raises(ValueError, match="modified the pretrained model configuration"):
        generate(model, inputs, max_new_tokens=4)


def test_a_forward_that_is_replaced_is_looked_at(each_device):
    """As of an encoder, of which transformers takes the arguments for the model's."""
    model = tiny.t5()
    inputs = prompt(model, 2, 6, 0)
    fuseopt.initialize(model, GENERATION)
    with pytest.raises(ValueError, match="another"):
        generate(model, inputs, max_new_tokens=4, another=1)
    encode = model.encoder.forward
    model.encoder.forward = lambda input_ids, attention_mask=None, another=None, **kwargs: encode(
        input_ids, attention_mask=attention_mask, return_dict=True
    )
    assert generate(model, inputs, max_new_tokens=4, another=1)
    del model.encoder.forward
    with pytest.raises(ValueError, match="another"):
        generate(model, inputs, max_new_tokens=4, another=1)


@pytest.mark.parametrize("name", sorted(CachingModelProxy.METHODS & set(dir(GenerationMixin))))
def test_a_method_of_the_instance_is_taken(model, name):
    inputs = prompt(model, 2, 6, 0)
    wanted = generate(model, inputs, max_new_tokens=4)
    fuseopt.initialize(model, GENERATION)
    own = mock.Mock(side_effect=getattr(model, name))
    setattr(model, name, own)
    assert_same(generate(model, inputs, max_new_tokens=4), wanted)
    assert own.called or (model.config.is_encoder_decoder and name in OF_DECODERS)


@pytest.mark.parametrize(
    "ids",
    [
        {},
        {"eos_token_id": 7},
        {"eos_token_id": [7, 9], "pad_token_id": 0},
        {"eos_token_id": []},
        {"eos_token_id": torch.tensor([7, 9], device="cpu")},
        {"eos_token_id": -1, "pad_token_id": 3},
        {"decoder_start_token_id": [5, 6]},
    ],
    ids=str,
)
def test_special_tokens_errors_and_warnings_equal_transformers(model, ids, caplog):
    prepared, messages = [], []
    for owner in (model, CachingModelProxy(model)):
        config = GenerationConfig(**{"decoder_start_token_id": 0, **ids})
        caplog.clear()
        try:
            owner._prepare_special_tokens(config, False, device=model.device, batch_size=2)
        except (IndexError, ValueError, RuntimeError) as error:
            prepared.append(repr(error))
        else:
            prepared.append({name: value for name, value in vars(config).items() if name.endswith("_tensor")})
        messages.append(caplog.messages)
    if isinstance(prepared[0], str):
        assert prepared[1] == prepared[0]
        return
    assert len(prepared[0]) == 4
    torch.testing.assert_close(prepared[1], prepared[0], rtol=0, atol=0)
    # transformers gives some of its warnings once in a process.
    assert messages[1] in (messages[0], [m for m in messages[0] if "attention mask is not set" not in m])


@pytest.mark.parametrize("ids", [{"eos_token_id": 7, "pad_token_id": 0}, {"eos_token_id": [7, 9]}], ids=str)
def test_special_tokens_are_prepared_once(model, ids, monkeypatch):
    passes, calls, prepare = CachingModelProxy(model), [], type(model)._prepare_special_tokens
    monkeypatch.setattr(
        type(model), "_prepare_special_tokens", lambda *args, **kwargs: calls.append(args) or prepare(*args, **kwargs)
    )

    def prepared(**others):
        config = GenerationConfig(**{"decoder_start_token_id": 0, **ids, **others})
        passes._prepare_special_tokens(config, True, device=model.device, batch_size=2)
        return {name: value for name, value in vars(config).items() if name.endswith("_tensor")}

    first, second = prepared(), prepared()
    assert len(calls) == 1 and all(second[name] is value for name, value in first.items())
    assert prepared(eos_token_id=8)["_eos_token_tensor"].tolist() == [8]
    assert len(calls) == 2
    first["_eos_token_tensor"][0] = 5
    assert prepared()["_eos_token_tensor"][0] == 7
    assert len(calls) == 3


def test_a_warning_that_comes_with_every_call_does(model, caplog):
    passes = CachingModelProxy(model)
    caplog.set_level("WARNING")
    for owner in (model, passes, passes, passes):
        caplog.clear()
        config = GenerationConfig(decoder_start_token_id=0, eos_token_id=7)
        owner._prepare_special_tokens(config, False, device=model.device, batch_size=2)
        assert any("attention mask and the pad token id were not set" in text for text in caplog.messages)


def test_what_passes_for_the_model_shows_its_forward(model):
    passes = CachingModelProxy(model)
    assert inspect.signature(passes.forward) == inspect.signature(model.forward)
    ids = prompt(model, 1, 3, 0)["input_ids"]
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    assert torch.equal(passes.forward(ids, **more).logits, model(ids, **more).logits)
    assert passes.device == model.device and passes.generation_config is model.generation_config
