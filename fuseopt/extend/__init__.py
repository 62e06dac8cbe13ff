"""The road for users' own kernels: an op from a function, faster in steps, and into models by `fuseopt.initialize`."""

from fuseopt.extend.check_report import CheckReport
from fuseopt.extend.checking import check
from fuseopt.extend.elementwise_op import elementwise
from fuseopt.extend.fused_module import FusedModule
from fuseopt.extend.own_op import Op, op, registered
from fuseopt.extend.replaced import replaces, replaces_function, unregister, unreplace
from fuseopt.generation.families.step_interface import register_decode_step

__all__ = [
    "CheckReport",
    "FusedModule",
    "Op",
    "check",
    "elementwise",
    "op",
    "register_decode_step",
    "registered",
    "replaces",
    "replaces_function",
    "unregister",
    "unreplace",
]
