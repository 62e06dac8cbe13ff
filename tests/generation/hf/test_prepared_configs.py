"""Settings of a call that are remembered, against transformers' own preparation of them."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.utils import logging

from fuseopt.generation.hf.prepared_configs import PreparedConfigs
from tests import tiny


@pytest.fixture
def model():
    return tiny.gpt2()


def counted(model):
    """transformers' method, and the calls of it."""
    calls, prepare = [], type(model)._prepare_generation_config

    def counting(*args, **kwargs):
        calls.append(kwargs)
        return prepare(*args, **kwargs)

    return counting, calls


def prepared(config, unused):
    return type(config), vars(config), unused


MASK = torch.ones(1, 3)
SETTINGS = {
    "max_new_tokens": st.sampled_from([None, 1, 7]),
    "do_sample": st.booleans(),
    "temperature": st.sampled_from([0.5, 1.0, 1]),
    "eos_token_id": st.sampled_from([None, 1, True, [1, 2]]),
    "num_beams": st.sampled_from([1, 2]),
    "output_attentions": st.booleans(),
    "no_such_setting": st.sampled_from([None, 1, True]),
    "attention_mask": st.just(MASK),
}


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_configs_of_random_arguments_equal_what_transformers_prepares(model, data):
    """One memory for all calls, so that what it holds of others would show."""
    configs, prepare = PreparedConfigs(), type(model)._prepare_generation_config
    for _ in range(6):
        arguments = data.draw(st.fixed_dictionaries({}, optional=SETTINGS))
        given_config = data.draw(st.sampled_from([None, GenerationConfig(top_k=4), GenerationConfig(eos_token_id=[3])]))
        model.generation_config.top_p = data.draw(st.sampled_from([0.5, 1.0, 1]))
        wanted = prepared(*prepare(model, given_config, **arguments))
        got = prepared(*configs(prepare, model, given_config, arguments))
        assert got == wanted and list(map(type, got[1].values())) == list(map(type, wanted[1].values()))
        assert all(got[2][name] is arguments[name] for name in got[2] if name in arguments)


def test_the_same_arguments_are_prepared_once(model):
    configs, (prepare, calls) = PreparedConfigs(), counted(model)
    for length in (3, 3, 4, 3):
        configs(prepare, model, None, {"max_new_tokens": length, "attention_mask": torch.ones(1, length)})
    assert len(calls) == 2


def test_settings_are_nobody_else_s(model):
    configs, (prepare, calls) = PreparedConfigs(), counted(model)
    for _ in range(3):
        config, _ = configs(prepare, model, None, {"max_new_tokens": 3})
        assert config.max_new_tokens == 3 and not hasattr(config, "mine")
        config.max_new_tokens, config.mine = 9, 1
    assert len(calls) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "top_k", 3),
        lambda config: setattr(config, "mine", 3),
        lambda config: delattr(config, "top_k"),
        lambda config: setattr(config, "suppress_tokens", [1]),
    ],
    ids=["another", "a new one", "one less", "a list"],
)
def test_a_model_s_settings_that_change_show(model, change):
    configs, (prepare, calls) = PreparedConfigs(), counted(model)
    for _ in range(2):
        configs(prepare, model, None, {})
    change(model.generation_config)
    assert prepared(*configs(prepare, model, None, {})) == prepared(*prepare(model, None))
    assert len(calls) == 3


def test_what_can_be_edited_in_place_is_not_remembered(model):
    configs, (prepare, calls) = PreparedConfigs(), counted(model)
    model.generation_config.eos_token_id = [1]
    for i in range(3):
        model.generation_config.eos_token_id[0] = i
        config, _ = configs(prepare, model, None, {})
        assert config.eos_token_id == [i]
    assert len(calls) == 3


def test_errors_and_subclasses_are_transformers_own(model):
    class Mine(GenerationConfig):
        pass

    configs, (prepare, calls) = PreparedConfigs(), counted(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="max_new_tokens"):
            configs(prepare, model, None, {"max_new_tokens": -1})
        assert type(configs(prepare, model, Mine(), {})[0]) is Mine
    assert len(calls) == 4


def test_a_warning_that_depends_on_the_verbosity_comes(model):
    configs, (prepare, calls) = PreparedConfigs(), counted(model)
    before = logging.get_verbosity()
    try:
        for level in (logging.ERROR, logging.INFO, logging.INFO):
            logging.set_verbosity(level)
            configs(prepare, model, None, {"temperature": 0.3, "do_sample": False})
    finally:
        logging.set_verbosity(before)
    assert len(calls) == 2


def test_as_many_are_kept_as_may_be(model):
    configs, (prepare, calls) = PreparedConfigs(), counted(model)
    for length in [*range(1, 18), 17, 1]:
        assert configs(prepare, model, None, {"max_new_tokens": length})[0].max_new_tokens == length
    assert len(calls) == 18


def test_a_copy_of_the_config_is_the_same(model):
    configs, (prepare, _) = PreparedConfigs(), counted(model)
    for config in (GenerationConfig(top_k=4), GenerationConfig(top_k=4), GenerationConfig(top_k=5)):
        got = configs(prepare, model, copy.copy(config), {})
        assert prepared(*got) == prepared(*prepare(model, config))
