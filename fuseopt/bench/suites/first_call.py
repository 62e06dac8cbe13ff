"""Times the first generate() call of a fresh process: `python -m fuseopt.bench.suites.first_call REQUEST_AS_JSON`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class FirstCall:
    """Time and memory of the first call in a fresh process, with the model already on its device.

    Attributes:
        seconds: time of `initialize`, if there is a config, and of the first call.
        peak_mib: peak GPU memory in MiB above what the model takes; None on a CPU.
    """

    seconds: float
    peak_mib: float | None

    @classmethod
    def measured(cls, request: Mapping[str, Any]) -> FirstCall | str:
        """Measures in a new process, which finds the native libraries in the cache; on failure, its last error line.

        Args:
            request: as `main` takes it.
        """
        command = [sys.executable, "-W", "ignore", "-m", "fuseopt.bench.suites.first_call", json.dumps(request)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"first call: {(done.stderr.strip().splitlines() or [f'exit {done.returncode}'])[-1]}"
        return cls(**json.loads(done.stdout.splitlines()[-1]))


def main(request: Mapping[str, Any]) -> None:
    """Prints a FirstCall as JSON.

    Args:
        request: `row`, the fields of a `Row`; `config`, None for stock transformers; `options`, further arguments of
            `Row.work`; `dtype` and `device`, by name.
    """
    import fuseopt
    from fuseopt.bench.harness.generate_rows import Row

    device, row = torch.device(request["device"]), Row(**request["row"])
    on_gpu = device.type == "cuda"
    model = row.random_model(device, getattr(torch, request["dtype"]))
    config, work = request["config"], row.work(device, row.new, **request["options"])
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    if config is not None:
        fuseopt.initialize(model, config)
    work(model)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if on_gpu else None
    print(json.dumps({"seconds": seconds, "peak_mib": peak}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
