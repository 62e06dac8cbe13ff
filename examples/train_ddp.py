"""Train GPT-2 on several GPUs with DistributedDataParallel, stock and with the preset `training`.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py                    # two GPUs, or two CPU processes
    torchrun --standalone --nproc-per-node 8 examples/train_ddp.py --batch 32 --length 1024 --steps 20

`fuseopt.initialize` comes before `DistributedDataParallel`, in every process. Nothing else is different. Weights and
tokens are random; each process has a batch of its own, and DDP averages their gradients. On a GPU the size is GPT-2's
(124 M parameters) under bfloat16 autocast, on a CPU two layers of 64 columns in float32.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import fuseopt

VOCABULARY = 50257


def random_model(device: torch.device) -> GPT2LMHeadModel:
    """GPT-2 with the same random weights in every process, without dropout."""
    torch.manual_seed(0)
    sizes = {} if device.type == "cuda" else {"n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, vocab_size=VOCABULARY)
    return GPT2LMHeadModel(config).to(device).train()


def train(model: nn.Module, ids: Tensor, steps: int) -> tuple[list[float], list[float]]:
    """Losses averaged over all processes, and the milliseconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, milliseconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())  # waits for the GPU
        milliseconds.append(1000 * (time.perf_counter() - start))
    return losses, milliseconds


def equal_in_all_processes(model: nn.Module) -> bool:
    """Whether every process has the same parameters after training."""
    for parameter in model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, src=0)
        different = (first != parameter).sum()
        dist.all_reduce(different)
        if different:
            return False
    return True


def run(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randint(VOCABULARY, (options.batch, options.length), device=device)

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    processes = dist.get_world_size()
    say(f"{processes} processes on {device.type}, {options.batch} x {options.length} tokens each")
    header = f"{'model':8} {'first loss':>10} {'last loss':>10} {'first step ms':>14} {'later steps ms':>15}"
    say(f"{header} {'tokens/s':>10}  processes equal")
    for name, config in (("stock", None), ("fused", options.config)):
        model = random_model(device)
        if config:
            model = fuseopt.initialize(model, config)
        losses, milliseconds = train(DistributedDataParallel(model), ids, options.steps)
        later = statistics.median(milliseconds[1:])
        rate = 1000 * processes * ids.numel() / later
        row = f"{name:8} {losses[0]:10.4f} {losses[-1]:10.4f} {milliseconds[0]:14.1f} {later:15.1f} {rate:10,.0f}"
        equal = equal_in_all_processes(model)
        say(f"{row}  {'yes' if equal else 'NO'}")
    say(f"\n{fuseopt.report(model)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=8, help="rows of each process; default: %(default)s")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row; default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="training steps; default: %(default)s")
    parser.add_argument("--config", default="training", help="a preset, or a JSON file; default: %(default)s")
    options = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        run(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
