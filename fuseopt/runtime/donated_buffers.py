"""Backward graphs of torch.compile that can run twice, as `retain_graph=True` asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_COLLECT = "collect_bw_donated_buffer_idxs"


def missing_from_torch() -> list[str]:
    """Names of the private functions used here that this version of torch lacks."""
    from torch._functorch._aot_autograd import graph_compile

    return [] if hasattr(graph_compile, _COLLECT) else [_COLLECT]


@contextlib.contextmanager
def no_donated_buffers() -> Iterator[None]:
    """Makes AOT Autograd compile backward graphs that do not overwrite their inputs, so that they can run twice.

    torch's option `donated_buffer=False` has the same effect on compilation, but has to be off during each run as well.
    """
    from torch._functorch._aot_autograd import graph_compile

    collect = getattr(graph_compile, _COLLECT)
    setattr(graph_compile, _COLLECT, lambda *_, **__: [])
    try:
        yield
    finally:
        setattr(graph_compile, _COLLECT, collect)
