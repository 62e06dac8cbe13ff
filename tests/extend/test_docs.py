"""The code of docs/your-own-kernels.md runs, block after block, as a reader would type it."""

import importlib.util
import linecache
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt.extend.check_file import check_file
from fuseopt.extend.replaced import unreplace
from fuseopt.kernel_table import kernels

PAGE = Path(fuseopt.__file__).parents[1] / "docs" / "your-own-kernels.md"
ROAD = """
import torch, fuseopt
from torch import Tensor

class MulAddReLU(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = torch.nn.Parameter(torch.ones(768)), torch.nn.Parameter(torch.zeros(768))

    def forward(self, x):
        return torch.relu(x * self.scale + self.shift)

model = torch.nn.Sequential(torch.nn.Linear(4, 768), MulAddReLU())

@fuseopt.op("mine::mul_add_relu")                 # rung 1: plain torch. Schema from the annotations; fake and autograd derived from it;
def mul_add_relu(a: Tensor, b: Tensor, c: Tensor) -> Tensor:     #   on a GPU "auto" is torch.compile of it
    return torch.relu(a * b + c)

@mul_add_relu.samples                             # what check, bench and verify call it with
def _(device, dtype):
    yield tuple(torch.randn(8, 768, device=device, dtype=dtype) for _ in range(3))

@mul_add_relu.kernel("triton")                    # rung 2: a function with the op's signature
def _(a, b, c): ...

@mul_add_relu.backward                            # optional; else autograd of the reference. (inputs, output, grad_output) -> gradients
def _(inputs, output, grad_output): ...

mul_add_relu.native(cuda=SOURCE_OR_PATH, cpu=SOURCE_OR_PATH)     # rung 3: built and cached by the package's own loader

fused = fuseopt.elementwise("mine::scale_add_relu", "relu(a + scale * b + bias)", scalars=("scale",))  # no kernel text: Triton, both ways

print(fuseopt.check(mul_add_relu))                # the contract: float64, gradients, strides, empty, fake, fullgraph, no write into inputs

@fuseopt.replaces(MulAddReLU)                     # a class, in any model; or model_types=[...], when=predicate
class FusedMulAddReLU(fuseopt.FusedModule):
    def forward(self, x):
        return mul_add_relu(x, self.scale, self.shift)

fuseopt.initialize(model)                         # planned, reported, verified, restored like a built-in, in every preset
"""  # noqa: E501
# What its two bodies `...` stand for.
KERNEL = "    return torch.relu(torch.addcmul(c, a, b))"
FORMULA = """    a, b, _ = inputs
    grad = torch.where(output > 0, grad_output, 0)
    return grad * b, grad * a, grad"""
SOURCE = """
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
Tensor mul_add_relu(Tensor a, Tensor b, Tensor c) {
  a = torch::stable::contiguous(a), b = torch::stable::contiguous(b), c = torch::stable::contiguous(c);
  Tensor output = torch::stable::empty_like(a);
  const float *x = a.const_data_ptr<float>(), *y = b.const_data_ptr<float>(), *z = c.const_data_ptr<float>();
  float* result = output.mutable_data_ptr<float>();
  for (int64_t i = 0; i < a.numel(); ++i) result[i] = x[i] * y[i] + z[i] > 0 ? x[i] * y[i] + z[i] : 0;
  return output;
}
"""
# What the source above takes, said between two statements of the text.
SUPPORTS = """
def takes(a, b, c):
    return all(t.dtype == torch.float32 and t.shape == a.shape and not t.is_cuda for t in (a, b, c))
mul_add_relu.supports(takes, "cpu").supports(takes, "cuda")

"""


def run(text: str, name: str, **given) -> dict:
    """The names that a program leaves behind, run as a module; Triton reads its lines by way of linecache."""
    module = sys.modules["your_own_kernels"] = types.ModuleType("your_own_kernels")
    vars(module).update(given)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), vars(module))
    return vars(module)


@pytest.fixture(autouse=True)
def no_modules_left():
    yield
    unreplace("FusedMulAddReLU")
    if "squared_relu" in kernels():
        unreplace("squared_relu")
    sys.modules.pop("your_own_kernels", None)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_block_of_the_page_runs(tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 10
    file = tmp_path / "page.py"
    file.write_text("\n\n".join(blocks))
    reports = check_file(file, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    names = ["mine::mul_add_relu", "mine::scale_add_relu", "mine::squared_relu"]
    assert [report.name for report in reports] == names
    assert all(reports), "\n".join(map(str, reports))
    printed = capsys.readouterr().out
    assert "mine::mul_add_relu on " in printed and "FAIL" not in printed
    assert "| mul_add_relu" in printed or "mine::mul_add_relu fwd" in printed  # the table of `bench`
    assert printed.count("FusedMulAddReLU") >= 2  # in the plan and in the report
    # The kernel that the plan names runs the module's call too.
    assert torch.cuda.is_available() or "FusedMulAddReLU[cpu]" in printed
    assert torch.cuda.is_available() or "runs on cpu\n" in printed
    assert "SquaredReLU -> squared_relu[" in printed


def test_the_road_runs_as_the_design_has_it(tmp_path, capsys):
    text = ROAD.replace("def _(a, b, c): ...", f"def _(a, b, c):\n{KERNEL}")
    text = text.replace("def _(inputs, output, grad_output): ...", f"def _(inputs, output, grad_output):\n{FORMULA}")
    file = tmp_path / "mul_add_relu.cpp"
    file.write_text(SOURCE)
    text = text.replace("fused = fuseopt", f"{SUPPORTS}fused = fuseopt")
    left = run(text, str(tmp_path / "road.py"), SOURCE_OR_PATH=os.fspath(file))
    printed = capsys.readouterr().out
    assert "mine::mul_add_relu on " in printed and "FAIL" not in printed
    assert [row.target for row in fuseopt.report(left["model"]).replaced if row.op] == ["FusedMulAddReLU"]
