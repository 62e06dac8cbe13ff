"""Fine-tune GPT-2 with transformers' Trainer, stock and with the preset `training`.

    python examples/finetune_trainer.py
    python examples/finetune_trainer.py --steps 200 --batch 32 --bf16      # on a GPU

The model is `examples/checkpoints/gpt2-kjv`, the texts are the beginnings of verses in `prompts.txt`. Only one line is
fuseopt's; dataset, collator, arguments and Trainer are as always. The first step compiles, so it is timed apart.
Dropout is off, so that losses can be compared. At the end the fused model is saved and loaded by transformers alone.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import fuseopt

CHECKPOINTS = Path(__file__).parent / "checkpoints"
LENGTH = 48


class StepTimes(TrainerCallback):
    """Milliseconds of each step, which ends when the GPU is done, and the peak of a GPU's memory in MiB."""

    def on_train_begin(self, *arguments: object, **options: object) -> None:
        self.milliseconds: list[float] = []
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, *arguments: object, **options: object) -> None:
        self.peak = f"{torch.cuda.max_memory_allocated() / 2**20:.0f}" if torch.cuda.is_available() else "-"

    def on_step_begin(self, *arguments: object, **options: object) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *arguments: object, **options: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.milliseconds.append(1000 * (time.perf_counter() - self._start))


def load_model() -> PreTrainedModel:
    """The checkpoint without dropout, in training mode."""
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2-kjv", **rates).train()


def load_rows(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, list[int]]]:
    """The prompts as token ids, all padded to `LENGTH`: batches of one size are compiled once."""
    lines = (CHECKPOINTS / "prompts.txt").read_text().splitlines()
    tokens = tokenizer(lines, padding="max_length", max_length=LENGTH, truncation=True)
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(*tokens.data.values(), strict=True)]


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> Trainer:
    """A Trainer that has trained `model`; its last callback has the times of the steps."""
    arguments = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        dataloader_drop_last=True,
        learning_rate=1e-4,
        bf16=options.bf16,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=load_rows(tokenizer),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[StepTimes()],
    )
    trainer.train()
    return trainer


def print_row(name: str, trainer: Trainer) -> None:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (times,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, StepTimes))
    first, later = times.milliseconds[0], statistics.median(times.milliseconds[1:])
    print(f"{name:10} {losses[0]:10.4f} {losses[-1]:9.4f} {first:13.1f} {later:14.1f} {times.peak:>9}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps; default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step; default: %(default)s")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--config", default="training", help="a preset, or a JSON file; default: %(default)s")
    parser.add_argument("--out", help="folder for the trained model; default: a temporary one")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        options.out = options.out or folder
        Path(options.out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()  # raises here, and not after training, if it cannot be written
        compare(options)


def compare(options: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "gpt2-kjv")
    stock = train(load_model(), tokenizer, options)
    fused = train(fuseopt.initialize(load_model(), options.config), tokenizer, options)

    columns = f"{'first loss':>10} {'last loss':>9} {'first step ms':>13} {'later steps ms':>14} {'peak MiB':>9}"
    print(f"\n{'model':10} {columns}")
    print_row("stock", stock)
    print_row("fused", fused)
    print(f"\n{fuseopt.report(fused.model)}")

    fused.save_model(options.out)
    loaded = AutoModelForCausalLM.from_pretrained(options.out).state_dict()
    equal = all(torch.equal(loaded[name], value.cpu()) for name, value in fused.model.state_dict().items())
    print(f"\nsaved, and loaded by transformers: weights {'equal' if equal else 'DIFFER'}")


if __name__ == "__main__":
    main()
