import functools
import weakref
from types import SimpleNamespace

import pytest

from fuseopt.generation import call
from fuseopt.generation.engine import attention, layers, residual_stream
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.prompt import early_prefill, prompts


@pytest.fixture
def pretend_kernels(monkeypatch):
    """Call: lets a CPU take the paths of a GPU, with the CPU kernels or the references of the ops."""

    def pretend():
        for module in (attention, layers, residual_stream, call):
            monkeypatch.setattr(module, "has_kernel", lambda op, like: True)
        monkeypatch.setattr(layers, "is_fast", lambda *_: True)
        for module in (prompts, early_prefill):
            monkeypatch.setattr(module, "has_cuda_kernel", lambda op, like: True)

    return pretend


@pytest.fixture
def as_on_gpu(monkeypatch, pretend_kernels):
    """Makes a CPU take the paths of a GPU, with steps that run in place of captured ones."""
    pretend_kernels()
    capture = StepGraphs.capture

    def captured(graphs, step):
        if step.state.device.type == "cpu" and step.graph is None:
            if step.selection is not None:
                step.selection.own_tensors()
            # A CUDA graph does not refer to what it has been captured from.
            replay = functools.partial(type(step).run, weakref.proxy(step))
            step.graph, graphs._steps[step.key] = SimpleNamespace(replay=replay), step
        return capture(graphs, step)

    monkeypatch.setattr(StepGraphs, "capture", captured)


@pytest.fixture
def packs(each_device, request, monkeypatch):
    """The device. A CPU packs quantised weights too, and runs the reference in place of the CUDA kernels."""
    from fuseopt.generation.engine import layers, low_bit

    # Tiny layers and few rows of a Conv1D gain nothing.
    monkeypatch.setattr(low_bit, "no_gain_reason", lambda layer, bits, is_with_attention: None)
    monkeypatch.setattr(layers, "SLOW_TRANSPOSED_ROWS", range(0))
    if each_device.type == "cpu":
        request.getfixturevalue("as_on_gpu")
        # The strategies import from the engine, so they come first: what is imported now must not be a patch.
        for module in ("strategies.generation", "generation.engine.low_bit"):
            monkeypatch.setattr(f"fuseopt.{module}.packs_on", lambda device: True)
        monkeypatch.setattr(low_bit, "no_kernel_reason", lambda layer: None)
    return each_device


@pytest.fixture
def noted(monkeypatch):
    """A list, and `note(owner, name, letter, counts)`, by which calls of a function that count add a letter to it."""
    seen = []

    def note(owner, name, letter, counts=lambda *args, **kwargs: True):
        run = getattr(owner, name)

        def noting(*args, **kwargs):
            seen.extend(letter if counts(*args, **kwargs) else "")
            return run(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    return seen, note
