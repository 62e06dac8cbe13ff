"""The table of kernels: one entry per kernel name of a config, and the only place that lists them.

`config` accepts the names and options in this table, builds the presets from it, and names them in its errors. The
strategies `kernels` and `triton` propose by it. A kernel from outside the package is an entry too; see
`register_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fuseopt.dotted_path import imported
from fuseopt.errors import ConfigError

CUSTOM, TRITON = "custom_cuda_kernels", "triton_kernels"
LISTS = (CUSTOM, TRITON)
"""The config keys that list kernels."""

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "inference": {"kernel_fusion": {"jit": True}, "generation": {"enable": True}},
    "training": {"kernel_fusion": {"memory_efficient_fusion": True}},
    "reference": {"kernel_fusion": {"jit": False, "backend": "reference"}},
}
"""Preset -> its config without the kernels."""

OPTION_TYPES = (bool, int, float, str)


@dataclass(frozen=True)
class Kernel:
    """One kernel name of a config.

    Attributes:
        name: as written in a config.
        propose: a function that takes a `strategies.context.ProposalContext` and yields a `plan.Replacement` or a
            `plan.Skip` for each candidate; or the dotted path of one, imported on first use.
        op: the op in `ops.registry` whose backends run the kernel; None if there is no choice of backends.
        lists: config list that accepts the name -> the options that it accepts there, with their types.
        presets: preset that asks for the kernel, in the first of `lists` -> the options that it passes.
        activations: the activations of a gated feed-forward that the kernel computes.
        order: kernels with a lower order claim modules first; those with the same order, in order of registration.
        only_trains: whether the kernel acts in training steps only, or on their loss; `verify` then runs one.
        never_trains: whether the kernel acts in calls without gradients only; "auto" does not try it for training.
        only_generates: whether the kernel acts in `generate()` only; "auto" tries it for no other call.
        gpu_options: options that have no effect on a CPU; "auto" does not try them there.
    """

    name: str
    propose: str | Callable[[Any], Any]
    op: str | None
    lists: Mapping[str, Mapping[str, type]]
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    order: int = 0
    only_trains: bool = False
    never_trains: bool = False
    only_generates: bool = False
    gpu_options: tuple[str, ...] = ()

    @property
    def proposer(self) -> Callable[[Any], Any]:
        """The function `propose`, imported if need be.

        Raises:
            ImportError, AttributeError: there is none at that path.
        """
        found: Callable[[Any], Any] = imported(self.propose) if isinstance(self.propose, str) else self.propose
        return found


_kernels: dict[str, Kernel] = {}


def register_kernel(kernel: Kernel) -> None:
    """Adds a kernel, which configs, presets and plans know from then on.

    Raises:
        ValueError: the name is taken, or the entry names a list, a preset, an option type or a function that does not
            exist.
    """
    problem = _problem(kernel)
    if problem is not None:
        raise ValueError(f"kernel {kernel.name!r}: {problem}")
    _kernels[kernel.name] = kernel


def unregister_kernel(name: str) -> None:
    """Removes a kernel that `register_kernel` added. Models that it was put into are not changed.

    Raises:
        ValueError: there is no such kernel, or it is the package's own.
    """
    if name not in _kernels or name in _BUILT_IN:
        known = [other for other in _kernels if other not in _BUILT_IN]
        raise ValueError(f"kernel {name!r} was not registered; registered: {', '.join(known) or 'none'}")
    del _kernels[name]


def kernels() -> dict[str, Kernel]:
    """Name -> kernel, in the order in which they claim modules."""
    return {kernel.name: kernel for kernel in sorted(_kernels.values(), key=lambda kernel: kernel.order)}


def own_kernels() -> dict[str, Kernel]:
    """Those of `kernels()` that `register_kernel` added."""
    return {name: kernel for name, kernel in kernels().items() if name not in _BUILT_IN}


def listed(key: str) -> dict[str, Kernel]:
    """Those of `kernels()` that the config list `key` accepts."""
    return {name: kernel for name, kernel in kernels().items() if key in kernel.lists}


def find_kernel(name: str) -> Kernel:
    """The kernel of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _kernels:
        raise ConfigError(f"unknown kernel {name!r}; known: {', '.join(kernels())}")
    return _kernels[name]


def preset_block(preset: str) -> dict[str, Any]:
    """The `kernel_fusion` block of a preset, as a config would write it."""
    block: dict[str, Any] = dict(PRESETS[preset]["kernel_fusion"])
    for kernel in kernels().values():
        if preset in kernel.presets:
            entry = {"name": kernel.name, **kernel.presets[preset]}
            block.setdefault(next(iter(kernel.lists)), []).append(entry if len(entry) > 1 else kernel.name)
    return block


def preset_config(preset: str) -> dict[str, Any]:
    """A preset as a config would write it."""
    return {**PRESETS[preset], "kernel_fusion": preset_block(preset)}


def _problem(kernel: Kernel) -> str | None:
    """Why the kernel cannot be registered; None if it can."""
    if not isinstance(kernel.name, str) or not kernel.name:
        return "the name must be a string"
    if kernel.name in _kernels:
        return "the name is taken" + ("; call unregister_kernel first" if kernel.name not in _BUILT_IN else "")
    if not kernel.lists:
        return f"it is in no list, so no config could name it; give one of {', '.join(LISTS)}"
    for key, options in kernel.lists.items():
        if key not in LISTS:
            return f"unknown list {key!r}; known are {', '.join(LISTS)}"
        for option, kind in options.items():
            if kind not in OPTION_TYPES or option == "name":
                return f"option {option!r} cannot have the type {kind!r}; known are bool, int, float and str"
    for option in kernel.gpu_options:
        if not any(option in options for options in kernel.lists.values()):
            return f"gpu_options names {option!r}, which no list accepts"
    accepted = next(iter(kernel.lists.values()))
    for preset, options in kernel.presets.items():
        if preset not in PRESETS:
            return f"unknown preset {preset!r}; known are {', '.join(PRESETS)}"
        for option in options:
            if option not in accepted:
                return f"preset {preset!r} passes the option {option!r}, which its first list does not accept"
    try:
        found = kernel.proposer
    except (ImportError, AttributeError) as error:
        return f"propose is {kernel.propose!r}, which cannot be imported: {error}"
    return None if callable(found) else f"propose is {kernel.propose!r}, which is not a function"


_STRATEGIES = "fuseopt.strategies"
_DROP_INS = f"{_STRATEGIES}.drop_ins"
_INFERENCE: Mapping[str, Mapping[str, Any]] = {"inference": {}, "reference": {}}
_PAYS: Mapping[str, Mapping[str, Any]] = {"training": {"where_it_pays": True}}

# A kernel for whole blocks stands before those for the activations inside.
_BUILT_IN = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "FusedRMSNorm",
            f"{_DROP_INS}.propose_norm",
            "rms_norm",
            {CUSTOM: {"fuse_residual": bool}, TRITON: {}},
            _INFERENCE,
        ),
        Kernel(
            "FusedLayerNorm",
            f"{_DROP_INS}.propose_norm",
            "layer_norm",
            {CUSTOM: {"fuse_residual": bool}, TRITON: {}},
            _INFERENCE,
        ),
        Kernel(
            "FusedGatedGELU",
            f"{_DROP_INS}.propose_gated_mlp",
            "gated_activation",
            {CUSTOM: {}, TRITON: {}},
            _INFERENCE,
            activations=("gelu", "gelu_tanh"),
        ),
        Kernel(
            "FusedSwiGLU",
            f"{_DROP_INS}.propose_gated_mlp",
            "gated_activation",
            {CUSTOM: {}, TRITON: {}},
            _INFERENCE,
            activations=("silu",),
        ),
        Kernel(
            "FusedGELU",
            f"{_DROP_INS}.propose_gelu",
            "gelu",
            {CUSTOM: {"fold_bias": bool}, TRITON: {"fold_bias": bool}},
            _INFERENCE,
        ),
        Kernel(
            "FusedAttention",
            f"{_STRATEGIES}.causal_attention.propose",
            "relative_attention",
            {TRITON: {"where_it_pays": bool}},
            _PAYS,
            only_trains=True,
        ),
        Kernel(
            "FusedRelativeAttention",
            f"{_STRATEGIES}.relative_attention.propose",
            "relative_attention",
            {TRITON: {"where_it_pays": bool}},
            _PAYS,
        ),
        Kernel("FusedRotaryEmbedding", f"{_STRATEGIES}.rotary_embedding.propose", "rotary_embedding", {TRITON: {}}),
        Kernel("FusedSoftmax", f"{_DROP_INS}.propose_softmax", "softmax", {CUSTOM: {}, TRITON: {}}, _INFERENCE),
        Kernel(
            "FusedBlock",
            f"{_STRATEGIES}.inference_blocks.propose",
            "add_layer_norm",
            {CUSTOM: {"cuda_graphs": bool}},
            _INFERENCE,
            never_trains=True,
            gpu_options=("cuda_graphs",),
        ),
        Kernel(
            "FusedDropoutAdd",
            f"{_STRATEGIES}.residual.propose_dropout_add",
            "dropout_add_layer_norm",
            {TRITON: {}},
            only_trains=True,
        ),
        Kernel(
            "FusedLinearCrossEntropy",
            f"{_STRATEGIES}.heads.propose_loss",
            "linear_cross_entropy",
            {TRITON: {}},
            {"training": {}},
            only_trains=True,
        ),
        Kernel("FusedCrossEntropy", f"{_STRATEGIES}.losses.propose", "cross_entropy", {TRITON: {}}, only_trains=True),
        Kernel(
            "FusedNoRepeatNGram",
            f"{_STRATEGIES}.logits_processors.propose",
            "no_repeat_ngram",
            {CUSTOM: {}},
            _INFERENCE,
            never_trains=True,
            only_generates=True,
        ),
        Kernel(
            "FusedLMHead", f"{_STRATEGIES}.heads.propose_inference", None, {CUSTOM: {}}, _INFERENCE, never_trains=True
        ),
    )
}
_kernels.update(_BUILT_IN)
