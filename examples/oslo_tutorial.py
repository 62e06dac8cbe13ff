"""The three sections of OSLO's kernel fusion tutorial, run with fuseopt, and the last one again with `generation`.

    python examples/oslo_tutorial.py                     # GPT-2 and T5-base, batch 256 on a GPU, 8 on a CPU
    python examples/oslo_tutorial.py --dtype bfloat16
    python examples/oslo_tutorial.py --tiny              # under a minute on a CPU

The config dicts of sections 1 to 3 are the tutorial's own. Three things differ from it:

- Weights are random, so nothing is downloaded. Sizes are those of `gpt2` and `t5-base`. Dropout is 0, so that losses
  can be compared.
- Each timed call waits for the GPU before and after. The tutorial stops the clock while the GPU is still working.
- Section 2 times a training step: `memory_efficient_fusion` changes nothing else. The tutorial times a forward.

Stock and fused model take turns; times are medians. "outputs" compares them: the largest difference of logits or loss,
or the number of generated tokens that differ.
"""

import argparse
import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import fuseopt

JIT = {"kernel_fusion": {"enable": True}}
MEMORY_EFFICIENT = {
    "kernel_fusion": {
        "enable": True,
        "memory_efficient_fusion": True,
    },
}
CUSTOM_KERNELS = {
    "kernel_fusion": {
        "enable": True,
        "custom_cuda_kernels": ["FusedNoRepeatNGram", "FusedRMSNorm"],
    },
}
GENERATION = {**CUSTOM_KERNELS, "generation": {"enable": True}}

Work = Callable[[nn.Module], Tensor]


@torch.no_grad()
def forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Section 1: logits [batch, length, vocabulary]."""
    return model.eval()(ids).logits


def training_step(model: nn.Module, ids: Tensor) -> Tensor:
    """Section 2: forward and backward; returns the loss."""
    model.train().zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def generate(model: nn.Module, ids: Tensor) -> Tensor:
    """Section 3: 19 new tokens after the start token, none of which completes an earlier n-gram of 3."""
    return model.eval().generate(ids, no_repeat_ngram_size=3, max_length=20, num_beams=1, do_sample=False)


def milliseconds(work: Work, model: nn.Module, ids: Tensor) -> float:
    """Time of one call that starts on an idle device and ends when its result is there."""
    if ids.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work(model, ids)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def outputs_differ(stock: Tensor, fused: Tensor) -> str:
    if stock.is_floating_point():
        return f"{(stock - fused).abs().max().item():.1e}"
    if stock.shape != fused.shape:
        return f"shapes {list(stock.shape)} and {list(fused.shape)}"
    return f"{(stock != fused).sum().item()} of {stock.numel()} tokens"


def compare(section: str, stock: nn.Module, config: dict, work: Work, ids: Tensor, calls: int) -> None:
    """Prints one row: `work` by the stock model and by a fused copy, `calls` times each after as many untimed ones."""
    fused = fuseopt.initialize(copy.deepcopy(stock), config)
    for _ in range(calls):  # the warm-up of the tutorial: compiles, and captures CUDA graphs
        expected, actual = work(stock, ids), work(fused, ids)
    times = [(milliseconds(work, stock, ids), milliseconds(work, fused, ids)) for _ in range(calls)]
    stock_ms, fused_ms = (statistics.median(column) for column in zip(*times, strict=True))
    replaced = Counter(row.change.partition(" -> ")[2] for row in fuseopt.report(fused).replaced)
    print(
        f"{section:36} {stock_ms:10.2f} {fused_ms:10.2f} {stock_ms / fused_ms:8.2f}x "
        f" {outputs_differ(expected, actual):18} {', '.join(f'{count} {name}' for name, count in replaced.items())}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, help="rows; default: 256 on a GPU, as in the tutorial; 8 on a CPU")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default: %(default)s")
    parser.add_argument("--calls", type=int, help="timed calls; default: 10 on a GPU, as in the tutorial; 3 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="two layers of 32 columns, 1000 tokens: a minute on a CPU")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    device, dtype = "cuda" if on_gpu else "cpu", getattr(torch, options.dtype)
    batch, calls = options.batch or (256 if on_gpu else 8), options.calls or (10 if on_gpu else 3)

    gpt2_sizes: dict = {}
    t5_sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    if options.tiny:
        ids = {"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 1}
        gpt2_sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, **ids}
        t5_sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 1000}
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(**gpt2_sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).to(device, dtype)
    t5 = T5ForConditionalGeneration(T5Config(**t5_sizes, dropout_rate=0.0, decoder_start_token_id=0)).to(device, dtype)
    gpt2_ids = torch.ones(batch, 16, dtype=torch.long, device=device)
    t5_ids = torch.ones(batch, 1, dtype=torch.long, device=device)

    print(f"{options.dtype} on {torch.cuda.get_device_name() if on_gpu else 'a CPU'}, batch {batch}")
    print(f"{'section':36} {'stock ms':>10} {'fused ms':>10} {'speed-up':>9}  {'outputs':18} replaced")
    compare("1. JIT: GPT-2 forward", gpt2, JIT, forward, gpt2_ids, calls)
    compare("2. memory efficient: GPT-2 training", gpt2, MEMORY_EFFICIENT, training_step, gpt2_ids, calls)
    compare("3. custom kernels: T5 generate()", t5, CUSTOM_KERNELS, generate, t5_ids, calls)
    compare("3. and generation: T5 generate()", t5, GENERATION, generate, t5_ids, calls)


if __name__ == "__main__":
    main()
