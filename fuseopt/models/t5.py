"""T5 v1.0 and v1.1 with any head, and families whose classes compute the same: mT5, UMT5, LongT5."""

from collections.abc import Iterable

from fuseopt.models.common import ACTIVATION_REGIONS, GELU_KERNELS, SOFTMAX
from fuseopt.models.gated_mlps import T5_MLPS
from fuseopt.models.policy import ModelPolicy, Rule, modeling_name
from fuseopt.models.rms_norms import T5_NORMS
from fuseopt.modules.children import t5_children

# model_type -> the prefix of its classes
_FAMILIES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "longt5": "LongT5"}
# Families whose blocks and stacks differ in name only. UMT5's and LongT5's blocks call their layers differently.
_SAME_BLOCKS = ("t5", "mt5")


def _full_names(suffix: str, models: Iterable[str] = _FAMILIES) -> tuple[str, ...]:
    return tuple(modeling_name(f"{model}.{_FAMILIES[model]}{suffix}") for model in models)


_BLOCKS = {
    modeling_name(f"{model}.{_FAMILIES[model]}Block"): t5_children(modeling_name(f"{model}.{_FAMILIES[model]}"))
    for model in _SAME_BLOCKS
}


def _residual_blocks(target: str) -> tuple[Rule, ...]:
    """Rules for blocks whose `target` does not call the forwards of their layers."""
    return tuple(
        Rule(source, target, reads={path: of for path, of in children[source].items() if path != "layer"})
        for source, children in _BLOCKS.items()
    )


T5 = ModelPolicy(
    name="t5",
    model_types=tuple(_FAMILIES),
    kernels=(*T5_NORMS, *GELU_KERNELS, SOFTMAX),
    regions=(*T5_MLPS, *ACTIVATION_REGIONS),
    # LongT5Attention is its full attention. Its local and transient-global ones compute their softmax differently.
    eager_attention=_full_names("Attention"),
    residual_blocks=_residual_blocks("fuseopt.blocks.residual.T5BlockForward"),
    dropout_add_blocks=_residual_blocks("fuseopt.blocks.dropout_add.T5DropoutAddForward"),
    inference_blocks=tuple(
        Rule(source, "fuseopt.blocks.t5_inference.T5InferenceForward", {"children": children})
        for source, children in _BLOCKS.items()
    ),
    stacks=tuple(
        Rule(source, "fuseopt.blocks.t5_inference.T5StackForward", {"blocks": "block"})
        for source in _full_names("Stack", _SAME_BLOCKS)
    ),
    # Their forward makes a torch.nn.CrossEntropyLoss.
    heads=tuple(
        Rule(source, "FusedLinearCrossEntropy", {"head": "lm_head", "traces": False})
        for source in _full_names("ForConditionalGeneration")
    ),
    # Not UMT5: each of its layers has a bias of its own.
    relative_attention=tuple(
        Rule(
            stack,
            "fuseopt.blocks.relative_attention.FusedRelativeAttention",
            {"attention": attention, "children": children},
        )
        for stack, attention, children in zip(
            _full_names("Stack", _SAME_BLOCKS), _full_names("Attention", _SAME_BLOCKS), _BLOCKS.values(), strict=True
        )
    ),
    decode_steps={
        modeling_name("t5.T5ForConditionalGeneration"): "fuseopt.generation.families.t5.T5Step",
        modeling_name("mt5.MT5ForConditionalGeneration"): "fuseopt.generation.families.mt5.MT5Step",
        modeling_name("umt5.UMT5ForConditionalGeneration"): "fuseopt.generation.families.mt5.UMT5Step",
    },
)
