"""Options of the `fuseopt bench` commands; `commands.py` has what each command runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseopt.config import Config

if TYPE_CHECKING:
    import torch

MODEL = "a name (gpt2, gpt2-xl, t5-base, ...), a folder with a config.json, or a model id in transformers' cache"
CONFIG = 'what to fuse: a preset (inference, training, reference), a JSON file, or JSON text: {"preset": "inference"}'
DEVICE = "where to run; default: cuda if torch sees a GPU, else cpu"
DTYPES = ("bfloat16", "float32", "float16")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, or in a folder that does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def picture(text: str) -> Path:
    if Path(text).suffix not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} should end in {', '.join(PLOT_SUFFIXES[:-1])} or .pdf")
    return new_file(text)


def add_device(parser: Any) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help=DEVICE)


def add_results(parser: Any) -> None:
    """Options of a command that measures: where, and what to do with the results."""
    add_device(parser)
    parser.add_argument("--out", type=new_file, metavar="FILE", help="also write the results as JSON; default: do not")
    add_plot(parser)
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="compare with this earlier result file; exit status 1 if a row became slower; default: do not",
    )


def add_plot(parser: Any) -> None:
    parser.add_argument(
        "--plot",
        type=picture,
        metavar="FILE",
        help="also draw the results into a .png, .svg or .pdf file (needs matplotlib); default: do not",
    )


def add_models(parser: Any, default: str) -> None:
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help=f"what to run, with random weights: {MODEL}; may be repeated; default: {default}",
    )


def add_configs(parser: Any, default: str) -> None:
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="CONFIG",
        help=f"{CONFIG}; each gets a row; may be repeated; default: {default}",
    )


def add_compile(parser: Any, what: str = "torch.compile of the stock model") -> None:
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help=f"whether to time {what} too; default: on a GPU only, because on a CPU it compiles for minutes",
    )


def add_ops(parser: Any) -> None:
    parser.add_argument(
        "--op",
        action="append",
        default=[],
        metavar="NAME",
        help="an op, such as rms_norm; may be repeated; default: all",
    )
    parser.add_argument(
        "--dtype", action="append", default=[], choices=DTYPES, help="may be repeated; default: bfloat16 and float32"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        metavar="SHAPE",
        help="sizes such as 8x768 (elements), or all; default: the op's main sizes, on a CPU only small ones",
    )
    add_compile(parser, "torch.compile of the eager code")


def add_tutorial(parser: Any) -> None:
    parser.add_argument("--model", default="t5-base", metavar="MODEL", help=f"{MODEL}; default: t5-base")
    parser.add_argument("--batch", type=positive, metavar="ROWS", help="prompts per call; default: 256, on a CPU 8")
    parser.add_argument("--length", type=positive, default=1, metavar="TOKENS", help="tokens per prompt; default: 1")
    parser.add_argument("--new", type=positive, default=19, metavar="TOKENS", help="new tokens per row; default: 19")


def add_generate(parser: Any) -> None:
    """Options of `generate` and `kernels`."""
    add_models(parser, "a table of GPT-2 and T5 models; the sizes below need a model")
    parser.add_argument(
        "--families", action="store_true", help="one row for each family with a decode step, instead of --model"
    )
    _add_sizes(parser)
    for option, metavar, what in (
        ("--beams", "N", "beams; default: 1, which is greedy or sampled decoding"),
        ("--ngram", "TOKENS", "no_repeat_ngram_size, the length of n-grams that may not repeat; default: no ban"),
    ):
        parser.add_argument(option, type=positive, metavar=metavar, help=what)
    parser.add_argument("--sample", action="store_true", help="sample, with one seed for all calls; default: greedy")
    parser.add_argument(
        "--eos", action="store_true", help="have an EOS token, which random weights hardly ever choose; default: none"
    )
    for option, kind in (("--temperature", float), ("--top-k", int), ("--top-p", share)):
        parser.add_argument(
            option,
            type=kind,
            metavar="X",
            help=f"generate()'s argument, for --sample; default: {option[2:]} is not set",
        )


def add_low_bit(parser: Any) -> None:
    add_models(
        parser, "GPT-2 and T5 (on a GPU larger ones and Llama) and the checkpoints; the sizes below need a model"
    )
    _add_sizes(parser)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="a folder of model folders, held-out.txt and prompts.txt; default: examples/checkpoints, as in a clone",
    )


def _add_sizes(parser: Any) -> None:
    """Sizes of `generate()` calls."""
    parser.add_argument("--batch", nargs="+", type=positive, metavar="ROWS", help="prompts per call; default: 1")
    parser.add_argument("--prompt", type=positive, metavar="TOKENS", help="tokens per prompt; default: 128")
    parser.add_argument("--new", type=positive, metavar="TOKENS", help="new tokens per row; default: 128")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: bfloat16, on a CPU float32")


def add_training(parser: Any) -> None:
    """Options of a training step: `train`, `scaling` and `capacity`."""
    parser.add_argument(
        "--dropout", type=share, metavar="RATE", help="every dropout rate, 0 to 1; default: those of the model's config"
    )
    parser.add_argument(
        "--precision",
        choices=("autocast", "bfloat16", "float32"),
        default="autocast",
        help="autocast is to bfloat16, with float32 weights; default: autocast",
    )
    parser.add_argument("--padded", action="store_true", help="rows of random lengths with an attention mask")


def add_length(parser: Any, default: int = 1024) -> None:
    parser.add_argument(
        "--length", type=positive, default=default, metavar="TOKENS", help=f"tokens per row; default: {default}"
    )


def add_batches(parser: Any) -> None:
    parser.add_argument(
        "--batch", nargs="+", type=positive, default=[8], metavar="ROWS", help="batch sizes, one or more; default: 8"
    )


def add_scaling(parser: Any) -> None:
    parser.add_argument("--model", default="gpt2", metavar="MODEL", help=f"{MODEL}; default: gpt2")
    parser.add_argument("--config", default="training", metavar="CONFIG", help=f"{CONFIG}; default: training")
    parser.add_argument(
        "--processes", type=positive, default=2, metavar="N", help="processes, each on a GPU of its own; default: 2"
    )
    parser.add_argument("--batch", type=positive, default=8, metavar="ROWS", help="rows per process; default: 8")


def add_curves(parser: Any) -> None:
    parser.add_argument("--batch", type=positive, default=16, metavar="ROWS", help="rows per step; default: 16")
    add_length(parser, 128)
    parser.add_argument("--steps", type=positive, default=500, metavar="N", help="training steps; default: 500")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each system; default: 3")
    parser.add_argument(
        "--dropout", type=share, default=0.1, metavar="RATE", help="every dropout rate, 0 to 1; default: 0.1"
    )


def add_tune(parser: Any) -> None:
    parser.add_argument(
        "--write", action="store_true", help="write the numbers into fuseopt/tuning; default: only print them"
    )


def add_show(parser: Any) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result files, as --out writes them")
    parser.add_argument(
        "--auto", action="store_true", help="of `bench ops`: only the backends that `backend: auto` takes"
    )
    parser.add_argument(
        "--html", type=new_file, metavar="FILE", help="also write all tables as one web page; default: do not"
    )
    parser.add_argument(
        "--plot",
        type=picture,
        metavar="FILE",
        help="also draw the one result file into a .png, .svg or .pdf file (needs matplotlib); default: do not",
    )


def loaded_configs(sources: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Configs as JSON types, by the file or preset name that the user gave."""
    return {source: Config.load(source).to_dict() for source in sources}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that `--dtype` names."""
    import torch

    return getattr(torch, name)
