"""Calls without host time: captured as one CUDA graph, over data that the caches do not hold."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from fuseopt.runtime.timer import Call

# The sets of arguments that calls alternate between have this many times the size of the L2 cache, up to MOST_SETS.
CACHE_MULTIPLE = 4
MOST_SETS = 32
# A graph has as many calls as move this many bytes. That takes 0.4 ms on an H200, so its launch time does not matter.
BYTES_PER_GRAPH = 1.6e9
MOST_CALLS = 256


def set_count(bytes_per_call: int, device: torch.device) -> int:
    """How many sets of arguments calls should alternate between."""
    wanted = math.ceil(CACHE_MULTIPLE * _cache_bytes(device) / max(bytes_per_call, 1))
    return min(max(wanted, 2), MOST_SETS)


def stay_in_cache(bytes_per_call: int, device: torch.device) -> bool:
    """Whether `set_count` sets of arguments fit into the L2 cache together, as those of a decode step do."""
    return set_count(bytes_per_call, device) * bytes_per_call <= _cache_bytes(device)


def calls_per_graph(bytes_per_call: int, sets: int) -> int:
    """How many calls a graph should have: a multiple of `sets`."""
    calls = min(BYTES_PER_GRAPH / max(bytes_per_call, 1), MOST_CALLS)
    return sets * max(1, round(calls / sets))


def graph_of(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph | None:
    """A graph of `count` calls, taken from `calls` in turn, or None if they wait for the device, as no graph can.

    All calls must have been warmed up. The current stream must not be the default one; a backward is recorded only if
    its forward ran on the current stream. The calls hold what the graph reads: keep them as long as the graph.
    """
    if _waits_for_device(calls[0]):
        return None
    graph = torch.cuda.CUDAGraph()
    # Results that live on keep the next call from writing where this one wrote, into the cache.
    results: deque[Any] = deque(maxlen=len(calls))
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for index in range(count):
            results.append(calls[index % len(calls)]())
    return graph


def _waits_for_device(call: Call) -> bool:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return False


def _cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size
