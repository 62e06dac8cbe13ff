"""ModelPolicy: which modules of a model family may be replaced, as data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from fuseopt.dotted_path import imported
from fuseopt.generation.families.step_interface import StepName
from fuseopt.modules.base import full_name

REGION_TARGETS = ("FusedActivation", "FusedGatedMLP", "FusedMLP")
"""The targets that `ModelPolicy.regions` may name."""


def modeling_name(source: str) -> str:
    """ "t5.T5LayerNorm" -> "transformers.models.t5.modeling_t5.T5LayerNorm"."""
    model, _, name = source.partition(".")
    return f"transformers.models.{model}.modeling_{model}.{name}"


@dataclass(frozen=True)
class Rule:
    """Modules of exactly one class may be replaced by a fused module.

    Attributes:
        source: full name of the class, a string so that naming it imports nothing.
        target: the class that does the work instead, its dotted path, or its name in `fuseopt.modules`.
        options: keyword arguments for `target.from_module`.
        claims: names of the source's children whose work the target does too, so that no other replacement may have
            them. Called `absorbs` before; that name is still accepted, with a DeprecationWarning.
        reads: path of a module inside whose weights the target reads, or whose forward it bypasses -> full names of
            the classes that it may have.
    """

    source: str
    target: str | type
    options: Mapping[str, Any] = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absorbs: InitVar[tuple[str, ...] | None] = None

    def __post_init__(self, absorbs: tuple[str, ...] | None) -> None:
        if absorbs is not None:
            warnings.warn("Rule(absorbs=...) is now Rule(claims=...)", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "claims", absorbs)

    @property
    def target_name(self) -> str:
        """The target's class name without its module, shown in plans."""
        return self.target.__name__ if isinstance(self.target, type) else self.target.rpartition(".")[2]

    @property
    def target_class(self) -> Any:
        """The target's class, imported on first use.

        Raises:
            ImportError, AttributeError: there is none.
        """
        if not isinstance(self.target, str):
            return self.target
        return imported(self.target if "." in self.target else f"fuseopt.modules.{self.target}")

    def names(self, cls: type) -> bool:
        """True if `cls` is the source itself, not a subclass."""
        return full_name(cls) == self.source


def rules(
    sources: str, target: str | type, options: Mapping[str, Any], claims: tuple[str, ...] = ()
) -> tuple[Rule, ...]:
    """One rule for each class of transformers in `sources`, as "llama.LlamaMLP mistral.MistralMLP"."""
    return tuple(Rule(modeling_name(source), target, options, claims) for source in sources.split())


@dataclass(frozen=True)
class ModelPolicy:
    """What is known about a model family.

    Attributes:
        name: shown in the plan.
        model_types: the `config.model_type` values it covers; empty for the policy of last resort.
        kernels: rules behind the kernel names of a config (the target's name is the kernel's).
        regions: rules for the `jit` strategy; the feed-forward blocks among them serve kernels too.
        eager_attention: full names of the attention classes whose eager softmax can be fused.
        causal_attention: stacks that make a mask of padding for causal attentions; "attention" of `Rule.options` is the
            full name of these, `Rule.target` the class that tells them of padding.
        residual_blocks: blocks whose inner residual adds can be fused with the norm after them; `Rule.target` is the
            `fuseopt.blocks.residual` class that does it, exactly.
        dropout_add_blocks: likewise with the dropouts before the adds, by a class of `fuseopt.blocks.dropout_add`.
        inference_blocks: blocks that run without gradients past the forwards of the modules inside; `Rule.target` is
            the class that does it, `Rule.options` its own.
        stacks: classes whose forward calls such blocks one after the other, with the same arguments but for what each
            hands on; "blocks" of `Rule.options` names the ModuleList that they are in.
        heads: model classes whose logits go straight into a cross-entropy; `Rule.options` are those of the module that
            stands in for their head, and "head" is the path to it.
        relative_attention: stacks of layers whose self-attentions share one bias of the distance; "attention" of
            `Rule.options` is their full name.
        rotary_attentions: attentions whose queries and keys can be rotated by one op; `Rule.options` say what their
            forward does besides.
        decode_steps: full name of a model class -> the decode step that `generation` runs it by, a class that fulfils
            `fuseopt.generation.families.step_interface.DecodeStep` or its dotted path.
    """

    name: str
    model_types: tuple[str, ...]
    kernels: tuple[Rule, ...]
    regions: tuple[Rule, ...]
    eager_attention: tuple[str, ...] = ()
    causal_attention: tuple[Rule, ...] = ()
    residual_blocks: tuple[Rule, ...] = ()
    dropout_add_blocks: tuple[Rule, ...] = ()
    inference_blocks: tuple[Rule, ...] = ()
    stacks: tuple[Rule, ...] = ()
    heads: tuple[Rule, ...] = ()
    relative_attention: tuple[Rule, ...] = ()
    rotary_attentions: tuple[Rule, ...] = ()
    decode_steps: Mapping[str, StepName] = field(default_factory=dict)
