"""Checks of single config values. Each raises a ConfigError that names the key, the fault and what is accepted.

In all of them `where` is the path of the key, such as "generation.max_batch".
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fuseopt.errors import ConfigError, shown, shown_name

LARGEST = 2**31 - 1

_NOT_BUILT = {
    "kernel_fusion.compile": "not built yet; use `jit: {'backend': 'inductor'}` for the elementwise regions, "
    "or call torch.compile(model) yourself after initialize",
}
_ELSEWHERE = {
    "model_parallelism": "fuseopt leaves parallelism to transformers: load with from_pretrained(..., tp_plan='auto') "
    "or device_map='auto'",
    "activation_checkpointing": "fuseopt leaves checkpointing to transformers: call "
    "model.gradient_checkpointing_enable()",
}


def check_keys(where: str, block: Mapping[Any, Any], known: Iterable[str], blocks: Mapping[str, Iterable[str]]) -> None:
    """Raises ConfigError for a key of `block` that is not in `known`; the message suggests where the key belongs.

    Args:
        where: path of `block` in the config, "" for the whole.
        blocks: path of each block of a config -> its keys.
    """
    for key in block:
        name = shown_name(key)
        path = f"{where}.{name}" if where else name
        if path in _NOT_BUILT:
            raise ConfigError(f"{path}: {_NOT_BUILT[path]}")
        if path in _ELSEWHERE:
            raise ConfigError(f"{path}: {_ELSEWHERE[path]}")
        if key not in known:
            hint = _homes(where, name, blocks) or nearest(name, known)
            raise ConfigError(f"{path}: unknown key; {hint}known keys here: {', '.join(map(repr, known))}")


def _homes(where: str, key: str, blocks: Mapping[str, Iterable[str]]) -> str:
    """A hint at all of `blocks` that have this key, with a space at its end; "" if none has it.

    Inside a block, "enable" has no hint: it is meant for this block, which cannot be switched off.
    """
    homes = [home for home, keys in blocks.items() if key in keys and not (where and key == "enable")]
    return f"it is a key of {' and of '.join(_written(home, key) for home in homes)}; " if homes else ""


def _written(where: str, key: str) -> str:
    """The path of a block, and the config in which `key` is in that block."""
    config = "{...}"
    for name in reversed((*where.split("."), key)):
        config = f"{{{name!r}: {config.replace('{...}', '...')}}}"
    return f"{where}: {config}"


def boolean(where: str, value: Any, others: str = "") -> bool:
    """`value`, if it is a bool. `others` says what else the key accepts."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: expected true or false{others}, got {shown(value)} ({type(value).__name__})")
    return value


def typed(where: str, value: Any, kind: type) -> None:
    """Refuses a value that is not of type `kind`, one of `kernel_table.OPTION_TYPES`; an int is a float too."""
    if kind is bool:
        boolean(where, value)
    elif isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ConfigError(f"{where}: expected {kind.__name__}, got {shown(value)} ({type(value).__name__})")


def count(where: str, value: Any, least: int) -> int:
    """`value`, if it is an int from `least` to `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        raise ConfigError(
            f"{where}: expected an integer of at least {least} and at most {LARGEST}, got {shown(value)} "
            f"({type(value).__name__})"
        )
    return value


def fraction(where: str, value: Any) -> float:
    """`value` as a float, if it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"{where}: expected a number from 0 to 1, got {shown(value)} ({type(value).__name__})")
    return float(value)


def choice(where: str, value: Any, choices: Sequence[str]) -> str:
    """`value`, if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"{where}: {shown(value)} is not one of {', '.join(choices)}; {hint}".rstrip("; "))
    return value


def one_of(where: str, value: Any, choices: Sequence[int]) -> int:
    """`value`, if it is one of these ints."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in choices:
        raise ConfigError(f"{where}: {shown(value)} is not one of {', '.join(map(str, choices))}")
    return value


def in_lines(names: Iterable[str]) -> str:
    """Names, separated by commas, in lines of at most 100 columns with an indent."""
    lines = textwrap.wrap(", ".join(names), 100, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), "  ")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that ends in a space, with the known word that is most like `word`; "" if none is like it."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f"did you mean {by_lower[matches[0]]!r}? " if matches else ""
