"""What `backend: auto` prefers at some sizes: said in the report, and done in every call."""

import dataclasses
import sys

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt import native
from fuseopt.ops import registry
from tests.ops.cases import RawCalls


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_in_the_report_and_in_every_call(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    if native.load("cpu").status != "loaded":
        pytest.skip(f"no native library: {native.load('cpu').reason}")
    softmax = sys.modules["fuseopt.ops.softmax"]
    wide = registry.Preference(registry.REFERENCE, softmax._WIDE, device_type="cpu")
    op = dataclasses.replace(registry.get("softmax"), preferences=(wide,))
    monkeypatch.setattr(registry, "_OPS", registry._OPS | {"softmax": op})
    monkeypatch.setattr(registry, "_PICKED", {})
    monkeypatch.setattr(softmax, "_DIRECT", registry.Direct("softmax", softmax.FWD))

    monkeypatch.setattr(softmax, "_sizes", lambda input: softmax._WIDE if input.shape[-1] > 4 else "")
    model = nn.Sequential(nn.Linear(2, 2, device="cpu"), nn.Softmax(-1))
    config = {"kernel_fusion": {"custom_cuda_kernels": ["FusedSoftmax"], "jit": False, "backend": backend}}
    fuseopt.initialize(model, config, strict=True)
    (row,) = fuseopt.report(model).replaced
    assert row.backend == "cpu"
    remark = "torch's own operation where 64 to 128 rows are 262,144 wide or wider: measured faster"
    assert (remark in row.reason) == (backend == "auto")
    kernel = ["softmax_fwd.default"]
    for columns, expected in ((4, kernel), (5, [] if backend == "auto" else kernel)):
        for requires_grad in (False, True):
            input = torch.randn(1, columns, device="cpu", requires_grad=requires_grad)
            with RawCalls() as raw:
                torch.testing.assert_close(model[1](input), input.softmax(-1))
            assert raw.names() == expected
