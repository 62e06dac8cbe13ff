"""`fuseopt bench generate`, `low-bit` and `kernels`: options, and the calls of their suites."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fuseopt.bench import command_options
from fuseopt.bench.command_options import loaded_configs, torch_dtype
from fuseopt.errors import ConfigError

if TYPE_CHECKING:
    from fuseopt.bench.harness.records import Results

Run = Callable[..., "Results"]
"""Call: device -> the results of a benchmark."""


def add_static(parser: Any, seconds: int = 60) -> None:
    """Options of transformers' static cache; `seconds` is the default of --compile-seconds."""
    command_options.add_compile(parser, "transformers' static cache with torch.compile")
    parser.add_argument(
        "--compile-seconds",
        type=command_options.positive,
        default=seconds,
        metavar="N",
        help=f"seconds after which a call of torch.compile is not timed; default: {seconds}",
    )


def add_generate(parser: Any) -> None:
    """Options of `bench generate` alone; `command_options.add_generate` has those of `bench kernels` too."""
    add_static(parser)
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


_SIZES, _SAMPLING = ("prompt", "new", "beams", "ngram"), ("temperature", "top_k", "top_p")


def generate_run(arguments: argparse.Namespace) -> Run:
    """The run of `bench generate`.

    Raises:
        ConfigError: options that do not go together.
    """
    for name, model in (("lora", "gpt2"), ("prefix", "smollm2-360m")):
        if getattr(arguments, name) and not arguments.model:
            raise ConfigError(f"--{name}: also name a model, such as --model {model}")
    others = ("families", "sample", "config", "compile", "first_call", "lora", "prefix")
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name)]
    if arguments.samplings and given:
        raise ConfigError(f"--samplings: has its own settings; leave out {', '.join(given)}")
    options = _generate_options(arguments)

    from fuseopt.bench.harness.generate_rows import PREFIX_CACHE
    from fuseopt.bench.suites import generate, samplings

    if arguments.samplings:
        return functools.partial(samplings.run, rows=options["rows"], dtype=options["dtype"])
    if arguments.lora:
        adapted = [replace(row, lora=arguments.lora) for row in options["rows"]]
        options["rows"] = [replace(row, merged=merged) for row in adapted for merged in (False, True)]
    if arguments.prefix:
        options["rows"] = [replace(row, prefix=prefix) for row in options["rows"] for prefix in (0, arguments.prefix)]
        options["configs"] = options["configs"] or {"preset": "inference", "with a prefix cache": PREFIX_CACHE}
    compile = {"compile": arguments.compile, "compile_seconds": arguments.compile_seconds}
    return functools.partial(generate.run, **options, **compile, first_calls=arguments.first_call)


def low_bit_run(arguments: argparse.Namespace) -> Run:
    """The run of `bench low-bit`.

    Raises:
        ConfigError: sizes without a model.
    """
    sizes = {name: value for name in ("prompt", "new") if (value := getattr(arguments, name)) is not None}
    if not arguments.model and (sizes or arguments.batch):
        raise ConfigError("--batch, --prompt, --new: also name a model, such as --model gpt2")

    from fuseopt.bench.harness.generate_rows import Row
    from fuseopt.bench.suites import low_bit

    options = {
        "rows": [Row(model, batch, **sizes) for model in arguments.model for batch in arguments.batch or [1]],
        "dtype": arguments.dtype and torch_dtype(arguments.dtype),
        "configs": loaded_configs(arguments.config) or None,
        **{name: getattr(arguments, name) for name in ("compile", "compile_seconds", "checkpoints")},
    }
    return functools.partial(low_bit.run, **options)


def kernels_run(arguments: argparse.Namespace) -> Run:
    """The run of `bench kernels`.

    Raises:
        ConfigError: options that do not go together.
    """
    options = _generate_options(arguments)

    from fuseopt.bench.suites import kernels

    return functools.partial(kernels.run, **options)


def _generate_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows, dtype and configs of `bench generate` and `bench kernels`."""
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
    if arguments.families and arguments.model:
        raise ConfigError("--families: has its own models; leave out --model")

    from fuseopt.bench.harness.generate_rows import FAMILY_ROWS, Row

    sizes: dict[str, Any] = {name: given[name] for name in (*_SIZES, "eos") if name in given}
    if arguments.sample:
        sizes["sampling"] = sampling
    named = [Row(model, batch, **sizes) for model in arguments.model for batch in arguments.batch or [1]]
    return {
        "rows": FAMILY_ROWS if arguments.families else named,
        "dtype": arguments.dtype and torch_dtype(arguments.dtype),
        "configs": loaded_configs(arguments.config) or None,
    }
