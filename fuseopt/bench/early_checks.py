"""Checks of a command's arguments without torch and transformers, whose imports take seconds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuseopt.bench.harness import plot
from fuseopt.bench.harness.model_names import config_folder
from fuseopt.config import Config, as_written, beside_auto
from fuseopt.config_checks import nearest
from fuseopt.errors import ConfigError

_FILES = ("against", "markdown", "files")


class Parser(argparse.ArgumentParser):
    """Parser of a subcommand that reports an unknown option itself, and suggests the most similar one.

    In argparse only the outermost parser reports unknown options.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, others = super().parse_known_args(args, namespace)
        if others:
            hint = nearest(others[0], self._option_string_actions) if others[0].startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(others)}; {hint}`{self.prog} --help` lists what it takes")
        return found, others


def check(arguments: argparse.Namespace) -> None:
    """Checks the models, configs, result files and checkpoints of the arguments, and whether a plot can be drawn.

    Raises:
        ConfigError: there is no such model, file or folder, a config is wrong, or matplotlib is missing.
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
    for folder in _values(arguments, "checkpoints"):
        if not folder.is_dir():
            raise ConfigError(f"--checkpoints: no folder {folder}; leave it out for the checkpoints of a clone")
    if getattr(arguments, "plot", None) is not None:
        if len(list(_values(arguments, "files"))) > 1:
            raise ConfigError("--plot draws one result file; name one, or write all as a page with --html")
        plot.check_available()


def _values(arguments: argparse.Namespace, name: str) -> Iterator[Any]:
    """The values of an option, which may be undefined, not given, single or repeated."""
    given = getattr(arguments, name, None)
    yield from given if isinstance(given, list) else () if given is None else (given,)
