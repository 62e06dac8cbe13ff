"""`fuseopt bench ...`: options of each benchmark, and the calls of its suite."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fuseopt
from fuseopt.bench import command_options
from fuseopt.errors import ConfigError

if TYPE_CHECKING:
    from fuseopt.bench.harness.records import Results


_Add = Callable[[Any], None]
_LOW_BIT = "the decode loop unquantised, in int8, and in int4 with groups of 128 and 32"


def add_benchmarks(commands: Any) -> None:
    """Adds `bench` and its benchmarks to `commands`, the subparsers of the command line."""
    bench = commands.add_parser(
        "bench",
        help="measure on this machine, beside transformers, torch and torch.compile",
        description="Measures stock and fused code in turns on this machine, and prints a table.",
    )
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    generation = functools.partial(command_options.add_configs, default="without and with the decode loop")
    training = functools.partial(command_options.add_configs, default="the preset training")
    table = functools.partial(command_options.add_models, default="a table of GPT-2, T5 and Llama models")
    sized: tuple[_Add, ...] = (table, command_options.add_batches, command_options.add_length)
    step: tuple[_Add, ...] = (command_options.add_training, command_options.add_compile, training)
    described: tuple[tuple[str, str, Callable[..., Any], tuple[_Add, ...]], ...] = (
        (
            "ops",
            "single ops by every backend, beside torch and a copy of as many bytes",
            _bench_ops,
            (command_options.add_ops,),
        ),
        ("own-ops", "host time of calls of a user's op, and of torch's op of the same kind", _bench_own_ops, ()),
        (
            "tutorial",
            "generate() under an n-gram ban, as in OSLO's tutorial",
            _bench_tutorial,
            (command_options.add_tutorial,),
        ),
        (
            "generate",
            "generate() per new token",
            _bench_generate,
            (command_options.add_generate, _add_generate, generation),
        ),
        (
            "low-bit",
            "generate() with weights in 8 or 4 bits, and how well checkpoints with such weights predict texts",
            _bench_low_bit,
            (
                command_options.add_low_bit,
                _add_static,
                functools.partial(command_options.add_configs, default=_LOW_BIT),
            ),
        ),
        (
            "kernels",
            "each kernel of a decode step, on a GPU",
            _bench_kernels,
            (command_options.add_generate, generation),
        ),
        ("train", "training steps: forward, backward and AdamW", _bench_train, (*sized, *step, _add_budget)),
        (
            "forward",
            "forwards, in eval and in training mode",
            _bench_forward,
            (*sized, command_options.add_compile, _add_forward),
        ),
        (
            "scaling",
            "a training step in one process and in several (DistributedDataParallel)",
            _bench_scaling,
            (command_options.add_scaling, command_options.add_length, command_options.add_training),
        ),
        (
            "curves",
            "losses and gradients of training, fused and stock, for several seeds",
            _bench_curves,
            (
                functools.partial(command_options.add_models, default="gpt2-kjv and t5-kjv"),
                command_options.add_curves,
                training,
            ),
        ),
        ("capacity", "the largest batch of a training step that fits on the GPU", _bench_capacity, (*sized, *step)),
    )
    for name, what, run, add in described:
        weights = "Weights are random, except those of checkpoints." if name == "low-bit" else "Weights are random."
        benchmark = benchmarks.add_parser(name, help=what, description=f"Measures {what}. {weights}")
        for options in (*add, command_options.add_results):
            options(benchmark)
        benchmark.set_defaults(run=run)
    add_tune(benchmarks)
    show = benchmarks.add_parser("show", help="print result files", description="Prints the tables of result files.")
    command_options.add_show(show)
    show.set_defaults(run=_bench_show)


def add_tune(commands: Any) -> None:
    """Adds `tune`, which is a command of its own and a benchmark."""
    what = "measure again at which sizes one kernel overtakes another, on a GPU"
    tune = commands.add_parser("tune", help=what, description=f"M{what[1:]}; proposes the numbers.")
    command_options.add_tune(tune)
    command_options.add_results(tune)
    tune.set_defaults(run=_bench_tune)


def _add_static(parser: Any) -> None:
    command_options.add_compile(parser, "transformers' static cache with torch.compile")
    parser.add_argument(
        "--compile-seconds",
        type=command_options.positive,
        default=60,
        metavar="N",
        help="a call of torch.compile that takes longer than so many seconds is not timed; default: 60",
    )


def _add_generate(parser: Any) -> None:
    _add_static(parser)
    parser.add_argument(
        "--first-call", action="store_true", help="time the first call of a fresh process too, for each row and system"
    )
    parser.add_argument(
        "--samplings",
        action="store_true",
        help="common settings of sampling beside greedy, all with the decode loop; default: GPT-2, 1, 8, 64 rows",
    )
    parser.add_argument(
        "--lora",
        type=command_options.positive,
        metavar="N",
        help="LoRA adapters of rank N, unmerged, then merged; needs peft; default: none",
    )
    parser.add_argument(
        "--prefix",
        type=command_options.positive,
        metavar="TOKENS",
        help="tokens of a prefix that all calls share; times prompts after it with and without a prefix cache, and the "
        "prompts alone; default: no prefix, and the same prompts in all calls",
    )


def _add_budget(parser: Any) -> None:
    parser.add_argument(
        "--budget",
        nargs="+",
        type=float,
        default=[],
        metavar="SHARE",
        help="activations that the preset training keeps, 0 to 1 of what it would keep; default: 1, on a GPU 0.5 too",
    )


def _add_forward(parser: Any) -> None:
    parser.add_argument(
        "--dtype", choices=command_options.DTYPES, default="bfloat16", help="of the weights; default: bfloat16"
    )
    parser.add_argument(
        "--training",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to time --model in training mode too, for which a T5 compiles for minutes; default: yes",
    )


def _bench_ops(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import ops

    return _bench(
        arguments,
        functools.partial(
            ops.run, ops=arguments.op, dtypes=arguments.dtype, shapes=arguments.shapes, compile=arguments.compile
        ),
    )


def _bench_own_ops(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import own_ops

    return _bench(arguments, own_ops.run)


def _bench_tutorial(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import tutorial

    sizes = {"name": arguments.model, "batch": arguments.batch, "length": arguments.length, "new": arguments.new}
    return _bench(arguments, functools.partial(tutorial.run, **sizes))


_SIZES, _SAMPLING = ("prompt", "new", "beams", "ngram"), ("temperature", "top_k", "top_p")


def _bench_generate(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.harness.generate_rows import PREFIX_CACHE
    from fuseopt.bench.suites import generate, samplings

    options = _generate_options(arguments)
    if arguments.samplings:
        others = ("families", "sample", "config", "compile", "first_call", "lora", "prefix")
        if given := [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name)]:
            raise ConfigError(f"--samplings: has its own settings; leave out {', '.join(given)}")
        return _bench(arguments, functools.partial(samplings.run, rows=options["rows"], dtype=options["dtype"]))
    if arguments.lora:
        if not arguments.model:
            raise ConfigError("--lora: also name a model, such as --model gpt2")
        adapted = [replace(row, lora=arguments.lora) for row in options["rows"]]
        options["rows"] = [replace(row, merged=merged) for row in adapted for merged in (False, True)]
    if arguments.prefix:
        if not arguments.model:
            raise ConfigError("--prefix: also name a model, such as --model smollm2-360m")
        options["rows"] = [replace(row, prefix=prefix) for row in options["rows"] for prefix in (0, arguments.prefix)]
        options["configs"] = options["configs"] or {"preset": "inference", "with a prefix cache": PREFIX_CACHE}
    compile = {"compile": arguments.compile, "compile_seconds": arguments.compile_seconds}
    run = functools.partial(generate.run, **options, **compile, first_calls=arguments.first_call)
    return _bench(arguments, run)


def _bench_low_bit(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.harness.generate_rows import Row
    from fuseopt.bench.suites import low_bit

    sizes = {name: value for name in ("prompt", "new") if (value := getattr(arguments, name)) is not None}
    if not arguments.model and (sizes or arguments.batch):
        raise ConfigError("--batch, --prompt, --new: also name a model, such as --model gpt2")
    options = {
        "rows": [Row(model, batch, **sizes) for model in arguments.model for batch in arguments.batch or [1]],
        "dtype": arguments.dtype and getattr(torch, arguments.dtype),
        "configs": _configs(arguments.config) or None,
        **{name: getattr(arguments, name) for name in ("compile", "compile_seconds", "checkpoints")},
    }
    return _bench(arguments, functools.partial(low_bit.run, **options))


def _bench_kernels(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import kernels

    return _bench(arguments, functools.partial(kernels.run, **_generate_options(arguments)))


def _generate_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows, dtype and configs of `bench generate` and `bench kernels`."""
    from fuseopt.bench.harness.generate_rows import FAMILY_ROWS, Row

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
    if arguments.families and arguments.model:
        raise ConfigError("--families: has its own models; leave out --model")
    named = [Row(model, batch, **sizes) for model in arguments.model for batch in arguments.batch or [1]]
    return {
        "rows": FAMILY_ROWS if arguments.families else named,
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
    from fuseopt.bench.harness import plot
    from fuseopt.bench.harness.records import Results
    from fuseopt.bench.harness.regressions import compare

    if arguments.plot is not None:
        plot.check_available()
    earlier = None if arguments.against is None else Results.load(arguments.against)
    results = run(device=device(arguments.device))
    print(results.to_markdown())
    if arguments.out is not None:
        results.save(arguments.out)
        print(f"\nwritten to {arguments.out}")
    draw(results, arguments.plot)
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

    if arguments.plot is not None and len(arguments.files) > 1:
        raise ConfigError("--plot draws one result file; name one, or write all as a page with --html")
    shown = [Results.load(file) for file in arguments.files]
    if arguments.auto:
        shown = [results.of_auto() for results in shown]
    print("\n\n".join(results.to_markdown() for results in shown))
    if arguments.html is not None:
        from fuseopt.bench.harness import web_page

        web_page.save(shown, arguments.html)
        print(f"\nwritten to {arguments.html}")
    draw(shown[0], arguments.plot)


def draw(results: Results, path: Path | None) -> None:
    """Draws results into a file, if one is named, and says so."""
    from fuseopt.bench.harness import plot

    if path is None:
        return
    plot.save(results, path)
    print(f"\ndrawn in {path}")


def device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
