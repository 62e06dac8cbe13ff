"""ModulePaths: which modules of a model `only` and `exclude` of a config leave to be replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fuseopt.config_checks import nearest
from fuseopt.errors import ConfigError, shown

EVERYTHING = ("*",)


@dataclass(frozen=True)
class ModulePaths:
    """Patterns as in `fnmatch`, such as "encoder.*"; a pattern names a module and all modules inside it.

    Attributes:
        only: a module must be named by one of these.
        exclude: and by none of these.
    """

    only: tuple[str, ...] = EVERYTHING
    exclude: tuple[str, ...] = ()

    def left_out_reason(self, paths: Sequence[str]) -> str | None:
        """Why a module may not be replaced, or None if it may.

        Args:
            paths: its paths from the model's root, several for a shared module; "" for the model itself.
        """
        if self.only == EVERYTHING and not self.exclude:
            return None
        names = [name for path in paths for name in _with_modules_around(path)]
        excluding = next((pattern for pattern in self.exclude if _matches(pattern, names)), None)
        if excluding is not None:
            return f"`exclude` names it: {excluding!r}"
        return None if any(_matches(pattern, names) for pattern in self.only) else "`only` does not name it"

    def unmatched(self, paths: Iterable[str], block: str = "kernel_fusion") -> Iterator[str]:
        """A message for each pattern, of a block of the config, that names none of the modules at `paths`."""
        if self.only == EVERYTHING and not self.exclude:
            return
        known = list(paths)
        for key, patterns in (("only", self.only), ("exclude", self.exclude)):
            for pattern in patterns:
                if not _matches(pattern, known):
                    hint = nearest(pattern, known).strip()
                    yield f"{block}.{key}: {shown(pattern)} matches no module of the model; {hint}".rstrip("; ")


def module_paths(block: Mapping[str, Any]) -> ModulePaths:
    """The `only` and `exclude` of a `kernel_fusion` block.

    Raises:
        ConfigError: one of them is no list of patterns, or they leave no module.
    """
    only = patterns("kernel_fusion.only", block.get("only", EVERYTHING))
    exclude = patterns("kernel_fusion.exclude", block.get("exclude", ()))
    if not only:
        raise ConfigError("kernel_fusion.only: the list is empty, so nothing would be replaced; use `enable: false`")
    for pattern in only:
        covering = next((excluding for excluding in exclude if fnmatchcase(pattern, excluding)), None)
        if covering is not None:
            raise ConfigError(
                f"kernel_fusion.exclude: {shown(covering)} excludes everything that `only` names by {shown(pattern)}; "
                "remove one of them"
            )
    return ModulePaths(only, exclude)


def patterns(where: str, value: Any) -> tuple[str, ...]:
    """`value` as patterns of module paths.

    Raises:
        ConfigError: it is no list of them.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{where}: expected a list of module paths, such as ['encoder.*'], got {shown(value)}")
    for position, pattern in enumerate(value):
        if not isinstance(pattern, str):
            raise ConfigError(f"{where}[{position}]: expected a module path such as 'encoder.*', got {shown(pattern)}")
    return tuple(value)


def _with_modules_around(path: str) -> Iterator[str]:
    while True:
        yield path
        path = path.rpartition(".")[0]
        if not path:
            return


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
