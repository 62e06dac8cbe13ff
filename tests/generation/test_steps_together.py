"""A few steps run as one from the third call on, and tokens, scores and random numbers are those of transformers."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import fuseopt
from fuseopt.generation.engine import device_loop
from fuseopt.generation.engine.graphs import MultiStepWork, StepGraphs
from fuseopt.generation.tiers import Tier
from tests import tiny
from tests.axes import covering, thinned
from tests.generation.same_calls import GENERATION, VOCAB, assert_same, prompt

pytestmark = pytest.mark.usefixtures("each_device", "as_on_gpu")
FAMILIES = {"gpt2": lambda: tiny.gpt2(n_positions=150), "t5": tiny.t5}


@pytest.fixture(params=FAMILIES)
def model(request, each_device, as_on_gpu):
    return FAMILIES[request.param]()


@pytest.fixture(autouse=True)
def together(monkeypatch):
    """Counts calls of several steps; on a CPU they run one after the other for a graph."""
    capture = StepGraphs.capture_multi_step

    def captured(graphs, step, most):
        note = capture(graphs, step, most)
        if step.state.device.type == "cpu" and step.calls == 2 and MultiStepWork(step).count <= most:
            step.multi_step = MultiStepWork(step)
            step.multi_step.graph = SimpleNamespace(replay=step.multi_step.run)
        return note

    monkeypatch.setattr(StepGraphs, "capture_multi_step", captured)
    with mock.patch.object(MultiStepWork, "__call__", autospec=True, side_effect=MultiStepWork.__call__) as calls:
        yield calls


def both(model, seed=0, rows=2, **kwargs):
    """What transformers gives and what the fused model does, each with the default generator's next number."""
    inputs, given, device = prompt(model, rows, 6, seed), {"pad_token_id": 0, **kwargs}, model.device
    results = []
    for generate in (type(model).generate, lambda model, **kwargs: model.generate(**kwargs)):
        torch.manual_seed(11)
        results.append((generate(model, **inputs, **given), torch.rand(1, device=device)))
    return results


@covering(
    model=list(FAMILIES),
    new=[1, 2, 4, 5, 8, 9, 13, 22],
    eos={"as many as asked for": [], "may end": [VOCAB - 1]},
    indirect=["model"],
)
def test_as_many_as_there_is_room_for(model, new, eos, together):
    count = 4 if eos else 8
    fuseopt.initialize(model, GENERATION)
    for seed in range(5):
        (wanted, _), (got, _) = both(model, seed, max_new_tokens=new, eos_token_id=eos, suppress_tokens=eos or None)
        assert torch.equal(got, wanted)
        assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP
    assert all(call.args[0].count == count for call in together.call_args_list)
    # A step or two may come before them.
    assert not together.called if new < count else together.called or new < count + 3


@thinned(
    2,
    model=list(FAMILIES),
    kwargs=[
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [3, 5]},
        {"do_sample": True, "temperature": 3.0},
        {"do_sample": True, "top_k": 5},
        {"num_beams": 3, "early_stopping": True, "no_repeat_ngram_size": 1},
        {"num_beams": 2, "do_sample": True, "early_stopping": True},
    ],
    indirect=["model"],
)
def test_calls_that_end_early(model, kwargs, together):
    """Surplus steps draw no random numbers and write no tokens."""
    fuseopt.initialize(model, GENERATION)
    # Each EOS id adds a candidate per beam, and the kernels take few candidates.
    eos = list(range(1, 8 if "num_beams" in kwargs else VOCAB))
    lengths = set()
    for seed in range(0, 12, 2):
        given = {"max_new_tokens": 24, "min_new_tokens": 1 + 2 * seed, **kwargs}
        (wanted, random), (got, got_random) = both(model, seed, eos_token_id=eos, **given)
        assert torch.equal(got, wanted)
        # On a CPU only this test runs surplus steps, and its generator is not put back.
        assert torch.equal(got_random, random) or model.device.type == "cpu"
        lengths.add(got.shape[1])
    assert together.call_count and len(lengths) > 1


@covering(
    model=list(FAMILIES),
    kwargs=[{}, {"do_sample": True, "top_k": 9}, {"num_beams": 2}, {"eos_token_id": [VOCAB - 1]}],
    limit=[2**20, 0],
    indirect=["model"],
)
def test_scores_of_each_step_are_recorded(model, kwargs, limit, together, monkeypatch):
    """Several steps together keep them, up to a size."""
    monkeypatch.setattr(device_loop, "_MAX_BYTES_OF_RECORDS", limit)
    fuseopt.initialize(model, GENERATION)
    given = {"max_new_tokens": 22, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for seed in range(4):
        wanted, got = both(model, seed, **given | kwargs)
        assert_same(got, wanted)
    assert bool(together.called) == bool(limit)


def test_the_report_says_why_they_run_one_by_one(model, monkeypatch):
    monkeypatch.setattr(StepGraphs, "capture_multi_step", lambda graphs, step, most: "words of CUDA")
    fuseopt.initialize(model, GENERATION)
    for seed in range(2):
        wanted, got = both(model, seed, max_new_tokens=12, eos_token_id=[])
        assert torch.equal(got[0], wanted[0])
    assert "words of CUDA" in fuseopt.report(model).to_json()
