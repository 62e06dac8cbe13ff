"""FusedRMSNorm and FusedLayerNorm as modules: dtypes under autocast, and what they cannot stand in for."""

import pytest
import torch
from torch import nn

from fuseopt.modules import FusedLayerNorm, FusedRMSNorm

pytestmark = pytest.mark.usefixtures("each_device")
TORCH = {"cast_order": "input", "eps": "eps", "autocasts": True}


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("source", [nn.RMSNorm(40, eps=1e-5), nn.LayerNorm(40), nn.LayerNorm((3, 40))], ids=str)
def test_dtype_and_values_are_the_source_s(source, autocast, input_dtype):
    device = torch.get_default_device()
    source = source.to(device)
    if isinstance(source, nn.RMSNorm):
        fused = FusedRMSNorm.from_module(source, **TORCH)
    else:
        fused = FusedLayerNorm.from_module(source)
    input = torch.randn(5, 3, 40, dtype=input_dtype)
    weight_dtype = torch.float32 if autocast else input_dtype
    source.to(weight_dtype)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        wanted, got = source(input), fused(input)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted)


def test_what_rms_norm_cannot_stand_in_for():
    (reason,) = FusedRMSNorm.not_supported_reasons(nn.RMSNorm((3, 40), eps=1e-5))
    assert "2 dimensions" in reason
    (reason,) = FusedRMSNorm.not_supported_reasons(nn.RMSNorm(40))
    assert "eps=None" in reason
    with pytest.raises(ValueError, match="FusedRMSNorm cannot stand in for RMSNorm: with eps=None"):
        FusedRMSNorm.from_module(nn.RMSNorm(40), **TORCH)
