"""Names of models on the command line: architectures, folders and model ids. Imports neither torch nor transformers."""

from __future__ import annotations

import re
from pathlib import Path

from fuseopt.bench.harness.sizes import ARCHITECTURES
from fuseopt.config_checks import in_lines, nearest
from fuseopt.errors import ConfigError

_MODEL_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def config_folder(source: str) -> Path | None:
    """The folder with the config.json of a model: `source` itself, or that of a model id in transformers' cache.

    Returns:
        None for the name of an architecture, which has no folder.

    Raises:
        ConfigError: `source` is none of these, and the message names the nearest name; or the id is not in the cache.
    """
    if source in ARCHITECTURES:
        return None
    if (Path(source) / "config.json").is_file():
        return Path(source)
    if not _MODEL_ID.fullmatch(source):
        hint = nearest(source, ARCHITECTURES)
        raise ConfigError(
            f"{source!r} is neither a folder with a config.json, nor a model id (owner/name), nor a name that fuseopt "
            f"knows; {hint}names:\n{in_lines(ARCHITECTURES)}"
        )
    return _cached_folder(source)


def _cached_folder(model_id: str) -> Path:
    """The folder of a model's config in transformers' cache. `from_pretrained` of a model id would open connections."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model_id, "config.json")
    except ValueError as error:  # an invalid name, such as one with two dots in a row
        raise ConfigError(f"{model_id!r} is neither a folder with a config.json, nor a model id: {error}") from error
    if not isinstance(found, str):
        raise ConfigError(
            f"the config.json of {model_id} is not in transformers' cache, and fuseopt downloads nothing; run "
            f"`hf download {model_id} config.json`, or give a folder that has one"
        )
    return Path(found).parent
