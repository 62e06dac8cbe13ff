"""The command line: `fuseopt COMMAND`, or `python -m fuseopt COMMAND`; `--help` lists the commands."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseopt import __version__
from fuseopt.bench import early_checks
from fuseopt.bench.command_options import CONFIG, DTYPES, MODEL, add_device, add_plot, new_file, positive, torch_dtype
from fuseopt.bench.commands import add_benchmarks, add_tune, device, draw
from fuseopt.config import Config, as_written, beside_auto
from fuseopt.errors import ConfigError, FuseoptError
from fuseopt.kernel_table import PRESETS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fuseopt.auto.planned import AutoPlan
    from fuseopt.plan import Plan

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DEFAULT_ARCH = "sm_90"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    SIGINT (Ctrl-C) and SIGTERM end a command without a traceback. A benchmark prints and saves what it has measured.
    Where possible, wrong arguments are reported before torch is imported.

    Returns:
        The exit status: 0; 1 if a benchmark's row failed or is slower than in `--against`, `check` finds a wrong op, or
        `verify` an error larger than allowed; 2 for an error that the user can fix, which is printed to stderr;
        128 + the signal's number after a signal: 130 or 143.
    """
    with _ending_quietly() as received, warnings.catch_warnings():
        warnings.showwarning = _show_warning
        arguments = _parser().parse_args(argv)
        command = " ".join(filter(None, ("fuseopt", arguments.command, getattr(arguments, "benchmark", None))))
        try:
            early_checks.check(arguments)
            status = arguments.run(arguments) or 0
            sys.stdout.flush()
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        except BrokenPipeError:  # the reader of stdout, such as `head`, has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 128 + signal.SIGPIPE
        except FuseoptError as error:
            print(f"{command}: error: {error}", file=sys.stderr)
            status = 2
        except Exception as error:
            status = 2
            if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not have been imported
                reason = f"{str(error).splitlines()[0]} Take a smaller model, batch or length."
                print(f"{command}: error: {reason}", file=sys.stderr)
            elif not received:  # an interrupted import may raise an error of its own
                raise
    return 128 + received[0] if received else status


class _SignalReceived(KeyboardInterrupt):
    """Raised by a signal. A plain KeyboardInterrupt that leaves an `exec` would make Python end itself by SIGINT."""


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Prints the message alone: the lines of code that Python names are not the user's."""
    print(str(message), file=sys.stderr)


@contextlib.contextmanager
def _ending_quietly() -> Iterator[list[int]]:
    """Inside, the signals raise KeyboardInterrupt; yields a list that the numbers of those received are added to.

    A signal that the process was started to ignore, as by `nohup`, stays ignored.
    """
    received: list[int] = []

    def end(number: int, frame: Any) -> None:
        received.append(number)
        raise _SignalReceived

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, end)
    try:
        yield received
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _parser() -> argparse.ArgumentParser:
    parser = early_checks.Parser(prog="fuseopt", description="Makes Hugging Face models fast.")
    parser.add_argument("--version", action="version", version=f"fuseopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = _command(
        commands, "demo", "fuse small models, compare their tokens with stock, and time both on this machine"
    )
    demo.add_argument("--quick", action="store_true", help="tiny models, in seconds: shows that it works, not how fast")
    add_device(demo)
    demo.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="a folder of model folders and a prompts.txt; default: examples/checkpoints, here or in the clone",
    )
    demo.add_argument("--out", type=new_file, metavar="FILE", help="also write the results as JSON; default: do not")
    add_plot(demo)
    demo.add_argument("--markdown", metavar="FILE", help="only print the table of this result file; default: run")
    demo.set_defaults(run=_demo)

    plan = _command(
        commands, "plan", "show what would be replaced in a model, and why the rest would not; changes nothing"
    )
    _add_model(plan, ", or auto, which shows what would be measured, and what has been")
    plan.add_argument(
        "--device",
        choices=("cpu", "cuda", "meta"),
        help="the device to plan for; cuda needs no GPU here, meta plans for each device of this machine; default: "
        "cuda if torch sees a GPU, else cpu",
    )
    plan.add_argument(
        "--arch",
        type=_architecture,
        metavar="SM",
        help="with --device cuda, assume such a GPU with all kernels: sm_90 (H100, H200), sm_80 (A100); default: this "
        f"machine's GPU, or {_DEFAULT_ARCH} if there is none",
    )
    _add_output(plan)
    plan.add_argument("--strict", action="store_true", help="exit status 2 if what the config names cannot be done")
    plan.set_defaults(run=_plan)

    report = _command(commands, "report", "replace what can be replaced in a model here, and show what was done")
    _add_model(report, ", or auto, which measures what is fastest here")
    report.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights; default: float32")
    add_device(report)
    _add_output(report)
    measured = report.add_argument_group("with --config auto, which measures on random tokens")
    measured.add_argument("--train", action="store_true", help="a training step, in place of a forward")
    measured.add_argument(
        "--generate", type=positive, metavar="TOKENS", help="generate() of so many new tokens; default: a forward"
    )
    measured.add_argument("--batch", type=positive, metavar="ROWS", help="rows of input; default: 1")
    measured.add_argument("--length", type=positive, metavar="TOKENS", help="tokens per row; default: 128")
    measured.add_argument(
        "--time-limit", type=positive, metavar="N", help="no choice is begun after so many seconds; default: 180"
    )
    report.set_defaults(run=_report)

    verify = _command(commands, "verify", "compare a model, fused and stock, with a float64 reference on random tokens")
    _add_model(verify)
    verify.add_argument(
        "--train",
        action="store_true",
        help="compare loss and gradients too; default: if the config changes training",
    )
    verify.add_argument(
        "--generate",
        type=positive,
        metavar="TOKENS",
        help="also generate so many new tokens; default: 16 if the config replaces generate(), else none",
    )
    verify.add_argument("--batch", type=positive, default=2, metavar="ROWS", help="rows of input; default: 2")
    verify.add_argument("--length", type=positive, default=32, metavar="TOKENS", help="tokens per row; default: 32")
    verify.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights; default: float32")
    add_device(verify)
    verify.set_defaults(run=_verify)

    check = _command(commands, "check", "check every op that a Python file registers: results, gradients, odd inputs")
    check.add_argument("file", type=Path, metavar="FILE", help="a Python file with functions under @fuseopt.op")
    add_device(check)
    check.set_defaults(run=_check)

    init = _command(commands, "init-config", "print a complete config as JSON, to be edited")
    init.add_argument(
        "preset", nargs="?", default="inference", choices=PRESETS, help="what to start from; default: inference"
    )
    init.set_defaults(run=_init_config)

    add_benchmarks(commands)
    add_tune(commands)

    env = _command(commands, "env", "show versions, hardware, compilers and native libraries, for a bug report")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=_env)
    return parser


def _command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")


def _add_model(parser: argparse.ArgumentParser, others: str = "") -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL}; one that has no weights gets random ones")
    parser.add_argument("--config", default="inference", metavar="CONFIG", help=f"{CONFIG}{others}; default: inference")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="also what is not replaced, and all reasons")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _architecture(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"sm_(\d+)(\d)", text)
    if found is None or int(found[1]) < 7:
        raise argparse.ArgumentTypeError(
            f"{text!r} should be sm_ and a compute capability of 7.0 or more: sm_80, sm_90"
        )
    return int(found[1]), int(found[2])


def _demo(arguments: argparse.Namespace) -> None:
    if arguments.markdown is not None:
        from fuseopt.bench.harness.records import Results

        results = Results.load(arguments.markdown)
        print(results.to_markdown())
        draw(results, arguments.plot)
        return
    from fuseopt.bench.suites import demo

    results = demo.run(
        device=device(arguments.device),
        quick=arguments.quick,
        checkpoints=arguments.checkpoints or demo.default_checkpoints(),
        out=arguments.out,
    )
    draw(results, arguments.plot)


def _plan(arguments: argparse.Namespace) -> None:
    source = as_written(arguments.config)
    measures = beside_auto(source) is not None
    config = source if measures else Config.load(source)
    if measures and arguments.strict:
        raise ConfigError("--strict: has no effect with the config 'auto'; leave it out")

    import torch

    import fuseopt
    from fuseopt.bench.harness.architectures import load_config, weightless
    from fuseopt.bench.harness.progress import waiting
    from fuseopt.ops.backends import assume_gpu

    has_gpu = torch.cuda.is_available()
    place = torch.device(arguments.device or ("cuda" if has_gpu else "cpu"))
    if arguments.arch is not None and place.type != "cuda":
        raise ConfigError("--arch: is for a GPU; add --device cuda")
    assumed = arguments.arch
    if place.type == "cuda" and assumed is None and not has_gpu:
        assumed = _architecture(_DEFAULT_ARCH)
    with waiting(f"planning {arguments.model}"), assume_gpu(assumed) if assumed else contextlib.nullcontext():
        at = torch.device("meta") if assumed else place
        model = weightless(load_config(arguments.model), at)
        decided: Plan | AutoPlan = fuseopt.plan(model, config, verbose=arguments.verbose)
    if assumed and not arguments.json:
        print(f"assuming a GPU of compute capability {assumed[0]}.{assumed[1]} with all kernels")
    if not isinstance(decided, fuseopt.Plan):
        how = f"fuseopt report {arguments.model} --config auto, with --generate TOKENS or --train"
        decided = replace(decided, how=how)
    print(decided.to_json() if arguments.json else decided)
    if arguments.strict and isinstance(decided, fuseopt.Plan):
        decided.check_strict()


def _report(arguments: argparse.Namespace) -> None:
    model = _fused_by_auto(arguments) if beside_auto(as_written(arguments.config)) is not None else _fused(arguments)

    import fuseopt

    report = fuseopt.report(model, verbose=arguments.verbose)
    print(report.to_json() if arguments.json else report)


def _fused(arguments: argparse.Namespace) -> PreTrainedModel:
    config = Config.load(arguments.config)
    for name in ("train", "generate", "batch", "length", "time_limit"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')}: only --config auto measures; leave it out")
    model = _model(arguments)

    import fuseopt

    warnings.filterwarnings("ignore", ".*matches nothing in the model", UserWarning)  # the report says it
    return fuseopt.initialize(model, config)


def _fused_by_auto(arguments: argparse.Namespace) -> PreTrainedModel:
    if arguments.train and arguments.generate:
        raise ConfigError("--train and --generate: two kinds of work, which are measured one at a time; leave one out")

    import fuseopt
    from fuseopt.bench.harness.architectures import random_inputs
    from fuseopt.bench.harness.progress import is_terminal, say

    model = _model(arguments).train(arguments.train)
    inputs = random_inputs(model, arguments.batch or 1, arguments.length or 128, arguments.generate)
    if arguments.train:
        inputs["labels"] = inputs["input_ids"]
    generate = arguments.generate and {"max_new_tokens": arguments.generate}
    if not is_terminal():
        say(f"{arguments.model}: measuring, if this machine has no earlier result")
    logger = logging.getLogger("fuseopt")
    level = logger.level
    logger.setLevel(logging.WARNING)  # the report has what the log would say
    try:
        return fuseopt.initialize(
            model, arguments.config, inputs=inputs, generate=generate, time_limit=arguments.time_limit
        )
    finally:
        logger.setLevel(level)


def _model(arguments: argparse.Namespace) -> PreTrainedModel:
    """The model that a command names, with its weights, or with random ones after a line on stderr."""
    from fuseopt.bench.harness.architectures import random_model, saved_model
    from fuseopt.bench.harness.progress import say, waiting

    place = device(arguments.device), torch_dtype(arguments.dtype)
    with waiting(f"loading {arguments.model}"):
        model = saved_model(arguments.model, *place)
        if model is None:
            say(f"{arguments.model}: random weights")
            model = random_model(arguments.model, *place)
    return model


def _verify(arguments: argparse.Namespace) -> int:
    import fuseopt
    from fuseopt.bench.harness.architectures import random_inputs
    from fuseopt.bench.harness.progress import say
    from fuseopt.verify import acts_in_training, with_options

    config, model = Config.load(arguments.config), _model(arguments)
    inputs = random_inputs(model, arguments.batch, arguments.length, arguments.generate)
    say(f"comparing {arguments.model}, stock and fused, with float64 ...")
    checked = fuseopt.verify(
        model,
        config,
        inputs,
        labels=inputs["input_ids"] if arguments.train or acts_in_training(config) else None,
        generate=arguments.generate and {"max_new_tokens": arguments.generate},
    )
    print(with_options(checked))
    return 0 if checked.ok else 1


def _check(arguments: argparse.Namespace) -> int:
    if not arguments.file.is_file():
        raise ConfigError(f"{arguments.file}: no such file; name a Python file that registers ops by @fuseopt.op")

    from fuseopt.bench.harness.progress import say
    from fuseopt.extend.check_file import check_file

    say(f"checking the ops of {arguments.file} ...")
    reports = check_file(arguments.file, device(arguments.device))
    print("\n\n".join(map(str, reports)))
    return 0 if all(report.ok for report in reports) else 1


def _init_config(arguments: argparse.Namespace) -> None:
    print(Config.load(arguments.preset).to_json())


def _env(arguments: argparse.Namespace) -> None:
    from fuseopt.bench.harness.machine import environment

    found = environment()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for title, entries in found.items():
        print(title)
        for name, value in entries.items():
            print(f"  {name:<24}{value}")
