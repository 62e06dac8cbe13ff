"""`fuseopt bench ...`: options of each benchmark, and the calls of its suite."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fuseopt
from fuseopt.errors import ConfigError

if TYPE_CHECKING:
    from fuseopt.bench.harness.records import Results


def add_benchmarks(commands: Any) -> None:
    """Adds `bench` and its benchmarks to `commands`, the subparsers of the command line."""
    bench = commands.add_parser("bench", help="run a benchmark against transformers, torch and torch.compile")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    ops = benchmarks.add_parser(
        "ops", help="each op, beside eager code, torch, torch.compile and a copy of as many bytes"
    )
    ops.add_argument("--op", action="append", default=[], metavar="NAME", help="may be repeated; default: all")
    ops.add_argument(
        "--dtype",
        action="append",
        default=[],
        choices=("bfloat16", "float32", "float16"),
        help="may be repeated; default: bfloat16 and float32",
    )
    ops.add_argument(
        "--shapes", nargs="+", default=[], metavar="SHAPE", help="such as 8x768, or all; default: the main ones"
    )
    ops.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="also time torch.compile; default: on a GPU only, as on a CPU it takes minutes",
    )
    ops.set_defaults(run=_bench_ops)
    tutorial = benchmarks.add_parser(
        "tutorial", help="OSLO's tutorial: T5-base, batch 256, generate() under an n-gram ban"
    )
    tutorial.set_defaults(run=_bench_tutorial)
    generate = benchmarks.add_parser("generate", help="generate() per new token, stock and with fuseopt's decode loop")
    kernels = benchmarks.add_parser("kernels", help="time and bytes read of each kernel in a decode step of generate()")
    for benchmark in (generate, kernels):
        benchmark.add_argument(
            "--model",
            action="append",
            default=[],
            metavar="MODEL",
            help="a folder with a config.json, a model id, or a name; may be repeated; default: GPT-2 and T5",
        )
        benchmark.add_argument("--batch", nargs="+", type=positive, metavar="ROWS", help="default: 1")
        for option, metavar, what in (
            ("--prompt", "TOKENS", "default: 128"),
            ("--new", "TOKENS", "default: 128"),
            ("--beams", "N", "default: 1, greedy"),
            ("--ngram", "N", "no_repeat_ngram_size; default: no ban"),
        ):
            benchmark.add_argument(option, type=positive, metavar=metavar, help=what)
        benchmark.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), help="default: bfloat16 on a GPU")
        benchmark.add_argument(
            "--sample", action="store_true", help="sample tokens, with the same seed in each call; default: greedy"
        )
        benchmark.add_argument(
            "--eos",
            action="store_true",
            help="with an EOS token, which random weights hardly ever produce; default: none",
        )
        for option, kind in (("--temperature", float), ("--top-k", int), ("--top-p", float)):
            benchmark.add_argument(option, type=kind, metavar="X", help="for --sample; default: that of transformers")
    generate.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="also time transformers' static cache with torch.compile, up to 20 s per row; default: on a GPU only",
    )
    generate.add_argument(
        "--first-call", action="store_true", help="also time the first call of a fresh process, for each row and system"
    )
    generate.set_defaults(run=_bench_generate)
    kernels.set_defaults(run=_bench_kernels)
    train = benchmarks.add_parser("train", help="training steps of transformers, torch.compile and fuseopt")
    forward = benchmarks.add_parser("forward", help="forwards of transformers, torch.compile and fuseopt")
    scaling = benchmarks.add_parser("scaling", help="a training step in one process, and in several with DDP")
    scaling.add_argument("--model", default="gpt2", metavar="MODEL", help="as above; default: gpt2")
    scaling.add_argument("--config", default="training", metavar="CONFIG", help="as for plan; default: training")
    scaling.add_argument("--processes", type=positive, default=2, metavar="N", help="one GPU each; default: 2")
    scaling.set_defaults(run=_bench_scaling)
    curves = benchmarks.add_parser(
        "curves", help="losses and gradients of training, fused and stock, for several seeds"
    )
    curves.add_argument("--batch", type=positive, default=16, metavar="ROWS", help="default: 16")
    curves.add_argument("--length", type=positive, default=128, metavar="TOKENS", help="default: 128")
    curves.add_argument("--steps", type=positive, default=500, metavar="N", help="default: 500")
    curves.add_argument("--seeds", type=positive, default=3, metavar="N", help="default: 3")
    curves.add_argument("--dropout", type=float, default=0.1, metavar="RATE", help="default: 0.1")
    curves.set_defaults(run=_bench_curves)
    capacity = benchmarks.add_parser("capacity", help="the largest batch of a training step that fits on the GPU")
    for benchmark in (train, forward, curves, capacity):
        benchmark.add_argument(
            "--model",
            action="append",
            default=[],
            metavar="MODEL",
            help="a folder with a config.json, a model id, or a name; may be repeated; default: a table",
        )
    for benchmark in (train, forward, capacity):
        benchmark.add_argument("--batch", nargs="+", type=positive, default=[8], metavar="ROWS", help="default: 8")
        benchmark.add_argument(
            "--compile",
            action=argparse.BooleanOptionalAction,
            help="also time torch.compile; default: on a GPU only, as on a CPU it takes minutes",
        )
    scaling.add_argument("--batch", type=positive, default=8, metavar="ROWS", help="rows per process; default: 8")
    for benchmark in (train, forward, scaling, capacity):
        benchmark.add_argument("--length", type=positive, default=1024, metavar="TOKENS", help="default: 1024")
    for benchmark in (train, scaling, capacity):
        benchmark.add_argument("--dropout", type=float, metavar="RATE", help="default: the model's own")
        benchmark.add_argument("--precision", choices=("autocast", "bfloat16", "float32"), default="autocast")
        benchmark.add_argument(
            "--padded", action="store_true", help="rows of different lengths, under an attention mask"
        )
    train.add_argument(
        "--budget",
        nargs="+",
        type=float,
        default=[],
        help="also the preset training with each of these budgets, from 0 to 1",
    )
    for configured in (generate, kernels, train, curves, capacity):
        configured.add_argument(
            "--config",
            action="append",
            default=[],
            metavar="CONFIG",
            help="as for plan; may be repeated; default: a few",
        )
    train.set_defaults(run=_bench_train)
    capacity.set_defaults(run=_bench_capacity)
    forward.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    forward.add_argument(
        "--training",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time --model in training mode; a T5 compiles for minutes",
    )
    forward.set_defaults(run=_bench_forward)
    for benchmark in (ops, tutorial, generate, kernels, train, forward, scaling, curves, capacity):
        benchmark.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
        benchmark.add_argument("--out", type=new_file, metavar="FILE", help="write the results as JSON")
        benchmark.add_argument(
            "--against", metavar="FILE", help="an earlier result file; exit with 1 if a row is slower than there"
        )
    tune = benchmarks.add_parser("tune", help="measure again where one kernel overtakes another; propose the numbers")
    tune.add_argument("--write", action="store_true", help="write them into fuseopt/tuning, for this kind of GPU")
    tune.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    tune.add_argument("--out", type=new_file, metavar="FILE", help="write the results as JSON")
    tune.set_defaults(run=_bench_tune, against=None)
    show = benchmarks.add_parser("show", help="print the table of a result file")
    show.add_argument("file", metavar="FILE")
    show.add_argument("--auto", action="store_true", help="for ops: only the rows that `backend: auto` takes")
    for drawn in (generate, show):
        drawn.add_argument(
            "--plot", type=new_file, metavar="FILE", help="draw the times into a .png, .svg or .pdf file"
        )
    show.set_defaults(run=_bench_show)


def _bench_ops(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import ops

    return _bench(
        arguments,
        functools.partial(
            ops.run, ops=arguments.op, dtypes=arguments.dtype, shapes=arguments.shapes, compile=arguments.compile
        ),
    )


def _bench_tutorial(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import tutorial

    return _bench(arguments, tutorial.run)


_SIZES, _SAMPLING = ("prompt", "new", "beams", "ngram"), ("temperature", "top_k", "top_p")


def _bench_generate(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.harness import plot
    from fuseopt.bench.suites import generate

    options = _generate_options(arguments)
    if arguments.plot is not None:
        plot.check_available()
    run = functools.partial(generate.run, **options, compile=arguments.compile, first_calls=arguments.first_call)
    return _bench(arguments, run)


def _bench_kernels(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import kernels

    return _bench(arguments, functools.partial(kernels.run, **_generate_options(arguments)))


def _generate_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows, dtype and configs of `bench generate` and `bench kernels`."""
    from fuseopt.bench.suites.generate import Row

    given = {
        name: value
        for name in (*_SIZES, *_SAMPLING, "sample", "eos", "batch")
        if (value := getattr(arguments, name)) is not None and value is not False
    }
    flags = {name: "--" + name.replace("_", "-") for name in given}
    if flags and not arguments.model:
        raise ConfigError(f"{', '.join(flags.values())}: also name a model, such as --model gpt2")
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    if sampling and not arguments.sample:
        raise ConfigError(f"{', '.join(flags[name] for name in sampling)}: has an effect only with --sample")
    sizes: dict[str, Any] = {name: given[name] for name in (*_SIZES, "eos") if name in given}
    if arguments.sample:
        sizes["sampling"] = sampling
    return {
        "rows": [Row(model, batch, **sizes) for model in arguments.model for batch in arguments.batch or [1]],
        "dtype": arguments.dtype and getattr(torch, arguments.dtype),
        "configs": _configs(arguments.config) or None,
    }


def _bench_train(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import train

    rows = _train_rows(arguments)
    configs = train.budget_configs(arguments.budget) | _configs(arguments.config)
    options = {"rows": rows, "configs": configs or None, "compile": arguments.compile}
    return _bench(arguments, functools.partial(train.run, **options))


def _bench_capacity(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import capacity

    options = {"configs": _configs(arguments.config) or None, "compile": arguments.compile}
    return _bench(arguments, functools.partial(capacity.run, rows=_train_rows(arguments), **options))


def _train_rows(arguments: argparse.Namespace) -> list[Any]:
    from fuseopt.bench.suites.train import Row

    return [
        Row(model, batch, arguments.length, arguments.dropout, arguments.precision, arguments.padded)
        for model in arguments.model
        for batch in arguments.batch
    ]


def _bench_forward(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import forward

    dtype = getattr(torch, arguments.dtype)
    rows = [
        forward.Row(model, batch, arguments.length, dtype, arguments.training)
        for model in arguments.model
        for batch in arguments.batch
    ]
    return _bench(arguments, functools.partial(forward.run, rows=rows, compile=arguments.compile))


def _bench_scaling(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import scaling, train

    row = train.Row(
        arguments.model,
        arguments.batch,
        arguments.length,
        arguments.dropout,
        arguments.precision,
        arguments.padded,
    )
    ((name, config),) = _configs([arguments.config]).items()
    options = {"row": row, "processes": arguments.processes, "name": name, "config": config}
    return _bench(arguments, functools.partial(scaling.run, **options))


def _bench_curves(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import curves

    rows = [
        curves.Row(model, arguments.batch, arguments.length, arguments.dropout)
        for model in arguments.model or ("gpt2-kjv", "t5-kjv")
    ]
    options = {"rows": rows, "steps": arguments.steps, "seeds": arguments.seeds}
    configs = _configs(arguments.config or ["training"])
    return _bench(arguments, functools.partial(curves.run, configs=configs, **options))


def _configs(sources: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Configs as JSON types, by the file or preset name that the user gave."""
    return {source: fuseopt.Config.load(source).to_dict() for source in sources}


def _bench(arguments: argparse.Namespace, run: Callable[..., Results]) -> int:
    """Runs a benchmark, prints and saves its results, and compares them with earlier ones.

    Returns:
        The exit status: 1 if a row is slower than before or raised an exception, else 0.
    """
    from fuseopt.bench.harness.records import Results
    from fuseopt.bench.harness.regressions import compare

    earlier = None if arguments.against is None else Results.load(arguments.against)
    results = run(device=device(arguments.device))
    print(results.to_markdown())
    if arguments.out is not None:
        results.save(arguments.out)
        print(f"\nwritten to {arguments.out}")
    if getattr(arguments, "plot", None) is not None:
        _plot(results, arguments.plot)
    failures = sum(row.failed for row in results.rows)
    if failures:
        print(f"\n{failures} of {len(results.rows)} rows failed; see the tracebacks on stderr")
    if earlier is None:
        return 1 if failures else 0
    comparison = compare(results, earlier)
    print(f"\nagainst {arguments.against}: {comparison}")
    return 1 if comparison.slower or failures else 0


def _bench_tune(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import tune

    return _bench(arguments, functools.partial(tune.run, save=arguments.write))


def _bench_show(arguments: argparse.Namespace) -> None:
    from fuseopt.bench.harness.records import Results

    results = Results.load(arguments.file)
    if arguments.auto:
        results = results.of_auto()
    print(results.to_markdown())
    if arguments.plot is not None:
        _plot(results, arguments.plot)


def _plot(results: Results, path: Path) -> None:
    from fuseopt.bench.harness import plot

    plot.save(results, path)
    print(f"\ndrawn in {path}")


def device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, or in a folder that does not exist")
    return path
