"""What `verify` runs: a forward, a training step with dropout off, generate(), and a copy that computes in float64."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fuseopt import apply

Tensors = dict[str, Tensor]
Run = Callable[[nn.Module, Mapping[str, Any]], Tensors]
LOSS = "loss"


def outputs(model: nn.Module, inputs: Mapping[str, Any]) -> Tensors:
    """The floating-point tensors that the forward returns, by name."""
    return dict(floating_tensors("output", model(**inputs)))


def training_step(model: nn.Module, inputs: Mapping[str, Any], seed: int = 0) -> Tensors:
    """The loss, under `LOSS`, and a copy of each parameter's gradient; `grad` is None before and after.

    Zeros stand for the gradient of a parameter on which the loss does not depend.
    The loss is that of the output. A model that returns none gets a sum of its outputs with random weights.
    """
    torch.manual_seed(seed)
    with torch.enable_grad():
        output = model(**inputs)
        loss = getattr(output, LOSS, None)
        if loss is None:
            loss = _weighted_sum(t for _, t in floating_tensors("output", output) if t.requires_grad)
        loss.backward()
    found = {LOSS: loss.detach().clone()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
            parameter.grad = None
    return found


def is_random(model: nn.Module, inputs: Mapping[str, Any], found: Tensors) -> bool:
    """Whether the training step that has found `found` last depends on random numbers."""
    states = _random_states(model)
    torch.manual_seed(0)
    if all(map(torch.equal, states, _random_states(model))):
        return False
    return not torch.equal(training_step(model, inputs, seed=1)[LOSS], found[LOSS])


def _random_states(model: nn.Module) -> list[Tensor]:
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, sorted(devices, key=str))]


def _weighted_sum(tensors: Iterable[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = ((t, torch.randn(t.shape, generator=generator, dtype=torch.float64)) for t in tensors)
    return torch.stack([(tensor.double() * weights.to(tensor.device)).mean() for tensor, weights in drawn]).sum()


def tokens(model: nn.Module, prompt: Mapping[str, Any], generate: Mapping[str, Any]) -> Tensor:
    """The token ids that `model.generate` returns: greedily by default, and from the seed 0."""
    torch.manual_seed(0)
    found = model.generate(**prompt, **{"do_sample": False, **generate})  # type: ignore[operator]
    return getattr(found, "sequences", found)


def in_float64(run: Run, model: nn.Module, inputs: Mapping[str, Any]) -> Tensors:
    """What `run` finds for a copy of `model` that computes in float64 throughout."""
    reference = copy.deepcopy(model).double()
    widened = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, dict(inputs))
    with _InFloat64():
        return run(reference, widened)


class _InFloat64(TorchDispatchMode):
    """Turns casts to narrower floating dtypes into casts to float64: norms and softmaxes ask for float32 by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        narrow = (torch.float32, torch.float16, torch.bfloat16)
        args, kwargs = tree_map_only(
            torch.dtype, lambda dtype: torch.float64 if dtype in narrow else dtype, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def floating_tensors(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in nested mappings and sequences, with names. Other objects are skipped."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from floating_tensors(str(key), value)
    elif isinstance(output, (tuple, list)):
        for position, value in enumerate(output):
            yield from floating_tensors(f"{name}[{position}]", value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, without gradients."""
    with _flags_kept(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[float]:
    """Training mode with every dropout rate at 0; yields the largest rate before.

    Modules in eval mode inside a model in training mode stay so.
    """
    with _flags_kept(model), _without_dropout(model) as rate:
        if not model.training:
            model.train()
        yield rate


def _flags_kept(model: nn.Module) -> Any:
    return _put_back(_item(module.__dict__, "training") for module in model.modules())


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Puts back random generators, gradients and buffers at the end; inside, no parameter has a gradient."""
    parameters = list(model.parameters())
    devices = {parameter.device for parameter in parameters if parameter.device.type == "cuda"}
    buffers = [(module._buffers, name) for module in model.modules() for name in module._buffers]
    steps = [functools.partial(setattr, parameter, "grad", parameter.grad) for parameter in parameters]
    steps += [_item(holder, name) for holder, name in buffers]
    kept = ((buffer, buffer.clone()) for holder, name in buffers if (buffer := holder[name]) is not None)
    steps += [functools.partial(buffer.data.copy_, before) for buffer, before in kept]
    with torch.random.fork_rng(devices=devices), _put_back(steps):
        for parameter in parameters:
            parameter.grad = None
        yield


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[float]:
    """Sets every dropout rate of `model` to 0 and yields the largest of them."""
    rates: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    for module in model.modules():
        names = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else ()
        for holder in (module, getattr(module, "config", None)):
            slots = getattr(holder, "__dict__", {})
            for name in (*names, *(name for name in slots if "drop" in name)):
                if isinstance(slots.get(name), float) and slots[name] > 0:
                    rates[id(slots), name] = slots, name
    largest = max((slots[name] for slots, name in rates.values()), default=0.0)
    with _put_back(_item(slots, name) for slots, name in rates.values()):
        for slots, name in rates.values():
            slots[name] = 0.0
        yield largest


def _item(holder: dict[str, Any], name: str) -> apply.Step:
    return functools.partial(operator.setitem, holder, name, holder[name])


def _put_back(steps: Iterable[apply.Step]) -> Any:
    """A context at whose end all of `steps` run."""
    return apply.put_back_after(functools.partial(apply.run_at_once, list(steps)))
