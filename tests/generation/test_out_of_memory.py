"""Memory that runs out: transformers decodes the call, and nothing of the caller's is lost or changed."""

import contextlib
import gc
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import fuseopt
from fuseopt.generation.call import GenerateCall
from fuseopt.generation.engine.graphs import StepGraphs, StepWork
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.hf.step_proxy import StepModelProxy
from fuseopt.generation.prepared_call import PreparedCall
from fuseopt.generation.tiers import Tier
from fuseopt.ops.library import Observer
from fuseopt.runtime.cuda_graphs import Work
from fuseopt.runtime.memory import is_out_of_memory
from tests import tiny
from tests.generation.same_calls import GENERATION, assert_same, assert_same_cache, prompt, used_cache

on_a_gpu = pytest.mark.parametrize("each_device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
FAMILIES = {"llama": lambda: tiny.decoder("llama"), "gpt2": tiny.gpt2, "t5": tiny.t5}
CALLS = [
    ("llama", {}),
    ("llama", {"do_sample": True, "top_k": 9, "with_cache": True}),
    ("llama", {"do_sample": True, "streams": True}),
    ("gpt2", {"with_cache": True}),
    ("gpt2", {"num_beams": 3}),
    ("gpt2", {"use_cache": False, "streams": True}),
    ("t5", {"do_sample": True, "with_cache": True}),
    ("t5", {"streams": True}),
    ("t5", {"num_beams": 2, "do_sample": True}),
]

# A plain one, one that gives back its cache, beams, and one without a cache that streams.
QUICK = [CALLS[0], CALLS[4], CALLS[5], CALLS[6]]


class ShortMemory(Observer):
    """The `fail_at`-th allocation fails, of those inside `counting`."""

    def __init__(self, fail_at):
        super().__init__()
        self.fail_at, self.count, self.is_counting = fail_at, 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.is_counting:
            old = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and storage(leaf) not in old]
            self.count += bool(new)
            if new and self.count == self.fail_at:
                raise torch.OutOfMemoryError("no memory\nmore words")
        return result

    def counting(self, function):
        def counted(*args, **kwargs):
            before, self.is_counting = self.is_counting, True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_counting = before

        return counted

    def not_counting(self, function):
        def uncounted(*args, **kwargs):
            before, self.is_counting = self.is_counting, False
            try:
                return function(*args, **kwargs)
            finally:
                self.is_counting = before

        return uncounted


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def short_of_memory(fail_at, inside, outside=()):
    """Fails in the methods `inside`, but not in what those in `outside` call."""
    with contextlib.ExitStack() as stack:
        mode = ShortMemory(fail_at)
        for of, name in inside:
            stack.enter_context(mock.patch.object(of, name, mode.counting(vars(of)[name])))
        for of, name in outside:
            stack.enter_context(mock.patch.object(of, name, mode.not_counting(vars(of)[name])))
        yield stack.enter_context(mode)


class Listener(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


def run(model, inputs, **kwargs):
    """Output and next random number, what the streamer got, and the caller's cache."""
    torch.manual_seed(5)
    cache = used_cache(model, inputs["input_ids"]) if kwargs.pop("with_cache", False) else None
    listener = Listener() if kwargs.pop("streams", False) else None
    given = {"max_new_tokens": 4, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True} | kwargs
    given |= {"past_key_values": cache} if cache is not None else {}
    given |= {"streamer": listener} if listener is not None else {}
    output = model.generate(**{name: value.clone() for name, value in inputs.items()}, **given)
    return (output, torch.rand(2, device=model.device)), listener and listener.seen, cache


def assert_equal_runs(got, wanted):
    assert torch.equal(got[0][0].sequences, wanted[0][0].sequences)
    if "past_key_values" in wanted[0][0]:
        assert_same(got[0], wanted[0])
    assert torch.equal(got[0][1], wanted[0][1]) and got[1] == wanted[1]
    if wanted[2] is not None:
        assert_same_cache(got[2], wanted[2])


@pytest.mark.parametrize(
    ("family", "kwargs"),
    [pytest.param(*call, marks=[pytest.mark.slow] * (call not in QUICK)) for call in CALLS],
    ids=str,
)
def test_each_allocation_of_the_device_loop_fails_once(family, kwargs):
    model = FAMILIES[family]()
    inputs = prompt(model, 2, 6, 3, padded=False)
    wanted = run(model, inputs, **kwargs)
    fuseopt.initialize(model, GENERATION)
    inside, outside = [(GenerateCall, "_decode_in"), (GenerateCall, "_state")], [(Listener, "put")]
    tiers = []
    for fail_at in failures():
        with short_of_memory(fail_at, inside, outside) as mode:
            got = run(model, inputs, **kwargs)
        call = model.generate.calls[-1]
        assert_equal_runs(got, wanted)
        assert call.tier is Tier.DEVICE_LOOP or call.reason.startswith("there was no memory for a cache of"), call
        tiers.append(call.tier)
        if mode.count < fail_at:
            break
    assert Tier.STOCK in tiers[10:-1] and tiers[-1] is Tier.DEVICE_LOOP


def failures():
    """1, 2, 3 and so on, with growing gaps: a step's allocations are those of the step before."""
    fail_at = 1
    while True:
        yield fail_at
        fail_at += 1 + fail_at // 8


class Adds(LogitsProcessor):
    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        return scores + torch.arange(scores.shape[1], device=scores.device) % 3


@pytest.mark.parametrize("family", FAMILIES)
def test_each_allocation_of_the_fast_forward_fails_once(family):
    """Code of the caller's has seen tokens after the prompt: a step runs again, and the call is not decoded anew."""
    model = FAMILIES[family]()
    inputs = prompt(model, 2, 6, 3, padded=False)

    def decode(model):
        own = Adds()
        return run(model, inputs, with_cache=True, logits_processor=LogitsProcessorList([own])), own.lengths

    wanted, wanted_lengths = decode(model)
    fuseopt.initialize(model, GENERATION)
    methods = [(StepModelProxy, "_prefill"), (StepModelProxy, "__call__"), (GenerateCall, "_state")]
    tiers = set()
    for fail_at in failures():
        with short_of_memory(fail_at, methods) as mode:
            got, lengths = decode(model)
        assert_equal_runs(got, wanted)
        assert lengths == wanted_lengths
        tiers.add(model.generate.calls[-1].tier)
        if mode.count < fail_at:
            break
    assert tiers == {Tier.STOCK, Tier.FAST_FORWARD}


def test_a_call_whose_tokens_processors_have_seen_is_not_decoded_anew():
    """The error is raised, and the caller's cache holds the slots filled so far."""
    model, own, calls = fuseopt.initialize(tiny.gpt2(), GENERATION), Adds(), 0
    inputs = prompt(model, 2, 6, 3, padded=False)
    cache, run_step = DynamicCache(), StepWork.__call__

    def failing(work):
        nonlocal calls
        calls += 1
        if calls > 2:
            raise torch.OutOfMemoryError("no memory")
        run_step(work)

    with mock.patch.object(StepWork, "__call__", failing), pytest.raises(torch.OutOfMemoryError, match="no memory"):
        processors = LogitsProcessorList([own])
        model.generate(**inputs, max_new_tokens=6, pad_token_id=0, logits_processor=processors, past_key_values=cache)
    assert own.lengths == [6, 7, 8] and cache.get_seq_length() == 8
    assert calls == 4  # the third step was tried twice


def test_the_static_tensors_are_gone_when_transformers_decodes():
    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    inputs, made, alive = prompt(model, 2, 6, 3, padded=False), [], []
    init, decode = DecodeState.__init__, PreparedCall.run_decoding_method

    def noting(state, *args):
        init(state, *args)
        made.append(weakref.ref(state))

    def counted(prepared, *args):
        alive.append(sum(state() is not None for state in made))
        return decode(prepared, *args)

    gc.disable()
    try:
        with (
            mock.patch.object(DecodeState, "__init__", noting),
            mock.patch.object(PreparedCall, "run_decoding_method", counted),
            short_of_memory(90, [(GenerateCall, "_decode_in")]),
        ):
            run(model, inputs)
    finally:
        gc.enable()
    assert made and alive == [0]


def test_an_error_of_the_streamer_s_own_is_raised():
    class Short(Listener):
        def put(self, value):
            super().put(value)
            if len(self.seen) == 3:
                raise torch.OutOfMemoryError("the streamer's")

    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    inputs, listener = prompt(model, 2, 6, 3, padded=False), Short()
    with pytest.raises(torch.OutOfMemoryError, match="the streamer's"):
        model.generate(**inputs, max_new_tokens=5, pad_token_id=0, streamer=listener)
    assert len(listener.seen) == 3


def test_other_errors_are_raised():
    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    with (
        mock.patch.object(GenerateCall, "_decode_in", side_effect=RuntimeError("another")),
        pytest.raises(RuntimeError, match="another"),
    ):
        run(model, prompt(model, 2, 6, 3))


def test_errors_that_mean_no_memory():
    host = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    for error in (
        torch.OutOfMemoryError("x"),
        MemoryError(),
        RuntimeError(host),
        RuntimeError("CUDA error: out of memory"),
    ):
        assert is_out_of_memory(error)
    for error in (RuntimeError("CUDA error: an illegal memory access"), ValueError("CUDA error: out of memory")):
        assert not is_out_of_memory(error)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58, dtype=torch.uint8, device="cpu")
    assert is_out_of_memory(raised.value)


def test_a_kept_state_makes_way_for_a_large_one():
    """Captured work is dropped with its state, the least recently used first, until few enough bytes are kept."""
    device, graphs = torch.device("cuda"), StepGraphs(8)

    def work(name, size):
        state = SimpleNamespace(sizes=name, bytes=size, device=device)
        return Work(name, state)

    def capture(name, size, kept):
        return graphs._capture(work(name, size), kept, 8, "the step")

    with (
        mock.patch.object(StepGraphs, "most_bytes", return_value=100),
        mock.patch.object(StepGraphs, "record", return_value=""),
    ):
        for name, size in (("a", 30), ("b", 30), ("c", 30)):
            capture(name, size, graphs._steps)
        capture("prompt of b", 0, graphs._prompts)
        graphs._prompts["prompt of b"].state = graphs._steps["b"].state
        graphs._steps.move_to_end("a")
        capture("d", 10, graphs._steps)
        assert [*graphs._steps] == ["b", "c", "a", "d"] and graphs.bytes == 100
        capture("e", 1, graphs._steps)
        assert [*graphs._steps] == ["b", "a", "d", "e"]
        capture("f", 1000, graphs._steps)
        assert [*graphs._steps] == ["f"] and not graphs._prompts


def test_calls_of_any_length_are_served_by_default():
    model = fuseopt.initialize(tiny.decoder("llama"), GENERATION)
    inputs = prompt(model, 1, 6, 3)
    model.generate(**inputs, max_new_tokens=40_000, eos_token_id=list(range(tiny.VOCAB)), pad_token_id=0)
    (call,) = fuseopt.report(model).generate_calls
    assert call["tier"] == "T0" and call["cache"] == "1 row and 40960 slots, 15.0 MiB of keys and values"


@on_a_gpu
def test_little_memory_on_a_gpu(each_device):
    """A cache of 120 MiB does not fit into what the process may have; the report gives the size of one that does."""
    model = tiny.decoder("llama")
    inputs = prompt(model, 8, 6, 3)
    kwargs = {"max_new_tokens": 40_000, "eos_token_id": list(range(tiny.VOCAB)), "do_sample": True}
    total = torch.cuda.get_device_properties(each_device).total_memory
    wanted = run(model, inputs, **kwargs)
    fuseopt.initialize(model, GENERATION)
    run(model, inputs, max_new_tokens=3)
    tiers = []
    for mebibytes in (20, 60, 2000):
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() + mebibytes * 2**20
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            got = [run(model, inputs, **kwargs) for _ in range(3)]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        for outcome in got:
            assert_equal_runs(outcome, wanted)
        tiers.append(model.generate.calls[-1].tier)
    assert tiers[0] is Tier.STOCK and tiers[-1] is Tier.DEVICE_LOOP, tiers
    assert "a cache of 8 rows and 40960 slots, 120.0 MiB of keys and values, for" in str(fuseopt.report(model))
    kept = model.generate.graphs.bytes
    before = torch.cuda.memory_allocated()
    fuseopt.restore(model)
    assert kept > 2**20 and torch.cuda.memory_allocated() <= before - kept
