"""Streamers in the device loop: the tokens that transformers gives them, in order, before generate() returns."""

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import fuseopt
from fuseopt.generation.engine.token_stream import TokenStream
from fuseopt.generation.tiers import Tier
from tests import tiny
from tests.axes import covering
from tests.generation.same_calls import CLOSE, GENERATION, VOCAB, prompt

ENDS = list(range(3, VOCAB, 7))


class Stop(Exception):
    pass


class Listener(BaseStreamer):
    """Raises at the `stop_at`-th tensor, the prompt included; `end` raises if that is -1."""

    def __init__(self, stop_at=None):
        self.seen, self.stop_at = [], stop_at

    def put(self, value):
        assert value.device.type == "cpu"
        self.seen.append((value.dtype, value.tolist()))
        if len(self.seen) == self.stop_at:
            raise Stop
        value.fill_(0)

    def end(self):
        self.seen.append("end")
        if self.stop_at == -1:
            raise Stop


@pytest.fixture(params=["gpt2", "t5"])
def models(request, each_device):
    make = tiny.FAMILIES[request.param]
    return make(), fuseopt.initialize(make(), GENERATION)


def outcome(model, listener, inputs, **arguments):
    """Tokens, or None if the streamer raised; what it saw; and the next number of torch's generator."""
    inputs = {name: value.clone() for name, value in inputs.items()}
    torch.manual_seed(3)
    given = {"max_new_tokens": 14, "pad_token_id": 0, "streamer": listener}
    try:
        tokens = model.generate(**inputs, **given | arguments)
        tokens = getattr(tokens, "sequences", tokens).tolist()
    except Stop:
        tokens = None
    return tokens, listener.seen, torch.rand(1, device=model.device).item()


@covering(
    models=["gpt2", "t5"],
    arguments=[
        {"eos_token_id": None},
        {"eos_token_id": ENDS},
        {"eos_token_id": None, "do_sample": True},
        {"eos_token_id": ENDS, "do_sample": True, "top_k": 9},
        {"eos_token_id": ENDS, "output_scores": True, "return_dict_in_generate": True},
        {"eos_token_id": None, "max_new_tokens": 1},
    ],
    rows=[1, 3],
    indirect=["models"],
)
def test_a_streamer_sees_what_transformers_shows_it(models, arguments, rows):
    """In first calls, captured ones, and those whose first steps are queued early."""
    stock, fused = models
    for seed in range(4):
        inputs = prompt(stock, rows, 6, seed)
        wanted = outcome(stock, Listener(), inputs, **arguments)
        assert wanted[1][-1] == "end" and len(wanted[1]) > 2
        assert outcome(fused, Listener(), inputs, **arguments) == wanted
        assert fused.generate.calls[-1].tier is Tier.DEVICE_LOOP


@covering(models=["gpt2", "t5"], stop_at=[1, 2, 3, 7, -1], do_sample=[False, True], indirect=["models"])
def test_a_streamer_that_raises(models, stop_at, do_sample):
    """The random numbers are those of the steps that it saw."""
    stock, fused = models
    for seed in range(3):
        inputs = prompt(stock, 1, 6, seed)
        arguments = {"do_sample": do_sample, "eos_token_id": None, "max_new_tokens": 9}
        wanted = outcome(stock, Listener(stop_at), inputs, **arguments)
        assert wanted[0] is None and outcome(fused, Listener(stop_at), inputs, **arguments) == wanted
    assert outcome(fused, Listener(), inputs) == outcome(stock, Listener(), inputs)


def test_a_cache_of_the_caller_s_holds_what_the_streamer_saw(each_device):
    stock, caches = tiny.gpt2(), []
    for model in (stock, fuseopt.initialize(tiny.gpt2(), GENERATION)):
        caches.append(DynamicCache())
        inputs = prompt(model, 1, 6, 0, padded=False)
        assert outcome(model, Listener(4), inputs, past_key_values=caches[-1], eos_token_id=None)[0] is None
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 8
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, **CLOSE)


@pytest.mark.parametrize("steps", [1, 3, 4, 9, 17])
@pytest.mark.parametrize("surplus", [0, 1, 6])
def test_tokens_come_late_as_on_a_gpu_and_none_after_the_end(steps, surplus):
    """The first token is copied alone, the next four together."""
    ids, listener = torch.arange(1, 2 * 40 + 1).view(2, 40), Listener()
    wanted = [(torch.int64, column) for column in ids.T[5 : 5 + steps].tolist()]
    stream = TokenStream(listener, ids, 5, 30)
    stream.lag, stream.steps_per_copy = 3, 4
    for queued in range(1, steps + surplus + 1):
        stream.put(queued, steps)
        arrived = [end for end in (1, *range(4, 40, 4)) if end <= queued - 3]
        assert listener.seen == wanted[: max(arrived, default=0)]
    stream.end(steps)
    assert listener.seen == [*wanted, "end"]
