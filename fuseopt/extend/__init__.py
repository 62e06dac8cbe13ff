"""The road for users' own kernels: an op from a function, faster in steps, and into models by `fuseopt.initialize`."""

from fuseopt.extend.op import Op, op, registered, unregister

__all__ = ["Op", "op", "registered", "unregister"]
