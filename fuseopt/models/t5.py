"""T5 v1.0 and v1.1, every head, and the families that share its classes: mT5, UMT5, LongT5."""

from fuseopt.models.common import ACTIVATION_REGIONS, GELU_KERNELS, SOFTMAX, rms_norm
from fuseopt.models.gated_mlps import T5_MLPS
from fuseopt.models.policy import ModelPolicy, Rule, modeling_name

# model_type -> the prefix of its classes
_FAMILIES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "longt5": "LongT5"}
# Those whose blocks are the same but for their names.
_ALIKE = {model: _FAMILIES[model] for model in ("t5", "mt5")}


def _full_names(suffix: str) -> tuple[str, ...]:
    return tuple(modeling_name(f"{model}.{prefix}{suffix}") for model, prefix in _FAMILIES.items())


def _in_blocks(model: str, prefix: str) -> tuple[str, ...]:
    layers, inside = ("LayerSelfAttention", "LayerCrossAttention", "LayerFF"), ("Attention", "LayerNorm")
    return (
        *(
            modeling_name(f"{model}.{prefix}{name}")
            for name in (*layers, *inside, "DenseActDense", "DenseGatedActDense")
        ),
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.sparse.Embedding",
        "torch.nn.modules.dropout.Dropout",
        "torch.nn.modules.container.ModuleList",
    )


T5 = ModelPolicy(
    name="t5",
    model_types=tuple(_FAMILIES),
    kernels=(*rms_norm("t5", "variance_epsilon", *_full_names("LayerNorm")), *GELU_KERNELS, SOFTMAX),
    regions=(*T5_MLPS, *ACTIVATION_REGIONS),
    # LongT5's local and transient-global attention have a softmax of their own; its full attention is the class named.
    eager_attention=_full_names("Attention"),
    # UMT5's and LongT5's blocks call their layers otherwise.
    residual_blocks=tuple(
        Rule(source, "T5BlockForward") for source in map(modeling_name, ("t5.T5Block", "mt5.MT5Block"))
    ),
    # UMT5's layers each have a bias of their own, LongT5's have other attentions.
    inference_blocks=tuple(
        Rule(modeling_name(f"{model}.{prefix}Block"), "T5InferenceForward", {"classes": _in_blocks(model, prefix)})
        for model, prefix in _ALIKE.items()
    ),
    stacks=tuple(
        Rule(modeling_name(f"{model}.{prefix}Stack"), "T5StackForward", {"blocks": "block"})
        for model, prefix in _ALIKE.items()
    ),
    # These call a torch.nn.CrossEntropyLoss.
    heads=tuple(
        Rule(source, "FusedLinearCrossEntropy", {"head": "lm_head", "traces": False})
        for source in map(modeling_name, ("t5.T5ForConditionalGeneration", "mt5.MT5ForConditionalGeneration"))
    ),
    # UMT5's layers each have a bias of their own.
    relative_attention=tuple(
        Rule(modeling_name(stack), "FusedRelativeAttention", {"attention": modeling_name(attention)})
        for stack, attention in (("t5.T5Stack", "t5.T5Attention"), ("mt5.MT5Stack", "mt5.MT5Attention"))
    ),
    decode_steps={modeling_name("t5.T5ForConditionalGeneration"): "T5Step"},
)
