"""Quantised copies of the weights that a decode step reads: which there are, and when they are made anew."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fuseopt.config import LowBitOptions
from fuseopt.generation.engine.layers import Linear
from fuseopt.ops.low_bit import LowBitWeight, dequantize, not_quantised_reason, quantize
from fuseopt.runtime.announcements import announce, is_bar_disabled
from fuseopt.runtime.written_values import sample


class LowBitChoice(NamedTuple):
    """Which of a step's linear layers are quantised.

    Attributes:
        layers: those that are.
        names: of their modules.
        kept: module -> why it is not.
    """

    layers: Sequence[Linear]
    names: Sequence[str]
    kept: dict[str, str]

    def __str__(self) -> str:
        """As the plan says it: how many, and the reasons, the most frequent first."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            by_reason.setdefault(reason, []).append(name)
        total = len(self.names) + len(self.kept)
        kept = (
            f"{names[0] if len(names) == 1 else f'{len(names)} such as {names[0]}'} not: {reason}"
            for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1]))
        )
        return "; ".join((f"{len(self.names)} of {total} linear layers", *kept))


def low_bit_choice(
    model: nn.Module, layers: Iterable[Linear], of_prompts: Iterable[Linear], options: LowBitOptions
) -> LowBitChoice:
    """Chooses among `layers` of a step of `model`. `of_prompts`: further layers, which no step runs.

    Layers that read the same input run as one, so they are quantised together or not at all.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    chosen, names, kept = [], [], {}
    for layer in layers:
        found = [paths.get(id(module), "?") for module in layer.sources]
        reason = _reason(layer, found, options)
        if reason is None:
            chosen.append(layer)
            names += found
        else:
            kept.update(dict.fromkeys(found, reason))
    for layer in of_prompts:
        kept.update((paths.get(id(module), "?"), "it runs once a prompt") for module in layer.sources)
    return LowBitChoice(chosen, names, kept)


def _reason(layer: Linear, paths: Sequence[str], options: LowBitOptions) -> str | None:
    """Why a layer is not quantised; None if it is."""
    if layer.low_rank is not None:
        return "it has LoRA adapters"
    if layer.weights[0].device.type == "cuda":
        return "kernels for weights in 8 or 4 bits run on a CPU"
    excluded = options.paths.left_out_reason(paths)
    if excluded is not None:
        return excluded.replace("it", paths[0], 1) if len(paths) > 1 and "names it" in excluded else excluded
    found = (not_quantised_reason(w.shape, w.dtype, options.bits, options.group) for w in layer.weights)
    return next(filter(None, found), None)


class QuantisedModule(NamedTuple):
    """A linear layer of the model that is quantised.

    Attributes:
        path: of the module.
        weights: [N, K] each, which together are the module's weight.
        low_bit: what each is quantised to.
        is_transposed: the module's weight is [K, N], as Conv1D has it.
    """

    path: str
    weights: tuple[Tensor, ...]
    low_bit: tuple[LowBitWeight, ...]
    is_transposed: bool

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The module's weight as the steps read it, in a new tensor."""
        weight = torch.cat([dequantize(part, dtype) for part in self.low_bit])
        return weight.T.contiguous() if self.is_transposed else weight


class LowBitWeights:
    """The quantised weights of one model's decode step. A weight that has not changed is not quantised again.

    A change is seen by a weight's address, its version and a sample of its values.

    Attributes:
        unquantised_bytes: of the weights that are quantised, each counted once.
    """

    def __init__(self, options: LowBitOptions) -> None:
        self.options = options
        self._made: dict[Hashable, LowBitWeight] = {}
        self._choice = LowBitChoice((), (), {})
        self.unquantised_bytes = 0

    def put_into(self, choice: LowBitChoice) -> None:
        """Sets `low_bit` of the layers of `choice`."""
        made: dict[Hashable, LowBitWeight] = {}
        begin, before, unquantised = time.perf_counter(), self._made, {}
        weights = [(layer, weight) for layer in choice.layers for weight in layer.weights]
        bar = tqdm(weights, "fuseopt quantises", unit="weight", leave=False, delay=1, disable=is_bar_disabled())
        options = self.options
        for _, weight in bar:
            key, unquantised[weight.data_ptr()] = _key(weight), weight.nbytes
            if key not in made:
                low = before.get(key)
                made[key] = quantize(weight, options.bits, options.group, options.symmetric) if low is None else low
        for layer in choice.layers:
            layer.low_bit = tuple(made[_key(weight)] for weight in layer.weights)
        count = len(made.keys() - before.keys())
        self._made, self._choice, self.unquantised_bytes = made, choice, sum(unquantised.values())
        if count:
            announce(f"quantised {count} weights to {options} in {time.perf_counter() - begin:.1f} s")

    def versions(self) -> tuple[Hashable, ...]:
        """Differs once a quantised weight has been written to."""
        return tuple(_content(weight) for layer in self._choice.layers for weight in layer.weights)

    def modules(self) -> Iterator[QuantisedModule]:
        names = iter(self._choice.names)
        for layer in self._choice.layers:
            share = len(layer.weights) // len(layer.sources)
            for index, source in enumerate(layer.sources):
                parts = slice(index * share, (index + 1) * share)
                weights = layer.weights[parts]
                is_transposed = weights[0].stride() != source.weight.stride()
                yield QuantisedModule(next(names), weights, layer.low_bit[parts], is_transposed)

    @property
    def quantised_bytes(self) -> int:
        return sum(low.nbytes for low in self._made.values())

    @property
    def made_as(self) -> str:
        """The options, if a weight is quantised, else ""."""
        return str(self.options) if self._made else ""

    def report_lines(self) -> Iterator[str]:
        if not self._made:
            return
        yield (
            f"weights in {self.options}: {self._choice}; {self.quantised_bytes / 2**20:.1f} MiB, beside "
            f"{self.unquantised_bytes / 2**20:.1f} MiB unquantised"
        )


def _key(weight: Tensor) -> Hashable:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device, _content(weight)


def _content(weight: Tensor) -> tuple[int | None, bytes]:
    """Differs once a weight on a CPU has been written to."""
    version = None if weight.is_inference() else weight._version
    return version, sample(weight).numpy().tobytes()
