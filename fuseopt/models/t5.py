"""T5 v1.0 and v1.1, every head, and the families that share its classes: mT5, UMT5, LongT5."""

from collections.abc import Iterable

from fuseopt.models.common import ACTIVATION_REGIONS, GELU_KERNELS, SOFTMAX
from fuseopt.models.gated_mlps import T5_MLPS
from fuseopt.models.policy import ModelPolicy, Rule, modeling_name
from fuseopt.models.rms_norms import T5_NORMS
from fuseopt.modules.children import t5_children

# model_type -> the prefix of its classes
_FAMILIES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "longt5": "LongT5"}
# Those whose blocks and stacks are the same but for their names.
_ALIKE = ("t5", "mt5")


def _full_names(suffix: str, models: Iterable[str] = _FAMILIES) -> tuple[str, ...]:
    return tuple(modeling_name(f"{model}.{_FAMILIES[model]}{suffix}") for model in models)


_BLOCKS = {
    modeling_name(f"{model}.{_FAMILIES[model]}Block"): t5_children(modeling_name(f"{model}.{_FAMILIES[model]}"))
    for model in _ALIKE
}


def _residual_blocks(target: str) -> tuple[Rule, ...]:
    """Rules for blocks whose `target` bypasses the forwards of their layers."""
    return tuple(
        Rule(source, target, reads={path: of for path, of in children[source].items() if path != "layer"})
        for source, children in _BLOCKS.items()
    )


T5 = ModelPolicy(
    name="t5",
    model_types=tuple(_FAMILIES),
    kernels=(*T5_NORMS, *GELU_KERNELS, SOFTMAX),
    regions=(*T5_MLPS, *ACTIVATION_REGIONS),
    # LongT5's local and transient-global attention have a softmax of their own; its full attention is the class named.
    eager_attention=_full_names("Attention"),
    # UMT5's and LongT5's blocks call their layers otherwise.
    residual_blocks=_residual_blocks("fuseopt.blocks.residual.T5BlockForward"),
    dropout_add_blocks=_residual_blocks("fuseopt.blocks.dropout_add.T5DropoutAddForward"),
    inference_blocks=tuple(
        Rule(source, "fuseopt.blocks.t5_inference.T5InferenceForward", {"children": children})
        for source, children in _BLOCKS.items()
    ),
    stacks=tuple(
        Rule(source, "fuseopt.blocks.t5_inference.T5StackForward", {"blocks": "block"})
        for source in _full_names("Stack", _ALIKE)
    ),
    # These call a torch.nn.CrossEntropyLoss.
    heads=tuple(
        Rule(source, "FusedLinearCrossEntropy", {"head": "lm_head", "traces": False})
        for source in _full_names("ForConditionalGeneration")
    ),
    # UMT5's layers each have a bias of their own.
    relative_attention=tuple(
        Rule(
            stack,
            "fuseopt.blocks.relative_attention.FusedRelativeAttention",
            {"attention": attention, "children": children},
        )
        for stack, attention, children in zip(
            _full_names("Stack", _ALIKE), _full_names("Attention", _ALIKE), _BLOCKS.values(), strict=True
        )
    ),
    decode_steps={modeling_name("t5.T5ForConditionalGeneration"): "fuseopt.generation.families.t5.T5Step"},
)
