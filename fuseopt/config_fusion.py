"""The block `kernel_fusion` of a config: its options, and the function that validates it. `config` re-exports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fuseopt.config_checks import boolean, choice, fraction, nearest, typed
from fuseopt.errors import ConfigError, shown
from fuseopt.kernel_table import CUSTOM, TRITON, kernels, listed
from fuseopt.module_paths import EVERYTHING, ModulePaths, module_paths

JIT_BACKENDS = ("torchscript", "inductor")
MEMORY_BACKENDS = ("inductor", "aot_eager")
AUTO = "auto"
KERNEL_BACKENDS = (AUTO, "cuda", "triton", "cpu", "reference")

CheckKeys = Callable[[str, Mapping[str, Any], Iterable[str]], None]
"""Call: where a block is, the block, the keys that it may have."""


@dataclass(frozen=True)
class JitOptions:
    """How the elementwise regions are compiled.

    Attributes:
        backend: "torchscript" (torch.jit.script) or "inductor" (torch.compile).
        implied: true if the config lists kernels and says nothing of `jit`; then no warning is given if there is
            nothing left to compile.
    """

    backend: str = "torchscript"
    implied: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class MemoryEfficientOptions:
    """How training steps are compiled.

    Attributes:
        budget: fraction of the activation bytes to keep, 0 to 1, relative to plain min-cut, which recomputes no
            matmul. Below 1, matmuls are recomputed too.
        backend: "inductor", or "aot_eager", which keeps the same activations and runs PyTorch's own kernels.
        cuda_graphs: True to launch steps on a GPU as CUDA graphs, False not to, "auto" if the GPU waits for the host.
    """

    budget: float = 1.0
    backend: str = "inductor"
    cuda_graphs: bool | str = AUTO


@dataclass(frozen=True)
class KernelRequest:
    """One entry of a kernel list: a name in the kernel table, and options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> str | dict[str, Any]:
        return {"name": self.name, **self.options} if self.options else self.name


@dataclass(frozen=True)
class KernelFusion:
    """The `kernel_fusion` block with its defaults; `only` and `exclude` are as in `ModulePaths`."""

    enable: bool = True
    jit: JitOptions | None = None
    memory_efficient_fusion: MemoryEfficientOptions | None = None
    custom_cuda_kernels: tuple[KernelRequest, ...] = ()
    triton_kernels: tuple[KernelRequest, ...] = ()
    backend: str = AUTO
    only: tuple[str, ...] = EVERYTHING
    exclude: tuple[str, ...] = ()

    @property
    def paths(self) -> ModulePaths:
        """The modules that may be replaced."""
        return ModulePaths(self.only, self.exclude)


def kernel_fusion(block: Mapping[str, Any], check_keys: CheckKeys) -> KernelFusion:
    """The validated block `kernel_fusion`.

    Args:
        check_keys: raises ConfigError for a key that a block does not have.

    Raises:
        ConfigError: something is wrong with the block.
    """
    check_keys("kernel_fusion", block, tuple(KernelFusion.__dataclass_fields__))
    memory_efficient = _memory_efficient(block.get("memory_efficient_fusion", False), check_keys)
    custom, triton = (_kernels(key, block.get(key, ()), check_keys) for key in (CUSTOM, TRITON))
    if "jit" in block:
        jit = _jit(block["jit"], check_keys)
    else:
        # As in OSLO, `enable: True` alone means JIT fusion. Compiled training steps include these regions.
        jit = None if memory_efficient else JitOptions(implied=bool(custom or triton))
    paths = module_paths(block)
    return KernelFusion(
        enable=boolean("kernel_fusion.enable", block.get("enable", True)),
        jit=jit,
        memory_efficient_fusion=memory_efficient,
        custom_cuda_kernels=custom,
        triton_kernels=triton,
        backend=choice("kernel_fusion.backend", block.get("backend", AUTO), KERNEL_BACKENDS),
        only=paths.only,
        exclude=paths.exclude,
    )


def _jit(value: Any, check_keys: CheckKeys) -> JitOptions | None:
    if isinstance(value, bool):
        return JitOptions() if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"kernel_fusion.jit: expected true, false or a dict such as {{'backend': 'inductor'}}, "
            f"got {type(value).__name__}"
        )
    check_keys("kernel_fusion.jit", value, ("backend",))
    return JitOptions(choice("kernel_fusion.jit.backend", value.get("backend", "torchscript"), JIT_BACKENDS))


def _memory_efficient(value: Any, check_keys: CheckKeys) -> MemoryEfficientOptions | None:
    where, default = "kernel_fusion.memory_efficient_fusion", MemoryEfficientOptions()
    if isinstance(value, bool):
        return default if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where}: expected true, false or a dict such as {{'budget': 0.5}}, got {type(value).__name__}"
        )
    check_keys(where, value, tuple(MemoryEfficientOptions.__dataclass_fields__))
    captured = value.get("cuda_graphs", default.cuda_graphs)
    if not (isinstance(captured, str) and captured == AUTO):
        captured = boolean(f"{where}.cuda_graphs", captured, f", or {AUTO!r}")
    return MemoryEfficientOptions(
        budget=fraction(f"{where}.budget", value.get("budget", default.budget)),
        backend=choice(f"{where}.backend", value.get("backend", default.backend), MEMORY_BACKENDS),
        cuda_graphs=captured,
    )


def _kernels(key: str, value: Any, check_keys: CheckKeys) -> tuple[KernelRequest, ...]:
    where = f"kernel_fusion.{key}"
    if isinstance(value, str) or not isinstance(value, Sequence):
        fix = f"; write [{value!r}]" if value in listed(key) else "; write [] for none"
        raise ConfigError(f"{where}: expected a list of kernel names, got {type(value).__name__}{fix}")
    requests = tuple(_kernel(f"{where}[{position}]", entry, key, check_keys) for position, entry in enumerate(value))
    names = [request.name for request in requests]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: {name!r} is listed {names.count(name)} times; list it once")
    return requests


def _kernel(where: str, entry: Any, key: str, check_keys: CheckKeys) -> KernelRequest:
    if isinstance(entry, Mapping):
        if "name" not in entry:
            raise ConfigError(f"{where}: a kernel given as a dict needs a name: {{'name': 'FusedGELU', ...}}")
        name, options = entry["name"], {key: value for key, value in entry.items() if key != "name"}
    else:
        name, options = entry, {}
    if not isinstance(name, str):
        raise ConfigError(f"{where}: expected the name of a kernel, got {type(name).__name__}")
    known = listed(key)
    if name not in known:
        if name in kernels():
            accepting = " or ".join(kernels()[name].lists)
            raise ConfigError(f"{where}: {name!r} is not built yet for this list; write it under {accepting}")
        raise ConfigError(f"{where}: unknown kernel {shown(name)}; {nearest(name, known)}known: {', '.join(known)}")
    types = known[name].lists[key]
    if options and not types:
        raise ConfigError(f"{where}: {name} takes no options, got {', '.join(map(shown, options))}")
    check_keys(where, options, types)
    for option, value in options.items():
        typed(f"{where}.{option}", value, types[option])
    return KernelRequest(name, options)
