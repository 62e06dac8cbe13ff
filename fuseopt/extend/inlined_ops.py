"""Which ops torch.compile takes the function of, in place of a call, so that Inductor can fuse it."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from fuseopt.extend.backends import PLAIN

if TYPE_CHECKING:
    from fuseopt.extend.own_op import Op

# Ops by a key that no other op ever has, as torch.compile passes strings, but not objects, to a function that it runs.
_BY_KEY: weakref.WeakValueDictionary[str, Op] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def add(op: Op) -> str:
    """The key of a new op."""
    key = f"{op.name}#{next(_numbers)}"
    _BY_KEY[key] = op
    return key


def is_inlined(key: str, backend: str, device: str) -> bool:
    """Whether torch.compile takes the op's function in place of a call."""
    op = _BY_KEY[key]
    kernels, _ = op.calls.order(backend, device)
    first = next((kernel.backend for kernel in kernels if kernel.in_eager is None), None)
    return first in PLAIN and op.formula(first) is None


# What torch.compiler.assume_constant_result sets; calling that would import torch._dynamo.
is_inlined._dynamo_marked_constant = True  # type: ignore[attr-defined]
