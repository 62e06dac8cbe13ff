"""StopFlags: the host reads late and still counts right."""

import pytest
import torch

from fuseopt.generation.engine.late_copies import LAG, STEPS_PER_COPY
from fuseopt.generation.engine.stop_flags import StopFlags

LENGTH = 5
pytestmark = pytest.mark.usefixtures("each_device")


@pytest.mark.parametrize("steps", [1, 4, 12, 13, 30])
@pytest.mark.parametrize("last", [0, 1, 3, 4, 11, None])
def test_steps_are_counted_up_to_the_first_that_left_no_row(steps, last):
    going = torch.ones(LENGTH + steps + 2, dtype=torch.bool)
    flags = StopFlags(going, LENGTH, steps)
    run = 0
    for step in range(steps):
        going[LENGTH + step] = last is None or step < last
        flags.push()
        run += 1
        if flags.is_over():
            break
    counted = steps if last is None else min(steps, last + 1)
    assert flags.count_valid() == counted == flags.count_valid()
    late = 0 if going.device.type == "cpu" else LAG + STEPS_PER_COPY - 1
    assert run <= min(steps, counted + late)


def test_a_flag_is_read_as_of_its_step():
    going = torch.ones(LENGTH + 4, dtype=torch.bool)
    flags = StopFlags(going, LENGTH, 4)
    flags.push()
    going[LENGTH + 1] = False
    flags.push()
    flags.push()
    assert flags.count_valid() == 2


@pytest.mark.gpu
@pytest.mark.parametrize("each_device", ["cuda"], indirect=True)
def test_the_host_asks_for_no_step_queued_last(monkeypatch):
    """Else the device would wait for the host, which waits for the device."""
    going, waited = torch.ones(64, dtype=torch.bool), []
    synchronize = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: waited.append(event) or synchronize(event))
    flags, copies = StopFlags(going, 0, 64), []
    for step in range(1, 65):
        before = len(waited)
        flags.push()
        copies += [step] if step % STEPS_PER_COPY == 0 else []
        assert not flags.is_over()
        if len(waited) > before:
            assert copies[len(waited) - 1] <= step - LAG
    assert waited
