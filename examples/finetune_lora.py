"""Fine-tune GPT-2 with a PEFT LoRA adapter and the preset `training`; save, reload and merge the adapter.

    python examples/finetune_lora.py
    python examples/finetune_lora.py --steps 200 --batch 32      # on a GPU

The model is `examples/checkpoints/gpt2-kjv`, the texts are the beginnings of verses in `prompts.txt`. Training: adapter
first, then `fuseopt.initialize`. Generating: the decode loop serves the adapter unmerged; a merged one is faster, and
its forwards are fused too. The second table compares the logits of each later model with those of the trained one.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedModel

import fuseopt

CHECKPOINTS = Path(__file__).parent / "checkpoints"
LORA = {"r": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}


def load_base(device: str) -> PreTrainedModel:
    """The checkpoint without dropout."""
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2-kjv", **rates).to(device)


def adapted_model(device: str) -> PeftModel:
    """The checkpoint with a new adapter, the same in every call."""
    torch.manual_seed(0)
    return get_peft_model(load_base(device), LoraConfig(**LORA))


def train(model: PeftModel, batch: BatchEncoding, steps: int) -> tuple[list[float], list[float]]:
    """Losses and milliseconds of `steps` steps on one batch; frozen weights stay as they are."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.train()
    losses, milliseconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        milliseconds.append(1000 * (time.perf_counter() - start))
    return losses, milliseconds


@torch.no_grad()
def logits_of(model: torch.nn.Module, batch: BatchEncoding) -> Tensor:
    return model.eval()(**batch).logits


def tier_of_generate(model: torch.nn.Module, batch: BatchEncoding) -> str:
    """Who decodes a call, from the report: the device loop (T0) or, with the reason, transformers (T2)."""
    with fuseopt.fused(model, {"generation": {"enable": True}}):
        model.generate(**batch, max_new_tokens=4, do_sample=False)
        lines = fuseopt.report(model).since
    return next(line.partition(": ")[2] for line in lines if line.startswith("generate(): T"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps; default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step; default: %(default)s")
    parser.add_argument("--config", default="training", help="a preset, or a JSON file; default: %(default)s")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "gpt2-kjv")
    lines = (CHECKPOINTS / "prompts.txt").read_text().splitlines()[: options.batch]
    batch = tokenizer(lines, padding=True, return_tensors="pt").to(device)

    print(f"{'model':8} {'first loss':>10} {'last loss':>10} {'first step ms':>14} {'later steps ms':>15}")
    for name, config in (("stock", None), ("fused", options.config)):
        model = adapted_model(device)
        if config:
            model = fuseopt.initialize(model, config)
        losses, milliseconds = train(model, batch, options.steps)
        later = statistics.median(milliseconds[1:])
        print(f"{name:8} {losses[0]:10.4f} {losses[-1]:10.4f} {milliseconds[0]:14.1f} {later:15.1f}")
    print(f"\n{fuseopt.report(model)}\n")

    expected = logits_of(model, batch)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # the adapter only, as of any PEFT model
        files = ", ".join(sorted(path.name for path in Path(folder).iterdir()))
        reloaded = PeftModel.from_pretrained(load_base(device), folder)
    print(f"saved: {files}")

    print(f"\n{'model':22} {'logits differ by':>16}  decodes")
    print(f"{'without the adapter':22} {difference(expected, logits_of(load_base(device), batch)):16.1e}")
    row = f"{'reloaded':22} {difference(expected, logits_of(reloaded, batch)):16.1e}"
    print(f"{row}  {tier_of_generate(reloaded.get_base_model(), batch)}")
    merged = reloaded.merge_and_unload()
    row = f"{'reloaded and merged':22} {difference(expected, logits_of(merged, batch)):16.1e}"
    print(f"{row}  {tier_of_generate(merged, batch)}")


def difference(expected: Tensor, actual: Tensor) -> float:
    return (expected - actual).abs().max().item()


if __name__ == "__main__":
    main()
