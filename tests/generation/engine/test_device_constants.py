"""What stays on the device from call to call, and that it is made anew once something has written to it."""

import pytest
import torch

from fuseopt.generation.engine import device_constants
from fuseopt.generation.engine.device_constants import DeviceConstantCache, TrackedCopy

pytestmark = pytest.mark.usefixtures("each_device")


@pytest.fixture
def copies(monkeypatch):
    """What has gone to the device."""
    made, copy = [], device_constants.to_device
    monkeypatch.setattr(
        device_constants, "to_device", lambda values, device: made.append(values) or copy(values, device)
    )
    return made


def host(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device="cpu")


def test_equal_numbers_are_copied_once(copies):
    kept, device = DeviceConstantCache(), torch.empty(0).device
    first = kept.to_device(host(3, 5), device)
    assert first.device == device and first.tolist() == [3, 5]
    assert kept.to_device(host(3, 5), device) is first and len(copies) == 1
    others = [host(5, 3), host(3), host([3, 5]), host(3, 5, dtype=torch.float32)]
    for values in others:
        found = kept.to_device(values, device)
        assert found.dtype is values.dtype and torch.equal(found.cpu(), values)
    assert len(copies) == 1 + len(others)


@pytest.mark.parametrize("inference", [False, True])
def test_what_has_been_written_to_is_made_anew(inference, copies):
    kept, device = DeviceConstantCache(), torch.empty(0).device
    values = [host(3, 5) for _ in range(3)]
    with torch.inference_mode(inference):
        first = kept.to_device(values[0], device)
        assert kept.to_device(values[1], device) is first
        first[:1].fill_(9)
        assert kept.to_device(values[2], device).tolist() == [3, 5]
    assert len(copies) == 2


def test_tables_of_tokens_follow_tokens_that_change():
    kept, tokens, others = DeviceConstantCache(), torch.tensor([4, 0, 4]), torch.tensor([5, 0])
    table = kept.members([tokens], 6)
    assert table.dtype is torch.uint8 and table.tolist() == [1, 0, 0, 0, 1, 0]
    assert kept.members([tokens], 6) is table
    assert kept.members([tokens], 7).tolist() == [1, 0, 0, 0, 1, 0, 0]
    both = kept.members([tokens, others], 6)
    assert both.tolist() == [3, 0, 0, 0, 1, 2] and kept.members([tokens, others], 6) is both
    assert kept.members([others, tokens], 6).tolist() == [3, 0, 0, 0, 2, 1]
    assert kept.members([tokens] * 8, 6).tolist() == [255, 0, 0, 0, 255, 0]
    tokens[0] = 2
    assert kept.members([tokens], 6).tolist() == [1, 0, 1, 0, 1, 0]
    assert kept.members([others, tokens], 6).tolist() == [3, 0, 2, 0, 2, 1]
    with torch.inference_mode():
        of_inference = torch.tensor([3])
        assert kept.members([of_inference], 4).tolist() == [0, 0, 0, 1]
        of_inference.fill_(1)
        assert kept.members([of_inference], 4).tolist() == [0, 1, 0, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
def test_streams_keep_their_own(copies):
    kept, device = DeviceConstantCache(), torch.device("cuda", torch.cuda.current_device())
    first = kept.to_device(host(3, 5), device)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert kept.to_device(host(3, 5), device) is not first
    assert kept.to_device(host(3, 5), device) is first


def test_as_many_are_kept_as_may_be(copies):
    kept, device = DeviceConstantCache(), torch.empty(0).device
    tensors = [kept.to_device(host(i), device) for i in range(device_constants._MAX_CONSTANTS + 1)]
    assert kept.to_device(host(1), device) is tensors[1]
    assert kept.to_device(host(0), device) is not tensors[0]
    assert len(copies) == device_constants._MAX_CONSTANTS + 2


def test_a_copy_is_made_again_only_when_source_or_target_has_changed():
    target, source = torch.zeros(2), torch.ones(2)
    copy, writes = TrackedCopy(target), target._version
    for _ in range(3):
        copy(source)
        assert target.tolist() == [1, 1] and target._version == writes + 1
    source.fill_(2)
    copy(source)
    assert target.tolist() == [2, 2] and target._version == writes + 2
    target.zero_()
    copy(source)
    assert target.tolist() == [2, 2]
    copy(torch.full((2,), 4.0))
    writes = target._version
    copy(target)
    assert target.tolist() == [4, 4] and target._version == writes
    with torch.inference_mode():
        unversioned = torch.full((2,), 5.0)
        copy(unversioned)
        unversioned.fill_(6)
        copy(unversioned)
    assert target.tolist() == [6, 6]
