"""GPT-2 with any head (transformers.models.gpt2)."""

from fuseopt.models.common import ACTIVATION_REGIONS, GELU_KERNELS, LAYER_NORM, SOFTMAX, TANH_GELUS
from fuseopt.models.policy import ModelPolicy, Rule
from fuseopt.modules.children import CONV1D, GPT2_CHILDREN

_GPT2 = "transformers.models.gpt2.modeling_gpt2"

GPT2 = ModelPolicy(
    name="gpt2",
    model_types=("gpt2",),
    kernels=(LAYER_NORM, *GELU_KERNELS, SOFTMAX),
    regions=(
        Rule(f"{_GPT2}.GPT2MLP", "FusedMLP", claims=("act",), reads={"c_fc": (CONV1D,)}),
        *ACTIVATION_REGIONS,
    ),
    eager_attention=(f"{_GPT2}.GPT2Attention",),
    causal_attention=(
        Rule(
            f"{_GPT2}.GPT2Model",
            "fuseopt.blocks.causal_attention.CausalStackForward",
            {"attention": f"{_GPT2}.GPT2Attention"},
        ),
    ),
    residual_blocks=(Rule(f"{_GPT2}.GPT2Block", "fuseopt.blocks.residual.GPT2BlockForward"),),
    dropout_add_blocks=(
        Rule(
            f"{_GPT2}.GPT2Block",
            "fuseopt.blocks.dropout_add.GPT2DropoutAddForward",
            # The target defers their last dropout until they have returned, so nothing may come after it.
            reads=dict.fromkeys(("attn", "crossattention"), (f"{_GPT2}.GPT2Attention",)),
        ),
    ),
    inference_blocks=(
        Rule(
            f"{_GPT2}.GPT2Block",
            "fuseopt.blocks.gpt2_inference.GPT2InferenceForward",
            {"children": GPT2_CHILDREN, "tanh_gelus": TANH_GELUS},
        ),
    ),
    stacks=(Rule(f"{_GPT2}.GPT2Model", "fuseopt.blocks.gpt2_inference.GPT2StackForward", {"blocks": "h"}),),
    heads=(Rule(f"{_GPT2}.GPT2LMHeadModel", "FusedLinearCrossEntropy", {"head": "lm_head"}),),
    decode_steps={f"{_GPT2}.GPT2LMHeadModel": "fuseopt.generation.families.gpt2.GPT2Step"},
)
