"""Calls find memory for their frames, wherever a loop lies that makes many of them."""

import resource

from torch import fx, nn

from fuseopt.runtime import frame_stack
from fuseopt.training import partitioner

CALLS, DEPTHS = 1000, 200


def leaf():
    pass


def call_at(depth):
    if depth:
        return call_at(depth - 1)
    for _ in range(CALLS):
        leaf()


def faults():
    """How often memory was touched for the first time by loops at many depths, of which some end a chunk."""

    def count():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = count()
    for depth in range(DEPTHS):
        call_at(depth)
    return count() - before


def test_no_loop_maps_memory_for_each_call():
    assert frame_stack.in_one_chunk(lambda: faults())() < CALLS / 2


def test_nor_while_a_step_compiles(monkeypatch):
    seen = []

    def backend(graph, inputs):
        seen.append(faults())
        return graph.forward

    monkeypatch.setattr(partitioner, "lookup_backend", lambda name: backend)
    partitioner.compile_graph(fx.symbolic_trace(nn.Identity()), [], backend="inductor", budget=1.0)
    assert seen[0] < CALLS / 2
