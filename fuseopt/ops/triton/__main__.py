"""Compiles into Triton's cache on disk what calls of raw ops launch, without a GPU.

Standard input, pickled: the arguments of `compile_only`, and the name and arguments of each call, tensors on the meta
device. A call that fails leaves the others alone.
"""

import multiprocessing
import os
import pickle
import sys

from fuseopt.ops import triton as ops
from fuseopt.ops.triton.compile_only import compile_only


def _call(name: str, arguments: tuple[object, ...]) -> None:
    getattr(ops, name)(*arguments)


if __name__ == "__main__":
    gpu, calls = pickle.load(sys.stdin.buffer)
    processes = min(len(calls), os.cpu_count() or 1)
    with compile_only(*gpu), multiprocessing.get_context("fork").Pool(processes) as pool:
        for call in calls:
            pool.apply_async(_call, call)
        pool.close()
        pool.join()
