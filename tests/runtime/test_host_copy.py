"""Copies of tensors to the host."""

import torch

from fuseopt.runtime.host_copy import HostCopy


class OnAnotherDevice:
    """A tensor of a device whose events fuseopt does not know; its copies are complete only if they block."""

    device = torch.device("mps")

    def to(self, device, dtype, *, non_blocking, copy):
        return torch.zeros(2, dtype=dtype) if non_blocking else torch.ones(2, dtype=dtype)


def test_a_copy_from_a_device_without_events_is_complete():
    assert HostCopy(OnAnotherDevice(), torch.int64).read().tolist() == [1, 1]


def test_a_copy_keeps_its_values(each_device):
    tensor = torch.zeros(2)
    copy = HostCopy(tensor, torch.float32)
    tensor += 1
    assert copy.read().tolist() == [0, 0]
