"""Strategies: HOW a fusion is done. They claim sites in the order of this tuple; see README.md."""

from fuseopt.plan import Strategy
from fuseopt.strategies.generation import GenerationStrategy
from fuseopt.strategies.jit import JitStrategy
from fuseopt.strategies.kernels import CUSTOM_KERNELS, TRITON_KERNELS
from fuseopt.strategies.memory_efficient import MemoryEfficientStrategy

STRATEGIES: tuple[Strategy, ...] = (
    CUSTOM_KERNELS,
    TRITON_KERNELS,
    JitStrategy(),
    MemoryEfficientStrategy(),
    GenerationStrategy(),
)

__all__ = ["STRATEGIES"]
