"""Tables of config keys, from the dataclasses in `fuseopt.config` and the table of kernels."""

from __future__ import annotations

import dataclasses
import json
import re

from fuseopt.config import Config, GenerationOptions, KernelFusion, MemoryEfficientOptions
from fuseopt.kernel_table import PRESETS, kernels

LINKS = {
    "custom_cuda_kernels": "config.md#kernel-names",
    "triton_kernels": "config.md#kernel-names",
    "memory_efficient_fusion": "config.md#memory_efficient_fusion",
    "only": "config.md#only-and-exclude",
    "exclude": "config.md#only-and-exclude",
}


def _meanings(cls: type) -> dict[str, str]:
    """Name -> text, from the section "Attributes:" of a docstring."""
    text = (cls.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def _default(field: dataclasses.Field[object]) -> str:
    value = None if field.default is dataclasses.MISSING else field.default
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def option_table(block: str) -> str:
    """The keys of the block `generation` or `memory_efficient_fusion`, with defaults and meanings."""
    cls = {"generation": GenerationOptions, "memory_efficient_fusion": MemoryEfficientOptions}[block]
    meanings = _meanings(cls)
    rows = [f"| `{f.name}` | {_default(f)} | {meanings[f.name]} |" for f in dataclasses.fields(cls)]
    return "\n".join(("| key | default | meaning |\n|---|---|---|", *rows))


def kernel_fusion_table() -> str:
    """The keys of the block `kernel_fusion` with what each preset sets."""
    presets = {name: Config.load(name).to_dict()["kernel_fusion"] for name in PRESETS}

    def shown(value: object) -> str:
        if isinstance(value, list) and value and value != ["*"]:
            return f"{len(value)} kernels"
        return f"`{json.dumps(value)}`"

    rows = [
        f"| {f'[`{key}`]({LINKS[key]})' if key in LINKS else f'`{key}`'} | "
        + " | ".join(shown(block[key]) for block in presets.values())
        + " |"
        for key in KernelFusion.__dataclass_fields__
    ]
    head = " | ".join(f"preset `{name}`" for name in presets)
    return "\n".join((f"| key | {head} |\n|---{'|---' * len(presets)}|", *rows))


def kernel_table() -> str:
    """Every kernel name: the lists that accept it, with options, the op behind it, and the presets that ask for it."""
    rows = []
    for name, kernel in sorted(kernels().items()):
        lists = [
            f"`{key}`" + "".join(f", `{option}`: {kind.__name__}" for option, kind in options.items())
            for key, options in kernel.lists.items()
        ]
        presets = ", ".join(f"`{preset}`" for preset in kernel.presets) or "none"
        op = f"`{kernel.op}`" if kernel.op else ""
        rows.append(f"| `{name}` | {'; '.join(lists)} | {presets} | {op} |")
    return "\n".join(("| name | list, and options there | presets | op |\n|---|---|---|---|", *rows))
