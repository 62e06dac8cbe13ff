"""Steps on a CPU that are replayed without Python: tokens are those of transformers, and when steps are recorded."""

from unittest import mock

import pytest
import torch

import fuseopt
from fuseopt.build import loader
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.generation.tiers import Tier
from fuseopt.runtime.recorded_runs import RecordedRun
from tests import tiny
from tests.generation.families.tiny_decoders import DECODERS, ENCODER_DECODERS
from tests.generation.same_calls import GENERATION, assert_same, prompt

NEW = 9
KINDS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 7, "temperature": 0.8},
    "filtered": {"do_sample": True, "top_k": 0, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    "beams": {"num_beams": 3},
    "scores": {"output_scores": True, "return_dict_in_generate": True, "repetition_penalty": 1.3},
}


@pytest.fixture(autouse=True)
def needs_the_libraries() -> None:
    if loader.python_library() is None or loader.state("cpu").status != "loaded":
        pytest.skip("the libraries for the CPU and for Python are not loaded")


@pytest.fixture
def replays(monkeypatch):
    """A list with an element for each step that ran without Python."""
    seen, replay = [], RecordedRun.replay

    def counting(recorded):
        before = recorded.replays
        replay(recorded)
        seen.extend("replay" for _ in range(recorded.replays - before))

    monkeypatch.setattr(RecordedRun, "replay", counting)
    return seen


def both(model, seed=3, rows=2, **kwargs):
    """What transformers gives and what the fused model does, each with the default generator's next number."""
    given = {"pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW, **prompt(model, rows, 6, seed), **kwargs}
    results = []
    for generate in (type(model).generate, lambda model, **kwargs: model.generate(**kwargs)):
        torch.manual_seed(11)
        results.append((generate(model, **given), torch.rand(1)))
    return results


def assert_as_stock(model, **kwargs):
    wanted, got = both(model, **kwargs)
    if isinstance(wanted[0], torch.Tensor):
        assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    else:
        assert_same(got, wanted)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_every_family(family, replays):
    model = {**DECODERS, **ENCODER_DECODERS}[family]()
    fuseopt.initialize(model, GENERATION)
    for call in range(2):
        assert_as_stock(model, seed=call)
        assert model.generate.calls[-1].steps == "recorded"
    # In the first call one step is not recorded, and two are.
    assert len(replays) == 2 * (NEW - 1) - 3


@pytest.mark.parametrize("kwargs", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_every_kind_of_call(family, rows, kwargs, replays):
    model = {"gpt2": tiny.gpt2, "t5": tiny.t5}[family]()
    fuseopt.initialize(model, GENERATION)
    for call in range(3):
        assert_as_stock(model, seed=call, rows=rows, **kwargs)
        assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP
    assert len(replays) == 3 * (NEW - 1) - 3


def test_steps_of_the_fast_forward(replays):
    model = tiny.gpt2()
    fuseopt.initialize(model, GENERATION)
    for call in range(2):
        assert_as_stock(model, seed=call, max_time=1e6)
        assert model.generate.calls[-1].tier is Tier.FAST_FORWARD
    assert replays


def test_two_models_take_turns(replays):
    models = tiny.gpt2(), tiny.t5()
    for model in models:
        fuseopt.initialize(model, GENERATION)
    for seed in range(3):
        for model in models:
            assert_as_stock(model, seed=seed)
    assert len(replays) == 2 * (3 * (NEW - 1) - 3)


@pytest.mark.parametrize("change", ["in place", "new parameter", "moved"])
def test_weights_that_change_between_calls(change, replays):
    model = tiny.gpt2()
    fuseopt.initialize(model, GENERATION)
    assert_as_stock(model)
    weight = model.transformer.h[0].mlp.c_fc.weight
    with torch.no_grad():
        if change == "in place":
            weight.mul_(-1.5)
        elif change == "new parameter":
            model.transformer.h[0].mlp.c_fc.weight = torch.nn.Parameter(weight * -1.5)
        else:
            weight.data = weight * -1.5
    before = len(replays)
    assert_as_stock(model)
    # Recorded steps keep their values' addresses: others drop them.
    assert len(replays) - before == (NEW - 1 if change == "in place" else NEW - 1 - 3)


def test_an_error_in_a_replay_is_that_of_the_step(replays):
    """Of a token id that no embedding has."""
    model, ids = tiny.gpt2(), torch.arange(3, 9)[None]
    fuseopt.initialize(model, GENERATION)
    given = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(ids, **given)
    (step,) = model.generate.graphs._steps.values()
    step.state.tokens.fill_(10**6)
    with pytest.raises(IndexError) as raised, torch.no_grad():
        step()
    with pytest.raises(IndexError) as expected, torch.no_grad():
        step.run()
    assert str(raised.value) == str(expected.value)
    assert torch.equal(model.generate(ids, **given), wanted)


def test_an_interrupt_between_replays_leaves_the_next_call_whole(replays):
    model = tiny.gpt2()
    fuseopt.initialize(model, GENERATION)
    assert_as_stock(model)
    replay = RecordedRun.replay
    for steps in (0, 1, 4):
        left = [steps]

        def interrupted(recorded, left=left):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            replay(recorded)

        with mock.patch.object(RecordedRun, "replay", interrupted), pytest.raises(KeyboardInterrupt):
            model.generate(**prompt(model, 2, 6, 3), max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
        assert_as_stock(model)


def test_a_step_that_reads_on_the_host_runs_in_python(monkeypatch, replays):
    run = SpecStep.__call__
    monkeypatch.setattr(SpecStep, "__call__", lambda step, state: (int(state.slot), run(step, state))[1])
    model = tiny.gpt2()
    fuseopt.initialize(model, GENERATION)
    for call in range(2):
        assert_as_stock(model, seed=call)
        assert model.generate.calls[-1].steps == "eager"
    assert not replays


@pytest.mark.parametrize("why", ["no library for Python", "max_graphs is 0"])
def test_without_recording(why, monkeypatch, replays):
    model = tiny.t5()
    if why == "no library for Python":
        monkeypatch.setattr(loader, "_python_library", None)
    fuseopt.initialize(model, {"generation": {"max_graphs": 0 if why == "max_graphs is 0" else 8}})
    assert_as_stock(model)
    assert model.generate.calls[-1].steps == "eager" and not replays


def test_steps_are_dropped_with_restore_and_beyond_max_graphs():
    model = tiny.gpt2()
    fuseopt.initialize(model, {"generation": {"max_graphs": 2}})
    for rows in (1, 2, 3):
        assert_as_stock(model, rows=rows)
    graphs = model.generate.graphs
    assert isinstance(graphs, StepGraphs) and graphs.steps == 2 and graphs.bytes > 0
    fuseopt.restore(model)
    assert "generate" not in vars(model)


def test_the_report_says_recorded_and_nothing_of_a_gpu():
    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    assert fuseopt.report(model).since == ()
    assert_as_stock(model, rows=1)
    call, *kept = fuseopt.report(model).since
    assert call == "generate(): T0 device loop: recorded steps"
    assert kept[0].startswith("generate(): 1 step recorded, ") and kept[1].startswith(
        "generate(): a cache of 1 row and "
    )
    assert_as_stock(model, rows=1, num_beams=3)
    assert any(line.startswith("generate(): 2 steps recorded, ") for line in fuseopt.report(model).since)
