"""Checks of a command's arguments that need neither torch nor transformers, whose imports take seconds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuseopt.bench.harness import plot
from fuseopt.bench.harness.model_names import config_folder
from fuseopt.config import Config, as_written, beside_auto
from fuseopt.errors import ConfigError

_FILES = ("against", "markdown", "files")


def check(arguments: argparse.Namespace) -> None:
    """Checks the models, configs and result files that the arguments name, and whether a plot can be drawn.

    Raises:
        ConfigError: there is no such model or file, a config is wrong, or matplotlib is missing.
    """
    for model in _values(arguments, "model"):
        config_folder(model)
    for config in _values(arguments, "config"):
        if beside_auto(as_written(config)) is None:
            Config.load(config)
    for name in _FILES:
        for file in _values(arguments, name):
            if not Path(file).is_file():
                raise ConfigError(f"{file}: cannot be read: no such file; name a result file, as `--out` writes it")
    if getattr(arguments, "plot", None) is not None:
        if len(list(_values(arguments, "files"))) > 1:
            raise ConfigError("--plot draws one result file; name one, or write all as a page with --html")
        plot.check_available()


def _values(arguments: argparse.Namespace, name: str) -> Iterator[Any]:
    """The values of an option, which may be absent, not given, single or repeated."""
    given = getattr(arguments, name, None)
    yield from given if isinstance(given, list) else () if given is None else (given,)
