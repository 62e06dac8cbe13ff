"""The strategies `kernels` and `triton`: the kernels that a config lists, each proposed by its entry in the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseopt.config import Config, KernelFusion, KernelRequest
from fuseopt.kernel_table import CUSTOM, TRITON, find_kernel, kernels
from fuseopt.model_index import ModelIndex
from fuseopt.models import ModelPolicy
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext


@dataclass(frozen=True)
class KernelStrategy:
    """One kernel list of a config.

    Attributes:
        name: shown in plans.
        key: the list's key in the config.
        backend: the backend of every kernel in the list; None leaves it to the config.
    """

    name: str
    key: str
    backend: str | None = None

    block: ClassVar[str] = "kernel_fusion"

    def requested(self, config: Config) -> tuple[str, ...]:
        return tuple(request.name for request in self._requests(config.active_fusion))

    def propose(self, index: ModelIndex, policy: ModelPolicy, config: Config) -> Iterator[Replacement | Skip]:
        fusion = config.active_fusion
        for request in self._requests(fusion):
            kernel = find_kernel(request.name)
            configured = self.backend or fusion.backend
            context = ProposalContext(index, policy, request.name, self.name, request.options, configured)
            yield from kernel.proposer(context if kernel.op is None else context.for_op(kernel.op))

    def _requests(self, fusion: KernelFusion) -> list[KernelRequest]:
        """In the order of the kernel table, whatever that of the config."""
        requests: tuple[KernelRequest, ...] = getattr(fusion, self.key)
        places = {name: place for place, name in enumerate(kernels())}
        return sorted(requests, key=lambda request: places.get(request.name, len(places)))


CUSTOM_KERNELS = KernelStrategy("kernels", CUSTOM)
TRITON_KERNELS = KernelStrategy("triton", TRITON, backend="triton")
