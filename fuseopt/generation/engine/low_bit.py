"""The low-bit weights of a decode step, quantised here or read from a pre-quantised checkpoint, and kept up to date."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseopt.config import LowBitOptions
from fuseopt.generation.engine.device_constants import version_of
from fuseopt.generation.engine.layers import Linear
from fuseopt.generation.engine.parked_weights import is_parked, park, parkable
from fuseopt.modules.quantised import UnreadableWeight, described
from fuseopt.ops import registry
from fuseopt.ops.backends import assumed_gpu
from fuseopt.ops.decode.packed_linear import LEAST_TRANSPOSED, LEAST_WITH_ATTENTION
from fuseopt.ops.low_bit import LowBitWeight, dequantize, not_quantised_reason, quantize
from fuseopt.ops.packed_weight import PackedWeight, not_packed_reason, pack_for_cuda, unpacked
from fuseopt.runtime.announcements import announce, bar
from fuseopt.runtime.written_values import ReadSamples, Samples

Stored = LowBitWeight | PackedWeight
"""A quantised weight in the layout that the kernels of its device read."""


class LowBitChoice(NamedTuple):
    """Which of a step's linear layers are quantised.

    Attributes:
        layers: the quantised layers.
        names: names of their modules.
        kept: name of a module that is not quantised -> the reason.
    """

    layers: Sequence[Linear]
    names: Sequence[str]
    kept: dict[str, str]

    def __str__(self) -> str:
        """Text for the plan: how many layers are quantised, then reasons against others, the most frequent first."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            by_reason.setdefault(reason, []).append(name)
        total = len(self.names) + len(self.kept)
        kept = (
            f"{names[0] if len(names) == 1 else f'{len(names)}, such as {names[0]},'} unchanged: {reason}"
            for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1]))
        )
        return "; ".join((f"{len(self.names)} of {total} linear layers", *kept))


def low_bit_choice(
    model: nn.Module,
    layers: Iterable[Linear],
    of_prompts: Iterable[Linear],
    with_attention: Iterable[Linear],
    options: LowBitOptions,
) -> LowBitChoice:
    """Chooses among `layers` of a step of `model`.

    Layers that read the same input run as one, so they are quantised together or not at all.

    Args:
        of_prompts: other layers, which run in prompts only.
        with_attention: the `layers` that a CUDA kernel may compute together with attention.
    """
    fused = {id(layer) for layer in with_attention}
    paths = {id(module): path for path, module in model.named_modules()}
    chosen, names, kept = [], [], {}
    for layer in layers:
        found = [paths.get(id(module), "?") for module in layer.sources]
        reason = _reason(layer, found, options)
        if reason is None and options.keep == "device":
            reason = no_gain_reason(layer, options.bits, id(layer) in fused)
        if reason is None:
            chosen.append(layer)
            names += found
        else:
            kept.update(dict.fromkeys(found, reason))
    for layer in of_prompts:
        kept.update((paths.get(id(module), "?"), "it runs only once per prompt") for module in layer.sources)
    return LowBitChoice(chosen, names, kept)


def _reason(layer: Linear, paths: Sequence[str], options: LowBitOptions) -> str | None:
    """The reason not to quantise a layer; None if it is quantised."""
    if layer.low_rank is not None:
        return "it has LoRA adapters"
    if layer.checkpoint:
        return f"it is pre-quantised ({layer.checkpoint[0].layout})"
    no_kernel = no_kernel_reason(layer)
    if no_kernel is not None:
        return no_kernel
    excluded = options.paths.left_out_reason(paths)
    if excluded is not None:
        return excluded.replace("it", paths[0], 1) if len(paths) > 1 and "names it" in excluded else excluded
    found = (not_quantised_reason(w.shape, w.dtype, options.bits, options.group) for w in layer.weights)
    return next(filter(None, found), None)


def no_gain_reason(layer: Linear, bits: int, is_with_attention: bool) -> str | None:
    """The reason why quantising a layer does not make a step on a GPU faster; None if it does."""
    weight = layer.weights[0]
    if not packs_on(_planned_device(layer)) or not weight.T.is_contiguous():
        return None
    if is_with_attention and (bits == 4 or weight.numel() < LEAST_WITH_ATTENTION):
        return "one kernel computes it and attention in 16 bits, which is faster"
    return None if min(weight.shape) >= LEAST_TRANSPOSED else "its kernel in 16 bits is as fast"


def no_kernel_reason(layer: Linear) -> str | None:
    """The reason why no kernel reads the layer's weights quantised on their device; None if one does."""
    device = _planned_device(layer)
    if not packs_on(device):
        return None
    choice = registry.get("decode_packed_linear").choose("auto", device, (layer.weights[0].dtype,), may_build=True)
    reason = "; ".join(choice.refused["cuda"]) if choice.backend == "reference" else ""
    return f"the CUDA kernel {reason}" if reason else not_packed_reason(layer.weights[0].shape[1])


def _planned_device(layer: Linear) -> torch.device:
    """The GPU that a plan is made for; without one, the device of the layer's weights."""
    return assumed_gpu() or layer.weights[0].device


def check_is_read(layer: Linear) -> None:
    """Raises UnreadableWeight for a pre-quantised layer that no kernel reads."""
    reason = no_kernel_reason(layer)
    if reason is not None:
        raise UnreadableWeight(f"is quantised ({layer.checkpoint[0].layout}): {reason}", layer.sources[0])


def packs_on(device: torch.device) -> bool:
    """Whether the kernels of a device read packed weights."""
    return device.type == "cuda"


class QuantisedModule(NamedTuple):
    """A linear layer of the model that is quantised.

    Attributes:
        path: of the module.
        weights: parts of the module's weight along its outputs, [N, K] each.
        low_bit: the quantised weight of each part, not packed.
        is_transposed: the module's weight is [K, N], as Conv1D has it.
    """

    path: str
    weights: tuple[Tensor, ...]
    low_bit: tuple[LowBitWeight, ...]
    is_transposed: bool

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weight of the module in `dtype`, [N, K], or [K, N] for a Conv1D; a new tensor."""
        weight = torch.cat([dequantize(part, dtype) for part in self.low_bit])
        return weight.T.contiguous() if self.is_transposed else weight


class LowBitWeights:
    """The low-bit weights of one model's decode step. A weight that has not changed is not quantised or read again.

    A changed weight has another address, another version or other sampled values.

    Args:
        options: how to quantise the model's weights; None to read pre-quantised weights only.

    Attributes:
        unquantised_bytes: bytes of the weights that `quantised_bytes` were made from, each counted once.
    """

    def __init__(self, options: LowBitOptions | None) -> None:
        self.options = options
        self._made: dict[Hashable, Stored] = {}
        self._read: dict[Hashable, tuple[Stored, ...]] = {}
        self._choice = LowBitChoice((), (), {})
        self._came: list[Linear] = []
        self._tensors: list[Tensor] = []
        self._samples: tuple[ReadSamples, ...] = ()
        self._transposed: list[bool] = []
        self._parameters: list[Tensor] = []
        self._parked: list[nn.Module] = []
        self.unquantised_bytes = 0

    def put_into(self, model: nn.Module, choice: LowBitChoice | None, linears: Iterable[Linear]) -> None:
        """Sets `low_bit` of the layers of `choice`, and of the pre-quantised layers of `linears`.

        With `keep: "cpu"` on a GPU, moves the Parameters of `choice` to host memory, except those that other modules of
        `model` also read.
        """
        self._choice = LowBitChoice((), (), {}) if choice is None else choice
        self._came = [layer for layer in linears if layer.checkpoint]
        self._read = self._read_all()
        self._made = self._quantise_all(model)
        tensors = self._park(model)
        tensors += [tensor for layer in self._came for part in layer.checkpoint for tensor in part.tensors]
        self._tensors = tensors
        by_device = ([tensor for tensor in tensors if tensor.is_cpu is is_cpu] for is_cpu in (True, False))
        self._samples = tuple(ReadSamples(Samples(these)) for these in by_device if these)

    def _read_all(self) -> dict[Hashable, tuple[Stored, ...]]:
        read: dict[Hashable, tuple[Stored, ...]] = {}
        for layer in self._came:
            check_is_read(layer)
            key = tuple((*map(_key, part.tensors), part.begin) for part in layer.checkpoint)
            if key not in read:
                read[key] = self._read.get(key) or tuple(
                    _stored(low, layer.weights[0]) for low in _alike([part.read() for part in layer.checkpoint])
                )
            layer.low_bit = read[key]
        return read

    def _quantise_all(self, model: nn.Module) -> dict[Hashable, Stored]:
        options, choice = self.options, self._choice
        made: dict[Hashable, Stored] = {}
        begin, before, sizes = time.perf_counter(), self._made, {}
        for layer in bar("fuseopt quantises", iterable=choice.layers, unit="layer", delay=1):
            assert options is not None
            low_bit = []
            for index, weight in enumerate(layer.weights):
                key, sizes[weight.data_ptr()] = _key(weight), weight.nbytes
                if options.keep == "cpu":
                    # The address of a Parameter changes when it moves to host memory and back.
                    key = (id(layer.sources[index * len(layer.sources) // len(layer.weights)].weight), index, *key[1:])
                if key not in made:
                    made[key] = before.get(key) or _stored(
                        quantize(weight, options.bits, options.group, options.symmetric), weight
                    )
                low_bit.append(made[key])
            layer.low_bit = tuple(low_bit)
            layer.has_unquantised = packs_on(layer.weights[0].device)
        self.unquantised_bytes = sum(sizes.values())
        count = len(made.keys() - before.keys())
        if count:
            announce(f"quantised {count} weights to {options} in {time.perf_counter() - begin:.1f} s")
        return made

    def _park(self, model: nn.Module) -> list[Tensor]:
        """Moves Parameters to host memory under `keep: "cpu"`. Returns the weights that stay on the device."""
        tensors: list[Tensor] = []
        self._transposed, self._parked = [], []
        layers = self._choice.layers if self.options is not None and self.options.keep == "cpu" else ()
        can_park = parkable(model, (source for layer in layers for source in layer.sources))
        for device in {source.weight.device for source in can_park if source.weight.is_cuda}:
            torch.cuda.synchronize(device)  # type: ignore[arg-type]  # Other streams may read what is freed below.
        for layer in self._choice.layers:
            weights = layer.weights
            self._transposed.append(weights[0].stride() != layer.sources[0].weight.stride())
            if layer.has_unquantised and can_park.issuperset(layer.sources):
                layer.weights = tuple(weight.new_full((), torch.nan).expand(weight.shape) for weight in weights)
                layer.has_unquantised = False
                for source in layer.sources:
                    park(source)
                self._parked += layer.sources
            else:
                tensors += weights
        # Referenced, so that no other Parameter gets the id of one of them.
        self._parameters = [source.weight for layer in layers for source in layer.sources]
        return tensors

    def versions(self) -> tuple[Hashable, ...]:
        """Versions and sampled values of the tensors that low-bit weights were made from; a write changes them.

        Waits for the device.
        """
        # A parked weight may come back to the device at any time, or another Parameter may take its place.
        weights: list[Any] = [layer.weight for layer in self._parked]
        parked = ((id(weight), *_content(weight)) for weight in weights)
        return (*parked, *map(version_of, self._tensors), *(samples.read() for samples in self._samples))

    @property
    def parked_bytes(self) -> int:
        """Bytes of the weights that are in host memory."""
        weights: list[Any] = [layer.weight for layer in self._parked if is_parked(layer)]
        return sum(weight.nbytes for weight in weights)

    @property
    def most_rows(self) -> int | None:
        """The most rows with which no product reads unquantised weights; None if none ever does."""
        layers = [layer for layer in self._choice.layers if layer.has_unquantised]
        slow = (layer.slow_low_bit_rows.start - 1 for layer in layers if layer.slow_low_bit_rows)
        return min((*slow, *(layer.most_low_bit_rows for layer in layers)), default=None)

    def modules(self) -> Iterator[QuantisedModule]:
        """The linear layers of the model that are quantised, without pre-quantised ones."""
        names = iter(self._choice.names)
        for layer, is_transposed in zip(self._choice.layers, self._transposed, strict=True):
            share = len(layer.low_bit) // len(layer.sources)
            for index, source in enumerate(layer.sources):
                stored = source.weight.detach()
                weights = (stored.T if is_transposed else stored).chunk(share)
                low_bit = tuple(map(unpacked, layer.low_bit[index * share : (index + 1) * share]))
                yield QuantisedModule(next(names), weights, low_bit, is_transposed)

    def saved_bytes(self, rows: int) -> int:
        """Bytes that products of `rows` rows read less than with unquantised weights."""
        layers = [layer for layer in self._choice.layers if layer.at(rows).low_bit]
        unquantised = sum(weight.nbytes for layer in layers for weight in layer.weights)
        return unquantised - sum(low.nbytes for layer in layers for low in layer.low_bit)

    @property
    def quantised_bytes(self) -> int:
        return sum(low.nbytes for low in self._made.values())

    @property
    def made_as(self) -> str:
        """The options, if a weight is quantised, else "". Pre-quantised weights do not count."""
        return str(self.options) if self._made else ""

    def report_lines(self) -> Iterator[str]:
        if self._came:
            parts = [part for layer in self._came for part in layer.checkpoint]
            stored = {tensor.data_ptr(): tensor.nbytes for part in parts for tensor in part.tensors}
            read = (low for those in self._read.values() for low in those)
            copies = {tensor.data_ptr(): tensor.nbytes for low in read for tensor in low.tensors}
            size = sum(copies[place] for place in copies.keys() - stored.keys()) / 2**20
            yield (
                f"{described(parts)}: {size:.1f} MiB of copies beside "
                f"{sum(stored.values()) / 2**20:.1f} MiB of the checkpoint's tensors"
            )
        if not self._made:
            return
        parked = f", of which {self.parked_bytes / 2**20:.1f} MiB in host memory" if self.parked_bytes else ""
        yield (
            f"weights in {self.options}: {self._choice}; {self.quantised_bytes / 2**20:.1f} MiB, beside "
            f"{self.unquantised_bytes / 2**20:.1f} MiB unquantised{parked}"
        )


def _alike(weights: Sequence[LowBitWeight]) -> tuple[LowBitWeight, ...]:
    """`weights`; if only some have zero points, the others get zero points of 8, which change no value."""
    if len({low.zeros is None for low in weights}) == 1:
        return tuple(weights)
    return tuple(
        low._replace(zeros=torch.full_like(low.scales, 8, dtype=torch.uint8)) if low.zeros is None else low
        for low in weights
    )


def _stored(low: LowBitWeight, weight: Tensor) -> Stored:
    """The quantised weight as kernels on the device of `weight`, for inputs of its dtype, read it."""
    return pack_for_cuda(low, weight.dtype) if packs_on(weight.device) else low


def _key(weight: Tensor) -> tuple[Hashable, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device, _content(weight)


def _content(weight: Tensor) -> tuple[int | None, bytes]:
    """Version of a weight, and its sampled values: what a write changes."""
    samples = Samples([weight])
    samples.join()
    return version_of(weight), samples.values()
