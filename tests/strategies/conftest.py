from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState

from fuseopt.training import partitioner
from tests.training_steps import Graphs


@pytest.fixture(autouse=True)
def accelerate_starts_anew() -> Iterator[None]:
    """An Accelerator, a Trainer's too, settles precision and device for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Graphs:
    """Counts the compiled training steps, and has them compiled without code generation unless told otherwise."""
    torch._dynamo.reset()
    record = Graphs(getattr(request, "param", "aot_eager"))
    monkeypatch.setattr(partitioner, "compile_graph", record)
    return record
