"""ModelPolicy: which modules of a model family may be replaced, as data."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        source: the class's full name, as a string so that naming it imports nothing.
        target: the class that does the work instead: itself, its dotted path, or its name in `fuseopt.modules`.
        options: keyword arguments for `target.from_module`.
        absorbs: names of the source's children whose work the target does itself, so that no other strategy may claim
            them too.
        reads: path of a module inside whose weights the target reads, or whose forward it bypasses -> full names of
            the classes that it may have.
    """

    source: str
    target: str | type
    options: Mapping[str, Any] = field(default_factory=dict)
    absorbs: tuple[str, ...] = ()
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

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
        return _class_at(self.target) if isinstance(self.target, str) else self.target

    def names(self, cls: type) -> bool:
        """Whether `cls` is the very class that the rule is about."""
        return full_name(cls) == self.source


@functools.cache
def _class_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module or "fuseopt.modules"), name)


def rules(
    sources: str, target: str | type, options: Mapping[str, Any], absorbs: tuple[str, ...] = ()
) -> tuple[Rule, ...]:
    """One rule for each class of transformers in `sources`, as "llama.LlamaMLP mistral.MistralMLP"."""
    return tuple(Rule(modeling_name(source), target, options, absorbs) for source in sources.split())


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
