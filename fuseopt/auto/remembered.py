"""What "auto" measured on this machine, kept in `fuseopt.runtime.measured_files`: one file for a model.

A model is its class, config, modules, parameters, dtype and device; not its weights. The file has an entry for each
kind of call, and holds for one device, one set of versions, and the code of the user's own kernels.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fuseopt.auto.choices import effective
from fuseopt.build import loader
from fuseopt.extend.measured import sources_of_kernel, sources_of_op
from fuseopt.extend.own_op import registered
from fuseopt.kernel_table import kernels, own_kernels
from fuseopt.measurements import STOCK, Measurements
from fuseopt.models import full_name
from fuseopt.modules.base import has_hooks
from fuseopt.plan import Plan
from fuseopt.runtime import measured_files

# Keys of a config of transformers that do not change what is computed.
_IRRELEVANT = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
_IRRELEVANT |= {"bos_token_id", "eos_token_id", "pad_token_id"}


def load(model: nn.Module, work: str) -> Measurements | None:
    """What was measured for a stock model and a kind of call (`Work.key`); None if nothing was."""
    content = _all(model).get(work)
    try:
        return None if content is None else Measurements.from_dict({**content, "remembered": True})
    except (TypeError, KeyError):
        return None


def save(model: nn.Module, work: str, measured: Measurements) -> None:
    """Keeps what was measured, in place of what an earlier call measured.

    Raises:
        library_cache.CacheError, OSError: it cannot be written.
    """
    if measured_files.is_wanted():
        measured_files.save(_name(model), {**_all(model), work: measured.to_dict()})


def everything(model: nn.Module) -> Iterator[Measurements]:
    """What was measured for a stock model and any kind of call, by "auto" and by benchmarks."""
    for content in _all(model).values():
        with contextlib.suppress(TypeError, KeyError):
            yield Measurements.from_dict({**content, "remembered": True})


def expected(model: nn.Module, plan: Plan) -> Iterator[str]:
    """A line for each kind of call that was measured under the plan's config; `model` is stock."""
    config = None
    for measured in everything(model):
        config = config or json.loads(effective(plan).to_json())
        for choice in measured.choices:
            if choice.config == config and choice.speed_up is not None and choice.name != STOCK:
                origin = f"{measured.work}; {measured.source}, {measured.date}"
                yield f"expected: {choice.speed_up:.2f} times as fast as stock; {origin}"


def _all(model: nn.Module) -> Mapping[str, Any]:
    if not measured_files.is_wanted() or _device(model) not in ("cpu", "cuda"):
        return {}
    return measured_files.load(_name(model)) or {}


def _device(model: nn.Module) -> str:
    return next((p.device.type for p in itertools.chain(model.parameters(), model.buffers())), "cpu")


def _name(model: nn.Module) -> str:
    libraries = [f"{kind} {loader.state(kind).status in ('available', 'loaded')}" for kind in loader.KINDS]
    parts = [importlib.metadata.version("transformers"), *kernels(), *_own_code(), *libraries, *_described(model)]
    return measured_files.digest(_device(model), ["auto", *parts])


def _own_code() -> Iterator[str]:
    """The code of the user's kernels and ops: a changed one may be wrong, or right by now."""
    for kernel in own_kernels().values():
        yield from sources_of_kernel(kernel.proposer)
    for op in registered().values():
        yield from sources_of_op(op, op._kernels)


def _described(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        yield f"{path} {full_name(type(module))} {has_hooks(module)}"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.device.type} {parameter.requires_grad}"
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        content = {key: value for key, value in config.to_dict().items() if key not in _IRRELEVANT}
        yield repr((sorted(content.items()), getattr(config, "_attn_implementation", None)))
