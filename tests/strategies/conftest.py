import pytest
import torch

from fuseopt.modules import partitioner
from tests.training import Graphs


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Graphs:
    """Counts the compiled training steps, and has them compiled without code generation unless told otherwise."""
    torch._dynamo.reset()
    record = Graphs(getattr(request, "param", "aot_eager"))
    monkeypatch.setattr(partitioner, "compile_graph", record)
    return record
