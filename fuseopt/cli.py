"""The command line: `fuseopt demo | bench | plan | verify | check | init-config | env`, also as `python -m fuseopt`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import fuseopt
from fuseopt.bench.commands import add_benchmarks, device, new_file, positive
from fuseopt.errors import FuseoptError
from fuseopt.kernel_table import PRESETS

CONFIG_HELP = 'a preset, a JSON file, or JSON text such as \'{"generation": {"enable": true}}\'; default: inference'


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    SIGTERM is handled like an interrupt from the keyboard, so a benchmark that a job scheduler ends keeps its results.

    Returns:
        The exit status: 0; 1 if `bench --against` finds a slower row, `check` a wrong op, or `verify` an error larger
        than allowed; 2 for an error that the user can fix, which is printed to stderr.
    """
    arguments = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return arguments.run(arguments) or 0
    except FuseoptError as error:
        print(f"fuseopt {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fuseopt", description="Makes Hugging Face models fast.")
    parser.add_argument("--version", action="version", version=f"fuseopt {fuseopt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="fuse two models, compare their tokens with stock, and time both on this machine"
    )
    demo.add_argument("--quick", action="store_true", help="tiny models: shows that it works, in seconds")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    demo.add_argument("--checkpoints", type=Path, metavar="DIR", help="default: examples/checkpoints of the clone")
    demo.add_argument("--out", type=new_file, metavar="FILE", help="write the results as JSON")
    demo.add_argument("--markdown", metavar="FILE", help="only print the table of a result file")
    demo.set_defaults(run=_demo)

    add_benchmarks(commands)

    plan = commands.add_parser("plan", help="show what would be replaced in a model, with reasons")
    plan.add_argument(
        "model", metavar="MODEL", help="a folder with a config.json, a model id, or a name: gpt2-xl, t5-base"
    )
    plan.add_argument("--config", default="inference", metavar="CONFIG", help=CONFIG_HELP)
    plan.add_argument(
        "--device", choices=("cpu", "cuda", "meta"), help="device to plan for; default: cuda if there is one"
    )
    plan.add_argument("-v", "--verbose", action="store_true", help="also what is not replaced, and all reasons")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--strict", action="store_true", help="fail if something that the config names cannot be done")
    plan.set_defaults(run=_plan)

    verify = commands.add_parser("verify", help="compare a model, fused and stock, with a float64 reference")
    verify.add_argument("model", metavar="MODEL", help="as for plan; one that has no weights gets random ones")
    verify.add_argument("--config", default="inference", metavar="CONFIG", help=CONFIG_HELP)
    verify.add_argument(
        "--train", action="store_true", help="also loss and gradients; default: if the config acts in training"
    )
    verify.add_argument("--generate", type=positive, metavar="TOKENS", help="also generate so many tokens")
    verify.add_argument("--batch", type=positive, default=2, metavar="ROWS", help="default: 2")
    verify.add_argument("--length", type=positive, default=32, metavar="TOKENS", help="random ones; default: 32")
    verify.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    verify.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    verify.set_defaults(run=_verify)

    check = commands.add_parser("check", help="try the contract of every op that a Python file registers")
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    check.set_defaults(run=_check)

    init = commands.add_parser("init-config", help="print a complete config as JSON, to be edited")
    init.add_argument("preset", nargs="?", default="inference", choices=PRESETS, help="default: inference")
    init.set_defaults(run=_init_config)

    env = commands.add_parser("env", help="show versions, hardware, compilers and the state of the native libraries")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=_env)
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    if arguments.markdown is not None:
        from fuseopt.bench.harness.records import Results

        print(Results.load(arguments.markdown).to_markdown())
        return
    from fuseopt.bench.suites import demo

    demo.run(
        device=device(arguments.device),
        quick=arguments.quick,
        checkpoints=arguments.checkpoints or demo.CHECKPOINTS,
        out=arguments.out,
    )


def _plan(arguments: argparse.Namespace) -> None:
    from fuseopt.bench.harness.architectures import load_config, weightless

    config = fuseopt.Config.load(arguments.config)
    model = weightless(load_config(arguments.model), device(arguments.device))
    decided = fuseopt.plan(model, config, verbose=arguments.verbose)
    print(decided.to_json() if arguments.json else decided)
    if arguments.strict:
        decided.check_strict()


def _verify(arguments: argparse.Namespace) -> int:
    from fuseopt.bench.harness.architectures import random_model, saved_model
    from fuseopt.verify import acts_in_training

    config, place = fuseopt.Config.load(arguments.config), (device(arguments.device), getattr(torch, arguments.dtype))
    model = saved_model(arguments.model, *place)
    if model is None:
        print(f"{arguments.model}: random weights")
        model = random_model(arguments.model, *place)
    vocabulary = model.config.get_text_config().vocab_size
    shape, generator = (arguments.batch, arguments.length), torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, shape, generator=generator).to(place[0])
    checked = fuseopt.verify(
        model,
        config,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        labels=ids if arguments.train or acts_in_training(config) else None,
        generate=arguments.generate and {"max_new_tokens": arguments.generate},
    )
    print(checked)
    return 0 if checked.ok else 1


def _check(arguments: argparse.Namespace) -> int:
    from fuseopt.extend.check_file import check_file

    reports = check_file(arguments.file, device(arguments.device))
    print("\n\n".join(map(str, reports)))
    return 0 if all(report.ok for report in reports) else 1


def _init_config(arguments: argparse.Namespace) -> None:
    print(fuseopt.Config.load(arguments.preset).to_json())


def _env(arguments: argparse.Namespace) -> None:
    from fuseopt.bench.harness.machine import environment

    found = environment()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for title, entries in found.items():
        print(title)
        for name, value in entries.items():
            print(f"  {name:<14}{value}")
