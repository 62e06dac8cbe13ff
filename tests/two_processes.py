"""Two connected processes, for tests of torch.distributed."""

import multiprocessing
from collections.abc import Callable

import torch


def start_two(function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """`function(rank, *arguments)` in two new processes: without a GPU forks of one that has imported what both need.

    Where there is one, imports ask the driver for it, and a fork of a process that has asked cannot use the driver.
    """
    multiprocessing.set_forkserver_preload([function.__module__])
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    torch.multiprocessing.start_processes(function, arguments, nprocs=2, start_method=method)
