"""Training a recommender: host syncs found in a profiler trace and removed, then fused parts put in by one line.

Every op is checked before it is timed. Sizes are small on a CPU.
"""

import argparse
import importlib.util
import json
import tempfile
import time
from pathlib import Path

import torch
from dlrm_model import DLRM, EmbeddingsFromHost, clicks
from dlrm_ops import bias_relu, interaction, interaction_backward, linear_relu
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import fuseopt

OUT = Path("build") / "examples" / "dlrm"  # git ignores build/
GPU_OR_CPU = "cuda" if torch.cuda.is_available() else "cpu"


def parts(*names: str, backend: str = "auto") -> dict:
    return {"kernel_fusion": {"custom_cuda_kernels": list(names), "backend": backend}}


PARTS = parts("FusedLinearReLU", "FusedInteraction")
# What a trace calls a host sync: `.item()` and its like; on a GPU also the waits and copies that the runtime makes.
SYNCS = ("aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaMemcpyAsync")


def train(model, batches, steps: int, *, reads_loss: bool = False) -> list[float]:
    """The loss of each step. `reads_loss` reads it back in every step, a host sync; otherwise once, at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        dense, ids, labels = batches[step % len(batches)]
        loss = F.binary_cross_entropy_with_logits(model(dense, ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if reads_loss else loss.detach())
    return losses if reads_loss else torch.stack(losses).tolist()


def traced(model, batches, path: Path, *, reads_loss: bool) -> dict[str, int]:
    """Write the trace of 3 steps, and count the syncs in it."""
    on_gpu = batches[0][0].is_cuda
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        train(model, batches, 3, reads_loss=reads_loss)
    profiler.export_chrome_trace(str(path))
    return {row.key: row.count for row in profiler.key_averages() if row.key in SYNCS}


def milliseconds_a_step(model, batches, steps: int, **options) -> float:
    train(model, batches, 3, **options)  # compiles, and fills caches
    start = time.perf_counter()
    train(model, batches, steps, **options)  # reads the losses in the end, so that the GPU is done
    return 1e3 * (time.perf_counter() - start) / steps


def save_plot(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 4), layout="tight")).subplots()
    axes.barh([row["way"] for row in rows], [row["ms_a_step"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="ms a training step", title="DLRM")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=GPU_OR_CPU, type=torch.device, help="default: %(default)s")
    parser.add_argument("--batch", type=int, help="clicks; default: 16384 on a GPU, 256 on a CPU")
    parser.add_argument(
        "--rows", type=int, help="rows of each of 26 tables; default: 100000 on a GPU (more than L2), 1000 on a CPU"
    )
    parser.add_argument("--dim", type=int, help="width of an embedding; default: 128 on a GPU, 16 on a CPU")
    parser.add_argument("--hidden", type=int, help="units of an MLP's layer; default: 512 on a GPU, 64 on a CPU")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], help="dtypes of the ops alone; default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps; default: %(default)s")
    parser.add_argument("--no-bench", action="store_true", help="leave out the tables of the ops alone")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for traces, results and the plot; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.out).close()  # raises now, not after the work, if it cannot be written
    device, on_gpu = options.device, options.device.type == "cuda"
    for op in (bias_relu, linear_relu, interaction, interaction_backward):
        report = fuseopt.check(op, device=device)
        if not report.ok:
            raise SystemExit(str(report))
        print(f"{op.name}: fuseopt.check finds nothing wrong with {', '.join(op.backends_on(device.type)[0])}")
    batch, rows = options.batch or (16384 if on_gpu else 256), options.rows or (100_000 if on_gpu else 1000)
    dim, hidden = options.dim or (128 if on_gpu else 16), options.hidden or (512 if on_gpu else 64)

    def made(**other):
        torch.manual_seed(0)
        return DLRM(rows, dim, hidden, **other).to(device)

    batches = [clicks(batch, device) for _ in range(4)]
    synced, plain, fused = made(embeddings=EmbeddingsFromHost), made(), fuseopt.initialize(made(), PARTS)
    for name, model, reads_loss in (("before", synced, True), ("after", plain, False)):
        train(model, batches, 1)
        counts = traced(model, batches, options.out / f"{name}.trace.json", reads_loss=reads_loss)
        print(f"host syncs of 3 steps, {name}: {counts}")
    print(fuseopt.report(fused))
    ways = {
        "eager, with host syncs": (made(embeddings=EmbeddingsFromHost), {"reads_loss": True}),
        "eager": (made(), {}),
        "torch.compile": (torch.compile(made()), {}),
        "fused parts": (fused, {}),
        "fused parts in torch.compile": (torch.compile(fuseopt.initialize(made(), PARTS)), {}),
        "fused interaction alone": (fuseopt.initialize(made(), parts("FusedInteraction")), {}),
    }
    for backend in ("triton", "cuda") if on_gpu else ():
        config = parts("LinearThenBiasReLU", backend=backend)
        ways[f"bias + ReLU by {backend}"] = (fuseopt.initialize(made(), config), {})
    results = []
    for name, (model, how) in ways.items():
        results.append({"way": name, "ms_a_step": milliseconds_a_step(model, batches, options.steps, **how)})
        print(f"{name:29}{results[-1]['ms_a_step']:10.3f} ms a step")
    if not options.no_bench:  # each op by each backend, beside eager, torch.compile and a copy of the same bytes
        for op, shape in ((bias_relu, f"{8 * batch}x{hidden}"), (interaction, f"{batch // 2}x27x{dim}")):
            table = op.bench([shape], options.dtypes, device=device)
            print(table.to_markdown())
            table.save(options.out / f"{op.name.partition('::')[2]}.json")
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        save_plot(results, options.out / "plot.png")
    else:
        print("no plot: it needs matplotlib: pip install 'fuseopt[plot]'")
    print(f"written to {options.out}")
    return results


if __name__ == "__main__":
    main()
