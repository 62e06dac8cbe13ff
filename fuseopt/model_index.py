"""What a plan is made of: the modules of one model, and the places where each of them is set."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fuseopt.models import full_name
from fuseopt.module_paths import ModulePaths
from fuseopt.modules.base import has_hooks
from fuseopt.ops import backends

_LAST_TRANSFORMERS = (5, 23)
"""The last release whose models take the key-value cache as `past_key_values`."""
_WITHOUT_CACHE = {"_get_logits_processor", "_loss_function"}
"""Attributes of a model that no cache is passed to."""


@dataclass(frozen=True)
class Site:
    """A settable attribute of a module: `name` of `owner`; `path` is its full name from the model's root."""

    owner: nn.Module
    name: str
    path: str

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    @property
    def module_path(self) -> str:
        """Path of the module that is replaced, or whose attribute is set; "" for the model itself."""
        return self.path if self.name in self.owner._modules else self.path.rpartition(".")[0]

    @property
    def renamed_cache_reason(self) -> str | None:
        """Why nothing may be set here: a forward that takes its key-value cache as `cache`, as from transformers 5.24.

        A replacement that reads `past_key_values` would run without the cache, and compute something else.
        """
        version = getattr(sys.modules.get("transformers"), "__version__", "0.0")
        release = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if release <= _LAST_TRANSFORMERS or self.name in _WITHOUT_CACHE:
            return None
        child = self.owner._modules.get(self.name)
        module = self.owner if child is None else child  # an empty ModuleList is false
        if "cache" not in inspect.signature(type(module).forward).parameters:
            return None
        major, minor = _LAST_TRANSFORMERS
        return (
            f"transformers {version} passes the key-value cache as `cache`, and fuseopt reads `past_key_values`, as in "
            f"transformers up to {major}.{minor} (fix: pip install 'transformers<{major}.{minor + 1}')"
        )


@dataclass(frozen=True)
class Candidate:
    """A module, all of its sites, and the `only` and `exclude` of the config. The model itself has no sites."""

    module: nn.Module
    sites: tuple[Site, ...]
    paths: ModulePaths

    @property
    def class_name(self) -> str:
        return type(self.module).__name__

    @functools.cached_property
    def lineage(self) -> tuple[str, ...]:
        """The full names of the module's class and of its bases."""
        return tuple(map(full_name, type(self.module).__mro__))

    def is_exactly(self, source: str) -> bool:
        return self.lineage[0] == source

    def blocked_reasons(self) -> list[str]:
        """Why this module must not be replaced by anything."""
        hooks = ["it carries hooks, which expect the module they were registered on"] if has_hooks(self.module) else []
        return hooks + self.forward_blocked_reasons()

    def forward_blocked_reasons(self) -> list[str]:
        """Why its `forward` must not be replaced. Hooks are no obstacle: they run around a forward, stock or fused."""
        replaced = ["its forward has been replaced on the instance"] if "forward" in self.module.__dict__ else []
        return replaced + self.left_out_reasons()

    def left_out_reasons(self) -> list[str]:
        """Why the config does not let it be replaced."""
        reason = self.paths.left_out_reason([site.path for site in self.sites] or [""])
        return [] if reason is None else [reason]


class ModelIndex:
    """All candidates of a model, and the devices and dtype that a backend is chosen for. Made in one walk.

    A model without parameters and buffers runs on its input's device, so `devices` is then every device of the machine.
    """

    def __init__(self, model: nn.Module, paths: ModulePaths) -> None:
        self.model, self.root = model, Candidate(model, (), paths)
        tensors = list(itertools.chain(model.parameters(), model.buffers()))
        assumed = backends.assumed_gpu()
        if assumed is not None:
            self.devices: tuple[torch.device, ...] = (assumed,)
        else:
            self.devices = (tensors[0].device,) if tensors else _devices_of_machine()
        self.dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
        self.candidates = list(_candidates(model, paths))
        self._by_id = {id(candidate.module): candidate for candidate in self.candidates}
        self._by_class: dict[str, list[Candidate]] = {}
        for candidate in self.candidates:
            for name in candidate.lineage:
                self._by_class.setdefault(name, []).append(candidate)

    def candidate(self, module: nn.Module) -> Candidate:
        return self._by_id[id(module)]

    def of_class(self, source: str) -> list[Candidate]:
        """The candidates of the class with that full name, and of its subclasses."""
        return self._by_class.get(source, [])


def _devices_of_machine() -> tuple[torch.device, ...]:
    names = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple(map(torch.device, names))


def _candidates(model: nn.Module, paths: ModulePaths) -> Iterator[Candidate]:
    modules: dict[int, nn.Module] = {}
    sites: dict[int, list[Site]] = defaultdict(list)
    # Each module is visited once, even if it has several names: shared modules nested `depth` deep have 2 ** depth.
    for path, module in model.named_modules():
        modules[id(module)] = module
        for name, child in module._modules.items():
            if child is not None:
                sites[id(child)].append(Site(module, name, f"{path}.{name}" if path else name))
    for identity, module in modules.items():
        if module is not model:
            yield Candidate(module, tuple(sites[identity]), paths)
