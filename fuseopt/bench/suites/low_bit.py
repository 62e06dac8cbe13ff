"""`fuseopt bench low-bit`: times of generate() with weights in 8 or 4 bits, and predictions of texts."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from fuseopt.bench.harness import torchao_weights
from fuseopt.bench.harness.architectures import has_weights, saved_model
from fuseopt.bench.harness.bytes_floor import cache_bytes, read_bandwidth, weight_bytes
from fuseopt.bench.harness.generate_rows import GENERATION, Row
from fuseopt.bench.harness.measure import WHOLE_CASE, against_stock, measure
from fuseopt.bench.harness.records import STATIC, STOCK, Record, Results
from fuseopt.bench.harness.workloads import FusionConfig, dtype_name, fuse, limited, parameter_sharing_copy
from fuseopt.bench.suites.demo import default_checkpoints
from fuseopt.generation.generate import FusedGenerate
from fuseopt.generation.tiers import Tier
from fuseopt.runtime.timer import Call
from fuseopt.verify_low_bit import Drift, forced_logits, fused_generate

CONFIGS: Mapping[str, FusionConfig] = {
    "generation": GENERATION,
    "int8": {"generation": {"weights": "int8"}},
    "int4, groups of 128": {"generation": {"weights": "int4"}},
    "int4, groups of 32": {"generation": {"weights": {"bits": 4, "group": 32}}},
}
TORCHAO = {f"torchao int{bits} weights": bits for bits in (8, 4)}
CPU_ROWS = (Row("gpt2", 1, prompt=32, new=32), Row("t5-base", 1, prompt=32, new=32))
GPU_ROWS = (
    *(Row(model, 1) for model in ("llama-3.2-1b", "gpt2-xl", "t5-large")),
    *(Row("llama-3.1-8b", batch) for batch in (1, 64)),
)
CHECKPOINT_SIZES: Mapping[str, Any] = {"batch": 1, "prompt": 32, "new": 32}
TEXTS = ("held-out.txt", "prompts.txt")
"""Files beside the checkpoints: one on which no checkpoint was trained, and one on which some were."""
# Tokens of a line: the prompt, and the tokens after it, whose predictions are compared.
_PROMPT, _COMPARED = 8, 16
_MOST_LINES = 48
# Of a call: with more rows, steps on a GPU may read the unquantised weights, and those on a CPU dequantise them.
_LINES_AT_A_TIME = {"cuda": 4, "cpu": 48}
_ROUNDS = 5


def run(
    *,
    device: torch.device,
    rows: Sequence[Row] = (),
    dtype: torch.dtype | None = None,
    configs: Mapping[str, FusionConfig] | None = None,
    compile: bool | None = None,
    compile_seconds: float = 180.0,
    checkpoints: Path | None = None,
) -> Results:
    """Times whole calls per new token, and measures models with saved weights on `TEXTS`.

    Args:
        rows: `GPU_ROWS` or `CPU_ROWS` and the checkpoints by default.
        dtype: of rows that name none; bfloat16 by default, float32 on a CPU.
        configs: `CONFIGS` by default.
        compile: time torchao's weights with transformers' static cache and torch.compile instead of eagerly, and stock
            in both ways; the default on a GPU.
        compile_seconds: a call of torch.compile that takes longer than this is not timed.
        checkpoints: a folder of checkpoint folders and `TEXTS`; by default examples/checkpoints, here or in the clone.

    Raises:
        ConfigError: a model is no architecture by name, folder with a config.json or model id.
    """
    on_gpu = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    checkpoints = checkpoints or default_checkpoints()
    if not rows:
        folders = sorted(path.parent for path in checkpoints.glob("*/config.json"))
        saved = (Row(str(folder), **CHECKPOINT_SIZES) for folder in folders)
        rows = (*(GPU_ROWS if on_gpu else CPU_ROWS), *saved)
    compiling = (on_gpu if compile is None else compile) and compile_seconds
    texts = [path for name in TEXTS if (path := checkpoints / name).is_file()]
    cases: list[_Times | _Text] = []
    for row in rows:
        ways = _Ways(row, row.dtype_in(dtype), device, CONFIGS if configs is None else configs)
        cases += [_Times(ways, compiling or None), *(_Text(ways, path) for path in texts if ways.is_trained)]
    bandwidth = read_bandwidth(device)
    last = {id(case.ways): case for case in cases}

    def records(case: _Times | _Text) -> Iterator[Record]:
        try:
            yield from case.records(bandwidth)
        finally:
            if case is last[id(case.ways)]:
                case.ways.forget_models()

    return Results.measured_here("low-bit", measure(cases, records), unit="us")


@dataclass(frozen=True)
class _Ways:
    """The variants of one model that are compared; made on first use, for all cases of a row."""

    row: Row
    dtype: torch.dtype
    device: torch.device
    configs: Mapping[str, FusionConfig]

    @property
    def name(self) -> str:
        """The model's name, without its folder."""
        return Path(self.row.model).name

    @property
    def is_trained(self) -> bool:
        """Whether the model is a folder with a tokenizer and weights."""
        folder = Path(self.row.model)
        return (folder / "tokenizer.json").is_file() and has_weights(folder)

    @functools.cached_property
    def models(self) -> Mapping[str, nn.Module | str]:
        """Name of a variant -> its model, or why there is none. Stock is first."""
        saved = saved_model(self.row.model, self.device, self.dtype)
        stock = self.row.random_model(self.device, self.dtype) if saved is None else saved
        models: dict[str, nn.Module | str] = {STOCK: stock}
        for name, config in self.configs.items():
            twin = parameter_sharing_copy(stock)
            label, unmet = fuse(twin, name, config)
            models[label] = unmet or twin
        for name, bits in TORCHAO.items():
            models[name] = torchao_weights.quantised(stock, bits)
        return models

    def forget_models(self) -> None:
        """Frees the memory of `models`."""
        vars(self).pop("models", None)
        gc.collect()


@dataclass(frozen=True)
class _Times:
    """The times of a row: a Case.

    Attributes:
        compile_seconds: the longest call with the static cache and torch.compile that is timed; None to leave it out.
    """

    ways: _Ways
    compile_seconds: float | None
    rounds: int = _ROUNDS
    calls_per_sample: int = 1
    warm_up: int = 1

    @property
    def name(self) -> str:
        return replace(self.ways.row, model=self.ways.name).name(self.ways.dtype)

    @property
    def steps(self) -> int:
        return self.ways.row.new

    def calls(self) -> Mapping[str, Call | str]:
        row, device = self.ways.row, self.ways.device
        work = row.work(device, row.new)
        calls: dict[str, Call | str] = {}
        for name, model in self.ways.models.items():
            if isinstance(model, str):
                calls[name] = model
                continue
            seconds = self.compile_seconds if name in (STOCK, *TORCHAO) else None
            if name == STOCK or seconds is None:
                calls[name] = functools.partial(work, model)
            if seconds is not None:
                static = limited(row.work(device, row.new, static_cache=True), seconds)
                twin = parameter_sharing_copy(model)
                if name == STOCK:
                    calls[STATIC] = functools.partial(static, twin)
                else:
                    calls[f"{name}, {STATIC}"] = functools.partial(torchao_weights.with_inductor_options(static), twin)
        return calls

    def records(self, bandwidth: float) -> Iterator[Record]:
        row, models = self.ways.row, self.ways.models
        stock = models[STOCK]
        assert isinstance(stock, nn.Module)
        for record in against_stock(self, self.ways.device):
            model = models.get(record.variant.removesuffix(f", {STATIC}"), stock)
            if record.milliseconds is None or isinstance(model, str):
                yield record
                continue
            generate = fused_generate(model)
            low_bit = None if generate is None else generate.checked.low_bit
            quantised, saved = (low_bit.quantised_bytes, low_bit.saved_bytes(row.batch)) if low_bit else (0, 0)
            read = weight_bytes(stock) - saved + cache_bytes(model, row.batch, row.beams, row.prompt, row.new)
            is_torchao = record.variant.startswith(tuple(TORCHAO))
            yield replace(
                record,
                tokens=row.batch,
                weights_mib=(torchao_weights.stored_bytes(model) + quantised) / 2**20,
                bytes=None if is_torchao else read,
                of_floor=None if is_torchao else read / bandwidth / record.milliseconds[1] * 1e3,
                note=_note(model, row.batch) or record.note,
            )


@dataclass(frozen=True)
class _Text:
    """Perplexity of a text for each variant, and the divergence of its predictions from stock's."""

    ways: _Ways
    text: Path

    @property
    def name(self) -> str:
        return f"{self.ways.name} predicts {self.text.name}, {dtype_name(self.ways.dtype)}"

    def records(self, bandwidth: float) -> Iterator[Record]:
        tokenizer = AutoTokenizer.from_pretrained(self.ways.row.model, local_files_only=True)
        text = self.text.read_text(encoding="utf-8").splitlines()
        ids = [line[: _PROMPT + _COMPARED] for line in tokenizer(text, add_special_tokens=False)["input_ids"]]
        long = [line for line in ids if len(line) == _PROMPT + _COMPARED]
        if not long:
            yield Record(self.name, WHOLE_CASE, note=f"no line of {_PROMPT + _COMPARED} tokens")
            return
        rows = torch.tensor(long[:_MOST_LINES], device=self.ways.device)
        expected: Tensor | None = None
        lines = _LINES_AT_A_TIME.get(self.ways.device.type, 1)
        for name, model in self.ways.models.items():
            if isinstance(model, str):
                yield Record(self.name, name, note=model)
                continue
            logits, tokens = _logits(model, rows[:, :_PROMPT], rows[:, _PROMPT:], lines), rows[:, _PROMPT:, None]
            own = -logits.double().log_softmax(-1).gather(-1, tokens).mean()
            found = Record(self.name, name, perplexity=own.exp().item())
            if expected is None:
                expected = logits
                yield found
                continue
            drift = Drift.between(expected, logits)
            yield replace(found, kl=drift.kl, same_top=drift.same_top, note=_note(model, lines))


def _logits(model: nn.Module, prompts: Tensor, tokens: Tensor, lines: int) -> Tensor:
    """Logits for `tokens` after `prompts`, by calls with so many lines."""
    with torch.no_grad():
        parts = [
            forced_logits(model, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, forced)
            for prompt, forced in zip(prompts.split(lines), tokens.split(lines), strict=True)
        ]
    return torch.cat(parts)


def _note(model: nn.Module, rows: int) -> str | None:
    """What the last call of a fused model, of `rows` rows, did otherwise than its config asks for; None if nothing."""
    generate: Any = model.generate
    if not isinstance(generate, FusedGenerate):
        return None
    if generate.calls[-1].tier is Tier.STOCK:
        return f"transformers decoded: {generate.calls[-1].reason}"
    if generate.options.weights is not None and not generate.quantised:
        return "no weights were quantised"
    low_bit = generate.checked.low_bit
    most = None if low_bit is None else low_bit.most_rows
    return None if most is None or rows <= most else f"some products of more than {most} rows read unquantised weights"
