"""Samples of values: writes that change no version are seen."""

import pytest
import torch

from fuseopt.runtime.written_values import Samples


@pytest.mark.parametrize("shape", [(3,), (700,), (40, 64), (2048, 3), (5, 6, 7), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_through_data_is_seen(shape, dtype):
    tensors = [torch.randn(9, 4).T, torch.randn(shape).to(dtype), torch.full((2,), torch.nan)]
    samples = Samples(tensors)
    before = samples.read()
    assert samples.read() == before
    for tensor in tensors:
        version = tensor._version
        tensor.data.copy_(torch.randn(tensor.shape))
        assert tensor._version == version
        assert (samples.read() != before) == (tensor.numel() > 0)
        before = samples.read()


def test_samples_are_spread_over_rows_and_columns():
    weight = torch.zeros(128, 1024)
    samples = Samples([weight])
    weight.data[:, :512] = 1
    first = torch.frombuffer(bytearray(samples.read()), dtype=torch.float32)
    assert len(first) == 64 and 16 <= first.sum() <= 48
    weight.data[:64] = 2
    second = torch.frombuffer(bytearray(samples.read()), dtype=torch.float32)
    assert 25 <= (second == 2).sum() <= 39
