from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def accelerate_starts_anew() -> Iterator[None]:
    """An Accelerator, a Trainer's too, settles precision and device for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
