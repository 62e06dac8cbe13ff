"""The table in docs/results/targets.md: speeds that were aimed at beside what the result files say."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from fuseopt.bench.harness.generate_rows import FAMILY_ROWS
from fuseopt.bench.harness.records import STATIC, STOCK, Record, Results

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
# Families below 0.5 billion parameters, which should reach 0.5 of the floor; others 0.8:
_SMALL = ("qwen2.5-0.5b", "smollm2-360m", "pythia-410m", "opt-125m", "opt-350m")
_SMALL += ("bart-base", "opus-mt", "whisper-small")
_SAMPLING = {1: 12.0, 8: 20.0, 64: None}  # us over greedy; at 64 rows 12% of greedy
_NOTES = "../lab-notes/"
_Cells = list[str]


@functools.cache
def rows_of(file: str) -> tuple[Record, ...]:
    """The rows of a result file, by its name without a suffix; none if there is no such file."""
    path = RESULTS / f"{file}.json"
    return Results.load(path).rows if path.is_file() else ()


def _row(file: str, case: str, variant: str = "generation") -> Record | None:
    """The row of a variant whose case has this text, if it was timed."""
    found = (row for row in rows_of(file) if case in row.case and row.variant.partition(" [")[0] == variant)
    return next((row for row in found if row.milliseconds is not None), None)


def _newest(files: tuple[str, ...], case: str, variant: str = "generation") -> Record | None:
    return next((row for file in files if (row := _row(file, case, variant))), None)


def _microseconds(row: Record) -> float:
    assert row.milliseconds is not None
    return row.milliseconds[1] * 1e3


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cells(what: str, target: float, reached: float | None, note: str, *, least: bool = False) -> _Cells:
    why = f"[why]({_NOTES}{note}.md)"
    if reached is None:
        return [what, _number(target), "not measured", why]
    met = reached >= target if least else reached <= target
    return [what, _number(target), _number(reached), "met" if met else f"missed, {why}"]


def _decoders() -> Iterator[_Cells]:
    files = ("generate-llama-1b-h200", "generate-llama-h200", "generate-decoders-h200")
    chain = "2026-11-30-launches-beside-attention"
    for what, target, case in (
        ("Llama-3.2-1B, 1 row, us a token", 640, "llama-3.2-1b generate, 1 x (128 + 128), greedy"),
        ("Llama-3.2-1B, 16 rows, us a token", 850, "llama-3.2-1b generate, 16 x (128 + 128)"),
        ("Llama-3.2-1B, 4 rows of 4 beams, us a token", 850, "llama-3.2-1b generate, 4 x (128 + 128), 4 beams"),
        ("Qwen3-0.6B, 1 row, us a token", 335, "qwen3-0.6b generate, 1 x (128 + 128)"),
    ):
        row = _newest(files, case)
        yield _cells(what, target, row and _microseconds(row), chain)
    large = _newest(files, "llama-3.1-8b")
    yield _cells("Llama-3.1-8B, 1 row, of floor", 0.88, large and large.of_floor, chain, least=True)
    prompt = _newest(files, "(2048 + 8)")
    milliseconds = prompt and prompt.first_token_us and prompt.first_token_us / 1e3
    yield _cells("Llama-3.2-1B, first token of 2048, ms", 8.3, milliseconds, "2026-11-30-long-caches-and-prompts")
    first, eager = (_newest(files, "1b generate, 1 x (128 + 64)", variant) for variant in ("generation", STOCK))
    beyond = None
    if first and eager and first.first_seconds and eager.first_seconds:
        beyond = first.first_seconds - eager.first_seconds
    yield _cells("Llama-3.2-1B, first call in a process beyond eager's, s", 1, beyond, chain)


def _families() -> Iterator[_Cells]:
    rows = {
        row.model: found for row in FAMILY_ROWS if (found := _row("generate-families-h200", f"of {row.model} generate"))
    }
    floors = {model: row.of_floor or 0 for model, row in rows.items()}
    met = [model for model, share in floors.items() if share >= (0.5 if model in _SMALL else 0.8)]
    static = {
        model: found for model in rows if (found := _row("generate-families-h200", f"of {model} generate", STATIC))
    }
    over = {model: _microseconds(row) / _microseconds(rows[model]) for model, row in static.items()}
    faster = [model for model, ratio in over.items() if ratio >= 3]
    note = f"[why]({_NOTES}2026-11-30-families-beside-their-floor.md)"
    for what, number, measured, missed in (
        ("families at 0.8 of the floor (0.5 below 0.5 B)", met, floors, note),
        ("families at 3 times static cache and torch.compile", faster, over, note),
    ):
        verdict = "met" if len(number) == len(FAMILY_ROWS) else f"missed, {missed}"
        yield [what, f"all {len(FAMILY_ROWS)}", f"{len(number)} of {len(measured)} measured", verdict]


def _llama() -> Iterator[_Cells]:
    forward = _row("forward-llama-h200", "llama-3.2-1b forward, 2 x 777", "preset inference")
    milliseconds = forward and _microseconds(forward) / 1e3
    yield _cells("Llama-3.2-1B, forward of 2 x 777, ms", 8.5, milliseconds, "2026-11-30-llama-forward")
    step, note = _row("train-llama-h200", "4 x 2048", "preset training"), "2026-11-30-llama-training-step"
    step = step or _row("train-llama-h200", "4 x 2048", "preset training, budget 1")
    yield _cells("Llama-3.2-1B, training 4 x 2048, tokens/s", 75000, step and step.tokens_per_second, note, least=True)
    yield _cells("the same, GiB", 12, step and step.peak_mib and step.peak_mib / 1024, note)
    for model in ("llama-3.2-1b", "qwen3-0.6b", "gpt2"):
        unmerged = _row("generate-lora-h200", f"{model} generate, 1 x (128 + 64), greedy, LoRA 16, b")
        merged = _row("generate-lora-h200", f"{model} generate, 1 x (128 + 64), greedy, LoRA 16 merged")
        ratio = _microseconds(unmerged) / _microseconds(merged) if unmerged and merged else None
        yield _cells(f"{model}, LoRA 16 unmerged, of merged", 1.05, ratio, "2026-11-30-low-rank-updates-in-the-launch")


def _float32() -> Iterator[_Cells]:
    for what, target, case in (
        ("GPT-2, float32, 1 row, us a token", 190, "gpt2 generate, 1 x"),
        ("GPT-2, float32, 8 rows, us a token", 320, "gpt2 generate, 8 x"),
        ("T5-base, float32, 1 row, us a token", 240, "t5-base generate, 1 x"),
        ("T5-base, float32, 32 rows of 4 beams, us a token", 1200, "t5-base generate, 32 x"),
    ):
        note = "2026-11-30-float32-attention-and-tiles"
        row = _row("generate-float32-h200", case)
        yield _cells(what, target, row and _microseconds(row), note)


def _sampling() -> Iterator[_Cells]:
    for batch, limit in _SAMPLING.items():
        greedy, *others = [row for row in rows_of("sampling-h200") if f"gpt2 generate, {batch} x" in row.case]
        most = limit or 0.12 * _microseconds(greedy)
        over = {row.variant: float((row.note or "nan").split(" us")[0]) for row in others}
        slow = [f"{name} {value:+.1f}" for name, value in over.items() if value > most]
        note = f", [why]({_NOTES}2026-11-30-sampling-by-a-race.md)" if slow else ""
        verdict = f"missed by {'; '.join(slow)}{note}" if slow else "met"
        reached = f"{len(over) - len(slow)} of {len(over)} settings"
        yield [f"GPT-2, {batch} row{'s' * (batch > 1)}, sampling over greedy, us", f"{most:.3g}", reached, verdict]


def _low_bit() -> Iterator[_Cells]:
    one_row, many_rows = "2026-11-30-one-row-by-digits", "2026-11-30-packed-weights-by-wgmma"
    weights = {"int8": "int8", "int4": "int4, groups of 128"}
    for model, *limits in (("llama-3.2-1b", 345, 225), ("gpt2-xl", 470, 330), ("t5-large", 230, 180)):
        for (name, variant), limit in zip(weights.items(), limits, strict=True):
            row = _row("low-bit-h200", f"{model} generate, 1 x", variant)
            yield _cells(f"{model}, {name} weights, 1 row, us a token", limit, row and _microseconds(row), one_row)
    for batch, *ratios in ((1, 1.85, 3.0), (64, 1.6, 2.0)):
        plain = _row("low-bit-h200", f"llama-3.1-8b generate, {batch} x")
        for (name, variant), ratio in zip(weights.items(), ratios, strict=True):
            row = _row("low-bit-h200", f"llama-3.1-8b generate, {batch} x", variant)
            reached = _microseconds(plain) / _microseconds(row) if plain and row else None
            what = f"llama-3.1-8b, {name} weights, {batch} row{'s' * (batch > 1)}, over bfloat16"
            yield _cells(what, ratio, reached, one_row if batch == 1 else many_rows, least=True)


def _cpu() -> Iterator[_Cells]:
    note = "2026-11-30-short-calls-on-a-cpu"
    for file, dtype in (("generate-cpu", "float32"), ("generate-cpu-bfloat16", "bfloat16")):
        for model in ("gpt2", "t5-base"):
            row = _row(file, f"{model} generate, 1 x (32 + 8)")
            speed_up = row and row.speed_up and row.speed_up[1]
            yield _cells(f"{model} on a CPU, {dtype}, 8 tokens, over stock", 2, speed_up, note, least=True)
            yield _cells("the same, of a sum's bandwidth", 0.75, row and row.of_floor, note, least=True)


def table() -> str:
    """Each target, what was reached, and for a missed one its lab note."""
    parts = (_decoders, _families, _llama, _float32, _sampling, _low_bit, _cpu)
    lines = [["work", "target", "reached", ""], ["---"] * 4, *(cells for part in parts for cells in part())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
