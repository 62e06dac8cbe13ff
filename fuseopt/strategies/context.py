"""ProposalContext: what a proposer is given, and how it states what it proposes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fuseopt.build import loader
from fuseopt.errors import BackendError
from fuseopt.model_index import ModelIndex, Site
from fuseopt.models import ModelPolicy
from fuseopt.ops import registry
from fuseopt.plan import Replacement, Skip


@dataclass(frozen=True)
class BackendChoice:
    """What runs a replacement on the model's device and in its dtype.

    Attributes:
        backend: shown in the plan; None if there is no choice.
        libraries: the native libraries that it needs.
        refused: why the backend that was asked for, or that fits the device best, will not run it.
        op: name of the op that the replacement calls; None if there is no choice or the model is on the meta device.
        wanted: the `backend` argument for the fused module, which passes it to the op in every call.
    """

    backend: str | None = None
    libraries: tuple[loader.Kind, ...] = ()
    refused: str | None = None
    op: str | None = None
    wanted: str = "auto"


def generating_site(index: ModelIndex, method: str) -> Site:
    """A method of the model whose `generate` decodes: that in a peft model, which calls it, or the model itself."""
    model = index.model
    base = model.get_base_model() if hasattr(type(model), "get_base_model") else model
    if not isinstance(base, nn.Module):
        base = model
    path = next((path for path, module in model.named_modules() if module is base), "")
    return Site(base, method, f"{path}.{method}" if path else method)


@dataclass(frozen=True)
class ProposalContext:
    """The model and its policy, who asks for what, and what will run it.

    Attributes:
        index: the model's modules.
        policy: the rules of the model's family.
        request: the config name that asks.
        strategy: the strategy's name.
        options: the options that the config gives with the name.
        configured: the backend that the config names.
        choice: what that comes to for this model.
    """

    index: ModelIndex
    policy: ModelPolicy
    request: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    configured: str = "auto"
    choice: BackendChoice = BackendChoice()

    @property
    def wanted(self) -> str:
        """The `backend` argument for a fused module."""
        return self.choice.wanted

    def for_op(self, op: str) -> ProposalContext:
        """The same, with the backend chosen for `op`.

        Raises:
            KeyError: there is no such op.
        """
        return dataclasses.replace(self, choice=choose_backend(op, self.configured, self.index))

    def skip(self, sites: tuple[Site, ...], source: str, target: str, reason: str) -> Skip:
        return Skip(sites, source, target, self.request, self.strategy, reason)

    def replacement(
        self,
        sites: tuple[Site, ...],
        source: str,
        target: str,
        reason: str,
        build: Callable[[], Any],
        claims: tuple[Site, ...] = (),
        requires: tuple[Site, ...] = (),
    ) -> Replacement:
        return Replacement(
            sites,
            source,
            target,
            self.request,
            self.strategy,
            reason,
            build,
            claims=claims,
            requires=requires,
            **vars(self.choice),
        )


def choose_backend(op_name: str, wanted: str, index: ModelIndex) -> BackendChoice:
    """What `wanted` comes to for the model's devices and dtype; "auto" if nothing of that name can run here."""
    if torch.device("meta") in index.devices:
        return BackendChoice(wanted, wanted=wanted)
    op = registry.get(op_name)
    refused = []
    try:
        choices = _choices(op, wanted, index)
    except BackendError as error:
        # In one line: a reason is a cell of the plan's table.
        wanted, refused = "auto", [" ".join(str(error).split())]
        choices = _choices(op, wanted, index)
    if wanted == "auto" and not refused:
        for device, choice in choices.items():
            if choice.backend != device:
                where = f"on {device}: " if len(choices) > 1 else ""
                refused.append(where + "; ".join(_passed_over(device, choice)))
    backends = {choice.backend for choice in choices.values()}
    libraries = tuple(kind for kind in loader.KINDS if kind in backends)
    # Where the device of the input decides between several, the plan can name none of them.
    backend = backends.pop() if len(backends) == 1 else wanted
    return BackendChoice(backend, libraries, "; ".join(refused) or None, op.name, wanted)


def _passed_over(device: str, choice: registry.Choice) -> list[str]:
    """Why the device's own backend, and each other one before the chosen, does not run."""
    language = {"cpu": "C++", "cuda": "CUDA"}.get(device, device)
    missing = [] if device in choice.refused else [f"no {language} kernel"]
    return missing + [f"{backend}: {'; '.join(reasons)}" for backend, reasons in choice.refused.items()]


def _choices(op: registry.Op, wanted: str, index: ModelIndex) -> dict[str, registry.Choice]:
    """The choice for each type of device that `wanted` can run on; BackendError where there is none."""
    choices, refusals = {}, []
    for device in index.devices:
        try:
            choices[device.type] = op.choose(wanted, device, [index.dtype], may_build=True)
        except BackendError as error:
            refusals.append(str(error))
    if not choices:
        raise BackendError("\n".join(dict.fromkeys(refusals)))
    return choices
