"""verify(): compares the fused model with the stock one on the user's inputs; the reference is a float64 copy."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fuseopt
from fuseopt import apply
from fuseopt.errors import printable

# The largest error allowed to the fused model, as a multiple of the stock model's error,
ERROR_FACTOR = 2.0
# or in units in the last place of the output's largest value, whichever is more.
FLOOR_ULPS = 2.0

# Calls of the fused model by device type, each compared: on a GPU later calls are captured as CUDA graphs.
_CALLS = {"cuda": 4}


@dataclass(frozen=True)
class Verification:
    """Result of `verify`, for the output tensor with the largest error relative to its tolerance.

    Attributes:
        output: name of the tensor, such as "logits".
        difference: largest absolute difference between the fused and the stock model.
        stock_error, fused_error: largest absolute difference of each model from the float64 reference.
        tolerance: largest `fused_error` allowed.
        tokens_agree: whether both models generate the same tokens; None if `verify` was not asked to generate.
        tokens_count: whether `ok` requires `tokens_agree`. True in float32 and float64; in half precision near-ties
            between two tokens are decided by the last bit.
        replaced: number of objects that the config replaced.
    """

    output: str
    difference: float
    stock_error: float
    fused_error: float
    tolerance: float
    tokens_agree: bool | None
    tokens_count: bool
    replaced: int

    @property
    def ok(self) -> bool:
        return self.fused_error <= self.tolerance and not (self.tokens_count and self.tokens_agree is False)

    def __str__(self) -> str:
        tokens = {None: "not generated", True: "the same", False: "not the same"}[self.tokens_agree]
        return (
            f"verify: {'ok' if self.ok else 'FAILED'}, {self.replaced} objects replaced\n"
            f"  {printable(self.output)}: fused differs from stock by {self.difference:.2e} at most\n"
            f"  error against float64: stock {self.stock_error:.2e}, fused {self.fused_error:.2e}, "
            f"allowed {self.tolerance:.2e}\n"
            f"  tokens: {tokens}"
        )


def verify(
    model: nn.Module, config: Any, inputs: Mapping[str, Any], *, generate: Mapping[str, Any] | None = None
) -> Verification:
    """Compares the stock and the fused model on `inputs` with a copy of the stock model that computes in float64.

    All three run in eval mode and without gradients, so parts of a config that act in training only are not checked.
    Afterwards the model is stock or fused as before. On a GPU the fused model runs four times, so that calls captured
    as CUDA graphs are compared too. The float64 copy needs memory for a second model, with 8 bytes per parameter.

    Args:
        model: on any device, in any floating-point dtype.
        config: as for `initialize`.
        inputs: keyword arguments of the model's forward, such as a tokenizer returns.
        generate: keyword arguments of `model.generate`. If given, both models also generate from `inputs`, greedily by
            default, with the same random seed.

    Raises:
        NotAModelError, ConfigError: as `initialize`.
        ValueError: the model returns no floating-point tensor.
    """
    fuseopt.plan(model, config)  # raises for a bad model or config before anything runs
    with apply.lock(model), apply.as_found_after(model):
        apply.put(model, None)
        with _evaluating(model), torch.no_grad():
            stock, stock_tokens = _outputs(model, inputs), _tokens(model, inputs, generate)
            reference = _run_in_float64(model, inputs)
            with fuseopt.fused(model, config):
                replaced = len(fuseopt.report(model).replaced)
                calls = max((_CALLS.get(parameter.device.type, 1) for parameter in model.parameters()), default=1)
                fused = [_outputs(model, inputs) for _ in range(calls)]
                fused_tokens = _tokens(model, inputs, generate)
    if not stock:
        raise ValueError(f"verify: {type(model).__name__} returned no floating-point tensor to compare")
    compared = [(name, _compare(stock[name], run.get(name), reference[name])) for run in fused for name in stock]
    worst, comparison = max(compared, key=lambda named: named[1].fused_error / named[1].tolerance)
    dtype = next(iter(model.parameters()), next(iter(stock.values()))).dtype
    return Verification(
        worst,
        **vars(comparison),
        tokens_agree=None if stock_tokens is None else torch.equal(stock_tokens, fused_tokens),
        tokens_count=dtype in (torch.float32, torch.float64),
        replaced=replaced,
    )


@dataclass(frozen=True)
class _Comparison:
    difference: float
    stock_error: float
    fused_error: float
    tolerance: float


def _compare(stock: Tensor, fused: Tensor | None, reference: Tensor) -> _Comparison:
    stock_error = _largest_difference(stock, reference)
    finite = reference[reference.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    info = torch.finfo(stock.dtype)
    tolerance = max(ERROR_FACTOR * stock_error, FLOOR_ULPS * info.eps * largest, info.tiny)
    if fused is None or fused.shape != stock.shape or fused.dtype != stock.dtype:
        return _Comparison(math.inf, stock_error, math.inf, tolerance)
    fused_error = _largest_difference(fused, reference)
    return _Comparison(_largest_difference(fused, stock), stock_error, fused_error, tolerance)


def _largest_difference(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    one, other = one.double(), other.double()
    # Equal infinities, and NaN on both sides, differ by 0; NaN on one side differs by infinity.
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf).max().item()


def _outputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return dict(_floating_tensors("output", model(**inputs)))


def _tokens(model: nn.Module, inputs: Mapping[str, Any], generate: Mapping[str, Any] | None) -> Tensor | None:
    if generate is None:
        return None
    prompt = {name: value for name, value in inputs.items() if name != "labels"}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        tokens = model.generate(**prompt, **{"do_sample": False, **generate})
    return getattr(tokens, "sequences", tokens)


def _run_in_float64(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    reference = copy.deepcopy(model).double()
    widened = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, dict(inputs))
    with _InFloat64():
        return _outputs(reference, widened)


class _InFloat64(TorchDispatchMode):
    """Turns casts to narrower floating dtypes into casts to float64: norms and softmaxes ask for float32 by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        narrow = (torch.float32, torch.float16, torch.bfloat16)
        args, kwargs = tree_map_only(
            torch.dtype, lambda dtype: torch.float64 if dtype in narrow else dtype, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _floating_tensors(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in nested mappings and sequences, with names. Other objects are skipped."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _floating_tensors(str(key), value)
    elif isinstance(output, (tuple, list)):
        for position, value in enumerate(output):
            yield from _floating_tensors(f"{name}[{position}]", value)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    flags = [
        functools.partial(operator.setitem, module.__dict__, "training", module.training) for module in model.modules()
    ]
    with apply.put_back_after(functools.partial(apply.run_at_once, flags)):
        model.eval()
        yield
