"""Config: what the user asked for, validated key by key before any model is looked at.

Four sources are read: a dict, a path to a JSON file, the name of a preset, or a `Config`. OSLO's `kernel_fusion` block
(https://github.com/EleutherAI/oslo) is valid input as it stands.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fuseopt.errors import ConfigError, shown, shown_name
from fuseopt.kernel_table import CUSTOM, PRESETS, TRITON, kernels, listed, preset_block

JIT_BACKENDS = ("torchscript", "inductor")
MEMORY_BACKENDS = ("inductor", "aot_eager")
AUTO = "auto"
_MOST_DIGITS = 20
_LARGEST = 2**31 - 1
KERNEL_BACKENDS = (AUTO, "cuda", "triton", "cpu", "reference")

_NOT_BUILT = {
    "kernel_fusion.compile": "not built yet; use `jit: {'backend': 'inductor'}` for the elementwise regions, "
    "or call torch.compile(model) yourself after initialize",
}
_ELSEWHERE = {
    "model_parallelism": "fuseopt leaves parallelism to transformers: load with from_pretrained(..., tp_plan='auto') "
    "or device_map='auto'",
    "activation_checkpointing": "fuseopt leaves checkpointing to transformers: call "
    "model.gradient_checkpointing_enable()",
}


@dataclass(frozen=True)
class JitOptions:
    """How the elementwise regions are compiled.

    Attributes:
        backend: "torchscript" (torch.jit.script) or "inductor" (torch.compile).
        implied: taken by default beside kernels asked for by name, so that finding nothing left to do is no complaint.
    """

    backend: str = "torchscript"
    implied: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class MemoryEfficientOptions:
    """How training steps are compiled.

    Attributes:
        budget: of the activations, in bytes, that are kept when only what is cheap is recomputed: the part that may be
            kept, 0 to 1. Below 1 matmuls are recomputed too.
        backend: "inductor", or "aot_eager", which keeps as little without generating code.
        cuda_graphs: whether steps on a GPU are launched as CUDA graphs, or "auto" where it would wait for the host.
    """

    budget: float = 1.0
    backend: str = "inductor"
    cuda_graphs: bool | str = AUTO


@dataclass(frozen=True)
class KernelRequest:
    """One entry of a kernel list: a fused module by name, and its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> str | dict[str, Any]:
        return {"name": self.name, **self.options} if self.options else self.name


@dataclass(frozen=True)
class KernelFusion:
    """The `kernel_fusion` block, defaults filled in."""

    enable: bool = True
    jit: JitOptions | None = None
    memory_efficient_fusion: MemoryEfficientOptions | None = None
    custom_cuda_kernels: tuple[KernelRequest, ...] = ()
    triton_kernels: tuple[KernelRequest, ...] = ()
    backend: str = AUTO


@dataclass(frozen=True)
class GenerationOptions:
    """The `generation` block, defaults filled in: the decode loop behind `generate()`.

    Attributes:
        enable: False leaves `generate()` as it is.
        max_batch: rows (batch x num_return_sequences) up to which calls are served.
        max_length: slots of the key-value cache up to which calls are served.
        max_graphs: captured steps that are kept on a GPU, and twice as many prompts; 0 for none.
    """

    enable: bool = True
    max_batch: int = 256
    max_length: int = 4096
    max_graphs: int = 8


@dataclass(frozen=True)
class Config:
    """A validated config.

    Attributes:
        kernel_fusion: what to fuse and how.
        generation: the decode loop behind `generate()`, or None to leave that alone.
        preset: the preset it came from, or None. A preset asks for what applies; names the user wrote are owed, and
            `initialize` complains about those that land nowhere.
    """

    kernel_fusion: KernelFusion = field(default_factory=KernelFusion)
    generation: GenerationOptions | None = None
    preset: str | None = None

    @property
    def active_fusion(self) -> KernelFusion:
        """`kernel_fusion`, or one that asks for nothing where it is switched off."""
        return self.kernel_fusion if self.kernel_fusion.enable else KernelFusion(enable=False)

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
        """Reads and validates `source`; None means the preset "inference".

        Raises:
            ConfigError: naming the key, what is wrong with it, and the nearest thing that would be right.
        """
        if source is None:
            source = "inference"
        if isinstance(source, Config):
            return source
        if isinstance(source, str) and source in PRESETS:
            return cls(_kernel_fusion(preset_block(source)), preset=source)
        if isinstance(source, (str, os.PathLike)):
            return cls.load(_read_json(source))
        if not isinstance(source, Mapping):
            raise ConfigError(
                f"config: expected a dict, a path to a JSON file, a preset ({', '.join(PRESETS)}) or a fuseopt.Config, "
                f"got {type(source).__name__}"
            )
        return _top_level(source)

    def to_dict(self) -> dict[str, Any]:
        """The config as plain JSON types; `Config.load` of it gives an equal Config (but for `preset`)."""
        fusion = self.kernel_fusion
        memory = fusion.memory_efficient_fusion
        generation = {} if self.generation is None else {"generation": asdict(self.generation)}
        return {
            **generation,
            "kernel_fusion": {
                "enable": fusion.enable,
                "jit": {"backend": fusion.jit.backend} if fusion.jit else False,
                "memory_efficient_fusion": asdict(memory) if memory else False,
                "custom_cuda_kernels": [request.to_dict() for request in fusion.custom_cuda_kernels],
                "triton_kernels": [request.to_dict() for request in fusion.triton_kernels],
                "backend": fusion.backend,
            },
        }


def _read_json(source: str | os.PathLike[str]) -> Any:
    if not os.path.isfile(source):
        if str(source).lstrip().startswith(("{", "[")):
            raise ConfigError("config: this is JSON text; give the dict, json.loads(text), or the path of a file")
        raise ConfigError(
            f"config: {shown(source)} is neither a file nor a preset; {_nearest(str(source), PRESETS)}presets are "
            f"{', '.join(PRESETS)}"
        )
    path = shown_name(source)
    try:
        with open(source, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=_unique, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except _Unusable as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; a config has at most four levels") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected a JSON object at the top level, got {type(content).__name__}")
    return content


class _Unusable(Exception):
    """JSON that Python can parse but that is no valid config."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Unusable(f"the key {shown(key)} is there twice in one object; leave one of them out")
        found[key] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise _Unusable(f"a number of {len(digits)} digits; no value of a config is above {_LARGEST}")
    return int(digits)


def _top_level(source: Mapping[str, Any]) -> Config:
    if not source:
        raise ConfigError(
            "config: the dict is empty, so nothing would be done; ask for something, e.g. "
            "{'kernel_fusion': {'enable': True}}, or leave config out for the preset 'inference'"
        )
    _check_keys("", source, ("kernel_fusion", "generation"))
    for key, block in source.items():
        if not isinstance(block, Mapping):
            raise ConfigError(f"{key}: expected a dict, got {type(block).__name__}; e.g. {{'enable': True}}")
        if not block:
            raise ConfigError(f"{key}: the block is empty, so nothing would be done; e.g. {{'enable': True}}")
    return Config(
        kernel_fusion=_kernel_fusion(source["kernel_fusion"]) if "kernel_fusion" in source else KernelFusion(),
        generation=_generation(source["generation"]) if "generation" in source else None,
    )


def _generation(block: Mapping[str, Any]) -> GenerationOptions:
    _check_keys("generation", block, tuple(GenerationOptions.__dataclass_fields__))
    default = GenerationOptions()
    return GenerationOptions(
        enable=_boolean("generation.enable", block.get("enable", default.enable)),
        max_batch=_count("generation.max_batch", block.get("max_batch", default.max_batch), 1),
        max_length=_count("generation.max_length", block.get("max_length", default.max_length), 1),
        max_graphs=_count("generation.max_graphs", block.get("max_graphs", default.max_graphs), 0),
    )


def _kernel_fusion(block: Mapping[str, Any]) -> KernelFusion:
    _check_keys("kernel_fusion", block, tuple(KernelFusion.__dataclass_fields__))
    memory_efficient = _memory_efficient(block.get("memory_efficient_fusion", False))
    custom, triton = (_kernels(key, block.get(key, ())) for key in (CUSTOM, TRITON))
    if "jit" in block:
        jit = _jit(block["jit"])
    else:
        # `enable: True` alone means JIT fusion; AOT Autograd compiles the same regions itself.
        jit = None if memory_efficient else JitOptions(implied=bool(custom or triton))
    return KernelFusion(
        enable=_boolean("kernel_fusion.enable", block.get("enable", True)),
        jit=jit,
        memory_efficient_fusion=memory_efficient,
        custom_cuda_kernels=custom,
        triton_kernels=triton,
        backend=_choice("kernel_fusion.backend", block.get("backend", AUTO), KERNEL_BACKENDS),
    )


def _jit(value: Any) -> JitOptions | None:
    if isinstance(value, bool):
        return JitOptions() if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"kernel_fusion.jit: expected true, false or a dict such as {{'backend': 'inductor'}}, "
            f"got {type(value).__name__}"
        )
    _check_keys("kernel_fusion.jit", value, ("backend",))
    return JitOptions(_choice("kernel_fusion.jit.backend", value.get("backend", "torchscript"), JIT_BACKENDS))


def _memory_efficient(value: Any) -> MemoryEfficientOptions | None:
    where, default = "kernel_fusion.memory_efficient_fusion", MemoryEfficientOptions()
    if isinstance(value, bool):
        return default if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where}: expected true, false or a dict such as {{'budget': 0.5}}, got {type(value).__name__}"
        )
    _check_keys(where, value, tuple(MemoryEfficientOptions.__dataclass_fields__))
    captured = value.get("cuda_graphs", default.cuda_graphs)
    if not (isinstance(captured, str) and captured == AUTO):
        captured = _boolean(f"{where}.cuda_graphs", captured, f", or {AUTO!r}")
    return MemoryEfficientOptions(
        budget=_part(f"{where}.budget", value.get("budget", default.budget)),
        backend=_choice(f"{where}.backend", value.get("backend", default.backend), MEMORY_BACKENDS),
        cuda_graphs=captured,
    )


def _kernels(key: str, value: Any) -> tuple[KernelRequest, ...]:
    where = f"kernel_fusion.{key}"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{where}: expected a list of kernel names, got {type(value).__name__}")
    requests = tuple(_kernel(f"{where}[{position}]", entry, key) for position, entry in enumerate(value))
    names = [request.name for request in requests]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: {name!r} is listed {names.count(name)} times; list it once")
    return requests


def _kernel(where: str, entry: Any, key: str) -> KernelRequest:
    if isinstance(entry, Mapping):
        if "name" not in entry:
            raise ConfigError(f"{where}: a kernel given as a dict needs a 'name'")
        name, options = entry["name"], {key: value for key, value in entry.items() if key != "name"}
    else:
        name, options = entry, {}
    if not isinstance(name, str):
        raise ConfigError(f"{where}: expected the name of a kernel, got {type(name).__name__}")
    known = listed(key)
    if name not in known:
        if name in kernels():
            raise ConfigError(f"{where}: {name!r} is not built yet for this list; it takes {', '.join(known)}")
        raise ConfigError(f"{where}: unknown kernel {shown(name)}; {_nearest(name, known)}known: {', '.join(known)}")
    types = known[name].lists[key]
    if options and not types:
        raise ConfigError(f"{where}: {name} takes no options, got {', '.join(map(shown, options))}")
    _check_keys(where, options, types)
    for option, value in options.items():
        _option(f"{where}.{option}", value, types[option])
    return KernelRequest(name, options)


def _check_keys(where: str, block: Mapping[Any, Any], known: Iterable[str]) -> None:
    for key in block:
        name = shown_name(key)
        path = f"{where}.{name}" if where else name
        if path in _NOT_BUILT:
            raise ConfigError(f"{path}: {_NOT_BUILT[path]}")
        if path in _ELSEWHERE:
            raise ConfigError(f"{path}: {_ELSEWHERE[path]}")
        if key not in known:
            raise ConfigError(
                f"{path}: unknown key; {_nearest(name, known)}known keys here: {', '.join(map(repr, known))}"
            )


def _boolean(where: str, value: Any, others: str = "") -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: expected true or false{others}, got {shown(value)} ({type(value).__name__})")
    return value


def _option(where: str, value: Any, kind: type) -> None:
    if kind is bool:
        _boolean(where, value)
    elif isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ConfigError(f"{where}: expected {kind.__name__}, got {shown(value)} ({type(value).__name__})")


def _count(where: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise ConfigError(
            f"{where}: expected an integer of at least {least} and at most {_LARGEST}, got {shown(value)} "
            f"({type(value).__name__})"
        )
    return value


def _part(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"{where}: expected a number from 0 to 1, got {shown(value)} ({type(value).__name__})")
    return float(value)


def _choice(where: str, value: Any, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        hint = _nearest(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"{where}: {shown(value)} is not one of {', '.join(choices)}; {hint}".rstrip("; "))
    return value


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {matches[0]!r}? " if matches else ""
