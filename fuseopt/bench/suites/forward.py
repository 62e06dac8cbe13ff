"""`fuseopt bench forward`: a forward of transformers, torch.compile and fuseopt, in eval and training mode."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fuseopt.bench.harness.architectures import dropout_rates, load_config, random_model
from fuseopt.bench.harness.measure import against_stock, measure
from fuseopt.bench.harness.records import Results
from fuseopt.bench.harness.workloads import (
    FusionConfig,
    ModelCase,
    Work,
    compiled,
    dtype_name,
    forward,
    random_tokens,
    training_forward,
)

COMPILE = "torch.compile"
# CUDA graphs are captured at the third call of a size.
_WARM_UP = 3
EVAL: dict[str, FusionConfig] = {
    "preset inference": "inference",
    "jit torchscript": {"kernel_fusion": {"jit": {"backend": "torchscript"}}},
    "jit inductor": {"kernel_fusion": {"jit": {"backend": "inductor"}}},
}
TRAINING: dict[str, FusionConfig] = {
    "memory_efficient_fusion": {"kernel_fusion": {"memory_efficient_fusion": True}},
    "jit torchscript": EVAL["jit torchscript"],
}


@dataclass(frozen=True)
class Row:
    """One forward over `batch` x `length` tokens; a T5's decoder gets as many.

    Attributes:
        model: an architecture by name, a folder with a config.json, or a model id; weights are random, dropout is off.
        trains: also time the training mode, for which Inductor compiles a T5 for minutes.
    """

    model: str
    batch: int
    length: int
    dtype: torch.dtype
    trains: bool = True


# The first row is that of OSLO's tutorial.
GPU_ROWS = (
    Row("gpt2", 256, 16, torch.float32),
    Row("gpt2", 256, 16, torch.bfloat16),
    Row("gpt2", 8, 1024, torch.bfloat16),
    Row("gpt2", 1, 128, torch.bfloat16),
    Row("t5-base", 32, 512, torch.bfloat16, trains=False),
    Row("t5-base", 1, 128, torch.bfloat16, trains=False),
    Row("llama-3.2-1b", 2, 777, torch.bfloat16, trains=False),
)
CPU_ROWS = (Row("gpt2-tiny", 16, 16, torch.float32),)


def run(*, device: torch.device, rows: Sequence[Row] = (), compile: bool | None = None) -> Results:
    """Times forwards without gradients in eval mode, and forwards that keep activations in training mode.

    Args:
        rows: `GPU_ROWS` by default, `CPU_ROWS` on a CPU.
        compile: also time what Inductor compiles: torch.compile of the model, jit with Inductor and
            memory_efficient_fusion. The default is True on a GPU; on a CPU it takes minutes.

    Raises:
        ConfigError: a model is no architecture by name, folder with a config.json or model id.
    """
    on_gpu = device.type == "cuda"
    compile = on_gpu if compile is None else compile
    cases = [case for row in rows or (GPU_ROWS if on_gpu else CPU_ROWS) for case in _cases(row, device, compile)]
    return Results.measured_here("forward", measure(cases, functools.partial(against_stock, device=device)))


def _cases(row: Row, device: torch.device, compile: bool) -> Iterator[ModelCase]:
    config = load_config(row.model)
    # If the config has a padding token, transformers searches for it in every call, which waits for the GPU.
    overrides = {"use_cache": False, "pad_token_id": config.pad_token_id, **dropout_rates(row.model, 0.0)}
    model = functools.cache(functools.partial(random_model, row.model, device, row.dtype, **overrides))
    ids = random_tokens(device, config.vocab_size, row.batch, row.length)
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    modes: tuple[tuple[str, Work, dict[str, FusionConfig]], ...] = (
        ("forward", forward(**inputs), EVAL),
        ("forward in training mode", training_forward(**inputs), TRAINING),
    )
    for mode, work, configs in modes if row.trains else modes[:1]:
        yield ModelCase(
            f"{row.model} {mode}, {row.batch} x {row.length}, {dtype_name(row.dtype)}",
            model,
            work,
            {name: value for name, value in configs.items() if compile or not _compiles(name)},
            others={COMPILE: compiled(work)} if compile else {},
            warm_up=_WARM_UP,
        )


def _compiles(name: str) -> bool:
    return name in ("jit inductor", "memory_efficient_fusion")
