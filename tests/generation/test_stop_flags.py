"""StopFlags: the host reads late and still counts right."""

import pytest
import torch

from fuseopt.generation.stop_flags import StopFlags

pytestmark = pytest.mark.usefixtures("each_device")


@pytest.mark.parametrize("last", [0, 1, 5, 11, None])
def test_steps_are_counted_up_to_the_first_that_left_no_row(last):
    going = torch.ones((), dtype=torch.bool)
    flags = StopFlags(going, 12)
    run = 0
    for step in range(12):
        if step == last:
            going.fill_(False)
        flags.push()
        run += 1
        if flags.is_over():
            break
    counted = 12 if last is None else last + 1
    assert flags.steps() == counted == flags.steps()
    assert run <= min(12, counted + flags.ahead)
    assert last is None or last > 6 or run < 12, "the host was never told"


def test_a_flag_is_read_as_of_its_step():
    going = torch.ones((), dtype=torch.bool)
    flags = StopFlags(going, 4)
    flags.push()
    going.fill_(False)
    flags.push()
    going.fill_(True)
    flags.push()
    assert flags.steps() == 2
