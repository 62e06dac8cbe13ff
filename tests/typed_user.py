"""A user's script with the types that a reader expects of every public function; tests/test_typing.py checks it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import fuseopt
from fuseopt import Config, FusedModule, Plan, Report, Verification


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result


config: Config = Config.load({"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"]}})
net: Net = fuseopt.initialize(Net(), config, strict=True)
plan: Plan = fuseopt.plan(net, "inference")
report: Report = fuseopt.report(net)
names: list[str] = [row.target for row in report.replaced]
checked: Verification = fuseopt.verify(net, config, {"x": torch.randn(3, 16)})
ok: bool = checked.ok
with fuseopt.fused(net, "reference") as fused:
    same: Net = fused
measured: Net = fuseopt.initialize(net, "auto", inputs={"x": torch.randn(3, 16)}, time_limit=5.0)
restored: Net = fuseopt.restore(net)


@fuseopt.op("mine::twice")
def twice(x: Tensor) -> Tensor:
    return 2 * x


@twice.samples
def _(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor]]:
    yield (torch.randn(3, 16, device=device, dtype=dtype),)


doubled: Tensor = twice(torch.randn(3))
print(fuseopt.check(twice))
fused_add: fuseopt.Op = fuseopt.elementwise("mine::add", "a + scale * b", scalars=("scale",))


@fuseopt.replaces(Net)
class FusedNet(FusedModule):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = twice(x)
        return result
