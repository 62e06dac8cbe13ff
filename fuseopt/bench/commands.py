"""`fuseopt bench ...`: options of each benchmark, and the calls of its suite."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseopt.bench import command_options, generate_commands
from fuseopt.bench.command_options import loaded_configs, torch_dtype
from fuseopt.errors import ConfigError

if TYPE_CHECKING:
    import torch

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
            _run_by(generate_commands.generate_run),
            (command_options.add_generate, generate_commands.add_generate, generation),
        ),
        (
            "low-bit",
            "generate() with weights in 8 or 4 bits, and how well checkpoints with such weights predict texts",
            _run_by(generate_commands.low_bit_run),
            (
                command_options.add_low_bit,
                # torchao's weights take longer to compile, since their kernels are tuned.
                functools.partial(generate_commands.add_static, seconds=180),
                functools.partial(command_options.add_configs, default=_LOW_BIT),
            ),
        ),
        (
            "kernels",
            "each kernel of a decode step, on a GPU",
            _run_by(generate_commands.kernels_run),
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


def _add_budget(parser: Any) -> None:
    parser.add_argument(
        "--budget",
        nargs="+",
        type=command_options.share,
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


def _bench_train(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import train

    rows = _train_rows(arguments)
    configs = train.budget_configs(arguments.budget) | loaded_configs(arguments.config)
    options = {"rows": rows, "configs": configs or None, "compile": arguments.compile}
    return _bench(arguments, functools.partial(train.run, **options))


def _bench_capacity(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import capacity

    options = {"configs": loaded_configs(arguments.config) or None, "compile": arguments.compile}
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

    dtype = torch_dtype(arguments.dtype)
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
    ((name, config),) = loaded_configs([arguments.config]).items()
    options = {"row": row, "processes": arguments.processes, "name": name, "config": config}
    return _bench(arguments, functools.partial(scaling.run, **options))


def _bench_curves(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import curves

    rows = [
        curves.Row(model, arguments.batch, arguments.length, arguments.dropout)
        for model in arguments.model or ("gpt2-kjv", "t5-kjv")
    ]
    options = {"rows": rows, "steps": arguments.steps, "seeds": arguments.seeds}
    configs = loaded_configs(arguments.config or ["training"])
    return _bench(arguments, functools.partial(curves.run, configs=configs, **options))


def _bench(arguments: argparse.Namespace, run: Callable[..., Results]) -> int:
    """Runs a benchmark, prints and saves its results, and compares them with earlier ones.

    Returns:
        The exit status: 1 if a row is slower than before or raised an exception, else 0.
    """
    from fuseopt.bench.harness.records import Results
    from fuseopt.bench.harness.regressions import compare

    earlier = None if arguments.against is None else Results.load(arguments.against)
    results = run(device=device(arguments.device))
    print(results.for_terminal())
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


def _run_by(run_of: Callable[[argparse.Namespace], Callable[..., Results]]) -> Callable[[argparse.Namespace], int]:
    """A command: `_bench` of the run that `run_of` makes of the arguments."""
    return lambda arguments: _bench(arguments, run_of(arguments))


def _bench_tune(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.suites import tune

    return _bench(arguments, functools.partial(tune.run, save=arguments.write))


def _bench_show(arguments: argparse.Namespace) -> None:
    from fuseopt.bench.harness.records import Results

    shown = [Results.load(file) for file in arguments.files]
    if arguments.auto:
        shown = [results.of_auto() for results in shown]
    print("\n\n".join(results.for_terminal() for results in shown))
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
    """The device that `--device` names, or the default.

    Raises:
        ConfigError: there is no such device here.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
