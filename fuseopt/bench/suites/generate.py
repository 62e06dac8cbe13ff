"""`fuseopt bench generate`: the model's own `generate()`, stock and with the decode loop behind it, per new token."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fuseopt.bench.harness.architectures import load_config, random_model
from fuseopt.bench.harness.bytes_floor import cache_bytes, copy_bandwidth, weight_bytes
from fuseopt.bench.harness.measure import against_stock, measure
from fuseopt.bench.harness.records import STATIC, Record, Results
from fuseopt.bench.harness.workloads import (
    FusionConfig,
    ModelCase,
    Work,
    beams_name,
    dtype_name,
    generate,
    random_tokens,
)
from fuseopt.bench.suites.first_call import FirstCall
from fuseopt.kernel_table import CUSTOM, listed

GENERATION = {"generation": {"enable": True}}
CONFIGS: dict[str, FusionConfig] = {
    "preset inference": "inference",
    "generation": GENERATION,
    "generation and kernels": {**GENERATION, "kernel_fusion": {"custom_cuda_kernels": list(listed(CUSTOM))}},
}
_STATIC_CACHE = {"cache_implementation": "static"}


@dataclass(frozen=True)
class Row:
    """One use of `generate()`.

    Attributes:
        model: an architecture by name, a folder with a config.json, or a model id; weights are random.
        prompt: tokens a row that are given; the encoder's, of a T5.
        new: tokens a row that are generated.
        beams: 1 for none.
        ngram: `no_repeat_ngram_size`; 0 for no ban.
        sampling: `temperature`, `top_k`, `top_p`, as generate() takes them; None for the likeliest tokens.
        eos: whether there is an EOS token, as most models have one: the vocabulary's last, which random weights hardly
            ever choose.
    """

    model: str
    batch: int
    prompt: int = 128
    new: int = 128
    beams: int = 1
    ngram: int = 0
    sampling: Mapping[str, float] | None = field(default=None, hash=False)
    eos: bool = False

    def name(self, dtype: torch.dtype) -> str:
        how = [beams_name(self.beams) if self.sampling is None or self.beams > 1 else ""]
        if self.sampling is not None:
            how.append(" ".join(["sampled", *(f"{name}={value:g}" for name, value in self.sampling.items())]))
        how += [f"ngram {self.ngram}" if self.ngram else "", "eos" if self.eos else "", dtype_name(dtype)]
        sizes = f"{self.batch} x ({self.prompt} + {self.new})"
        return f"a token of {self.model} generate, {sizes}, {', '.join(filter(None, how))}"

    def work(self, device: torch.device, new: int, **others: Any) -> Work:
        """What each system does with its model: `new` tokens a row."""
        options: dict[str, Any] = {"num_beams": self.beams, "do_sample": self.sampling is not None}
        if self.ngram:
            options["no_repeat_ngram_size"] = self.ngram
        vocabulary = load_config(self.model).vocab_size
        if self.eos:
            options["eos_token_id"] = vocabulary - 1
        prompts = random_tokens(device, vocabulary, self.batch, self.prompt)
        return generate(prompts, max_new_tokens=new, **{**options, **(self.sampling or {}), **others})


# The rows of the targets.
GPU_ROWS = (
    Row("gpt2", 1),
    Row("gpt2", 8),
    Row("gpt2", 64),
    Row("gpt2", 64, ngram=3),
    Row("gpt2-xl", 1),
    Row("t5-base", 1),
    Row("t5-base", 32, ngram=3),
    Row("t5-base", 32, ngram=3, beams=4),
    Row("t5-base", 256, prompt=1, new=19, ngram=3),
)
CPU_ROWS = (Row("gpt2", 1, prompt=32, new=8), Row("t5-base", 1, prompt=32, new=8))
# Calls for one token in a row, of which a sample is the mean: the first after another model's finds cold caches.
_FIRST_TOKENS = 4
# Samples of those, and of whole calls. First tokens wait for the host, which others slow down for tenths of a second to
# seconds at a time: what a sample says is what it happened to meet.
_FIRST_TOKEN_ROUNDS, _ROUNDS = 15, 3


@dataclass(frozen=True)
class _RowCase:
    """A row as its first token alone, and as all of them."""

    row: Row
    dtype: torch.dtype
    configs: Mapping[str, FusionConfig]
    first: ModelCase
    whole: ModelCase

    @property
    def name(self) -> str:
        return self.whole.name


def run(
    *,
    device: torch.device,
    rows: Sequence[Row] = (),
    dtype: torch.dtype | None = None,
    configs: Mapping[str, FusionConfig] | None = None,
    compile: bool | None = None,
    first_calls: bool = False,
) -> Results:
    """Times whole calls, host included.

    Args:
        rows: `GPU_ROWS` by default, `CPU_ROWS` on a CPU.
        dtype: bfloat16 by default, float32 on a CPU.
        configs: `CONFIGS` by default; of what JSON can say.
        compile: also transformers' static cache with torch.compile, which takes up to 20 s a row to begin; by default
            on a GPU, as on a CPU it takes minutes.
        first_calls: also the first call of a fresh process, one for every row of the table.

    Raises:
        ConfigError: a model is no architecture by name, folder with a config.json or model id.
    """
    on_gpu = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    rows = rows or (GPU_ROWS if on_gpu else CPU_ROWS)
    compile = on_gpu if compile is None else compile
    cases = [_case(row, dtype, device, CONFIGS if configs is None else configs, compile) for row in rows]
    bandwidth = copy_bandwidth(device)
    records = measure(cases, lambda case: _records(case, device, bandwidth))
    was_interrupted = {case.name for case in cases} != {record.case for record in records}
    if first_calls and not was_interrupted:
        records = _with_first_calls(records, cases, device)
    return Results.measured_here("generate", records, unit="us")


def _case(
    row: Row, dtype: torch.dtype, device: torch.device, configs: Mapping[str, FusionConfig], compile: bool
) -> _RowCase:
    model = functools.cache(functools.partial(random_model, row.model, device, dtype))

    def case(new: int, rounds: int, calls: int) -> ModelCase:
        # transformers compiles no beam search.
        others = {STATIC: row.work(device, new, **_STATIC_CACHE)} if compile and row.beams == 1 else {}
        work = row.work(device, new)
        return ModelCase(
            row.name(dtype),
            model,
            work,
            configs,
            rounds=rounds,
            warm_up=1,
            calls_per_sample=calls,
            others=others,
            steps=new,
        )

    return _RowCase(row, dtype, configs, case(1, _FIRST_TOKEN_ROUNDS, _FIRST_TOKENS), case(row.new, _ROUNDS, 1))


def _records(case: _RowCase, device: torch.device, bandwidth: float) -> list[Record]:
    row, model = case.row, case.whole.model()
    first_tokens, records = against_stock(case.first, device), against_stock(case.whole, device)
    cache = cache_bytes(model, row.batch, row.beams, row.prompt, row.new)
    floor = (weight_bytes(model) + cache) / bandwidth
    complete = []
    for first, record in zip(first_tokens, records, strict=True):
        if record.milliseconds is not None and first.milliseconds is not None:
            seconds = record.milliseconds[1] / 1e3
            record = replace(
                record,
                first_token_us=first.milliseconds[1] * 1e3,
                tokens=row.batch,
                of_floor=floor / seconds,
            )
        complete.append(record)
    return complete


@dataclass(frozen=True)
class _FirstCallCase:
    """A row as one system's first call."""

    record: Record
    row: _RowCase

    @property
    def name(self) -> str:
        return f"the first call of {self.record.variant}, {self.record.case}"

    def records(self, device: torch.device) -> list[Record]:
        record, row = self.record, self.row
        if record.milliseconds is None:
            return [record]
        request = {
            "row": asdict(row.row),
            "config": row.configs.get(record.variant.split(" [")[0]),
            "options": _STATIC_CACHE if record.variant == STATIC else {},
            "dtype": dtype_name(row.dtype),
            "device": str(device),
        }
        measured = FirstCall.measured(request)
        if isinstance(measured, str):
            return [replace(record, note="; ".join(filter(None, (record.note, measured))))]
        return [replace(record, first_seconds=measured.seconds, peak_mib=measured.peak_mib)]


def _with_first_calls(records: Sequence[Record], rows: Sequence[_RowCase], device: torch.device) -> list[Record]:
    """The records with their first calls, of which an interruption leaves out the rest."""
    row_of = {row.name: row for row in rows}
    cases = [_FirstCallCase(record, row_of[record.case]) for record in records]
    done = measure(cases, lambda case: case.records(device), is_more=True)
    return [*done, *records[len(done) :]]
