"""`fuseopt bench generate`: the model's own `generate()`, stock and with the decode loop behind it, per new token."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseopt.bench.architectures import load_config, random_model
from fuseopt.bench.measure import against_stock, measure
from fuseopt.bench.records import Results
from fuseopt.bench.workloads import FusionConfig, ModelCase, beams_name, dtype_name, generate, random_tokens

CONFIGS: dict[str, FusionConfig] = {
    "preset inference": "inference",
    "generation": {"generation": {"enable": True}},
}
STATIC = "static cache and torch.compile"


@dataclass(frozen=True)
class Row:
    """One use of `generate()`.

    Attributes:
        model: an architecture by name, or a folder with a config.json; weights are random.
        prompt: tokens a row that are given; the encoder's, of a T5.
        new: tokens a row that are generated.
        beams: 1 for greedy decoding.
        ngram: `no_repeat_ngram_size`; 0 for no ban.
    """

    model: str
    batch: int
    prompt: int = 128
    new: int = 128
    beams: int = 1
    ngram: int = 0


GPU_ROWS = (
    Row("gpt2", 1),
    Row("gpt2", 8),
    Row("gpt2", 64),
    Row("t5-base", 1),
    Row("t5-base", 32, ngram=3),
    Row("t5-base", 32, ngram=3, beams=4),
    Row("t5-base", 256, prompt=1, new=19, ngram=3),
)
CPU_ROWS = (Row("gpt2", 1, prompt=32, new=8), Row("t5-base", 1, prompt=32, new=8))


def run(
    *, device: torch.device, rows: Sequence[Row] = (), dtype: torch.dtype | None = None, compiled: bool = False
) -> Results:
    """Times whole calls, host included, each as `new` tokens and as one, which is the time to the first.

    Args:
        rows: `GPU_ROWS` by default, `CPU_ROWS` on a CPU.
        dtype: bfloat16 by default, float32 on a CPU.
        compiled: also transformers' static cache with torch.compile, which takes up to 20 s a row to begin.

    Raises:
        ConfigError: a model is neither an architecture by name nor a folder with a config.json.
    """
    on_gpu = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    cases = [
        case for row in rows or (GPU_ROWS if on_gpu else CPU_ROWS) for case in _cases(row, dtype, device, compiled)
    ]
    records = measure(cases, functools.partial(against_stock, device=device))
    return Results.measured_here("generate", records, unit="us")


def _cases(row: Row, dtype: torch.dtype, device: torch.device, compiled: bool) -> Iterator[ModelCase]:
    model = functools.cache(functools.partial(random_model, row.model, device, dtype))
    prompts = random_tokens(device, load_config(row.model).vocab_size, row.batch, row.prompt)
    options: dict[str, Any] = {"num_beams": row.beams}
    if row.ngram:
        options["no_repeat_ngram_size"] = row.ngram
    ban = f", ngram {row.ngram}" if row.ngram else ""
    # The first token first: what is made for it serves the others too, as it does for a user.
    for what, new in (("the first token", 1), ("a token", row.new)):
        sizes = f"{row.batch} x ({row.prompt} + {new})"
        title = f"{what} of {row.model} generate, {sizes}, {beams_name(row.beams)}{ban}, {dtype_name(dtype)}"
        others = {}
        if compiled and row.beams == 1:
            others[STATIC] = generate(prompts, max_new_tokens=new, cache_implementation="static", **options)
        work = generate(prompts, max_new_tokens=new, **options)
        yield ModelCase(title, model, work, CONFIGS, rounds=5, others=others, steps=new)
