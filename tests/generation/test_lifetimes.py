"""What generate() keeps is freed with the model, and not before the streams that use it are done."""

import copy
import gc
import pickle
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import fuseopt
from fuseopt.generation.engine.decode_run import DecodeRun
from fuseopt.generation.engine.graphs import StepGraphs, StepWork
from fuseopt.generation.tiers import Tier
from tests import tiny

GENERATION = {"generation": {"enable": True}}


class Queue:
    """A fake stream or event that records each synchronize() in `waited`."""

    def __init__(self, waited):
        self.waited = waited

    def record_event(self):
        return Queue(self.waited)

    def wait_event(self, event):
        pass

    def synchronize(self):
        self.waited.append(True)


class Graphs(StepGraphs):
    """Captures on a CPU, and records how often the host had synchronised when a step was freed."""

    def __init__(self, max_graphs):
        super().__init__(max_graphs)
        self.waited, self.freed = [], []

    def keep(self, number):
        state = SimpleNamespace(sizes=number, device=torch.device("cuda"), bytes=0, __del__=None)
        step = StepWork(lambda state: None, state, None)
        test = self

        class Freed:
            def __del__(self):
                test.freed.append(len(test.waited))

        step.held = Freed()
        self.capture(step)

    def record(self, work, others, what):
        return ""

    @staticmethod
    def most_bytes(device):
        return 1


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("forget", [StepGraphs.clear, lambda graphs: graphs.keep(2)], ids=["clear", "eviction"])
def test_states_are_freed_after_the_streams_that_use_them(forget, inside):
    """The work of an earlier call and, if steps are freed during a call, of this call too."""
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
    """The allocator reuses freed memory of a stream at once, even if another stream still reads it."""
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


FUSED = GENERATION | {"kernel_fusion": {"custom_cuda_kernels": ["FusedNoRepeatNGram"], "jit": False}}
CALLS = {
    "never called": [],
    "greedy": [{}, {"no_repeat_ngram_size": 2}],
    "sampling": [{"do_sample": True, "top_k": 5}],
    "beams": [{"num_beams": 2, "no_repeat_ngram_size": 2, "return_dict_in_generate": True}],
    "fast forward": [{"max_time": 1e6}, {"num_beams": 2, "max_time": 1e6}],
    "stock": [{"use_cache": False}, {"prompt_lookup_num_tokens": 2}],
    "refused": [{"no_such_argument": 1}],
}


@contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def call(model, kwargs):
    inputs = tiny.inputs(model, batch=1)["input_ids"]
    try:
        model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=5, **kwargs)
    except ValueError:
        assert "no_such_argument" in kwargs


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_model_goes_with_its_last_user(family, calls):
    """`del model` frees a fused model as it frees a stock one, with fuseopt's objects."""
    with no_collector():
        model = fuseopt.initialize(tiny.FAMILIES[family](), FUSED, strict=True)
        for kwargs in CALLS[calls]:
            call(model, kwargs)
        kept = [model, model.generate, model.generate.graphs, model.generate.proxy, model.generate.early_prefill]
        kept += [model.get_input_embeddings().weight, *filter(None, [getattr(model.generate.checked, "step", None)])]
        refs = [weakref.ref(part) for part in kept]
        del model, kept
        assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_model_that_has_kept_steps_goes_with_its_last_user(family, starts, request):
    if starts:
        request.getfixturevalue("as_on_gpu")
    with no_collector():
        model = fuseopt.initialize(tiny.FAMILIES[family](), GENERATION)
        for _ in range(3):
            call(model, {})
        assert model.generate.graphs.steps
        refs = [weakref.ref(model), *(weakref.ref(step.state) for step in model.generate.graphs._steps.values())]
        del model
        assert [ref() for ref in refs] == [None] * len(refs)


def duplicate(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    ("family", "made"),
    [
        pytest.param("gpt2", lambda model: model, id="gpt2-itself"),
        pytest.param("gpt2", copy.deepcopy, id="gpt2-deepcopy"),
        pytest.param("t5", duplicate, id="t5-pickle"),
        pytest.param("gpt2", duplicate, id="gpt2-pickle", marks=pytest.mark.slow),
        pytest.param("t5", lambda model: model, id="t5-itself", marks=pytest.mark.slow),
        pytest.param("t5", copy.deepcopy, id="t5-deepcopy", marks=pytest.mark.slow),
    ],
)
def test_generate_works_without_another_reference_to_the_model(family, made):
    """`load().generate(...)`, and several calls of a method whose model has been deleted."""
    stock = tiny.FAMILIES[family]()
    inputs = tiny.inputs(stock)["input_ids"]
    wanted = stock.generate(inputs, max_new_tokens=6)
    fused = [fuseopt.initialize(tiny.FAMILIES[family](), FUSED)]
    assert torch.equal(made(fused[0]).generate(inputs, max_new_tokens=6), wanted)
    generate = made(fused[0]).generate
    assert torch.equal(generate(inputs, max_new_tokens=6), wanted)
    fused.clear()
    gc.collect()
    for _ in range(3):
        assert torch.equal(generate(inputs, max_new_tokens=6), wanted)
        assert generate.calls[-1].tier is Tier.DEVICE_LOOP, generate.calls[-1]
    assert not generate.__self__.training
    model = weakref.ref(generate.__self__)
    del generate
    gc.collect()
    assert model() is None


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_memory_of_a_gpu_goes_with_the_model(family):
    def used():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream of PyTorch's pool that has multiplied
        return torch.cuda.memory_allocated()

    def run(device):
        with torch.device(device):
            model = fuseopt.initialize(tiny.FAMILIES[family](), FUSED)
            for _ in range(4):
                for kwargs in ({}, {"num_beams": 2}, {"max_time": 1e6}):
                    call(model, kwargs)
            return model.generate.graphs.steps

    run("cuda")  # what PyTorch's libraries keep for themselves
    with no_collector():
        before = used()
        assert run("cuda")
        assert used() == before
