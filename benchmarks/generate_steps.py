"""us per step of generate(), stock and with `generation`, for the rows of a table; prints JSON lines.

    python benchmarks/generate_steps.py [--compiled] [--profile]

Random weights, greedy, prompt and encoder length 128, 128 new tokens, whole calls timed from outside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import fuseopt
from fuseopt.bench.architectures import random_model

ROWS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("gpt2", 1, {}),
    ("gpt2", 8, {}),
    ("gpt2", 64, {}),
    ("gpt2", 64, {"no_repeat_ngram_size": 3}),
    ("gpt2", 8, {"do_sample": True, "top_k": 50}),
    ("t5-base", 1, {}),
    ("t5-base", 32, {"no_repeat_ngram_size": 3}),
    ("t5-base", 32, {"no_repeat_ngram_size": 3, "num_beams": 4}),
)
NEW = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", action="store_true", help="also transformers' static cache and compile, one row")
    parser.add_argument("--profile", action="store_true", help="also the kernels of a step, by time")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models: dict[str, Any] = {}
    for name, batch, kwargs in ROWS:
        model = models.setdefault(name, random_model(name, device, torch.bfloat16))
        measure(name, model, batch, kwargs, options.compiled and (name, batch) == ("gpt2", 1))
        if options.profile and not kwargs:
            profile(name, model, batch)
    for name, model in models.items():
        compare_tokens(name, model.float())


def measure(name: str, model: Any, batch: int, kwargs: dict[str, Any], compiled: bool) -> None:
    call = caller(model, batch, kwargs)
    record = {"model": name, "batch": batch, **kwargs, "stock_us": per_step(call, 1)}
    started = time.perf_counter()
    fuseopt.initialize(model, {"generation": {"enable": True}})
    call(NEW)
    record["first_call_s"] = round(time.perf_counter() - started, 3)
    record["fused_us"] = per_step(call, 5)
    record["first_token_us"] = round(1e6 * median_seconds(lambda: call(1), 5), 1)
    record["served"] = str(model.generate.calls[-1])
    record["kept"] = model.generate.report_lines()[-1]
    fuseopt.restore(model)
    if compiled:
        call = caller(model, batch, {**kwargs, "cache_implementation": "static"})
        started = time.perf_counter()
        call(NEW)
        record["compiled_first_call_s"] = round(time.perf_counter() - started, 1)
        record["compiled_us"] = per_step(call, 3)
    print(json.dumps(record), flush=True)


def compare_tokens(name: str, model: Any) -> None:
    """float32 tokens of both, greedy and sampled, and the random numbers that follow."""
    for batch, kwargs in (
        (1, {}),
        (8, {"no_repeat_ngram_size": 2}),
        (4, {"do_sample": True, "top_k": 20}),
        (2, {"num_beams": 3}),
    ):
        call = caller(model, batch, {**kwargs, "eos_token_id": list(range(0, 30000, 150))})
        stock = seeded(call)
        with fuseopt.fused(model, {"generation": {"enable": True}}):
            fused = [seeded(call) for _ in range(2)]
            served = str(model.generate.calls[-1])
        equal = [
            stock[0].shape == tokens.shape and bool((stock[0] == tokens).all()) and bool((stock[1] == random).all())
            for tokens, random in fused
        ]
        print(json.dumps({"model": name, "float32": equal, "length": stock[0].shape[1], **kwargs, "served": served}))


def seeded(call: Callable[[int], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return call(NEW), torch.rand(4, device="cuda" if torch.cuda.is_available() else "cpu")


def caller(model: Any, batch: int, kwargs: dict[str, Any]) -> Callable[[int], Any]:
    generator = torch.Generator("cpu").manual_seed(batch)
    ids = torch.randint(5, model.config.vocab_size, (batch, 128), generator=generator).to(model.device)
    mask = torch.ones_like(ids)

    def call(new_tokens: int) -> Any:
        options = {"do_sample": False, "pad_token_id": 0, **kwargs}
        return model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **options)

    return call


def per_step(call: Callable[[int], Any], rounds: int) -> float:
    call(NEW)
    return round(1e6 * median_seconds(lambda: call(NEW), rounds) / NEW, 1)


def median_seconds(run: Callable[[], Any], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def profile(name: str, model: Any, batch: int) -> None:
    call = caller(model, batch, {})
    with fuseopt.fused(model, {"generation": {"enable": True}}):
        call(NEW)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call(NEW)
            synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / NEW
    print(f"{name} batch {batch}: {total:.1f} us of kernels a step")
    for event in events[:14]:
        print(f"  {event.self_device_time_total / NEW:8.1f} us  {event.count / NEW:6.1f} x  {event.key[:100]}")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
