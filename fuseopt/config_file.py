"""Reading a config from JSON text or a JSON file.

It may come from anyone: whatever is wrong with it, the message is short.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from fuseopt.config_checks import LARGEST, nearest
from fuseopt.errors import ConfigError, shown, shown_name
from fuseopt.kernel_table import PRESETS

_MOST_DIGITS = 20


def read_json(source: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The JSON object in the file `source`, or in the text `source`, which then starts with a bracket.

    Raises:
        ConfigError: the file is missing, cannot be read, or is not JSON; or it has a key twice in one object or a
            number of more than 20 digits.
    """
    is_file = os.path.isfile(source)
    text = source if isinstance(source, str) and source.lstrip().startswith(("{", "[")) else None
    if not is_file and text is None:
        known = (*PRESETS, "auto")
        raise ConfigError(
            f"config: {shown(source)} is neither a file nor a preset; {nearest(str(source), known)}presets are "
            f"{', '.join(known)}"
        )
    path = shown_name(source) if is_file else "config"
    try:
        content = json.loads(
            _read(source) if is_file or text is None else text, object_pairs_hook=_unique, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except _Unusable as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; a config has at most four levels") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected a JSON object at the top level, got {type(content).__name__}")
    return content


def _read(path: str | os.PathLike[str]) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


class _Unusable(Exception):
    """JSON that Python can parse but that no config may contain."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Unusable(f"the key {shown(key)} is there twice in one object; remove one of them")
        found[key] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise _Unusable(f"a number of {len(digits)} digits; no value of a config is above {LARGEST}")
    return int(digits)
