"""Two connected processes, for tests of torch.distributed."""

import multiprocessing
from collections.abc import Callable

import torch
from torch.multiprocessing import ProcessContext


def start_two(function: Callable[..., None], arguments: tuple[object, ...], join: bool = True) -> ProcessContext | None:
    """`function(rank, *arguments)` in two new processes: without a GPU forks of one that has imported what both need.

    Where there is one, imports ask the driver for it, and a fork of a process that has asked cannot use the driver.
    """
    multiprocessing.set_forkserver_preload([function.__module__])
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    return torch.multiprocessing.start_processes(function, arguments, nprocs=2, join=join, start_method=method)
