"""The configs that "auto" measures: those it begins with, and the changes of the best one that it tries.

Requests that replace nothing in the model are left out of a config, so two configs with the same replacements are one
choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fuseopt.auto.work import Kind
from fuseopt.config import JIT_BACKENDS, KERNEL_BACKENDS, Config, KernelFusion, extended
from fuseopt.kernel_table import CUSTOM, LISTS, TRITON, kernels, preset_config
from fuseopt.plan import Plan, build_plan
from fuseopt.strategies import STRATEGIES

_STRATEGY_OF = {CUSTOM: "kernels", TRITON: "triton"}

_BACKENDS = tuple(name for name in KERNEL_BACKENDS if name not in ("auto", "reference"))

Edit = Callable[[dict[str, Any]], object]
"""Changes a config, as JSON types, in place."""

NOTHING = Config(kernel_fusion=KernelFusion(enable=False))
"""The config of the stock model."""


@dataclass(frozen=True)
class Choice:
    """A config to measure, and what it fuses in a few words.

    Attributes:
        refused: number of replacements that do not run on the backend that the config asks for.
    """

    name: str
    config: Config
    refused: int = 0

    @property
    def compile_seconds(self) -> float:
        """An estimate of how long the compiler takes, which cannot be interrupted."""
        fusion = self.config.kernel_fusion
        if fusion.memory_efficient_fusion is not None:
            return 60.0
        return 15.0 if fusion.jit is not None and fusion.jit.backend == "inductor" else 0.0


class Choices:
    """What a model's plan offers for one kind of work.

    Args:
        model: stock.
        written: the blocks beside the preset "auto", which hold for every choice.
    """

    def __init__(self, model: nn.Module, kind: Kind, written: Mapping[str, Any]) -> None:
        self._model, self._kind, self._written = model, kind, written
        self._is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._seen: set[str] = set()

    def starts(self) -> Iterator[Choice]:
        """The presets and their parts, then every kernel alone."""
        if self._kind is Kind.TRAINING:
            preset = preset_config("training")
            compiled = {"memory_efficient_fusion": preset["kernel_fusion"]["memory_efficient_fusion"]}
            parts = {
                "training": preset,
                "memory_efficient_fusion": {"kernel_fusion": compiled},
                "kernels of training": _fusion(preset["kernel_fusion"], memory_efficient_fusion=False),
            }
        else:
            preset = preset_config("inference")
            loop = {"generation": preset["generation"]} if self._kind is Kind.GENERATE else {}
            parts = {
                "inference": {"kernel_fusion": preset["kernel_fusion"], **loop},
                **({"generation": {"kernel_fusion": {"enable": False}, **loop}} if loop else {}),
                "kernels of inference": _fusion(preset["kernel_fusion"]),
            }
        for name, base in parts.items():
            yield from self._new(name, base)
        for request, key, options in self._kernels():
            yield from self._new(request, _fusion({key: [{"name": request, **options}]}))
        for backend in JIT_BACKENDS:
            yield from self._new(f"jit {backend}", {"kernel_fusion": {"jit": {"backend": backend}}})

    def edits(self, best: Choice, slower: set[str]) -> Iterator[tuple[str, Edit]]:
        """Single changes of `best`, each with a few words for it: something left out, added or exchanged.

        Args:
            slower: names of starts that were measured as slower than stock, and are not added.
        """
        config = _editable(best.config)
        fusion = config["kernel_fusion"]
        requests = [(key, request) for key in LISTS for request in fusion[key]]
        there = {request["name"] for _, request in requests}
        if "generation" in config:
            yield "without generation", _without_generation
        for name in ("jit", "memory_efficient_fusion"):
            if fusion[name]:
                yield f"without {name}", functools.partial(_set, key=name, value=False)
        for key, request in requests:
            yield f"without {request['name']}", functools.partial(_exchange, key=key, name=request["name"])
        for name, key, options in self._kernels():
            if name not in slower | there:
                request = {"name": name, **options}
                yield f"with {name}", functools.partial(_exchange, key=key, name=name, by={key: request})
        for backend in JIT_BACKENDS:
            if f"jit {backend}" not in slower:
                yield f"jit {backend}", functools.partial(_set, key="jit", value={"backend": backend})
        for backend in _BACKENDS if fusion[CUSTOM] else ():
            yield f"backend {backend}", functools.partial(_set, key="backend", value=backend)
        for key, request in requests:
            yield from self._other_ways(key, request)

    def edited(self, best: Choice, what: str, edit: Edit) -> Choice | None:
        """`best` after one of `edits`; None if that replaces nothing, or what another choice replaces, or if a backend
        that it asks for cannot run.
        """
        config = _editable(best.config)
        edit(config)
        found = next(self._new(f"{best.name}, {what}", config), None)
        return None if found is None or found.refused > best.refused else found

    def _kernels(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Each kernel that may act in this work: its name, its first list, and the options that a preset passes."""
        trains = self._kind is Kind.TRAINING
        preset = "training" if trains else "inference"
        for kernel in kernels().values():
            if not (kernel.never_trains if trains else kernel.only_trains):
                yield kernel.name, next(iter(kernel.lists)), kernel.presets.get(preset, {})

    def _other_ways(self, key: str, request: Mapping[str, Any]) -> Iterator[tuple[str, Edit]]:
        """The same kernel by Triton alone, and with each of its Boolean options inverted."""
        name: str = request["name"]
        accepted = kernels()[name].lists
        if key == CUSTOM and TRITON in accepted:
            yield f"{name} by Triton", functools.partial(_exchange, key=key, name=name, by={TRITON: {"name": name}})
        for option, kind in accepted[key].items():
            if kind is bool and not (self._is_on_cpu and option in kernels()[name].gpu_options):
                value = not request.get(option, False)
                switched = {**request, option: value}
                yield f"{name} {option}={value}", functools.partial(_exchange, key=key, name=name, by={key: switched})

    def _new(self, name: str, base: Mapping[str, Any]) -> Iterator[Choice]:
        """The choice of that config, unless it replaces nothing, or what another choice replaces, or all of it would
        run on another backend than it asks for.
        """
        plan = build_plan(self._model, extended(base, self._written), STRATEGIES)
        acting = tuple(r for r in plan.replacements if self._kind is Kind.GENERATE or not _only_generates(r.request))
        config = effective(replace(plan, replacements=acting))
        found = sorted((r.sites[0].path, r.target, str(r.backend)) for r in acting)
        same = repr((found, replace(config, kernel_fusion=replace(config.kernel_fusion, backend="auto"))))
        refused = sum(r.refused is not None for r in acting)
        if same not in self._seen and refused < len(found):
            self._seen.add(same)
            yield Choice(name, effective(plan), refused)


def _only_generates(request: str) -> bool:
    """Whether `request`, a kernel's name or another strategy's, is a kernel that acts in `generate()` only."""
    kernel = kernels().get(request)
    return kernel is not None and kernel.only_generates


def effective(plan: Plan) -> Config:
    """The plan's config without its preset and without what replaces nothing."""
    done = {(r.strategy, r.request) for r in plan.replacements}
    strategies = {strategy for strategy, _ in done}
    fusion, generation = plan.config.active_fusion, plan.config.generation
    lists: dict[str, Any] = {
        key: tuple(request for request in getattr(fusion, key) if (_STRATEGY_OF[key], request.name) in done)
        for key in LISTS
    }
    fused: Any = replace(
        fusion,
        jit=fusion.jit if "jit" in strategies else None,
        memory_efficient_fusion=fusion.memory_efficient_fusion if "memory_efficient" in strategies else None,
        backend=fusion.backend if lists[CUSTOM] else "auto",
        **lists,
    )
    is_fused = any(strategy != "generation" for strategy in strategies)
    return Config(
        kernel_fusion=fused if is_fused else NOTHING.kernel_fusion,
        generation=generation if "generation" in strategies else None,
    )


def _fusion(block: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """A config of one `kernel_fusion` block without `jit`."""
    return {"kernel_fusion": {**block, "jit": False, **others}}


def _editable(config: Config) -> dict[str, Any]:
    """The config as JSON types, with every kernel request as a dict."""
    content = config.to_dict()
    for key in LISTS:
        content["kernel_fusion"][key] = [
            {"name": request} if isinstance(request, str) else request for request in content["kernel_fusion"][key]
        ]
    return content


def _without_generation(config: dict[str, Any]) -> None:
    config.pop("generation", None)


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    config["kernel_fusion"] |= {key: value, "enable": True}


def _exchange(config: dict[str, Any], key: str, name: str, by: Mapping[str, Any] | None = None) -> None:
    """Takes the kernel `name` out of the list `key`, and puts the requests of `by` into the lists that it names."""
    fusion = config["kernel_fusion"]
    fusion[key] = [request for request in fusion[key] if request["name"] != name]
    for other, request in (by or {}).items():
        fusion[other] = [*fusion[other], request]
        fusion["enable"] = True
