"""`fuseopt bench train`: training steps, fused AdamW included, of transformers, torch.compile and fuseopt."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fuseopt.bench.harness.architectures import dropout_rates, load_config, random_model
from fuseopt.bench.harness.flops import forward_flops, matmul_timing
from fuseopt.bench.harness.measure import SECONDS_PER_CASE, measure, peak_mib, taken_bytes
from fuseopt.bench.harness.records import STOCK, Record, Results
from fuseopt.bench.harness.workloads import FusionConfig, dtype_name, failed, fuse, random_tokens
from fuseopt.errors import CompileError, ConfigError
from fuseopt.kernel_table import preset_block
from fuseopt.runtime.timer import sustained_seconds, time_in_turns

COMPILE = "torch.compile"
PRECISIONS = {"autocast": torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}
LEARNING_RATE = 3e-4
COMPARED_STEPS = 4
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Row:
    """The work of one training step.

    Attributes:
        model: an architecture by name, a folder with a config.json, or a model id; weights are random.
        length: tokens per row; of a T5, for encoder and decoder each.
        dropout: value for every dropout rate; None keeps the model's own.
        precision: "autocast" to bfloat16 with weights in float32, or "bfloat16" or "float32" for everything.
        padded: rows have random lengths from half of `length` on, with an attention mask. A T5's decoder has lengths
            and a mask of its own.
    """

    model: str
    batch: int
    length: int
    dropout: float | None = None
    precision: str = "autocast"
    padded: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the matmuls."""
        return torch.float32 if self.precision == "float32" else torch.bfloat16

    @property
    def autocast(self) -> bool:
        return self.precision == "autocast"

    @property
    def tokens(self) -> int:
        """Positions in a batch; of a T5, encoder and decoder together."""
        return self.batch * self.length * (2 if load_config(self.model).is_encoder_decoder else 1)

    @property
    def name(self) -> str:
        return self.name_with(str(self.batch))

    def name_with(self, batch: str) -> str:
        """`name`, with other words for the batch."""
        length = f"({self.length} + {self.length})" if load_config(self.model).is_encoder_decoder else self.length
        parts = [
            f"{self.model} training step, {batch} x {length}",
            *(["padded"] if self.padded else []),
            *([] if self.dropout is None else [f"dropout {self.dropout:g}"]),
            "bfloat16 autocast" if self.autocast else self.precision,
        ]
        return ", ".join(parts)


GPU_ROWS = (
    Row("gpt2", 64, 1024, dropout=0.0),
    Row("gpt2", 64, 1024, dropout=0.1),
    Row("gpt2", 16, 1024, dropout=0.1),
    Row("t5-base", 16, 512, dropout=0.1),
    Row("t5-base", 8, 2048, dropout=0.1, padded=True),
    Row("llama-3.2-1b", 4, 2048, dropout=0.0, precision="bfloat16"),
)
CPU_ROWS = (
    Row("gpt2-tiny", 8, 64, dropout=0.0, precision="float32"),
    Row("t5-tiny", 8, 32, dropout=0.1, precision="float32"),
)


@dataclass(frozen=True)
class Loop:
    """One system's model, optimizer and batch. A call does a training step and returns its loss, a scalar tensor."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Mapping[str, Tensor]
    autocast: bool

    def __call__(self) -> Tensor:
        with torch.autocast(self.batch["input_ids"].device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


@dataclass(frozen=True)
class Trial:
    """Result of a system's first steps; `step` does the next ones."""

    step: Loop
    losses: tuple[float, ...]
    first_seconds: float
    peak_mib: float | None

    def difference(self, other: Trial) -> float:
        """The largest difference between losses of the same step, relative to the other's loss."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(own - others) / others for own, others in pairs)


def run(
    *,
    device: torch.device,
    rows: Sequence[Row] = (),
    configs: Mapping[str, FusionConfig] | None = None,
    compile: bool | None = None,
) -> Results:
    """Times whole steps of every system in turns; each has its own model and optimizer.

    Before that, the losses of the first steps on one batch are compared. With dropout they differ by more than
    rounding, because the random numbers differ.

    Args:
        rows: `GPU_ROWS` by default, `CPU_ROWS` on a CPU.
        configs: by default `default_configs`.
        compile: also time torch.compile of the stock model. The default is True on a GPU; on a CPU it takes minutes.

    Raises:
        ConfigError: a model is no architecture by name, folder with a config.json or model id; a config is wrong.
    """
    on_gpu = device.type == "cuda"
    rows = rows or (GPU_ROWS if on_gpu else CPU_ROWS)
    configs = default_configs(device) if configs is None else configs
    compile = on_gpu if compile is None else compile
    matmuls = {dtype: _matmul(device, dtype) for dtype in dict.fromkeys(row.dtype for row in rows)}

    def records_of(row: Row) -> list[Record]:
        teraflops, _ = matmuls[row.dtype]
        return _records(row, all_systems(configs, compile), teraflops, device)

    measured = measure(rows, records_of)
    return Results.measured_here("train", [*(record for _, record in matmuls.values()), *measured])


def default_configs(device: torch.device) -> dict[str, FusionConfig]:
    """The preset "training", and on a GPU the same with half its activations."""
    return {"preset training": "training", **(budget_configs([0.5]) if device.type == "cuda" else {})}


def budget_configs(budgets: Sequence[float]) -> dict[str, FusionConfig]:
    """The preset "training" at each of these budgets."""
    fusion = preset_block("training")
    return {
        f"preset training, budget {budget:g}": {
            "kernel_fusion": {**fusion, "memory_efficient_fusion": {"budget": budget}}
        }
        for budget in budgets
    }


def _matmul(device: torch.device, dtype: torch.dtype) -> tuple[float, Record]:
    """The rate of a large matmul in TFLOP/s, and its record."""
    size = 8192 if device.type == "cuda" else 1024
    timing = matmul_timing(size, device, dtype)
    teraflops = 2 * size**3 / timing.seconds.median / 1e12
    name = f"matmul, {size} x {size} x {size}, {dtype_name(dtype)}"
    return teraflops, Record.of(name, "torch", timing, None, note=f"{teraflops:.3g} TFLOP/s")


def all_systems(configs: Mapping[str, FusionConfig], compile: bool) -> dict[str, FusionConfig | None]:
    """The systems to compare, by name. The config is None for stock transformers and for torch.compile."""
    return {STOCK: None, **({COMPILE: None} if compile else {}), **configs}


def _records(
    row: Row, systems: Mapping[str, FusionConfig | None], teraflops: float, device: torch.device
) -> list[Record]:
    config = load_config(row.model)
    floor = 3 * forward_flops(row.model, row.batch, row.length) / teraflops / 1e12
    batch = make_batch(row, config.vocab_size, device)
    trials = dict(first_steps(row, name, fusion, batch, device) for name, fusion in systems.items())
    running = {name: trial for name, trial in trials.items() if isinstance(trial, Trial)}
    if not running:
        return [Record(row.name, name, note=found) for name, found in trials.items() if isinstance(found, str)]
    # Losses are compared with stock's, or if stock runs out of memory, with those of the next system.
    first, baseline = next(iter(running.items()))
    refused = {name: _refusal(row, trial, first, baseline) for name, trial in trials.items()}

    def refuse(name: str, error: Exception) -> None:
        refused[name] = _why(error)

    timings = time_in_turns(
        {name: trial.step for name, trial in running.items() if refused[name] is None},
        # A loop does not wait for the GPU after every step.
        functools.partial(sustained_seconds, device=device, repetitions=3),
        rounds=5,
        warm_up=1,
        seconds=SECONDS_PER_CASE,
        on_error=refuse,
    )
    records = [
        Record(row.name, name, note=refused[name])
        if isinstance(trial, str) or refused[name] is not None
        else Record.of(
            row.name,
            name,
            timings[name],
            None if name == STOCK else timings.get(STOCK),
            difference=None if name == first else f"{trial.difference(baseline):.1e}",
            peak_mib=trial.peak_mib,
            tokens=row.tokens,
            of_floor=floor / timings[name].seconds.median,
            first_seconds=trial.first_seconds,
        )
        for name, trial in trials.items()
    ]
    del trials, running, baseline
    # A compiled step and its model form a reference cycle.
    gc.collect()
    return records


def make_batch(row: Row, vocab: int, device: torch.device) -> dict[str, Tensor]:
    """Random tokens that are their own labels; if padded, with random lengths, a T5's decoder with its own."""
    ids = random_tokens(device, vocab, row.batch, row.length)
    if not row.padded:
        return {"input_ids": ids, "labels": ids}
    generator = torch.Generator().manual_seed(0)
    seen = learnt = _seen(row, generator).to(device)
    batch = {"input_ids": ids * seen, "attention_mask": seen.long()}
    if load_config(row.model).is_encoder_decoder:
        learnt = _seen(row, generator).to(device)
        batch["decoder_attention_mask"] = learnt.long()
    return batch | {"labels": ids.masked_fill(~learnt, -100)}


def _seen(row: Row, generator: torch.Generator) -> Tensor:
    """Mask [batch, length], True for tokens; rows have random lengths of at least half of `length`."""
    lengths = torch.randint(row.length // 2, row.length + 1, (row.batch, 1), generator=generator)
    return torch.arange(row.length) < lengths


def first_steps(
    row: Row, name: str, config: FusionConfig | None, batch: Mapping[str, Tensor], device: torch.device
) -> tuple[str, Trial | str]:
    """The variant's name, and the trial of its first steps or the reason why there is none."""
    before = taken_bytes(device) if device.type == "cuda" else 0
    overrides = {} if row.dropout is None else dropout_rates(row.model, row.dropout)
    try:
        model = random_model(row.model, device, PRECISIONS[row.precision], **overrides).train()
        if not model.config.is_encoder_decoder:
            # Where transformers has to guess the loss it warns, and that breaks torch.compile's graph before the loss.
            model.loss_type = "ForCausalLM"
        if config is not None:
            name, unmet = fuse(model, name, config)
            if unmet is not None:
                return name, unmet
        if name == COMPILE:
            model.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        step = Loop(model, optimizer, batch, row.autocast)
        torch.manual_seed(0)
        start = time.perf_counter()
        losses = [step().item()]
        first_seconds = time.perf_counter() - start
        losses += [step().item() for _ in range(COMPARED_STEPS - 1)]
        return name, Trial(step, tuple(losses), first_seconds, peak_mib(step, device, above=before))
    except ConfigError:
        raise
    except Exception as error:
        return name, _why(error)


def _why(error: Exception) -> str:
    """Why a system is not timed."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return str(error) if isinstance(error, CompileError) else failed(error)


def _refusal(row: Row, trial: Trial | str, first: str, baseline: Trial) -> str | None:
    """Why the system is not timed; None if it is."""
    if isinstance(trial, str):
        return trial
    tolerance = 0.05 if row.dropout != 0 else 1e-4 if row.precision == "float32" else 0.01
    difference = trial.difference(baseline)
    return None if difference <= tolerance else f"losses differ from {first}'s by {difference:.1e} of them: wrong"
