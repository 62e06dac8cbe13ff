"""`fuseopt demo`: small trained checkpoints on real text, then times at real size."""

from __future__ import annotations

import contextlib
import functools
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch

import fuseopt
from fuseopt.bench.harness import progress
from fuseopt.bench.harness.machine import machine, versions
from fuseopt.bench.harness.measure import against_stock, measure
from fuseopt.bench.harness.records import Results
from fuseopt.bench.harness.workloads import failed
from fuseopt.bench.suites import demo_continuations
from fuseopt.bench.suites.demo_cases import CPU, GPU, QUICK, demo_cases
from fuseopt.tables import WIDTH

CHECKPOINTS = Path("examples", "checkpoints")
# (number of prompts, new tokens for each) of a checkpoint.
QUICK_TEXT = (2, 16)
TEXT = (6, 32)
_TIMES = "Times of models with random weights, stock and fused by the config in the second column."
_QUICK_TIMES = f"{_TIMES} They are tiny, and run on one thread."
_COLUMNS = "ms: median of a call. difference: the largest one from stock's output."


def default_checkpoints() -> Path:
    """Those of the clone in the current folder; without one, of the clone that fuseopt is imported from."""
    return CHECKPOINTS if CHECKPOINTS.is_dir() else Path(fuseopt.__file__).resolve().parents[1] / CHECKPOINTS


def run(*, device: torch.device, quick: bool, checkpoints: Path, out: str | os.PathLike[str] | None) -> Results:
    """Runs and prints the demo.

    Args:
        quick: less text, and tiny architectures on one thread: shows that everything works, but no useful times.
        checkpoints: a folder of checkpoint folders, and prompts.txt with a prompt a line.
        out: where to write the results as JSON.
    """
    with _threads(1) if quick else contextlib.nullcontext():
        return _run(device, quick, checkpoints, out)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """torch uses so many threads inside. Tiny work on several threads waits for them, on a busy machine for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(device: torch.device, quick: bool, checkpoints: Path, out: str | os.PathLike[str] | None) -> Results:
    for title, entries in (("machine", machine()), ("versions", versions())):
        what = ", ".join(f"{name}: {value}" for name, value in entries.items())
        print(textwrap.fill(f"{title}: {what}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    _show_checkpoints(checkpoints, device, *(QUICK_TEXT if quick else TEXT))
    sizes = QUICK if quick else GPU if device.type == "cuda" else CPU
    print(f"\n{_QUICK_TIMES if quick else _TIMES}\n{_COLUMNS}\n", flush=True)
    records = measure(demo_cases(sizes, device), functools.partial(against_stock, device=device))
    results = Results.measured_here("demo, quick" if quick else "demo", records)
    print(results.for_terminal())
    if quick:
        print("\n`fuseopt demo` without --quick times models of real size.")
    if out is not None:
        results.save(out)
        print(f"\nwritten to {out}")
    return results


def _show_checkpoints(checkpoints: Path, device: torch.device, count: int, new_tokens: int) -> None:
    folders = sorted(path.parent for path in checkpoints.glob("*/config.json"))
    prompts = checkpoints / "prompts.txt"
    if not folders or not prompts.is_file():
        print(f"no checkpoints under {checkpoints}: run this in the root of a clone, or give --checkpoints DIR")
        return
    lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    for folder in folders:
        progress.say(f"{folder.name} continues {count} prompts, {new_tokens} tokens each, stock and fused")
        try:
            demo_continuations.show(folder, lines[:count], new_tokens, device)
        except Exception as error:
            print(f"\n{folder.name}: {failed(error)}")
