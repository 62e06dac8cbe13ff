"""The road for users' own kernels: an op from a function, faster in steps, and into models by `fuseopt.initialize`."""

from fuseopt.extend.checking import CheckReport, check
from fuseopt.extend.op import Op, op, registered, unregister

__all__ = ["CheckReport", "Op", "check", "op", "registered", "unregister"]
