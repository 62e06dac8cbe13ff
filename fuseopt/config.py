"""Config: what the user asked for, validated key by key before fuseopt reads any model.

A config is given as a dict, JSON text, the path of a JSON file, the name of a preset, or a `Config`. OSLO's
`kernel_fusion` block (https://github.com/EleutherAI/oslo) is valid without changes. `kernel_table` has the kernels and
the presets.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fuseopt.config_checks import boolean, check_keys, choice, count, one_of
from fuseopt.config_file import read_json
from fuseopt.config_fusion import (
    AUTO,
    JIT_BACKENDS,
    KERNEL_BACKENDS,
    MEMORY_BACKENDS,
    JitOptions,
    KernelFusion,
    KernelRequest,
    MemoryEfficientOptions,
    kernel_fusion,
)
from fuseopt.errors import ConfigError
from fuseopt.kernel_table import CUSTOM, TRITON, listed, preset_config
from fuseopt.kernel_table import PRESETS as PRESET_NAMES
from fuseopt.module_paths import ModulePaths, patterns

__all__ = [
    "AUTO",
    "GROUPS",
    "JIT_BACKENDS",
    "KERNEL_BACKENDS",
    "MEMORY_BACKENDS",
    "Config",
    "GenerationOptions",
    "JitOptions",
    "KernelFusion",
    "KernelRequest",
    "LowBitOptions",
    "MemoryEfficientOptions",
    "as_written",
    "beside_auto",
    "extended",
]

GROUPS = (32, 64, 128)


_MEASURES = (
    "config: 'auto' measures the model on your inputs, which only fuseopt.initialize(model, 'auto', inputs=...) and "
    "`fuseopt report MODEL --config auto` do; fuseopt.report(model).config is then a config for everywhere else, and "
    "fuseopt.plan(model, 'auto') says what would be measured"
)


_BY_NAME = "; list kernels by name as in {'kernel_fusion': {'custom_cuda_kernels': ['FusedGELU']}}"


@dataclass(frozen=True)
class LowBitOptions:
    """How the weights that decode steps read are quantised.

    Attributes:
        bits: 8, with a scale for each output; or 4, with a scale for each output and group of inputs.
        group: number of neighbouring inputs that share a scale: 32, 64 or 128. With 4 bits only.
        symmetric: False gives each group of 4 bits a zero point too.
        exclude: modules to leave, by paths as in `kernel_fusion.exclude`, such as "lm_head".
        keep: where the unquantised weights are while steps read quantised copies: "device", or "cpu" for pinned host
            memory, from which the model's own forward moves them back. No effect on a CPU.
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    exclude: tuple[str, ...] = ()
    keep: str = "device"

    @property
    def paths(self) -> ModulePaths:
        """The modules that may be quantised."""
        return ModulePaths(exclude=self.exclude)

    def __str__(self) -> str:
        groups = f", groups of {self.group}" + ("" if self.symmetric else " with zero points")
        return f"int{self.bits}" + (groups if self.bits == 4 else "")


@dataclass(frozen=True)
class GenerationOptions:
    """The `generation` block with its defaults: the decode loop behind `generate()`.

    Attributes:
        enable: False leaves `generate()` unchanged.
        max_batch: calls with more rows (batch x num_return_sequences) run by transformers.
        max_length: calls that need a longer key-value cache, in tokens, run by transformers; None for no limit but the
            model's.
        max_graphs: number of captured steps kept, and on a GPU twice as many prompts. 0 captures none.
        cache_dtype: "int8" or "fp8" to keep keys and values in 8 bits, with a scale for each head and token; None for
            the model's dtype. (transformers' `cache_implementation` names a class of caches instead, for one call.)
        weights: "int8" or "int4" to decode with quantised copies of the weights, or a dict of options; None for the
            model's own.
        prefix_cache_mib: most MiB of keys and values of earlier prompts that later prompts with the same prefix reuse;
            0 keeps none.
    """

    enable: bool = True
    max_batch: int = 256
    max_length: int | None = None
    max_graphs: int = 8
    cache_dtype: str | None = None
    weights: LowBitOptions | None = None
    prefix_cache_mib: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The block as plain JSON types."""
        block = _plain(asdict(self))
        if self.weights is not None and self.weights.bits == 8:
            del block["weights"]["group"]
        return block


_BLOCKS: Mapping[str, Iterable[str]] = {
    "kernel_fusion": KernelFusion.__dataclass_fields__,
    "kernel_fusion.memory_efficient_fusion": MemoryEfficientOptions.__dataclass_fields__,
    "generation": GenerationOptions.__dataclass_fields__,
    "generation.weights": LowBitOptions.__dataclass_fields__,
}
"""The keys of each block of a config."""

_check_keys = functools.partial(check_keys, blocks=_BLOCKS)


@dataclass(frozen=True)
class Config:
    """A validated config.

    Attributes:
        kernel_fusion: what to fuse and how.
        generation: the decode loop behind `generate()`, or None for none.
        preset: the preset it extends, or None. `initialize` warns of a kernel that matches nothing in the model only if
            the preset does not ask for it too.
    """

    kernel_fusion: KernelFusion = field(default_factory=KernelFusion)
    generation: GenerationOptions | None = None
    preset: str | None = None

    @property
    def active_fusion(self) -> KernelFusion:
        """`kernel_fusion`, or a block that asks for nothing if `enable` is false."""
        return self.kernel_fusion if self.kernel_fusion.enable else KernelFusion(enable=False)

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
        """Reads and validates `source`; None means the preset "inference".

        Raises:
            ConfigError: something is wrong; the message names the key, the fault and the nearest valid value.
        """
        source = as_written(source)
        if isinstance(source, Config):
            return source
        if not isinstance(source, Mapping):
            raise ConfigError(
                f"config: expected a dict, a path to a JSON file, a preset ({', '.join((*PRESET_NAMES, AUTO))}) "
                f"or a fuseopt.Config, got {type(source).__name__}{_BY_NAME if isinstance(source, list) else ''}"
            )
        return _top_level(source)

    def to_dict(self) -> dict[str, Any]:
        """The complete config as plain JSON types. `Config.load` of the result is equal."""
        fusion = self.kernel_fusion
        memory = fusion.memory_efficient_fusion
        return {
            **({} if self.preset is None else {"preset": self.preset}),
            **({} if self.generation is None else {"generation": self.generation.to_dict()}),
            "kernel_fusion": {
                "enable": fusion.enable,
                "jit": {"backend": fusion.jit.backend} if fusion.jit else False,
                "memory_efficient_fusion": asdict(memory) if memory else False,
                "custom_cuda_kernels": [request.to_dict() for request in fusion.custom_cuda_kernels],
                "triton_kernels": [request.to_dict() for request in fusion.triton_kernels],
                "backend": fusion.backend,
                "only": list(fusion.only),
                "exclude": list(fusion.exclude),
            },
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text, which `Config.load` reads."""
        return json.dumps(self.to_dict(), indent=2)


def _plain(value: Any) -> Any:
    """`value` with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def as_written(source: Any) -> Any:
    """The dict that a preset's name, JSON text or the path of a JSON file stands for; anything else as it is.

    Raises:
        ConfigError: the file cannot be read, or something is wrong with the JSON.
    """
    if source is None:
        return {"preset": "inference"}
    if isinstance(source, str) and source in (*PRESET_NAMES, AUTO):
        return {"preset": source}
    return read_json(source) if isinstance(source, (str, os.PathLike)) else source


def beside_auto(source: Any) -> Mapping[str, Any] | None:
    """The blocks beside the preset "auto" in what `as_written` returned; None for a config without that preset.

    Raises:
        ConfigError: one of these blocks is wrong.
    """
    if not isinstance(source, Mapping) or source.get("preset") != AUTO:
        return None
    written = _blocks(source)
    _top_level({"preset": "inference", **written})
    return written


def extended(base: Mapping[str, Any], written: Mapping[str, Any]) -> Config:
    """The config `base`, changed by the blocks that `beside_auto` returned; both are dicts."""
    return _top_level(_merged(base, written))


def _top_level(source: Mapping[str, Any]) -> Config:
    if not source:
        raise ConfigError(
            "config: the dict is empty, so nothing would be done; give e.g. "
            "{'kernel_fusion': {'enable': True}}, or no config for the preset 'inference'"
        )
    _check_keys("", source, ("preset", "kernel_fusion", "generation"))
    if source.get("preset") == AUTO:
        raise ConfigError(_MEASURES)
    written = _blocks(source)
    for key, block in written.items():
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"{key}: expected true, false or a dict such as {{'enable': True}}, got {type(block).__name__}"
                f"{_BY_NAME if isinstance(block, list) else ''}"
            )
        if not block:
            raise ConfigError(f"{key}: the block is empty, so nothing would be done; e.g. {{'enable': True}}")
    preset = choice("preset", source["preset"], (*PRESET_NAMES, AUTO)) if "preset" in source else None
    blocks = written if preset is None else _merged(preset_config(preset), written)
    return Config(
        kernel_fusion=kernel_fusion(blocks["kernel_fusion"], _check_keys)
        if "kernel_fusion" in blocks
        else KernelFusion(),
        generation=_generation(blocks["generation"]) if "generation" in blocks else None,
        preset=preset,
    )


def _blocks(source: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks written beside the preset; a bool becomes a dict with that `enable`."""
    blocks = {key: block for key, block in source.items() if key != "preset"}
    return {key: {"enable": block} if isinstance(block, bool) else block for key, block in blocks.items()}


def _merged(preset: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's settings with those written beside it: dicts by key; lists and other values are replaced."""
    both = {
        key: _merged(preset[key], value)
        for key, value in written.items()
        if isinstance(value, Mapping) and isinstance(preset.get(key), Mapping)
    }
    return {**preset, **written, **both}


def _generation(block: Mapping[str, Any]) -> GenerationOptions:
    _check_keys("generation", block, tuple(GenerationOptions.__dataclass_fields__))
    default = GenerationOptions()
    length, cache_dtype = block.get("max_length", default.max_length), block.get("cache_dtype")
    is_plain = cache_dtype is None or cache_dtype is False
    prefix_mib = block.get("prefix_cache_mib", default.prefix_cache_mib)
    return GenerationOptions(
        enable=boolean("generation.enable", block.get("enable", default.enable)),
        max_batch=count("generation.max_batch", block.get("max_batch", default.max_batch), 1),
        max_length=None if length is None else count("generation.max_length", length, 1),
        max_graphs=count("generation.max_graphs", block.get("max_graphs", default.max_graphs), 0),
        cache_dtype=None if is_plain else choice("generation.cache_dtype", cache_dtype, ("int8", "fp8")),
        weights=_low_bit(block.get("weights")),
        prefix_cache_mib=0 if prefix_mib is False else count("generation.prefix_cache_mib", prefix_mib, 0),
    )


def _low_bit(value: Any) -> LowBitOptions | None:
    where, default = "generation.weights", LowBitOptions()
    if value is None or value is False:
        return None
    if isinstance(value, str):
        return LowBitOptions(bits=int(choice(where, value, ("int8", "int4"))[3:]))
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where}: expected false, 'int8', 'int4' or a dict such as {{'bits': 4, 'group': 64}}, "
            f"got {type(value).__name__}"
        )
    _check_keys(where, value, tuple(LowBitOptions.__dataclass_fields__))
    if "bits" not in value:
        raise ConfigError(f"{where}: the dict has no 'bits'; give 8 or 4")
    options = LowBitOptions(
        bits=one_of(f"{where}.bits", value["bits"], (8, 4)),
        group=one_of(f"{where}.group", value.get("group", default.group), GROUPS),
        symmetric=boolean(f"{where}.symmetric", value.get("symmetric", default.symmetric)),
        exclude=patterns(f"{where}.exclude", value.get("exclude", default.exclude)),
        keep=choice(f"{where}.keep", value.get("keep", default.keep), ("device", "cpu")),
    )
    if options.bits == 8 and "group" in value:
        raise ConfigError(f"{where}.group: 8 bits have one scale for each output; use 4 bits, or remove the key")
    if options.bits == 8 and not options.symmetric:
        raise ConfigError(f"{where}.symmetric: 8 bits have no zero points; use 4 bits, or remove the key")
    return options


def __getattr__(name: str) -> Any:
    """Tables that stood here in earlier versions."""
    if name == "PRESETS":
        table: dict[str, Any] = {preset: preset_config(preset) for preset in PRESET_NAMES}
    elif name in ("CUSTOM_KERNELS", "TRITON_KERNELS"):
        key = CUSTOM if name == "CUSTOM_KERNELS" else TRITON
        table = {kernel.name: tuple(kernel.lists[key]) for kernel in listed(key).values()}
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"fuseopt.config.{name} has moved to fuseopt.kernel_table", DeprecationWarning, stacklevel=2)
    return table
