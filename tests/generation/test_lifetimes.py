"""When what generate() keeps is freed: after the streams that use it, and with the model."""

from types import SimpleNamespace

import pytest
import torch

import fuseopt
from fuseopt.generation.decode_run import DecodeRun
from fuseopt.generation.graphs import Step, StepGraphs
from tests import tiny

GENERATION = {"generation": {"enable": True}}


class Queue:
    """A stream, or one of its events: what has been queued on it has run once it has been waited for."""

    def __init__(self, waited):
        self.waited = waited

    def record_event(self):
        return Queue(self.waited)

    def wait_event(self, event):
        pass

    def synchronize(self):
        self.waited.append(True)


class Graphs(StepGraphs):
    """Captures on a CPU, and notes how often the host had waited when a step went."""

    def __init__(self, max_graphs):
        super().__init__(max_graphs)
        self.waited, self.freed = [], []

    def keep(self, number):
        state = SimpleNamespace(sizes=number, device=torch.device("cuda"), bytes=0, __del__=None)
        step = Step(lambda state: None, state, None)
        test = self

        class Freed:
            def __del__(self):
                test.freed.append(len(test.waited))

        step.held = Freed()
        self.capture(step)

    def record(self, work, others, what):
        return ""


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("forget", [StepGraphs.clear, lambda graphs: graphs.keep(2)], ids=["clear", "eviction"])
def test_states_are_freed_after_the_streams_that_use_them(forget, inside):
    """Of an earlier call, and where it happens in the middle of one also of this call."""
    graphs = Graphs(max_graphs=1)
    with graphs.in_order_on(Queue(graphs.waited)):
        graphs.keep(1)
    assert not graphs.freed
    if inside:
        with graphs.in_order_on(Queue(graphs.waited)):
            forget(graphs)
    else:
        forget(graphs)
    assert graphs.freed[:1] == [2 if inside else 1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_state_that_another_stream_still_uses_is_not_given_away(family, monkeypatch):
    """Memory of one stream is taken for unused as soon as it is freed there, whoever else still runs steps in it."""
    begin = DecodeRun.__init__

    def late(run, *args, **kwargs):
        torch.cuda._sleep(2 * 10**8)
        begin(run, *args, **kwargs)

    with torch.device("cuda"):
        model = tiny.FAMILIES[family](**({"n_positions": 400} if family == "gpt2" else {}))
        inputs = tiny.inputs(model, batch=2)["input_ids"]
        model.generation_config.eos_token_id = None
        calls = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 300}
        fuseopt.initialize(model, GENERATION)
        wanted = model.generate(inputs, **calls)
        for _ in range(2):
            assert torch.equal(model.generate(inputs, **calls), wanted)
        monkeypatch.setattr(DecodeRun, "__init__", late)
        other = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            got = model.generate(inputs, **calls)
        is_still_running = not other.query()
        sizes = {step.state.cache.nbytes for step in model.generate.graphs._steps.values()}
        model.generate.graphs.clear()
        spoilt = [torch.full((size // 4,), torch.nan) for size in sizes for _ in range(20)]
        other.synchronize()
        assert is_still_running and spoilt
        assert torch.equal(got, wanted)
