"""The policy of every model that no other policy covers, and rules that families share."""

from fuseopt.models.decode_steps import DECODE_STEPS
from fuseopt.models.gated_mlps import GATED_MLPS
from fuseopt.models.lm_heads import LM_HEADS
from fuseopt.models.policy import ModelPolicy, Rule, modeling_name
from fuseopt.models.rms_norms import RMS_NORMS
from fuseopt.models.rotary_attentions import ROTARY_ATTENTIONS
from fuseopt.modules.children import llama_children

_ACTIVATIONS = "transformers.activations"

# class -> (approximate, whether autocast runs its Python formula in float32)
_GELUS = {
    f"{_ACTIVATIONS}.NewGELUActivation": ("tanh", True),
    f"{_ACTIVATIONS}.AccurateGELUActivation": ("tanh", True),
    f"{_ACTIVATIONS}.FastGELUActivation": ("tanh", False),
    f"{_ACTIVATIONS}.GELUTanh": ("tanh", False),
    f"{_ACTIVATIONS}.GELUActivation": ("none", False),
}
TANH_GELUS = tuple(source for source, (approximate, _) in _GELUS.items() if approximate == "tanh")
_TORCH_GELU = "torch.nn.modules.activation.GELU"

GELU_KERNELS = (
    *(
        Rule(source, "FusedGELU", {"approximate": approximate, "float32_under_autocast": upcast})
        for source, (approximate, upcast) in _GELUS.items()
    ),
    Rule(_TORCH_GELU, "FusedGELU"),
)
GELU_REGIONS = tuple(
    Rule(
        source,
        "FusedActivation",
        {"region": "gelu_tanh" if approximate == "tanh" else "gelu", "float32_under_autocast": upcast},
    )
    for source, (approximate, upcast) in _GELUS.items()
)
ACTIVATION_REGIONS = (
    *GELU_REGIONS,
    Rule(f"{_ACTIVATIONS}.QuickGELUActivation", "FusedActivation", {"region": "quick_gelu"}),
    Rule(f"{_ACTIVATIONS}.SiLUActivation", "FusedActivation", {"region": "silu"}),
    Rule("torch.nn.modules.activation.SiLU", "FusedActivation", {"region": "silu"}),
    Rule("torch.nn.modules.activation.ReLU", "FusedActivation", {"region": "relu"}),
)
LAYER_NORM = Rule("torch.nn.modules.normalization.LayerNorm", "FusedLayerNorm")
SOFTMAX = Rule("torch.nn.modules.activation.Softmax", "FusedSoftmax")
_TORCH_RMS_NORM = Rule(
    "torch.nn.modules.normalization.RMSNorm", "FusedRMSNorm", {"cast_order": "input", "eps": "eps", "autocasts": True}
)

_CAUSAL = ("llama.Llama", "mistral.Mistral", "qwen2.Qwen2", "qwen3.Qwen3")

COMMON = ModelPolicy(
    name="common",
    model_types=(),
    kernels=(*RMS_NORMS, _TORCH_RMS_NORM, LAYER_NORM, *GELU_KERNELS, SOFTMAX),
    regions=(*GATED_MLPS, *ACTIVATION_REGIONS),
    causal_attention=tuple(
        Rule(
            modeling_name(f"{name}Model"),
            "fuseopt.blocks.causal_attention.CausalStackForward",
            {"attention": modeling_name(f"{name}Attention")},
        )
        for name in _CAUSAL
    ),
    inference_blocks=tuple(
        Rule(
            modeling_name(f"{name}DecoderLayer"),
            "fuseopt.blocks.llama_inference.LlamaInferenceForward",
            {"children": llama_children(modeling_name(name))},
        )
        for name in _CAUSAL
    ),
    stacks=tuple(
        Rule(modeling_name(f"{name}Model"), "fuseopt.blocks.llama_inference.LlamaStackForward", {"blocks": "layers"})
        for name in _CAUSAL
    ),
    heads=LM_HEADS,
    rotary_attentions=ROTARY_ATTENTIONS,
    decode_steps=DECODE_STEPS,
)
