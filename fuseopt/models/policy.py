"""Rule and ModelPolicy: which modules of a model family may be replaced, as data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from fuseopt.dotted_path import imported
from fuseopt.generation.families.step_interface import StepName
from fuseopt.modules.base import full_name

REGION_TARGETS = ("FusedActivation", "FusedGatedMLP", "FusedMLP")
"""Names of the classes that a rule in `ModelPolicy.regions` may have as its target."""


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
    """One rule for each transformers class in `sources`, which is written as "llama.LlamaMLP mistral.MistralMLP"."""
    return tuple(Rule(modeling_name(source), target, options, claims) for source in sources.split())


@dataclass(frozen=True)
class ModelPolicy:
    """What may be replaced in the models of one family.

    Attributes:
        name: shown in the plan.
        model_types: the `config.model_type` values that it covers; empty for the policy of all other models.
        kernels: modules that a kernel replaces by a drop-in. The target's class has the kernel's name.
        regions: activations and feed-forwards that `jit` compiles. Kernels for feed-forwards read these rules too.
        eager_attention: full names of attention classes whose softmax can be fused when they run as "eager".
        causal_attention: stacks around causal attentions. The target passes the padding mask on to these; the option
            "attention" is the full name of their class.
        residual_blocks: blocks whose residual adds can be fused with the norm after them. The target is a class in
            `fuseopt.blocks.residual`.
        dropout_add_blocks: the same with the dropout before each add; targets in `fuseopt.blocks.dropout_add`.
        inference_blocks: blocks whose forward can run in inference without the forwards of the modules inside. The
            options are keyword arguments of the target.
        stacks: modules whose forward calls such blocks in a row, each with the output of the one before and otherwise
            the same arguments. The option "blocks" is the name of the ModuleList that holds the blocks.
        heads: model classes that use their logits for nothing but a cross-entropy and the output. The option "head" is
            the path of the head; the others are for the drop-in that replaces it.
        relative_attention: stacks whose self-attentions share one bias by relative position. The option "attention" is
            the full name of their class.
        rotary_attentions: attentions whose rotary embedding one op can compute. The options say what else their forward
            does.
        decode_steps: full name of a model class -> the decode step that `generation` runs for it: a class that fulfils
            `fuseopt.generation.families.step_interface.DecodeStep`, or its dotted path.
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
