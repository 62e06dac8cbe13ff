"""Samples of values: writes that change no version are seen."""

import pytest
import torch

from fuseopt.runtime.written_values import ReadSamples, Samples


@pytest.mark.parametrize("shape", [(3,), (700,), (40, 64), (2048, 3), (5, 6, 7), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_through_data_is_seen(shape, dtype):
    tensors = [
        torch.randn(9, 4).T,
        torch.randn(shape).to(dtype),
        torch.full((2,), torch.nan),
        torch.randn(8).to(torch.float8_e4m3fn),
    ]
    tensors.append(torch.randint(2**40, (5, 5)))
    samples = ReadSamples(Samples(tensors))
    before = samples.read()
    assert samples.read() == before  # NaN too
    for tensor in tensors:
        version = tensor._version
        tensor.data.copy_(torch.randn(tensor.shape) * 9)
        assert tensor._version == version
        assert (samples.read() != before) == (tensor.numel() > 0)
        before = samples.read()


@pytest.mark.parametrize("size", [(128, 1024), (1024, 128), (4, 4096), (4096, 4), (64, 64), (300, 7), (50257, 16)])
def test_samples_are_spread_over_rows_and_columns(size):
    weight, (rows, columns) = torch.zeros(size), size
    samples = ReadSamples(Samples([weight]))
    for half in (weight[:, : columns // 2], weight[:, columns // 2 :], weight[: rows // 2], weight[rows // 2 :]):
        half.data.fill_(1)
        values = torch.frombuffer(bytearray(samples.read()), dtype=torch.float32)
        assert 64 <= len(values) <= 256 and 0.3 < values.mean() < 0.7
        half.data.fill_(0)


def test_a_write_to_an_expanded_tensor_is_seen():
    base = torch.zeros(())
    samples = ReadSamples(Samples([base.expand(3, 4)]))
    before = samples.read()
    base.data += 1
    assert samples.read() != before


def test_values_of_a_read_stay_after_a_later_one(each_device):
    weight = torch.zeros(300)
    samples = ReadSamples(Samples([weight]))
    first = samples.start()
    weight.data.fill_(1)
    second = samples.start()
    assert first() == bytes(len(second())) != second() == samples.read()
