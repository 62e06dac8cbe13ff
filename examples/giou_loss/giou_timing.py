"""Time of a call: in a CUDA graph, by events where the call cannot be captured, on a CPU by the host's clock."""

import torch
from torch.utils.benchmark import Timer
from triton.testing import do_bench


def waits_for_gpu(call) -> bool:
    """True if a call waits for the GPU, as by the size of a boolean index: a CUDA graph cannot hold it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def timed(calls: list, device: torch.device) -> tuple[float, str]:
    """Microseconds of one call of several, whose boxes together exceed the L2 cache of a GPU, and how it was timed."""
    run = calls[0]
    if device.type == "cuda":
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls * 2:
                call()
        torch.cuda.synchronize()
        if waits_for_gpu(run):
            return 1e3 * do_bench(lambda: [call() for call in calls], return_mode="median") / len(calls), "events"
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        run = graph.replay
    timer = Timer("run()", globals={"run": run})
    us = 1e6 * timer.blocked_autorange(min_run_time=0.05).median / len(calls)
    return us, "host clock" if run is calls[0] else "CUDA graph"
