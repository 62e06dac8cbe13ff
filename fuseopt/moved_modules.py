"""Import paths of earlier versions: each still imports, gives the new module's attributes, and warns.

`install` adds a finder to `sys.meta_path`. It is asked only for names that no file of the package answers to, so it
costs nothing for today's paths. Some old modules of `fuseopt.ops` share their name with a function there;
`keep_functions` puts those into `sys.modules` at once, because importing them later would set the function's name in
the package to the module.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

_HARNESS = (
    "architectures bytes_floor cuda_graph flops machine measure op_cases op_timing plot records regressions workloads"
)
_SUITES = "capacity curves demo first_call forward generate kernels ops scaling train tutorial"
_MOVED: Mapping[str, str] = {
    "fuseopt.native": "fuseopt.build.loader",
    "fuseopt.toolchain": "fuseopt.build.toolchain",
    "fuseopt.prebuilt": "fuseopt.build.prebuilt",
    "fuseopt.make_prebuilt": "fuseopt.build.make_prebuilt",
    "fuseopt.generation.logits_processors": "fuseopt.generation.select.logits_processors",
    "fuseopt.ops.beam_candidates": "fuseopt.ops.decode.beam_candidates",
    "fuseopt.ops.decode_attention": "fuseopt.ops.decode.attention",
    "fuseopt.ops.decode_beams": "fuseopt.ops.decode.beams",
    "fuseopt.ops.decode_embedding": "fuseopt.ops.decode.embedding",
    "fuseopt.ops.decode_head_select": "fuseopt.ops.decode.head_select",
    "fuseopt.ops.decode_linear": "fuseopt.ops.decode.linear",
    "fuseopt.ops.decode_linear_addends": "fuseopt.ops.decode.linear_partials",
    "fuseopt.ops.decode_qkv_attention": "fuseopt.ops.decode.qkv_attention",
    "fuseopt.ops.decode_select": "fuseopt.ops.decode.select",
    "fuseopt.ops.decode_softmax_linear": "fuseopt.ops.decode.softmax_linear",
    "fuseopt.ops.edit_logits": "fuseopt.ops.decode.edit_logits",
    "fuseopt.ops.prompt_attention": "fuseopt.ops.decode.prompt_attention",
    "fuseopt.bench.timer": "fuseopt.runtime.timer",
    "fuseopt.bench.harness.timer": "fuseopt.runtime.timer",
    "fuseopt.bench.cases": "fuseopt.bench.suites.demo_cases",
    "fuseopt.bench.continuations": "fuseopt.bench.suites.demo_continuations",
    **{f"fuseopt.bench.{name}": f"fuseopt.bench.harness.{name}" for name in _HARNESS.split()},
    **{f"fuseopt.bench.{name}": f"fuseopt.bench.suites.{name}" for name in _SUITES.split()},
}


def install() -> None:
    """Makes the old paths importable. Call it once."""
    sys.meta_path.append(_FINDER)


def keep_functions(package: ModuleType) -> None:
    """Keeps the functions of an imported `package` when old modules of the same names are imported later."""
    for old in _MOVED:
        parent, _, name = old.rpartition(".")
        if parent == package.__name__ and hasattr(package, name):
            sys.modules[old] = importlib.util.module_from_spec(_FINDER.find_spec(old))


def moved() -> Iterator[tuple[str, str]]:
    """Every old path with the new one."""
    yield from _MOVED.items()


class _MovedModule(ModuleType):
    """An old path: reading an attribute imports the new module and warns."""

    def __getattr__(self, name: str) -> Any:
        # Debuggers and compilers look for `__file__` and the like in every module; that imports nothing.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        new = _MOVED[self.__name__]
        warnings.warn(f"{self.__name__} has moved: import {new}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(new), name)


class _Loader(InspectLoader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MovedModule(spec.name, f"Moved to {_MOVED[spec.name]}.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: attributes are looked up in the new module."""

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs."""
        new = _MOVED[fullname]
        warnings.warn(f"{fullname} has moved: use python -m {new}", DeprecationWarning, stacklevel=2)
        spec = importlib.util.find_spec(new)
        assert spec is not None and isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(new)

    def get_source(self, fullname: str) -> None:
        return None


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        return ModuleSpec(fullname, _Loader(), origin=fullname) if fullname in _MOVED else None


_FINDER = _Finder()
