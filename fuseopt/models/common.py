"""Rules for classes that many families share: activations, torch.nn norms, and the RMSNorm classes of transformers."""

from fuseopt.models.gated_mlps import GATED_MLPS
from fuseopt.models.policy import ModelPolicy, Rule, modeling_name
from fuseopt.models.rotary_attentions import ROTARY_ATTENTIONS

_ACTIVATIONS = "transformers.activations"

# class -> (approximate, whether its Python formula is autocast to float32)
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


def rms_norm(cast_order: str, eps: str, *sources: str, offset: float = 0.0) -> tuple[Rule, ...]:
    """Rules for RMSNorm classes, by full name, with one cast order and eps attribute; see `ops.rms_norm`."""
    options = {"cast_order": cast_order, "eps": eps, "offset": offset}
    return tuple(Rule(source, "FusedRMSNorm", options) for source in sources)


_LLAMA_CLASSES = (
    "deepseek_v3.DeepseekV3RMSNorm",
    "glm4.Glm4RMSNorm",
    "granite.GraniteRMSNorm",
    "llama.LlamaRMSNorm",
    "mistral.MistralRMSNorm",
    "mixtral.MixtralRMSNorm",
    "phi3.Phi3RMSNorm",
    "qwen2.Qwen2RMSNorm",
    "qwen2_moe.Qwen2MoeRMSNorm",
    "qwen3.Qwen3RMSNorm",
    "qwen3_moe.Qwen3MoeRMSNorm",
    "smollm3.SmolLM3RMSNorm",
)
_WEIGHT_BEFORE_CAST_CLASSES = ("gpt_oss.GptOssRMSNorm", "olmo2.Olmo2RMSNorm", "olmo3.Olmo3RMSNorm")
_GEMMA_CLASSES = ("gemma.GemmaRMSNorm", "gemma2.Gemma2RMSNorm", "gemma3.Gemma3RMSNorm")
_TORCH_RMS_NORM = Rule(
    "torch.nn.modules.normalization.RMSNorm", "FusedRMSNorm", {"cast_order": "input", "eps": "eps", "autocasts": True}
)

_CAUSAL = ("llama.Llama", "mistral.Mistral", "qwen2.Qwen2", "qwen3.Qwen3")
# They hand logits to the loss as Llama does.
_HEADS = (*_CAUSAL, "gemma.Gemma", "phi3.Phi3")

COMMON = ModelPolicy(
    name="common",
    model_types=(),
    kernels=(
        *rms_norm("t5", "variance_epsilon", modeling_name("t5.T5LayerNorm")),
        *rms_norm("llama", "variance_epsilon", *map(modeling_name, _LLAMA_CLASSES)),
        *rms_norm("input", "variance_epsilon", *map(modeling_name, _WEIGHT_BEFORE_CAST_CLASSES)),
        *rms_norm("input", "eps", *map(modeling_name, _GEMMA_CLASSES), offset=1.0),
        _TORCH_RMS_NORM,
        LAYER_NORM,
        *GELU_KERNELS,
        SOFTMAX,
    ),
    regions=(*GATED_MLPS, *ACTIVATION_REGIONS),
    causal_attention=tuple(
        Rule(modeling_name(f"{name}Model"), "CausalStackForward", {"attention": modeling_name(f"{name}Attention")})
        for name in _CAUSAL
    ),
    heads=tuple(
        Rule(modeling_name(f"{name}ForCausalLM"), "FusedLinearCrossEntropy", {"head": "lm_head"}) for name in _HEADS
    ),
    rotary_attentions=ROTARY_ATTENTIONS,
)
